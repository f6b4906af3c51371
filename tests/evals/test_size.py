"""Bytes are those of the files, texts apart where only weights are asked for."""

from __future__ import annotations

from pathlib import Path

from strop.artifact import Artifact
from strop.evals.size import Size
from strop.metric import MeasureContext


def program(folder: Path, weights: int) -> Artifact:
    folder.mkdir()
    (folder / "model.onnx.data").write_bytes(bytes(weights))
    (folder / "model.onnx").write_bytes(bytes(10))
    (folder / "tokenizer.json").write_text("{}" * 50)
    (folder / "LICENSE").write_text("free")
    (folder / "strop.json").write_text("{}" * 1000)
    return Artifact(folder, "program", folder.name)


def test_total_counts_all_but_the_manifest_and_weights_no_text(tmp_path: Path) -> None:
    found = Size().measure(program(tmp_path / "a", 990), {"parent": program(tmp_path / "b", 3990)}, MeasureContext())
    assert found["weight_bytes"].estimate.value == 1000
    assert found["total_bytes"].estimate.value == 1104
    assert found["weight_bytes"].ratios["parent"].value == 0.25
    assert found["total_bytes"].estimate.lower == found["total_bytes"].estimate.upper
    assert found["total_bytes"].detail["files"]["model.onnx.data"] == 990
