"""The eager runtime runs checkpoints of known families with our decoder, and others with transformers."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from references import VOCAB_SIZE, random_decoder, tiny_folder, tiny_model

from strop import model
from strop.artifact import Artifact, Manifest, write_manifest
from strop.export.eager import DecoderProgram, Eager, TransformersProgram
from strop.families import opaque_spec
from strop.program import Program, Traits, Tree, open_program
from strop.spec import Quantization
from strop.stage import Context

KEY = "0" * 64


def exported(folder: Path, source: Path) -> tuple[Program, dict[str, Any]]:
    """Run the stage, write the manifest that the runner would, and open the program."""
    out = folder / "program"
    out.mkdir()
    result = Eager().run(Artifact(source, "checkpoint", KEY), out, Context(scratch=folder, threads=1))
    write_manifest(
        out,
        Manifest("program", KEY, spec=result["spec"].to_json(), traits=dataclasses.asdict(result["traits"])),
    )
    return open_program(Artifact(out, "program", KEY)), result


def reference(family: str, tokens: Any) -> Any:
    with torch.inference_mode():
        return tiny_model(family).eval()(torch.tensor(tokens)).logits.numpy()


def ids(rows: int, length: int) -> Any:
    return np.random.default_rng(0).integers(0, VOCAB_SIZE, (rows, length))


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", DecoderProgram),
        ("gpt2", DecoderProgram),
        ("falcon", TransformersProgram),
        ("lfm2", TransformersProgram),
    ],
)
def test_logits_are_those_of_transformers(tmp_path: Path, family: str, kind: type) -> None:
    program, result = exported(tmp_path, tiny_folder(tmp_path / "source", family))
    assert isinstance(program, kind)
    assert result["traits"].takes_trees == (kind is DecoderProgram)
    tokens = ids(2, 12)
    expected = reference(family, tokens)
    session = program.open(2, 32)
    found = np.concatenate([session.step(tokens[:, a:b], logits="all") for a, b in ((0, 5), (5, 6), (6, 12))], 1)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("family", ["llama", "falcon", "lfm2"])
def test_ragged_truncated_and_forked_rows(tmp_path: Path, family: str) -> None:
    program, _ = exported(tmp_path, tiny_folder(tmp_path / "source", family))
    tokens = ids(2, 12)
    expected = reference(family, tokens)
    close = {"atol": 1e-5 * np.abs(expected).max()}
    session = program.open(2, 32)
    padded = tokens[:, :7].copy()
    padded[1, 3:] = 0
    found = session.step(padded, counts=np.array([7, 3]), logits=2)
    np.testing.assert_allclose(found[0], expected[0, 5:7], **close)
    np.testing.assert_allclose(found[1], expected[1, 1:3], **close)
    session.truncate([4, 3])
    twin = session.fork()
    for one in (session, twin):
        found = one.step(np.stack((tokens[0, 4:6], tokens[1, 3:5])))
        np.testing.assert_allclose(found[:, 0], expected[[0, 1], [5, 4]], **close)


def test_files_are_linked_not_copied(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source")
    exported(tmp_path, source)
    names = {path.name for path in source.iterdir()}
    assert {path.name for path in (tmp_path / "program").iterdir()} == names | {"strop.json"}
    assert os.path.samefile(source / "model.safetensors", tmp_path / "program" / "model.safetensors")


def test_quantized_checkpoint_runs_dequantized(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source")
    spec = model.read_spec(source)
    packed = spec.quantize({x.name: Quantization(4, 16, True) for x in spec.linears()})
    decoder = random_decoder(packed)
    changed: dict[str, torch.Tensor | None] = {f"{x.name}.weight": None for x in spec.match(None)}
    with model.Weights(source) as weights:
        kept = {name: weights.load(name) for name in weights.names() if "norm" in name}
    for name, tensor in decoder.tensors().items():
        if name in kept:
            tensor.data.copy_(kept[name])
        else:
            changed[name] = tensor
    for linear in packed.linears():
        changed[f"{linear.name}.weight_shape"] = torch.tensor([linear.out_features, linear.in_features])
    out = tmp_path / "packed"
    out.mkdir()
    model.save_checkpoint(out, packed, source, sorted(changed.items(), key=lambda x: x[0]))
    write_manifest(out, Manifest("checkpoint", KEY, spec=packed.to_json()))
    program, _ = exported(tmp_path, out)
    assert isinstance(program, DecoderProgram)
    tokens = ids(2, 9)
    traits = program.traits
    expected = DecoderProgram(decoder, traits).open(2, 9).step(tokens, logits="all")
    np.testing.assert_allclose(program.open(2, 9).step(tokens, logits="all"), expected, atol=1e-5)


def test_plan_says_what_is_not_a_speed_row_and_what_an_unknown_family_costs(tmp_path: Path) -> None:
    spec = model.read_spec(tiny_folder(tmp_path / "source"))
    assert Eager().plan(spec, 0).notes == ()
    quantized = spec.quantize({x.name: Quantization(4, 16, True) for x in spec.match(None)})
    assert "not a speed row" in Eager().plan(quantized, 0).notes[0]
    assert Eager().plan(quantized, 0).memory_bytes == spec.size_bytes()
    unknown = opaque_spec({"model_type": "novel", "vocab_size": 11}, {"a": ("F32", (3, 5))}, "float32")
    assert "novel is not a known family: it runs through transformers" in Eager().plan(unknown, 0).notes[0]


def test_trees_are_refused_for_unknown_families(tmp_path: Path) -> None:
    from strop.errors import UserError

    program, _ = exported(tmp_path, tiny_folder(tmp_path / "source", "falcon"))
    with pytest.raises(UserError, match="takes no trees"):
        program.open().step(ids(1, 2), tree=Tree((-1, 0)))


def test_cached_memory_is_what_the_table_says(tmp_path: Path) -> None:
    program, result = exported(tmp_path, tiny_folder(tmp_path / "source", "gemma2"))
    assert sum(x.nbytes for x in program.allocate(3, 10)) == 30 * result["spec"].kv_bytes_per_token()


def test_threads_can_be_chosen_when_opening(tmp_path: Path) -> None:
    exported(tmp_path, tiny_folder(tmp_path / "source"))
    program = open_program(Artifact(tmp_path / "program", "program", KEY), threads=2)
    assert isinstance(program.traits, Traits)
    assert (program.traits.threads, torch.get_num_threads()) == (2, 2)
    torch.set_num_threads(1)
