"""Maths of the one packed form: scales, codes, dequantized weights. Tensors in, tensors out.

Legend: W (out, in) weights, Q (out, in) integer codes, s (out, groups) scales, z (out, groups) zero points.
W ≈ (Q - z) · s, with z = 0 where the format is symmetric. Q and z are signed: [-2^(bits-1), 2^(bits-1) - 1].
"""

from __future__ import annotations

import torch
from torch import Tensor

from strop.spec import Quantization

SMALLEST_SCALE = 2.0**-14
LARGEST_SCALE = 65280.0
"""The range of bfloat16 numbers that are normal in float16 too, so every runtime takes equal scales."""

INPUT_RANGE = 127.5
"""Largest input by its scale: half of what int8 spans, as compressed-tensors has it. No input is off by more than half
a scale, the largest one included, which takes the code 127 where it is positive."""

SHRINKS = tuple(x / 100 for x in range(70, 116, 3))
"""What `search_scales` multiplies a group's extremes by."""
SEARCH_WEIGHTS = 2**16
"""Weights that `search_scales` tries everything on at once: they stay in the processor's cache."""


def code_range(bits: int) -> tuple[int, int]:
    """Smallest and largest code."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def round_scales(scale: Tensor) -> Tensor:
    """Scales as they are stored: bfloat16 values, magnitude within float16's normal range, sign kept.

    Done before codes are computed, so fp32, fp16 and bf16 runtimes take equal numbers.

    Args:
        scale: Any shape, float32.

    Returns:
        Same shape, float32 holding bfloat16 values, never zero.
    """
    magnitude = scale.abs().clamp(SMALLEST_SCALE, LARGEST_SCALE)
    return torch.where(scale < 0, -magnitude, magnitude).to(torch.bfloat16).float()


def grouped(weight: Tensor, group_size: int | None) -> Tensor:
    """View W (out, in) as (out, groups, group_size); one group per row where group_size is None."""
    return weight.reshape(weight.shape[0], -1, group_size or weight.shape[1])


def find_scales(weight: Tensor, quantization: Quantization) -> tuple[Tensor, Tensor]:
    """Scales and zero points from the extremes of each group.

    Symmetric scales are signed: the larger extreme of a group sits on the code -2^(bits-1), so that all codes are
    used (the sign costs nothing at run time; AutoRound, Cheng et al. 2023, arXiv 2309.05516, stores the same).

    Args:
        weight: W (out, in), any float dtype.
        quantization: Bits, group size, symmetric or not.

    Returns:
        s (out, groups) float32 holding bfloat16 values, z (out, groups) int8.
    """
    lowest, highest = code_range(quantization.bits)
    groups = grouped(weight.float(), quantization.group_size)
    low, high = groups.amin(-1), groups.amax(-1)
    if quantization.symmetric:
        extreme = torch.where(high > -low, high, low)
        return round_scales(extreme / lowest), torch.zeros_like(extreme, dtype=torch.int8)
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = round_scales((high - low) / (highest - lowest))
    zero = (lowest - low / scale).round().clamp(lowest, highest)
    return scale, zero.to(torch.int8)


def search_scales(weight: Tensor, quantization: Quantization, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zero points of least Σ importance · (W - Ŵ)² in each group, where Ŵ is W rounded to nearest.

    Tried are the extremes of `find_scales` shrunk or stretched by `SHRINKS`, and where it is symmetric each with both
    signs. Plain squared error (equal importance) is a bad target: on SmolLM2 its KL is worse than the extremes'.

    Args:
        weight: W (out, in), any float dtype.
        quantization: Bits, group size, symmetric or not.
        importance: (in,), not negative; the energy Σ x² of each input is what output error asks for. Or the Hessians
            Σ x xᵀ within each group (groups, group_size, group_size): then it is the output error of each group.

    Returns:
        As `find_scales`, which wins where all is equal.
    """
    rows = max(1, SEARCH_WEIGHTS // weight.shape[1])
    found = [_search(x.float(), quantization, importance.float()) for x in torch.split(weight, rows)]
    return torch.cat([scale for scale, _ in found]), torch.cat([zero for _, zero in found])


def _search(weight: Tensor, quantization: Quantization, importance: Tensor) -> tuple[Tensor, Tensor]:
    """`search_scales` over a few rows."""
    lowest, highest = code_range(quantization.bits)
    groups = grouped(weight, quantization.group_size)
    weights = importance if importance.ndim == 3 else importance.reshape(groups.shape[1:])
    extreme, best_zero = find_scales(weight, quantization)
    best_scale, low = extreme, groups.amin(-1).clamp(max=0)
    least = _weighted_error(groups, best_scale, best_zero, weights, quantization.bits)
    for shrink in SHRINKS:
        for sign in (1, -1) if quantization.symmetric else (1,):
            scale, zero = round_scales(extreme * (sign * shrink)), best_zero
            if not quantization.symmetric:
                zero = (lowest - low * shrink / scale).round().clamp(lowest, highest).to(torch.int8)
            error = _weighted_error(groups, scale, zero, weights, quantization.bits)
            is_better = error < least
            least = torch.where(is_better, error, least)
            best_scale = torch.where(is_better, scale, best_scale)
            best_zero = torch.where(is_better, zero, best_zero)
    return best_scale, best_zero


def _weighted_error(groups: Tensor, scale: Tensor, zero: Tensor, weights: Tensor, bits: int) -> Tensor:
    """Σ weights · (W - Ŵ)² of each group, or (W - Ŵ) H (W - Ŵ)ᵀ where weights are Hessians H: (out, groups)."""
    lowest, highest = code_range(bits)
    s, z = scale[..., None], zero[..., None].float()
    error = ((groups / s).round_() + z).clamp_(lowest, highest).sub_(z).mul_(s).sub_(groups)
    if weights.ndim == 3:
        rows = error.transpose(0, 1)
        return (rows @ weights).mul_(rows).sum(-1).T
    return error.square_().mul_(weights).sum(-1)


def quantize(weight: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Nearest codes of W.

    Args:
        weight: W (out, in).
        scale: s (out, groups); groups must divide in.
        zero: z (out, groups), int8.
        bits: Width of a code.

    Returns:
        Q (out, in), int8.
    """
    lowest, highest = code_range(bits)
    groups = weight.float().reshape(*scale.shape, -1)
    codes = (groups / scale[..., None]).round() + zero[..., None]
    return codes.clamp(lowest, highest).to(torch.int8).reshape(weight.shape)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """(Q - z) · s in float32, (out, in)."""
    groups = codes.reshape(*scale.shape, -1).float()
    return ((groups - zero[..., None].float()) * scale[..., None].float()).reshape(codes.shape)


def token_scales(inputs: Tensor) -> Tensor:
    """Scales of inputs that are rounded by token: the largest magnitude of each comes to the end of the range.

    Args:
        inputs: X (..., in), any float dtype.

    Returns:
        (..., 1), float32, positive.
    """
    largest = inputs.float().abs().amax(-1, keepdim=True)
    return (largest / INPUT_RANGE).clamp(min=torch.finfo(torch.float32).tiny)


def static_scale(largest: Tensor) -> Tensor:
    """One scale for all inputs, which brings the largest magnitude to the end of the range.

    Args:
        largest: Magnitudes, any shape and float dtype.

    Returns:
        (1,), float32 holding a bfloat16 value.
    """
    return round_scales(largest.max().float().reshape(1) / INPUT_RANGE)


def round_inputs(inputs: Tensor, scale: Tensor) -> Tensor:
    """Codes of inputs, symmetric int8, halves to even: X ≈ codes · scale.

    Args:
        inputs: X (..., in), any float dtype.
        scale: Float32; (..., 1) by token, or of one value.

    Returns:
        Same shape, float32 holding integers.
    """
    lowest, highest = code_range(8)
    return (inputs.float() / scale).round_().clamp_(lowest, highest)


def pack(codes: Tensor, bits: int, axis: int = 1) -> Tensor:
    """int8 codes (rows, columns) -> int32 words as compressed-tensors stores them, packed along `axis`."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32  # type: ignore[import-untyped] # none

    words: Tensor = pack_to_int32(codes, bits, packed_dim=axis)
    return words


def unpack(words: Tensor, bits: int, shape: tuple[int, int], axis: int = 1) -> Tensor:
    """The inverse of `pack`: int8 codes of `shape` (rows, columns)."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    codes: Tensor = unpack_from_int32(words, bits, torch.Size(shape), packed_dim=axis)
    return codes
