"""Bytes that a step has to read and FLOPs that it has to do, counted from a program's table: what no kernel can avoid.

Leaves out activations and logits, which stay in the caches, the arithmetic of norms, rotations and softmax, the
unpacking of codes, and copies that a kernel makes of its weights: time spent on them is what no floor explains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from strop.export._onnx import layout as standard
from strop.export.onnx_runtime import STANDARD
from strop.export.onnx_runtime import layout as onnx
from strop.export.torch_compile import layout as compiled
from strop.program import Traits
from strop.spec import DTYPE_BYTES, LayerSpec, Linear, ModelSpec

FLOPS_PER_WEIGHT = 2
"""A multiplication and an addition."""
ENGINES = ("tensor_rt", "tensorrt_rtx")
"""Runtimes that take the graph of standard operators."""
DEQUANTIZED = ("eager", "gguf", "auto_gptq")
"""Runtimes that compute with floats whatever is stored."""
SHAPE_BYTES = 16
"""Of the tensor `weight_shape` in a checkpoint, which no step reads."""


@dataclass(frozen=True)
class Work:
    """What one step of one row takes.

    Attributes:
        read_bytes: By part: `linears` of the layers, `head`, `norms`, `embedding` (the rows looked up), `keys_values`.
        flops_of: By part: `linears` of the layers, `head`, `attention`.
    """

    read_bytes: Mapping[str, int]
    flops_of: Mapping[str, int]

    @property
    def size_bytes(self) -> int:
        """Of everything that is read."""
        return sum(self.read_bytes.values())

    @property
    def flops(self) -> int:
        """Of everything that is computed."""
        return sum(self.flops_of.values())

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.size_bytes


def work(spec: ModelSpec, traits: Traits, cached: int, width: int) -> Work:
    """Of a step with `width` new tokens, logits of the last one.

    Of experts it reads those that its tokens choose: how many is exact for one token, else what is to be expected where
    tokens choose for themselves and every expert as often as the others.

    Args:
        spec: The program's table, of a known family.
        traits: Its runtime and dtype decide how wide weights, keys and values are.
        cached: Tokens that the row holds before.
        width: At least 1.
    """
    item = DTYPE_BYTES[traits.dtype]
    parts = [(x, layer.token_share(role)) for layer in spec.layers for role, x in layer.linears.items()]
    parts += [(x, 1.0) for x in spec.gates()]
    row = dataclasses.replace(spec.head, out_features=1, has_bias=False) if spec.is_tied else None
    looked_up = item * spec.hidden_size if row is None else weight_bytes(row, traits)
    looked_up += item * spec.hidden_size if spec.position_embedding else 0
    return Work(
        {
            "linears": round(sum((1 - (1 - share) ** width) * weight_bytes(x, traits) for x, share in parts)),
            "head": weight_bytes(spec.head, traits),
            "norms": sum(item * x.size * (2 if x.kind == "layer" else 1) for x in spec.norms()),
            "embedding": width * looked_up,
            "keys_values": sum(_token_bytes(spec, x, item) * _cached_in_sight(x, cached, width) for x in spec.layers),
        },
        {
            "linears": round(
                width * sum(share * FLOPS_PER_WEIGHT * x.in_features * x.out_features for x, share in parts)
            ),
            "head": FLOPS_PER_WEIGHT * spec.head.in_features * spec.head.out_features,
            # each pair of a query and a key in sight: one product with the key, one of the value with its weight
            "attention": sum(
                2 * FLOPS_PER_WEIGHT * x.num_heads * x.head_dim * _pairs_in_sight(x, cached, width) for x in spec.layers
            ),
        },
    )


def weight_bytes(linear: Linear, traits: Traits) -> int:
    """Codes, scales and zero points of a quantized linear, else its floats; and its bias. As the runtime stores them.

    `eager` keeps no codes: it dequantizes when it loads, or holds integers that it multiplies in float32. A runtime
    that is not known here is taken to keep the checkpoint's tensors.
    """
    item = DTYPE_BYTES[traits.dtype]
    bias = item * linear.out_features if linear.has_bias else 0
    keeps_codes = linear.quantization is not None and linear.quantization.activations is not None
    if keeps_codes and traits.runtime == "eager":
        return linear.size_bytes(traits.dtype) + 3 * linear.in_features * linear.out_features
    if linear.quantization is None or traits.runtime in DEQUANTIZED:
        return item * linear.in_features * linear.out_features + bias
    if traits.runtime in ENGINES or traits.kernels.startswith(STANDARD):
        return standard.linear_bytes(linear, item)
    if traits.runtime == "onnx_runtime":
        return onnx.weight_bytes(linear) + bias
    form = compiled.packing(linear)
    if traits.runtime == "torch_compile" and form is not None:
        return form.size_bytes(linear.out_features) + bias
    return linear.size_bytes(traits.dtype) - (SHAPE_BYTES if linear.quantization.is_packed else 0)


def _token_bytes(spec: ModelSpec, layer: LayerSpec, item: int) -> int:
    """Of the keys and values of one token that a layer reads: codes where they are rounded, else floats."""
    if spec.kv_cache is not None:
        return spec.kv_cache.token_bytes(layer.num_kv_heads, layer.head_dim)
    return 2 * item * layer.num_kv_heads * layer.head_dim


def _cached_in_sight(layer: LayerSpec, cached: int, width: int) -> int:
    """Positions whose keys and values a layer reads, the new ones included."""
    total = cached + width
    return total if layer.window is None else min(total, layer.window + width - 1)


def _pairs_in_sight(layer: LayerSpec, cached: int, width: int) -> int:
    """Pairs of a new token and a position that it attends to, itself included."""
    window = cached + width if layer.window is None else layer.window
    return sum(min(cached + i + 1, window) for i in range(width))
