"""The folder in AutoGPTQ's layout holds the checkpoint's codes, and strop runs it as the checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from references import quantized, random_ids, tiny_folder
from safetensors.numpy import load_file

from strop.artifact import Artifact, Manifest, write_manifest
from strop.conformance import check_program
from strop.errors import UserError
from strop.export.auto_gptq import AutoGptq, pack, unpack
from strop.export.eager import Eager
from strop.model import Weights, load_linear, read_spec
from strop.program import open_program
from strop.spec import Quantization
from strop.stage import Context, Stage

WIDE: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 64}
CASES = {
    "4 bits": Quantization(4, 32, True),
    "4 bits, one group a row": Quantization(4, None, True),
    "8 bits": Quantization(8, 16, True),
    "3 bits": Quantization(3, 32, True),
    "2 bits": Quantization(2, 16, True),
    "4 bits asymmetric": Quantization(4, 32, False),
    "3 bits asymmetric": Quantization(3, 32, False),
    "8 bits asymmetric": Quantization(8, 32, False),
}


def exported(source: Path, out: Path, stage: Stage) -> Artifact:
    out.mkdir()
    made = stage.run(Artifact(source, "checkpoint", "a" * 64), out, Context(out.parent / "scratch", threads=1))
    traits = dataclasses.asdict(made["traits"])
    write_manifest(out, Manifest("program", "b" * 64, made["spec"].to_json(), traits))
    return Artifact(out, "program", "b" * 64)


def bits_of(words: list[int], start: int, bits: int) -> int:
    """A number in a row of words, the lowest bit of the first word first."""
    stream = sum((w & 0xFFFFFFFF) << (32 * i) for i, w in enumerate(words))
    return (stream >> start) & (2**bits - 1)


def slow_weight(tensors: dict[str, Any], name: str, settings: dict[str, Any]) -> Any:
    """W (out, in), number by number, as AutoGPTQ's format tells it."""
    part = {x: tensors[f"{name}.{x}"] for x in ("qweight", "qzeros", "scales", "g_idx")}
    bits, offset = settings["bits"], 1 if settings["checkpoint_format"] == "gptq" else 0
    rows, columns = part["scales"].shape[1], len(part["g_idx"])
    found = np.zeros((rows, columns), np.float32)
    for row in range(rows):
        words = [int(x) for x in part["qweight"][:, row]]
        for column in range(columns):
            group = int(part["g_idx"][column])
            zero = bits_of([int(x) for x in part["qzeros"][group]], row * bits, bits) + offset
            code = bits_of(words, column * bits, bits)
            found[row, column] = (code - zero) * np.float32(part["scales"][group, row])
    return found


@pytest.mark.parametrize("case", CASES)
def test_codes_scales_and_zeros_are_the_checkpoints(case: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "source", num_hidden_layers=1, **WIDE)
    source = quantized(folder, tmp_path / "packed", CASES[case], head=False)
    program = exported(source, tmp_path / "out", AutoGptq())
    tensors = load_file(program.path / "model.safetensors")
    settings = json.loads((program.path / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "gptq"
    assert json.loads((program.path / "quantize_config.json").read_text()).items() <= settings.items()
    with Weights(source) as weights:
        for linear in list(read_spec(source).linears())[:2]:
            expected = load_linear(weights, linear).numpy()
            np.testing.assert_array_equal(slow_weight(tensors, linear.name, settings), expected)
    assert not any(x.endswith((".weight_packed", ".weight_scale")) for x in tensors)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_strop_runs_the_folder_as_the_checkpoint(family: str, tmp_path: Path) -> None:
    changes = {"n_embd": 96, "n_inner": 64} if family == "gpt2" else WIDE
    source = quantized(
        tiny_folder(tmp_path / "source", family, **changes), tmp_path / "packed", CASES["4 bits"], head=False
    )
    programs = (exported(source, tmp_path / str(i), x) for i, x in enumerate((AutoGptq(), Eager())))
    ids = random_ids(2, 12)
    found, expected = (open_program(x, 1).open(2, 12).step(ids, logits="all") for x in programs)
    np.testing.assert_array_equal(found, expected)


def test_a_fresh_process_computes_it_too(tmp_path: Path) -> None:
    source = quantized(tiny_folder(tmp_path / "source", **WIDE), tmp_path / "packed", CASES["3 bits"], head=False)
    program = exported(source, tmp_path / "out", AutoGptq())
    assert check_program(program, Artifact(source, "checkpoint", "a" * 64)) < 1e-6
    planned = AutoGptq().plan(read_spec(source), 0).size_bytes
    stored = sum(x.nbytes for x in load_file(program.path / "model.safetensors").values())
    assert planned == stored


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packing_is_undone(bits: int) -> None:
    codes = np.random.default_rng(0).integers(0, 2**bits, (3, 96), dtype=np.uint8)
    words = pack(codes, bits)
    assert words.shape == (3, 96 * bits // 32)
    assert [bits_of([int(x) for x in words[1]], 5 * bits, bits)] == [codes[1, 5]]
    np.testing.assert_array_equal(unpack(words, bits), codes)


def test_what_the_layout_cannot_tell_is_refused(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "source", **WIDE)
    spec = read_spec(folder)
    four, eight = Quantization(4, 32, True), Quantization(8, 32, True)
    names = [x.name for x in spec.match(None)]
    for choices, message in (
        ({}, "one setting for all linears, found .*: not quantized"),
        (
            dict.fromkeys(names[:5], four),
            "one setting for all linears, found .*4 bits, group_size 32, symmetric; .*: not",
        ),
        ({x: eight if "down" in x else four for x in names}, "one setting for all"),
        (dict.fromkeys([*names, "lm_head"], four), "lm_head is quantized"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            AutoGptq().plan(spec.quantize(choices), 0)
        assert "\n" not in str(caught.value)
    odd = read_spec(tiny_folder(tmp_path / "odd", intermediate_size=80))
    with pytest.raises(UserError, match=r"3 bits of .* do not fill int32 words"):
        AutoGptq().plan(odd.quantize({x.name: Quantization(3, 16, True) for x in odd.match(None)}), 0)


def test_a_recipe_exports_it_without_a_row_of_the_parent(tmp_path: Path) -> None:
    from strop.cli import main

    model = tiny_folder(tmp_path / "model", **WIDE)
    path = tmp_path / "recipe.yaml"
    path.write_text(f"""
version: 1
model: {{source: {model}, dtype: float32}}
threads: 1
stages: [{{use: rtn, name: w4, bits: 4, group_size: 32}}]
export: [{{use: auto_gptq}}, {{use: eager}}]
evals: [{{use: divergence, windows: 2, length: 32}}, {{use: size}}]
gates: [{{metric: size.total_bytes, at_most: 1.0, of: parent}}]
""")
    assert main(["run", str(path), "--store", str(tmp_path / "store"), "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    rows = {x["name"]: x for x in report["rows"]}
    assert list(rows) == ["parent / eager", "main / auto_gptq", "main / eager"]
    assert rows["main / auto_gptq"]["failures"] == {}
    found, same = (rows[f"main / {x}"]["measurements"]["divergence.kl_mean"] for x in ("auto_gptq", "eager"))
    assert found["estimate"]["value"] == pytest.approx(same["estimate"]["value"], rel=1e-3)
