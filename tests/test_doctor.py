"""What doctor sees: this installation, the store, and what is wrong."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from strop import doctor
from strop.cli import main


def test_it_tells_versions_machine_and_store(tmp_path: Path, capsys: Any) -> None:
    assert main(["doctor", "--store", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    wanted = ["strop ", "Python ", "cores", "memory", f"{tmp_path}, 0 objects", "extra onnx", "torch ", "transformers "]
    assert [x for x in wanted if x not in text] == []


def test_two_onnxruntimes_are_a_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    folder = tmp_path / "site" / "onnxruntime_gpu-1.32.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.32.0\n")
    monkeypatch.syspath_prepend(folder.parent)
    assert importlib.metadata.version("onnxruntime-gpu") == "1.32.0"
    _, problems = doctor.examine(tmp_path)
    assert problems == ["onnxruntime and onnxruntime-gpu are both installed: uninstall one"]
    assert main(["doctor", "--store", str(tmp_path)]) == 2
    assert "uninstall one" in capsys.readouterr().err


def test_a_library_that_does_not_load_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_library.py").write_text("raise ImportError('libgomp.so.1: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "IMPORTED", ("broken_library", "never_heard_of"))
    lines, problems = doctor.examine(tmp_path)
    assert dict(lines)["never_heard_of"] == "not installed"
    assert problems == ["broken_library does not load: libgomp.so.1: cannot open shared object file"]
