"""The release gate: foreign folders and artifacts are judged, faults are caught, what cannot be compared is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from references import tiny_folder

from strop import recipe, runner
from strop.artifact import open_artifact, read_manifest
from strop.cli import main
from strop.errors import UserError
from strop.faults import FAULTS
from strop.program import Traits
from strop.release import Side, profile_gates, weight_bits
from strop.spec import ModelSpec
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


def test_a_candidate_that_is_not_there_is_told_before_the_reference_is_converted(
    place: Path, tmp_path: Path, capsys: Any
) -> None:
    assert run_gate(place, tmp_path, "nowhere", "model") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no such file or folder" in line


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


@pytest.mark.parametrize(
    ("bits", "is_program", "limits"),
    [
        (4.0, True, {"divergence.kl_mean": 0.1, "latency.decode_tokens_per_s": 1 / 1.05, "size.total_bytes": 1.05}),
        (8.0, False, {"divergence.kl_mean": 0.01}),
        (32.0, True, {"divergence.kl_mean": 1e-6, "divergence.same_top_off_ties": 99.9}),
    ],
)
def test_the_profile_follows_the_bits_and_judges_speed_between_programs_only(
    place: Path, bits: float, is_program: bool, limits: dict[str, float]
) -> None:
    side = side_of(place / "parent", bits=bits, is_program=is_program)
    found = profile_gates(side, side, "standard")
    gates = {x["metric"]: x.get("at_most", x.get("at_least")) for x in found["gates"]}
    assert {name: gates[name] for name in limits} == pytest.approx(limits)
    assert ("latency.decode_tokens_per_s" in gates) == is_program
    assert [x["use"] for x in found["evals"]] == list(dict.fromkeys(x.partition(".")[0] for x in gates))


def test_no_profile_fits_a_model_of_another_shape(place: Path) -> None:
    side = side_of(place / "parent")
    pruned = replace(side, spec=replace(side.spec, layers=side.spec.layers[1:]))
    with pytest.raises(UserError, match="differ in shape"):
        profile_gates(pruned, side, "standard")


def test_bits_are_those_of_the_smallest_weights(place: Path) -> None:
    assert [side_of(place / name).bits for name in ("parent", "main", "w2")] == [32, 8, 2]


def side_of(folder: Path, **changes: Any) -> Side:
    artifact = open_artifact(folder)
    manifest = read_manifest(folder)
    assert manifest.spec is not None
    assert manifest.traits is not None
    spec, traits = ModelSpec.from_json(manifest.spec), Traits(**manifest.traits)
    return replace(Side(str(folder), artifact, True, spec, traits, weight_bits(spec, traits)), **changes)


def test_a_damaged_candidate_is_code_6(place: Path, tmp_path: Path, capsys: Any) -> None:
    broken = shutil.copytree(place / "main", tmp_path / "broken")
    broken.chmod(0o755)
    (broken / "tokenizer.json").chmod(0o644)
    (broken / "tokenizer.json").write_text("{}")
    assert run_gate(place, tmp_path, str(broken), "parent") == 6
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
