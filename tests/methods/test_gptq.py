"""GPTQ: the fast form against the textbook's, its properties, and the stage with its resume."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from references import VOCAB_SIZE, slow_e2m1, slow_e4m3, slow_gptq, tiny_folder, tiny_model
from torch import Tensor

from strop import numerics
from strop.artifact import Artifact, hash_file, list_files
from strop.calibration.capture import drift
from strop.errors import UserError
from strop.methods._compensation import Compensation, choose_codes, correct_drift, inverse_factor, relative_error
from strop.methods.gptq import Gptq
from strop.model import Weights, load_linear, load_packed, read_spec
from strop.spec import FIXED_FORMATS, NumberFormat, Quantization
from strop.stage import Context

KEY = "0" * 64
FORM = Quantization(4, 16, True)
FIXED = [Quantization(x.bits, x.group_size, True, format=name) for name, x in FIXED_FORMATS.items()]


def correlated(tokens: int, width: int, seed: int) -> Tensor:
    """Inputs with strong correlations and uneven energy, as layers see them: (tokens, width)."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator) / width**0.5 + 0.5 * torch.eye(width)
    energy = torch.rand(width, generator=generator) * 2 + 0.1
    return torch.randn(tokens, width, generator=generator) @ mixing * energy


def damped(x: Tensor, damping: float = 0.01) -> Tensor:
    """2 xᵀx / tokens with its diagonal raised."""
    h = 2 * x.T @ x / len(x)
    return h + damping * h.diagonal().mean() * torch.eye(len(h))


def problem(out: int, width: int, q: Quantization, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W, inputs, s and z."""
    weight = torch.randn(out, width, generator=torch.Generator().manual_seed(seed + 100))
    return weight, correlated(300, width, seed), *numerics.find_scales(weight, q)


def gptq(
    weight: Tensor, h: Tensor, scale: Tensor, zero: Tensor, bits: int, order: Tensor, format: NumberFormat = "int"
) -> Tensor:
    factor = inverse_factor(h[order][:, order], 1e-9)
    assert factor is not None
    return choose_codes(weight, factor, scale, zero, bits, order, format)


@pytest.mark.parametrize("is_ordered", [True, False])
@pytest.mark.parametrize(
    ("bits", "group_size", "symmetric", "width"),
    [(4, 16, True, 80), (3, None, True, 37), (2, 10, False, 70), (8, 16, False, 48)],
)
def test_codes_equal_the_textbooks(
    bits: int, group_size: int | None, symmetric: bool, width: int, is_ordered: bool
) -> None:
    weight, x, scale, zero = problem(13, width, Quantization(bits, group_size, symmetric))
    h = damped(x)
    order = h.diagonal().argsort(descending=True) if is_ordered else torch.arange(width)
    fast = gptq(weight, h, scale, zero, bits, order)
    slow = slow_gptq(weight, h + 1e-9 * h.diagonal().mean() * torch.eye(width), scale, zero, bits, order.tolist())
    # float32 against float64: a value half way between two codes may go either way, and a row differs from there on.
    assert (fast != slow).any(1).sum() <= 1


@pytest.mark.parametrize("q", FIXED, ids=str)
def test_codes_of_other_formats_equal_the_textbooks(q: Quantization) -> None:
    weight, x, scale, zero = problem(7, 64, q)
    h, order = damped(x), torch.arange(64)
    fast = gptq(weight, h, scale, zero, q.bits, order, q.format)
    table = {"fp8": slow_e4m3(), "nf4": list(numerics.NF4), "llm_int8": [float(x) for x in range(-127, 128)]}
    values = table.get(q.format, [2 * x for x in slow_e2m1()])
    ridge = h + 1e-9 * h.diagonal().mean() * torch.eye(64)
    slow = slow_gptq(weight, ridge, scale, zero, q.bits, order.tolist(), values)
    assert ((fast.double() - slow).abs() > 1e-6).any(1).sum() <= 1


@pytest.mark.parametrize("q", FIXED, ids=str)
def test_gptq_beats_rounding_in_every_format(q: Quantization) -> None:
    for seed in range(3):
        weight, x, scale, zero = problem(24, 64, q, seed)
        h = damped(x)
        rounded = numerics.dequantize(numerics.quantize(weight, scale, zero, q.bits, q.format), scale, zero)
        codes = gptq(weight, h, scale, zero, q.bits, h.diagonal().argsort(descending=True), q.format)
        found = numerics.dequantize(codes, scale, zero)
        lost, before = (((weight - y) @ x.T).square().sum() for y in (found, rounded))
        assert lost < 0.9 * before


@pytest.mark.parametrize("width", [1, 5, 33, 64])
def test_inverse_factor_is_the_upper_factor_of_the_inverse(width: int) -> None:
    x = correlated(200, width, seed=3)
    h = 2 * x.T @ x / len(x)
    factor = inverse_factor(h, 0.05)
    assert factor is not None
    assert torch.equal(factor, factor.triu())
    expected = torch.linalg.inv(damped(x, 0.05).double())
    torch.testing.assert_close(factor.T.double() @ factor.double(), expected, atol=1e-4, rtol=1e-4)


def test_inverse_factor_of_a_singular_hessian_is_none() -> None:
    x = correlated(3, 20, seed=0)
    assert inverse_factor(x.T @ x, 1e-30) is None
    assert inverse_factor(x.T @ x, 0.01) is not None


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_beats_rounding_on_correlated_inputs(bits: int, symmetric: bool) -> None:
    for seed in range(5):
        q = Quantization(bits, 16, symmetric)
        weight, x, scale, zero = problem(24, 48, q, seed)
        h = damped(x)
        rounded = numerics.dequantize(numerics.quantize(weight, scale, zero, bits), scale, zero)
        for order in (torch.arange(48), h.diagonal().argsort(descending=True)):
            codes = gptq(weight, h, scale, zero, bits, order)
            found = numerics.dequantize(codes, scale, zero)
            lost, before = (((weight - y) @ x.T).square().sum() for y in (found, rounded))
            assert lost < 0.9 * before


def test_a_weight_on_the_grid_comes_back_exactly() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (9, 48), generator=generator, dtype=torch.int8)
    codes[:, ::16] = -8  # each group's extreme sits on the lowest code, where `find_scales` puts it
    scale = numerics.round_scales(torch.randn(9, 3, generator=generator))
    zero = torch.zeros(9, 3, dtype=torch.int8)
    weight = numerics.dequantize(codes, scale, zero)
    solution = Compensation()._solve(weight, damped(correlated(100, 48, 0)), None, FORM, "here")
    assert torch.equal(numerics.dequantize(solution.codes, solution.scale, solution.zero), weight)


def test_uncorrelated_inputs_are_rounded_to_nearest_in_any_order() -> None:
    weight, _, scale, zero = problem(7, 48, Quantization(4, 16, True))
    h = torch.diag(torch.rand(48, generator=torch.Generator().manual_seed(0)) + 0.1)
    expected = numerics.quantize(weight, scale, zero, 4)
    for order in (torch.arange(48), h.diagonal().argsort(descending=True)):
        assert torch.equal(gptq(weight, h, scale, zero, 4, order), expected)


def test_with_act_order_the_order_of_the_inputs_does_not_matter() -> None:
    weight, x, scale, zero = problem(7, 40, Quantization(4, None, True))
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    h = damped(x)
    other = h[shuffled][:, shuffled]
    first = gptq(weight, h, scale, zero, 4, h.diagonal().argsort(descending=True))
    second = gptq(weight[:, shuffled], other, scale, zero, 4, other.diagonal().argsort(descending=True))
    assert torch.equal(first[:, shuffled], second)


def test_rows_are_independent() -> None:
    weight, x, scale, zero = problem(6, 48, Quantization(4, 16, True))
    order = damped(x).diagonal().argsort(descending=True)
    together = gptq(weight, damped(x), scale, zero, 4, order)
    alone = [gptq(weight[i : i + 1], damped(x), scale[i : i + 1], zero[i : i + 1], 4, order) for i in range(6)]
    assert torch.equal(together, torch.cat(alone))


def test_inputs_that_are_always_zero_keep_their_nearest_codes() -> None:
    x = correlated(100, 48, 0)
    dead = torch.tensor([3, 17, 40])
    x[:, dead] = 0
    weight = torch.randn(9, 48, generator=torch.Generator().manual_seed(2))
    solution = Compensation()._solve(weight, 2 * x.T @ x / len(x), None, FORM, "here")
    nearest = numerics.quantize(weight, solution.scale, solution.zero, 4)
    assert torch.equal(solution.codes[:, dead], nearest[:, dead])
    assert not torch.equal(solution.codes, nearest)


def test_corrected_weights_are_the_least_squares_solution() -> None:
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(300, 30, generator=generator) for _ in range(2))
    before = 1.1 * x + 0.3 * noise
    weight = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    h = 2 * x.T @ x / len(x)
    order = h.diagonal().argsort(descending=True)
    factor = inverse_factor(h[order][:, order], 1e-9)
    assert factor is not None
    found = correct_drift(weight, drift([(before, x)]), factor, order)
    expected = torch.linalg.lstsq(x, before @ weight.T).solution.T
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert torch.equal(correct_drift(weight, drift([(x, x)]), factor, order), weight)


# The stage.


@pytest.fixture
def source(tmp_path: Path) -> Artifact:
    return Artifact(tiny_folder(tmp_path / "source"), "checkpoint", KEY)


def context(folder: Path, samples: int = 6, length: int = 16, **fields: Any) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.parent / "tokens.npy"
    if not path.exists():
        np.save(path, np.random.default_rng(0).integers(2, 300, (samples, length)))
    return Context(scratch=folder, threads=1, calibration=path, **fields)


def run(stage: Gptq, source: Artifact, place: Path, **fields: Any) -> tuple[Path, dict[str, Any]]:
    out = place / "out"
    out.mkdir(parents=True)
    return out, stage.run(source, out, context(place / "scratch", **fields))


def hashes(folder: Path) -> dict[str, str]:
    return {str(x.relative_to(folder)): hash_file(x) for x in list_files(folder)}


def logits(folder_or_model: Any, ids: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = folder_or_model
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        found: Tensor = model(ids).logits.log_softmax(-1)
    return found


@pytest.mark.parametrize(
    "fields", [{"bits": 5}, {"damping": 0.0}, {"damping": 2.0}, {"group_size": -1}, {"desc_act": 1}]
)
def test_unknown_values_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Gptq.model_validate(fields)


@pytest.mark.parametrize(("bits", "group_size", "symmetric"), [(4, 16, True), (3, None, True), (2, 16, False)])
def test_the_checkpoint_holds_what_was_planned(
    source: Artifact, tmp_path: Path, bits: Any, group_size: int | None, symmetric: bool
) -> None:
    stage = Gptq(bits=bits, group_size=group_size, symmetric=symmetric)
    plan = stage.plan(read_spec(source.path), 96)
    out, result = run(stage, source, tmp_path)
    assert result["spec"] == plan.spec == read_spec(out)
    errors = result["report"]["relative_error"]
    with Weights(source.path) as before, Weights(out) as after:
        for old, new in zip(read_spec(source.path).linears(), result["spec"].linears(), strict=True):
            if new.quantization is None:
                assert torch.equal(load_linear(before, old), load_linear(after, new))
            else:
                codes, scale, _ = load_packed(after, new)
                assert codes.shape == (new.out_features, new.in_features)
                assert bool(scale.isfinite().all())
                assert len(codes.unique()) > 2
                assert 0 < errors[new.name] < {2: 1.0, 3: 0.2, 4: 0.03}[bits]
    assert result["report"]["raised_damping"] == {}
    assert result["report"]["without_inputs"] == []


def test_the_model_stays_closer_to_its_parent_than_with_rounding(tmp_path: Path) -> None:
    from strop.methods.rtn import Rtn

    source = Artifact(tiny_folder(tmp_path / "source", seed=1), "checkpoint", KEY)
    ids = torch.randint(2, VOCAB_SIZE, (20, 30), generator=torch.Generator().manual_seed(5))
    parent = logits(tiny_model("llama", seed=1), ids)
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(2, VOCAB_SIZE, (40, 30)))
    out, _ = run(Gptq(bits=3, group_size=16), source, tmp_path)
    (tmp_path / "rounded").mkdir()
    Rtn(bits=3, group_size=16).run(source, tmp_path / "rounded", context(tmp_path / "scratch"))
    lost, before = ((parent.exp() * (parent - logits(x, ids))).sum(-1).mean() for x in (out, tmp_path / "rounded"))
    assert lost < 0.8 * before


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_inputs_are_rounded_where_that_is_asked_for(source: Artifact, tmp_path: Path, activations: Any) -> None:
    stage = Gptq(bits=8, group_size=None, activations=activations, drift_correction=0)
    out, result = run(stage, source, tmp_path / "integer")
    assert result["spec"] == stage.plan(read_spec(source.path), 96).spec == read_spec(out)
    packed, _ = run(Gptq(bits=8, group_size=None, drift_correction=0), source, tmp_path / "packed")
    with Weights(out) as ours, Weights(packed) as theirs:
        for one, two in zip(read_spec(out).match(None), read_spec(packed).match(None), strict=True):
            assert one.quantization == Quantization(8, None, True, activations)
            assert torch.equal(load_packed(ours, one)[0], load_packed(theirs, two)[0])
        for layer in read_spec(out).layers if activations == "static" else ():
            for group in layer.groups():
                scales = {float(ours.load(f"{x.name}.input_scale")) for x in group}
                assert len(scales) == 1
                assert 0 < min(scales) < 1


def test_only_targets_are_changed_and_the_walk_ends_with_the_last(
    source: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Gptq(group_size=16, targets=["*.0.*.down_proj", "*.1.*.q_proj"])
    done: list[tuple[int, int]] = []
    out, result = run(stage, source, tmp_path, progress=lambda _, a, b: done.append((a, b)))
    assert done == [(1, 2), (2, 2)]
    names = {x.name for x in result["spec"].linears() if x.quantization}
    assert names == {"model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"}
    assert read_spec(out) == result["spec"]


def test_a_tied_head_can_be_a_target(source: Artifact, tmp_path: Path) -> None:
    out, result = run(Gptq(bits=8, group_size=16, targets=["lm_head"]), source, tmp_path)
    assert result["spec"].head.quantization == Quantization(8, 16, True)
    with Weights(out) as weights, Weights(source.path) as before:
        original = load_linear(before, read_spec(source.path).head)
        torch.testing.assert_close(load_linear(weights, result["spec"].head), original, atol=0.02, rtol=0)


def test_equal_work_gives_equal_bytes(source: Artifact, tmp_path: Path) -> None:
    first, a = run(Gptq(group_size=16), source, tmp_path / "a")
    second, b = run(Gptq(group_size=16), source, tmp_path / "b")
    assert hashes(first) == hashes(second)
    assert a == b


@pytest.mark.parametrize("stop", [1, 7, 20])
def test_a_stopped_run_goes_on_at_the_next_linear_and_ends_in_the_same_bytes(
    source: Artifact, tmp_path: Path, stop: int
) -> None:
    expected, report = run(Gptq(group_size=16), source, tmp_path / "whole")

    def interrupt(label: str, done: int, total: int) -> None:
        if done >= stop:
            raise KeyboardInterrupt

    place = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        run(Gptq(group_size=16), source, place, progress=interrupt)
    shutil.rmtree(place / "out")
    kept = {x: (x.stat().st_mtime_ns, hash_file(x)) for x in (place / "scratch").iterdir()}
    assert kept
    found, again = run(Gptq(group_size=16), source, place)
    assert hashes(found) == hashes(expected)
    assert again == report
    assert {x: (x.stat().st_mtime_ns, hash_file(x)) for x in kept} == kept


def test_a_killed_run_goes_on_and_ends_in_the_same_bytes(source: Artifact, tmp_path: Path) -> None:
    expected, _ = run(Gptq(group_size=16), source, tmp_path / "whole")
    place = tmp_path / "killed"
    (place / "out").mkdir(parents=True)
    ids = context(place / "scratch").calibration
    code = f"""
import os, signal
from pathlib import Path
from strop.artifact import Artifact
from strop.methods.gptq import Gptq
from strop.stage import Context
def kill(label, done, total):
    if done >= 9:
        os.kill(os.getpid(), signal.SIGKILL)
context = Context(scratch=Path({str(place / "scratch")!r}), threads=1, calibration=Path({str(ids)!r}), progress=kill)
source = Artifact(Path({str(source.path)!r}), "checkpoint", {KEY!r})
Gptq(group_size=16).run(source, Path({str(place / "out")!r}), context)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert 0 < len(list((place / "scratch").iterdir())) < 21
    shutil.rmtree(place / "out")
    found, _ = run(Gptq(group_size=16), source, place)
    assert hashes(found) == hashes(expected)


def change_norm(folder: Path, layer: int, value: float) -> None:
    """Set the weights of a layer's first norm: what its q, k and v read."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.{layer}.input_layernorm.weight"].fill_(value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_linears_without_inputs_are_reported(source: Artifact, tmp_path: Path) -> None:
    change_norm(source.path, 1, 0.0)
    _, result = run(Gptq(group_size=16), source, tmp_path)
    names = [f"model.layers.1.self_attn.{x}_proj" for x in "qkvo"]
    assert result["report"]["without_inputs"] == names


def test_inputs_that_are_not_finite_are_refused_with_the_place(source: Artifact, tmp_path: Path) -> None:
    change_norm(source.path, 1, float("nan"))
    with pytest.raises(UserError, match=r"model\.layers\.1\.self_attn\.q_proj.*not finite"):
        run(Gptq(group_size=16), source, tmp_path)


def test_more_damping_where_the_hessian_cannot_be_inverted_is_reported(source: Artifact, tmp_path: Path) -> None:
    _, result = run(Gptq(group_size=16, damping=1e-25), source, tmp_path, samples=1, length=4)
    raised = result["report"]["raised_damping"]
    assert set(raised) == {x.name for x in read_spec(source.path).match(None)}
    assert all(1e-25 < x <= 1e-3 for x in raised.values())


def test_relative_error_is_that_of_the_outputs() -> None:
    x, weight = correlated(50, 12, 0), torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    other = (weight * 3).round() / 3
    slow = ((weight - other) @ x.T).square().sum() / (weight @ x.T).square().sum()
    assert relative_error(weight, other, 2 * x.T @ x) == pytest.approx(float(slow), rel=1e-4)
