"""Makes docs/quantization.md: what each method costs in quality, bytes, seconds and memory, as a table and a picture.

    python benchmarks/quantization.py MODEL CALIBRATION.txt MEASURE.txt WORK [--tasks FOLDER] [--only-page]

Builds and measures `CHAINS` by chains.py (64 windows of 1024 tokens, calibrated on 128 x 512), then writes the page
from what WORK holds. Everything is kept: a killed run goes on where it was. Checkpoints of other tools that lie in WORK
(`peers/`) get a row where they are named in `PEERS`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from chains import TASKS, Scores

from strop.metric import Estimate
from strop.model import read_spec
from strop.plots import Axis, Box, place_labels, short
from strop.spec import ModelSpec
from strop.statistics import bootstrap_ratio_of_means

CHAINS = {
    "rtn bits=8": "8 bits: rtn",
    "gptq bits=8": "8 bits: gptq",
    "rtn": "4 bits: rtn",
    "hqq": "4 bits: hqq",
    "awq": "4 bits: awq",
    "gptq": "4 bits: gptq",
    "autoround iterations=50": "4 bits: autoround, 50 steps",
    "mixed_precision": "4 bits on average: mixed_precision",
    "rtn bits=3": "3 bits: rtn",
    "gptq bits=3": "3 bits: gptq",
}
"""Chain of stages -> its name on the page."""
PEERS = {
    "llm-compressor gptq bits=4": "4 bits: llm-compressor 0.14 GPTQ",
    "llm-compressor gptq bits=3": "3 bits: llm-compressor 0.14 GPTQ",
    "auto-round bits=4 iterations=50": "4 bits: auto-round 0.16, 50 steps",
}
RATIOS = (
    ("gptq", "llm-compressor gptq bits=4", "4 bits, no learning, against llm-compressor's GPTQ", 0.60),
    ("gptq bits=3", "llm-compressor gptq bits=3", "3 bits, against llm-compressor's GPTQ", 0.75),
    ("autoround iterations=50", "auto-round bits=4 iterations=50", "4 bits, learned, against auto-round", 0.90),
    ("autoround iterations=50", "gptq", "autoround with 50 steps against gptq at 4 bits", None),
    ("gptq", "rtn", "gptq against rtn at 4 bits", None),
    ("mixed_precision", "rtn", "mixed_precision against rtn at 4 bits", None),
)
"""Pairs whose KL ratio the page names: chain, chain, words, and the bound that it is to stay below."""
WINDOWS = 64
PAGE = Path(__file__).parents[1] / "docs"
"""Where the page and its picture go."""


@dataclass(frozen=True)
class Row:
    """One checkpoint.

    Attributes:
        label: Its name on the page.
        bits: Bits a weight of the linears that are quantized, scales and zero points included.
        size_bytes: Of those linears.
        kl: Per window, nats.
        same_top, loss, loss_parent: Per window.
        tasks: Task -> share answered right.
        seconds, peak_bytes: What building took; None where it was not measured in one go.
    """

    label: str
    bits: float
    size_bytes: int
    kl: np.ndarray
    same_top: np.ndarray
    loss: np.ndarray
    loss_parent: np.ndarray
    tasks: dict[str, float]
    seconds: float | None
    peak_bytes: int | None
    is_ours: bool


def linear_bytes(spec: ModelSpec) -> tuple[int, int]:
    """Bytes and weights of the linears inside the layers."""
    linears = [x for layer in spec.layers for x in layer.linears.values()]
    return sum(x.size_bytes(spec.dtype) for x in linears), sum(x.in_features * x.out_features for x in linears)


def read_row(work: Path, chain: str, label: str, is_ours: bool) -> Row | None:
    """What WORK says of a chain; None where it was not measured."""
    if not (work / f"{chain}.scores.npz").exists():
        return None
    scores: Scores = dict(np.load(work / f"{chain}.scores.npz"))
    scores.pop("ids")
    size, num_weights = linear_bytes(read_spec(work / chain))
    files = {task: work / f"{chain}.{task}.npy" for task in TASKS}
    cost = json.loads((work / f"{chain}.json").read_text()) if (work / f"{chain}.json").exists() else {}
    return Row(
        label=label,
        bits=8 * size / num_weights,
        size_bytes=size,
        tasks={task: float(np.load(file).mean()) for task, file in files.items() if file.exists()},
        seconds=cost.get("seconds"),
        peak_bytes=cost.get("peak_bytes"),
        is_ours=is_ours,
        **scores,
    )


def ratio(row: Row, other: Row) -> Estimate:
    """KL of one by KL of the other, paired by window."""
    return bootstrap_ratio_of_means(row.kl, other.kl, np.arange(len(row.kl)))


def table(rows: Sequence[Row], parent: dict[str, float]) -> str:
    """Markdown."""
    lines = [
        "| | bits a weight | mean KL, nats | same top-1 | perplexity | ARC-easy | PIQA | seconds | peak memory |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| the parent, float32 | 32 | 0 | 100 % | {np.exp(rows[0].loss_parent.mean()):.2f} "
        + "".join(f"| {100 * parent[task]:.1f} % " if task in parent else "| " for task in TASKS)
        + "| | |",
    ]
    for row in rows:
        error = row.kl.std(ddof=1) / np.sqrt(len(row.kl))
        tasks = "".join(f"| {100 * row.tasks[x]:.1f} % " if x in row.tasks else "| " for x in TASKS)
        seconds = f"{row.seconds:.0f}" if row.seconds else ""
        memory = f"{row.peak_bytes / 1e6:,.0f} MB" if row.peak_bytes else ""
        lines.append(
            f"| {row.label} | {row.bits:.2f} | {row.kl.mean():.4f} ± {error:.4f} | {100 * row.same_top.mean():.1f} % "
            f"| {np.exp(row.loss.mean()):.2f} {tasks}| {seconds} | {memory} |"
        )
    return "\n".join(lines)


def picture(rows: Sequence[Row]) -> str:
    """KL against bytes as SVG, both log: the lower left corner is where one wants to be."""
    width, height = 760, 460
    area = Box(62, 30, width - 16, height - 48)
    x_axis = Axis(
        min(r.size_bytes for r in rows) / 1.15, max(r.size_bytes for r in rows) * 1.3, area.left, area.right, True
    )
    y_axis = Axis(min(r.kl.mean() for r in rows) / 2, max(r.kl.mean() for r in rows) * 2, area.bottom, area.top, True)
    out = [f'<rect x="{area.left}" y="{area.top}" width="{area.right - area.left}" height="{area.bottom - area.top}"/>']
    for tick in x_axis.ticks(8):
        out.append(
            f'<text x="{x_axis(tick):.1f}" y="{area.bottom + 18}" text-anchor="middle">{short(tick / 1e6)}</text>'
        )
    for tick in y_axis.ticks(8):
        y = y_axis(tick)
        out.append(f'<line x1="{area.left}" y1="{y:.1f}" x2="{area.right}" y2="{y:.1f}"/>')
        out.append(f'<text x="{area.left - 8}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    out.append(f'<text x="{area.right}" y="{height - 10}" text-anchor="end">bytes of the quantized linears, MB</text>')
    out.append(f'<text x="{area.left - 52}" y="18">mean KL to the parent, nats</text>')
    placed = [(x_axis(r.size_bytes), y_axis(float(r.kl.mean()))) for r in rows]
    wanted = [(r.label, x, y) for r, (x, y) in zip(rows, placed, strict=True)]
    dots = [Box(x - 6, y - 6, x + 6, y + 6) for x, y in placed]
    for row, (x, y), (box, is_far) in zip(rows, placed, place_labels(wanted, dots, area), strict=True):
        if is_far:
            near = min(max(x, box.left), box.right), min(max(y, box.top), box.bottom)
            out.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{near[0]:.1f}" y2="{near[1]:.1f}"/>')
        style = "ours" if row.is_ours else "other"
        out.append(f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
        out.append(f'<text x="{box.left + 2:.1f}" y="{box.bottom - 4:.1f}">{escape(row.label)}</text>')
    style = (
        "text{font:12px system-ui,sans-serif;fill:#444}rect{fill:#fff;stroke:#bbb}line{stroke:#ddd}"
        ".ours{fill:#1a6fb4}.other{fill:#fff;stroke:#b4451a;stroke-width:2}svg{background:#fff}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{style}</style><rect width="{width}" height="{height}" style="stroke:none"/>{"".join(out)}</svg>\n'
    )


def ratios(rows: Mapping[str, Row]) -> str:
    """Markdown."""
    lines = ["| | KL ratio | 95 % bounds | wanted below |", "|---|---|---|---|"]
    for one, other, words, bound in RATIOS:
        if one in rows and other in rows:
            found = ratio(rows[one], rows[other])
            wanted = "" if bound is None else f"{bound:.2f}: {'met' if found.upper < bound else 'missed'}"
            lines.append(f"| {words} | {found.value:.3f} | {found.lower:.3f} to {found.upper:.3f} | {wanted} |")
    return "\n".join(lines)


def main() -> None:
    """Build, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("model", "calibration", "measure"):
        parser.add_argument(name)
    parser.add_argument("work", type=Path)
    parser.add_argument("--tasks", type=Path, help="folder of arc_easy.jsonl and piqa.jsonl")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--only-page", action="store_true", help="measure nothing, write the page of what there is")
    arguments = parser.parse_args()
    work = arguments.work
    if not arguments.only_page:
        peers = [x for x in PEERS if (work / x).exists()]
        command = [sys.executable, str(Path(__file__).with_name("chains.py")), arguments.model, arguments.calibration]
        command += [arguments.measure, str(work), *CHAINS, *peers, "--windows", str(WINDOWS)]
        command += ["--threads", arguments.threads, *(["--tasks", str(arguments.tasks)] if arguments.tasks else [])]
        subprocess.run(command, check=True)
    known = [(x, label, True) for x, label in CHAINS.items()] + [(x, label, False) for x, label in PEERS.items()]
    found = {chain: read_row(work, chain, label, is_ours) for chain, label, is_ours in known}
    rows = {chain: row for chain, row in found.items() if row}
    ordered = sorted(rows.values(), key=lambda r: (-int(r.label[0]), -r.kl.mean()))
    answers = {task: work / f"parent.{task}.npy" for task in TASKS}
    parent = {task: float(np.load(x).mean()) for task, x in answers.items() if x.exists()}
    (PAGE / "quantization.svg").write_text(picture(ordered), encoding="utf-8")
    page = (PAGE / "quantization.md").read_text(encoding="utf-8")
    for mark, content in (("table", table(ordered, parent)), ("ratios", ratios(rows))):
        start, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
        before, _, rest = page.partition(start)
        _, _, after = rest.partition(end)
        page = f"{before}{start}{content}\n{end}{after}"
    (PAGE / "quantization.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
