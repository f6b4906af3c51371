"""What a user gets wrong is one line and exit code 2, before anything is computed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from references import tiny_folder

from strop.cli import main

W8A8 = {"use": "rtn", "bits": 8, "group_size": None, "activations": "dynamic"}
WORDS = " ".join(f"word{i}" for i in range(400))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("bad") / "tiny")


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STROP_STORE", str(tmp_path / "store"))


def content(source: Path, **changes: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "model": {"source": str(source)},
        "stages": [{"use": "rtn", "name": "w4", "group_size": 16}],
        "export": [{"use": "eager"}],
        "evals": [{"use": "divergence", "windows": 2, "length": 16}],
        "gates": [{"metric": "divergence.kl_mean", "at_most": 9}],
        "threads": 1,
        **changes,
    }


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command ends with."""
    code = main(list(arguments))
    lines = capsys.readouterr().err.splitlines()
    assert code == 2, lines
    assert len(lines) == 1, lines
    assert lines[0].startswith("strop: error: ")
    return lines[0]


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: [1", "not YAML"),
        ("", "empty"),
        ("- version: 1", "holds a list"),
        ("version: 1\nversion: 1", "duplicate key 'version'"),
        (LAUGHS, "aliases expand"),
        ("version: 1", "model: is missing"),
        ("a: !!python/name:os.system x", "not allowed"),
    ],
)
def test_recipes_that_cannot_be_read(tmp_path: Path, capsys: Any, text: str, message: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    code = main(["check", "r.yaml"])
    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    assert all(x.startswith("strop: error: r.yaml") for x in lines)
    assert any(message in x for x in lines), lines


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": [{"use": "rtm"}]}, "no method named 'rtm'; did you mean 'rtn'?"),
        ({"stages": [{"use": "rtn", "bits": 5}]}, "stages[0].bits: found 5, allowed: 2, 3, 4 or 8"),
        (
            {"stages": [{"use": "rtn", "group_size": 64}]},
            "stages[0] (rtn): group_size 64 does not divide the 48 inputs",
        ),
        ({"stages": [{"use": "rtn", "group_size": 16, "targets": ["*.mlq.*"]}]}, "pattern '*.mlq.*' matches no linear"),
        (
            {"stages": [{"use": "rtn", "group_size": 16}, {"use": "rtn", "name": "b", "group_size": 16}]},
            "already quantized",
        ),
        (
            {"stages": [{"use": "rtn", "bits": 8, "activations": "dynamic"}]},
            "stages[0] (rtn): activations dynamic of model.layers.0.self_attn.q_proj: int8 inputs go with bits 8, "
            "group_size null and symmetric true, found bits 8, group_size 64 and symmetric true",
        ),
        (
            {"stages": [{"use": "rtn", "activations": "static"}]},
            "stages[0].activations: found \"static\", allowed: 'dynamic'",
        ),
        (
            {"stages": [{"use": "smoothquant", "alpha": 2}]},
            "stages[0].alpha: found 2, should be less than or equal to 1",
        ),
        ({"stages": [{"use": "smoothquant"}]}, "stages[0] (smoothquant): smoothquant needs text, add `calibration:"),
        (
            {"stages": [W8A8], "export": [{"use": "torch_compile"}]},
            "export[0] (torch_compile of main): export: torch_compile has no int8 inputs, "
            "model.layers.0.self_attn.q_proj asks for activations: dynamic; allowed: onnx_runtime, eager, or "
            "activations: null",
        ),
        (
            {"stages": [{**W8A8, "targets": ["*"]}], "export": [{"use": "onnx_runtime"}]},
            "export[0] (onnx_runtime of main): onnx_runtime: tokens are looked up in the quantized lm_head",
        ),
        ({"stages": [{"use": "gptq", "group_size": 16}]}, "stages[0] (gptq): gptq needs text, add `calibration:"),
        ({"gates": [{"metric": "divergence.kl_men", "at_most": 1}]}, "did you mean 'divergence.kl_mean'?"),
        ({"gates": [{"metric": "latency.ttft_ms", "at_most": 1}]}, "no eval measures 'latency.ttft_ms'"),
        ({"gates": [{"metric": "divergence.kl_p99_9", "at_most": 1}]}, "kl_p99_9 needs"),
        ({"gates": [{"metric": "divergence.kl_mean", "at_most": 1, "rows": ["w8 / *"]}]}, "'w8 / *' matches no row"),
        ({"model": {"source": "nowhere"}}, "model source 'nowhere': no such file or folder"),
        ({"model": {"source": "pypi:x"}}, "model source 'pypi:x'"),
        ({"evals": [{"use": "divergence", "text": "none.txt"}]}, "evals (divergence): text source 'none.txt'"),
        (
            {"evals": [{"use": "divergence", "text": "elsewhere"}]},
            "evals (divergence): text source 'elsewhere': allowed are",
        ),
        ({"calibration": {"source": "none.txt"}}, "calibration.source: text source 'none.txt': no such file"),
        (
            {
                "stages": [{"use": "gptq", "group_size": 16}],
                "calibration": {"source": "python", "length": 100000},
            },
            "calibration.length: 100000 is more than the model's context of",
        ),
        ({"calibration": {"sourc": "self"}}, "calibration.sourc: unknown key; did you mean 'source'?"),
    ],
)
def test_recipes_that_cannot_run(
    model: Path, tmp_path: Path, capsys: Any, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(content(model, **changes)))
    assert message in refused(capsys, "check", "r.yaml")
    assert message in refused(capsys, "run", "r.yaml")
    assert not (tmp_path / "store").exists()


def test_text_without_a_word(model: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "blank.txt").write_text(" \n\n ")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(content(model, evals=[{"use": "divergence", "text": "blank.txt"}])))
    assert "holds no text" in refused(capsys, "check", "r.yaml")


@pytest.mark.parametrize("name", ["same.txt", "copy.txt", "part.jsonl"])
def test_text_that_is_calibrated_and_measured_on(model: Path, tmp_path: Path, capsys: Any, name: str) -> None:
    (tmp_path / "same.txt").write_text(WORDS)
    (tmp_path / "copy.txt").write_text("Before. " + WORDS)
    (tmp_path / "part.jsonl").write_text(json.dumps({"text": WORDS[500:1500]}))
    text = content(model, calibration={"source": "same.txt"}, evals=[{"use": "divergence", "text": name}])
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({**text, "gates": []}))
    assert "same.txt is also measured on" in refused(capsys, "check", "r.yaml")


def damage_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def cut_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:50])


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def other_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def foreign_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["foreign"] = 5000
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (damage_weights, "has no weights"),
        (only_pickle, "pickle"),
        (cut_weights, "truncated"),
        (cut_header, "truncated"),
        (no_config, "config.json is missing"),
        (other_config, "its config.json asks for"),
        (no_tokenizer, "has no tokenizer"),
        (foreign_tokenizer, "another model's tokenizer"),
    ],
)
def test_damaged_models(model: Path, tmp_path: Path, capsys: Any, harm: Any, message: str) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(model, folder)
    harm(folder)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(content(folder)))
    assert message in refused(capsys, "check", "r.yaml")
    assert message in refused(capsys, "run", "r.yaml")


@pytest.mark.parametrize("head", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\x01" * 16, b"not a gguf at all, but longer"])
def test_a_truncated_gguf(tmp_path: Path, capsys: Any, head: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(head)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(content(tmp_path / "model.gguf")))
    assert "model.gguf" in refused(capsys, "check", "r.yaml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "missing.yaml"], "missing.yaml: no such file"),
        (["check", "quikstart"], "did you mean 'quickstart'?"),
        (["check", "quickstart", "--set", "w4.bits"], "--set w4.bits: write PATH=VALUE"),
        (["check", "quickstart", "--set", "w5.bits=3"], "nothing is called 'w5'"),
        (
            ["check", "quickstart", "--set", "w4.bits=3.5"],
            "quickstart.yaml --set w4.bits=3.5: stages[0].bits: found 3.5, allowed: 2, 3, 4 or 8",
        ),
        (["generate", "nowhere", "--prompt", "x"], "nowhere: not a strop artifact"),
        (["init", "nowhere"], "model source 'nowhere'"),
    ],
)
def test_arguments(capsys: Any, arguments: list[str], message: str) -> None:
    assert message in refused(capsys, *arguments)


def test_a_store_in_a_file(model: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(content(model)))
    main(["run", "r.yaml", "--store", "file/store"])
    assert "cannot be written to" in capsys.readouterr().err.splitlines()[-1]
