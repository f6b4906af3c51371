"""KL after a change of a few linears, against full forward passes of whole models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from references import VOCAB_SIZE, decoder_of, random_decoder, slow_kl, tiny_folder, tiny_model
from safetensors.torch import save_file
from torch import Tensor

from strop.calibration import sensitivity
from strop.calibration.sensitivity import Site, divergence, divergences
from strop.errors import UserError
from strop.model import read_spec

IDS = torch.randint(0, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(0))


def slow_logits(decoder: Any) -> Tensor:
    """(tokens, V)."""
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    with torch.no_grad():
        x = decoder.embed(IDS, torch.arange(IDS.shape[1]).expand(IDS.shape))
        for index in range(len(decoder.layers)):
            x = decoder.block(index, x, kept=kept)
        found: Tensor = decoder.logits(x).flatten(0, 1)
    return found


def mean_kl(before: Tensor, after: Tensor) -> float:
    return math.fsum(slow_kl(p, q) for p, q in zip(before.tolist(), after.tolist(), strict=True)) / len(before)


def spoil(weight: Tensor, steps: int) -> Tensor:
    return (weight * steps).round() / steps


def vary(site: Site) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Every linear of a site alone, then all of them more coarsely."""
    for linear in site.linears:
        yield linear.name, {linear.name: spoil(site.weights[linear.name], 8)}
    yield f"all with {site.linears[0].name}", {x.name: spoil(site.weights[x.name], 4) for x in site.linears}


def check(folder: Path, spec: Any, decoder: Any) -> None:
    """Compare every change that `vary` makes with a whole model changed alike."""
    before = slow_logits(decoder)
    found = dict(divergences(folder, spec, IDS, vary, layers=range(len(spec.layers))))
    assert list(found) == list(range(len(spec.layers)))
    for index, layer in enumerate(spec.layers):
        expected = {}
        for group in layer.groups():
            changes = {x.name: {x.name: 8} for x in group} | {f"all with {group[0].name}": {x.name: 4 for x in group}}
            for label, steps in changes.items():
                weights = {name: decoder.linear(name).weight.data.clone() for name in steps}
                for name, number in steps.items():
                    decoder.linear(name).weight.data.copy_(spoil(weights[name], number))
                expected[label] = mean_kl(before, slow_logits(decoder))
                for name, weight in weights.items():
                    decoder.linear(name).weight.data.copy_(weight)
        assert list(found[index]) == list(expected)
        for label, kl in expected.items():
            assert found[index][label] == pytest.approx(kl, rel=2e-3, abs=1e-7), label


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "gpt2"])
def test_every_change_is_measured_as_by_whole_models(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitivity, "HEAD_TOKENS", 7)  # three pieces, the last one smaller
    check(tmp_path, read_spec(tiny_folder(tmp_path, family)), decoder_of(tiny_model(family)))


def test_layers_that_share_keys_and_values_are_followed(tmp_path: Path) -> None:
    spec = dataclasses.replace(read_spec(tiny_folder(tmp_path / "model")), is_tied=False)
    last = spec.layers[2]
    own = {role: x for role, x in last.linears.items() if role not in "kv"}
    shared = dataclasses.replace(last, kv_from_layer=0, linears=own)
    spec = dataclasses.replace(spec, layers=(*spec.layers[:2], shared))
    decoder = random_decoder(spec)
    folder = tmp_path / "shared"
    folder.mkdir()
    save_file({name: x.contiguous() for name, x in decoder.tensors().items()}, folder / "model.safetensors")
    check(folder, spec, decoder)


def test_only_the_layers_asked_for_are_varied(tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path))
    every = dict(divergences(tmp_path, spec, IDS, vary, layers=range(3)))
    assert dict(divergences(tmp_path, spec, IDS, vary, layers=[1])) == {1: every[1]}
    assert dict(divergences(tmp_path, spec, IDS, vary, layers=[])) == {}


def test_no_change_diverges_by_nothing(tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path))

    def same(site: Site) -> Iterator[tuple[int, dict[str, Tensor]]]:
        yield 0, {x.name: site.weights[x.name].clone() for x in site.linears}

    for _, found in divergences(tmp_path, spec, IDS, same, layers=[0, 2]):
        assert found[0] == pytest.approx(0, abs=1e-6)


def test_tiny_divergences_are_not_lost_in_rounding() -> None:
    decoder = decoder_of(tiny_model("llama"))
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(2, 9, 48, generator=generator) for _ in range(2))
    after = {step: x + step * noise for step in (1e-1, 1e-2, 1e-3)}
    with torch.no_grad():
        found = divergence(decoder, x, after)
        exact = decoder.double()
        for step, y in after.items():
            p, q = exact.logits(x.double()).double().log_softmax(-1), exact.logits(y.double()).double().log_softmax(-1)
            assert found[step] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=0.02, abs=3e-8)


def test_ids_that_the_model_cannot_take_are_refused(tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path))
    with pytest.raises(UserError, match="outside the model's vocabulary"):
        list(divergences(tmp_path, spec, IDS + VOCAB_SIZE, vary, layers=[0]))
