"""The packed form's maths: scales, codes, bounds, packing."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from strop import numerics
from strop.numerics import (
    code_range,
    dequantize,
    find_scales,
    pack,
    quantize,
    round_inputs,
    round_scales,
    search_scales,
    static_scale,
    token_scales,
    unpack,
)
from strop.spec import Quantization

FORMS = [
    Quantization(bits, group_size, symmetric)
    for bits, group_size, symmetric in itertools.product((2, 3, 4, 8), (None, 10), (True, False))
]


def weights(rows: int = 7, width: int = 30, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def slow_round(weight: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """The nearest of all values that the grid has, one weight at a time."""
    lowest, highest = code_range(bits)
    out = torch.empty_like(weight)
    width = weight.shape[1] // scale.shape[1]
    for row, column in itertools.product(*map(range, weight.shape)):
        s, z = scale[row, column // width], zero[row, column // width]
        grid = (torch.arange(lowest, highest + 1) - z) * s
        out[row, column] = grid[(grid - weight[row, column]).abs().argmin()]
    return out


@pytest.mark.parametrize("form", FORMS)
def test_codes_are_the_nearest_of_the_grid(form: Quantization) -> None:
    weight = weights()
    scale, zero = find_scales(weight, form)
    found = dequantize(quantize(weight, scale, zero, form.bits), scale, zero)
    expected = slow_round(weight, scale, zero, form.bits)
    # Half way between two codes both are nearest: compare distances.
    torch.testing.assert_close((found - weight).abs(), (expected - weight).abs(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_round_trip_error_is_bounded(form: Quantization) -> None:
    weight = weights(rows=20, width=60)
    scale, zero = find_scales(weight, form)
    found = dequantize(quantize(weight, scale, zero, form.bits), scale, zero)
    step = scale.abs().repeat_interleave(60 // scale.shape[1], 1)
    # Half a step; what lies past the grid's last value (the scale was rounded, a zero point too, and symmetric grids
    # have one code less on one side) may be off by one and a half.
    error = (found - weight).abs() / step
    assert error.max() <= 1.6
    assert (error <= 0.5 + 1e-4).float().mean() > (0.7 if form.bits == 2 else 0.9)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_symmetric_scales_put_the_larger_extreme_on_the_lowest_code(bits: int) -> None:
    weight = weights()
    scale, zero = find_scales(weight, Quantization(bits, 10, True))
    codes = quantize(weight, scale, zero, bits).reshape(7, 3, 10)
    extreme = weight.reshape(7, 3, 10).abs().argmax(-1, keepdim=True)
    assert (codes.gather(-1, extreme) == code_range(bits)[0]).all()
    assert (scale > 0).any()
    assert (scale < 0).any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [0.0, 0.3, -2.0, 1e-30, -1e30])
def test_constant_groups_have_finite_scales(form: Quantization, value: float) -> None:
    weight = torch.full((3, 20), value)
    for scale, zero in (find_scales(weight, form), search_scales(weight, form, torch.ones(20))):
        assert scale.isfinite().all()
        assert (scale != 0).all()
        found = dequantize(quantize(weight, scale, zero, form.bits), scale, zero)
        if abs(value) < 10:
            torch.testing.assert_close(found, weight, atol=1e-4, rtol=0.01)


def test_scales_are_bfloat16_values_that_float16_holds_as_normal_numbers() -> None:
    scale = round_scales(torch.tensor([0.0, -0.0, 1e-30, -1e-30, 0.1, -0.1, 1e30, -1e30]))
    assert torch.equal(scale, scale.bfloat16().float())
    assert torch.equal(scale, scale.half().float())
    assert scale.abs().min() >= torch.finfo(torch.float16).smallest_normal
    assert scale[4] == -scale[5] == torch.tensor(0.1).bfloat16()


@pytest.mark.parametrize("form", FORMS)
def test_searched_scales_lose_no_more_than_extremes(form: Quantization) -> None:
    weight = weights(rows=11, width=40)
    importance = torch.rand(40, generator=torch.Generator().manual_seed(1)) ** 4

    def lost(scale: Tensor, zero: Tensor) -> Tensor:
        error = (dequantize(quantize(weight, scale, zero, form.bits), scale, zero) - weight) ** 2 * importance
        return error.reshape(11, scale.shape[1], -1).sum(-1)

    searched, extremes = lost(*search_scales(weight, form, importance)), lost(*find_scales(weight, form))
    assert (searched <= extremes).all()
    assert (searched < 0.95 * extremes).any()


@pytest.mark.parametrize("symmetric", [True, False])
def test_searched_scales_are_the_best_of_those_tried(symmetric: bool) -> None:
    weight = weights(rows=1, width=10)
    importance = torch.rand(10, generator=torch.Generator().manual_seed(1))
    form = Quantization(3, None, symmetric)
    first, _ = find_scales(weight, form)
    tried = []
    for shrink, sign in itertools.product((*numerics.SHRINKS, 1.0), (1, -1) if symmetric else (1,)):
        scale = round_scales(first * shrink * sign)
        for zero in [0] if symmetric else range(-4, 4):
            z = torch.full((1, 1), zero, dtype=torch.int8)
            tried.append((((slow_round(weight, scale, z, 3) - weight) ** 2 * importance).sum(), scale, z))
    scale, zero = search_scales(weight, form, importance)
    found = ((slow_round(weight, scale, zero, 3) - weight) ** 2 * importance).sum()
    least = min(float(x[0]) for x in tried)
    assert float(found) == pytest.approx(least, rel=1e-5) if symmetric else float(found) >= least * 0.999


def test_without_importance_the_extremes_stay() -> None:
    weight = weights()
    form = Quantization(4, 10, True)
    for found, expected in zip(search_scales(weight, form, torch.zeros(30)), find_scales(weight, form), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("axis", [0, 1])
def test_packed_codes_come_back(bits: int, axis: int) -> None:
    lowest, highest = code_range(bits)
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(lowest, highest + 1, (13, 37), dtype=torch.int8, generator=generator)
    words = pack(codes, bits, axis)
    assert words.dtype == torch.int32
    assert words.shape[axis] == -(-codes.shape[axis] * bits // 32)
    assert torch.equal(unpack(words, bits, (13, 37), axis), codes)


@pytest.mark.parametrize("form", FORMS)
def test_a_diagonal_hessian_is_the_importance_of_its_diagonal(form: Quantization) -> None:
    weight = weights(rows=11, width=40)
    importance = torch.rand(40, generator=torch.Generator().manual_seed(1)) ** 4
    hessians = torch.stack([torch.diag(x) for x in importance.split(form.group_size or 40)])
    for found, expected in zip(
        search_scales(weight, form, hessians), search_scales(weight, form, importance), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_searched_by_a_hessian_leave_the_least_output_error_of_those_tried(symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(50, 20, generator=generator) @ torch.randn(20, 20, generator=generator)
    weight, form = weights(rows=6, width=20), Quantization(3, 10, symmetric)
    parts = [x[:, :10], x[:, 10:]]
    scale, zero = search_scales(weight, form, torch.stack([part.T @ part for part in parts]))
    first, first_zero = find_scales(weight, form)

    def lost(row: int, group: int, s: Tensor, z: Tensor) -> float:
        w = weight[row : row + 1, 10 * group : 10 * group + 10]
        error = slow_round(w, s.reshape(1, 1), z.reshape(1, 1), 3) - w
        return float((parts[group] @ error[0]).square().sum())

    for row, group in itertools.product(range(6), range(2)):
        tried = [lost(row, group, first[row, group], first_zero[row, group])]
        low = weight[row, 10 * group : 10 * group + 10].min().clamp(max=0)
        for shrink, sign in itertools.product(numerics.SHRINKS, (1, -1) if symmetric else (1,)):
            s = round_scales(first[row, group] * (shrink * sign))
            z = first_zero[row, group] if symmetric else (-4 - low * shrink / s).round().clamp(-4, 3).to(torch.int8)
            tried.append(lost(row, group, s, z))
        assert lost(row, group, scale[row, group], zero[row, group]) == pytest.approx(min(tried), rel=1e-3)


def loud_inputs() -> Tensor:
    """(3, 5, 37) with one loud input, one token of zeros, one of ties between two codes."""
    x = torch.randn(3, 5, 37, generator=torch.Generator().manual_seed(0))
    x[..., 11] *= 50
    x[1, 2] = 0
    x[2, 3] = torch.arange(37) - 18.5
    x[2, 3, 0] = -127.5
    return x


def test_inputs_are_rounded_as_compressed_tensors_does() -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    x = loud_inputs()
    for dynamic, strategy in ((True, "token"), (False, "tensor")):
        args = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy=strategy, dynamic=dynamic)
        scale, zero = torch.tensor([0.25]), torch.tensor([0], dtype=torch.int8)
        if dynamic:
            scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity())
        ours = token_scales(x) if dynamic else scale
        assert torch.equal(round_inputs(x, ours) * ours, fake_quantize(x, scale, zero, args))


def test_a_static_scale_covers_all_inputs_but_for_its_own_rounding() -> None:
    x = loud_inputs()
    scale = static_scale(x.abs())
    assert torch.equal(scale, round_scales(scale))
    assert float(scale) == pytest.approx(float(x.abs().max()) / 127.5, rel=0.004)


def test_no_input_of_a_token_is_off_by_more_than_half_its_scale() -> None:
    x = loud_inputs()
    scale = token_scales(x)
    codes = round_inputs(x, scale)
    assert torch.equal(codes, codes.round())
    assert codes.min() >= -128
    assert codes.max() <= 127
    assert bool(((codes * scale - x).abs() <= 0.5001 * scale).all())
    assert torch.equal(codes[1, 2], torch.zeros(37))
    assert torch.equal(codes[2, 3, 1:4], torch.tensor([-18.0, -16.0, -16.0])), "halves go to even"
