"""GGUF files become what the hub has: the same table, the same weights, the same logits."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from references import VOCAB_SIZE, tiny_gguf, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from strop.errors import UserError
from strop.gguf_file import config, headers, load, read_gguf
from strop.model import load_tokenizer, read_headers, read_spec
from strop.sources import describe, fetch

SIX_LAYERS = ["sliding_attention"] * 5 + ["full_attention"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 64,
}


def llama3_divisors(width: int) -> list[float]:
    """As llama.cpp's converter computes them from `LLAMA3`."""
    found = []
    for i in range(0, width, 2):
        wave = 2 * np.pi * 500.0 ** (i / width)
        smooth = (8192 / wave - 1) / 3
        found.append(1.0 if wave < 8192 / 4 else 8.0 if wave > 8192 else 1 / ((1 - smooth) / 8 + smooth))
    return found


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama untied with biases": ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}, {}),
    "llama3": (
        "llama",
        {"rope_parameters": LLAMA3},
        {"rope__freq_base": 500.0, "tensor__rope_freqs__weight": llama3_divisors(16)},
    ),
    "mistral": ("mistral", {"sliding_window": None}, {"vocab_size": VOCAB_SIZE}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2 with yarn": (
        "qwen2",
        {"rope_parameters": YARN},
        {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32},
    ),
    "qwen3": ("qwen3", {}, {"rope__freq_base": 10000.0}),
    "gemma2": (
        "gemma2",
        {"query_pre_attn_scalar": 16},
        {"attention__sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "gemma3_text",
        {"query_pre_attn_scalar": 16, "num_hidden_layers": 6, "layer_types": SIX_LAYERS},
        {"attention__sliding_window": 5, "rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
    ),
    "phi3": ("phi3", {"sliding_window": 5}, {"attention__sliding_window": 5, "rope__dimension_count": 6}),
    "phi3 with long contexts": (
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 64},
        {
            "attention__sliding_window": 0,
            "rope__scaling__original_context_length": 64,
            "tensor__rope_factors_short__weight": LONG["short_factor"],
            "tensor__rope_factors_long__weight": LONG["long_factor"],
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": None}, {"rope__freq_base": 2000000.0}),
    "gpt2": ("gpt2", {}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_family_computes_what_the_model_behind_the_file_did(case: str, tmp_path: Path) -> None:
    family, changes, metadata = CASES[case]
    model = tiny_model(family, **changes)
    path = tiny_gguf(tmp_path / "model.gguf", model, **metadata)
    out = tmp_path / "out"
    out.mkdir()

    spec = fetch(str(path), "float32", out)

    assert describe(str(path), "float32")[0] == spec == read_spec(out)
    assert headers(read_gguf(path)) == read_headers(out)
    opened = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.arange(40).reshape(2, 20) * 7
    with torch.inference_mode():
        torch.testing.assert_close(opened(ids).logits, model(ids).logits, rtol=0, atol=2e-5)


def test_quantized_blocks_are_dequantized_as_the_format_says(tmp_path: Path) -> None:
    model = tiny_model("qwen2", hidden_size=64, intermediate_size=96)
    kinds = {"blk.0.ffn_up.weight": "Q4_0", "blk.1.ffn_down.weight": "Q8_0", "token_embd.weight": "F16"}
    file = read_gguf(tiny_gguf(tmp_path / "model.gguf", model, types=kinds))
    stored = {x.name: x for x in gguf.GGUFReader(file.path).tensors}
    for name in kinds:
        expected = gguf.dequantize(stored[name].data, stored[name].tensor_type)
        assert np.array_equal(load(file, name), expected.astype(np.float32))
    assert file.types() == ["F16", "F32", "Q4_0", "Q8_0"]


def test_an_output_matrix_equal_to_the_embedding_is_tied(tmp_path: Path) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    path = tiny_gguf(tmp_path / "model.gguf", model)
    spec, note = describe(str(path), "float32")
    assert spec.is_tied
    assert "equals the embedding" in note


def test_one_that_differs_stays(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "model.gguf", tiny_model("qwen2", tie_word_embeddings=False))
    assert not describe(str(path), "float32")[0].is_tied


def test_the_tokenizer_and_its_special_tokens_come_along(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "model.gguf", tiny_model("llama"), general__license="apache-2.0")
    out = tmp_path / "out"
    out.mkdir()
    fetch(str(path), "bfloat16", out)
    text = "if True: assert 3 > 2, 'naïve'"
    found, expected = load_tokenizer(out), tiny_tokenizer()
    assert found(text).input_ids == expected(text).input_ids
    assert (found.bos_token, found.eos_token) == ("<s>", "</s>")
    assert found.chat_template == expected.chat_template
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == 1
    assert "apache-2.0" in (out / "LICENSE").read_text()


def test_floats_are_the_shortest_that_round_to_what_is_stored(tmp_path: Path) -> None:
    assert config(read_gguf(tiny_gguf(tmp_path / "model.gguf", tiny_model("llama"))))["rms_norm_eps"] == 1e-5


LLAMA = b"general.architecture" + struct.pack("<IQ", 8, 5) + b"llama"


def cut(size: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:size]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda _: b"PK\x03\x04" + bytes(64), "not a GGUF file"),
        (lambda _: b"", "not a GGUF file"),
        (cut(6), "truncated"),
        (cut(300), "truncated"),
        (cut(-100), "truncated"),
        (lambda x: x[:4] + struct.pack("<I", 9) + x[8:], "version 9"),
        (lambda x: x.replace(LLAMA, LLAMA.replace(b"llama", b"lxama")), "did you mean 'llama'"),
        (lambda x: x.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xp.weight"), "blk.1.ffn_xp.weight is not one"),
        (lambda x: x.replace(b"llama.embedding_length", b"llama.embedding_lxngth"), "no llama.embedding_length"),
        (lambda x: x.replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.txkens"), "no tokenizer"),
    ],
)  # fmt: skip
def test_bad_files_give_one_line(damage: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "model.gguf", tiny_model("llama", num_hidden_layers=2))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=message) as caught:
        describe(str(path), "float32")
    assert "\n" not in str(caught.value)


def test_other_scalings_than_llama_3_are_refused(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "model.gguf", tiny_model("llama"), tensor__rope_freqs__weight=[1, 2, 3, 4, 5, 6, 7, 8])
    with pytest.raises(UserError, match="is not the scaling"):
        describe(str(path), "float32")
