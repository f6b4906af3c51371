"""Our decoder computes what transformers computes, with and without a cache, in batches and in trees."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from references import INPUT_SCALE, VOCAB_SIZE, decoder_of, random_decoder, tiny_model
from torch import Tensor, nn

from strop.export.eager import DecoderProgram
from strop.families import EXPERT_FAMILIES, FAMILIES
from strop.layers import Decoder, IntegerLinear, QuantLinear, fold, round_inputs
from strop.program import Session, Traits, Tree
from strop.spec import Activations, ModelSpec, Quantization

LENGTH = 23
TOLERANCE = 1e-5  # of the largest logit


def ids(rows: int = 1, length: int = LENGTH, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, (rows, length))


def reference(model: Any, tokens: Any) -> Any:
    with torch.inference_mode():
        return model(torch.as_tensor(tokens)).logits.float().numpy()


def session(decoder: Decoder, batch: int = 1, max_tokens: int = 64) -> Session:
    traits = Traits("eager", decoder.spec.dtype, 1, "cpu", 128, VOCAB_SIZE, takes_trees=True)
    return DecoderProgram(decoder, traits).open(batch, max_tokens)


def assert_close(found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


VARIANTS: Sequence[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    ("llama", {"num_key_value_heads": 6, "head_dim": 8, "hidden_act": "gelu"}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64, "rope_theta": 5e5,
            }
        },
    ),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4,
            }
        },
    ),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    ("qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    ("gemma2", {"layer_types": None, "attention_bias": True, "num_hidden_layers": 4}),
    ("gemma3_text", {"layer_types": None, "num_hidden_layers": 7, "final_logit_softcapping": 4.0}),
    ("phi3", {"sliding_window": 5, "num_key_value_heads": 3}),
    (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 2.0, 4.0, 8.0],
            },
        },
    ),
    ("smollm3", {"attention_bias": True, "mlp_bias": True, "no_rope_layers": None, "num_hidden_layers": 4}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 5}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": None, "tie_word_embeddings": False}),
    ("mixtral", {"sliding_window": None, "num_experts_per_tok": 1, "hidden_act": "gelu"}),
    ("qwen2_moe", {"norm_topk_prob": True, "qkv_bias": False, "decoder_sparse_step": 3, "mlp_only_layers": []}),
    (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, "layer_types": None},
    ),
    (
        "qwen3_moe",
        {
            "norm_topk_prob": False, "attention_bias": True, "use_sliding_window": True, "sliding_window": 6,
            "num_experts_per_tok": 3, "mlp_only_layers": [0], "decoder_sparse_step": 1, "tie_word_embeddings": True,
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=lambda x: x if isinstance(x, str) else ",".join(x))
def test_prefill_agrees_with_transformers(family: str, changes: dict[str, Any]) -> None:
    model = tiny_model(family, **changes)
    tokens = ids(2)
    found = session(decoder_of(model), 2).step(tokens, logits="all")
    assert_close(found, reference(model, tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_without_cache_agree_with_transformers(family: str) -> None:
    model = tiny_model(family)
    decoder = decoder_of(model)
    tokens = torch.tensor(ids(2))
    with torch.inference_mode():
        x = decoder.embed(tokens, torch.arange(LENGTH).expand(2, -1))
        for index in range(len(decoder.layers)):
            x = decoder.block(index, x)
        assert_close(decoder.logits(x).numpy(), reference(model, tokens))


@pytest.mark.parametrize("cached", [0, 1, 9])
@pytest.mark.parametrize("new", [1, 4, 9])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_over_a_cache_agree_with_transformers(family: str, new: int, cached: int) -> None:
    model = tiny_model(family)
    tokens = ids(1, cached + new)
    running = session(decoder_of(model))
    if cached:
        running.step(tokens[:, :cached])
    assert_close(running.step(tokens[:, cached:], logits="all"), reference(model, tokens)[:, cached:])


@pytest.mark.parametrize("family", FAMILIES)
def test_token_by_token_agrees_with_transformers(family: str) -> None:
    model = tiny_model(family)
    tokens = ids()
    running = session(decoder_of(model))
    found = np.concatenate([running.step(tokens[:, [i]]).copy() for i in range(LENGTH)], axis=1)
    assert_close(found, reference(model, tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_agree_with_each_row_alone(family: str) -> None:
    model = tiny_model(family)
    tokens = ids(3)
    running = session(decoder_of(model), 3)
    seen = np.zeros(3, dtype=int)
    for counts in ([9, 1, 4], [1, 7, 2], [1, 1, 1], [4, 2, 9]):
        step = np.zeros((3, max(counts)), dtype=np.int64)
        for row, count in enumerate(counts):
            step[row, :count] = tokens[row, seen[row] : seen[row] + count]
        found = running.step(step, counts=np.array(counts))
        seen += counts
        for row in range(3):
            assert_close(found[row, 0], reference(model, tokens[row : row + 1, : seen[row]])[0, -1])
    assert running.lengths.tolist() == seen.tolist()


@pytest.mark.parametrize("cached", [[9, 9], [2, 11]])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_path_of_a_tree_agrees_with_that_path_alone(family: str, cached: list[int]) -> None:
    model = tiny_model(family)
    tree = Tree((-1, 0, 0, 1, -1, 3, 4))
    prefix, nodes = ids(2, 11), ids(2, 7, seed=1)
    running = session(decoder_of(model), 2)
    running.step(prefix, counts=np.array(cached))
    found = running.step(nodes, tree=tree, logits="all")
    for row, length in enumerate(cached):
        for node in range(7):
            path = np.flatnonzero(tree.mask()[node])
            alone = np.concatenate((prefix[row, :length], nodes[row, path]))[None]
            assert_close(found[row, node], reference(model, alone)[0, -1])


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_kept_path_continues_as_if_it_had_been_typed(family: str) -> None:
    model = tiny_model(family)
    prefix, nodes, after = ids(2, 9), ids(2, 5, seed=1), ids(2, 3, seed=2)
    running = session(decoder_of(model), 2)
    running.step(prefix)
    running.step(nodes, tree=Tree((-1, 0, 0, 2, -1)))
    running.keep([[0, 2, 3], [4]])
    found = running.step(after, logits="all")
    for row, path in enumerate(([0, 2, 3], [4])):
        alone = np.concatenate((prefix[row], nodes[row, path], after[row]))[None]
        assert_close(found[row], reference(model, alone)[0, -3:])


def test_logit_rows_are_the_asked_ones() -> None:
    decoder = decoder_of(tiny_model("llama"))
    tokens = ids(2, 9)
    everything = session(decoder, 2).step(tokens, logits="all").copy()
    assert_close(session(decoder, 2).step(tokens), everything[:, -1:])
    found = session(decoder, 2).step(tokens, counts=np.array([9, 5]), logits=3)
    assert_close(found[0], everything[0, 6:])
    assert_close(found[1], everything[1, 2:5])


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_close_to_transformers(family: str) -> None:
    # A token near the border between two experts may go to either: all are chosen here.
    changes = {"num_experts_per_tok": 4 if family == "mixtral" else 5} if family in EXPERT_FAMILIES else {}
    model = tiny_model(family, **changes).to(torch.bfloat16)
    decoder = decoder_of(model)
    tokens = ids(2)
    running = session(decoder, 2)
    found = np.concatenate([running.step(tokens[:, a:b], logits="all") for a, b in ((0, 9), (9, 10), (10, 23))], 1)
    assert decoder.dtype == torch.bfloat16
    assert_close(found, reference(model, tokens), 0.04)


def test_ragged_bfloat16_rows_take_single_tokens_as_a_batch_of_one_does() -> None:
    decoder = decoder_of(tiny_model("mistral").to(torch.bfloat16))
    tokens = ids(2, 12)
    running = session(decoder, 2)
    running.step(tokens[:, :9], counts=np.array([9, 3]))
    for step in range(3):
        found = running.step(tokens[:, [9 + step]]).copy()
        for row, start in enumerate((9, 3)):
            alone = np.concatenate((tokens[row, :start], tokens[row, 9 : 10 + step]))[None]
            assert_close(found[row, 0], session(decoder).step(alone)[0, 0], 0.04)


# Tables that no family has.


def shared(spec: ModelSpec) -> ModelSpec:
    """The same model whose layer 2 uses keys and values of layer 0."""
    last = spec.layers[2]
    linears = {role: x for role, x in last.linears.items() if role not in ("k", "v")}
    twin = dataclasses.replace(last, linears=linears, kv_from_layer=0)
    return dataclasses.replace(spec, layers=(*spec.layers[:2], twin))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_layer_can_use_the_keys_and_values_of_another(family: str) -> None:
    spec = decoder_of(tiny_model(family)).spec
    decoder = random_decoder(shared(spec))
    full = random_decoder(spec)
    weights = decoder.tensors()
    with torch.no_grad():
        for name, tensor in full.tensors().items():
            tensor.copy_(weights.get(name, tensor))
    tokens = ids(2, 9)
    running = session(decoder, 2)
    assert len(running.program.allocate(2, 9)) == 4
    found = np.concatenate([running.step(tokens[:, :5], logits="all"), running.step(tokens[:, 5:], logits="all")], 1)
    with torch.inference_mode():
        assert_close(found, by_hand(full, torch.tensor(tokens)).numpy())


def by_hand(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Logits with the keys and values of layer 0 put in the place of layer 2's."""
    x = decoder.embed(tokens, torch.arange(tokens.shape[1])[None])
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    for index in range(2):
        x = decoder.block(index, x, kept=kept)
    layer = decoder.layers[2]
    keys, values = kept[0]

    def attend(q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        assert k is not None
        assert v is not None
        scores = q @ keys.repeat_interleave(3, 1).transpose(2, 3) * layer.spec.attention_scale
        causal = torch.ones(scores.shape[-2:]).tril().bool()
        return scores.masked_fill(~causal, -torch.inf).softmax(-1) @ values.repeat_interleave(3, 1)

    rotary = decoder.rotary(torch.arange(tokens.shape[1])[None])[0]
    return decoder.logits(layer(x, rotary, attend))


def test_blocks_pass_shared_keys_and_values_on() -> None:
    decoder = random_decoder(shared(decoder_of(tiny_model("llama")).spec))
    tokens = ids(2, 9)
    with torch.inference_mode():
        x, kept = decoder.embed(torch.tensor(tokens), torch.arange(9)[None]), {}
        for index in range(3):
            x = decoder.block(index, x, kept=kept)
        assert_close(decoder.logits(x).numpy(), session(decoder, 2).step(tokens, logits="all"))
        with pytest.raises(KeyError):
            decoder.block(2, x)


def test_layers_may_differ_in_heads_and_widths() -> None:
    spec = decoder_of(tiny_model("llama")).spec
    narrow = dataclasses.replace(
        spec.layers[1],
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=24,
        linears={
            role: dataclasses.replace(
                x,
                in_features={"o": 32, "down": 24}.get(role, x.in_features),
                out_features={"q": 32, "k": 16, "v": 16, "gate": 24, "up": 24}.get(role, x.out_features),
            )
            for role, x in spec.layers[1].linears.items()
        },
    )
    decoder = random_decoder(dataclasses.replace(spec, layers=(spec.layers[0], narrow, spec.layers[2])))
    tokens = ids(1, 9)
    running = session(decoder)
    stepped = np.concatenate([running.step(tokens[:, :4], logits="all"), running.step(tokens[:, 4:], logits="all")], 1)
    assert_close(session(decoder).step(tokens, logits="all"), stepped)


# Quantized linears.

SCHEMES = [
    Quantization(bits, group, symmetric) for bits in (2, 3, 4, 8) for group in (16, None) for symmetric in (True, False)
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_quantized_decoder_computes_with_its_dequantized_weights(scheme: Quantization) -> None:
    plain = decoder_of(tiny_model("qwen2")).spec
    decoder = random_decoder(plain.quantize({x.name: scheme for x in plain.linears()}))
    tokens = ids(2, 9)
    packed = session(decoder, 2).step(tokens, logits="all").copy()
    dense = decoder_of(tiny_model("qwen2"))
    weights = decoder.tensors()
    with torch.no_grad():
        for name, tensor in dense.tensors().items():
            if name in weights:
                tensor.copy_(weights[name])
        for linear in decoder.spec.linears():
            module = decoder.linear(linear.name)
            assert isinstance(module, QuantLinear)
            dense.linear(linear.name).weight.copy_(module.dense())
    assert_close(packed, session(dense, 2).step(tokens, logits="all"))


def test_fold_leaves_dense_linears_that_compute_the_same() -> None:
    plain = decoder_of(tiny_model("gpt2")).spec
    decoder = random_decoder(plain.quantize({x.name: Quantization(4, 16, False) for x in plain.linears()}))
    tokens = ids(2, 9)
    before = session(decoder, 2).step(tokens, logits="all").copy()
    fold(decoder)
    assert all(isinstance(decoder.linear(x.name), nn.Linear) for x in decoder.spec.linears())
    assert_close(session(decoder, 2).step(tokens, logits="all"), before)


def test_rows_of_a_quantized_matrix_are_those_of_the_whole() -> None:
    plain = decoder_of(tiny_model("llama")).spec
    decoder = random_decoder(plain.quantize({"lm_head": Quantization(3, 16, False)}))
    assert isinstance(decoder.head, QuantLinear)
    picked = torch.tensor([[0, 306], [5, 5]])
    assert torch.equal(decoder.head.rows(picked), decoder.head.dense()[picked])


def test_replaced_linear_is_the_one_that_runs() -> None:
    decoder = decoder_of(tiny_model("llama"))
    name = "model.layers.1.mlp.down_proj"
    silent = nn.Linear(80, 48, bias=False)
    nn.init.zeros_(silent.weight)
    decoder.replace_linear(name, silent)
    with torch.inference_mode():
        changed = decoder.block(1, torch.ones(1, 3, 48))
        decoder.linear(name).weight.fill_(1.0)
        assert not torch.equal(decoder.block(1, torch.ones(1, 3, 48)), changed)


def test_random_batches_steps_and_trees_never_disagree_with_one_pass() -> None:
    generator = np.random.default_rng(7)
    for family in ("mistral", "gemma3_text"):
        decoder = decoder_of(tiny_model(family))
        tokens = ids(2, 40, seed=3)
        whole = session(decoder, 2).step(tokens, logits="all").copy()
        running = session(decoder, 2)
        while running.lengths.max() < 30:
            back = generator.integers(0, 4, 2)
            running.truncate(np.maximum(running.lengths - back, 0))
            counts = generator.integers(1, 8, 2)
            step = np.zeros((2, counts.max()), dtype=np.int64)
            for row in range(2):
                start = running.lengths[row]
                step[row, : counts[row]] = tokens[row, start : start + counts[row]]
            found = running.step(step, counts=counts)
            for row in range(2):
                assert_close(found[row, 0], whole[row, running.lengths[row] - 1])


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_integer_linears_multiply_integers(activations: Activations) -> None:
    plain = decoder_of(tiny_model("gpt2")).spec
    form = Quantization(8, None, True, activations)
    decoder = random_decoder(plain.quantize({x.name: form for x in plain.linears()}))
    module = decoder.linear("transformer.h.1.mlp.c_proj")
    assert isinstance(module, IntegerLinear)
    x = 2 * torch.randn(2, 3, 80, generator=torch.Generator().manual_seed(0))
    weight, scale = module.codes.to(torch.int64), module.scale.double().flatten()
    assert module.bias is not None
    expected = torch.empty(2, 3, 48, dtype=torch.float64)
    for i, j in itertools.product(range(2), range(3)):
        step = x[i, j].abs().max() / 127.5 if activations == "dynamic" else torch.tensor(INPUT_SCALE)
        codes = torch.tensor([min(max(round(float(v / step)), -128), 127) for v in x[i, j]])
        expected[i, j] = (weight @ codes).double() * step.double() * scale + module.bias.double()
    torch.testing.assert_close(module(x).double(), expected, atol=1e-5, rtol=1e-6)
    fold(decoder)
    assert decoder.linear("transformer.h.1.mlp.c_proj").codes.dtype == torch.float32
    torch.testing.assert_close(module(x).double(), expected, atol=1e-5, rtol=1e-6)


def test_integer_linears_can_take_inputs_as_they_are() -> None:
    plain = decoder_of(tiny_model("llama")).spec
    decoder = random_decoder(plain.quantize({x.name: Quantization(8, None, True, "static") for x in plain.linears()}))
    tokens = ids(2, 9)
    dense = decoder_of(tiny_model("llama", tie_word_embeddings=False))
    weights = decoder.tensors()
    with torch.no_grad():
        for name, tensor in dense.tensors().items():
            if name in weights and weights[name].dtype != torch.int8:
                tensor.copy_(weights[name])
        for linear in decoder.spec.linears():
            module = decoder.linear(linear.name)
            dense.linear(linear.name).weight.copy_(module.codes.float() * module.scale.float())
        dense.embedding.weight.copy_(decoder.head.rows(torch.arange(VOCAB_SIZE)))
    expected = session(dense, 2).step(tokens, logits="all").copy()
    rounded = session(decoder, 2).step(tokens, logits="all").copy()
    assert np.abs(rounded - expected).max() > 1e-3
    round_inputs(decoder, rounds=False)
    assert_close(session(decoder, 2).step(tokens, logits="all"), expected)
    round_inputs(decoder, rounds=True)
    np.testing.assert_array_equal(session(decoder, 2).step(tokens, logits="all"), rounded)
