"""Where a compiled program's weights lie and what they cost, from a model's table alone. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from strop.errors import UserError
from strop.spec import DTYPE_BYTES, DType, LayerSpec, Linear, ModelSpec, Norm, Rope

PACKAGE = "model.pt2"
FACTS = "compiled.json"
"""What the package was compiled for: version of torch, instruction sets."""
SCALE_BYTES = OFFSET_BYTES = 2
VECTOR = 16
"""Floats that are computed together."""


@dataclass(frozen=True)
class Packing:
    """How a quantized linear lies in memory: bytes (out, groups, width), a byte holding `fields` codes of a group.

    Code f·width + j of a group is the f-th lowest field of its byte j, so that inputs are read in order for each field.

    Attributes:
        bits: 2, 4 or 8; 3-bit codes are widened to 4, and what does not fill whole bytes to 8.
        half: Added to codes to make them unsigned: what a zero is stored as, unless groups have offsets.
        groups: Along a row.
        width: Bytes of a group.
        has_offsets: Zero points differ between groups.
    """

    bits: int
    half: int
    groups: int
    width: int
    has_offsets: bool

    @property
    def fields(self) -> int:
        """Codes in a byte."""
        return 8 // self.bits

    @property
    def chunks(self) -> int:
        """Pieces of a group that are added before anything is summed, each of whole vectors of bytes."""
        return next(x for x in (4, 2, 1) if self.width % (x * VECTOR) == 0 or x == 1)

    def size_bytes(self, rows: int) -> int:
        """Codes, scales and offsets of that many rows."""
        per_group = self.width + SCALE_BYTES + (OFFSET_BYTES if self.has_offsets else 0)
        return rows * self.groups * per_group


def stored_name(layer: LayerSpec, part: str) -> str:
    """What a tensor of a layer is called in the weights' file: `q.codes` -> `model.layers.0.self_attn.q_proj.codes`.

    Args:
        layer: Whose tensor.
        part: Role of the linear or norm, and which of its tensors.
    """
    role, _, kind = part.partition(".")
    place: Linear | Norm = layer.linears[role] if role in layer.linears else getattr(layer, role)
    return f"{place.name}.{kind}"


def packing(linear: Linear) -> Packing | None:
    """The layout of a linear; None where it is not quantized."""
    q = linear.quantization
    if q is None:
        return None
    group = linear.in_features // linear.num_groups()
    bits = 4 if q.bits == 3 else q.bits
    if group % (8 // bits):
        bits = 8
    return Packing(bits, 2 ** (q.bits - 1), linear.num_groups(), group * bits // 8, not q.symmetric)


def check(spec: ModelSpec) -> None:
    """Refuse what cannot be compiled.

    Raises:
        UserError: A family that has no table, experts, weights that are no integers, or inputs that are rounded.
    """
    if spec.opaque_bytes is not None:
        raise UserError(f"export: {spec.family} is not a known family, torch_compile cannot lower it; allowed: eager")
    spec.check_float_cache("export: torch_compile")
    spec.refuse_experts("torch_compile", "eager")
    for linear in spec.linears():
        if linear.quantization is not None and linear.quantization.format != "int":
            raise UserError(
                f"export: torch_compile runs integers, {linear.name} is {linear.quantization.format}; allowed: eager, "
                f"or int; {linear.quantization.opened_by} opens the checkpoint itself"
            )
        if linear.quantization is not None and linear.quantization.activations is not None:
            raise UserError(
                f"export: torch_compile has no int8 inputs, {linear.name} asks for activations: "
                f"{linear.quantization.activations}; allowed: onnx_runtime, eager, or activations: null"
            )


def size_bytes(spec: ModelSpec, dtype: DType) -> int:
    """Bytes of the weights, as they are stored and held in memory."""
    width = DTYPE_BYTES[dtype]
    total = sum(_linear_bytes(x, width) for x in spec.linears())
    total += 0 if spec.is_tied else spec.vocab_size * spec.hidden_size * width
    total += spec.max_positions * spec.hidden_size * width if spec.position_embedding else 0
    return total + sum(x.size * (2 if x.kind == "layer" else 1) * width for x in spec.norms())


def _linear_bytes(linear: Linear, width: int) -> int:
    form = packing(linear)
    matrix = linear.in_features * linear.out_features * width if form is None else form.size_bytes(linear.out_features)
    return matrix + (linear.out_features * width if linear.has_bias else 0)


def notes(spec: ModelSpec) -> tuple[str, ...]:
    """What `check` says about formats that are widened."""
    widened = {
        (x.quantization.bits, form.bits)
        for x in spec.linears()
        if x.quantization is not None and (form := packing(x)) is not None and form.bits != x.quantization.bits
    }
    return tuple(f"torch_compile runs {bits}-bit codes as {wide}-bit" for bits, wide in sorted(widened))


def kinds(spec: ModelSpec) -> list[int]:
    """For every layer the first layer that is built alike: one compiled block serves them all."""
    first: dict[str, int] = {}
    return [first.setdefault(_kind(layer), index) for index, layer in enumerate(spec.layers)]


def _kind(layer: LayerSpec) -> str:
    """Everything of a layer but names, and what only attention or the rotary tables look at."""
    rope = None if layer.rope is None else Rope((0.0,) * len(layer.rope.inv_freq))
    shared = None if layer.kv_from_layer is None else 0
    plain = dataclasses.replace(layer, rope=rope, kv_from_layer=shared, window=None, softcap=None, attention_scale=1.0)

    def nameless(value: object) -> object:
        if isinstance(value, dict):
            return {key: nameless(x) for key, x in value.items() if key != "name"}
        return value

    return json.dumps(nameless(dataclasses.asdict(plain)), sort_keys=True)
