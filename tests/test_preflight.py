"""What `check` says of a recipe: one line per stage, shared prefixes counted once, everything from tables alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from references import tiny_folder

from strop import recipe
from strop.errors import UserError
from strop.preflight import CheckResult, check
from strop.store import Store


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("preflight") / "tiny")


def checked(model: Path, **changes: Any) -> CheckResult:
    content = {
        "version": 1,
        "model": {"source": str(model)},
        "stages": [
            {"use": "rtn", "name": "w4", "group_size": 16},
            {"use": "rtn", "name": "head", "bits": 8, "group_size": 16, "targets": ["lm_head"]},
        ],
        "export": [{"use": "onnx_runtime"}],
        **changes,
    }
    return check(recipe.parse(content, "tiny"), Store(model.parent / "store"))


def test_every_stage_and_export_has_a_line(model: Path) -> None:
    found = checked(model, variants={"plain_head": {"drop": ["head"]}})
    assert [(x.chain, x.name, x.is_shared) for x in found.steps] == [
        ("parent", "eager", False),
        ("parent", "onnx_runtime", False),
        ("main", "w4", False),
        ("main", "head", False),
        ("main", "onnx_runtime", False),
        ("plain_head", "w4", True),
        ("plain_head", "onnx_runtime", False),
    ]
    assert found.table().count("shared") == 1


def test_sizes_are_those_of_the_tables(model: Path) -> None:
    found = checked(model)
    sizes = {x.name: x.plan.size_bytes for x in found.steps if x.chain == "main"}
    assert sizes["w4"] == found.steps[2].plan.spec.size_bytes() < found.spec.size_bytes()
    assert found.steps[3].plan.spec.head.quantization is not None


def test_the_cache_of_each_export_is_told(model: Path) -> None:
    cache = {"use": "kv_cache", "keys": "head"}
    found = checked(model, stages=[cache], calibration={"source": "python", "length": 64})
    told = {(x.chain, x.name): x.plan.cache_bytes_per_token for x in found.steps}
    assert told["parent", "onnx_runtime"] == found.spec.kv_bytes_per_token(4) == 4 * told["main", "onnx_runtime"]
    assert told["main", "kv_cache"] is None
    assert "cache, a token" in found.table()
    for note in ("a cached token takes 192 bytes, 384 in 16-bit floats", "vLLM takes fp8 only and refuses int8"):
        assert any(note in x for x in found.notes)
    with pytest.raises(UserError, match=r"^export\[0\] \(onnx_runtime of main\): .*asks for format fp8"):
        checked(model, stages=[{**cache, "format": "fp8"}], calibration={"source": "python", "length": 64})


def test_unused_calibration_is_noted(model: Path) -> None:
    assert "calibration: no stage uses it" in checked(model, calibration={"source": "self"}).notes


@pytest.mark.parametrize("teacher", ["w9", "later"])
def test_a_reference_must_be_made_before(model: Path, tmp_path: Path, monkeypatch: Any, teacher: str) -> None:
    package = tmp_path / f"preflight_{teacher}"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "taught.py").write_text(
        "from strop.stage import ArtifactRef, Plan, Stage\n\n\nclass Taught(Stage):\n    teacher: ArtifactRef\n\n"
        "    def plan(self, spec, num_calibration_tokens):\n        return Plan(spec, 1, 1, 1.0)\n\n"
        "    def run(self, source, out, context):\n        raise NotImplementedError\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    stages = [
        {"use": f"{package.name}.taught", "name": "taught", "teacher": teacher},
        {"use": "rtn", "name": "later", "group_size": 16},
    ]
    with pytest.raises(UserError, match=r"stages\[0\]\.teacher: .*parent"):
        checked(model, stages=stages)


def test_an_order_of_formats_that_cannot_be_is_refused(model: Path) -> None:
    with pytest.raises(UserError, match=r"stages\[1\] \(w4\): takes a checkpoint, .* a program"):
        checked(
            model, stages=[{"use": "strop.export.eager", "name": "run"}, {"use": "rtn", "name": "w4", "group_size": 16}]
        )


def test_an_unknown_family_runs_in_eager_and_nowhere_else(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny", "stablelm")
    found = checked(folder, stages=[], export=[{"use": "eager"}])
    assert "runs through transformers" in found.notes[0]
    assert "not a family that strop knows" in found.table()
    with pytest.raises(UserError, match=r"export\[0\] \(onnx_runtime\): stablelm is not a family that strop knows"):
        checked(folder, stages=[])
    with pytest.raises(UserError, match=r"stages\[0\] \(w4\): .*stablelm"):
        checked(folder, export=[{"use": "eager"}])
