"""Keys and values as they lie in the cache: as they are, or rounded to codes of a few bits. Leaves out attention.

Legend: B rows, N heads of keys and values, K tokens, D width of a head. x (B, N, K, D) keys after rope, or values; s
scales that broadcast against x. x ≈ decode(encode(x)): where codes are integers, what is within `LARGEST` scales is off
by half a scale at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from strop.spec import CacheFormat, CacheQuantization, LayerSpec, ModelSpec

LARGEST: dict[CacheFormat, float] = {"int8": 127.5, "int4": 7.5, "fp8": 448.0}
"""Largest magnitude by its scale. Of integers half of what they span, as of inputs (`numerics.INPUT_RANGE`)."""


def encode(x: Tensor, scale: Tensor, form: CacheFormat) -> Tensor:
    """Nearest codes, halves to even.

    Args:
        x: (..., D), any float dtype.
        scale: s, any float dtype, positive.
        form: Of the codes.

    Returns:
        int8: (..., D) int8. int4: (..., D / 2) uint8, two codes plus 8 in a byte, the first one lower, as onnxruntime's
        GroupQueryAttention has it. fp8: (..., D) uint8, the bits of E4M3.
    """
    y = x.float() / scale.float()
    if form == "fp8":
        largest = LARGEST[form]
        return y.clamp_(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8)
    if form == "int8":
        return y.round_().clamp_(-128, 127).to(torch.int8)
    codes = y.round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def decode(codes: Tensor, scale: Tensor, form: CacheFormat) -> Tensor:
    """Codes as `encode` gives them, times their scale: (..., D), float32."""
    if form == "fp8":
        return codes.view(torch.float8_e4m3fn).float() * scale.float()
    if form == "int4":
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int8) - 8
    return codes.float() * scale.float()


def token_scales(x: Tensor, form: CacheFormat) -> Tensor:
    """Scales that bring the largest magnitude of each token's head to the largest code: (..., 1), float32.

    Half a code further, as calibrated ones do, it would lie between two codes, and a last bit decide which.
    """
    largest = x.float().abs().amax(-1, keepdim=True)
    return (largest / math.floor(LARGEST[form])).clamp_(min=torch.finfo(torch.float32).tiny)


class Codec(nn.Module):
    """How keys and values of one layer lie in the cache.

    Attributes:
        form: None: as they are computed.
        k_scale, v_scale: bfloat16, shaped as `ModelSpec.cache_scales` says; None where there are none to store.
    """

    k_scale: Tensor | None
    v_scale: Tensor | None

    def __init__(self, spec: ModelSpec, layer: LayerSpec, form: CacheQuantization | None) -> None:
        super().__init__()
        self.form, self.num_heads, self.head_dim = form, layer.num_kv_heads, layer.head_dim
        shapes = spec.cache_scales() if form is not None else {}
        for part in ("k_scale", "v_scale"):
            shape = shapes.get(f"{layer.attention}.{part}")
            self.register_buffer(part, None if shape is None else torch.empty(shape, dtype=torch.bfloat16))

    def allocate(self, batch: int, max_tokens: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Zeroed keys and values of `batch` rows, and the scales of those that have one for each token.

        Returns:
            Tensors (B, N, max_tokens, ...): keys, values, where it is so their scales.
        """

        def zeros(width: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(batch, self.num_heads, max_tokens, width, dtype=kind, device=device)

        if self.form is None:
            return [zeros(self.head_dim, dtype) for _ in range(2)]
        kind = torch.int8 if self.form.format == "int8" else torch.uint8
        scales = [x for x in (self.k_scale, self.v_scale) if x is None]
        return [
            *(zeros(self.head_dim * self.form.bits // 8, kind) for _ in range(2)),
            *(zeros(1, torch.float32) for _ in scales),
        ]

    def encode(self, keys: Tensor, values: Tensor) -> list[Tensor]:
        """New keys and values (B, N, K, D) as what goes into the tensors of `allocate`."""
        if self.form is None:
            return [keys, values]
        form, codes, own = self.form.format, [], []
        for x, scale in ((keys, self.k_scale), (values, self.v_scale)):
            if scale is None:
                scale = token_scales(x, form)
                own.append(scale)
            codes.append(encode(x, scale, form))
        return [*codes, *own]

    def decode(self, cached: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values (B, N, T, D) from T places of the tensors of `allocate`."""
        if self.form is None:
            return cached[0], cached[1]
        form, own = self.form.format, list(cached[2:])
        scales = [own.pop(0) if x is None else x for x in (self.k_scale, self.v_scale)]
        keys, values = (decode(codes, s, form).to(dtype) for codes, s in zip(cached[:2], scales, strict=True))
        return keys, values
