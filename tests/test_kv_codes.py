"""Keys and values in a rounded cache: codes against slow ones, attention by hand, and sessions that stay straight."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from references import VOCAB_SIZE, decoder_of, kl, random_ids, tiny_model
from torch import Tensor

from strop.export.eager import DecoderProgram
from strop.kv_codes import LARGEST, Codec, decode, encode, token_scales
from strop.layers import CacheStep, Decoder, round_cache
from strop.program import Session, Traits, Tree
from strop.spec import CacheFormat, CacheQuantization, ModelSpec

FORMATS: tuple[CacheFormat, ...] = ("int8", "int4", "fp8")
KINDS = ("tensor", "head", "channel", "token")


def e4m3_values() -> list[float]:
    """Every finite number with 4 bits of exponent (bias 7) and 3 of mantissa, by its definition."""
    found = [m * 2.0**-9 for m in range(8)]
    found += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    return sorted({*found, *(-x for x in found)})


def slow_rounded(x: float, scale: float, form: CacheFormat) -> float:
    """One number rounded by hand."""
    if form == "fp8":
        return min(e4m3_values(), key=lambda y: abs(y - x / scale)) * scale
    half = 2 ** (4 if form == "int4" else 8) // 2
    return float(min(max(round(x / scale), -half), half - 1)) * scale


def rounded_spec(spec: ModelSpec, form: CacheFormat, keys: str, values: str) -> ModelSpec:
    return dataclasses.replace(spec, kv_cache=CacheQuantization(form, keys, values))  # type: ignore[arg-type]  # strings


def rounded(decoder: Decoder, form: CacheFormat, keys: str = "channel", values: str = "head") -> Decoder:
    """The same weights over a rounded cache, with scales that differ."""
    found = Decoder(rounded_spec(decoder.spec, form, keys, values))
    weights, generator = decoder.tensors(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in found.tensors().items():
            if name in weights:
                tensor.copy_(weights[name])
            else:
                tensor.copy_((2 + torch.rand(tensor.shape, generator=generator)) / LARGEST[form])
    return found.eval()


def session(decoder: Decoder, batch: int = 1) -> Session:
    traits = Traits("eager", decoder.spec.dtype, 1, "cpu", 128, VOCAB_SIZE, takes_trees=True)
    return DecoderProgram(decoder, traits).open(batch, 64)


@pytest.mark.parametrize("form", FORMATS)
def test_codes_are_the_nearest(form: CacheFormat) -> None:
    x = torch.randn(3, 2, 5, 6, generator=torch.Generator().manual_seed(0)) * 2
    scale = torch.rand(2, 1, 6, generator=torch.Generator().manual_seed(1)) * 3 / LARGEST[form]
    codes = encode(x, scale, form)
    assert codes.shape == (3, 2, 5, 3 if form == "int4" else 6)
    found = decode(codes, scale, form)
    for index in np.ndindex(*x.shape):
        s = float(scale[index[1], 0, index[3]])
        assert float(found[index]) == pytest.approx(slow_rounded(float(x[index]), s, form), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_what_fits_is_off_by_half_a_scale_at_most(form: CacheFormat) -> None:
    x = torch.randn(4, 3, 50, 8, generator=torch.Generator().manual_seed(2))
    scale = x.abs().amax((0, 2))[:, None] / LARGEST[form]
    error = (decode(encode(x, scale, form), scale, form) - x).abs()
    assert bool((error <= scale / 2 * (1 + 1e-4)).all())  # float32 holds 127.5 s to 1e-5 s


def test_fp8_keeps_three_bits_of_mantissa() -> None:
    x = torch.randn(4, 3, 50, 8, generator=torch.Generator().manual_seed(2))
    scale = x.abs().amax((0, 2))[:, None] / LARGEST["fp8"]
    error = (decode(encode(x, scale, "fp8"), scale, "fp8") - x).abs()
    assert bool((error <= torch.maximum(x.abs() / 16, scale * 2.0**-10) * (1 + 1e-5)).all())


def test_two_codes_of_4_bits_lie_in_a_byte_the_first_one_lower() -> None:
    codes = encode(torch.tensor([[-8.0, 7.0, 0.0, 3.0]]), torch.ones(1), "int4")
    assert codes.tolist() == [[0 | 15 << 4, 8 | 11 << 4]]


def slow_attention(q: Any, keys: Any, values: Any, scale: float) -> Any:
    """One query (D,) over keys and values (T, D), number by number."""
    scores = [scale * math.fsum(float(a) * float(b) for a, b in zip(q, k, strict=True)) for k in keys]
    weights = [math.exp(x - max(scores)) for x in scores]
    return [
        math.fsum(w * float(v[d]) for w, v in zip(weights, values, strict=True)) / math.fsum(weights)
        for d in range(len(q))
    ]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("keys", KINDS)
def test_attention_is_that_over_keys_and_values_rounded_by_hand(form: CacheFormat, keys: str) -> None:
    decoder = rounded(decoder_of(tiny_model("llama")), form, keys, "token" if keys == "head" else "head")
    layer, codec = decoder.spec.layers[0], decoder.codecs[0]
    assert isinstance(codec, Codec)
    cache = codec.allocate(2, 9, torch.float32, torch.device("cpu"))
    generator, history = torch.Generator().manual_seed(3), [[], []]
    lengths = torch.zeros(2, dtype=torch.int64)
    for counts in ((3, 1), (1, 2), (2, 2)):  # rows of different length
        width = max(counts)
        q, k, v = (
            torch.randn(2, n, width, layer.head_dim, generator=generator)
            for n in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        )
        positions = lengths[:, None] + torch.arange(width)
        step = CacheStep(cache, lengths, positions, None, [codec])
        found = step.attend(layer, 0)(q, k, v)
        for row, count in enumerate(counts):
            for i in range(count):
                history[row].append(
                    [_by_hand(x[row, :, i], s, form) for x, s in ((k, codec.k_scale), (v, codec.v_scale))]
                )
                for head in range(layer.num_heads):
                    kept = head // (layer.num_heads // layer.num_kv_heads)
                    seen = [[token[part][kept] for token in history[row]] for part in (0, 1)]
                    expected = slow_attention(q[row, head, i].tolist(), *seen, layer.attention_scale)
                    np.testing.assert_allclose(found[row, head, i].numpy(), expected, atol=2e-5)
        lengths = lengths + torch.tensor(counts)


def _by_hand(x: Tensor, scale: Tensor | None, form: CacheFormat) -> list[list[float]]:
    """One token's keys or values (kv_heads, D), rounded."""
    rows = []
    for head, row in enumerate(x.tolist()):
        if scale is None:
            scales = [max(map(abs, row)) / math.floor(LARGEST[form])] * len(row)
        else:
            scales = scale.float().broadcast_to(len(x), 1, len(row))[head, 0].tolist()
        rows.append([slow_rounded(y, s, form) for y, s in zip(row, scales, strict=True)])
    return rows


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_truncated_and_forked_rows_go_on_as_fresh_ones(family: str, form: CacheFormat) -> None:
    decoder = rounded(decoder_of(tiny_model(family)), form, "channel", "token")
    ids, after = random_ids(2, 12), random_ids(2, 4, seed=1)
    fresh = session(decoder, 2)
    for start, end in ((0, 5), (5, 9)):
        fresh.step(ids[:, start:end])
    expected = fresh.step(after, logits="all").copy()
    running = session(decoder, 2)
    running.step(ids[:, :5])
    running.step(ids[:, 5:9])
    twin = running.fork()
    twin.step(ids[:, :3])
    running.step(ids[:, 9:])
    running.truncate([9, 9])
    twin.truncate([9, 9])
    for each in (running, twin):
        np.testing.assert_array_equal(each.step(after, logits="all"), expected)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_trees_and_ragged_rows_agree_with_each_row_alone(family: str, form: CacheFormat) -> None:
    decoder = rounded(decoder_of(tiny_model(family)), form)
    tree, prefix, nodes, after = Tree((-1, 0, 0, 2, -1)), random_ids(2, 9), random_ids(2, 5, seed=1), random_ids(2, 2)
    running = session(decoder, 2)
    running.step(prefix, counts=np.array([9, 4]))
    found = running.step(nodes, tree=tree, logits="all").copy()
    running.keep([[0, 2, 3], [4]])
    last = running.step(after, logits="all").copy()
    for row, (length, path) in enumerate(((9, [0, 2, 3]), (4, [4]))):
        alone = session(decoder)
        tokens = np.concatenate((prefix[row, :length], nodes[row, path], after[row]))[None]
        expected = alone.step(tokens, logits="all")[0]
        np.testing.assert_allclose(last[row], expected[-2:], atol=1e-5)
        np.testing.assert_allclose(found[row, path], expected[length : length + len(path)], atol=1e-5)


def test_a_layer_reads_the_rounded_keys_of_the_one_it_shares_with() -> None:
    plain = decoder_of(tiny_model("llama"))
    last = plain.spec.layers[2]
    linears = {role: x for role, x in last.linears.items() if role not in ("k", "v")}
    twin = dataclasses.replace(last, linears=linears, kv_from_layer=0)
    shared = Decoder(dataclasses.replace(plain.spec, layers=(*plain.spec.layers[:2], twin)))
    weights = plain.tensors()
    with torch.no_grad():
        for name, tensor in shared.tensors().items():
            tensor.copy_(weights[name])
    decoder = rounded(shared, "int4")
    assert len(decoder.codecs) == 2
    assert not any("layers.2" in name for name in decoder.spec.cache_scales())
    ids = random_ids(1, 9)
    whole = session(decoder).step(ids, logits="all").copy()
    running = session(decoder)
    parts = [running.step(ids[:, a:b], logits="all").copy() for a, b in ((0, 4), (4, 5), (5, 9))]
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=1e-5)
    assert kl(session(shared.eval()).step(ids, logits="all"), whole) > 0


def test_more_bits_bring_the_logits_closer_until_they_are_the_same() -> None:
    plain = decoder_of(tiny_model("qwen3"))
    ids = random_ids(2, 30)
    expected = session(plain, 2).step(ids, logits="all").copy()
    error = {}
    for form in ("int4", "int8"):
        found = session(rounded(plain, form, "token", "token"), 2).step(ids, logits="all")
        error[form] = float(np.abs(found - expected).mean())
    assert 8 < error["int4"] / error["int8"] < 34  # 255 levels to 15
    decoder = rounded(plain, "int4")
    round_cache(decoder, rounds=False)
    np.testing.assert_array_equal(session(decoder, 2).step(ids, logits="all"), expected)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("keys", KINDS)
def test_a_cache_is_as_large_as_the_table_says(form: CacheFormat, keys: str) -> None:
    decoder = Decoder(rounded_spec(decoder_of(tiny_model("llama")).spec, form, keys, "head"))
    found = sum(x.nbytes for x in session(decoder, 3).program.allocate(3, 10))
    assert found == 30 * decoder.spec.kv_bytes_per_token()
    assert decoder.spec.kv_bytes_per_token() < decoder.spec.kv_bytes_per_token(2) + 1


def test_scales_of_a_token_bring_its_largest_value_to_the_end() -> None:
    x = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(4))
    codes = encode(x, token_scales(x, "int8"), "int8")
    assert codes.abs().amax(-1).unique().tolist() == [127]
    zero = torch.zeros(1, 1, 1, 4)
    assert not decode(encode(zero, token_scales(zero, "fp8"), "fp8"), token_scales(zero, "fp8"), "fp8").any()
