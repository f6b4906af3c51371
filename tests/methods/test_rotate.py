"""Rotations: the matrices, the model that computes the same after, what it is good for and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from references import VOCAB_SIZE, tiny_folder
from safetensors.torch import load_file, save_file
from torch import Tensor

from strop.artifact import Artifact, Manifest, hash_file, list_files, write_manifest
from strop.conformance import check_checkpoint
from strop.errors import UserError
from strop.methods import rotate
from strop.methods.rotate import Rotate, Rotation, hadamard_order, paley, rotation, turn
from strop.methods.rtn import Rtn
from strop.model import load_decoder, read_spec, save_checkpoint
from strop.spec import Quantization
from strop.stage import Context

KEY = "0" * 64
IDS = torch.randint(2, VOCAB_SIZE, (3, 20), generator=torch.Generator().manual_seed(0))
WHOLE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3")
"""Families whose residual stream can be rotated."""
HEADS_ONLY = ("gemma2", "gemma3_text", "gpt2")
ODD = {"hidden_size": 50, "num_attention_heads": 5, "num_key_value_heads": 1}
"""A width that no Hadamard matrix has."""


def dense(q: Rotation) -> Tensor:
    """Q as one matrix."""
    return torch.diag(q.signs) @ functools.reduce(torch.kron, q.factors)


# Matrices.


@pytest.mark.parametrize("order", [1, 4, 8, 12, 20, 28, 36, 44, 52 * 2, 60, 76])
def test_hadamard_matrices_are_signs_in_orthogonal_rows(order: int) -> None:
    matrix = paley(order)
    assert bool((matrix.abs() == 1).all())
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize(
    ("size", "order"),
    [
        (1, 1), (2, 1), (64, 1), (48, 12), (96, 12), (576, 36), (896, 28), (960, 60), (1536, 12), (2304, 36),
        (3584, 28), (5120, 20), (4096, 1), (56, 28), (80, 20), (368, 368), (3, None), (50, None), (92, None),
        (13696, None),
    ],
)  # fmt: skip
def test_the_smallest_hadamard_matrix_that_divides_a_size_is_found(size: int, order: int | None) -> None:
    assert hadamard_order(size) == order


@pytest.mark.parametrize("size", [1, 2, 16, 12, 48, 56, 80, 256, 576, 768, 7, 50, 100])
def test_rotations_are_orthogonal_and_applied_as_their_matrix(size: int) -> None:
    q = rotation(size, seed=3)
    matrix = dense(q)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-12, rtol=0)
    x = torch.randn(2, 3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(q.apply(x), x @ matrix, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("size", [16, 48, 56, 256, 576, 768])
def test_a_hadamard_rotation_spreads_one_value_evenly(size: int) -> None:
    values = rotation(size, seed=0).apply(torch.eye(size, dtype=torch.float64)[5])
    torch.testing.assert_close(values.abs(), torch.full_like(values, size**-0.5), atol=1e-12, rtol=0)


def test_the_seed_decides_signs_and_random_cores() -> None:
    for size in (48, 50):
        assert torch.equal(dense(rotation(size, 1)), dense(rotation(size, 1)))
        assert not torch.allclose(dense(rotation(size, 1)), dense(rotation(size, 2)))


@pytest.mark.parametrize("first", [0, 6])
def test_a_matrix_is_turned_piece_by_piece_as_by_dense_matrices(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotate, "NUMBERS_AT_ONCE", 100)  # pieces of one head
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(first + 5 * 4, 12, generator=generator)
    gain = torch.rand(12, generator=generator, dtype=torch.float64)
    q, r = rotation(12, 0), rotation(4, 0)
    across = torch.block_diag(torch.eye(first, dtype=torch.float64), *[dense(r)] * 5)
    expected = across.T @ matrix.double() @ torch.diag(gain) @ dense(q)
    found = turn(matrix, gain=gain, residual=q, head=r, first=first)
    torch.testing.assert_close(found, expected.float())


# The stage.


def run(stage: Rotate, source: Artifact, out: Path, seed: int = 0) -> dict[str, Any]:
    out.mkdir()
    return stage.run(source, out, Context(scratch=out.parent, threads=1, seed=seed))


def make(folder: Path, family: str = "llama", **changes: Any) -> Artifact:
    return Artifact(tiny_folder(folder, family, **changes), "checkpoint", KEY)


def logits(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        found: Tensor = AutoModelForCausalLM.from_pretrained(folder)(IDS).logits
    return found


def own_logits(folder: Path) -> Tensor:
    """By our own decoder."""
    decoder = load_decoder(folder)
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    with torch.no_grad():
        x = decoder.embed(IDS, torch.arange(IDS.shape[1])[None])
        for index in range(len(decoder.layers)):
            x = decoder.block(index, x, kept=kept)
        return decoder.logits(x)


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Within 1e-4 of each other, relative to the root mean square."""
    assert float((found - expected).abs().max() / expected.square().mean().sqrt()) < 1e-4


def check(source: Artifact, out: Path, stage: Rotate) -> None:
    """Run a stage: what it planned is there, and the model computes what it did."""
    plan = stage.plan(read_spec(source.path), 0)
    result = run(stage, source, out)
    assert result["spec"] == plan.spec == read_spec(out)
    write_manifest(out, Manifest("checkpoint", KEY, result["spec"].to_json(), report=result["report"]))
    check_checkpoint(Artifact(out, "checkpoint", KEY), source)
    stored = sum(x.nbytes for path in out.glob("*.safetensors") for x in load_file(path).values())
    assert stored == plan.size_bytes
    assert_same(logits(out), logits(source.path))


@pytest.mark.parametrize("family", WHOLE)
def test_the_rotated_model_computes_the_same(family: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", family)
    check(source, tmp_path / "out", Rotate())
    before, after = (load_all(x) for x in (source.path, tmp_path / "out"))
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert all("norm" in name or name.endswith(("q_proj.bias", "k_proj.bias")) for name in unchanged), unchanged
    for name in after:
        if name.endswith(("layernorm.weight", "model.norm.weight")):
            assert bool((after[name] == 1).all())


@pytest.mark.parametrize("family", [*WHOLE, *HEADS_ONLY])
def test_heads_alone_can_be_rotated_in_every_family(family: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", family)
    check(source, tmp_path / "out", Rotate(parts=["heads"]))
    before, after = (load_all(x) for x in (source.path, tmp_path / "out"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    parts = {".".join(name.split(".")[-2:]) for name in changed}
    expected = {
        "phi3": {"qkv_proj.weight", "o_proj.weight"},
        "gpt2": {"c_attn.weight", "c_attn.bias", "c_proj.weight"},
        "qwen2": {"v_proj.weight", "v_proj.bias", "o_proj.weight"},
    }
    assert parts == expected.get(family, {"v_proj.weight", "o_proj.weight"})


def test_the_residual_stream_alone_can_be_rotated(tmp_path: Path) -> None:
    check(make(tmp_path / "source", "llama"), tmp_path / "out", Rotate(parts=["residual"]))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 56, "num_attention_heads": 4, "head_dim": 12},  # Hadamard matrices of order 28 x 2 and 12
        {**ODD, "head_dim": 10},  # no Hadamard matrix
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4},
        {"attention_bias": True, "mlp_bias": True},
    ],
)
def test_any_width_and_biases_compute_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    check(make(tmp_path / "source", "llama", **changes), tmp_path / "out", Rotate())


def test_layers_that_share_keys_and_values_compute_the_same(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model")
    spec = read_spec(model)
    last = spec.layers[2]
    own = {role: x for role, x in last.linears.items() if role not in "kv"}
    spec = dataclasses.replace(spec, layers=(*spec.layers[:2], dataclasses.replace(last, kv_from_layer=0, linears=own)))
    source = tmp_path / "source"
    source.mkdir()
    save_checkpoint(source, spec, model, [])
    write_manifest(source, Manifest("checkpoint", KEY, spec.to_json()))
    result = run(Rotate(), Artifact(source, "checkpoint", KEY), tmp_path / "out")
    write_manifest(tmp_path / "out", Manifest("checkpoint", KEY, result["spec"].to_json()))
    assert_same(own_logits(tmp_path / "out"), own_logits(source))


def test_a_tied_head_is_untied_and_the_plan_says_what_it_costs(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "llama")
    spec = read_spec(source.path)
    plan = Rotate().plan(spec, 0)
    assert plan.size_bytes - spec.size_bytes() == VOCAB_SIZE * 48 * 4
    assert any("no longer tied" in x and "0.1 MB" in x for x in plan.notes)
    run(Rotate(), source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert not read_spec(tmp_path / "out").is_tied
    assert Rotate(parts=["heads"]).plan(spec, 0).spec.is_tied


def test_a_width_without_a_hadamard_matrix_is_noted_and_reported(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "llama", **ODD)
    words = "random orthogonal matrix of order 25 times Hadamard matrix of order 2"
    assert any(words in x for x in Rotate().plan(read_spec(source.path), 0).notes)
    result = run(Rotate(), source, tmp_path / "out")
    assert result["report"] == {
        "num_linears": 22,
        "residual": words,
        "heads": {"16": "Hadamard matrix of order 1 times 16"},
    }


def test_sharded_bfloat16_checkpoints_stay_close(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "qwen2", dtype="bfloat16", shard="20KB")
    plan = Rotate().plan(read_spec(source.path), 0)
    assert any("rounded to bfloat16 once more" in x for x in plan.notes)
    run(Rotate(), source, tmp_path / "out")
    assert {x.dtype for x in load_all(tmp_path / "out").values()} == {torch.bfloat16}
    found, expected = logits(tmp_path / "out").float(), logits(source.path).float()
    assert float((found - expected).square().mean() / expected.square().mean()) < 1e-3


def test_the_seed_decides_the_bytes(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(Rotate(), source, tmp_path / name, seed)
    first, again, other = ({x.name: hash_file(x) for x in list_files(tmp_path / name)} for name in ("a", "b", "c"))
    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]
    assert_same(logits(tmp_path / "c"), logits(source.path))


def test_rounding_loses_less_after_a_rotation_where_inputs_have_outliers(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    spread(source.path, {5: 30.0, 23: 60.0})
    run(Rotate(), source, tmp_path / "rotated")
    rounding = Rtn(bits=4, group_size=16)
    parent = logits(source.path).log_softmax(-1)
    lost = []
    for folder in (tmp_path / "rotated", source.path):
        out = tmp_path / f"{folder.name}-rounded"
        out.mkdir()
        rounding.run(Artifact(folder, "checkpoint", KEY), out, Context(scratch=tmp_path, threads=1))
        lost.append(float((parent.exp() * (parent - logits(out).log_softmax(-1))).sum(-1).mean()))
    assert lost[0] < 0.5 * lost[1]


def spread(folder: Path, factors: dict[int, float]) -> None:
    """Make columns of what reads the residual stream so many times larger and the norms' gains smaller."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        for column, factor in factors.items():
            if name.endswith("layernorm.weight"):
                tensor[column] /= factor
            elif name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
                tensor[:, column] *= factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_all(folder: Path) -> dict[str, Tensor]:
    return {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}


# What is refused.


@pytest.mark.parametrize("fields", [{"parts": []}, {"parts": ["queries"]}, {"parts": "heads"}, {"seed": 1}])
def test_unknown_values_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Rotate.model_validate(fields)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gemma2", r"post_attention_layernorm scales single values.*allowed for gemma2: parts: \[heads\]"),
        ("gemma3_text", r"post_attention_layernorm.*allowed for gemma3_text: parts: \[heads\]"),
        ("gpt2", r"h\.0\.ln_1 subtracts a mean.*allowed for gpt2: parts: \[heads\]"),
    ],
)
def test_norms_that_a_rotation_cannot_pass_are_refused_by_the_plan(family: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        Rotate().plan(read_spec(tiny_folder(tmp_path, family)), 0)


def test_rotating_after_quantizing_is_refused(tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path))
    down = "model.layers.1.mlp.down_proj"
    quantized = spec.quantize({down: Quantization(4, 16, True)})
    with pytest.raises(UserError, match=rf"{down}: already quantized to 4 bits.*rotate comes before"):
        Rotate().plan(quantized, 0)
    Rotate(parts=["heads"]).plan(quantized, 0)
    with pytest.raises(UserError, match="lm_head: already quantized to 8 bits"):
        Rotate().plan(spec.quantize({"lm_head": Quantization(8, 16, True)}), 0)


def test_a_family_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="granite is not a known family"):
        Rotate().plan(read_spec(tiny_folder(tmp_path, "granite")), 0)
