"""Scales of keys and values: found as they should be, stored where other libraries look, kept by other stages."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from references import quantized, random_ids, tiny_folder, with_spec
from safetensors.torch import load_file, save_file

from strop.artifact import Artifact, Manifest, write_manifest
from strop.conformance import check_checkpoint
from strop.errors import ConformanceError, UserError
from strop.export.eager import Eager
from strop.families import cache_scheme
from strop.kv_codes import LARGEST, decode, encode
from strop.methods.awq import Awq
from strop.methods.gptq import Gptq
from strop.methods.kv_cache import SHRINKS, KvCache, fit, fitting_scale, observe, share
from strop.methods.rotate import Rotate
from strop.methods.rtn import Rtn
from strop.methods.smoothquant import SmoothQuant
from strop.model import read_spec, save_checkpoint
from strop.program import Session
from strop.spec import CacheQuantization, LayerSpec, ModelSpec, Quantization
from strop.stage import Context, Stage

KEY = "0" * 64
LENGTH, SAMPLES = 24, 3
CHOICES = [
    *(CacheQuantization(form, kind, kind) for form in ("int8", "int4", "fp8") for kind in ("tensor", "head")),
    CacheQuantization("int8", "channel", "head"),
    CacheQuantization("int4", "channel", "token"),
]  # fmt: skip


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.npy"
    np.save(path, random_ids(SAMPLES, LENGTH))
    return path


def run(stage: Stage, source: Path, out: Path, tokens: Path | None = None) -> Path:
    out.mkdir()
    scratch = out.with_name(f"{out.name}.scratch")
    scratch.mkdir(exist_ok=True)
    context = Context(scratch, threads=1, calibration=tokens)
    result = stage.run(Artifact(source, "checkpoint", KEY), out, context)
    write_manifest(out, Manifest("checkpoint", KEY, result["spec"].to_json(), report=result["report"]))
    return out


def eager(folder: Path, batch: int = 1) -> Session:
    made = Eager().run(Artifact(folder, "checkpoint", KEY), _new(folder, "program"), Context(folder.parent, threads=1))
    return Eager.load(folder, made["traits"]).open(batch, 64)


def _new(folder: Path, name: str) -> Path:
    found = folder.with_name(f"{folder.name}-{name}-{len(list(folder.parent.iterdir()))}")
    found.mkdir()
    return found


def transformers_cache(folder: Path, ids: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values (B, N, T, D) of each layer, as transformers caches them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        cache = model(torch.as_tensor(ids), use_cache=True).past_key_values
    return [(x.keys, x.values) for x in cache.layers]


def turned(keys: torch.Tensor, layer: LayerSpec, context: int) -> torch.Tensor:
    """Cached keys (B, N, T, D) turned on by rope from their places to places all over the context."""
    if layer.rope is None:
        return keys
    places = torch.arange(keys.shape[2])
    further = places * (context // len(places)) - places
    half = len(layer.rope.inv_freq)
    pairs = torch.complex(keys[..., :half].double(), keys[..., half : 2 * half].double())
    pairs = pairs * torch.exp(1j * further[:, None] * torch.tensor(layer.rope.inv_freq, dtype=torch.float64))
    return torch.cat((pairs.real.float(), pairs.imag.float(), keys[..., 2 * half :]), -1)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "phi3"])
def test_scales_follow_from_the_largest_value_in_the_cache_of_transformers(
    family: str, tmp_path: Path, tokens: Path
) -> None:
    changes = {"sliding_window": None} if family == "phi3" else {}
    source = tiny_folder(tmp_path / "source", family, **changes)
    out = run(KvCache(format="int8", keys="channel", values="head", clip=False), source, tmp_path / "out", tokens)
    stored, spec = load_file(out / "model.safetensors"), read_spec(source)
    for layer, (keys, values) in zip(spec.layers, transformers_cache(source, np.load(tokens)), strict=True):
        keys = turned(keys, layer, spec.max_positions)
        for part, largest in (
            ("k", keys.abs().amax((0, 2))[:, None]),
            ("v", values.abs().amax((0, 2, 3))[:, None, None]),
        ):
            scale = stored[f"{layer.attention}.{part}_scale"]
            assert scale.dtype == torch.bfloat16
            exact = largest / 127.5
            assert bool((scale.float() >= exact * (1 - 1e-4)).all())
            assert bool((scale.float() <= exact * (1 + 2**-7)).all())


def test_a_scale_that_fits_is_the_smallest_that_does() -> None:
    largest = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 30 + 0.1
    for form, end in LARGEST.items():
        scale = fitting_scale(largest, form)
        assert torch.equal(scale, scale.to(torch.bfloat16).float())
        assert bool((scale * end >= largest * (1 - 1e-6)).all())
        smaller = (scale * (1 - 2**-7.5)).to(torch.bfloat16).float()
        assert bool((smaller * end < largest).all())


@pytest.mark.parametrize("kind", ["tensor", "head", "channel"])
@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_a_clipped_scale_is_the_best_of_those_tried(form: Any, kind: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 2, 9, 6, generator=generator) ** 3
    weight = torch.rand(2, 1, 6, generator=generator)
    largest = share(x.abs().amax((0, 2))[:, None], kind, "amax")
    scale, error = fit(list(x.split(3)), largest, weight, form, kind, SHRINKS)
    total = 0.0
    for index in np.ndindex(*scale.shape):
        picked = torch.zeros(2, 1, 6, dtype=torch.bool)
        picked[
            tuple(slice(None) if n == 1 and m > 1 else i for i, n, m in zip(index, scale.shape, (2, 1, 6), strict=True))
        ] = True
        losses = []
        for shrink in SHRINKS:
            tried = (fitting_scale(largest, form)[index] * shrink).to(torch.bfloat16).float()
            lost = (decode(encode(x, tried, form), tried, form) - x).double() ** 2 * weight
            losses.append((float((lost * picked).sum()), float(tried)))
        assert float(scale[index]) == min(losses)[1]
        total += min(losses)[0]
    assert float(error) == pytest.approx(total / float((x.double() ** 2 * weight).sum()), rel=1e-5)
    assert form != "int4" or kind == "channel" or bool((scale < fitting_scale(largest, form)).any())


def test_the_energy_of_queries_is_summed_over_the_heads_that_share_a_key() -> None:
    q, k = torch.randn(2, 6, 5, 4, generator=torch.Generator().manual_seed(2)), torch.ones(2, 2, 5, 4)
    *_, energy = observe([(q[:1], k[:1], k[:1]), (q[1:], k[1:], k[1:])])
    for head in range(2):
        for d in range(4):
            expected = sum(float(x) ** 2 for x in q[:, 3 * head : 3 * head + 3, :, d].flatten())
            assert float(energy[head, 0, d]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_folder_tells_its_cache_without_strop_json(choice: CacheQuantization, tmp_path: Path, tokens: Path) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    stage = KvCache(format=choice.format, keys=choice.keys, values=choice.values)
    out = run(stage, source, tmp_path / "out", tokens)
    planned = stage.plan(read_spec(source), SAMPLES * LENGTH)
    check_checkpoint(Artifact(out, "checkpoint", KEY), Artifact(source, "checkpoint", KEY))
    (out / "strop.json").unlink()
    found = read_spec(out)
    assert found == planned.spec
    assert found.kv_cache == choice
    assert ModelSpec.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert found.size_bytes() == planned.size_bytes


COMMON = [("int8", "head"), ("int4", "head"), ("fp8", "tensor"), ("fp8", "head")]


@pytest.mark.parametrize(("form", "kind"), COMMON)
def test_compressed_tensors_rounds_to_the_same_values(form: Any, kind: Any) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    scheme = cache_scheme(CacheQuantization(form, kind, kind))
    assert scheme is not None
    x = torch.randn(2, 3, 40, 16, generator=torch.Generator().manual_seed(3))
    scale = fitting_scale(share(x.abs().amax((0, 2))[:, None], kind, "amax"), form) * 0.7
    stored = scale.reshape((1,) if kind == "tensor" else (3, 1, 1))
    zero = torch.zeros(stored.shape, dtype=torch.float32)
    theirs = fake_quantize(x, stored, zero, QuantizationArgs.model_validate(scheme))
    torch.testing.assert_close(decode(encode(x, scale, form), scale, form), theirs)


@pytest.mark.parametrize(("form", "kind"), COMMON)
@pytest.mark.parametrize("packs", [False, True])
def test_transformers_opens_the_folder(form: Any, kind: Any, packs: bool, tmp_path: Path, tokens: Path) -> None:
    from compressed_tensors.quantization.lifecycle.initialize import is_cached_attention_module
    from transformers import AutoModelForCausalLM

    source = tiny_folder(tmp_path / "source", "llama")
    if packs:
        source = run(Rtn(bits=4, group_size=16), source, tmp_path / "packed")
    out = run(KvCache(format=form, keys=kind, values=kind), source, tmp_path / "out", tokens)
    ids = random_ids(1, 20, seed=4)
    rounded, plain = (eager(x).step(ids, logits="all")[0].copy() for x in (out, source))
    assert np.abs(plain - rounded).mean() > 1e-3
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.inference_mode():
        theirs = model(torch.as_tensor(ids)).logits[0].float().numpy()
    # compressed-tensors 0.20 looks for an argument that transformers 5.24 renamed, and then keeps floats
    rounds = any(map(is_cached_attention_module, model.modules()))
    np.testing.assert_allclose(theirs, rounded if rounds else plain, atol=1e-4)


def test_scales_that_no_scheme_names_leave_the_folder_open_to_transformers(tmp_path: Path, tokens: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = tiny_folder(tmp_path / "source", "llama")
    out = run(KvCache(keys="channel", values="head"), source, tmp_path / "out", tokens)
    ids = torch.as_tensor(random_ids(1, 9))
    one, two = (AutoModelForCausalLM.from_pretrained(x, dtype=torch.float32) for x in (source, out))
    with torch.inference_mode():
        torch.testing.assert_close(two(ids).logits, one(ids).logits)


@pytest.mark.parametrize("weights", [Rtn(group_size=16), Gptq(group_size=16)], ids=lambda x: type(x).__name__)
def test_weights_may_be_quantized_before_or_after(weights: Stage, tmp_path: Path, tokens: Path) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    cache = KvCache()
    before = run(cache, run(weights, source, tmp_path / "w", tokens), tmp_path / "wc", tokens)
    after = run(weights, run(cache, source, tmp_path / "c", tokens), tmp_path / "cw", tokens)
    assert read_spec(before) == read_spec(after)
    one, two = (load_file(x / "model.safetensors") for x in (before, after))
    assert one.keys() == two.keys()
    for name in one:
        if not name.endswith(("k_scale", "v_scale")):
            assert torch.equal(one[name], two[name])
    check_checkpoint(Artifact(after, "checkpoint", KEY), Artifact(tmp_path / "c", "checkpoint", KEY))


def test_only_layers_that_own_keys_have_scales(tmp_path: Path, tokens: Path) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    spec = read_spec(source)
    linears = {role: x for role, x in spec.layers[2].linears.items() if role not in ("k", "v")}
    sharing = dataclasses.replace(spec.layers[2], linears=linears, kv_from_layer=0)
    shared = dataclasses.replace(spec, layers=(*spec.layers[:2], sharing))
    folder = tmp_path / "shared"
    folder.mkdir()
    save_checkpoint(folder, shared, source, [])
    with_spec(folder, shared)
    out = run(KvCache(format="int4"), folder, tmp_path / "out", tokens)
    scales = {x for x in load_file(out / "model.safetensors") if x.endswith("_scale")}
    assert scales == {f"model.layers.{i}.self_attn.{x}_scale" for i in (0, 1) for x in "kv"}
    eager(out, 2).step(random_ids(2, 9))


def test_a_killed_run_goes_on_after_the_layers_it_finished(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    whole = run(KvCache(), source, tmp_path / "whole", tokens)
    solve, solved = KvCache.solve, []

    def dying(self: KvCache, stream: Any) -> Any:
        solved.append(stream.layer.spec.attention)
        if len(solved) == 2:
            raise KeyboardInterrupt
        return solve(self, stream)

    monkeypatch.setattr(KvCache, "solve", dying)
    with pytest.raises(KeyboardInterrupt):
        run(KvCache(), source, tmp_path / "out", tokens)
    (tmp_path / "out").rmdir()
    again = run(KvCache(), source, tmp_path / "out", tokens)
    assert len(solved) == 4
    assert (again / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_scales_by_token_need_nothing_stored(tmp_path: Path, tokens: Path) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    out = run(KvCache(keys="token", values="token"), source, tmp_path / "out", tokens)
    assert not any(x.endswith("_scale") for x in load_file(out / "model.safetensors"))
    found, plain = (eager(x).step(random_ids(1, 20), logits="all") for x in (out, source))
    assert 0 < np.abs(found - plain).mean() < 0.05 * np.abs(plain).mean()


def test_what_cannot_be_is_one_line(tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source", "llama"))
    done = KvCache(format="fp8").plan(spec, 0).spec
    with pytest.raises(UserError, match="kept in fp8 already"):
        KvCache().plan(done, 0)
    for stage in (Awq(group_size=16), SmoothQuant(), Rotate()):
        with pytest.raises(UserError, match="calibrated: put kv_cache after it"):
            stage.plan(done, 0)
    odd = dataclasses.replace(spec, layers=tuple(dataclasses.replace(x, head_dim=15) for x in spec.layers))
    with pytest.raises(UserError, match="heads of layer 0 are 15 wide; allowed here: int8, fp8"):
        KvCache(format="int4").plan(odd, 0)
    with pytest.raises(UserError, match="not a known family"):
        KvCache().plan(dataclasses.replace(spec, opaque_bytes=1), 0)


@pytest.mark.parametrize(
    "scheme",
    [
        {"num_bits": 8, "type": "int", "symmetric": False},
        {"num_bits": 2, "type": "int"},
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {"num_bits": 8, "type": "float", "dynamic": True},
    ],
    ids=str,
)
def test_a_scheme_that_is_not_known_is_one_line(scheme: dict[str, Any], tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"kv_cache_scheme .* is not supported; allowed: symmetric, static, int of 8"):
        read_spec(source)


def test_conformance_finds_lost_and_empty_scales(tmp_path: Path, tokens: Path) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    out = run(KvCache(), source, tmp_path / "out", tokens)
    whole = load_file(out / "model.safetensors")
    name = "model.layers.1.self_attn.k_scale"
    for change, message in ((None, f"{name} is missing"), (0.0, f"{name} is not positive")):
        tensors = dict(whole)
        if change is None:
            del tensors[name]
        else:
            tensors[name] = tensors[name] * change
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConformanceError, match=message):
            check_checkpoint(Artifact(out, "checkpoint", KEY), Artifact(source, "checkpoint", KEY))


def test_quantized_weights_are_what_is_calibrated_on(tmp_path: Path, tokens: Path) -> None:
    source = tiny_folder(tmp_path / "source", "llama")
    small = quantized(source, tmp_path / "small", Quantization(2, 16, True))
    stage = KvCache(keys="head", clip=False)
    one, two = (
        load_file(run(stage, x, tmp_path / f"{x.name}-c", tokens) / "model.safetensors") for x in (source, small)
    )
    name = "model.layers.2.self_attn.k_scale"
    assert not torch.equal(one[name], two[name])
