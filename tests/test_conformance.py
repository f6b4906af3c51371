"""Conformance: every planted fault is found, and sound artifacts of every kind pass."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from references import quantized, tiny_folder
from safetensors.torch import load_file, save_file

from strop import faults
from strop.artifact import Artifact, Manifest, hash_file, list_files, read_manifest, write_manifest
from strop.conformance import FLOAT32, ROUNDED, check_checkpoint, check_program, verify
from strop.errors import ConformanceError, UserError
from strop.export.eager import Eager
from strop.export.onnx_runtime import OnnxRuntime
from strop.methods.rtn import Rtn
from strop.model import read_spec
from strop.spec import ModelSpec, Quantization
from strop.stage import Context, Stage

KEYS = ("a" * 64, "b" * 64, "c" * 64)


def finish(folder: Path, **fields: object) -> Artifact:
    """Write the manifest that the store would write."""
    files = {
        str(p.relative_to(folder)): {"sha256": hash_file(p), "size_bytes": p.stat().st_size} for p in list_files(folder)
    }
    manifest = Manifest(**{**fields, "files": files})  # type: ignore[arg-type]  # the test's own fields
    write_manifest(folder, manifest)
    return Artifact(folder, manifest.format, manifest.key)


def lineage(*keys: str) -> tuple[dict[str, object], ...]:
    return tuple({"name": f"step{i}", "use": "x", "key": key, "fields": {}, "report": {}} for i, key in enumerate(keys))


def apply(stage: Stage, source: Artifact, out: Path, number: int) -> Artifact:
    out.mkdir()
    made = stage.run(source, out, Context(out.parent / "scratch", threads=1))
    traits = dataclasses.asdict(made["traits"]) if "traits" in made else None
    spec = made["spec"].to_json()
    return finish(
        out, format=stage.gives, key=KEYS[number], spec=spec, traits=traits, lineage=lineage(*KEYS[: number + 1])
    )


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, its 4-bit checkpoint (head too: tied, so stored untied) and that one's eager program, side by side."""
    place = tmp_path_factory.mktemp("conformance")
    folder = tiny_folder(place / KEYS[0], "llama")
    source = finish(
        folder, format="checkpoint", key=KEYS[0], spec=read_spec(folder).to_json(), lineage=lineage(KEYS[0])
    )
    packed = apply(Rtn(bits=4, group_size=16, targets=["*"]), source, place / KEYS[1], 1)
    apply(Eager(), packed, place / KEYS[2], 2)
    return place


@pytest.fixture
def artifacts(originals: Path, tmp_path: Path) -> list[Artifact]:
    """Copies to damage, side by side: source, packed, program."""
    formats = ("checkpoint", "checkpoint", "program")
    for key in KEYS:
        shutil.copytree(originals / key, tmp_path / key)
    return [Artifact(tmp_path / key, f, key) for key, f in zip(KEYS, formats, strict=True)]  # type: ignore[arg-type]


def rewrite(artifact: Artifact, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a checkpoint and list the new hashes: only what is stored can tell."""
    path = artifact.path / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    refresh(artifact)


def refresh(artifact: Artifact) -> None:
    manifest = read_manifest(artifact.path)
    finish(
        artifact.path, **{name: getattr(manifest, name) for name in Manifest.__dataclass_fields__ if name != "files"}
    )


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_sound_artifacts_pass(artifacts: list[Artifact]) -> None:
    source, packed, program = artifacts
    check_checkpoint(packed, source)
    assert [x.name for x in verify(packed.path)] == ["hashes", "lineage", "tensors", "companions", "reload"]
    assert [x.name for x in verify(program.path)] == ["hashes", "lineage", "reload"]


def constant(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight_packed"].fill_(0x11111111)


def empty(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight_packed"].zero_()


def infinite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight_scale"][0, 1] = float("inf")


def scaleless(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight_scale"][2, 0] = 0


def undone(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(80, 48)


def lost(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.2.mlp.up_proj.weight_scale"]


def widened(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.2.mlp.up_proj.weight_scale"
    tensors[name] = tensors[name].float()


def misshapen(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight_shape"] += 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (constant, r"every code of model\.layers\.1\.mlp\.down_proj is -7"),
        (empty, r"every code of lm_head is -8"),
        (infinite, r"q_proj\.weight_scale holds values that are not finite"),
        (scaleless, r"q_proj has scales of zero"),
        (undone, r"up_proj\.weight is stored, but not planned"),
        (lost, r"up_proj\.weight_scale is missing: planned is BF16 \[80, 3\]"),
        (widened, r"up_proj\.weight_scale is F32 \[80, 3\], planned is BF16"),
        (misshapen, r"up_proj\.weight_shape is \[81, 49\]"),
    ],
)
def test_planted_faults_in_tensors_are_found(
    artifacts: list[Artifact], fault: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    source, packed, _ = artifacts
    rewrite(packed, fault)
    with pytest.raises(ConformanceError, match=message):
        check_checkpoint(packed, source)
    with pytest.raises(ConformanceError, match=message):
        verify(packed.path)


def test_a_constant_weight_may_have_constant_codes(artifacts: list[Artifact]) -> None:
    source, packed, _ = artifacts
    rewrite(source, lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"].zero_())
    rewrite(packed, constant)
    check_checkpoint(packed, source)


def test_a_tie_that_was_broken_is_found(artifacts: list[Artifact]) -> None:
    source, packed, _ = artifacts
    edit_json(packed.path / "config.json", tie_word_embeddings=True)
    with pytest.raises(ConformanceError, match="tie_word_embeddings"):
        check_checkpoint(packed, source)


def test_a_materialized_tie_is_found(artifacts: list[Artifact]) -> None:
    source = artifacts[0]
    rewrite(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    with pytest.raises(ConformanceError, match=r"lm_head\.weight is stored, but not planned"):
        check_checkpoint(source, source)


def test_a_config_that_tells_other_libraries_something_else_is_found(artifacts: list[Artifact]) -> None:
    source, packed, _ = artifacts
    path = packed.path / "config.json"
    config = json.loads(path.read_text())["quantization_config"]
    config["config_groups"]["group_0"]["weights"]["num_bits"] = 8
    edit_json(path, quantization_config=config)
    with pytest.raises(ConformanceError, match="config"):
        check_checkpoint(packed, source)


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "LICENSE", "chat_template.jinja"])
def test_lost_or_changed_companions_are_found(artifacts: list[Artifact], name: str) -> None:
    source, packed, program = artifacts
    assert (source.path / name).is_file()
    (packed.path / name).write_text("{}")
    with pytest.raises(ConformanceError, match=f"{name} is not the source's"):
        check_checkpoint(packed, source)
    (program.path / name).unlink()
    with pytest.raises(ConformanceError, match=f"{name} was lost"):
        check_program(program, source)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_damaged_missing_and_foreign_files_are_found(artifacts: list[Artifact], name: str) -> None:
    path = artifacts[1].path / name
    content = path.read_bytes()
    for harm, message in [
        (content[:-1], "bytes, strop.json says"),
        (content[:-1] + bytes([content[-1] ^ 1]), "content is not the one"),
        (None, f"{name} is missing"),
    ]:
        path.unlink()
        if harm is not None:
            path.write_bytes(harm)
        with pytest.raises(ConformanceError, match=message):
            verify(artifacts[1].path)
        path.write_bytes(content)
    (artifacts[1].path / "extra.py").write_text("")
    with pytest.raises(ConformanceError, match=r"extra\.py does not belong"):
        verify(artifacts[1].path)


def test_an_edited_manifest_is_found(artifacts: list[Artifact]) -> None:
    path = artifacts[1].path / "strop.json"
    text = path.read_text()
    path.write_text(text.replace('"step1"', '"step9"'))
    with pytest.raises(ConformanceError, match="changed after it was written"):
        verify(artifacts[1].path)
    path.write_text(text[: len(text) // 2])
    with pytest.raises(ConformanceError, match="not JSON"):
        verify(artifacts[1].path)
    path.unlink()
    with pytest.raises(UserError, match="not a strop artifact"):
        verify(artifacts[1].path)


def test_a_lineage_of_something_else_is_found(artifacts: list[Artifact]) -> None:
    manifest = read_manifest(artifacts[1].path)
    write_manifest(artifacts[1].path, dataclasses.replace(manifest, lineage=lineage(KEYS[0], KEYS[2])))
    with pytest.raises(ConformanceError, match="its lineage ends in"):
        verify(artifacts[1].path)


def swap_layers(tensors: dict[str, torch.Tensor]) -> None:
    for name in [x for x in tensors if x.startswith("model.layers.0.")]:
        other = name.replace("layers.0.", "layers.2.")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def test_a_program_that_computes_something_else_is_found(artifacts: list[Artifact]) -> None:
    program = artifacts[2]
    rewrite(program, swap_layers)
    with pytest.raises(ConformanceError, match="logits are not those of its checkpoint"):
        verify(program.path)


def slightly_wrong_scales(slots: faults.Slots, spec: ModelSpec) -> None:
    slot = slots["model.layers.1.mlp.down_proj.scales"]
    slot_values = np.frombuffer(slot.read(), np.float32) * np.float32(1.02)
    with slot.file.open("r+b") as file:
        file.seek(slot.offset)
        file.write(slot_values.tobytes())


@pytest.fixture(scope="module")
def rounding(originals: Path) -> tuple[Artifact, Artifact]:
    """A checkpoint, and its program whose activations are rounded to int8."""
    source = Artifact(originals / KEYS[0], "checkpoint", KEYS[0])
    packed = apply(Rtn(bits=4, group_size=16), source, originals / "rounding-packed", 1)
    return packed, apply(OnnxRuntime(), packed, originals / "rounding-program", 2)


def test_a_program_that_rounds_activations_passes(rounding: tuple[Artifact, Artifact]) -> None:
    packed, program = rounding
    assert check_program(program, packed) > FLOAT32.largest


@pytest.mark.parametrize("fault", [*faults.FAULTS, faults.Fault("scales 2 % off", slightly_wrong_scales)], ids=str)
def test_rounding_hides_no_fault(rounding: tuple[Artifact, Artifact], fault: faults.Fault, tmp_path: Path) -> None:
    packed, program = rounding
    planted = faults.plant(fault, program, tmp_path / "planted")
    with pytest.raises(ConformanceError, match="without rounding its activations, its logits are not those"):
        check_program(planted, packed)


@pytest.fixture(scope="module", params=["dynamic", "static"])
def integers(originals: Path, request: pytest.FixtureRequest) -> tuple[Artifact, Artifact]:
    """A checkpoint that rounds its inputs, and its program that multiplies integers."""
    place = originals / f"integers-{request.param}"
    place.mkdir()
    packed = quantized(originals / KEYS[0], place / "packed", Quantization(8, None, True, request.param), head=False)
    manifest = read_manifest(packed)
    checkpoint = finish(packed, format="checkpoint", key=KEYS[1], spec=manifest.spec, lineage=lineage(*KEYS[:2]))
    return checkpoint, apply(OnnxRuntime(), checkpoint, place / "program", 2)


def test_a_program_that_multiplies_integers_passes(integers: tuple[Artifact, Artifact], originals: Path) -> None:
    packed, program = integers
    check_checkpoint(packed, Artifact(originals / KEYS[0], "checkpoint", KEYS[0]))
    assert check_program(program, packed) < ROUNDED.largest


@pytest.mark.parametrize("fault", [*faults.FAULTS, faults.Fault("scales 2 % off", slightly_wrong_scales)], ids=str)
def test_integers_hide_no_fault(integers: tuple[Artifact, Artifact], fault: faults.Fault, tmp_path: Path) -> None:
    packed, program = integers
    planted = faults.plant(fault, program, tmp_path / "planted")
    with pytest.raises(ConformanceError, match="without rounding its activations, its logits are not those"):
        check_program(planted, packed)


def test_a_static_scale_of_zero_is_found(originals: Path, tmp_path: Path) -> None:
    source = Artifact(originals / KEYS[0], "checkpoint", KEYS[0])
    folder = quantized(source.path, tmp_path / "packed", Quantization(8, None, True, "static"), head=False)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.input_scale"].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConformanceError, match=r"down_proj\.input_scale is not positive"):
        check_checkpoint(Artifact(folder, "checkpoint", KEYS[1]), source)


def test_logits_that_are_not_finite_are_found_without_the_checkpoint(artifacts: list[Artifact]) -> None:
    _, packed, program = artifacts
    shutil.rmtree(packed.path)
    rewrite(program, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(ConformanceError, match="logits are not finite"):
        verify(program.path)


def test_a_program_that_does_not_load_is_found(artifacts: list[Artifact]) -> None:
    _, packed, program = artifacts
    rewrite(program, lost)
    with pytest.raises(ConformanceError, match="does not run in a fresh process"):
        check_program(program, packed)


def test_traits_that_promise_another_vocabulary_are_found(artifacts: list[Artifact]) -> None:
    _, packed, program = artifacts
    manifest = read_manifest(program.path)
    assert manifest.traits is not None
    write_manifest(program.path, dataclasses.replace(manifest, traits={**manifest.traits, "vocab_size": 300}))
    with pytest.raises(ConformanceError, match=r"logits are \[32, 307\], its traits say \[32, 300\]"):
        check_program(program, packed)
