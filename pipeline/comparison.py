"""Several reports in one table, with the Pareto front over all of them. Numbers of different protocols are kept apart.

Speeds of different runs were not measured side by side: the front is drawn over ratios to the parent, which were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from typing import Any

from strop.artifact import hash_json
from strop.metric import Measurement
from strop.report import COLUMNS, QUALITY, RATIO_COLUMNS, SPEED, Report, Row, aligned, bounded, front, is_parent

OF_THE_PROGRAM = ("runtime", "dtype", "kernels")
"""Parts of a protocol that say what was measured, not how: programs that differ in them are what is compared."""


def compare(reports: Mapping[str, Report]) -> str:
    """One line per row of each report, for the terminal.

    Args:
        reports: What to call each -> the report.

    Returns:
        The table; below it why some columns are split: letters mark values that must not be compared.
    """
    rows = [(run, row) for run, report in reports.items() for row in report.rows]
    columns = [x for x in COLUMNS if any(x in row.measurements for _, row in rows)]
    protocols = {x: _protocols([row for _, row in rows], x) for x in columns}
    best = _fronts(rows)
    lines = [["run", "row", *(COLUMNS[x] for x in columns), RATIO_COLUMNS["parent"]]]
    for index, (run, row) in enumerate(rows):
        ratio = _speed(row)
        lines.append(
            [
                run,
                row.name + (" *" if index in best else ""),
                *(_cell(row, x, protocols[x]) for x in columns),
                "–" if ratio is None else f"{ratio:.2f}×",
            ]
        )
    notes = ["* none of the same protocol is both faster, relative to the parent, and closer to it"] if best else []
    for column, found in protocols.items():
        if len(found) > 1:
            notes.append(f"{COLUMNS[column]}: values with different letters are not compared, {_difference(found)}")
    return "\n".join([*aligned(lines, num_left=2), *notes])


def _protocols(rows: Sequence[Row], metric: str) -> dict[str, Mapping[str, Any]]:
    """Fingerprint -> protocol, of every way in which a metric was measured."""
    found = [_way(row.measurements[metric]) for row in rows if metric in row.measurements]
    return {hash_json(way): way for way in found}


def _way(measurement: Measurement) -> dict[str, Any]:
    return {k: v for k, v in measurement.protocol.items() if k not in OF_THE_PROGRAM}


def _cell(row: Row, metric: str, protocols: Mapping[str, Mapping[str, Any]]) -> str:
    m = row.measurements.get(metric)
    if m is None:
        return "–"
    letter = f" {ascii_lowercase[list(protocols).index(hash_json(_way(m))) % 26]}" if len(protocols) > 1 else ""
    return bounded(m.estimate, m.unit) + letter


def _speed(row: Row) -> float | None:
    """Paired ratio of decode speed to the parent in eager."""
    m = row.measurements.get(SPEED)
    if m is not None and "parent" in m.ratios:
        return m.ratios["parent"].value
    return 1.0 if m is not None and is_parent(row) else None


def _fronts(rows: Sequence[tuple[str, Row]]) -> set[int]:
    """Indices of the rows that none measured by the same protocols beats."""
    usual = {run: hash_json(_way(m)) for run, row in rows if (m := row.measurements.get(QUALITY)) is not None}
    groups: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for index, (run, row) in enumerate(rows):
        quality, speed = row.measurements.get(QUALITY), _speed(row)
        if speed is None or (quality is None and not is_parent(row)):
            continue
        group = (hash_json(_way(quality)) if quality else usual.get(run, ""), hash_json(_way(row.measurements[SPEED])))
        groups.setdefault(group, []).append((index, quality.estimate.value if quality else 0.0, speed))
    return {index for points in groups.values() for index in front(points)}


def _difference(protocols: Mapping[str, Mapping[str, Any]]) -> str:
    """In what the protocols differ."""
    names = sorted({name for protocol in protocols.values() for name in protocol})
    values = {name: [protocol.get(name, "–") for protocol in protocols.values()] for name in names}
    differing = [f"{name} {' / '.join(map(str, x))}" for name, x in values.items() if any(v != x[0] for v in x)]
    return "they differ in " + ", ".join(differing)
