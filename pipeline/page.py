"""The HTML page of a report, and the folder that holds it beside the other views.

One file without a script and without a request to anywhere: it can be mailed, archived, opened from a CI artifact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import yaml

from strop import plots, report
from strop.artifact import write_atomically
from strop.errors import ExitCode
from strop.gate import Outcome, Verdict, show, summary
from strop.metric import Estimate, Measurement
from strop.report import REPORT, Report, Row, StageRecord
from strop.statistics import transform

ICONS: Mapping[str, str] = {"PASS": "✓", "FAIL": "✕", "INCONCLUSIVE": "?", "NOT_MEASURED": "∅"}
MEANING: Mapping[int, str] = {
    ExitCode.PASSED: "every gate passed",
    ExitCode.QUALITY: "a quality gate failed",
    ExitCode.SPEED: "a speed, memory or size gate failed",
    ExitCode.INCONCLUSIVE: "inconclusive or not measured",
    ExitCode.CONFORMANCE: "the artifact is not what the recipe says",
}
LONGEST_BAR = 55
"""Percent of a card's width: the duration stands beside the bar."""
MOST_LINES = 6
"""Rows in one line plot; those of the Pareto front first."""
STEP_COST, ROOFLINE = "step_cost.t1_ms", "roofline.mbu"
"""Measurements whose detail holds the curves, and the points under the roof."""
SEVERITY: tuple[Outcome, ...] = ("FAIL", "INCONCLUSIVE", "NOT_MEASURED", "PASS")


def write_report(found: Report, out: Path) -> None:
    """Write `report.json` and its views (`report.md`, `report.csv`, `junit.xml`, `report.html`) into a folder.

    Raises:
        OSError: The folder cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    views = {
        REPORT: report.dumps(found),
        "report.md": report.markdown(found),
        "report.csv": report.csv(found),
        "junit.xml": report.junit(found),
        "report.html": html(found),
    }
    for name, text in views.items():
        write_atomically(out / name, text.encode())


def html(found: Report) -> str:
    """The report as one self-contained page."""
    parts = [
        _header(found), _tiles(found), _picture(found), _rows(found), _gates(found), _stages(found), _distance(found),
        _roofline(found), _step_cost(found), _notes(found), _details(found),
    ]  # fmt: skip
    style = files("strop").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(found.recipe_name)}: {escape(summary(found.gates))}</title>\n<style>\n{style}</style>\n"
        f"</head>\n<body>\n<main>\n{''.join(parts)}</main>\n</body>\n</html>\n"
    )


def _header(found: Report) -> str:
    outcome = next((x for x in SEVERITY if any(v.outcome == x for v in found.gates)), None)
    meaning = MEANING.get(found.exit_code, "") if found.gates or found.exit_code else "measured, not judged"
    verdict = summary(found.gates)
    where = [_when(found.created), *(str(found.machine[x]) for x in ("cpu", "os") if found.machine.get(x))]
    return (
        f'<header><p class="brand">strop</p><h1>{escape(found.recipe_name)}</h1>'
        f'<p class="muted">{escape(" · ".join(where))}</p></header>\n'
        f'<section class="banner {outcome or "none"}">'
        f'<span aria-hidden="true">{ICONS[outcome] if outcome else "–"}</span>'
        f"<p><strong>{escape(verdict[0].upper() + verdict[1:])}</strong>"
        f"Exit code {found.exit_code}: {escape(meaning)}</p></section>\n"
    )


def _tiles(found: Report) -> str:
    """The few numbers that sum up the first row that is not the parent's."""
    row = next((x for x in found.rows if x.chain != "parent"), None)
    if row is None:
        return ""
    measured = row.measurements
    parent = next((x for x in found.rows if report.is_parent(x)), None)
    tiles = []
    if speed := measured.get(report.SPEED):
        same = report.ratio(row, "parent_same_runtime")
        aside = show(speed.estimate.value, speed.unit) + (
            f", {show(same.value, '×')} on the same runtime" if same else ""
        )
        gain = report.ratio(row, "parent")
        tiles.append(
            ("decode speed against the parent", gain, "×", aside)
            if gain
            else ("decode", speed.estimate, speed.unit, "")
        )
    if loss := measured.get(report.QUALITY):
        top = measured.get("divergence.same_top")
        tiles.append(("mean KL to the parent", loss.estimate, loss.unit, f"same top-1 {_shown(top)}" if top else ""))
    if change := measured.get("perplexity.ratio"):
        value = measured.get("perplexity.value")
        tiles.append(
            ("perplexity against the parent", change.estimate, "×", f"perplexity {_shown(value)}" if value else "")
        )
    of_parent = (
        f"{show(row.size_bytes / parent.size_bytes, '×')} the parent's {show(parent.size_bytes, 'bytes')}"
        if parent
        else ""
    )
    tiles.append(("size", Estimate.exact(row.size_bytes), "bytes", of_parent))
    items = "".join(
        f"<div><dt>{escape(title)}</dt><dd>{_value(estimate, unit)}<span>{escape(aside)}</span></dd></div>"
        for title, estimate, unit, aside in tiles
    )
    return f'<section><h2 class="quiet">{escape(row.name)}</h2><dl class="tiles">{items}</dl></section>\n'


def _picture(found: Report) -> str:
    front = {row.name for row in report.pareto(found.rows)}
    runtimes = {row.runtime for row in found.rows if row.chain != "parent"}
    points = []
    for index, row in enumerate(found.rows, 1):
        if report.position(row) is None:
            continue
        speed, loss = row.measurements[report.SPEED], row.measurements.get(report.QUALITY)
        distance = loss.estimate if loss else Estimate.exact(0.0)
        title = f"{row.name}\n{report.bounded(speed.estimate, speed.unit)}\nmean KL {report.bounded(distance, 'nats')}"
        is_parent = row.chain == "parent"
        label = row.chain if len(runtimes) == 1 and not is_parent else row.name
        points.append(plots.Point(label, str(index), speed.estimate, distance, title, row.name in front, is_parent))
    if not points:
        return ""
    titles = ("decode, tokens/s → faster", "mean KL to the parent, nats ↑ closer")
    wide = plots.scatter(points, width=1040, height=440, titles=titles, use_tags=False)
    narrow = plots.scatter(points, width=388, height=340, titles=titles, use_tags=True)
    return (
        f'<section><h2>Quality and speed</h2><figure><div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
        '<figcaption><span class="key"><i class="front"></i>on the Pareto front: none is both faster and closer</span>'
        '<span class="key"><i></i>beaten by another row</span>'
        '<span class="key"><i class="parent"></i>the untouched parent</span>'
        "Up and to the right is better. Whiskers are one-sided bounds"
        '<span class="narrow">; numbers as in the table below</span>.</figcaption></figure></section>\n'
    )


def _rows(found: Report) -> str:
    shown = [x for x in report.COLUMNS if x == "size.total_bytes" or any(x in row.measurements for row in found.rows)]
    references = [x for x in report.RATIO_COLUMNS if any(report.ratio(row, x) for row in found.rows)]
    front = {row.name for row in report.pareto(found.rows)}
    units = {name: m.unit for row in found.rows for name, m in row.measurements.items() if m.unit in report.HEAD_UNITS}
    heads = [(report.COLUMNS[x], units.get(x, "")) for x in shown]
    heads += [(report.RATIO_COLUMNS[x], "") for x in references]
    head = "".join(f'<th scope="col">{x}</th>' for x in ("#", "row", "verdict")) + "".join(
        f'<th scope="col">{escape(x)}<small>{escape(unit)}</small></th>' for x, unit in heads
    )
    lines = []
    for number, row in enumerate(found.rows, 1):
        values = [_cell(row.measurements.get(x), row.size_bytes if x == "size.total_bytes" else None) for x in shown]
        values += [_value(ratio, "×") if (ratio := report.ratio(row, x)) else "–" for x in references]
        outcome = report.row_outcome(found, row)
        verdict = _mark(outcome) if outcome else "explored" if row.is_explored else "–"
        star = '<span class="front" title="on the Pareto front">●</span>' if row.name in front else ""
        cells = "".join(f"<td>{x}</td>" for x in [verdict, *values])
        style = ' class="parent"' if row.chain == "parent" else ""
        lines.append(f'<tr{style}><td>{number}</td><th scope="row">{escape(row.name)} {star}</th>{cells}</tr>')
    table = _table(head, "".join(lines), "rows")
    note = '<p class="muted">~ the machine was too noisy to trust this.</p>' if "<b>~" in table else ""
    return _section("Rows", table + note)


def _gates(found: Report) -> str:
    """One block per gate: its rows share an axis, so that the room each has left can be compared."""
    if not found.gates:
        return _section("Gates", '<p class="muted">The recipe has none: nothing was judged.</p>')
    blocks = []
    by_rule = {rule: [v for v in found.gates if v.rule == rule] for rule in dict.fromkeys(v.rule for v in found.gates)}
    for rule, verdicts in sorted(by_rule.items(), key=lambda x: min(SEVERITY.index(v.outcome) for v in x[1])):
        numbers = [n for v in verdicts for n in (v.lower, v.value, v.upper) if n is not None]
        axis = plots.limit_axis(numbers, verdicts[0].limit, 8, 272)
        lines = "".join(_verdict(v, axis) for v in verdicts)
        blocks.append(
            f'<tbody><tr class="rule"><th colspan="5" scope="rowgroup">{escape(rule)}</th></tr>{lines}</tbody>'
        )
    heads = ("verdict", "row", "value and bounds against the limit", "measured", "")
    head = "".join(f'<th scope="col">{x}</th>' for x in heads)
    table = f'<div class="scroll"><table class="gates"><thead><tr>{head}</tr></thead>{"".join(blocks)}</table></div>'
    note = '<p class="muted">Shaded: what passes. PASS needs the whole interval inside, FAIL all of it outside.</p>'
    return _section("Gates", table + note)


def _verdict(v: Verdict, axis: plots.Axis) -> str:
    estimate = None
    if v.value is not None and v.lower is not None and v.upper is not None:
        estimate = Estimate(v.value, v.lower, v.upper)
    picture = plots.against_limit(
        estimate, v.limit, is_upper=v.side == "at_most", axis=axis, outcome=v.outcome, text=f"{v.row}: {v.why}"
    )
    used = f"{100 * v.margin_used:.0f} % of the margin used" if v.margin_used is not None else ""
    aside = used if v.outcome in ("PASS", "FAIL") else v.why
    value = _value(estimate, v.unit) if estimate else "–"
    cells = f'<th scope="row">{escape(v.row)}</th><td>{picture}</td><td>{value}</td><td>{escape(aside)}</td>'
    return f"<tr><td>{_mark(v.outcome)}</td>{cells}</tr>"


def _stages(found: Report) -> str:
    """Each chain from left to right, with what every step cost."""
    if not found.stages:
        return ""
    longest = max(x.seconds for x in found.stages) or 1.0
    model = found.recipe.get("model")
    parent = next((row for row in found.rows if report.is_parent(row)), None)
    source = escape(str(model.get("source", "")) if isinstance(model, Mapping) else "")
    size = f"<dl><div><dt>size</dt><dd>{show(parent.size_bytes, 'bytes')}</dd></div></dl>" if parent else ""
    first = f'<li><div class="card source"><p class="step"><b>model</b> <small>{source}</small></p>{size}</div></li>'
    runtimes, keys = {row.runtime for row in found.rows}, {row.key for row in found.rows}
    chains = []
    for chain, group in groupby(sorted(found.stages, key=lambda x: _chain_order(found, x.chain)), lambda x: x.chain):
        records = list(group)
        steps = "".join(f"<li>{_stage(x, longest)}</li>" for x in records if x.use not in runtimes)
        # programs that are no row were made to attribute the loss
        exports = "".join(_stage(x, longest) for x in records if x.use in runtimes and x.key in keys)
        # the parent's own chain begins with the stage that fetched it
        start = "" if chain == "parent" and steps else first
        chains.append(f'<h3>{escape(chain)}</h3><ol class="chain">{start}{steps}<li>{exports}</li></ol>')
    total = sum(x.seconds for x in found.stages if not x.is_cached)
    note = f"{_duration(total)} in this run; steps from the store show what they took when they were made."
    return _section("How it was made", f'{"".join(chains)}<p class="muted">{note}</p>')


def _chain_order(found: Report, chain: str) -> int:
    names = list(dict.fromkeys(x.chain for x in found.stages))
    return (["parent", "main"].index(chain) - 2) if chain in ("parent", "main") else names.index(chain)


def _stage(record: StageRecord, longest: float) -> str:
    facts = [("peak memory", show(record.peak_memory_bytes, "bytes")), ("size", show(record.size_bytes, "bytes"))]
    for name, value in (record.attribution or {}).items():
        if isinstance(value, int | float) and name != "size_bytes":
            facts.append(({"kl_mean": "KL after it"}.get(name, name.replace("_", " ")), show(value, "")))
    lines = "".join(f"<div><dt>{escape(a)}</dt><dd>{escape(b)}</dd></div>" for a, b in facts if b != "0 B")
    kind = f" <small>{escape(record.use)}</small>" if record.use != record.name else ""
    stored = ' <small class="stored">from the store</small>' if record.is_cached else ""
    share = LONGEST_BAR * record.seconds / longest
    return (
        f'<div class="card"><p class="step"><b>{escape(record.name)}</b>{kind}{stored}</p>'
        f'<p class="time"><i style="width:{share:.1f}%"></i><span>{_duration(record.seconds)}</span></p>'
        f"<dl>{lines}</dl></div>"
    )


def _distance(found: Report) -> str:
    """Where the KL comes from: by position in the window, and how many tokens have how much of it."""
    front = {row.name for row in report.pareto(found.rows)}
    rows = [x for x in found.rows if x.chain != "parent" and report.QUALITY in x.measurements]
    chosen = sorted(rows, key=lambda x: x.name not in front)[:MOST_LINES]
    by_position, histogram, names = [], [], []
    for row in chosen:
        detail = row.measurements[report.QUALITY].detail
        if "by_position" in detail and "histogram" in detail:
            ranges, edges = detail["by_position"], detail["histogram"]["log10_edges"]
            counts, total = detail["histogram"]["counts"], max(1, sum(detail["histogram"]["counts"]))
            centres = [(x["from"] + x["to"]) / 2 for x in ranges]
            by_position.append(plots.Series(row.name, centres, [x["mean"] for x in ranges]))
            middles = [10 ** ((a + b) / 2) for a, b in pairwise(edges)]
            shares = [100 * n / total or None for n in counts]
            histogram.append(plots.Series(row.name, middles, shares))
            names.append(row.name)
    if not names or not any(y for s in by_position for y in s.values):
        return ""
    figures = _line_figures(
        (by_position, ("position in the window", "mean KL, nats"), (False, True)),
        (histogram, ("KL of a token, nats", "share of tokens, %"), (True, False)),
    )
    body = f'<div class="pair">{figures}</div>{_legend(names, len(rows))}'
    return _section("Where the distance comes from", body)


def _step_cost(found: Report) -> str:
    """t(k) of each row, relative to one token and in ms, after the first number of cached tokens."""
    rows = _front_first(found, STEP_COST)
    relative, absolute, names = [], [], []
    for row in rows[:MOST_LINES]:
        if curves := row.measurements[STEP_COST].detail.get("curves"):
            points = curves[0]["points"]
            widths, cached = [x["width"] for x in points], curves[0]["cached"]
            relative.append(plots.Series(row.name, widths, [x["ratio"]["value"] for x in points]))
            absolute.append(plots.Series(row.name, widths, [x["ms"]["value"] for x in points]))
            names.append(row.name)
    if not names:
        return ""
    figures = _line_figures(
        (relative, ("new tokens in a step", "time of a step, × that of one token"), (True, True)),
        (absolute, ("new tokens in a step", "time of a step, ms"), (True, True)),
    )
    note = (
        f'<p class="muted">After {cached} cached tokens, with logits of every new one. '
        "Where the line is flat, checking drafted tokens costs little.</p>"
    )
    return _section("What a wider step costs", f'<div class="pair">{figures}</div>{_legend(names, len(rows))}{note}')


def _roofline(found: Report) -> str:
    """Each row's decoding and prefill under the peaks that were measured with it."""
    rows = _front_first(found, ROOFLINE)
    drawn = [(_roof(x), _bounds(x)) for x in rows[:MOST_LINES] if "points" in x.measurements[ROOFLINE].detail]
    if not drawn:
        return ""
    roofs, titles = [roof for roof, _ in drawn], ("FLOP per byte", "GFLOP/s")
    wide = plots.roofline(roofs, width=1040, height=420, titles=titles)
    narrow = plots.roofline(roofs, width=388, height=340, titles=titles)
    body = (
        f'<figure><div class="wide">{wide}</div><div class="narrow">{narrow}</div><figcaption>'
        "○ decoding one token, □ prefill. Dashed: what reading memory (rising) and one large product (level) reached "
        f"beside it.</figcaption></figure>{_legend([x.label for x in roofs], len(rows))}"
        f'<ul class="legend">{"".join(f"<li>{escape(words)}</li>" for _, words in drawn)}</ul>'
    )
    return _section("How near to the machine's limits", body)


def _roof(row: Row) -> plots.Roof:
    """Its peaks and points, in 10⁹ a second."""
    detail = row.measurements[ROOFLINE].detail
    spots = []
    for name, point in detail["points"].items():
        speed = transform(Estimate(**point["flops_per_s"]), lambda x: x / 1e9)
        where = f"{report.bounded(speed, 'GFLOP/s')} at {show(point['intensity'], 'FLOP/byte')}"
        spots.append(plots.Spot(point["intensity"], speed, f"{row.name}\n{name}: {where}"))
    reads, products = (detail["peaks"][x]["value"] / 1e9 for x in ("bytes_per_s", "flops_per_s"))
    return plots.Roof(row.name, reads, products, spots)


def _bounds(row: Row) -> str:
    """What bounds a row, in one line."""
    words = []
    for name, point in row.measurements[ROOFLINE].detail["points"].items():
        memory, arithmetic = (f"{100 * point[x]['value']:.0f} %" for x in ("mbu", "mfu"))
        words.append(f"{name} is {point['bound']}-bound ({memory} of memory, {arithmetic} of arithmetic)")
    if gap := row.measurements.get("roofline.gap"):
        words.append(f"a token takes {show(gap.estimate.value, '×')} its floor")
    return f"{row.name}: {'; '.join(words)}"


def _front_first(found: Report, metric: str) -> list[Row]:
    """The rows that have a measurement, those of the Pareto front first."""
    front = {row.name for row in report.pareto(found.rows)}
    return sorted((x for x in found.rows if metric in x.measurements), key=lambda x: x.name not in front)


def _line_figures(*figures: tuple[Sequence[plots.Series], tuple[str, str], tuple[bool, bool]]) -> str:
    """Line plots, each for wide and narrow windows: series, titles of the axes, which axes are log."""
    return "".join(
        f'<figure><div class="wide">{plots.lines(series, width=530, height=300, titles=titles, are_log=logs)}</div>'
        f'<div class="narrow">{plots.lines(series, width=388, height=280, titles=titles, are_log=logs)}</div></figure>'
        for series, titles, logs in figures
    )


def _legend(names: Sequence[str], num_rows: int) -> str:
    """Whose line has which colour, and how many rows have none."""
    keys = "".join(f'<span class="key"><i class="s{i}"></i>{escape(x)}</span>' for i, x in enumerate(names))
    left_out = f" {num_rows - len(names)} more rows are in report.json." if num_rows > len(names) else ""
    return f'<p class="legend">{keys}{left_out}</p>'


def _notes(found: Report) -> str:
    failures = [
        f"{row.name}: {name} was not measured: {why}" for row in found.rows for name, why in row.failures.items()
    ]
    items = "".join(f"<li>{escape(x)}</li>" for x in [*failures, *found.notes])
    return _section("Notes", f"<ul>{items}</ul>") if items else ""


def _details(found: Report) -> str:
    """What one looks up: every number, its protocol, the machine, the recipe. Folded away."""
    head = "".join(
        f'<th scope="col">{x}</th>' for x in ("row", "metric", "value", "bounds at", "samples", "protocol", "measured")
    )
    lines = "".join(_measurement(row, name, m) for row in found.rows for name, m in row.measurements.items())
    count = sum(len(row.measurements) for row in found.rows)
    recipe = yaml.safe_dump(found.recipe, sort_keys=False, allow_unicode=True)
    folded = [
        (f"Every measurement ({count})", _table(head, lines, "all")),
        ("Protocols", _protocols(found.rows)),
        ("Machine and versions", _facts({**found.machine, "strop": found.strop_version})),
        ("Recipe as it was run", f'<pre tabindex="0">{escape(recipe)}</pre>'),
    ]
    body = "".join(
        f"<details><summary>{escape(title)}</summary>{content}</details>" for title, content in folded if content
    )
    return f'<section class="folded">{body}</section>\n'


def _measurement(row: Row, name: str, m: Measurement) -> str:
    confidence = f"{m.estimate.confidence:.0%}" if m.estimate.lower != m.estimate.upper else "counted"
    values = (confidence, f"{m.samples}", f"<code>{m.fingerprint[:8]}</code>", _when(row.measured_at.get(name, "")))
    cells = "".join(f"<td>{x}</td>" for x in (_value(m.estimate, m.unit), *values))
    return f'<tr><th scope="row">{escape(row.name)}</th><td>{escape(name)}</td>{cells}</tr>'


def _protocols(rows: Iterable[Row]) -> str:
    """Each distinct protocol once, with what was measured by it."""
    users: dict[str, tuple[Measurement, dict[str, None]]] = {}
    for row in rows:
        for name, m in row.measurements.items():
            users.setdefault(m.fingerprint, (m, {}))[1][name] = None
    return "".join(
        f"<h3><code>{fingerprint[:8]}</code> {escape(', '.join(names))}</h3>{_facts(dict(m.protocol))}"
        for fingerprint, (m, names) in users.items()
    )


def _facts(data: Mapping[str, Any]) -> str:
    def text(value: Any, name: str = "") -> str:
        if isinstance(value, Mapping):
            return ", ".join(f"{k} {text(v, k)}" for k, v in value.items())
        if isinstance(value, list | tuple):
            return ", ".join(text(x) for x in value)
        return show(value, "bytes") if isinstance(value, int) and name.startswith("memory") else str(value)

    lines = "".join(
        f"<div><dt>{escape(k.replace('_', ' '))}</dt><dd>{escape(text(v, k))}</dd></div>" for k, v in data.items()
    )
    return f'<dl class="facts">{lines}</dl>'


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>\n"


def _table(head: str, body: str, style: str) -> str:
    table = f'<table class="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _cell(measurement: Measurement | None, size_bytes: int | None) -> str:
    if measurement is not None:
        return _value(measurement.estimate, "" if measurement.unit in report.HEAD_UNITS else measurement.unit)
    return "–" if size_bytes is None else f"<b>{show(size_bytes, 'bytes')}</b>"


def _value(estimate: Estimate, unit: str) -> str:
    bounds = ""
    if estimate.lower != estimate.upper:
        low, high = (show(x, "bytes" if unit == "bytes" else "") for x in (estimate.lower, estimate.upper))
        bounds = f"<small>{low}–{high}</small>"
    noisy = "~" if estimate.is_noisy else ""
    return f"<b>{noisy}{escape(show(estimate.value, unit))}</b>{bounds}"


def _shown(measurement: Measurement) -> str:
    return show(measurement.estimate.value, measurement.unit)


def _mark(outcome: Outcome) -> str:
    word = outcome.replace("_", " ").lower()
    return f'<span class="mark {outcome}"><i aria-hidden="true">{ICONS[outcome]}</i> {word}</span>'


def _when(iso: str) -> str:
    try:
        return f"{datetime.fromisoformat(iso):%Y-%m-%d %H:%M}"
    except ValueError:
        return iso


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
