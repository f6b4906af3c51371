"""What a graph of standard operators takes and what it costs, from a model's table alone. Imports nothing heavy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strop.errors import UserError
from strop.program import Step
from strop.spec import DTYPE_BYTES, DType, LayerSpec, Linear, ModelSpec, Rope
from strop.stage import Support

MODEL = "model.onnx"
DATA = "model.onnx.data"
DATA_BYTES = "strop.data_bytes"
"""Metadata of model.onnx: size of the data file."""
SPAN = 64
"""Attention looks at a multiple of so many places in the cache, so that few shapes of step occur."""
NODE_BYTES = 130
"""Of model.onnx, per node and per tensor; for estimates."""


def attends_to(spec: ModelSpec, index: int) -> int:
    """The layer whose keys and values layer `index` reads: itself, or the one it shares with."""
    shared = spec.layers[index].kv_from_layer
    return index if shared is None else shared


def ropes(spec: ModelSpec) -> list[Rope]:
    """The distinct rotary embeddings, in the order of the layers."""
    return list(dict.fromkeys(x.rope for x in spec.layers if x.rope is not None))


def windows(spec: ModelSpec) -> list[int | None]:
    """The distinct windows, in the order of the layers."""
    return list(dict.fromkeys(x.window for x in spec.layers))


# The graph of standard operators.


def mask_name(window: int | None) -> str:
    """The input that says what layers with this window attend to."""
    return "mask" if window is None else f"mask_{window}"


def mask_window(name: str) -> int | None:
    """The inverse of `mask_name`."""
    _, _, width = name.partition("_")
    return int(width) if width else None


def span(step: Step, capacity: int) -> int:
    """T: places of the cache that a step looks at."""
    needed: int = max(step.lengths.tolist()) + step.ids.shape[1]
    return min(-(-needed // SPAN) * SPAN, capacity)


def visible(step: Step, num_places: int, window: int | None) -> NDArray[np.bool_]:
    """What each new token attends to.

    Args:
        step: Row b's new tokens go to places lengths[b], lengths[b] + 1, ....
        num_places: T, from the first place of the cache on; at least as many as hold tokens after the step.
        window: Positions within reach, the token's own included; None: all.

    Returns:
        (B, 1, K, T). Padding sees at least itself.
    """
    batch, width = step.ids.shape
    tree = np.tri(width, dtype=bool) if step.mask is None else step.mask
    places = np.arange(num_places)
    seen: NDArray[np.bool_] = np.empty((batch, 1, width, num_places), bool)
    for row, length in enumerate(step.lengths.tolist()):
        seen[row, 0] = places < length
        seen[row, 0, :, length : length + width] = tree
        if window is not None:
            positions = places.copy()
            positions[length : length + width] = step.positions[row]
            seen[row, 0] &= positions > step.positions[row][:, None] - window
    return seen


def check(spec: ModelSpec, runtime: str) -> None:
    """Refuse what the graph cannot express.

    Raises:
        UserError: One line: where, what was found, what is allowed.
    """
    spec.check_float_cache(runtime)
    spec.refuse_experts(runtime, "eager")
    for index, layer in enumerate(spec.layers):
        owner = spec.layers[attends_to(spec, index)]
        if (owner.num_kv_heads, owner.head_dim) != (layer.num_kv_heads, layer.head_dim):
            raise UserError(f"{runtime}: layer {index} takes keys of layer {layer.kv_from_layer}, whose heads differ")
        if layer.head_dim % 2:
            raise UserError(f"{runtime}: layer {index} has heads of width {layer.head_dim}; allowed: even ones")
    for linear in spec.linears():
        q = linear.quantization
        if q is not None and q.format not in ("int", "fp8"):
            raise UserError(
                f"{runtime}: the graph of standard operators holds integers and fp8, {linear.name} is {q.format}; "
                f"allowed: int, fp8; {q.opened_by} opens the checkpoint itself"
            )
        if q is not None and q.activations == "dynamic":
            raise UserError(
                f"{runtime}: standard operators have no scale for each token, {linear.name} asks for activations: "
                "dynamic; allowed: static or null"
            )


def is_exact(linear: Linear) -> bool:
    """Whether codes of a quantized linear fit the operator with no offset: symmetric and narrower than it, or fp8."""
    q = linear.quantization
    return q is not None and (q.format == "fp8" or (q.symmetric and q.bits in (2, 3)))


def stored_bits(linear: Linear) -> int:
    """4 or 8, of a quantized linear: narrower codes are widened to 4."""
    assert linear.quantization is not None
    return 8 if linear.quantization.bits == 8 else 4


def support(spec: ModelSpec) -> Support:
    """How the graph holds the weights of a table whose layers are quantized alike."""
    quantized = [(x, x.quantization.bits) for x in spec.linears() if x.quantization is not None]
    return "widened" if any(stored_bits(x) > bits for x, bits in quantized) else "native"


def notes(spec: ModelSpec, runtime: str, dtype: DType) -> tuple[str, ...]:
    """Lines worth a user's attention."""
    found = []
    quantized = [x for x in spec.linears() if x.quantization is not None]
    for bits in sorted({x.quantization.bits for x in quantized if x.quantization and x.quantization.bits in (2, 3)}):
        count = sum(x.quantization is not None and x.quantization.bits == bits for x in quantized)
        found.append(f"{runtime} runs the {bits}-bit codes of {count} linears as 4-bit, and the bytes say so")
    if spec.is_tied and spec.head.quantization is not None:
        found.append(
            f"{runtime} looks tokens up in a {dtype} copy of the quantized {spec.head.name}: it looks up no codes"
        )
    return tuple(found)


def size_bytes(spec: ModelSpec, dtype: DType, capacity: int) -> int:
    """Bytes of the model and its weights, within a percent.

    Args:
        spec: A table that `check` let pass.
        dtype: Of what is not quantized, and of scales.
        capacity: Positions that rotary tables have.
    """
    width = DTYPE_BYTES[dtype]
    total = sum(linear_bytes(x, width) for layer in spec.layers for x in layer.linears.values())
    total += sum(4 * norm.size * (2 if norm.kind == "layer" else 1) for norm in spec.norms())
    total += width * spec.max_positions * spec.hidden_size if spec.position_embedding else 0
    total += width * spec.vocab_size * spec.hidden_size
    total += sum(2 * width * capacity * len(x.inv_freq) for x in ropes(spec))
    if not spec.is_tied or spec.head.quantization is not None:
        total += linear_bytes(spec.head, width)
    return total + sum(_num_records(x) for x in spec.layers) * NODE_BYTES


def linear_bytes(linear: Linear, width: int) -> int:
    """Of a linear's weight and bias: dense, or codes, scales and offsets. A float takes `width` bytes."""
    bias = width * linear.out_features if linear.has_bias else 0
    if linear.quantization is None:
        return width * linear.in_features * linear.out_features + bias
    groups = linear.num_groups() * linear.out_features
    codes = linear.in_features * linear.out_features * stored_bits(linear) // 8
    return codes + groups * width * (1 if is_exact(linear) else 2) + bias


def _num_records(layer: LayerSpec) -> int:
    """Nodes, tensors and cache inputs and outputs of a layer."""
    quantized = sum(x.quantization is not None for x in layer.linears.values())
    return 40 + 4 * len(layer.linears) + 8 * quantized + 6 * sum(1 for _ in layer.norms())
