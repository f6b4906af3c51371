"""Planted faults reach the runtime through its files, and leave the original alone."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from references import tiny_folder

from strop import faults
from strop.artifact import Artifact, Manifest, list_files, read_manifest, write_manifest
from strop.errors import UserError
from strop.export.eager import Eager
from strop.export.gguf import Gguf
from strop.export.onnx_runtime import OnnxRuntime
from strop.methods.rtn import Rtn
from strop.program import Logits, open_program
from strop.stage import Context, Stage

PROGRAMS: dict[str, tuple[Stage, Stage | None, str]] = {
    "packed eager": (Eager(), Rtn(bits=8, group_size=16), "float32"),
    "packed onnx": (OnnxRuntime(accuracy_level=1), Rtn(bits=8, group_size=16), "float32"),
    "channel onnx": (OnnxRuntime(accuracy_level=1), Rtn(bits=8, group_size=None), "float32"),
    "integer eager": (Eager(), Rtn(bits=8, group_size=None, activations="dynamic"), "float32"),
    "integer onnx": (OnnxRuntime(), Rtn(bits=8, group_size=None, activations="dynamic"), "float32"),
    "plain eager bf16": (Eager(), None, "bfloat16"),
    "plain onnx": (OnnxRuntime(), None, "float32"),
    "plain gguf": (Gguf(), None, "float32"),
}
CASES = [(name, fault) for name in PROGRAMS for fault in faults.FAULTS]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    place = tmp_path_factory.mktemp("faults")
    context = Context(place / "scratch", threads=1)
    found = {}
    for name, (export, method, dtype) in PROGRAMS.items():
        source = Artifact(tiny_folder(place / name / "model", dtype=dtype), "checkpoint", "a" * 64)
        if method is not None:
            (place / name / "packed").mkdir()
            made = method.run(source, place / name / "packed", context)
            source = Artifact(place / name / "packed", "checkpoint", "b" * 64)
            write_manifest(source.path, Manifest("checkpoint", source.key, made["spec"].to_json()))
        out = place / name / "program"
        out.mkdir()
        made = export.run(source, out, context)
        write_manifest(out, Manifest("program", "c" * 64, made["spec"].to_json(), asdict(made["traits"])))
        found[name] = Artifact(out, "program", "c" * 64)
    return found


def logits(artifact: Artifact) -> Logits:
    ids = np.arange(2, 26)[None]
    return open_program(artifact, 1).open(1, ids.shape[1]).step(ids, logits="all").copy()


@pytest.mark.parametrize(("name", "fault"), CASES, ids=[f"{name}: {fault.name}" for name, fault in CASES])
def test_a_fault_changes_what_is_computed(
    programs: dict[str, Artifact], tmp_path: Path, name: str, fault: faults.Fault
) -> None:
    original = programs[name]
    before = {p.name: p.read_bytes() for p in list_files(original.path)}
    planted = faults.plant(fault, original, tmp_path / "faulty")
    wrong, right = logits(planted), logits(original)
    assert np.isfinite(wrong).all()
    assert np.abs(wrong - right).max() > 0.02 * right.std()
    assert planted.key != original.key
    assert {p.name: p.read_bytes() for p in list_files(original.path)} == before


def test_swapping_twice_changes_nothing(programs: dict[str, Artifact], tmp_path: Path) -> None:
    swap = next(x for x in faults.FAULTS if x.plant is faults.swapped_layers)
    original = programs["packed onnx"]
    twice = faults.plant(swap, faults.plant(swap, original, tmp_path / "once"), tmp_path / "twice")
    assert (twice.path / "model.onnx.data").read_bytes() == (original.path / "model.onnx.data").read_bytes()


def test_a_program_that_does_not_tell_its_model_is_refused(programs: dict[str, Artifact], tmp_path: Path) -> None:
    blank = shutil.copytree(programs["plain onnx"].path, tmp_path / "blank")
    write_manifest(blank, replace(read_manifest(blank), spec=None))
    with pytest.raises(UserError, match="holds no table of the model"):
        faults.plant(faults.FAULTS[0], Artifact(blank, "program", "c" * 64), tmp_path / "copy")
