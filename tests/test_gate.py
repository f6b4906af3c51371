"""Gates: outcomes on one-sided bounds, the correction for several gates, exit codes, profiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
import pytest
from pydantic import ValidationError

from strop.artifact import Artifact
from strop.errors import ExitCode, UserError
from strop.gate import Gate, Verdict, check_gates, decide, exit_code, judge, profile, show, summary
from strop.metric import Estimate, Kind, MeasureContext, Measurement, Metric


class Distance(Metric):
    kind = "quality"

    def names(self) -> Mapping[str, str]:
        return {"kl_mean": "nats", "same_top": "%"}

    def measure(
        self, program: Artifact, references: Mapping[str, Artifact], context: MeasureContext
    ) -> dict[str, Measurement]:
        return {}


class Clock(Metric):
    kind = "speed"

    def names(self) -> Mapping[str, str]:
        return {"tokens_per_s": "tokens/s"}

    def refusal(self, name: str) -> str | None:
        return "tpot_p99_ms needs 1000 generations, samples is 40" if name == "tpot_p99_ms" else None

    measure = Distance.measure


METRICS: dict[str, Metric] = {"distance": Distance(), "clock": Clock()}


@dataclass
class FakeRow:
    name: str
    measurements: dict[str, Measurement] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    is_explored: bool = False


def measured(value: float, lower: float, upper: float, **changes: object) -> Measurement:
    estimate = Estimate(value, lower, upper, is_noisy=bool(changes.pop("is_noisy", False)))
    return Measurement(estimate, "nats", "lower", 64, {"stride": 1}, **changes)  # type: ignore[arg-type]  # test's own


def outcome(gate: Gate, measurement: Measurement | None, kind: Kind = "quality") -> str:
    return decide(gate, "main / eager", measurement, kind).outcome


@pytest.mark.parametrize(
    ("lower", "upper", "at_most", "at_least"),
    [
        (0.1, 0.2, "PASS", "FAIL"),
        (0.2, 0.3, "PASS", "INCONCLUSIVE"),
        (0.25, 0.35, "INCONCLUSIVE", "INCONCLUSIVE"),
        (0.3, 0.4, "INCONCLUSIVE", "PASS"),
        (0.31, 0.4, "FAIL", "PASS"),
    ],
)
def test_the_bound_on_the_bad_side_passes_and_the_one_on_the_good_side_fails(
    lower: float, upper: float, at_most: str, at_least: str
) -> None:
    measurement = measured((lower + upper) / 2, lower, upper)
    assert outcome(Gate(metric="distance.kl_mean", at_most=0.3), measurement) == at_most
    assert outcome(Gate(metric="distance.kl_mean", at_least=0.3), measurement) == at_least


def test_a_noisy_machine_decides_nothing() -> None:
    gate = Gate(metric="distance.kl_mean", at_most=0.3)
    assert outcome(gate, measured(0.1, 0.1, 0.1, is_noisy=True)) == "INCONCLUSIVE"
    assert outcome(gate, measured(9.0, 9.0, 9.0, is_noisy=True)) == "INCONCLUSIVE"


def test_what_is_absent_or_not_a_number_never_passes() -> None:
    gate = Gate(metric="distance.kl_mean", at_most=0.3)
    nan = float("nan")
    assert outcome(gate, None) == "NOT_MEASURED"
    assert outcome(gate, measured(nan, nan, nan)) == "NOT_MEASURED"
    assert outcome(Gate(metric="distance.kl_mean", at_most=0.3, of="plain"), measured(0.1, 0.1, 0.1)) == "NOT_MEASURED"


def test_of_judges_the_paired_ratio() -> None:
    gate = Gate(metric="clock.tokens_per_s", at_least=3.0, of="parent")
    measurement = measured(50, 48, 52, ratios={"parent": Estimate(2.5, 2.4, 2.6)})
    verdict = decide(gate, "main / eager", measurement, "speed")
    assert (verdict.outcome, verdict.value, verdict.unit) == ("FAIL", 2.5, "×")
    assert verdict.rule == "clock.tokens_per_s at least 3.00× of parent"
    assert verdict.margin_used == pytest.approx(3.0 / 2.4)


def test_a_distance_keeps_its_unit_under_of() -> None:
    measurement = measured(0.1, 0.09, 0.12, ratios={"parent": Estimate(0.1, 0.09, 0.12)})
    verdict = decide(Gate(metric="distance.kl_mean", at_most=0.2, of="parent"), "x", measurement, "quality")
    assert (verdict.unit, verdict.rule) == ("nats", "distance.kl_mean at most 0.200 nats")
    assert verdict.margin_used == pytest.approx(0.6)


@pytest.mark.parametrize(
    "fields",
    [
        {"metric": "a.b"},
        {"metric": "a.b", "at_most": 1.0, "at_least": 0.0},
        {"metric": "a.b", "at_most": float("nan")},
        {"metric": "a.b", "at_most": "1"},
        {"metric": "a.b", "at_most": 1.0, "of": "teacher"},
        {"metric": "a.b", "at_most": 1.0, "row": ["x"]},
    ],
)
def test_a_gate_that_cannot_be_meant_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Gate.model_validate(fields)


def test_gates_bind_every_row_but_the_parents_and_the_explored() -> None:
    low = measured(0.1, 0.1, 0.1)
    names = ["parent / eager", "parent / fast", "main / fast", "w8 / fast", "wild / fast"]
    rows = [FakeRow(x, {"distance.kl_mean": low}, is_explored=x.startswith("wild")) for x in names]

    def bound(*patterns: str) -> list[str]:
        gate = Gate(metric="distance.kl_mean", at_most=1.0, rows=list(patterns) or None)
        return [v.row for v in judge([gate], rows, METRICS)]

    assert bound() == ["main / fast", "w8 / fast"]
    assert bound("* / fast") == ["main / fast", "w8 / fast"]
    assert bound("parent / fast", "w8*") == ["parent / fast", "w8 / fast"]
    assert bound("wild*") == ["(no row)"]


def test_a_gate_that_binds_no_row_blocks() -> None:
    verdicts = judge([Gate(metric="distance.kl_mean", at_most=1.0)], [FakeRow("parent / eager")], METRICS)
    assert [v.outcome for v in verdicts] == ["NOT_MEASURED"]
    assert exit_code(verdicts) == ExitCode.INCONCLUSIVE


def test_a_metric_that_crashed_says_why() -> None:
    gates = [Gate(metric="distance.kl_mean", at_most=1.0), Gate(metric="clock.tpot_p99_ms", at_most=1.0)]
    verdicts = judge(gates, [FakeRow("main / eager", failures={"distance": "worker died"})], METRICS)
    assert [(v.outcome, v.kind) for v in verdicts] == [("NOT_MEASURED", "quality"), ("NOT_MEASURED", "speed")]
    assert [v.why for v in verdicts] == ["worker died", "tpot_p99_ms needs 1000 generations, samples is 40"]


def test_holm_holds_back_a_failure_that_many_gates_make_likely() -> None:
    normal = NormalDist()
    error = 0.1 / normal.inv_cdf(0.95)

    def row(z: float) -> FakeRow:
        value = 0.3 + z * error
        return FakeRow(f"main / {z}", {"distance.kl_mean": measured(value, value - 0.1, value + 0.1)})

    gate = Gate(metric="distance.kl_mean", at_most=0.3)
    assert [v.outcome for v in judge([gate], [row(2.0)], METRICS)] == ["FAIL"]
    many = judge([gate], [row(2.0), *(row(x / 100) for x in range(9))], METRICS)
    assert many[0].outcome == "INCONCLUSIVE"
    assert many[0].why.endswith("not significant among the 10 gates of this run (Holm)")
    assert judge([gate], [row(5.0), *(row(x / 100) for x in range(9))], METRICS)[0].outcome == "FAIL"


def test_holm_decides_as_its_textbook_definition() -> None:
    generator = np.random.default_rng(0)
    normal, half = NormalDist(), 0.1
    error = half / normal.inv_cdf(0.95)
    gate = Gate(metric="distance.kl_mean", at_most=0.3)
    for _ in range(50):
        z = generator.normal(1.2, 1.2, size=6)
        rows = [
            FakeRow(f"main / {i}", {"distance.kl_mean": measured(0.3 + x * error, 0.3 + x * error - half, 9)})
            for i, x in enumerate(z)
        ]
        p = np.array([1 - normal.cdf(float(x)) for x in z])
        adjusted = [max(min(1, (p >= q).sum() * q) for q in p if q <= mine) for mine in p]
        expected = ["FAIL" if x <= 0.05 else "INCONCLUSIVE" for x in adjusted]
        assert [v.outcome for v in judge([gate], rows, METRICS)] == expected


def test_counted_values_need_no_correction() -> None:
    count = Measurement(Estimate.exact(2.0), "bytes", "lower", 1, {})
    rows = [FakeRow(f"main / {i}", {"distance.kl_mean": count}) for i in range(20)]
    verdicts = judge([Gate(metric="distance.kl_mean", at_most=1.0)], rows, METRICS)
    assert {v.outcome for v in verdicts} == {"FAIL"}


def test_a_run_at_its_limits_fails_in_at_most_one_of_twenty() -> None:
    generator = np.random.default_rng(1)
    half = NormalDist().inv_cdf(0.95)
    gate = Gate(metric="distance.kl_mean", at_most=0.0)
    failed = 0
    for _ in range(400):
        rows = [
            FakeRow(f"main / {i}", {"distance.kl_mean": measured(x, x - half, x + half)})
            for i, x in enumerate(generator.normal(size=5))
        ]
        failed += any(v.outcome == "FAIL" for v in judge([gate], rows, METRICS))
    assert failed / 400 < 0.05 + 0.033  # three standard errors above the promised rate


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([], ExitCode.PASSED),
        ([("PASS", "quality")], ExitCode.PASSED),
        ([("PASS", "quality"), ("INCONCLUSIVE", "speed")], ExitCode.INCONCLUSIVE),
        ([("NOT_MEASURED", "quality")], ExitCode.INCONCLUSIVE),
        ([("FAIL", "speed"), ("INCONCLUSIVE", "quality")], ExitCode.SPEED),
        ([("FAIL", "speed"), ("FAIL", "quality")], ExitCode.QUALITY),
    ],
)
def test_exit_codes_follow_the_kind_of_what_failed(outcomes: list[tuple[str, Kind]], code: ExitCode) -> None:
    verdicts = [Verdict("m", "r", x, "", kind, "at_most", 1.0) for x, kind in outcomes]  # type: ignore[arg-type]
    assert exit_code(verdicts) == code


def test_nothing_judged_is_never_called_passed() -> None:
    assert summary([]) == "no gates: nothing was judged"
    passed = Verdict("m", "r", "PASS", "", "quality", "at_most", 1.0)
    missing = Verdict("m", "r", "NOT_MEASURED", "", "quality", "at_most", 1.0)
    assert summary([passed]) == "passed: 1 gate"
    assert summary([passed, missing]) == "not decided: 1 not measured, 1 passed"


def test_an_unknown_metric_is_refused_with_a_suggestion() -> None:
    with pytest.raises(
        UserError, match=r"gates\[0\].metric: no eval measures 'distance.kl_men'; did you mean 'distance.kl_mean'"
    ):
        check_gates([Gate(metric="distance.kl_men", at_most=1.0)], METRICS, ["main / eager"])


def test_a_percentile_that_the_sample_cannot_carry_is_refused() -> None:
    with pytest.raises(UserError, match="needs 1000 generations"):
        check_gates([Gate(metric="clock.tpot_p99_ms", at_most=1.0)], METRICS, ["main / eager"])


def test_a_pattern_that_matches_no_row_is_refused() -> None:
    gate = Gate(metric="distance.kl_mean", at_most=1.0, rows=["mian*"])
    with pytest.raises(UserError, match="'mian\\*' matches no row"):
        check_gates([gate], METRICS, ["parent / eager", "main / eager"])
    check_gates([gate.model_copy(update={"rows": ["main*"]})], METRICS, ["main / eager"])


def test_profiles_double_and_halve() -> None:
    limits = {
        level: {g.metric: g.limit for g in profile("int4", level)}  # type: ignore[arg-type]
        for level in ("strict", "standard", "lenient")
    }
    assert [limits[x]["divergence.kl_mean"] for x in limits] == [0.05, 0.1, 0.2]
    assert [limits[x]["divergence.same_top"] for x in limits] == [94, 88, 76]
    assert [limits[x]["perplexity.ratio"] for x in limits] == pytest.approx([1.04, 1.08, 1.16])


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (88_412_345, "bytes", "88.4 MB"),
        (512, "bytes", "512 B"),
        (1.0834, "ratio", "1.08"),
        (5.6712, "×", "5.67×"),
        (123.4, "tokens/s", "123 tokens/s"),
        (10826.3, "tokens/s", "10,826 tokens/s"),
        (0.00012, "nats", "1.20e-4 nats"),
        (97.25, "%", "97.2 %"),
        (0.0, "nats", "0 nats"),
    ],
)
def test_numbers_are_shown_with_three_digits(value: float, unit: str, text: str) -> None:
    assert show(value, unit) == text
