"""The release gate: foreign folders and artifacts are judged, faults are caught, what cannot be compared is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from references import tiny_folder

from strop import recipe, runner
from strop.artifact import Artifact, open_artifact
from strop.cli import main
from strop.errors import UserError
from strop.faults import FAULTS, plant
from strop.program import open_program
from strop.store import Store

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps under a tree for a while. "


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, text to measure on, and a store with an 8-bit and a 2-bit program of the model."""
    place = tmp_path_factory.mktemp("release")
    tiny_folder(place / "model", seed=1)
    words = TEXT.split()
    lines = [json.dumps({"text": " ".join(words[i % len(words) :] + words[: i % len(words)])}) for i in range(24)]
    (place / "text.jsonl").write_text("\n".join(lines))
    chosen = recipe.parse(
        {
            "version": 1,
            "model": {"source": str(place / "model")},
            "stages": [{"use": "rtn", "name": "w", "bits": 8, "group_size": 16}],
            "variants": {"w2": {"replace": {"w": {"use": "rtn", "bits": 2, "group_size": 16}}}},
            "export": [{"use": "eager"}],
            "threads": 1,
        },
        "tiny",
    )
    found = runner.run(chosen, Store(place / "store"), place / "out")
    for row in found.rows:
        (place / row.chain).symlink_to(place / "store" / "objects" / row.key)
    return place


def write_gates(place: Path, path: Path, **changes: Any) -> Path:
    text = {
        "gates": [{"metric": "divergence.kl_mean", "at_most": 0.002}],
        "evals": [{"use": "divergence", "text": str(place / "text.jsonl"), "windows": 24, "length": 32}],
    }
    path.write_text(yaml.safe_dump({**text, **changes}))
    return path


def run_gate(place: Path, tmp_path: Path, candidate: str, reference: str, *arguments: str, **changes: Any) -> int:
    gates = write_gates(place, tmp_path / "gates.yaml", **changes)
    options = ["--gates", str(gates), "--store", str(place / "store"), "--out", str(tmp_path / "out")]
    return main(["gate", str(place / candidate), str(place / reference), *options, *arguments])


def test_a_faithful_candidate_passes_and_a_coarse_one_fails(place: Path, tmp_path: Path, capsys: Any) -> None:
    assert run_gate(place, tmp_path, "main", "parent") == 0
    assert "passed: 1 gate" in capsys.readouterr().out
    assert run_gate(place, tmp_path, "w2", "parent") == 3
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [x["outcome"] for x in report["gates"]] == ["FAIL"]
    assert [x["name"] for x in report["rows"]] == ["reference / eager", "candidate / eager"]


def test_a_foreign_folder_is_taken(place: Path, tmp_path: Path) -> None:
    release = [{"metric": "divergence.kl_mean", "at_most": 1e-9, "of": "release"}]
    assert run_gate(place, tmp_path, "model", "model", gates=release) == 0


def test_another_tokenizer_is_refused_in_one_line(place: Path, tmp_path: Path, capsys: Any) -> None:
    other = shutil.copytree(place / "model", tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, two = sorted(vocabulary)[-2:]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert run_gate(place, tmp_path, str(other), "model") == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("strop: error")]
    assert "their tokenizers differ" in line


def test_the_self_test_catches_every_planted_fault(place: Path, tmp_path: Path, capsys: Any) -> None:
    assert run_gate(place, tmp_path, "main", "parent", "--self-test") == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("self-test: ")]
    assert len(lines) == len(FAULTS)
    assert all("caught by divergence.kl_mean" in x for x in lines)


def test_the_self_test_does_not_hide_a_gate_that_sees_nothing(place: Path, tmp_path: Path, capsys: Any) -> None:
    loose = [{"metric": "divergence.kl_mean", "at_most": 100.0}]
    assert run_gate(place, tmp_path, "main", "parent", "--self-test", gates=loose) == 2
    assert "do not notice" in capsys.readouterr().err


def test_the_self_test_needs_a_gate_that_the_candidate_passes(place: Path, tmp_path: Path, capsys: Any) -> None:
    assert run_gate(place, tmp_path, "w2", "parent", "--self-test") == 2
    assert "no gate on quality that the candidate itself does not fail" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gates": [{"metric": "divergence.kl_men", "at_most": 1.0}]}, "did you mean 'divergence.kl_mean'"),
        ({"gates": []}, "at least one gate"),
        ({"gate": []}, "'gate' is not known here; did you mean 'gates'"),
        ({"gates": [{"metric": "divergence.kl_mean"}]}, "exactly one of at_most and at_least"),
        ({"evals": [{"use": "divergenc"}]}, "did you mean 'divergence'"),
    ],
)
def test_gates_that_cannot_be_decided_are_refused(
    place: Path, tmp_path: Path, capsys: Any, changes: dict[str, Any], message: str
) -> None:
    assert run_gate(place, tmp_path, "main", "parent", **changes) == 2
    assert message in capsys.readouterr().err


def test_a_damaged_candidate_is_code_6(place: Path, tmp_path: Path, capsys: Any) -> None:
    broken = shutil.copytree(place / "main", tmp_path / "broken")
    broken.chmod(0o755)
    (broken / "tokenizer.json").chmod(0o644)
    (broken / "tokenizer.json").write_text("{}")
    assert run_gate(place, tmp_path, str(broken), "parent") == 6
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda x: x.name)
def test_a_planted_fault_changes_logits_and_leaves_the_original(place: Path, tmp_path: Path, fault: Any) -> None:
    import numpy as np

    original = open_artifact((place / "main").resolve())
    before = {p.name: p.read_bytes() for p in original.path.iterdir()}
    planted = plant(fault, original, tmp_path / "faulty")
    ids = np.arange(2, 18)[None]

    def logits(artifact: Artifact) -> Any:
        return open_program(artifact, 1).open(1, 16).step(ids, logits="all").copy()

    difference = np.abs(logits(planted) - logits(original)).max()
    assert difference > 0.01
    assert planted.key != original.key
    assert {p.name: p.read_bytes() for p in original.path.iterdir()} == before


def test_faults_need_a_program_that_tells_its_model(tmp_path: Path, place: Path) -> None:
    from dataclasses import replace

    from strop.artifact import read_manifest, write_manifest

    blank = shutil.copytree(place / "main", tmp_path / "blank")
    for path in (blank, *blank.iterdir()):
        path.chmod(0o755)
    write_manifest(blank, replace(read_manifest(blank), spec=None))
    with pytest.raises(UserError, match="holds no table of the model"):
        plant(FAULTS[0], open_artifact(blank), tmp_path / "copy")
