"""SmoothQuant: scales against a slow formula, a fold that changes nothing, and the stage with what it rounds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from references import VOCAB_SIZE, tiny_folder
from safetensors.torch import load_file, save_file
from torch import Tensor

from strop.artifact import Artifact, Manifest, hash_file, list_files, write_manifest
from strop.conformance import check_checkpoint
from strop.errors import UserError
from strop.layers import round_inputs
from strop.methods._folding import Fold
from strop.methods.gptq import Gptq
from strop.methods.rtn import Rtn
from strop.methods.smoothquant import ALPHAS, QUIETEST, SmoothQuant, observe, rounded_outputs, smoothing
from strop.model import Weights, load_decoder, load_linear, load_packed, read_spec
from strop.numerics import dequantize, find_scales, quantize, static_scale
from strop.spec import Linear, Norm, Quantization
from strop.stage import Context

KEY = "0" * 64
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "smollm3", "gpt2"]
W8 = Quantization(8, None, True)
IDS = torch.randint(2, VOCAB_SIZE, (2, 20), generator=torch.Generator().manual_seed(5))


# Maths.


def loud(tokens: int, width: int, seed: int) -> Tensor:
    """Inputs (tokens, width) of which a few are much louder than the others, as the papers tell of language models."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator)
    x[:, torch.randperm(width, generator=generator)[: width // 16 + 1]] *= 40
    return x


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_scales_are_those_of_the_paper(alpha: float) -> None:
    x, weight = loud(50, 24, 0), torch.randn(7, 24, generator=torch.Generator().manual_seed(1))
    found = smoothing(x.abs().amax(0), weight, Fold(Norm("norm", 24, "rms", 1e-5), 24), alpha)
    slow = [
        max(abs(float(v)) for v in x[:, j]) ** alpha / max(abs(float(v)) for v in weight[:, j]) ** (1 - alpha)
        for j in range(24)
    ]
    torch.testing.assert_close(found, torch.tensor(slow) / max(slow))


def test_query_heads_that_read_the_same_value_share_the_scale_of_the_loudest() -> None:
    heads, kv_heads, width = 6, 2, 5
    fold = Fold(Linear("v", 48, 10), 10, 0, width, heads // kv_heads)
    largest = torch.rand(30, generator=torch.Generator().manual_seed(0))
    for kv_head in range(kv_heads):
        for i in range(width):
            loudest = max(float(largest[(3 * kv_head + j) * width + i]) for j in range(3))
            assert float(fold.largest(largest)[kv_head * width + i]) == pytest.approx(loudest)


def test_silent_inputs_and_empty_weights_keep_a_scale() -> None:
    x, weight = loud(50, 32, 0), torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
    x[:, 3], weight[:, 4] = 0, 0
    scales = smoothing(x.abs().amax(0), weight, Fold(Norm("norm", 32, "rms", 1e-5), 32), 0.5)
    assert bool(((scales > 0) & scales.isfinite()).all())
    assert float(scales[3]) >= QUIETEST**0.5 * float(scales.median()) / 10


def test_outputs_of_rounded_weights_and_inputs_are_those_of_a_slow_product() -> None:
    x, weight = loud(5, 24, 0), torch.randn(3, 24, generator=torch.Generator().manual_seed(1))
    scale, zero = find_scales(weight, W8)
    dense = dequantize(quantize(weight, scale, zero, 8), scale, zero).double()
    for static in (None, static_scale(x.abs().amax(0))):
        found = rounded_outputs(weight, x, static)
        for t in range(5):
            step = float(x[t].abs().max() / 127.5) if static is None else float(static)
            codes = torch.tensor([min(max(round(float(v) / step), -128), 127) for v in x[t]])
            torch.testing.assert_close(found[t].double(), dense @ (codes.double() * step), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("is_static", [False, True])
def test_loud_inputs_lose_less_when_they_are_smoothed(is_static: bool) -> None:
    for seed in range(5):
        x, weight = loud(200, 64, seed), torch.randn(20, 64, generator=torch.Generator().manual_seed(seed))
        s = smoothing(x.abs().amax(0), weight, Fold(Norm("norm", 64, "rms", 1e-5), 64), 0.5)
        lost = []
        for k in (torch.ones(64), s):
            step = static_scale((x / k).abs().amax(0)) if is_static else None
            lost.append((rounded_outputs(weight * k, x / k, step) - x @ weight.T).square().mean())
        assert lost[1] < 0.5 * lost[0]


def test_what_is_observed_is_that_of_all_batches() -> None:
    x = loud(100, 16, 0)
    sample = torch.tensor([0, 5, 39, 40, 41, 99])
    largest, taken = observe(iter((x[:40], x[40:41], x[41:])), sample)
    assert torch.equal(largest, x.abs().amax(0))
    assert torch.equal(taken, x[sample])


# The stage.


@pytest.fixture
def source(tmp_path: Path) -> Artifact:
    return Artifact(make_loud(tiny_folder(tmp_path / "source")), "checkpoint", KEY)


def make_loud(folder: Path) -> Path:
    """Gains as uneven as trained models have them."""
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    for name in sorted(tensors):
        if name.endswith(("layernorm.weight", "ln_1.weight", "ln_2.weight")):
            tensors[name] = (tensors[name] * torch.exp(torch.randn(tensors[name].shape, generator=generator))).to(
                tensors[name].dtype
            )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def context(folder: Path, **fields: Any) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.parent / "tokens.npy"
    if not path.exists():
        np.save(path, np.random.default_rng(0).integers(2, 300, (6, 16)))
    return Context(scratch=folder, threads=1, calibration=path, **fields)


def run(stage: Any, source: Artifact, place: Path, **fields: Any) -> tuple[Path, dict[str, Any]]:
    out = place / "out"
    out.mkdir(parents=True)
    result = stage.run(source, out, context(place / "scratch", **fields))
    write_manifest(out, Manifest("checkpoint", KEY, result["spec"].to_json(), report=result["report"]))
    return out, result


def logits(folder: Path, ids: Tensor = IDS, *, rounds: bool = True) -> Tensor:
    """Of every token."""
    decoder = load_decoder(folder)
    round_inputs(decoder, rounds=rounds)
    with torch.no_grad():
        x = decoder.embed(ids, torch.arange(ids.shape[1]).expand(ids.shape))
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        for index in range(len(decoder.layers)):
            x = decoder.block(index, x, kept=kept)
        return decoder.logits(x)


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest, by the root mean square of what is expected."""
    return float((found - expected).abs().max() / expected.square().mean().sqrt())


def divergence(parent: Tensor, other: Tensor) -> float:
    """Mean KL of logits, nats."""
    p, q = parent.log_softmax(-1), other.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(
    "fields", [{"alpha": 1.5}, {"alpha": "auto"}, {"activations": "none"}, {"bits": 8}, {"targets": []}]
)
def test_unknown_values_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SmoothQuant.model_validate(fields)


@pytest.mark.parametrize("alpha", [0.5, 0.8, None])
@pytest.mark.parametrize("family", FAMILIES)
def test_smoothing_changes_nothing_that_the_model_computes(family: str, alpha: float | None, tmp_path: Path) -> None:
    source = Artifact(make_loud(tiny_folder(tmp_path / "source", family)), "checkpoint", KEY)
    stage = SmoothQuant(alpha=alpha, activations=None)
    out, result = run(stage, source, tmp_path)
    assert result["spec"] == stage.plan(read_spec(source.path), 96).spec == read_spec(source.path)
    assert difference(logits(out), logits(source.path)) < 1e-4
    before, after = load_file(source.path / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    if alpha is not None:
        scaled = sum(not torch.equal(before[x], after[x]) for x in before if before[x].ndim == 2)
        assert scaled == len(read_spec(source.path).match(None)) - 3 * (family == "gpt2")


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_the_checkpoint_holds_what_was_planned(source: Artifact, tmp_path: Path, activations: Any) -> None:
    stage = SmoothQuant(alpha=0.5, activations=activations)
    plan = stage.plan(read_spec(source.path), 96)
    assert plan.notes == ()
    out, result = run(stage, source, tmp_path)
    assert result["spec"] == plan.spec == read_spec(out)
    names = [x.name for x in read_spec(source.path).match(None)]
    report = result["report"]
    assert list(report["alpha"].items()) == [(x, 0.5) for x in names]
    assert list(report["relative_error"]) == names
    assert all(0 < x < 0.01 for x in report["relative_error"].values())
    assert (report["unscaled"], report["without_inputs"]) == ({}, [])
    write_manifest(source.path, Manifest("checkpoint", KEY, read_spec(source.path).to_json()))
    check_checkpoint(Artifact(out, "checkpoint", KEY), source)
    assert sum(x.nbytes for x in load_file(out / "model.safetensors").values()) == plan.size_bytes


def test_codes_are_those_of_the_smoothed_model_rounded_to_nearest(source: Artifact, tmp_path: Path) -> None:
    smoothed, _ = run(SmoothQuant(activations=None), source, tmp_path / "smoothed")
    chained, _ = run(
        Rtn(bits=8, group_size=None, activations="dynamic"), Artifact(smoothed, "checkpoint", KEY), tmp_path / "chained"
    )
    out, _ = run(SmoothQuant(), source, tmp_path / "whole")
    one, two = (load_file(x / "model.safetensors") for x in (chained, out))
    assert one.keys() == two.keys()
    for name in one:
        apart = float((one[name].float() - two[name].float()).abs().max())
        assert apart <= (1 if one[name].dtype == torch.int8 else 0.01 * float(one[name].float().abs().max())), name


def test_static_scales_cover_the_calibrated_inputs(source: Artifact, tmp_path: Path) -> None:
    out, _ = run(SmoothQuant(alpha=0.5, activations="static"), source, tmp_path / "static")
    smoothed, _ = run(SmoothQuant(alpha=0.5, activations=None), source, tmp_path / "smoothed")
    spec, decoder = read_spec(out), load_decoder(smoothed)
    seen: dict[str, float] = {}
    for linear in spec.match(None):
        decoder.linear(linear.name).register_forward_pre_hook(
            lambda _, x, name=linear.name: seen.update({name: float(x[0].abs().max())})
        )
    ids = torch.from_numpy(np.load(tmp_path / "static" / "tokens.npy"))
    with torch.no_grad():
        x = decoder.embed(ids, torch.arange(ids.shape[1]).expand(ids.shape))
        for index in range(len(decoder.layers)):
            x = decoder.block(index, x)
    with Weights(out) as weights:
        for name, largest in seen.items():
            assert float(weights.load(f"{name}.input_scale")) * 127.5 == pytest.approx(largest, rel=0.005)


def test_the_model_stays_closer_to_its_parent_than_without_smoothing(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "source", seed=1)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("layernorm.weight"):
            tensors[name][::16] *= 40
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            tensors[name][:, ::16] /= 40
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = Artifact(folder, "checkpoint", KEY)
    out, _ = run(SmoothQuant(alpha=0.5), source, tmp_path / "smooth")
    searched, _ = run(SmoothQuant(alpha=None), source, tmp_path / "searched")
    rounded, _ = run(Rtn(bits=8, group_size=None, activations="dynamic"), source, tmp_path / "rounded")
    parent = logits(folder)
    lost, least, before = (divergence(parent, logits(x)) for x in (out, searched, rounded))
    assert lost < 0.7 * before
    assert least < 0.7 * before


def test_a_search_takes_no_scales_where_they_do_not_help(tmp_path: Path) -> None:
    source = Artifact(tiny_folder(tmp_path / "source"), "checkpoint", KEY)
    _, result = run(SmoothQuant(alpha=None), source, tmp_path / "searched")
    _, fixed = run(SmoothQuant(alpha=0.9), source, tmp_path / "fixed")
    searched, other = (x["report"]["relative_error"] for x in (result, fixed))
    for site in read_spec(source.path).layers[0].groups():
        names = [x.name for x in site]
        assert max(searched[x] for x in names) <= max(other[x] for x in names) * 1.5
    assert set(result["report"]["alpha"].values()) <= {None, *ALPHAS}


def test_bfloat16_models_stay_the_same_within_its_rounding(tmp_path: Path) -> None:
    source = Artifact(make_loud(tiny_folder(tmp_path / "source", "gemma2", dtype="bfloat16")), "checkpoint", KEY)
    out, _ = run(SmoothQuant(activations=None), source, tmp_path)
    assert divergence(logits(source.path).float(), logits(out).float()) < 1e-3


def test_gpt2s_unscaled_linears_are_in_the_report_and_in_the_plan(tmp_path: Path) -> None:
    source = Artifact(tiny_folder(tmp_path / "source", "gpt2"), "checkpoint", KEY)
    plan = SmoothQuant().plan(read_spec(source.path), 96)
    assert plan.notes == (
        "smoothquant: the input of transformer.h.0.mlp.c_proj and 2 more is not scaled: it comes from an activation, "
        "which no scale passes through",
    )
    out, result = run(SmoothQuant(), source, tmp_path)
    assert list(result["report"]["unscaled"]) == [f"transformer.h.{i}.mlp.c_proj" for i in range(3)]
    assert divergence(logits(source.path), logits(out)) < 0.01


def test_linears_beside_the_targets_are_scaled_and_stay_unquantized(source: Artifact, tmp_path: Path) -> None:
    out, result = run(SmoothQuant(alpha=0.5, targets=["*.1.*.q_proj"]), source, tmp_path)
    assert [x.name for x in result["spec"].linears() if x.quantization] == ["model.layers.1.self_attn.q_proj"]
    before, after = load_file(source.path / "model.safetensors"), load_file(out / "model.safetensors")
    changed = {x for x in before.keys() & after.keys() if not torch.equal(before[x].float(), after[x].float())}
    attention = "model.layers.1.self_attn"
    assert changed == {
        f"{attention}.q_proj.weight", f"{attention}.k_proj.weight", f"{attention}.v_proj.weight",
        "model.layers.1.input_layernorm.weight",
    }  # fmt: skip
    assert divergence(logits(source.path), logits(out)) < 1e-3


def test_later_stages_round_what_was_smoothed(source: Artifact, tmp_path: Path) -> None:
    smoothed, _ = run(SmoothQuant(activations=None), source, tmp_path / "smoothed")
    out, result = run(Gptq(bits=8, group_size=16), Artifact(smoothed, "checkpoint", KEY), tmp_path / "gptq")
    assert {x.quantization for x in result["spec"].match(None)} == {Quantization(8, 16, True)}
    assert divergence(logits(source.path), logits(out)) < 5e-3


def test_a_tied_head_is_rounded_without_scales(source: Artifact, tmp_path: Path) -> None:
    out, result = run(SmoothQuant(targets=["lm_head"]), source, tmp_path)
    assert result["report"]["unscaled"] == {"lm_head": "the head is tied to the embedding"}
    with Weights(out) as weights, Weights(source.path) as before:
        original = load_linear(before, read_spec(source.path).head)
        torch.testing.assert_close(load_linear(weights, result["spec"].head), original, atol=0.02, rtol=0)
        assert load_packed(weights, result["spec"].head)[0].dtype == torch.int8


def test_equal_work_gives_equal_bytes_and_goes_on_where_it_was_stopped(source: Artifact, tmp_path: Path) -> None:
    expected, report = run(SmoothQuant(alpha=None), source, tmp_path / "whole")

    def interrupt(label: str, done: int, total: int) -> None:
        if done >= 9:
            raise KeyboardInterrupt

    place = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        run(SmoothQuant(alpha=None), source, place, progress=interrupt)
    shutil.rmtree(place / "out")
    kept = {x: x.stat().st_mtime_ns for x in (place / "scratch").iterdir()}
    assert kept
    found, again = run(SmoothQuant(alpha=None), source, place)
    assert {x.name: hash_file(x) for x in list_files(found)} == {x.name: hash_file(x) for x in list_files(expected)}
    assert again == report
    assert {x: x.stat().st_mtime_ns for x in kept} == kept


def change_norm(folder: Path, layer: int, value: float) -> None:
    """Set the weights of a layer's first norm: what its q, k and v read."""
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.{layer}.input_layernorm.weight"].fill_(value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_linears_without_inputs_are_reported(source: Artifact, tmp_path: Path, activations: Any) -> None:
    change_norm(source.path, 1, 0.0)
    out, result = run(SmoothQuant(activations=activations), source, tmp_path)
    assert result["report"]["without_inputs"] == [f"model.layers.1.self_attn.{x}_proj" for x in "qkvo"]
    assert divergence(logits(source.path), logits(out)) < 0.05


def test_inputs_that_are_not_finite_are_refused_with_the_place(source: Artifact, tmp_path: Path) -> None:
    change_norm(source.path, 1, float("nan"))
    with pytest.raises(UserError, match=r"smoothquant: model\.layers\.1\.self_attn\.q_proj.*not finite"):
        run(SmoothQuant(), source, tmp_path)


def test_quantizing_twice_is_refused(source: Artifact, tmp_path: Path) -> None:
    out, _ = run(SmoothQuant(), source, tmp_path)
    with pytest.raises(UserError, match="already quantized to 8 bits"):
        SmoothQuant().plan(read_spec(out), 0)
