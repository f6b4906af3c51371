"""What a run found: `report.json` is the truth, the table, Markdown, CSV and JUnit XML here are views of it.

Leaves out the HTML page (page.py) and who fills a report (runner.py, release.py).
"""

from __future__ import annotations

import csv as csv_module
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from xml.etree import ElementTree

from strop.errors import UserError
from strop.gate import Outcome, Verdict, show, summary
from strop.metric import Estimate, Measurement

T = TypeVar("T")
REPORT = "report.json"
REPORT_VERSION = 1
QUALITY = "divergence.kl_mean"
"""The quality axis of the picture: distance to the parent in nats, less is better."""
SPEED = "latency.decode_tokens_per_s"
"""The speed axis, more is better."""
COLUMNS: Mapping[str, str] = {
    "size.total_bytes": "size",
    "divergence.kl_mean": "mean KL",
    "divergence.same_top": "same top‑1",
    "perplexity.ratio": "ppl ratio",
    "latency.ttft_ms": "TTFT",
    "latency.decode_tokens_per_s": "decode",
    "memory.peak_bytes": "peak memory",
}
"""What the short table shows of the measurements that are there; the others are in the CSV, JSON and HTML."""
CSV_COLUMNS = (
    "row", "chain", "runtime", "key", "metric", "reference", "value", "lower", "upper", "confidence", "is_noisy",
    "unit", "direction", "samples", "fingerprint", "measured_at",
)  # fmt: skip
HEAD_UNITS = ("nats", "ms", "tokens/s", "%")
"""Units that stand in the head of a column instead of in every cell."""
RATIO_COLUMNS: Mapping[str, str] = {
    "parent": "decode × parent",
    "parent_same_runtime": "decode × same runtime",
    "plain": "decode × plain",
}
"""Speed ratios that the short table shows: to the parent in eager, on the same runtime, and without speculation."""


@dataclass(frozen=True)
class Row:
    """One program with what was measured of it.

    Attributes:
        name: `<chain> / <runtime>`.
        chain: `parent`, `main` or a variant's name.
        runtime: Module name in `strop.export`.
        key: Of the program.
        size_bytes: Of its files.
        measurements: By `<eval>.<name>`.
        measured_at: Same keys -> ISO time.
        is_explored: No gate binds it.
        failures: Metric or eval -> why it could not be measured.
    """

    name: str
    chain: str
    runtime: str
    key: str
    size_bytes: int
    measurements: dict[str, Measurement] = field(default_factory=dict)
    measured_at: dict[str, str] = field(default_factory=dict)
    is_explored: bool = False
    failures: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StageRecord:
    """One stage of a chain and what it took.

    Attributes:
        name: In the recipe.
        use: Module name.
        key: Of its output.
        chain: As in `Row`.
        seconds: Wall time of the run that made it.
        peak_memory_bytes: Largest resident set of that run.
        is_cached: The store had it already: this run spent none of the seconds.
        size_bytes: Of its output.
        report: Of its manifest.
        attribution: What the model is worth after it: number by name (`kl_mean`, `tokens_per_s`), or None.
    """

    name: str
    use: str
    key: str
    chain: str
    seconds: float
    peak_memory_bytes: int
    is_cached: bool
    size_bytes: int
    report: dict[str, Any] = field(default_factory=dict)
    attribution: dict[str, Any] | None = None


@dataclass(frozen=True)
class Report:
    """Everything a run found.

    Attributes:
        strop_version: That wrote it.
        recipe: As it was run, overrides applied.
        recipe_name: For people.
        created: ISO time.
        machine: cpu, isa, cores, memory, os, python, libraries.
        rows: The parent's first.
        gates: Verdicts.
        stages: In the order they ran.
        notes: Lines worth a reader's attention.
        exit_code: Of the run.
    """

    strop_version: str
    recipe: dict[str, Any]
    recipe_name: str
    created: str
    machine: dict[str, Any]
    rows: list[Row]
    gates: list[Verdict]
    stages: list[StageRecord]
    notes: list[str]
    exit_code: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; numbers that are not finite become null."""
        rows = [
            {**asdict(row), "measurements": {k: m.to_json() for k, m in row.measurements.items()}} for row in self.rows
        ]
        data: dict[str, Any] = _finite({**asdict(self), "rows": rows})
        return {"version": REPORT_VERSION, **data}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Report:
        """The report that `to_json` wrote."""
        rest = {k: v for k, v in data.items() if k not in ("version", "rows", "gates", "stages")}
        rows = [
            Row(**{**row, "measurements": {k: _measurement(m) for k, m in row["measurements"].items()}})
            for row in data["rows"]
        ]
        gates = [Verdict(**x) for x in data["gates"]]
        return Report(rows=rows, gates=gates, stages=[StageRecord(**x) for x in data["stages"]], **rest)


def dumps(report: Report) -> str:
    """The text of `report.json`."""
    return json.dumps(report.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read_report(path: Path) -> Report:
    """A report from its JSON file, or from the folder that holds it.

    Raises:
        UserError: There is none, it is damaged, or another version wrote it.
    """
    file = path / REPORT if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        what = f"holds no {REPORT}" if path.is_dir() else "no such file or folder"
        raise UserError(f"{path}: {what}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not a report, not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("version") != REPORT_VERSION:
        raise UserError(f"{file}: not a report of version {REPORT_VERSION}")
    try:
        return Report.from_json(data)
    except (KeyError, TypeError) as error:
        raise UserError(f"{file}: damaged report, {error}") from error


def pareto(rows: Sequence[Row]) -> list[Row]:
    """The rows that no other row beats: at least as close to the parent and as fast, and better in one of the two.

    Args:
        rows: Of one report. The parent's own program is at distance 0.

    Returns:
        Slowest first. Rows that miss either number are left out.
    """
    points = {row.name: point for row in rows if (point := position(row)) is not None}
    best = front([(name, *point) for name, point in points.items()])
    return sorted((row for row in rows if row.name in best), key=lambda row: (points[row.name][1], row.name))


def front(points: Sequence[tuple[T, float, float]]) -> set[T]:
    """What of (name, loss, speed) no other beats: at most its loss, at least its speed, better in one of the two."""
    return {
        name
        for name, loss, fast in points
        if not any(a <= loss and b >= fast and (a < loss or b > fast) for _, a, b in points)
    }


def position(row: Row) -> tuple[float, float] | None:
    """(`QUALITY`, `SPEED`) of a row, None where either was not measured."""
    if SPEED not in row.measurements:
        return None
    fast = row.measurements[SPEED].estimate.value
    if QUALITY in row.measurements:
        return row.measurements[QUALITY].estimate.value, fast
    return (0.0, fast) if is_parent(row) else None


def is_parent(row: Row) -> bool:
    """The untouched model in eager: what every distance is measured to."""
    return row.chain == "parent" and row.runtime == "eager"


def row_outcome(report: Report, row: Row) -> Outcome | None:
    """The worst verdict on a row; None where no gate binds it."""
    found = {v.outcome for v in report.gates if v.row == row.name}
    order: tuple[Outcome, ...] = ("FAIL", "NOT_MEASURED", "INCONCLUSIVE", "PASS")
    return next((outcome for outcome in order if outcome in found), None)


def bounded(estimate: Estimate, unit: str) -> str:
    """`1.08 nats (1.05–1.11)`, or the value alone where nothing is random. `~` marks a machine that was too noisy."""
    value = ("~" if estimate.is_noisy else "") + show(estimate.value, unit)
    if estimate.lower == estimate.upper:
        return value
    low, high = (show(x, unit if unit == "bytes" else "") for x in (estimate.lower, estimate.upper))
    return f"{value} ({low}–{high})"


def cells(report: Report) -> list[list[str]]:
    """The short table as text, its header first: one line per row, a column per headline metric that is there."""
    shown = [x for x in COLUMNS if any(x in row.measurements for row in report.rows) or x == "size.total_bytes"]
    references = [x for x in RATIO_COLUMNS if any(ratio(row, x) for row in report.rows)]
    best = {row.name for row in pareto(report.rows)}
    units = {name: m.unit for row in report.rows for name, m in row.measurements.items() if m.unit in HEAD_UNITS}
    heads = [f"{COLUMNS[x]}, {units[x]}" if x in units else COLUMNS[x] for x in shown]
    lines = [["row", *heads, *(RATIO_COLUMNS[x] for x in references), "verdict"]]
    for row in report.rows:
        values = [_cell(row, x) for x in shown]
        ratios = [bounded(found, "") if (found := ratio(row, x)) else "–" for x in references]
        outcome = row_outcome(report, row)
        verdict = outcome.replace("_", " ") if outcome else ("explored" if row.is_explored else "–")
        lines.append([row.name + (" *" if row.name in best else ""), *values, *ratios, verdict])
    return lines


def ratio(row: Row, reference: str) -> Estimate | None:
    """Paired speed ratio of a row to a reference."""
    measurement = row.measurements.get(SPEED)
    return measurement.ratios.get(reference) if measurement else None


def table(report: Report) -> str:
    """The report for a terminal: rows, gates, notes, verdict. Plain text, aligned."""
    lines = [f"{report.recipe_name}: {_machine_line(report)}", "", *aligned(cells(report))]
    if pareto(report.rows):
        lines.append("* no other row is both faster and closer to the parent")
    if any("~" in cell for line in cells(report) for cell in line):
        lines.append("~ the machine was too noisy")
    if report.gates:
        gates = [[v.outcome.replace("_", " "), v.rule, v.row, v.why] for v in report.gates]
        lines += ["", *aligned([["gate", "rule", "row", "because"], *gates], right=False)]
    failures = [f"{row.name}: {name}: {why}" for row in report.rows for name, why in row.failures.items()]
    for title, items in (("not measured", failures), ("notes", report.notes)):
        lines += ["", f"{title}:", *(f"  {x}" for x in items)] if items else []
    return "\n".join([*lines, "", f"{summary(report.gates)} (exit code {report.exit_code})"])


def markdown(report: Report) -> str:
    """The report as GitHub-flavoured Markdown."""
    lines = [f"# {report.recipe_name}", "", f"**{summary(report.gates)}** (exit code {report.exit_code})", ""]
    lines += [*_markdown_table(cells(report)), ""]
    if pareto(report.rows):
        lines += ["\\* no other row is both faster and closer to the parent", ""]
    if report.gates:
        gates = [[v.outcome.replace("_", " "), v.rule, v.row, v.why] for v in report.gates]
        lines += ["## Gates", "", *_markdown_table([["verdict", "gate", "row", "because"], *gates]), ""]
    if report.stages:
        header = ["chain", "stage", "seconds", "peak memory", "size", "from the store"]
        stages = [
            [s.chain, f"{s.name} ({s.use})" if s.name != s.use else s.use, f"{s.seconds:.1f}",
             show(s.peak_memory_bytes, "bytes"), show(s.size_bytes, "bytes"), "yes" if s.is_cached else "no"]
            for s in report.stages
        ]  # fmt: skip
        lines += ["## Stages", "", *_markdown_table([header, *stages]), ""]
    failures = [f"- {row.name}: {name}: {why}" for row in report.rows for name, why in row.failures.items()]
    lines += ["## Not measured", "", *failures, ""] if failures else []
    lines += ["## Notes", "", *(f"- {x}" for x in report.notes), ""] if report.notes else []
    return "\n".join([*lines, f"{_machine_line(report)}; strop {report.strop_version}, {report.created}", ""])


def csv(report: Report) -> str:
    """Every measurement on a line of its own; ratios follow their value, with the reference named."""
    out = io.StringIO()
    writer = csv_module.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in report.rows:
        for name, m in row.measurements.items():
            for reference, estimate in [("", m.estimate), *m.ratios.items()]:
                unit = m.unit if not reference or estimate == m.estimate else "ratio"
                writer.writerow([
                    row.name, row.chain, row.runtime, row.key, name, reference,
                    *(repr(x) for x in (estimate.value, estimate.lower, estimate.upper, estimate.confidence)),
                    int(estimate.is_noisy), unit, m.direction, m.samples, m.fingerprint, row.measured_at.get(name, ""),
                ])  # fmt: skip
    return out.getvalue()


def junit(report: Report) -> str:
    """Gates as test cases: FAIL is a failure; what is inconclusive or not measured is an error, it blocks too."""
    blocked = sum(v.outcome in ("INCONCLUSIVE", "NOT_MEASURED") for v in report.gates)
    counts = {
        "tests": str(len(report.gates)),
        "failures": str(sum(v.outcome == "FAIL" for v in report.gates)),
        "errors": str(blocked),
    }
    root = ElementTree.Element("testsuites", {"name": "strop", **counts})
    about = {"name": report.recipe_name, "timestamp": report.created, **counts}
    suite = ElementTree.SubElement(root, "testsuite", about)
    for verdict in report.gates:
        case = ElementTree.SubElement(suite, "testcase", classname=verdict.row, name=verdict.rule)
        if verdict.outcome != "PASS":
            tag = "failure" if verdict.outcome == "FAIL" else "error"
            ElementTree.SubElement(case, tag, type=verdict.outcome, message=verdict.why)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def aligned(lines: Sequence[Sequence[str]], right: bool = True, num_left: int = 1) -> list[str]:
    """Columns padded to equal width, two spaces apart.

    Args:
        lines: Of equal length, the header first.
        right: Align columns to the right, all but the first `num_left`.
        num_left: How many stay on the left.
    """
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    is_right = [right and i >= num_left for i in range(len(widths))]
    padded = (
        [x.rjust(w) if r else x.ljust(w) for x, w, r in zip(line, widths, is_right, strict=True)] for line in lines
    )
    return ["  ".join(x).rstrip() for x in padded]


def _markdown_table(lines: Sequence[Sequence[str]]) -> list[str]:
    escaped = [[x.replace("|", "\\|").replace("*", "\\*") for x in line] for line in lines]
    header, *body = [f"| {' | '.join(line)} |" for line in escaped]
    return [header, "|" + " --- |" * len(lines[0]), *body]


def _cell(row: Row, metric: str) -> str:
    m = row.measurements.get(metric)
    if m is not None:
        unit = "" if m.unit in HEAD_UNITS else m.unit
        return bounded(m.estimate, unit) if metric == QUALITY else show(m.estimate.value, unit)
    return show(row.size_bytes, "bytes") if metric == "size.total_bytes" else "–"


def _machine_line(report: Report) -> str:
    machine = report.machine
    cores = f"{machine['cores']} cores" if "cores" in machine else ""
    return ", ".join(str(x) for x in (machine.get("cpu"), cores, machine.get("os")) if x) or "unknown machine"


def _measurement(data: Mapping[str, Any]) -> Measurement:
    """A measurement whose numbers that were not finite are read as not-a-number."""

    def numbers(estimate: Mapping[str, Any]) -> dict[str, Any]:
        return {k: math.nan if v is None else v for k, v in estimate.items()}

    ratios = {k: numbers(v) for k, v in data["ratios"].items()}
    return Measurement.from_json({**data, "estimate": numbers(data["estimate"]), "ratios": ratios})


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
