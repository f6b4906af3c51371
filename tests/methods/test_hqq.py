"""HQQ: the splitting against one number at a time, its guarantee against rounding, and the stage."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from references import tiny_folder
from torch import Tensor

from strop.artifact import Artifact, Manifest, hash_file, list_files, write_manifest
from strop.conformance import check_checkpoint
from strop.errors import UserError
from strop.methods import hqq
from strop.methods.hqq import SMALLEST_OUTLIER, Hqq, fit_scale, half_quadratic, outliers, split_error
from strop.model import Weights, load_linear, load_packed, read_spec
from strop.numerics import code_range, find_scales, quantize, round_scales
from strop.spec import Quantization
from strop.stage import Context

KEY = "0" * 64
FORMS = [
    Quantization(bits, group_size, symmetric)
    for bits, group_size, symmetric in itertools.product((2, 3, 4, 8), (None, 10), (True, False))
]


def weights(rows: int = 40, width: int = 30, seed: int = 0) -> Tensor:
    """Heavier tails than a normal distribution's, as trained weights have; large enough for errors to be outliers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator) * torch.exp(
        0.7 * torch.randn(rows, width, generator=generator)
    )


def slow_outlier(error: float) -> float:
    """E of an error."""
    size = max(abs(error) - abs(error) ** (hqq.P - 1) / hqq.BETA, 0.0) if error else 0.0
    return size if error > 0 else -size


def slow_error(group: list[float], scale: float, zero: int, bits: int) -> float:
    """Σ |E|ᵖ + β/2 (e - E)² with ŵ the nearest of all values that the grid has."""
    lowest, highest = code_range(bits)
    grid = [(code - zero) * scale for code in range(lowest, highest + 1)]
    errors = [w - min((abs(w - x), x) for x in grid)[1] for w in group]
    return sum(abs(slow_outlier(e)) ** hqq.P + hqq.BETA / 2 * (e - slow_outlier(e)) ** 2 for e in errors)


def slow_splitting(group: list[float], scale: float, zero: int, bits: int) -> list[tuple[float, float]]:
    """(error, scale) of each iteration from one start, in float64, one weight at a time."""
    lowest, highest = code_range(bits)
    found = [(slow_error(group, scale, zero, bits), scale)]
    for _ in range(hqq.ITERATIONS):
        steps = [min(max(round(w / scale) + zero, lowest), highest) - zero for w in group]
        target = [w - slow_outlier(w - step * scale) for w, step in zip(group, steps, strict=True)]
        squares = sum(step**2 for step in steps)
        dot = sum(a * b for a, b in zip(steps, target, strict=True))
        if squares and dot * scale > 0:
            scale = float(round_scales(torch.tensor(dot / squares)))
        found.append((slow_error(group, scale, zero, bits), scale))
    return found


@pytest.mark.parametrize("size", [1.0, 0.03])
@pytest.mark.parametrize(
    "form", [Quantization(4, None, False), Quantization(3, None, True), Quantization(2, None, False)]
)
def test_the_splitting_is_that_of_one_weight_at_a_time(form: Quantization, size: float) -> None:
    weight = weights(rows=12, width=17) * size
    scale, zero = half_quadratic(weight, form)
    first, first_zero = find_scales(weight, form)
    lowest, highest = code_range(form.bits)
    same = 0
    for row in range(len(weight)):
        group, s, z = weight[row].tolist(), float(first[row, 0]), int(first_zero[row, 0])
        zeros = [0] if form.symmetric else [min(max(z + x, lowest), highest) for x in (0, -1, 1)]
        tried = [(error, found, x) for x in zeros for error, found in slow_splitting(group, s, x, form.bits)]
        found = slow_error(group, float(scale[row, 0]), int(zero[row, 0]), form.bits)
        # float32 against float64: a weight half way between two codes may go either way.
        assert found <= 1.02 * min(tried)[0]
        same += min(tried)[1:] == (float(scale[row, 0]), int(zero[row, 0]))
    assert same >= 10


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1.0, 0.03])
def test_no_group_loses_more_than_by_rounding(form: Quantization, size: float) -> None:
    weight = weights() * size

    def lost(scale: Tensor, zero: Tensor) -> Tensor:
        groups = weight.reshape(*scale.shape, -1).flatten(0, 1)
        each = zip(groups, scale.flatten(), zero.flatten(), strict=True)
        return torch.tensor([split_error(w[None], s.view(1, 1), z.view(1, 1), form.bits) for w, s, z in each])

    found, rounded = lost(*half_quadratic(weight, form)), lost(*find_scales(weight, form))
    assert bool((found <= rounded * (1 + 1e-5)).all())
    assert float(found.sum()) < (1 if form.bits == 8 else 0.99) * float(rounded.sum())


def test_most_of_what_the_best_scale_and_zero_point_gain_is_gained() -> None:
    weight = weights(rows=20, width=10) * 0.1
    form = Quantization(3, None, False)
    scale, zero = half_quadratic(weight, form)
    first, first_zero = find_scales(weight, form)
    found, rounded, best = 0.0, 0.0, 0.0
    for row in range(len(weight)):
        group = weight[row].tolist()
        found += slow_error(group, float(scale[row, 0]), int(zero[row, 0]), 3)
        rounded += slow_error(group, float(first[row, 0]), int(first_zero[row, 0]), 3)
        scales = round_scales(float(first[row, 0]) * torch.linspace(0.2, 1.3, 150)).tolist()
        best += min(slow_error(group, s, z, 3) for s in scales for z in range(-4, 4))
    assert rounded - found > 0.5 * (rounded - best)


def test_large_errors_are_outliers_and_small_ones_are_not() -> None:
    error = torch.tensor([0.0, 0.9 * SMALLEST_OUTLIER, -0.9 * SMALLEST_OUTLIER, 1.1 * SMALLEST_OUTLIER, -3.0])
    found = outliers(error)
    assert not bool(found[:3].any())
    for x, y in zip(error[3:].tolist(), found[3:].tolist(), strict=True):
        assert y == pytest.approx(slow_outlier(x), rel=1e-4)
        assert y * x > 0


def test_one_outlier_does_not_move_the_scale_of_the_rest() -> None:
    steps = torch.arange(-8.0, 8.0).view(1, 1, 16)
    weight, scale = steps * 0.5, torch.tensor([[0.5]])
    spoiled = weight.clone()
    spoiled[0, 0, -1] += 10
    moved = fit_scale(steps, spoiled, scale)
    kept = fit_scale(steps, spoiled - outliers(spoiled - weight), scale)
    assert abs(float(kept - 0.5)) < 0.05 * abs(float(moved - 0.5))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [0.0, 0.3, -2.0, 1e-30])
def test_constant_groups_have_finite_scales(form: Quantization, value: float) -> None:
    weight = torch.full((3, 20), value)
    scale, zero = half_quadratic(weight, form)
    assert bool(scale.isfinite().all())
    assert bool((scale != 0).all())
    error = split_error(weight, scale, zero, form.bits)
    assert error <= split_error(weight, *find_scales(weight, form), form.bits) + 1e-9


@pytest.mark.parametrize("form", FORMS)
def test_scales_and_zero_points_fit_the_packed_form(form: Quantization) -> None:
    weight = weights() + 2.0  # far from zero: zero points at the end of their range
    scale, zero = half_quadratic(weight, form)
    lowest, highest = code_range(form.bits)
    assert torch.equal(scale, round_scales(scale))
    assert zero.dtype == torch.int8
    assert zero.min() >= lowest
    assert zero.max() <= highest
    assert not form.symmetric or not bool(zero.any())


def test_rows_are_independent() -> None:
    weight, form = weights(rows=7), Quantization(4, 10, False)
    together = half_quadratic(weight, form)
    alone = [half_quadratic(row[None], form) for row in weight]
    for index, found in enumerate(together):
        assert torch.equal(found, torch.cat([x[index] for x in alone]))


# The stage.


@pytest.fixture
def source(tmp_path: Path) -> Artifact:
    return Artifact(tiny_folder(tmp_path / "source"), "checkpoint", KEY)


def run(stage: Hqq, source: Artifact, out: Path) -> dict[str, Any]:
    out.mkdir()
    return stage.run(source, out, Context(scratch=out.parent, threads=1))


@pytest.mark.parametrize("fields", [{"bits": 5}, {"group_size": 0}, {"targets": []}, {"axis": 1}, {"symmetric": 1}])
def test_unknown_values_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Hqq.model_validate(fields)


def test_zero_points_are_the_default() -> None:
    assert Hqq().symmetric is False
    assert Hqq.needs_calibration is False


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("group_size", "symmetric"), [(16, True), (None, False), (8, False)])
def test_checkpoints_hold_the_nearest_codes_as_planned(
    source: Artifact, tmp_path: Path, bits: Any, group_size: int | None, symmetric: bool
) -> None:
    stage = Hqq(bits=bits, group_size=group_size, symmetric=symmetric)
    plan = stage.plan(read_spec(source.path), 0)
    out = tmp_path / "out"
    result = run(stage, source, out)
    assert result["spec"] == plan.spec == read_spec(out)
    ratios = result["report"]["error_to_rounding"]
    assert list(ratios) == [x.name for x in read_spec(source.path).match(None)]
    assert all(0.2 < x <= 1 for x in ratios.values())
    assert bits == 8 or max(ratios.values()) < 0.99
    form = Quantization(bits, group_size, symmetric)
    with Weights(source.path) as before, Weights(out) as after:
        for old, new in zip(read_spec(source.path).match(None), plan.spec.match(None), strict=True):
            weight = load_linear(before, old)
            scale, zero = half_quadratic(weight, form)
            expected = quantize(weight, scale, zero, bits), scale, zero
            for found, wanted in zip(load_packed(after, new), expected, strict=True):
                assert torch.equal(found, wanted)
    write_manifest(out, Manifest("checkpoint", KEY, result["spec"].to_json(), report=result["report"]))
    check_checkpoint(Artifact(out, "checkpoint", KEY), source)


def test_gpt2_is_quantized_along_its_inputs(tmp_path: Path) -> None:
    source = Artifact(tiny_folder(tmp_path / "source", "gpt2"), "checkpoint", KEY)
    result = run(Hqq(bits=8, group_size=16), source, tmp_path / "out")
    with Weights(source.path) as before, Weights(tmp_path / "out") as after:
        for old, new in zip(read_spec(source.path).match(None), result["spec"].match(None), strict=True):
            torch.testing.assert_close(load_linear(after, new), load_linear(before, old), atol=0.02, rtol=0)


def test_a_tied_head_can_be_a_target(source: Artifact, tmp_path: Path) -> None:
    result = run(Hqq(bits=8, group_size=16, targets=["lm_head"]), source, tmp_path / "out")
    assert result["spec"].head.quantization == Quantization(8, 16, False)
    assert list(result["report"]["error_to_rounding"]) == ["lm_head"]
    with Weights(tmp_path / "out") as after, Weights(source.path) as before:
        original = load_linear(before, read_spec(source.path).head)
        torch.testing.assert_close(load_linear(after, result["spec"].head), original, atol=0.02, rtol=0)


def test_equal_work_gives_equal_bytes(source: Artifact, tmp_path: Path) -> None:
    results = [run(Hqq(group_size=16), source, tmp_path / x) for x in "ab"]
    first, second = ({x.name: hash_file(x) for x in list_files(tmp_path / x)} for x in "ab")
    assert first == second
    assert results[0] == results[1]


def test_what_does_not_fit_the_model_is_refused_by_the_plan(source: Artifact) -> None:
    with pytest.raises(UserError, match=r"group_size 64 does not divide the 48 inputs"):
        Hqq().plan(read_spec(source.path), 0)
