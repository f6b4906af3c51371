"""Comparing runs: one front over all of them, and nothing of different protocols side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from strop.cli import main
from strop.comparison import compare
from strop.metric import Direction, Estimate, Measurement
from strop.page import write_report
from strop.report import Report, Row

PROTOCOL = {"text": "python", "tokens": 24_000}


def measured(value: float, unit: str, direction: Direction, **ratios: float) -> Measurement:
    references = {name: Estimate.exact(x) for name, x in ratios.items()}
    return Measurement(Estimate.exact(value), unit, direction, 48, PROTOCOL, references)


def run(*rows: tuple[str, float | None, float, float]) -> Report:
    """A report from (chain, KL, tokens/s, ratio to the parent)."""
    found = []
    for chain, loss, speed, ratio in rows:
        m = {"latency.decode_tokens_per_s": measured(speed, "tokens/s", "higher", parent=ratio)}
        if loss is not None:
            m["divergence.kl_mean"] = measured(loss, "nats", "lower")
        found.append(Row(f"{chain} / eager", chain, "eager", chain, 10**6, m))
    return Report("0.1.0", {}, "r", "2026-11-29T18:00:00+00:00", {}, found, [], [], [], 0)


def starred(text: str) -> list[str]:
    return [" ".join(x.split()[:4]) for x in text.splitlines() if " / eager *" in x]


def test_the_front_is_over_all_runs_and_over_paired_ratios() -> None:
    one = run(("parent", None, 10, 1), ("main", 0.2, 60, 6))
    two = run(("parent", None, 20, 1), ("main", 0.1, 130, 6.5))  # a faster machine: only ratios tell
    assert starred(compare({"a": one, "b": two})) == ["a parent / eager", "b parent / eager", "b main / eager"]


def test_other_protocols_are_kept_apart_and_named() -> None:
    one, two = run(("parent", None, 10, 1), ("main", 0.2, 60, 6)), run(("parent", None, 10, 1), ("main", 0.1, 65, 6.5))
    row = two.rows[1]
    other = replace(row.measurements["divergence.kl_mean"], protocol={**PROTOCOL, "tokens": 12_000})
    row.measurements["divergence.kl_mean"] = other
    text = compare({"a": one, "b": two})
    assert "a main / eager" in starred(text)
    assert "0.200 nats a" in text
    assert "0.100 nats b" in text
    assert text.splitlines()[-1] == (
        "mean KL: values with different letters are not compared, they differ in tokens 24000 / 12000"
    )


def test_what_the_program_is_does_not_keep_rows_apart() -> None:
    one, two = run(("main", 0.2, 60, 6)), run(("main", 0.1, 65, 6.5))
    speed = one.rows[0].measurements["latency.decode_tokens_per_s"]
    changed = replace(speed, protocol={**PROTOCOL, "runtime": "onnx_runtime", "kernels": "MatMulNBits"})
    one.rows[0].measurements["latency.decode_tokens_per_s"] = changed
    text = compare({"a": one, "b": two})
    assert starred(text) == ["b main / eager"]
    assert "letters" not in text


def test_the_command_takes_folders_and_files(tmp_path: Path, capsys: Any) -> None:
    write_report(run(("main", 0.2, 60, 6)), tmp_path / "a")
    write_report(run(("main", 0.1, 65, 6.5)), tmp_path / "b")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b" / "report.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [x.split()[0] for x in lines[1:3]] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["compare", str(tmp_path / "c")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
