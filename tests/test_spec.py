"""The table survives JSON, counts bytes as files do, and refuses what cannot be quantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from references import decoder_of, random_decoder, tiny_folder, tiny_model
from safetensors import safe_open

from strop.errors import UserError
from strop.families import FAMILIES
from strop.spec import ModelSpec, Quantization

SCHEMES = [
    Quantization(bits, group, symmetric) for bits in (2, 3, 4, 8) for group in (16, None) for symmetric in (True, False)
]
W8A8 = [Quantization(8, None, True, "dynamic"), Quantization(8, None, True, "static")]


def spec_of(family: str, **changes: Any) -> ModelSpec:
    spec: ModelSpec = decoder_of(tiny_model(family, **changes)).spec
    return spec


@pytest.mark.parametrize("family", FAMILIES)
def test_json_reads_back_to_an_equal_table(family: str) -> None:
    spec = spec_of(family)
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    quantized = spec.quantize({x.name: Quantization(4, 16, False) for x in spec.linears()})
    assert ModelSpec.from_json(json.loads(json.dumps(quantized.to_json()))) == quantized
    stored = ModelSpec.from_json(json.loads(json.dumps(spec.to_json(), sort_keys=True)))  # as strop.json holds it
    assert list(stored.linears()) == list(spec.linears()), "in the order of computation"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_the_file(tmp_path: Path, family: str, dtype: str) -> None:
    tiny_folder(tmp_path, family, dtype=dtype)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 (not a mapping)
    assert decoder_of(tiny_model(family).to(getattr(torch, dtype))).spec.size_bytes() == stored


@pytest.mark.parametrize("scheme", [*SCHEMES, *W8A8], ids=str)
@pytest.mark.parametrize("is_tied", [True, False])
def test_bytes_of_quantized_linears_are_those_of_their_tensors(scheme: Quantization, is_tied: bool) -> None:
    plain = spec_of("llama", tie_word_embeddings=is_tied, attention_bias=True)
    spec = plain.quantize({x.name: scheme for x in plain.linears()})
    tensors = random_decoder(spec).tensors()
    # weight_shape of each packed one, two int64, which the decoder has no use for
    shapes = 16 * len(list(spec.linears())) * (scheme.activations is None)
    embedding = 4 * spec.vocab_size * spec.hidden_size if is_tied else 0  # stays in the file beside its tied codes
    assert spec.size_bytes() == sum(x.nbytes for x in tensors.values()) + shapes + embedding


def test_cache_bytes_count_layers_with_keys_of_their_own() -> None:
    assert spec_of("llama").kv_bytes_per_token() == 3 * 2 * 2 * 16 * 4
    assert spec_of("llama").kv_bytes_per_token(2) == 3 * 2 * 2 * 16 * 2


def test_patterns_match_full_names() -> None:
    spec = spec_of("llama")
    assert [x.name for x in spec.match(["*.1.mlp.down_proj", "lm_head"])] == ["model.layers.1.mlp.down_proj", "lm_head"]
    assert len(spec.match(None)) == 3 * 7
    with pytest.raises(UserError, match=r"'\*\.down' matches no linear; .*down_proj"):
        spec.match(["*.mlp.*", "*.down"])


def test_quantizing_twice_or_by_a_group_that_does_not_divide_is_refused() -> None:
    spec = spec_of("llama")
    name = "model.layers.0.mlp.down_proj"
    once = spec.quantize({name: Quantization(4, 16, True)})
    with pytest.raises(UserError, match="already quantized to 4 bits"):
        once.quantize({name: Quantization(8, 16, True)})
    with pytest.raises(UserError, match=r"32 does not divide the 80 inputs of model.layers.0.mlp.down_proj.*\[8, 16\]"):
        spec.quantize({name: Quantization(4, 32, True)})


@pytest.mark.parametrize("form", [(4, None, True), (8, 16, True), (8, None, False)], ids=str)
def test_inputs_are_rounded_only_for_weights_that_int8_engines_multiply(form: tuple[int, int | None, bool]) -> None:
    spec = spec_of("llama")
    name = "model.layers.0.mlp.down_proj"
    with pytest.raises(UserError, match=r"activations dynamic of model\.layers\.0\.mlp\.down_proj: .* group_size null"):
        spec.quantize({name: Quantization(*form, "dynamic")})
    once = spec.quantize({name: W8A8[1]})
    assert ModelSpec.from_json(json.loads(json.dumps(once.to_json()))) == once


@pytest.mark.parametrize("family", FAMILIES)
def test_linears_of_a_group_read_the_same_input(family: str) -> None:
    decoder = decoder_of(tiny_model(family))
    read: dict[str, torch.Tensor] = {}
    for linear in decoder.spec.linears():
        decoder.linear(linear.name).register_forward_pre_hook(
            lambda _, inputs, name=linear.name: read.__setitem__(name, inputs[0])
        )
    ids = torch.arange(2, 9)[None]
    with torch.no_grad():
        for index, layer in enumerate(decoder.spec.layers):
            decoder.block(index, decoder.embed(ids, torch.arange(7)[None]))
            groups = layer.groups()
            assert [x for group in groups for x in group] == list(layer.linears.values())
            assert len(groups) == (4 if layer.moe is None else 2 + 2 * len(layer.moe.experts()))
            for group in groups:
                assert len({x.name in read for x in group}) == 1, "all are reached, or none"
                assert all(torch.equal(read[x.name], read[group[0].name]) for x in group if x.name in read)
