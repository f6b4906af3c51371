"""llama.cpp itself opens the files and computes what strop does; skipped where llama-cpp-python is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from references import kl, quantized, tiny_folder, tiny_model

from strop.artifact import Artifact
from strop.export.gguf import Gguf, layout
from strop.model import load_tokenizer
from strop.spec import Quantization
from strop.stage import Context

llama_cpp = pytest.importorskip("llama_cpp")

TEXT = "if True: assert 3 > 2, 'naïve'\n\tcafés"
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
    "phi3": {},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": None},
    "gpt2": {},
}


def opened(source: Path, out: Path, stage: Gguf) -> Any:
    """A file in llama.cpp, keys and values in float32."""
    out.mkdir()
    stage.run(Artifact(source, "checkpoint", "a" * 64), out, Context(out.parent, threads=1))
    kinds = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    return llama_cpp.Llama(
        str(out / layout.FILE), n_ctx=64, n_threads=1, logits_all=True, verbose=False, flash_attn=False, **kinds
    )


def logits(model: Any, ids: list[int]) -> Any:
    """Of every position."""
    model.reset()
    model.eval(ids)
    return np.array(model.scores[: len(ids)])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_the_same(family: str, tmp_path: Path) -> None:
    changes = {"n_embd": 96, "n_inner": 64} if family == "gpt2" else {"hidden_size": 96, "intermediate_size": 64}
    changes |= FAMILIES[family]
    source = tiny_folder(tmp_path / "source", family, **changes)
    model = opened(source, tmp_path / "out", Gguf())
    ids = load_tokenizer(source)(TEXT).input_ids
    assert model.tokenize(TEXT.encode(), add_bos=False, special=False) == ids
    with torch.inference_mode():
        expected = tiny_model(family, **changes)(torch.tensor([ids])).logits[0].numpy()
    found = logits(model, ids)
    assert kl(expected, found) < 1e-5
    np.testing.assert_allclose(found, expected, atol=5e-3 * np.abs(expected).max())


@pytest.mark.parametrize(
    "q", [Quantization(4, 32, True), Quantization(8, 32, True), Quantization(4, 32, True, format="mxfp4")], ids=str
)
def test_codes_compute_what_they_do_in_eager_but_for_rounded_inputs(q: Quantization, tmp_path: Path) -> None:
    from strop.export.eager import DecoderProgram, Traits
    from strop.layers import fold
    from strop.model import load_decoder

    folder = tiny_folder(tmp_path / "source", hidden_size=96, intermediate_size=64)
    source = quantized(folder, tmp_path / "packed", q)
    model = opened(source, tmp_path / "out", Gguf())
    decoder = load_decoder(source)
    fold(decoder)
    ids = load_tokenizer(source)(TEXT).input_ids
    program = DecoderProgram(decoder, Traits("eager", "float32", 1, "cpu", 64, 307, takes_trees=True))
    expected = program.open(1, 64).step(np.array([ids]), logits="all")[0]
    assert kl(expected, logits(model, ids)) < 1e-3
