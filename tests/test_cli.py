"""The command line: codes, streams, speed of starting, and that nothing heavy is imported early."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from references import tiny_folder

from strop.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("cli") / "tiny")


def write_recipe(path: Path, model: Path, **changes: Any) -> Path:
    text = {
        "version": 1,
        "model": {"source": str(model)},
        "stages": [{"use": "rtn", "name": "w4", "group_size": 16}],
        "export": [{"use": "eager"}],
        "evals": [{"use": "size"}],
        "gates": [{"metric": "size.total_bytes", "at_most": 0.9, "of": "parent"}],
        "threads": 1,
    }
    path.write_text(yaml.safe_dump({**text, **changes}))
    return path


def strop(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "strop", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def test_help_is_quick_and_lists_the_commands() -> None:
    began = time.perf_counter()
    done = strop("--help")
    assert time.perf_counter() - began < 2, "0.5 s on a quiet machine"
    assert done.returncode == 0
    for command in (
        "run",
        "check",
        "init",
        "schema",
        "generate",
        "store",
        "list",
        "compare",
        "gate",
        "verify",
        "doctor",
    ):
        assert f"\n    {command} " in done.stdout


def test_run_prints_the_table_and_returns_the_reports_code(tmp_path: Path, model: Path, capsys: Any) -> None:
    path = write_recipe(tmp_path / "r.yaml", model)
    common = ["--store", str(tmp_path / "store"), "--out", str(tmp_path / "out")]
    assert main(["run", str(path), *common]) == 0
    captured = capsys.readouterr()
    assert "main / eager" in captured.out
    assert "w4" in captured.err
    assert "w4" not in captured.out
    assert main(["run", str(path), *common, "--set", "gates[0].at_most=0.01"]) == 4
    assert json.loads((tmp_path / "out" / "report.json").read_text())["exit_code"] == 4


def test_check_prints_the_plan_without_running_anything(tmp_path: Path, model: Path, capsys: Any) -> None:
    path = write_recipe(
        tmp_path / "r.yaml", model, variants={"w8": {"replace": {"w4": {"use": "rtn", "bits": 8, "group_size": 16}}}}
    )
    assert main(["check", str(path), "--store", str(tmp_path / "store")]) == 0
    printed = capsys.readouterr().out
    assert "llama, 3 layers" in printed
    assert "w8" in printed
    assert "nothing was run" in printed
    assert not (tmp_path / "store").exists()


LOADED = (
    "import sys; from strop.cli import main; code = main(sys.argv[1:]); print(*sorted(sys.modules)); sys.exit(code)"
)


@pytest.mark.parametrize("arguments", [["check", "RECIPE"], ["init", "MODEL"], ["schema"], ["store", "ls"]])
def test_nothing_heavy_is_imported(tmp_path: Path, model: Path, arguments: list[str]) -> None:
    path = write_recipe(
        tmp_path / "r.yaml", model,
        evals=[{"use": x} for x in ("divergence", "perplexity", "latency", "memory", "size")],
        export=[{"use": "eager"}, {"use": "onnx_runtime"}],
    )  # fmt: skip
    filled = [{"RECIPE": str(path), "MODEL": str(model)}.get(x, x) for x in arguments]
    environment = {**os.environ, "STROP_STORE": str(tmp_path / "store")}
    command = [sys.executable, "-c", LOADED, *filled]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - began < 8, "3 s on a quiet machine"
    loaded = set(done.stdout.splitlines()[-1].split())
    assert loaded.isdisjoint({"torch", "transformers", "onnxruntime", "onnx", "onnx_ir"})


def test_init_writes_a_recipe_that_check_accepts(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "mine.yaml"
    assert main(["init", str(model), "--out", str(path)]) == 0
    assert "group_size: 16" in path.read_text(), "what divides widths of 48 and 80"
    assert "length: 128" in path.read_text(), "what its context holds"
    assert main(["check", str(path), "--store", str(tmp_path / "store")]) == 0


def test_the_schema_accepts_the_shipped_recipes(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    assert main(["schema", "--out", str(path)]) == 0
    assert json.loads(path.read_text())["$schema"].startswith("https://json-schema.org/")


def test_generate_streams_text_and_says_how_long_it_took(tmp_path: Path, model: Path, capsys: Any) -> None:
    store = tmp_path / "store"
    assert (
        main(
            ["run", str(write_recipe(tmp_path / "r.yaml", model)), "--store", str(store), "--out", str(tmp_path / "o")]
        )
        == 0
    )
    key = json.loads((tmp_path / "o" / "report.json").read_text())["rows"][1]["key"]
    capsys.readouterr()
    arguments = [
        "generate",
        str(store / "objects" / key),
        "--prompt",
        "assert",
        "--max-new-tokens",
        "4",
        "--threads",
        "1",
    ]
    assert main(arguments) == 0
    first = capsys.readouterr()
    assert "TTFT" in first.err
    assert main([*arguments, "--temperature", "1", "--seed", "1", "--raw"]) == 0
    assert main([*arguments, "--top-p", "2", "--temperature", "1"]) == 2


def test_store_commands(tmp_path: Path, model: Path, capsys: Any) -> None:
    store = ["--store", str(tmp_path / "store")]
    assert main(["run", str(write_recipe(tmp_path / "r.yaml", model)), *store, "--out", str(tmp_path / "o")]) == 0
    capsys.readouterr()
    assert main(["store", "ls", *store]) == 0
    assert "source > w4 > eager" in capsys.readouterr().out
    assert main(["store", "verify", *store]) == 0
    assert main(["store", "gc", *store]) == 0
    assert "kept 4 objects" in capsys.readouterr().out
    assert main(["store", "gc", "--older-than", "0", *store]) == 0
    assert list((tmp_path / "store" / "objects").iterdir()) == []


def test_a_bug_gives_a_traceback_and_code_1(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "buggy.py").write_text(
        "from strop.stage import Stage\n\nclass Buggy(Stage):\n"
        "    def plan(self, spec, n):\n        raise KeyError('bug')\n"
        "    def run(self, source, out, context):\n        raise AssertionError\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "buggy.py").rename(tmp_path / "pack" / "buggy.py")
    path = write_recipe(tmp_path / "r.yaml", model, stages=[{"use": "pack.buggy"}])
    assert main(["check", str(path)]) == 1
    assert "KeyError: 'bug'" in capsys.readouterr().err


def test_every_public_name_is_there() -> None:
    import strop

    assert all(getattr(strop, name) for name in strop.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        strop.nothing  # noqa: B018
