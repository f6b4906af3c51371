"""The walk over a model's blocks, against a full forward pass with hooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from references import VOCAB_SIZE, decoder_of, random_decoder, tiny_folder, tiny_model
from safetensors.torch import save_file
from torch import Tensor

from strop.calibration import capture
from strop.calibration.capture import Group, drift, hessian, walk
from strop.errors import UserError
from strop.model import read_spec

IDS = torch.randint(0, VOCAB_SIZE, (5, 11), generator=torch.Generator().manual_seed(0))


def spoil(weight: Tensor) -> Tensor:
    """What the tests' visitors do to a weight."""
    return (weight * 4).round() / 4


def slow_inputs(decoder: Any, name: str) -> Tensor:
    """What the linear `name` reads in one forward pass over all of `IDS`: (tokens that reach it, in)."""
    seen: list[Tensor] = []
    handle = decoder.linear(name).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        x = decoder.embed(IDS, torch.arange(IDS.shape[1]).expand(IDS.shape))
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        for index in range(len(decoder.layers)):
            x = decoder.block(index, x, kept=kept)
        decoder.logits(x)
    handle.remove()
    return seen[0].flatten(0, -2)


def check_walk(folder: Path, spec: Any, decoder: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Walk, spoiling every weight, and compare the inputs with those of `decoder`, spoiled alike."""
    monkeypatch.setattr(capture, "CHUNK_TOKENS", 2 * IDS.shape[1])  # three chunks, the last one smaller
    visited: list[str] = []

    def visit(group: Group) -> bool:
        expected = slow_inputs(decoder, group.linears[0].name)
        torch.testing.assert_close(torch.cat(list(group.inputs())), expected, atol=2e-5, rtol=1e-5)
        for linear in group.linears:
            torch.testing.assert_close(group.weights[linear.name], decoder.linear(linear.name).weight.data)
            group.weights[linear.name].copy_(spoil(group.weights[linear.name]))
            decoder.linear(linear.name).weight.data.copy_(group.weights[linear.name])
            visited.append(linear.name)
        return True

    walk(folder, spec, IDS, visit)
    return visited


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "gpt2", "mixtral", "qwen2_moe", "qwen3_moe"]
)
def test_inputs_follow_from_the_blocks_that_were_changed(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_spec(tiny_folder(tmp_path, family))
    visited = check_walk(tmp_path, spec, decoder_of(tiny_model(family)), monkeypatch)
    assert visited == [x.name for x in spec.linears()]


def test_layers_that_share_keys_and_values_are_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = dataclasses.replace(read_spec(tiny_folder(tmp_path / "model", "qwen3")), is_tied=False)
    last = spec.layers[2]
    own = {role: x for role, x in last.linears.items() if role not in "kv"}
    shared = dataclasses.replace(last, kv_from_layer=0, linears=own, k_norm=None)
    spec = dataclasses.replace(spec, layers=(*spec.layers[:2], shared))
    decoder = random_decoder(spec)
    folder = tmp_path / "shared"
    folder.mkdir()
    save_file({name: x.contiguous() for name, x in decoder.tensors().items()}, folder / "model.safetensors")
    visited = check_walk(folder, spec, decoder, monkeypatch)
    assert visited == [x.name for x in spec.linears()]


def test_linears_that_read_the_same_input_come_together(tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path))
    groups: list[list[str]] = []

    def visit(group: Group) -> bool:
        groups.append([x.name.rsplit(".", 1)[1] for x in group.linears])
        return group.layer < 1

    walk(tmp_path, spec, IDS, visit)
    block = [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    assert groups == [*block, block[0]]


def test_one_block_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoders: list[Any] = []
    build = capture.Decoder

    def remember(spec: Any) -> Any:
        decoders.append(build(spec))
        return decoders[-1]

    monkeypatch.setattr(capture, "Decoder", remember)
    spec = read_spec(tiny_folder(tmp_path, tie_word_embeddings=False))

    def visit(group: Group) -> bool:
        real = {name.split(".")[1] for name, x in decoders[0].layers.named_parameters(prefix="layers") if not x.is_meta}
        outside = [
            name for name, x in decoders[0].named_parameters() if not name.startswith("layers") and not x.is_meta
        ]
        assert real == ({str(group.layer)} if group.layer < 3 else set())
        assert bool(outside) == (group.layer == 3)
        return True

    walk(tmp_path, spec, IDS, visit)


@pytest.mark.parametrize("width", [5, 192, 250])
def test_hessian_is_the_mean_of_2_x_xt(width: int) -> None:
    x = torch.randn(70, width, generator=torch.Generator().manual_seed(width))
    found = hessian(iter([x[:13], x[13:14], x[14:]]))
    slow = sum(2 * torch.outer(row, row).double() for row in x) / len(x)
    assert isinstance(slow, Tensor)
    torch.testing.assert_close(found, slow.float(), atol=1e-5, rtol=1e-5)
    assert torch.equal(found, found.T)


def test_hessian_of_no_tokens_is_refused() -> None:
    def nothing() -> Iterator[Tensor]:
        yield torch.zeros(0, 4)

    with pytest.raises(ValueError, match="no tokens"):
        hessian(nothing())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(1, 200, dtype=torch.int64), "calibration.length: 200 is more than the model's context of 128"),
        (torch.full((1, 4), VOCAB_SIZE), f"token id {VOCAB_SIZE} is outside the model's vocabulary of {VOCAB_SIZE}"),
    ],
)
def test_tokens_that_the_model_cannot_take_are_refused(tmp_path: Path, ids: Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message):
        walk(tmp_path, read_spec(tiny_folder(tmp_path)), ids, lambda _: True)


def test_some_samples_are_followed_in_the_unchanged_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "CHUNK_TOKENS", 2 * IDS.shape[1])
    num_followed = 3  # ends inside the second chunk
    spec = read_spec(tiny_folder(tmp_path))
    original = decoder_of(tiny_model("llama"))
    num_tokens = num_followed * IDS.shape[1]

    def visit(group: Group) -> bool:
        before, now = (torch.cat(x) for x in zip(*group.pairs(), strict=True))
        expected = slow_inputs(original, group.linears[0].name)[:num_tokens]
        torch.testing.assert_close(before, expected, atol=2e-5, rtol=1e-5)
        assert torch.equal(now, torch.cat(list(group.inputs()))[:num_tokens])
        for linear in group.linears:
            group.weights[linear.name].copy_(spoil(group.weights[linear.name]))
        return True

    walk(tmp_path, spec, IDS, visit, num_followed=num_followed)


def test_drift_is_the_mean_of_2_differences_times_xt() -> None:
    generator = torch.Generator().manual_seed(0)
    before, x = (torch.randn(40, 7, generator=generator) for _ in range(2))
    found = drift(zip(before.split(13), x.split(13), strict=True))
    slow = sum(2 * torch.outer(b - a, a).double() for b, a in zip(before, x, strict=True)) / 40
    assert isinstance(slow, Tensor)
    torch.testing.assert_close(found, slow.float(), atol=1e-5, rtol=1e-5)


def test_drift_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        drift(iter([]))
