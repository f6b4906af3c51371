"""Maths of number formats: scales, codes, dequantized weights. Tensors in, tensors out.

Legend: W (out, in) weights, Q (out, in) codes, s (out, groups) scales, z (out, groups) zero points.
W ≈ (Q - z) · s, with z = 0 where the format is symmetric. Q and z are signed: [-2^(bits-1), 2^(bits-1) - 1].

Of mxfp4 and nvfp4, Q is twice the element (E2M1), which makes it one of the integers `E2M1`, and s half the scale: a
grid of integers with gaps, for whatever takes integers. Of fp8, Q is the element itself, in torch's float8_e4m3fn, of
nf4 the quantile, in float32. Of llm_int8 it is from -127 to 127.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from strop.spec import QUANT_STATE, NumberFormat, Quantization, quant_state

SMALLEST_SCALE = 2.0**-14
LARGEST_SCALE = 65280.0
"""The range of bfloat16 numbers that are normal in float16 too, so every runtime takes equal scales."""
LARGEST_POWER = 2.0**15
"""The largest power of two among them."""

INPUT_RANGE = 127.5
"""Largest input by its scale: half of what int8 spans, as compressed-tensors has it. No input is off by more than half
a scale, the largest one included, which takes the code 127 where it is positive."""

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the magnitudes of E2M1, by their three bits."""
LARGEST_E2M1 = 12.0
"""Twice 6."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Dettmers et al. 2023, appendix E."""
LARGEST_INT8 = 127.0
"""Of llm_int8."""
LARGEST_E4M3 = 448.0
SMALLEST_ABSMAX = 2.0**-100
"""Of a block of nf4, which is stored in float32: above zero."""
SMALLEST_E4M3 = 2.0**-9
"""Above zero: the smallest scale of a block of nvfp4."""

SHRINKS = tuple(x / 100 for x in range(70, 116, 3))
"""What `search_scales` multiplies a group's extremes by."""
FIXED_SHRINKS: dict[NumberFormat, tuple[float, ...]] = {
    "fp8": SHRINKS,
    "mxfp4": (0.5, 2.0),
    "nvfp4": (*SHRINKS, 1.25, 1.5),
    "nf4": SHRINKS,
    "llm_int8": SHRINKS,
}
"""The same of other formats. Powers of two are all that mxfp4 has; 1.5 puts the largest weight on 4 instead of 6, which
leaves less of a gap below it."""
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


def find_scales(weight: Tensor, quantization: Quantization, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Scales and zero points from the extremes of each group.

    Symmetric scales of integers are signed: the larger extreme of a group sits on the code -2^(bits-1), so that all
    codes are used (the sign costs nothing at run time; AutoRound, Cheng et al. 2023, arXiv 2309.05516, does the same).
    Of other formats the largest magnitude of a group comes to the largest element, or just below.

    Args:
        weight: W (out, in), any float dtype.
        quantization: How it is to be stored.
        largest: Magnitude that `global_scale` is for, where it is not W's own.

    Returns:
        s (out, groups) float32 as the format can store it (integers and fp8: bfloat16 values), z (out, groups) int8.
    """
    groups = grouped(weight.float(), quantization.group_size)
    low, high = groups.amin(-1), groups.amax(-1)
    if quantization.format != "int":
        extreme = torch.maximum(high, -low)
        unit = global_scale(extreme.max() if largest is None else largest)
        if quantization.per_tensor:
            extreme = extreme.max().expand_as(extreme)
        return _extreme_scales(extreme, quantization.format, unit), torch.zeros_like(extreme, dtype=torch.int8)
    lowest, highest = code_range(quantization.bits)
    if quantization.symmetric:
        extreme = torch.where(high > -low, high, low)
        return round_scales(extreme / lowest), torch.zeros_like(extreme, dtype=torch.int8)
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = round_scales((high - low) / (highest - lowest))
    zero = (lowest - low / scale).round().clamp(lowest, highest)
    return scale, zero.to(torch.int8)


def _extreme_scales(extreme: Tensor, format: NumberFormat, unit: Tensor) -> Tensor:
    """s by which a group's largest magnitude, (out, groups), comes to the largest element of a float format."""
    if format == "mxfp4":
        # The smallest power of two by which it rounds to 6 or less: below 7.
        mantissa, exponent = torch.frexp(extreme)
        exponent = torch.where(mantissa >= 0.875, exponent - 3, exponent - 4)
        return _powers(exponent).clamp(SMALLEST_SCALE, LARGEST_POWER)
    largest = {"fp8": LARGEST_E4M3, "nvfp4": LARGEST_E2M1, "nf4": 1.0, "llm_int8": LARGEST_INT8}
    return _round_fixed_scales(extreme / largest[format], format, unit)


def _round_fixed_scales(scale: Tensor, format: NumberFormat, unit: Tensor) -> Tensor:
    """Scales of a format other than `int` as they are stored. `unit`: of nvfp4 its `global_scale`, (1,)."""
    if format == "nf4":
        return scale.clamp(min=SMALLEST_ABSMAX)
    if format == "llm_int8":
        return round_scales(scale * LARGEST_INT8) / LARGEST_INT8
    if format == "fp8":
        return round_scales(scale)
    if format == "mxfp4":
        mantissa, exponent = torch.frexp(scale)
        exponent = torch.where(mantissa * mantissa >= 0.5, exponent, exponent - 1)  # nearest in ratio
        return _powers(exponent).clamp(SMALLEST_SCALE, LARGEST_POWER)
    elements = (2 * scale * unit).clamp(SMALLEST_E4M3, LARGEST_E4M3)
    return elements.to(torch.float8_e4m3fn).float() / (2 * unit)


def _powers(exponent: Tensor) -> Tensor:
    """2^exponent, float32, for normal numbers. Made of its bits: powers need not be exact."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def global_scale(largest: Tensor) -> Tensor:
    """Of nvfp4, what the scales of blocks are stored multiplied by: the largest one comes into E4M3's upper octave.

    A power of two, other than NVIDIA's own 448 · 6 / largest: it costs none of a block scale's digits, and every
    dequantized weight is exact in bfloat16.

    Args:
        largest: Magnitude of the weights, one float value.

    Returns:
        (1,), float32.
    """
    _, exponent = torch.frexp(LARGEST_E4M3 * 6 / largest.float().clamp(2.0**-100, 2.0**100).reshape(1))
    return _powers(exponent - 1)


def search_scales(weight: Tensor, quantization: Quantization, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zero points of least Σ importance · (W - Ŵ)² in each group, where Ŵ is W rounded to nearest.

    Tried are the extremes of `find_scales` shrunk or stretched by `SHRINKS`, and where they are symmetric integers each
    with both signs. Plain squared error (equal importance) is a bad target: on SmolLM2 its KL is worse than the
    extremes'. One scale for a whole matrix is not searched.

    Args:
        weight: W (out, in), any float dtype.
        quantization: How it is to be stored.
        importance: (in,), not negative; the energy Σ x² of each input is what output error asks for. Or the Hessians
            Σ x xᵀ within each group (groups, group_size, group_size): then it is the output error of each group.

    Returns:
        As `find_scales`, which wins where all is equal.
    """
    if quantization.per_tensor:
        return find_scales(weight, quantization)
    rows, largest = max(1, SEARCH_WEIGHTS // weight.shape[1]), weight.float().abs().max()
    search = _search if quantization.format == "int" else partial(_search_fixed, largest=largest)
    found = [search(x.float(), quantization, importance.float()) for x in torch.split(weight, rows)]
    return torch.cat([scale for scale, _ in found]), torch.cat([zero for _, zero in found])


def _search(weight: Tensor, quantization: Quantization, importance: Tensor) -> tuple[Tensor, Tensor]:
    """`search_scales` over a few rows of integers."""
    lowest, highest = code_range(quantization.bits)
    groups = grouped(weight, quantization.group_size)
    weights = importance if importance.ndim == 3 else importance.reshape(groups.shape[1:])
    extreme, best_zero = find_scales(weight, quantization)
    best_scale, low = extreme, groups.amin(-1).clamp(max=0)
    least = _weighted_error(groups, best_scale, best_zero, weights, quantization)
    for shrink in SHRINKS:
        for sign in (1, -1) if quantization.symmetric else (1,):
            scale, zero = round_scales(extreme * (sign * shrink)), best_zero
            if not quantization.symmetric:
                zero = (lowest - low * shrink / scale).round().clamp(lowest, highest).to(torch.int8)
            error = _weighted_error(groups, scale, zero, weights, quantization)
            is_better = error < least
            least = torch.where(is_better, error, least)
            best_scale = torch.where(is_better, scale, best_scale)
            best_zero = torch.where(is_better, zero, best_zero)
    return best_scale, best_zero


def _search_fixed(
    weight: Tensor, quantization: Quantization, importance: Tensor, largest: Tensor
) -> tuple[Tensor, Tensor]:
    """`search_scales` over a few rows of a format other than `int`. `largest`: magnitude in all rows."""
    groups = grouped(weight, quantization.group_size)
    weights = importance if importance.ndim == 3 else importance.reshape(groups.shape[1:])
    extreme, zero = find_scales(weight, quantization, largest)
    best, least = extreme, _weighted_error(groups, extreme, zero, weights, quantization)
    for shrink in FIXED_SHRINKS[quantization.format]:
        scale = _round_fixed_scales(extreme * shrink, quantization.format, global_scale(largest))
        error = _weighted_error(groups, scale, zero, weights, quantization)
        is_better = error < least
        best, least = torch.where(is_better, scale, best), torch.where(is_better, error, least)
    return best, zero


def _weighted_error(groups: Tensor, scale: Tensor, zero: Tensor, weights: Tensor, quantization: Quantization) -> Tensor:
    """Σ weights · (W - Ŵ)² of each group, or (W - Ŵ) H (W - Ŵ)ᵀ where weights are Hessians H: (out, groups)."""
    s, z = scale[..., None], zero[..., None].float()
    codes = round_codes_(groups / s, z, quantization.bits, quantization.format)
    error = codes.sub_(z).mul_(s).sub_(groups)
    if weights.ndim == 3:
        rows = error.transpose(0, 1)
        return (rows @ weights).mul_(rows).sum(-1).T
    return error.square_().mul_(weights).sum(-1)


def round_codes_(quotients: Tensor, zero: Tensor, bits: int, format: NumberFormat) -> Tensor:
    """Nearest codes, halves to even (of nf4 down), in place: what every method rounds with.

    Args:
        quotients: W / s, float32; changed to the codes.
        zero: z, float32, where the format has zero points.
        bits: Width of a code of integers.
        format: What a code is.

    Returns:
        `quotients`.
    """
    if format == "int":
        lowest, highest = code_range(bits)
        return quotients.round_().add_(zero).clamp_(lowest, highest)
    if format == "llm_int8":
        return quotients.round_().clamp_(-LARGEST_INT8, LARGEST_INT8)
    if format == "nf4":
        levels = torch.tensor(NF4, device=quotients.device)
        return quotients.copy_(levels[torch.bucketize(quotients, (levels[1:] + levels[:-1]) / 2)])
    if format == "fp8":
        return quotients.copy_(quotients.clamp_(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn))
    size = quotients.abs()
    step = 1.0 + (size >= 4).float() + 2 * (size >= 8).float()  # gaps of E2M1: 1 below 4, 2 below 8, 4 above
    return quotients.div_(step).round_().mul_(step).clamp_(-LARGEST_E2M1, LARGEST_E2M1)


def code_dtype(format: NumberFormat) -> torch.dtype:
    """What codes are held in."""
    return {"fp8": torch.float8_e4m3fn, "nf4": torch.float32}.get(format, torch.int8)


def quantize(weight: Tensor, scale: Tensor, zero: Tensor, bits: int, format: NumberFormat = "int") -> Tensor:
    """Nearest codes of W.

    Args:
        weight: W (out, in).
        scale: s (out, groups); groups must divide in.
        zero: z (out, groups), int8.
        bits: Width of a code.
        format: What a code is.

    Returns:
        Q (out, in), of `code_dtype`.
    """
    groups = weight.float().reshape(*scale.shape, -1)
    codes = round_codes_(groups / scale[..., None], zero[..., None].float(), bits, format)
    return codes.to(code_dtype(format)).reshape(weight.shape)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """(Q - z) · s in float32, (out, in)."""
    groups = codes.reshape(*scale.shape, -1).float()
    return ((groups - zero[..., None].float()) * scale[..., None].float()).reshape(codes.shape)


def input_range(format: NumberFormat) -> float:
    """Largest input by its scale."""
    return LARGEST_E4M3 if format == "fp8" else INPUT_RANGE


def token_scales(inputs: Tensor, format: NumberFormat = "int") -> Tensor:
    """Scales of inputs that are rounded by token: the largest magnitude of each comes to the end of the range.

    Args:
        inputs: X (..., in), any float dtype.
        format: What they are rounded to.

    Returns:
        (..., 1), float32, positive.
    """
    largest = inputs.float().abs().amax(-1, keepdim=True)
    return (largest / input_range(format)).clamp(min=torch.finfo(torch.float32).tiny)


def static_scale(largest: Tensor, format: NumberFormat = "int") -> Tensor:
    """One scale for all inputs, which brings the largest magnitude to the end of the range.

    Args:
        largest: Magnitudes, any shape and float dtype.
        format: What they are rounded to.

    Returns:
        (1,), float32 holding a bfloat16 value.
    """
    return round_scales(largest.max().float().reshape(1) / input_range(format))


def round_inputs(inputs: Tensor, scale: Tensor, format: NumberFormat = "int") -> Tensor:
    """Codes of inputs, symmetric, 8 bits, halves to even: X ≈ codes · scale.

    Args:
        inputs: X (..., in), any float dtype.
        scale: Float32; (..., 1) by token, or of one value.
        format: What they are rounded to.

    Returns:
        Same shape, float32.
    """
    return round_codes_(inputs.float() / scale, torch.zeros_like(scale), 8, format)


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


def store_fixed(codes: Tensor, scale: Tensor, quantization: Quantization, unit: Tensor | None) -> dict[str, Tensor]:
    """A weight in a format other than `int` as it is stored; biases and scales of inputs apart.

    Args:
        codes: Q (out, in), of `code_dtype`.
        scale: s (out, groups), as `find_scales` rounds them.
        quantization: Its format.
        unit: Of nvfp4, (1,): the `global_scale` that scales were rounded for; None: one that fits them.

    Returns:
        Last part of the name -> tensor, as `Linear.parts` has them.

    Raises:
        ValueError: Scales are not those of the format.
    """
    if quantization.format == "nf4":
        levels = torch.tensor(NF4, device=codes.device)
        places = torch.searchsorted(levels, codes).to(torch.uint8).flatten()
        state = quant_state(*codes.shape)
        parts = {
            "weight": ((places[::2] << 4) | places[1::2])[:, None],
            "weight.absmax": scale.flatten(),
            "weight.quant_map": levels,
            QUANT_STATE: torch.frombuffer(bytearray(state), dtype=torch.uint8),
        }
        is_exact = True
    elif quantization.format == "llm_int8":
        largest = (scale * LARGEST_INT8).to(torch.bfloat16).float()
        parts = {"weight": codes, "SCB": largest.flatten(), "weight_format": torch.zeros((), dtype=torch.uint8)}
        is_exact = torch.equal(largest / LARGEST_INT8, scale)
    elif quantization.format == "fp8":
        kept = scale[:1, 0] if quantization.per_tensor else scale
        parts = {"weight": codes, "weight_scale": kept.to(torch.bfloat16)}
        is_exact = torch.equal(parts["weight_scale"].float().expand_as(scale), scale)
    elif quantization.format == "mxfp4":
        mantissa, exponent = torch.frexp(scale)
        parts = {"weight_packed": pack_e2m1(codes), "weight_scale": (exponent + 127).to(torch.uint8)}
        is_exact = bool((mantissa == 0.5).all())
    else:
        if unit is None:
            unit = global_scale(LARGEST_E2M1 * scale.max())
        parts = {
            "weight_packed": pack_e2m1(codes),
            "weight_scale": (2 * scale * unit).to(torch.float8_e4m3fn),
            "weight_global_scale": unit,
        }
        is_exact = torch.equal(parts["weight_scale"].float() / unit / 2, scale)
    if not is_exact:
        raise ValueError(f"scales are not those of {quantization.format}: take them from find_scales or search_scales")
    return parts


def load_fixed(load: Callable[[str], Tensor], quantization: Quantization, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `store_fixed`, from a function that gives the parts by name.

    Args:
        load: Last part of the name -> tensor.
        quantization: Its format.
        rows: Of the matrix.

    Returns:
        Q (out, in), s (out, groups) float32, z (out, groups) int8, all zero.
    """
    if quantization.format == "nf4":
        packed, levels = load("weight").flatten(), load("weight.quant_map")
        codes = levels[torch.stack((packed >> 4, packed & 15), dim=-1).long()].reshape(rows, -1)
        scale = load("weight.absmax").reshape(rows, -1)
        return codes, scale, torch.zeros(scale.shape, dtype=torch.int8, device=scale.device)
    if quantization.format == "llm_int8":
        scale = (load("SCB") / LARGEST_INT8)[:, None]
        return load("weight"), scale, torch.zeros(scale.shape, dtype=torch.int8, device=scale.device)
    stored = load("weight_scale")
    if quantization.format == "fp8":
        codes = load("weight")
        scale = stored.float().reshape(-1, 1).expand(len(codes), 1)
    else:
        codes = unpack_e2m1(load("weight_packed"))
        if quantization.format == "mxfp4":
            scale = _powers(stored.to(torch.int32).clamp(min=2) - 128)  # below are subnormals, which no weight has
        else:
            scale = stored.float() / load("weight_global_scale").float() / 2
    return codes, scale, torch.zeros(scale.shape, dtype=torch.int8, device=scale.device)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Codes of mxfp4 and nvfp4, int8 (rows, columns), two in a byte, the first in the low half: (rows, columns / 2).

    A half is the sign and the place of the magnitude in `E2M1`.
    """
    places = torch.zeros(int(LARGEST_E2M1) + 1, dtype=torch.uint8, device=codes.device)
    places[list(E2M1)] = torch.arange(len(E2M1), dtype=torch.uint8, device=codes.device)
    halves = places[codes.abs().long()] | ((codes < 0).to(torch.uint8) << 3)
    return halves[:, ::2] | (halves[:, 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """The inverse of `pack_e2m1`: int8."""
    levels = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.int8, device=packed.device)
    halves = torch.stack((packed & 15, packed >> 4), dim=-1)
    return levels[halves.long()].flatten(1)
