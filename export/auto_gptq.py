"""A folder in AutoGPTQ's layout, which GPTQModel, transformers and vLLM open: the checkpoint's codes in int32 words.

Leaves out their act-order with a g_idx of its own: groups are consecutive here. strop opens the folder that it wrote
and runs what is in it in PyTorch, dequantized: quality and size are the folder's, speed and memory PyTorch's.

Legend: Q (out, in) unsigned codes, z (out, groups) unsigned zero points, s (out, groups) scales; W = (Q - z) · s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from strop.artifact import Artifact, Format
from strop.errors import UserError
from strop.program import Program, Traits
from strop.spec import Linear, ModelSpec, Quantization
from strop.stage import Context, Plan, Stage

if TYPE_CHECKING:
    from strop.model import Weights

Words = NDArray[np.int32]
Codes = NDArray[np.uint8]
WORD = 32
QUANTIZE_CONFIG = "quantize_config.json"
WRITTEN_PER_SECOND = 1e8
"""Bytes, for estimates."""


class AutoGptq(Stage):
    """Write a folder in the layout of AutoGPTQ (`checkpoint_format` gptq; gptq_v2 where codes are asymmetric).

    Every linear of the layers must have the same bits, groups and symmetry, and the head must not be quantized: the
    layout has one setting for all. So the parent has no row of its own.
    """

    gives: ClassVar[Format] = "program"
    lowers_parent: ClassVar[bool] = False

    def plan(self, spec: ModelSpec, num_calibration_tokens: int) -> Plan:  # noqa: ARG002 (the contract of a stage)
        """See `Stage.plan`."""
        _setting(spec)
        largest = max(x.in_features * x.out_features for x in spec.linears())
        size = _size_bytes(spec)
        notes = (
            "read back and run in PyTorch: the row's quality and size are the folder's, its speed is not GPTQModel's",
        )
        return Plan(spec, size, 16 * largest, size / WRITTEN_PER_SECOND, notes)

    def run(self, source: Artifact, out: Path, context: Context) -> dict[str, Any]:
        """See `Stage.run`."""
        from strop.model import CONFIG, Weights, copy_companions, read_config, read_spec
        from strop.safetensors_file import Piece, write_json, write_tensors

        spec = read_spec(source.path)
        settings = quantize_config(_setting(spec))
        with Weights(source.path) as weights:
            pieces = {
                name: Piece(dtype, shape, partial(_content, weights, name, linear, dtype))
                for name, dtype, shape, linear in _stored(spec)
            }
            write_tensors(out, pieces)
        config = {
            k: v
            for k, v in read_config(source.path).items()
            if k not in ("torch_dtype", "auto_map", "compression_config")
        }
        method = {"quant_method": "gptq", **settings}
        write_json(out / CONFIG, config | {"dtype": spec.dtype, "quantization_config": method})
        write_json(out / QUANTIZE_CONFIG, settings)
        copy_companions(source.path, out)
        traits = Traits(
            runtime="auto_gptq",
            dtype=spec.dtype,
            threads=context.threads,
            device="cpu",
            context=spec.max_positions,
            vocab_size=spec.vocab_size,
            takes_trees=True,
            kernels=f"torch {version('torch')} on qweight dequantized",
        )
        return {"spec": spec, "traits": traits, "report": {"checkpoint_format": settings["checkpoint_format"]}}

    @staticmethod
    def load(path: Path, traits: Traits) -> Program:
        """Open the folder that `run` wrote, dequantized. Sets torch's threads for the whole process."""
        import torch

        from strop.export.eager import DecoderProgram
        from strop.layers import Decoder
        from strop.model import Weights, read_config, read_spec

        torch.set_num_threads(traits.threads)
        spec, settings = read_spec(path), read_config(path)["quantization_config"]
        linears = {f"{x.name}.weight": x for x in spec.linears() if x.quantization is not None}
        decoder = Decoder(_dense(spec))
        with Weights(path) as weights, torch.no_grad():
            for name, tensor in decoder.tensors().items():
                found = _weight(weights, linears[name], settings) if name in linears else weights.load(name)
                tensor.copy_(found)
        return DecoderProgram(decoder, traits)


# What is stored.


def _setting(spec: ModelSpec) -> Quantization:
    """The one quantization of a model.

    Raises:
        UserError: There is none, or more than the layout can tell.
    """
    if spec.opaque_bytes is not None:
        raise UserError(f"auto_gptq: {spec.family} is not a known family")
    spec.check_float_cache("auto_gptq: the layout")
    spec.refuse_experts("auto_gptq", "eager")
    if spec.head.quantization is not None:
        raise UserError(
            f"auto_gptq: {spec.head.name} is quantized; the layout keeps it as it is: leave it out of targets"
        )
    found: dict[Quantization | None, str] = {}
    for linear in list(spec.linears())[:-1]:
        found.setdefault(linear.quantization, linear.name)
    if len(found) != 1 or None in found:
        kinds = "; ".join(f"{name}: {_told(q)}" for q, name in found.items())
        raise UserError(f"auto_gptq: the layout has one setting for all linears, found {kinds}")
    q = next(x for x in found if x is not None)
    if q.format != "int":
        raise UserError(
            f"auto_gptq: the layout holds integers, found {q.format}; allowed: int; {q.opened_by} opens the checkpoint "
            "itself"
        )
    if q.activations is not None:
        raise UserError(f"auto_gptq: inputs rounded to int8 ({q.activations}) have no place in the layout")
    for linear in list(spec.linears())[:-1]:
        for what, width in (("inputs", linear.in_features), ("outputs", linear.out_features)):
            if width * q.bits % WORD:
                raise UserError(f"auto_gptq: {width} {what} of {q.bits} bits of {linear.name} do not fill int32 words")
    return q


def _told(q: Quantization | None) -> str:
    if q is None:
        return "not quantized"
    if q.format != "int":
        return q.format
    return f"{q.bits} bits, group_size {q.group_size or 'null'}, {'' if q.symmetric else 'a'}symmetric"


def quantize_config(q: Quantization) -> dict[str, Any]:
    """The layout's own words for a quantization.

    Its first form stores z - 1, which a zero point of 0 does not survive: asymmetric codes take the second.
    """
    return {
        "bits": q.bits,
        "group_size": q.group_size or -1,
        "desc_act": False,
        "sym": q.symmetric,
        "lm_head": False,
        "checkpoint_format": "gptq" if q.symmetric else "gptq_v2",
        "pack_dtype": "int32",
    }


def _stored(spec: ModelSpec) -> Iterator[tuple[str, str, tuple[int, ...], Linear | None]]:
    """(name, safetensors dtype, shape, the quantized linear that it belongs to) of every tensor."""
    from strop.families import expected_shapes
    from strop.model import STORED_AS

    for name, shape in expected_shapes(_dense(spec)).items():
        linear = next((x for x in spec.linears() if x.quantization and name == f"{x.name}.weight"), None)
        if linear is None:
            yield name, STORED_AS[spec.dtype], shape, None
            continue
        assert linear.quantization is not None
        bits, groups = linear.quantization.bits, linear.num_groups()
        base, rows, columns = linear.name, linear.out_features, linear.in_features
        yield f"{base}.qweight", "I32", (columns * bits // WORD, rows), linear
        yield f"{base}.qzeros", "I32", (groups, rows * bits // WORD), linear
        yield f"{base}.scales", "F16", (groups, rows), linear
        yield f"{base}.g_idx", "I32", (columns,), linear


def _dense(spec: ModelSpec) -> ModelSpec:
    """The table with nothing quantized, weights (out, in)."""
    layers = tuple(
        dataclasses.replace(
            x, linears={role: dataclasses.replace(y, quantization=None) for role, y in x.linears.items()}
        )
        for x in spec.layers
    )
    return dataclasses.replace(spec, layers=layers)


def _size_bytes(spec: ModelSpec) -> int:
    widths = {"I32": 4, "F16": 2, "F32": 4, "BF16": 2}
    return sum(widths[dtype] * int(np.prod(shape)) for _, dtype, shape, _ in _stored(spec))


def _content(weights: Weights, name: str, linear: Linear | None, dtype: str) -> memoryview:
    """The bytes of one tensor."""
    from strop.model import load_packed, tensor_bytes

    if linear is None:
        return tensor_bytes(weights.load(name), dtype)
    q = linear.quantization
    assert q is not None
    part = name.rpartition(".")[2]
    if part == "g_idx":
        group = linear.in_features // linear.num_groups()
        return (np.arange(linear.in_features, dtype=np.int32) // np.int32(group)).data.cast("B")
    codes, scale, zero = load_packed(weights, linear)
    half = np.int16(2 ** (q.bits - 1))
    if part == "scales":
        if not bool((scale.half().float() == scale).all()):
            raise UserError(
                f"auto_gptq: {linear.name} has scales that are no numbers of float16, which the layout stores"
            )
        return tensor_bytes(scale.T, "F16")
    if part == "qzeros":
        first = 1 if q.symmetric else 0  # quantize_config says which form it is
        return pack((zero.T.numpy() + (half - first)).astype(np.uint8), q.bits).data.cast("B")
    words = pack((codes.numpy() + half).astype(np.uint8), q.bits)
    return np.ascontiguousarray(words.T).data.cast("B")


def _weight(weights: Weights, linear: Linear, settings: Mapping[str, Any]) -> Any:
    """W (out, in) of a linear, from what is stored."""
    import torch

    from strop.numerics import dequantize

    bits, half = int(settings["bits"]), 2 ** (int(settings["bits"]) - 1)
    part = {x: weights.load(f"{linear.name}.{x}").numpy() for x in ("qweight", "qzeros", "scales")}
    first = 1 if settings["checkpoint_format"] == "gptq" else 0
    codes = unpack(np.ascontiguousarray(part["qweight"].T), bits).astype(np.int16) - half
    zero = unpack(part["qzeros"], bits).T.astype(np.int16) + (first - half)
    scale = part["scales"].T.astype(np.float32)
    weight = dequantize(*(torch.from_numpy(np.ascontiguousarray(x)) for x in (codes, scale, zero)))
    return weight.T if linear.is_transposed else weight


# Maths.


def pack(codes: Codes, bits: int) -> Words:
    """Codes (rows, columns) along each row into words, the first in the lowest bits; 3-bit ones may lie in two."""
    fields = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    return np.packbits(fields.reshape(len(codes), -1), axis=-1, bitorder="little").view("<i4")


def unpack(words: Words, bits: int) -> Codes:
    """The inverse of `pack`: (rows, columns)."""
    fields = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").reshape(len(words), -1, bits)
    return np.packbits(fields, axis=-1, bitorder="little")[..., 0]
