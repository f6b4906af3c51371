"""What onnxruntime's CPU kernels take, from a model's table alone: blocks, bytes, refusals. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strop.errors import UserError
from strop.export._onnx.layout import attends_to
from strop.spec import LayerSpec, Linear, ModelSpec
from strop.stage import Support

ROPES = "strop.ropes"
"""Metadata of model.onnx: the rotary embeddings behind the inputs `cos_*` and `sin_*`."""
SMALLEST_BLOCK = 16
LARGEST_BLOCK = 256
LARGEST_2_BIT_BLOCK = 128
"""MatMulNBits refuses 2-bit blocks above 256 and computes 256 itself without its int8 kernel."""
NODE_BYTES = 130
"""Of model.onnx, per node and per tensor; for estimates."""


@dataclass(frozen=True)
class Packing:
    """How MatMulNBits stores a quantized linear: rows of blocks, each with a scale and maybe a zero point.

    Attributes:
        bits: 2, 4 or 8; 3-bit codes are widened to 4, mxfp4 and nvfp4 to 8, where twice an element is an integer.
        block: Inputs that share a scale: the largest power of two within a group.
        num_blocks: Along a row; the last one may reach past the row's end.
        repeats: Blocks that one group covers, its scale repeated.
        has_zeros: Stores zero points.
    """

    bits: int
    block: int
    num_blocks: int
    repeats: int
    has_zeros: bool

    @property
    def row_bytes(self) -> int:
        """Of one row's codes."""
        return self.num_blocks * self.block * self.bits // 8

    @property
    def zero_bytes(self) -> int:
        """Of one row's zero points."""
        return -(-self.num_blocks * self.bits // 8) if self.has_zeros else 0

    def size_bytes(self, rows: int) -> int:
        """Codes, float32 scales and zero points of that many rows."""
        return rows * (self.row_bytes + 4 * self.num_blocks + self.zero_bytes)


def rounds_inputs(linear: Linear) -> bool:
    """Whether inputs and weights are multiplied as integers, by MatMulIntegerToFloat."""
    return linear.quantization is not None and linear.quantization.activations is not None


def is_float8(linear: Linear) -> bool:
    """Whether weights stay in fp8 and are dequantized at every step, by DequantizeLinear."""
    return linear.quantization is not None and linear.quantization.format == "fp8"


def is_nf4(linear: Linear) -> bool:
    """Whether MatMulBnb4 computes a linear, from what bitsandbytes stores."""
    return linear.quantization is not None and linear.quantization.format == "nf4"


def is_packed(linear: Linear) -> bool:
    """Whether MatMulNBits computes a linear."""
    others = (rounds_inputs, is_float8, is_nf4)
    return linear.quantization is not None and not any(x(linear) for x in others)


def packing(linear: Linear) -> Packing:
    """The layout of a linear that MatMulNBits computes.

    Raises:
        UserError: Its groups are not multiples of 16.
    """
    q = linear.quantization
    assert q is not None
    assert is_packed(linear)
    bits = 8 if q.format in ("mxfp4", "nvfp4") else 4 if q.bits == 3 else q.bits
    size = linear.in_features if q.group_size is None else q.group_size
    block = min(size & -size, LARGEST_2_BIT_BLOCK if bits == 2 else LARGEST_BLOCK)
    if block < SMALLEST_BLOCK:
        if q.group_size is not None:
            raise UserError(
                f"onnx_runtime: {linear.name} has groups of {q.group_size}; allowed: multiples of {SMALLEST_BLOCK}"
            )
        num_blocks = -(-linear.in_features // SMALLEST_BLOCK)
        return Packing(bits, SMALLEST_BLOCK, num_blocks, num_blocks, not q.symmetric)
    return Packing(bits, block, linear.in_features // block, size // block, not q.symmetric)


def can_fuse(linears: Sequence[Linear]) -> bool:
    """Whether linears that read the same input can be one matrix multiplication, rows below rows."""
    return len({(x.quantization, x.has_bias) for x in linears}) == 1


def shares_codes(spec: ModelSpec) -> bool:
    """Whether tokens are looked up in the head's codes."""
    return spec.is_tied and spec.head.quantization is not None


def rotates_inside(spec: ModelSpec, index: int) -> bool:
    """Whether GroupQueryAttention itself can rotate the queries and keys of a layer.

    Its CPU kernel takes head widths that are multiples of 16 and rotated widths too. Layers that share keys are
    rotated by it only where their ropes agree, because it rotates both.
    """
    owner = attends_to(spec, index)
    sharing = [x for i, x in enumerate(spec.layers) if attends_to(spec, i) == owner]
    rope, head_dim = spec.layers[owner].rope, spec.layers[owner].head_dim
    return (
        rope is not None
        and all(x.rope == rope for x in sharing)
        and head_dim % 16 == 0
        and 2 * len(rope.inv_freq) % 16 == 0
    )


def bias_name(window: int | None) -> str:
    """The input that holds the attention bias of layers with this window."""
    return "bias" if window is None else f"bias_{window}"


def needs_positions(spec: ModelSpec, trees: bool) -> bool:
    """Whether the graph reads a token's position other than as its place in the cache."""
    outside = any(x.rope is not None and not rotates_inside(spec, i) for i, x in enumerate(spec.layers))
    return trees or outside or spec.position_embedding is not None


def check(spec: ModelSpec) -> None:
    """Refuse what the kernels cannot compute.

    Raises:
        UserError: One line: where, what was found, what is allowed.
    """
    spec.refuse_experts("onnx_runtime", "eager")
    for index, layer in enumerate(spec.layers):
        if layer.head_dim % 8:
            raise UserError(f"onnx_runtime: layer {index} has heads of width {layer.head_dim}; allowed: multiples of 8")
        owner = spec.layers[attends_to(spec, index)]
        if (owner.num_kv_heads, owner.head_dim) != (layer.num_kv_heads, layer.head_dim):
            raise UserError(
                f"onnx_runtime: layer {index} takes keys of layer {layer.kv_from_layer}, whose heads differ"
            )
    form = spec.kv_cache
    if form is not None and (form.format == "fp8" or "token" in (form.keys, form.values)):
        found = "format fp8" if form.format == "fp8" else "scales by token"
        raise UserError(
            f"onnx_runtime: GroupQueryAttention keeps keys and values in int8 or int4 with calibrated scales, kv_cache "
            f"asks for {found}; allowed: format int8, int4; keys and values tensor, head, channel"
        )
    for linear in spec.linears():
        if is_float8(linear) and rounds_inputs(linear):
            raise UserError(
                f"onnx_runtime: {linear.name} rounds its inputs to fp8, which no CPU kernel multiplies; allowed: "
                "activations null, format int, or eager; vLLM opens the checkpoint itself"
            )
        if is_packed(linear):
            packing(linear)
    if shares_codes(spec) and is_float8(spec.head):
        raise UserError(
            f"onnx_runtime: tokens are looked up in the quantized {spec.head.name}, which no CPU kernel does in fp8; "
            "allowed: another format for it"
        )
    if shares_codes(spec) and rounds_inputs(spec.head):
        raise UserError(
            f"onnx_runtime: tokens are looked up in the quantized {spec.head.name}, which cannot be multiplied as "
            "integers too; allowed: activations null for it"
        )
    if shares_codes(spec) and spec.hidden_size % SMALLEST_BLOCK:
        raise UserError(
            f"onnx_runtime: tokens are looked up in the quantized {spec.head.name}, {spec.hidden_size} wide; "
            f"allowed: multiples of {SMALLEST_BLOCK}"
        )


def cache_width(spec: ModelSpec, layer: LayerSpec) -> int:
    """Numbers that hold the keys of one token in one head: floats, int8, or bytes of two 4-bit codes."""
    return layer.head_dim * (8 if spec.kv_cache is None else spec.kv_cache.bits) // 8


def notes(spec: ModelSpec) -> tuple[str, ...]:
    """Lines worth a user's attention."""
    quantized = [x for x in spec.linears() if x.quantization is not None]
    packed = [x for x in quantized if is_packed(x)]
    found = []
    for format in ("mxfp4", "nvfp4"):
        if count := sum(x.quantization is not None and x.quantization.format == format for x in packed):
            found.append(
                f"{count} linears of {format} run as integers of 8 bits, exactly: MatMulNBits has no such element, "
                "and the bytes say so"
            )
    if count := sum(is_float8(x) for x in quantized):
        found.append(f"{count} linears of fp8 are dequantized at every step: right for quality and size, not for speed")
    widened = [x for x in quantized if x.quantization and x.quantization.bits == 3]
    if widened:
        found.append(
            f"{len(widened)} linears of 3 bits run as 4 bits: MatMulNBits has no 3-bit kernel, and the bytes say so"
        )
    slow = [x for x in packed if packing(x).bits == 2 and packing(x).block == SMALLEST_BLOCK]
    if slow:
        found.append(
            f"{len(slow)} linears of 2 bits with groups of 16 run dequantized: the kernel takes groups of 32 and more"
        )
    if spec.kv_cache is not None:
        found.append(
            f"attention over {spec.kv_cache.format} keys and values decodes faster from long contexts, but takes "
            "several times as long for many new tokens at once: long prompts wait"
        )
    if spec.dtype != "float32" and (len(quantized) < len(list(spec.linears())) or not shares_codes(spec)):
        found.append(
            f"what is not quantized is stored in float32, twice its bytes in {spec.dtype}: the CPU computes in float32"
        )
    return tuple(found)


def support(spec: ModelSpec) -> Support:
    """How the program holds the weights of a table whose layers are quantized alike."""
    quantized = [(x, x.quantization) for x in spec.linears() if x.quantization is not None]
    if any(is_float8(x) for x, _ in quantized):
        return "dequantized"
    return "widened" if any(is_packed(x) and packing(x).bits > q.bits for x, q in quantized) else "native"


def size_bytes(spec: ModelSpec, trees: bool) -> int:
    """Bytes of model.onnx and model.onnx.data, within a percent."""
    total = sum(_linear_bytes(x) for layer in spec.layers for x in layer.linears.values())
    total += sum(4 * norm.size * (2 if norm.kind == "layer" else 1) for norm in spec.norms())
    total += 4 * spec.max_positions * spec.hidden_size if spec.position_embedding else 0
    if not (spec.is_tied and spec.head.quantization is None):
        total += _linear_bytes(spec.head)
    if not shares_codes(spec):
        total += 4 * spec.vocab_size * spec.hidden_size
    if spec.kv_cache is not None:
        total += sum(2 * 4 * x.num_kv_heads * x.head_dim for x in spec.layers if x.kv_from_layer is None)
    return total + sum(_num_records(x, trees) for x in spec.layers) * NODE_BYTES


def _linear_bytes(linear: Linear) -> int:
    bias = 4 * linear.out_features if linear.has_bias else 0
    if linear.quantization is None:
        return 4 * linear.in_features * linear.out_features + bias
    return weight_bytes(linear) + bias


def weight_bytes(linear: Linear) -> int:
    """Of a quantized linear: codes, float32 scales and zero points."""
    if is_nf4(linear):
        return linear.out_features * (linear.in_features // 2 + 4 * linear.num_groups())
    if not is_packed(linear):
        return linear.out_features * (linear.in_features + 4)
    return packing(linear).size_bytes(linear.out_features)


def _num_records(layer: LayerSpec, trees: bool) -> int:
    """Nodes, tensors and cache inputs and outputs of a layer."""
    rounding = 5 * len(layer.groups()) if any(rounds_inputs(x) for x in layer.linears.values()) else 0
    return 10 + rounding + 4 * len(layer.linears) + 2 * sum(1 for _ in layer.norms()) + (4 if trees else 0)
