"""Checkpoints: strop, transformers and their own bytes agree on what was written."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from references import INPUT_SCALE, VOCAB_SIZE, tiny_folder
from torch import Tensor
from transformers import AutoModelForCausalLM

from strop.artifact import Manifest, write_manifest
from strop.errors import UserError
from strop.model import (
    Weights,
    load_decoder,
    load_linear,
    load_packed,
    load_tokenizer,
    packed_tensors,
    read_headers,
    read_spec,
    save_checkpoint,
    stored_tensors,
)
from strop.numerics import dequantize, find_scales, quantize
from strop.safetensors_file import WEIGHTS, locate
from strop.spec import Linear, ModelSpec, Quantization

W4 = Quantization(4, 16, symmetric=True)
SYMMETRIC = [W4, Quantization(8, None, True), Quantization(3, 16, True), Quantization(2, 8, True)]
W8A8 = [Quantization(8, None, True, "dynamic"), Quantization(8, None, True, "static")]
ASYMMETRIC = [Quantization(4, 16, False), Quantization(8, None, False), Quantization(3, 16, False)]
IDS = torch.arange(40).reshape(2, 20) * 7


def rounded(weights: Weights, linear: Any, q: Quantization) -> tuple[Tensor, Tensor, Tensor]:
    weight = load_linear(weights, linear)
    scale, zero = find_scales(weight, q)
    return quantize(weight, scale, zero, q.bits), scale, zero


def quantized(source: Path, out: Path, choices: Mapping[str, Quantization] | Quantization) -> ModelSpec:
    """Round linears (all of them, where one format is given) and save."""
    spec = read_spec(source)
    if isinstance(choices, Quantization):
        choices = {x.name: choices for x in spec.linears()}
    result = spec.quantize(choices)
    after = {x.name: x for x in result.linears()}

    def changed(weights: Weights) -> Iterator[tuple[str, Tensor | None]]:
        for linear in spec.linears():
            if linear.name in choices:
                if choices[linear.name].activations is None:
                    yield f"{linear.name}.weight", None
                codes = rounded(weights, linear, choices[linear.name])
                yield from packed_tensors(after[linear.name], *codes, torch.tensor(INPUT_SCALE)).items()

    out.mkdir()
    with Weights(source) as weights:
        save_checkpoint(out, result, source, changed(weights))
    return result


def dense_twin(source: Path, quantized_folder: Path, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Any:
    """The source's model in transformers with our dequantized weights in place, each rounded to `dtype`."""
    model = AutoModelForCausalLM.from_pretrained(source, tie_word_embeddings=False)
    modules = dict(model.named_modules())
    with Weights(quantized_folder) as weights, torch.no_grad():
        for linear in spec.linears():
            modules[linear.name].weight = torch.nn.Parameter(load_linear(weights, linear).to(dtype).float())
        model.get_input_embeddings().weight.copy_(weights.load(f"{spec.embedding}.weight"))
    return model


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
@pytest.mark.parametrize("q", SYMMETRIC, ids=str)
def test_transformers_opens_symmetric_codes_to_the_same_logits(family: str, q: Quantization, tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", family)
    spec = quantized(source, tmp_path / "out", q)
    with Weights(tmp_path / "out") as weights:
        assert any((load_packed(weights, x)[1] < 0).any() for x in spec.linears())
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(opened), logits(dense_twin(source, tmp_path / "out", spec)))


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
@pytest.mark.parametrize("q", ASYMMETRIC, ids=str)
def test_transformers_opens_asymmetric_codes_rounded_to_bfloat16(family: str, q: Quantization, tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", family)
    spec = quantized(source, tmp_path / "out", q)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(opened), logits(dense_twin(source, tmp_path / "out", spec, torch.bfloat16)))


def test_transformers_opens_a_mix_of_formats(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source")
    names = [x.name for x in read_spec(source).linears()]
    choices = {names[0]: W4, names[3]: Quantization(8, None, True), names[5]: W4, names[-1]: Quantization(8, 16, True)}
    spec = quantized(source, tmp_path / "out", choices)
    assert read_spec(tmp_path / "out").layers == spec.layers
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(opened), logits(dense_twin(source, tmp_path / "out", spec)))


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
@pytest.mark.parametrize("q", W8A8, ids=str)
def test_transformers_opens_rounded_inputs_and_rounds_as_we_do(family: str, q: Quantization, tmp_path: Path) -> None:
    spec = quantized(tiny_folder(tmp_path / "source", family), tmp_path / "out", q)
    opened, decoder = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), load_decoder(tmp_path / "out")
    logits(opened)  # unpacks the weights
    modules, generator = dict(opened.named_modules()), torch.Generator().manual_seed(0)
    for linear in spec.linears():
        x = 2 * torch.randn(2, 5, linear.in_features, generator=generator)
        with torch.inference_mode():
            found, ours = modules[linear.name](x), decoder.linear(linear.name)(x)
        torch.testing.assert_close(found, ours, atol=1e-5, rtol=1e-5)
    assert torch.equal(modules[spec.layers[0].linears["o"].name].weight, load(tmp_path / "out", spec))


def load(folder: Path, spec: ModelSpec) -> Tensor:
    """The dense weight of the first o."""
    with Weights(folder) as weights:
        return load_linear(weights, spec.layers[0].linears["o"])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("q", W8A8, ids=str)
def test_our_decoder_opens_rounded_inputs(family: str, q: Quantization, tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", family)
    spec = quantized(source, tmp_path / "out", q)
    assert read_spec(tmp_path / "out").layers == spec.layers
    decoder = load_decoder(tmp_path / "out")
    with Weights(source) as before, Weights(tmp_path / "out") as after:
        for old, new in zip(read_spec(source).linears(), spec.linears(), strict=True):
            codes, scale, zero = rounded(before, old, q)
            assert torch.equal(load_linear(after, new), dequantize(codes, scale, zero))
            module = decoder.linear(new.name)
            assert torch.equal(module.codes, codes)
            assert torch.equal(module.scale.float(), scale)
            expected = INPUT_SCALE if q.activations == "static" else None
            assert (None if module.input_scale is None else float(module.input_scale)) == expected
    if spec.is_tied:
        assert torch.equal(decoder.linear("lm_head").rows(IDS), load_table(tmp_path / "out", spec)[IDS])


def load_table(folder: Path, spec: ModelSpec) -> Tensor:
    """The stored embedding."""
    with Weights(folder) as weights:
        return weights.load(f"{spec.embedding}.weight")


def test_a_static_scale_that_is_missing_is_an_error() -> None:
    linear = Linear("x", 16, 4, quantization=W8A8[1])
    codes, scale, zero = torch.zeros(4, 16, dtype=torch.int8), torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.int8)
    with pytest.raises(ValueError, match="no scale for its inputs"):
        packed_tensors(linear, codes, scale, zero)
    with pytest.raises(ValueError, match="round_scales"):
        packed_tensors(linear, codes, scale, zero, torch.tensor(0.1))


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("q", [*SYMMETRIC, *ASYMMETRIC], ids=str)
def test_our_decoder_opens_every_format(family: str, q: Quantization, tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", family)
    spec = quantized(source, tmp_path / "out", q)
    decoder = load_decoder(tmp_path / "out")
    with Weights(source) as before, Weights(tmp_path / "out") as after:
        for old, new in zip(read_spec(source).linears(), spec.linears(), strict=True):
            expected = dequantize(*rounded(before, old, q))
            assert torch.equal(load_linear(after, new), expected)
            assert torch.equal(decoder.linear(new.name).dense(), expected)


@pytest.mark.parametrize("q", [W4, Quantization(3, 16, False), Quantization(8, None, False), *W8A8], ids=str)
def test_bytes_on_disk_are_those_of_the_table(q: Quantization, tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", "qwen2", dtype="bfloat16")
    spec = quantized(source, tmp_path / "out", q)
    content = (tmp_path / "out" / WEIGHTS).read_bytes()
    assert len(content) - 8 - int.from_bytes(content[:8], "little") == spec.size_bytes()
    assert read_headers(tmp_path / "out") == stored_tensors(spec)


@pytest.mark.parametrize("q", [W4, Quantization(2, 8, False)], ids=str)
def test_saving_what_was_loaded_gives_the_same_bytes(q: Quantization, tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", tie_word_embeddings=False)
    spec = quantized(source, tmp_path / "out", q)
    (tmp_path / "again").mkdir()
    with Weights(tmp_path / "out") as weights:
        tensors = {x.name: packed_tensors(x, *load_packed(weights, x)) for x in spec.linears()}
        save_checkpoint(
            tmp_path / "again", spec, tmp_path / "out", (y for x in reversed(tensors.values()) for y in x.items())
        )
    for path in (tmp_path / "out").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_codes_and_scales_come_back_as_they_were(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", "gpt2")
    q = Quantization(3, 16, symmetric=False)
    spec = quantized(source, tmp_path / "out", q)
    with Weights(source) as before, Weights(tmp_path / "out") as after:
        for old, new in zip(read_spec(source).linears(), spec.linears(), strict=True):
            for found, expected in zip(load_packed(after, new), rounded(before, old, q), strict=True):
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected)


def test_a_quantized_tied_head_is_the_embedding_too(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source")
    spec = quantized(source, tmp_path / "out", {"lm_head": W4})
    assert spec.is_tied
    assert not json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    with Weights(tmp_path / "out") as weights:
        assert torch.equal(weights.load("model.embed_tokens.weight"), load_linear(weights, spec.head))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    untied = load_decoder(tmp_path / "out")
    write_manifest(tmp_path / "out", Manifest("checkpoint", "0" * 64, spec.to_json()))
    tied = load_decoder(tmp_path / "out")
    assert untied.embedding is not None
    assert tied.embedding is None
    positions = torch.arange(IDS.shape[1]).expand_as(IDS)
    for decoder in (untied, tied):
        with torch.inference_mode():
            x = decoder.embed(IDS, positions)
            for index in range(len(spec.layers)):
                x = decoder.block(index, x)
            torch.testing.assert_close(decoder.logits(x), logits(opened), rtol=0, atol=2e-5)


def test_a_tied_head_without_a_tensor_is_the_embedding(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source")
    with Weights(source) as weights:
        embedding = weights.load("model.embed_tokens.weight")
        assert torch.equal(load_linear(weights, read_spec(source).head), embedding)


def test_transposed_linears_come_out_rows_first(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", "gpt2")
    qkv = read_spec(source).layers[1].linears["qkv"]
    with Weights(source) as weights:
        assert torch.equal(load_linear(weights, qkv), weights.load(f"{qkv.name}.weight").T)


def test_dense_weights_change_and_the_rest_stays(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", "qwen2", dtype="bfloat16", shard="20KB")
    spec = read_spec(source)
    name = f"{spec.layers[1].linears['up'].name}.weight"
    (tmp_path / "out").mkdir()
    with Weights(source) as weights:
        doubled = weights.load(name).float() * 2
        save_checkpoint(tmp_path / "out", spec, source, [(name, doubled)])
        with Weights(tmp_path / "out") as after:
            assert after.names() == weights.names()
            for x in after.names():
                assert torch.equal(after.load(x), doubled.bfloat16() if x == name else weights.load(x))
    files = "LICENSE chat_template.jinja config.json generation_config.json tokenizer.json tokenizer_config.json"
    assert {x.name for x in (tmp_path / "out").iterdir()} == {*files.split(), WEIGHTS}


def test_code_and_pickles_are_left_behind(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoConfig": "evil.Config"}}))
    (source / "evil.py").write_text("raise SystemExit")
    (source / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    (tmp_path / "out").mkdir()
    save_checkpoint(tmp_path / "out", read_spec(source), source, ())
    assert "auto_map" not in (tmp_path / "out" / "config.json").read_text()
    assert not {"evil.py", "pytorch_model.bin"} & {x.name for x in (tmp_path / "out").iterdir()}


def test_an_unknown_family_is_kept_as_it_is_but_for_the_dtype(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", "granite")
    (tmp_path / "out").mkdir()
    spec = read_spec(source, "bfloat16")
    save_checkpoint(tmp_path / "out", spec, source, ())
    assert read_spec(tmp_path / "out") == spec
    assert sum(x.size_bytes for x in locate(tmp_path / "out").values()) == spec.size_bytes()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_what_the_table_does_not_describe_is_an_error(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source")
    spec = read_spec(source)
    up = f"{spec.layers[0].linears['up'].name}.weight"
    (tmp_path / "out").mkdir()
    for changed in ([("x.weight", torch.zeros(2))], [(up, torch.zeros(2, 3))], [(up, None)]):
        with pytest.raises(ValueError, match="the table describes"):
            save_checkpoint(tmp_path / "out", spec, source, changed)
    with pytest.raises(ValueError, match=r"no tensor lm_head\.weight_packed"):
        save_checkpoint(tmp_path / "out", spec.quantize({"lm_head": W4}), source, ())
    assert not list((tmp_path / "out").glob(".*"))


def test_scales_that_codes_were_not_made_with_are_refused(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source")
    linear = read_spec(source).quantize({"lm_head": W4}).head
    shape = (linear.out_features, linear.num_groups())
    codes = torch.zeros(VOCAB_SIZE, linear.in_features, dtype=torch.int8)
    with pytest.raises(ValueError, match="round_scales"):
        packed_tensors(linear, codes, torch.full(shape, 0.1), torch.zeros(shape, dtype=torch.int8))


def test_foreign_scales_that_bfloat16_cannot_hold_are_refused(tmp_path: Path) -> None:
    spec = quantized(tiny_folder(tmp_path / "source"), tmp_path / "out", {"lm_head": W4})
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "out" / WEIGHTS)
    fine = {**tensors, "lm_head.weight_scale": tensors["lm_head.weight_scale"].half()}
    save_file(fine, tmp_path / "out" / WEIGHTS)
    (tmp_path / "fine").mkdir()
    save_checkpoint(tmp_path / "fine", read_spec(tmp_path / "out"), tmp_path / "out", ())
    with Weights(tmp_path / "fine") as weights:
        assert torch.equal(load_packed(weights, spec.head)[1], tensors["lm_head.weight_scale"].float())
    save_file({**fine, "lm_head.weight_scale": fine["lm_head.weight_scale"] * 1.001}, tmp_path / "out" / WEIGHTS)
    with pytest.raises(UserError, match="scales that bfloat16"):
        save_checkpoint(tmp_path / "fine", read_spec(tmp_path / "out"), tmp_path / "out", ())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json is missing"),
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"model_type": 3}', "model_type"),
    ],
)
def test_bad_configs_give_one_line(content: str | None, message: str, tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source")
    (source / "config.json").unlink()
    if content is not None:
        (source / "config.json").write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        read_spec(source)
    assert "\n" not in str(caught.value)


def test_bad_tokenizers_give_one_line(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source")
    assert load_tokenizer(source)("a").input_ids
    (source / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(UserError, match="cannot be opened") as caught:
        load_tokenizer(source)
    assert "\n" not in str(caught.value)
    (source / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer"):
        load_tokenizer(source)


def test_tables_are_read_without_torch(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", shard="20KB")
    code = (
        "import sys; from pathlib import Path; from strop.model import read_spec; from strop.sources import *;"
        "f = sys.argv[1]; read_spec(Path(f)); describe(f, 'float32'); source_key(f, 'float32');"
        "assert not {'torch', 'transformers', 'onnx'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(source)], check=True)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "gpt2"])
@pytest.mark.parametrize("name", ["TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizer"])
def test_tokenizers_are_those_of_transformers(family: str, name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = tiny_folder(tmp_path / "source", family)
    path = source / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "tokenizer_class": name}))
    found, expected = load_tokenizer(source), AutoTokenizer.from_pretrained(source)
    assert type(found) is type(expected)
    text = "An assert, 12 of 345 —  naïve\n\tdef f(x):"
    assert found(text)["input_ids"] == expected(text)["input_ids"]
    assert found.eos_token_id == expected.eos_token_id


def test_a_tokenizer_that_is_its_file_alone_is_opened_without_torch(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source")
    code = (
        "import sys; from pathlib import Path; from strop.model import load_tokenizer;"
        "t = load_tokenizer(Path(sys.argv[1])); t.decode(t('a').input_ids);"
        "t.apply_chat_template([{'role': 'user', 'content': 'a'}], tokenize=False); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(source)], check=True)
