"""t(k): a program whose cost is known gives that cost back, drift cancels, and refusals come before any process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes.table_runtime import save_table
from pydantic import ValidationError

from strop.artifact import Artifact, read_manifest, write_manifest
from strop.errors import UserError
from strop.evals._rounds import Rounds, compare_copies
from strop.evals.step_cost import COMPARED, Curve, StepCost, describe, summarize
from strop.metric import Estimate, MeasureContext, Measurement

WIDTHS = (1, 2, 4, 8)
STEP_S, TOKEN_S = 0.004, 0.001
ONE_THREAD = MeasureContext(threads=1)


def cost(step_s: float, token_s: float) -> list[float]:
    return [step_s + token_s * k for k in WIDTHS]


def curve(*programs: Sequence[float], drift: float = 0.0, copies: float = 1.0) -> Curve:
    """Twelve rounds of programs whose times grow by `drift` from round to round."""
    slower = (1 + drift) ** np.arange(12)
    seconds = np.array(programs)[:, None, :] * slower[:, None]
    ones = seconds[0][:, :1] * [copies, 1]
    return Curve(128, WIDTHS, seconds, compare_copies(ones, 0), Rounds([[]] * 12, [], False))


def test_ratios_are_those_of_the_costs_however_the_machine_drifts() -> None:
    found = summarize(curve(cost(3, 1), drift=0.2), seed=0)
    for k in WIDTHS[1:]:
        ratio = found[f"t{k}_ratio"].estimate
        assert [ratio.value, ratio.lower, ratio.upper] == pytest.approx([(3 + k) / 4] * 3)
    assert found["t8_ms"].estimate.lower < found["t8_ms"].estimate.upper
    assert found["t8_ms"].samples == 12


def test_times_are_medians_in_ms() -> None:
    found = summarize(curve(cost(3, 1)), seed=0)
    assert [found[f"t{k}_ms"].estimate.value for k in WIDTHS] == pytest.approx([4000, 5000, 7000, 11000])


def test_the_second_program_is_compared_within_rounds() -> None:
    found = summarize(curve(cost(3, 1), cost(8, 0), drift=0.2), seed=0)
    assert found["t1_ms"].ratios[COMPARED].value == pytest.approx(0.5)
    assert found["t8_ms"].ratios[COMPARED].value == pytest.approx(11 / 8)
    assert found["t8_ratio"].ratios[COMPARED].value == pytest.approx(11 / 4)
    assert found["t8_ratio"].estimate.value == pytest.approx(11 / 4)  # its own, whatever the other does


def test_copies_that_differ_widen_times_but_not_what_is_compared_within_a_process() -> None:
    same, other = (summarize(curve(cost(3, 1), cost(8, 0), copies=x), seed=0) for x in (1.0, 1.25))
    assert other["t8_ratio"] == same["t8_ratio"]
    assert other["t8_ms"].estimate.value == same["t8_ms"].estimate.value
    for before, after in (
        (same["t8_ms"].estimate, other["t8_ms"].estimate),
        (same["t8_ms"].ratios[COMPARED], other["t8_ms"].ratios[COMPARED]),
    ):
        assert [after.lower, after.upper] == pytest.approx([before.lower / 1.25, before.upper * 1.25])


def test_too_many_disturbed_rounds_make_everything_noisy() -> None:
    still = curve(cost(3, 1), cost(8, 0))
    found = summarize(replace(still, rounds=replace(still.rounds, is_noisy=True)), seed=0)
    assert all(x.estimate.is_noisy and x.ratios[COMPARED].is_noisy for x in found.values())
    assert not any(x.estimate.is_noisy for x in summarize(still, seed=0).values())


def test_a_described_curve_has_every_width_of_both_programs() -> None:
    found = json.loads(json.dumps(describe(curve(cost(3, 1), cost(8, 0)), seed=0), allow_nan=False))
    assert [x["width"] for x in found["points"]] == [x["width"] for x in found[COMPARED]] == list(WIDTHS)
    assert found["points"][0]["ratio"]["value"] == 1
    assert found["points"][3]["ms"]["value"] == pytest.approx(11000)
    assert found[COMPARED][3]["ms"]["value"] == pytest.approx(8000)
    assert COMPARED not in describe(curve(cost(3, 1)), seed=0)


def test_names_follow_the_widths() -> None:
    assert set(StepCost(widths=[4, 2]).names()) == {"t1_ms", "t2_ms", "t4_ms", "t2_ratio", "t4_ratio"}
    assert StepCost().refusal("t3_ratio") == (
        "t3_ratio is not among what these widths measure: add 3 to widths [1, 2, 4, 8, 16, 32, 64]"
    )
    assert [StepCost().refusal(x) for x in ("t8_ratio", "t1_ratio", "t8_s", "size")] == [None] * 4


@pytest.mark.parametrize("fields", [{"widths": [0, 1]}, {"widths": [2, 2]}, {"contexts": [-1]}, {"contexts": []}])
def test_numbers_that_are_no_widths_are_refused(fields: dict[str, list[int]]) -> None:
    with pytest.raises(ValidationError, match=next(iter(fields))):
        StepCost(**fields)  # type: ignore[arg-type]


def test_a_context_that_the_program_has_no_room_for_is_refused(tmp_path: Path) -> None:
    program = table(tmp_path / "program", STEP_S, TOKEN_S)
    with pytest.raises(UserError, match=r"contexts up to 1020 and widths up to 8 do not fit .* 1024 tokens"):
        StepCost(widths=[8], contexts=[0, 1020]).measure(program, {}, ONE_THREAD)


def test_a_model_that_runs_through_transformers_has_no_curve(tmp_path: Path) -> None:
    program = table(tmp_path / "program", STEP_S, TOKEN_S)
    write_manifest(program.path, replace(read_manifest(program.path), spec={"opaque_bytes": 7}))
    assert StepCost().measure(program, {}, ONE_THREAD) == {}


def table(folder: Path, step_s: float, token_s: float) -> Artifact:
    logits = np.random.default_rng(0).normal(size=(11, 11)).astype(np.float32)
    return save_table(folder, logits, logits, behaviour={"sleep_s": [step_s, token_s]}, key=folder.name)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measurement]:
    """A program against one whose steps all take as long as its widest, at two contexts."""
    folder = tmp_path_factory.mktemp("step_cost")
    program = table(folder / "candidate", STEP_S, TOKEN_S)
    references = {COMPARED: table(folder / "parent", STEP_S + 8 * TOKEN_S, 0.0)}
    metric = StepCost(widths=[8, 2, 4], contexts=[16, 0], repeats=6)
    return metric.measure(program, references, ONE_THREAD)


def test_a_known_cost_is_recovered(measured: dict[str, Measurement]) -> None:
    expected = dict(zip(WIDTHS, cost(STEP_S, TOKEN_S), strict=True))
    for k in WIDTHS:
        assert measured[f"t{k}_ms"].estimate.value >= 1000 * expected[k]
        assert measured[f"t{k}_ms"].estimate.value == pytest.approx(1000 * expected[k], rel=0.3)  # however busy
    for k in WIDTHS[1:]:
        assert measured[f"t{k}_ratio"].estimate.value == pytest.approx(expected[k] / expected[1], rel=0.3)
    assert measured["t1_ms"].ratios[COMPARED].value == pytest.approx(5 / 12, rel=0.3)


def test_every_context_is_in_the_detail(measured: dict[str, Measurement]) -> None:
    detail = json.loads(json.dumps(measured["t1_ms"].to_json(), allow_nan=False))["detail"]
    assert [x["cached"] for x in detail["curves"]] == [16, 0]
    assert [x["width"] for x in detail["curves"][1]["points"]] == list(WIDTHS)
    assert measured["t1_ms"].estimate.value == detail["curves"][0]["points"][0]["ms"]["value"]
    assert all(not x.detail for name, x in measured.items() if name != "t1_ms")


def test_the_program_itself_as_a_reference_has_a_ratio_of_exactly_one(tmp_path: Path) -> None:
    program = table(tmp_path / "program", 0.001, 0.0)
    found = StepCost(widths=[2], repeats=5).measure(program, {COMPARED: program, "parent": program}, ONE_THREAD)
    assert set(found) == {"t1_ms", "t2_ms", "t2_ratio"}
    assert all(x.ratios == {COMPARED: Estimate.exact(1.0)} for x in found.values())
    other = StepCost(widths=[2], repeats=6).measure(program, {}, ONE_THREAD)
    assert other["t1_ms"].ratios == {}
    assert other["t1_ms"].fingerprint != found["t1_ms"].fingerprint
    assert found["t1_ms"].fingerprint == found["t2_ratio"].fingerprint
