"""Gates: one bound on one metric each, judged on one-sided confidence bounds. Leaves out measuring and printing.

A gate must be able to fail, and to say that it does not know: PASS needs the bound on the bad side within the limit,
FAIL needs the bound on the good side beyond it, everything between is INCONCLUSIVE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from statistics import NormalDist
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from strop.errors import ExitCode, UserError, did_you_mean
from strop.metric import Estimate, Kind, Measurement, Metric
from strop.statistics import holm

Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE", "NOT_MEASURED"]
Level = Literal["standard", "strict", "lenient"]
Profile = Literal["int4", "int8", "compile_only"]
FAMILY_ERROR = 0.05
"""How often a run whose every gate holds exactly at its limit may fail."""
NO_ROW = "(no row)"
"""Row of the verdict on a gate that binds nothing."""


class Gate(BaseModel):
    """One bound on one metric: exactly one of `at_most` and `at_least`.

    Attributes:
        metric: What is bounded, `<eval>.<name>`, for example `divergence.kl_mean`.
        at_most: Largest value that passes.
        at_least: Smallest value that passes.
        of: Bound the paired ratio to this reference instead of the value; null: the value.
        rows: Patterns over row names; null: every row but the parent's and those that explore.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    metric: str = Field(min_length=1)
    at_most: float | None = Field(default=None, allow_inf_nan=False)
    at_least: float | None = Field(default=None, allow_inf_nan=False)
    of: Literal["parent", "parent_same_runtime", "plain", "release"] | None = None
    rows: list[str] | None = None

    @model_validator(mode="after")
    def _has_one_bound(self) -> Gate:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError("give exactly one of at_most and at_least")
        return self

    @property
    def limit(self) -> float:
        """The bound, whichever side it is on."""
        limit = self.at_least if self.at_most is None else self.at_most
        assert limit is not None
        return limit

    def binds(self, row: str) -> bool:
        """Whether it judges the row of this name. The parent's rows are judged only where a pattern begins so."""
        is_parent = row.split(" / ")[0] == "parent"
        if self.rows is None:
            return not is_parent
        return any(fnmatchcase(row, p) and (p.startswith("parent") or not is_parent) for p in self.rows)


@dataclass(frozen=True)
class Verdict:
    """What one gate says of one row.

    Attributes:
        metric: As in the gate.
        row: Name of the row, or `NO_ROW`.
        outcome: `PASS`, `FAIL`, `INCONCLUSIVE` or `NOT_MEASURED`.
        why: One line with the numbers that decided.
        kind: `quality` (a FAIL exits with 3) or `speed` (4).
        side: Which side the limit is on.
        limit: The bound that the gate sets.
        of: The reference whose ratio is bounded, or None.
        unit: Of value and limit; `×` for a ratio to a reference.
        value, lower, upper: The estimate and its one-sided bounds; None where nothing was measured.
        margin_used: How much of what the gate allows the bound on the bad side uses: 1 at the limit, more beyond it.
            Counted from the value that loses nothing where there is one (1 of a ratio, 100 of a percentage). None
            where nothing was measured or the limit is not positive.
    """

    metric: str
    row: str
    outcome: Outcome
    why: str
    kind: Kind
    side: Literal["at_most", "at_least"]
    limit: float
    of: str | None = None
    unit: str = ""
    value: float | None = None
    lower: float | None = None
    upper: float | None = None
    margin_used: float | None = None

    @property
    def rule(self) -> str:
        """The gate in words: `perplexity.ratio at most 1.25`."""
        return f"{self.metric} {self.side.replace('_', ' ')} {show(self.limit, self.unit)}" + (
            f" of {self.of}" if self.of and self.unit == "×" else ""
        )


class Judged(Protocol):
    """What a gate needs of a row of the report."""

    @property
    def name(self) -> str:
        """As printed: `main / onnx_runtime`."""

    @property
    def measurements(self) -> Mapping[str, Measurement]:
        """By `<eval>.<name>`."""

    @property
    def failures(self) -> Mapping[str, str]:
        """Metric -> why it could not be measured."""

    @property
    def is_explored(self) -> bool:
        """No gate binds it."""


def check_gates(gates: Sequence[Gate], metrics: Mapping[str, Metric], rows: Sequence[str]) -> None:
    """Refuse gates that could never be decided, before anything is measured.

    Args:
        gates: Of the recipe.
        metrics: `use` of each eval -> the metric.
        rows: Names of the rows that will be there, the parent's too.

    Raises:
        UserError: Nobody measures a gate's metric, its sample cannot carry it, or a pattern matches no row.
    """
    known = [f"{use}.{name}" for use, metric in metrics.items() for name in metric.names()]
    for index, gate in enumerate(gates):
        if gate.metric not in known:
            use, _, name = gate.metric.partition(".")
            reason = metrics[use].refusal(name) if use in metrics else None
            reason = reason or f"no eval measures {gate.metric!r}; {did_you_mean(gate.metric, known)}"
            raise UserError(f"gates[{index}].metric: {reason}")
        for pattern in gate.rows or ():
            if not any(fnmatchcase(row, pattern) for row in rows):
                raise UserError(f"gates[{index}].rows: {pattern!r} matches no row; {did_you_mean(pattern, rows)}")


def decide(gate: Gate, row: str, measurement: Measurement | None, kind: Kind, missing: str = "not measured") -> Verdict:
    """The verdict of one gate on one row, on its own: without the correction for several gates.

    Args:
        gate: The bound.
        row: Name of the row.
        measurement: What was measured; None: nothing.
        kind: Of the metric.
        missing: Why there is no measurement.
    """
    side: Literal["at_most", "at_least"] = "at_least" if gate.at_most is None else "at_most"
    blank = Verdict(gate.metric, row, "NOT_MEASURED", missing, kind, side, gate.limit, gate.of)
    if measurement is None:
        return blank
    estimate = measurement.estimate if gate.of is None else measurement.ratios.get(gate.of)
    if estimate is None:
        return replace(blank, why=f"no ratio to {gate.of} was measured")
    if any(math.isnan(x) for x in (estimate.value, estimate.lower, estimate.upper)):
        return replace(blank, why="the measured value is not a number")
    # a distance to a reference carries the same value as its "ratio": it keeps its unit
    unit = measurement.unit if gate.of is None or estimate == measurement.estimate else "×"
    bad, good = (estimate.upper, estimate.lower) if side == "at_most" else (estimate.lower, estimate.upper)
    outcome, why = _outcome(estimate, gate, bad, good, unit)
    return replace(
        blank, outcome=outcome, why=why, unit=unit, value=estimate.value, lower=estimate.lower, upper=estimate.upper,
        margin_used=_margin_used(bad, gate.limit, side, unit),
    )  # fmt: skip


def judge(gates: Sequence[Gate], rows: Sequence[Judged], metrics: Mapping[str, Metric]) -> list[Verdict]:
    """Every gate on every row it binds. PASS needs no correction: all must pass. FAIL is corrected by Holm (1979).

    Args:
        gates: Of the recipe.
        rows: Of the report.
        metrics: `use` of each eval -> the metric.

    Returns:
        In the order of the gates, then of the rows. A gate that binds no row is NOT_MEASURED.
    """
    verdicts: list[Verdict] = []
    tails: list[float | None] = []
    for gate in gates:
        use, _, name = gate.metric.partition(".")
        kind: Kind = metrics[use].kind if use in metrics else "quality"
        bound = [row for row in rows if not row.is_explored and gate.binds(row.name)]
        if not bound:
            verdicts.append(decide(gate, NO_ROW, None, kind, "binds no row of this run"))
            tails.append(None)
        for row in bound:
            missing = row.failures.get(gate.metric) or row.failures.get(use)
            missing = missing or (metrics[use].refusal(name) if use in metrics else None) or "not measured"
            measurement = row.measurements.get(gate.metric)
            verdict = decide(gate, row.name, measurement, kind, missing)
            verdicts.append(verdict)
            tails.append(_tail(gate, measurement) if verdict.value is not None else None)
    return _hold_family(verdicts, tails)


def exit_code(verdicts: Sequence[Verdict]) -> ExitCode:
    """What a run with these verdicts exits with; PASSED where there are none."""
    codes = {"PASS": ExitCode.PASSED, "INCONCLUSIVE": ExitCode.INCONCLUSIVE, "NOT_MEASURED": ExitCode.INCONCLUSIVE}
    failed = {"quality": ExitCode.QUALITY, "speed": ExitCode.SPEED}
    return ExitCode.worst(failed[v.kind] if v.outcome == "FAIL" else codes[v.outcome] for v in verdicts)


def summary(verdicts: Sequence[Verdict]) -> str:
    """The verdict of a run in one line."""
    if not verdicts:
        return "no gates: nothing was judged"
    counts = {o: sum(v.outcome == o for v in verdicts) for o in ("FAIL", "INCONCLUSIVE", "NOT_MEASURED", "PASS")}
    if counts["PASS"] == len(verdicts):
        return "passed: 1 gate" if len(verdicts) == 1 else f"passed: all {len(verdicts)} gates"
    words = {"FAIL": "failed", "INCONCLUSIVE": "inconclusive", "NOT_MEASURED": "not measured", "PASS": "passed"}
    listed = ", ".join(f"{n} {words[o]}" for o, n in counts.items() if n)
    head = "failed" if counts["FAIL"] else "not decided"
    return f"{head}: {listed}"


def profile(name: Profile, level: Level) -> list[Gate]:
    """Release limits for a kind of artifact, when its user has written none.

    Args:
        name: `int8` also serves 16-bit floats; `int4` everything below 8 bits; `compile_only` an equal function.
        level: `strict` halves what `standard` allows, `lenient` doubles it.

    Returns:
        Quality gates on the distance to the reference, and gates against becoming slower or larger than it.
    """
    scale = {"standard": 1.0, "strict": 0.5, "lenient": 2.0}[level]
    kl_mean, kl_p99, top_loss, ratio_loss = {
        "int8": (0.01, 0.10, 3.0, 0.01),
        "int4": (0.10, 1.0, 12.0, 0.08),
        "compile_only": (1e-6, 1e-4, 0.1, 1e-4),
    }[name]
    top = "divergence.same_top_off_ties" if name == "compile_only" else "divergence.same_top"
    return [
        Gate(metric="divergence.kl_mean", at_most=kl_mean * scale),
        Gate(metric="divergence.kl_p99", at_most=kl_p99 * scale),
        Gate(metric=top, at_least=100 - top_loss * scale),
        Gate(metric="perplexity.ratio", at_most=1 + ratio_loss * scale),
        Gate(metric="latency.decode_tokens_per_s", at_least=1 / (1 + 0.05 * scale), of="parent"),
        Gate(metric="size.total_bytes", at_most=1 + 0.05 * scale, of="parent"),
    ]


def profile_name(bits: float) -> Profile:
    """The profile for a model whose smallest weights take so many bits: 32 means that only its form changed."""
    return "int4" if bits < 7.5 else "int8" if bits < 32 else "compile_only"


def show(value: float, unit: str) -> str:
    """A number for people: three significant digits, bytes in powers of 1000."""
    if unit == "bytes":
        for name, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
            if abs(value) >= size:
                return f"{_digits(value / size)} {name}"
        return f"{value:.0f} B"
    number = _digits(value)
    return number + {"×": "×", "ratio": "", "%": " %", "": ""}.get(unit, f" {unit}")


def _digits(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e3 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    if abs(value) >= 1e7 or abs(value) < 1e-3:
        return f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e+")
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def _outcome(estimate: Estimate, gate: Gate, bad: float, good: float, unit: str) -> tuple[Outcome, str]:
    sign = 1 if gate.at_most is not None else -1
    words = ("at most", "at least")[sign < 0]
    limit = show(gate.limit, unit)
    if estimate.is_noisy:
        return "INCONCLUSIVE", f"the machine was too noisy to tell ({show(estimate.value, unit)}, {words} {limit})"
    if sign * (bad - gate.limit) <= 0:
        return "PASS", f"{show(bad, unit)} at worst, {words} {limit}"
    if sign * (good - gate.limit) > 0:
        return "FAIL", f"{show(good, unit)} at best, {words} {limit}"
    return "INCONCLUSIVE", f"between {show(estimate.lower, unit)} and {show(estimate.upper, unit)}, {words} {limit}"


def _margin_used(bad: float, limit: float, side: Literal["at_most", "at_least"], unit: str) -> float | None:
    lossless = {"ratio": 1.0, "×": 1.0, "%": 100.0}.get(unit)
    allows_loss = lossless is not None and (limit > lossless if side == "at_most" else limit < lossless)
    if lossless is not None and allows_loss:
        return max(0.0, (bad - lossless) / (limit - lossless))
    if bad <= 0 or limit <= 0:
        return None
    return bad / limit if side == "at_most" else limit / bad


def _tail(gate: Gate, measurement: Measurement | None) -> float | None:
    """One-sided p-value of "the true value is within the limit", in units of the estimate's own error rate.

    From the bound on the good side by a normal approximation: at most 1 exactly where that bound is beyond the limit.
    None where nothing is random: counted values need no correction.
    """
    assert measurement is not None
    estimate = measurement.estimate if gate.of is None else measurement.ratios[gate.of]
    if estimate.is_noisy or estimate.confidence >= 1:
        return None
    sign = 1 if gate.at_most is not None else -1
    good = estimate.lower if sign > 0 else estimate.upper
    normal = NormalDist()
    error = abs(estimate.value - good) / normal.inv_cdf(estimate.confidence)
    if not error or not math.isfinite(error):
        return None
    return normal.cdf(-sign * (estimate.value - gate.limit) / error) / (1 - estimate.confidence)


def _hold_family(verdicts: list[Verdict], tails: list[float | None]) -> list[Verdict]:
    """Holm's step-down over a run: a FAIL that does not survive it becomes INCONCLUSIVE."""
    family = [i for i, tail in enumerate(tails) if tail is not None]
    adjusted = holm([min(1.0, FAMILY_ERROR * (tails[i] or 0.0)) for i in family])
    held = list(verdicts)
    for i, p in zip(family, adjusted, strict=True):
        if verdicts[i].outcome == "FAIL" and p > FAMILY_ERROR:
            why = f"{verdicts[i].why}; not significant among the {len(family)} gates of this run (Holm)"
            held[i] = replace(verdicts[i], outcome="INCONCLUSIVE", why=why)
    return held
