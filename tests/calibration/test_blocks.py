"""The walk over whole blocks against a full forward pass in float32, and sensitivities against the whole Jacobian."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from references import VOCAB_SIZE, decoder_of, random_decoder, slow_fisher, tiny_folder, tiny_model
from safetensors.torch import save_file
from torch import Tensor, nn

from strop.calibration import blocks, capture
from strop.calibration.blocks import Block, hidden_states, mean_square, sensitivities, walk_blocks
from strop.calibration.capture import Group
from strop.errors import UserError
from strop.model import read_spec

IDS = torch.randint(0, VOCAB_SIZE, (5, 11), generator=torch.Generator().manual_seed(0))
FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "smollm3", "gpt2"]


@pytest.fixture(autouse=True, params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Of products: every test holds for both."""
    monkeypatch.setattr(blocks, "product_dtype", lambda _: request.param)
    found: torch.dtype = request.param
    return found


def outputs(decoder: Any, ids: Tensor) -> list[Tensor]:
    """Hidden states after each block, (samples, tokens, hidden)."""
    found, kept = [], dict[int, tuple[Tensor, Tensor]]()
    with torch.no_grad():
        x = decoder.embed(ids, torch.arange(ids.shape[1]).expand(ids.shape))
        for index in range(len(decoder.layers)):
            x = decoder.block(index, x, kept=kept)
            found.append(x)
    return found


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def spoil(module: nn.Linear) -> None:
    module.weight = nn.Parameter((module.weight.detach() * 4).round() / 4, requires_grad=False)


def check_walk(folder: Path, spec: Any, decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Walk, spoiling every weight, and compare with `decoder`, before and after it is spoiled alike."""
    monkeypatch.setattr(blocks, "CHUNK_TOKENS", 2 * IDS.shape[1])  # three chunks, the last one smaller
    before = outputs(decoder, IDS)
    for linear in list(spec.linears())[:-1]:
        spoil(decoder.linear(linear.name))
    after = outputs(decoder, IDS)
    rows = torch.tensor([4, 1, 1])
    visited = []

    def visit(block: Block) -> bool:
        assert distance(block.targets, before[block.index]) < 0.02
        for linear in block.linears:
            spoil(block.module(linear.name))
        assert distance(block.compute(rows), after[block.index][rows]) < 0.02
        visited.append(block.index)
        return True

    walk_blocks(folder, spec, IDS, visit)
    assert visited == [0, 1, 2]


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_read_what_the_changed_blocks_give_and_aim_at_the_unchanged_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_spec(tiny_folder(tmp_path, family))
    check_walk(tmp_path, spec, decoder_of(tiny_model(family)), monkeypatch)


def shared_folder(tmp_path: Path) -> tuple[Path, Any, Any]:
    """A checkpoint whose last layer uses the first one's keys and values: folder, table, decoder."""
    spec = dataclasses.replace(read_spec(tiny_folder(tmp_path / "model", "qwen3")), is_tied=False)
    last = spec.layers[2]
    own = {role: x for role, x in last.linears.items() if role not in "kv"}
    shared = dataclasses.replace(last, kv_from_layer=0, linears=own, k_norm=None)
    spec = dataclasses.replace(spec, layers=(*spec.layers[:2], shared))
    decoder = random_decoder(spec)
    folder = tmp_path / "shared"
    folder.mkdir()
    save_file({name: x.contiguous() for name, x in decoder.tensors().items()}, folder / "model.safetensors")
    return folder, spec, decoder


def test_layers_that_share_keys_and_values_are_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_walk(*shared_folder(tmp_path), monkeypatch)


def test_gradients_reach_the_weights_that_want_some(tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path))
    decoder = decoder_of(tiny_model("llama"))

    def visit(block: Block) -> bool:
        name = block.linears[3].name
        weight = block.module(name).weight.requires_grad_()
        with torch.enable_grad():
            (found,) = torch.autograd.grad(block.compute(torch.arange(5)).sum(), weight)
            expected = decoder.linear(name).weight
            decoder.block(0, decoder.embed(IDS, torch.arange(IDS.shape[1])[None])).sum().backward()
        assert distance(found, expected.grad) < 0.02
        assert [x for x in block.linears if block.module(x.name).weight.requires_grad] == [block.linears[3]]
        return False

    walk_blocks(tmp_path, spec, IDS, visit)


def test_the_walk_ends_where_the_visitor_says(tmp_path: Path) -> None:
    seen: list[int] = []

    def visit(block: Block) -> bool:
        seen.append(block.index)
        return block.index < 1

    walk_blocks(tmp_path, read_spec(tiny_folder(tmp_path)), IDS, visit)
    assert seen == [0, 1]


def test_one_block_is_in_memory_at_a_time(tmp_path: Path) -> None:
    def visit(block: Block) -> bool:
        other = (block.index + 1) % 3
        assert all(not block.module(x.name).weight.is_meta for x in spec.layer_linears(block.index))
        assert all(block.module(x.name).weight.is_meta for x in spec.layer_linears(other))
        return True

    spec = read_spec(tiny_folder(tmp_path))
    walk_blocks(tmp_path, spec, IDS, visit)


def reads(decoder: Any, ids: Tensor) -> dict[str, Tensor]:
    """Linear name -> what it reads, (samples * tokens, in)."""
    found: dict[str, Tensor] = {}
    handles = []
    for linear in decoder.spec.linears():
        see = lambda _, x, name=linear.name: found.update({name: x[0].detach().flatten(0, -2)})  # noqa: E731
        handles.append(decoder.linear(linear.name).register_forward_pre_hook(see))
    outputs(decoder, ids)
    for handle in handles:
        handle.remove()
    return found


def check_prepared(folder: Path, spec: Any, decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spoil every weight, some while their block is prepared and the rest when it is shown."""
    monkeypatch.setattr(capture, "CHUNK_TOKENS", 2 * IDS.shape[1])
    monkeypatch.setattr(blocks, "CHUNK_TOKENS", 2 * IDS.shape[1])
    before, after = reads(decoder, IDS[:3]), {}
    seen: list[str] = []

    def prepare(group: Group) -> None:
        after.update(reads(decoder, IDS[:3]))
        for linear in group.linears:
            one, two = (torch.cat(x) for x in zip(*group.pairs(), strict=True))
            assert distance(one, before[linear.name]) < 0.02
            assert distance(two, after[linear.name]) < 0.02
            assert torch.equal(two, torch.cat(list(group.inputs())))
            for weight in (group.weights[linear.name], decoder.linear(linear.name).weight.detach()):
                weight.copy_((weight * 8).round() / 8)
            seen.append(linear.name)

    def visit(block: Block) -> bool:
        assert seen[-len(block.linears) :] == [x.name for x in block.linears]
        for linear in block.linears:
            assert torch.equal(block.module(linear.name).weight, decoder.linear(linear.name).weight)
            spoil(block.module(linear.name))
            spoil(decoder.linear(linear.name))
        return True

    walk_blocks(folder, spec, IDS, visit, prepare=prepare, num_prepared=3)
    assert len(seen) == len(list(spec.linears())) - 1


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_linears_are_prepared_on_what_they_read_in_the_changed_and_the_unchanged_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_spec(tiny_folder(tmp_path, family))
    check_prepared(tmp_path, spec, decoder_of(tiny_model(family)), monkeypatch)


def test_layers_that_share_keys_and_values_are_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_prepared(*shared_folder(tmp_path), monkeypatch)


def test_products_are_in_bfloat16_only_where_the_processor_has_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real one
    for flags, expected in ((["avx512_bf16", "amx_bf16"], torch.bfloat16), (["avx512_bf16"], torch.float32)):
        monkeypatch.setattr(blocks, "instruction_sets", lambda flags=flags: flags)
        assert blocks.product_dtype(torch.device("cpu")) == expected


def test_hidden_states_are_those_behind_the_last_block(tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path))
    done: list[int] = []
    found = hidden_states(tmp_path, spec, IDS, done.append)
    assert distance(found, outputs(decoder_of(tiny_model("llama")), IDS)[-1]) < 0.02
    assert done == [1, 2, 3]


def test_mean_square_of_nothing_is_not_zero() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    torch.testing.assert_close(mean_square(x), torch.tensor([[12.5], [1e-12]]))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_sensitivities_are_the_second_derivative_of_kl(family: str, tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path, family))
    decoder = decoder_of(tiny_model(family))
    ids = IDS[:1, :4]
    expected = [slow_fisher(decoder, index, x) for index, x in enumerate(outputs(decoder, ids))]
    order = []
    for index, found in sensitivities(tmp_path, spec, ids.repeat(1500, 1), seed=0):
        assert torch.equal(found, found.T)
        assert float(found.trace() / expected[index].trace()) == pytest.approx(1, abs=0.08)
        assert distance(found, expected[index]) < 0.15
        order.append(index)
    assert order == [2, 1, 0]


def test_sensitivities_with_shared_keys_and_values_are_finite(tmp_path: Path) -> None:
    folder, spec, _ = shared_folder(tmp_path)
    found = dict(sensitivities(folder, spec, IDS, seed=0))
    assert all(bool(x.isfinite().all()) and bool(x.any()) for x in found.values())


def test_the_seed_decides_the_sensitivities(tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path))
    first, again, other = (dict(sensitivities(tmp_path, spec, IDS, seed=x)) for x in (0, 0, 1))
    assert all(torch.equal(first[i], again[i]) and not torch.equal(first[i], other[i]) for i in range(3))


@pytest.mark.parametrize("walk", [lambda *x: walk_blocks(*x, lambda _: True), lambda *x: list(sensitivities(*x, 0))])
def test_tokens_that_the_model_cannot_take_are_refused(walk: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is more than the model's context of 128"):
        walk(tmp_path, read_spec(tiny_folder(tmp_path)), torch.zeros(1, 200, dtype=torch.int64))
