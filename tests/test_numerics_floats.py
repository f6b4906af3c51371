"""Float formats: nearest elements against a table of all codes, scales, and what compressed-tensors makes of both."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp
from references import slow_e2m1, slow_e4m3, slow_nearest
from torch import Tensor

from strop import numerics
from strop.numerics import (
    code_dtype,
    dequantize,
    find_scales,
    global_scale,
    load_fixed,
    quantize,
    round_codes_,
    round_inputs,
    search_scales,
    static_scale,
    store_fixed,
    token_scales,
)
from strop.spec import Quantization

FP8 = Quantization(8, None, True, format="fp8")
PER_TENSOR = Quantization(8, None, True, format="fp8", per_tensor=True)
MXFP4 = Quantization(4, 32, True, format="mxfp4")
NVFP4 = Quantization(4, 16, True, format="nvfp4")
NF4 = Quantization(4, 64, True, format="nf4")
LLM_INT8 = Quantization(8, None, True, format="llm_int8")
FORMS = [FP8, PER_TENSOR, MXFP4, NVFP4, NF4, LLM_INT8]
PRESETS = {
    FP8: ("FP8_DYNAMIC", "float-quantized"),
    PER_TENSOR: ("FP8", "float-quantized"),
    MXFP4: ("MXFP4A16", "mxfp4-pack-quantized"),
    NVFP4: ("NVFP4A16", "nvfp4-pack-quantized"),
}


def weights(rows: int = 7, width: int = 192, seed: int = 0) -> Tensor:
    """(rows, width) of very different rows, one of zeros, with a loud weight."""
    w = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    w *= 10.0 ** torch.arange(-3, rows - 3)[:, None].clamp(max=0)
    w[rows - 2] = 0
    w[1, 5] = 3.0
    return w


def rounded(weight: Tensor, form: Quantization) -> tuple[Tensor, Tensor, Tensor]:
    scale, zero = find_scales(weight, form)
    return quantize(weight, scale, zero, form.bits, form.format), scale, zero


def test_all_codes_of_e4m3_are_those_of_torch() -> None:
    ours = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(ours, torch.tensor(slow_e4m3()), rtol=0, atol=0, equal_nan=True)


def table_of(format: str) -> list[float]:
    """What each code of a format is, in units of a scale."""
    if format == "nf4":
        return list(numerics.NF4)
    if format == "llm_int8":
        return [float(x) for x in range(-127, 128)]
    return slow_e4m3() if format == "fp8" else [2 * x for x in slow_e2m1()]


@pytest.mark.parametrize("format", ["fp8", "mxfp4", "nvfp4"])
def test_codes_are_the_nearest_and_saturate(format: Any) -> None:
    table = table_of(format)
    values = sorted({x for x in table if not math.isnan(x)})
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    largest = values[-1]
    tried = [*values, *middles, *(x * 1.001 for x in middles), 1.03 * largest, 1.1 * largest, 1e30, -1e30, 1e-30]
    found = round_codes_(torch.tensor(tried), torch.zeros(1), 4, format)
    assert found.tolist() == [slow_nearest(x, table) for x in torch.tensor(tried).tolist()]
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_weights_are_off_by_at_most_half_a_gap_of_their_element(form: Quantization) -> None:
    weight = weights()
    codes, scale, zero = rounded(weight, form)
    assert codes.dtype == code_dtype(form.format)
    assert bool((scale > 0).all())
    error = (dequantize(codes, scale, zero) - weight).abs()
    if form.format in ("nf4", "llm_int8"):
        quotients = (weight.reshape(*scale.shape, -1) / scale[..., None]).flatten()
        gaps = (quotients[:, None] - torch.tensor(table_of(form.format))).abs().amin(1)
        off = (codes.float().flatten() - quotients).abs()
        assert bool((off <= gaps + 1e-6 * quotients.abs()).all())
        return
    table = table_of(form.format)
    nearest = [slow_nearest(x, table) for x in (weight.reshape(*scale.shape, -1) / scale[..., None]).flatten().tolist()]
    assert codes.float().flatten().tolist() == nearest
    half = weight.abs() / (16 if form.format == "fp8" else 4)  # 3 or 1 bits after the leading one, halved
    smallest = scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1) * (2**-10 if form.format == "fp8" else 0.5)
    cut = 1.005 if form.format != "mxfp4" else 7 / 6  # the largest weight is cut where its scale was rounded down
    assert bool((error <= torch.maximum(half, smallest) * cut + 1e-12).all())


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_is_stored_comes_back(form: Quantization) -> None:
    codes, scale, zero = rounded(weights(), form)
    parts = store_fixed(codes, scale, form, None)
    again = load_fixed(parts.__getitem__, form, len(codes))
    for found, expected in zip(again, (codes, scale, zero), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found.float(), expected.float())


@pytest.mark.parametrize("form", PRESETS, ids=str)
def test_compressed_tensors_packs_and_unpacks_the_same(form: Quantization) -> None:
    weight = weights()
    codes, scale, zero = rounded(weight, form)
    parts = store_fixed(codes, scale, form, None)
    preset, name = PRESETS[form]
    scheme, compressor = preset_name_to_scheme(preset, ["Linear"]), BaseCompressor.get_value_from_registry(name)
    stored = dict(parts)
    if form.format == "fp8":
        stored["weight_scale"] = stored["weight_scale"].float()  # as loaded into a float32 model
    theirs = compressor.decompress(stored, scheme)["weight"]
    assert torch.equal(theirs.float(), dequantize(codes, scale, zero))
    given = {"weight": weight, "weight_scale": stored["weight_scale"].float()}
    if form.format == "mxfp4":
        given["weight_scale"] = 2 * scale
    if form.format == "nvfp4":
        given["weight_global_scale"] = parts["weight_global_scale"]
    packed = compressor.compress(given, scheme)
    part = "weight" if form.format == "fp8" else "weight_packed"
    ours, other = (x if form.format == "fp8" else without_negative_zeros(x) for x in (parts[part], packed[part]))
    assert torch.equal(
        ours.view(torch.uint8) if form.format != "fp8" else ours.float(),
        other.float() if form.format == "fp8" else other,
    )


def without_negative_zeros(packed: Tensor) -> Tensor:
    """Two codes a byte: they keep the sign of a weight that becomes zero, a sign that means nothing."""
    low, high = packed & 15, packed >> 4
    low, high = (torch.where(x == 8, 0, x) for x in (low, high))
    return low | (high << 4)


def test_block_scales_of_mxfp4_are_those_of_compressed_tensors() -> None:
    tried = torch.cat([torch.tensor([3.49, 3.5, 3.51, 4, 6, 6.99, 7, 7.01]) * 2.0**k for k in range(-9, 3)])
    args = preset_name_to_scheme("MXFP4A16", ["Linear"]).weights
    theirs, _ = calculate_qparams(-tried, tried, args)
    weight = torch.zeros(len(tried), 32)
    weight[:, 7] = tried
    scale, _ = find_scales(weight, MXFP4)
    assert torch.equal(2 * scale.flatten(), theirs)


def test_a_global_scale_is_the_largest_power_of_two_under_nvidias() -> None:
    for largest in (1e-6, 0.02, 1.0, 5.25, 5.2501, 37.0):
        found = float(global_scale(torch.tensor(largest)))
        assert math.frexp(found)[0] == 0.5
        assert 0.5 < found * largest / (448 * 6) <= 1


def test_linears_can_share_a_global_scale() -> None:
    one, other = weights(), 0.03 * weights(seed=1)
    largest = one.abs().max()
    scale, zero = find_scales(other, NVFP4, largest)
    codes = quantize(other, scale, zero, 4, "nvfp4")
    parts = store_fixed(codes, scale, NVFP4, global_scale(largest))
    assert torch.equal(parts["weight_global_scale"], global_scale(largest))
    assert torch.equal(dequantize(*load_fixed(parts.__getitem__, NVFP4, len(codes))), dequantize(codes, scale, zero))


def test_scales_of_another_format_are_refused() -> None:
    codes, scale, _ = rounded(weights(), NVFP4)
    for form in (FP8, MXFP4, NVFP4):
        given = codes.float().to(code_dtype(form.format))
        with pytest.raises(ValueError, match=form.format):
            store_fixed(given, scale * 1.01, form, None)


def test_bitsandbytes_packs_and_unpacks_the_same() -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    weight = weights()
    codes, scale, zero = rounded(weight, NF4)
    parts = store_fixed(codes, scale, NF4, None)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    expected = {"weight": packed, **{f"weight.{k}": x for k, x in state.as_dict(packed=True).items()}}
    assert expected.keys() == parts.keys()
    for name, tensor in expected.items():
        if name != "weight.absmax":  # that of zeros alone is not zero here
            assert torch.equal(parts[name], tensor), name
    torch.testing.assert_close(parts["weight.absmax"], expected["weight.absmax"])
    ours = functional.dequantize_4bit(
        parts["weight"],
        functional.QuantState.from_dict(
            {k.removeprefix("weight."): x for k, x in parts.items() if k != "weight"}, torch.device("cpu")
        ),
    )
    torch.testing.assert_close(ours, dequantize(codes, scale, zero), rtol=1e-6, atol=0)


def test_bitsandbytes_rounds_rows_to_the_same_integers() -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    weight = weights()
    codes, scale, zero = rounded(weight, LLM_INT8)
    parts = store_fixed(codes, scale, LLM_INT8, None)
    theirs, largest, _ = functional.int8_vectorwise_quant(weight.half())
    has_values = weight.abs().amax(1) > 2**-12  # those below float16's normal numbers it sees otherwise
    assert int((codes.int() - theirs.int()).abs()[has_values].max()) <= 1  # its scales are not rounded to bfloat16
    assert float(((codes != theirs)[has_values]).float().mean()) < 0.2
    torch.testing.assert_close(parts["SCB"][has_values], largest[has_values], rtol=0.005, atol=0)
    ours = functional.int8_vectorwise_dequant(parts["weight"], parts["SCB"])
    torch.testing.assert_close(ours, dequantize(codes, scale, zero), rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", [FP8, MXFP4, NVFP4, NF4, LLM_INT8], ids=str)
def test_searched_scales_lose_no_more_than_extremes(form: Quantization) -> None:
    weight = weights(rows=11, seed=3)
    importance = torch.rand(192, generator=torch.Generator().manual_seed(1)) ** 4

    def lost(scale: Tensor, zero: Tensor) -> Tensor:
        error = dequantize(quantize(weight, scale, zero, form.bits, form.format), scale, zero) - weight
        return (error.square() * importance).reshape(*scale.shape, -1).sum(-1)

    searched = search_scales(weight, form, importance)
    least, before = lost(*searched), lost(*find_scales(weight, form))
    assert bool((least <= before * (1 + 1e-5)).all())
    assert bool((least < 0.95 * before).any())
    store_fixed(quantize(weight, *searched, form.bits, form.format), searched[0], form, None)  # they can be stored


def test_searching_a_few_rows_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, importance = weights(rows=11, seed=3), torch.ones(192)
    whole = search_scales(weight, NVFP4, importance)
    monkeypatch.setattr(numerics, "SEARCH_WEIGHTS", 200)
    for found, expected in zip(search_scales(weight, NVFP4, importance), whole, strict=True):
        assert torch.equal(found, expected)


def test_one_scale_for_a_matrix_is_not_searched() -> None:
    weight = weights()
    scale, _ = search_scales(weight, PER_TENSOR, torch.ones(192))
    assert torch.equal(scale, find_scales(weight, PER_TENSOR)[0])
    assert len(scale.unique()) == 1


def test_inputs_are_rounded_as_compressed_tensors_does() -> None:
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    x = torch.randn(3, 5, 37, generator=torch.Generator().manual_seed(0))
    x[..., 11] *= 50
    for dynamic, strategy in ((True, "token"), (False, "tensor")):
        args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy, dynamic=dynamic)
        scale = torch.tensor([2.0**-3])
        if dynamic:
            scale, _ = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity())
        ours = token_scales(x, "fp8") if dynamic else scale
        assert torch.equal(round_inputs(x, ours, "fp8") * ours, fake_quantize(x, scale, torch.zeros(1), args))
    assert float(static_scale(x.abs(), "fp8")) == pytest.approx(float(x.abs().max()) / 448, rel=0.004)
    assert not round_inputs(torch.zeros(1, 3), token_scales(torch.zeros(1, 3), "fp8"), "fp8").any()
