"""A checkpoint -> model.gguf, one matrix in memory at a time, equal inputs to equal bytes; and back to a decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, LlamaFileType, RopeScalingType
from numpy.typing import NDArray

from strop import gguf_file
from strop.errors import UserError
from strop.export.gguf import blocks, layout
from strop.export.gguf.layout import Slot
from strop.export.gguf.vocabulary import Vocabulary, add_vocabulary
from strop.families import build_spec
from strop.gguf_file import Gguf, read_gguf
from strop.model import Weights, load_linear, load_packed, read_spec, save_checkpoint
from strop.spec import Linear, ModelSpec, Rope

if TYPE_CHECKING:
    from torch import Tensor

    from strop.layers import Decoder

Config = Mapping[str, Any]
Floats = NDArray[np.float32]
BASES: Mapping[str, float] = {"gemma3_text": 1e6, "smollm3": 2e6}
"""Base of the rotary embedding where a config is silent, and it is not 10,000."""
FILE_TYPES: Mapping[str, LlamaFileType] = {
    "F32": LlamaFileType.ALL_F32,
    **{x: LlamaFileType[f"MOSTLY_{x}"] for x in ("F16", "BF16", "Q8_0", "Q5_0", "Q4_1", "Q4_0")},
    "MXFP4": LlamaFileType.MOSTLY_MXFP4_MOE,
}


# Writing.


def write_file(
    path: Path, spec: ModelSpec, weights: Weights, config: Config, *, slots: Sequence[Slot], vocabulary: Vocabulary,
    progress: Callable[[str, int, int], None],
) -> None:  # fmt: skip
    """Write a GGUF file and see that strop's own reader finds the same model in it.

    Args:
        path: The file.
        spec: A table that `layout.check` let pass.
        weights: Its checkpoint.
        config: Its config.json: where rotary embeddings are told by name.
        slots: `layout.slots` of the table.
        vocabulary: Its tokenizer.
        progress: Called with tensors done.

    Raises:
        UserError: A value does not fit its type, or GGUF has no words for something of the config.
    """
    with closing(GGUFWriter(None, layout.ARCHITECTURES[spec.family])) as writer:
        _add_model(writer, spec, slots)
        ropes = _add_rope(writer, spec, config)
        add_vocabulary(writer, vocabulary)
        for name, values in ropes.items():
            writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
        for slot in slots:
            kind = GGMLQuantizationType[slot.type]
            writer.add_tensor_info(slot.name, slot.shape, np.dtype(np.float32), slot.size_bytes, raw_dtype=kind)
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for values in ropes.values():
            writer.write_tensor_data(values)
        for done, slot in enumerate(slots, 1):
            try:
                writer.write_tensor_data(_stored(slot, weights))
            except UserError as error:
                raise UserError(f"gguf: {slot.source}: {error}") from error
            progress("gguf", done, len(slots))
    _check_readable(path, spec)


def _add_model(writer: GGUFWriter, spec: ModelSpec, slots: Sequence[Slot]) -> None:
    """The keys of the architecture, rotary embeddings apart."""
    first, arch = spec.layers[0], layout.ARCHITECTURES[spec.family]
    kinds = layout.types(list(slots))
    writer.add_type("model")
    writer.add_file_type(FILE_TYPES[max(kinds, key=lambda x: kinds[x])])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_block_count(len(spec.layers))
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(first.intermediate_size)
    writer.add_head_count(first.num_heads)
    writer.add_head_count_kv(first.num_kv_heads)
    if arch == "gpt2":
        writer.add_layer_norm_eps(spec.final_norm.eps)
    else:
        writer.add_layer_norm_rms_eps(spec.final_norm.eps)
        writer.add_key_length(first.head_dim)
        writer.add_value_length(first.head_dim)
    if arch not in layout.WINDOWLESS:
        writer.add_sliding_window(first.window or 0)
    if first.softcap is not None:
        writer.add_attn_logit_softcapping(first.softcap)
    if spec.logit_softcap is not None:
        writer.add_final_logit_softcapping(spec.logit_softcap)


def _add_rope(writer: GGUFWriter, spec: ModelSpec, config: Config) -> dict[str, Floats]:
    """The keys of the rotary embedding, and the context that it is for.

    Returns:
        Tensors of factors, where a scaling is stored as such.
    """
    limit = config.get("max_position_embeddings")
    rope = next((x.rope for x in reversed(spec.layers) if x.rope is not None), None)
    if rope is None:
        writer.add_context_length(layout.context_length(spec))
        return {}
    told = _rope_parameters(spec.family, config)
    base, width = float(told["rope_theta"]), 2 * len(rope.inv_freq)
    kind = told.get("rope_type", told.get("type", "default"))
    is_long = kind in ("longrope", "su") or (kind == "yarn" and spec.family == "phi3")
    # Of these the table's context ends where other factors begin.
    writer.add_context_length(limit if is_long and isinstance(limit, int) else layout.context_length(spec))
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(base)
    if spec.family == "gemma3_text":
        writer.add_float32(f"{layout.ARCHITECTURES[spec.family]}.rope.freq_base_swa", _local_base(config))
    original = told.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    if is_long:
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(original or spec.max_positions)
        writer.add_rope_scaling_attn_factors(rope.factor)
        return {f"rope_factors_{x}.weight": np.array(told[f"{x}_factor"], np.float32) for x in ("long", "short")}
    if kind == "llama3":
        return {"rope_freqs.weight": _divisors(rope, base)}
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(float(told["factor"]))
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(original or limit or spec.max_positions)
    return {}


def _rope_parameters(family: str, config: Config) -> dict[str, Any]:
    """What a config says of its rotary embedding; of gemma3 of the layers without a window."""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    base = config.get("rope_theta") or BASES.get(family, 10_000.0)
    return {
        "rope_theta": base,
        **{k: v for k, v in {**found, **found.get("full_attention", {})}.items() if v is not None},
    }


def _local_base(config: Config) -> float:
    """Base of gemma3's layers with a window."""
    told = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    return float(told.get("rope_theta") or config.get("rope_local_base_freq") or 1e4)


def _divisors(rope: Rope, base: float) -> Floats:
    """By what a scaling divides the frequencies of a base."""
    width = 2 * len(rope.inv_freq)
    plain = base ** -(np.arange(0, width, 2) / width)
    found: Floats = (plain / np.array(rope.inv_freq)).astype(np.float32)
    return found


def _stored(slot: Slot, weights: Weights) -> NDArray[Any]:
    """The bytes of one tensor, row by row."""
    linear = slot.linear
    q = None if linear is None else linear.quantization
    if linear is not None and q is not None and layout.exact_type(q, linear.in_features) == slot.type:
        return _packed(slot, linear, weights)
    if linear is not None:
        values = _arranged(slot, load_linear(weights, linear).numpy())
        return blocks.encode(values, slot.type)
    values = _arranged(slot, weights.load(slot.source).float().numpy())
    return values if slot.norm is None else values + np.float32(slot.norm.offset)


def _packed(slot: Slot, linear: Linear, weights: Weights) -> NDArray[Any]:
    """A quantized matrix, code for code."""
    codes, scale, zero = load_packed(weights, linear)
    groups = codes.reshape(*scale.shape, -1)
    signed = (groups - zero[..., None]).reshape(codes.shape).numpy()
    return blocks.pack(_arranged(slot, signed), _arranged(slot, scale.numpy()), slot.type)


def _arranged(slot: Slot, rows: NDArray[Any]) -> NDArray[Any]:
    """Rows in the order that llama.cpp has them in."""
    return rows if slot.num_heads is None else blocks.interleave(rows, slot.num_heads)


# Reading.


def load_decoder(path: Path) -> Decoder:
    """The model that a file holds, dequantized, float32, in evaluation mode."""
    import torch

    from strop.layers import Decoder

    file = read_gguf(path)
    decoder = Decoder(_read_spec(file))
    names = gguf_file.tensor_names(file)
    with torch.no_grad():
        for name, tensor in decoder.tensors().items():
            tensor.copy_(torch.from_numpy(gguf_file.load(file, names[name])))
    return decoder.eval()


def _read_spec(file: Gguf) -> ModelSpec:
    return build_spec(gguf_file.config(file), gguf_file.headers(file), "float32")


def _check_readable(path: Path, spec: ModelSpec) -> None:
    """Refuse a file that tells another model: something in the config that GGUF has no words for.

    Raises:
        UserError: Names the field.
    """
    found = _read_spec(read_gguf(path))
    for (what, ours), (_, theirs) in zip(
        _facts(spec, found.max_positions), _facts(found, found.max_positions), strict=True
    ):
        if not _is_close(ours, theirs):
            raise UserError(f"gguf: {what} of the model is {ours}, GGUF can only tell {theirs}")


def _facts(spec: ModelSpec, context: int) -> Iterator[tuple[str, Any]]:
    """What a model computes, names apart, in contexts of some length."""
    yield "vocab_size", spec.vocab_size
    yield "logit_softcap", spec.logit_softcap
    yield "embedding_scale", spec.embedding_scale
    for norm in spec.norms():
        yield f"{norm.name.rpartition('.')[2]}'s eps", norm.eps
    for index, layer in enumerate(spec.layers):
        for name in ("num_heads", "num_kv_heads", "head_dim", "intermediate_size", "attention_scale", "softcap"):
            yield f"{name} of layer {index}", getattr(layer, name)
        yield f"the activation of layer {index}", layer.activation
        yield f"the window of layer {index}", None if layer.window and layer.window >= context else layer.window
        yield f"the rope of layer {index}", None if layer.rope is None else (layer.rope.factor, *layer.rope.inv_freq)


def _is_close(one: Any, other: Any) -> bool:
    """Equal, numbers as far as float32 tells them apart."""
    if isinstance(one, float | tuple) and isinstance(other, float | tuple):
        return np.shape(one) == np.shape(other) and bool(np.allclose(one, other, rtol=1e-5, atol=0))
    return bool(one == other)


# What a file is compared with.


def write_rounded(path: Path, checkpoint: Path, out: Path) -> ModelSpec | None:
    """Write into `out` a checkpoint with its matrices rounded as a file's types round them, float32.

    Args:
        path: The file: only its types are read.
        checkpoint: What it was made from.
        out: An empty folder.

    Returns:
        The table of what was written; None, and nothing is, where the checkpoint's own values are what the file holds
        and eager runs it in float32.
    """
    spec, file = read_spec(checkpoint), read_gguf(path)
    stored = {x.name: (x, _type(file, name)) for name, x, _ in layout.matrices(spec)}
    rounded = {name: x for name, x in stored.items() if not layout.is_lossless(x[0], spec.dtype, x[1])}
    if not rounded and spec.dtype == "float32":
        return None

    def dense(linear: Linear) -> Linear:
        return dataclasses.replace(linear, quantization=None) if linear.name in rounded else linear

    layers = tuple(
        dataclasses.replace(x, linears={role: dense(y) for role, y in x.linears.items()}) for x in spec.layers
    )
    new = dataclasses.replace(spec, dtype="float32", layers=layers, head=dense(spec.head))
    with Weights(checkpoint) as weights:
        save_checkpoint(out, new, checkpoint, _rounded(spec, weights, rounded))
    return new


def _type(file: Gguf, name: str) -> str:
    return GGMLQuantizationType(file.tensors[name].type).name


def _rounded(
    spec: ModelSpec, weights: Weights, chosen: Mapping[str, tuple[Linear, str]]
) -> Iterator[tuple[str, Tensor | None]]:
    import torch

    for name, (linear, kind) in chosen.items():
        values = blocks.encode(load_linear(weights, linear).numpy(), kind)
        weight = torch.from_numpy(blocks.decode(values, kind))
        target = spec.embedding if name == spec.head.name and spec.is_tied else name
        yield f"{target}.weight", weight.T if linear.is_transposed else weight
