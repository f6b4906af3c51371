"""AutoRound: a step against autograd, what learning must gain, and the stage with its resume."""

from __future__ import annotations

import itertools
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
from references import VOCAB_SIZE, slow_signed_step, tiny_folder, tiny_model
from torch import Tensor

from strop import numerics
from strop.artifact import Artifact, hash_file, list_files
from strop.errors import UserError
from strop.methods import autoround
from strop.methods.autoround import (
    SCALE_RATE,
    AutoRound,
    Rounding,
    batches,
    damped_factor,
    near_codes,
    output_gradient,
    plainer,
)
from strop.model import Weights, load_linear, load_packed, read_spec
from strop.spec import Quantization
from strop.stage import Context

KEY = "0" * 64
FORMS = [(4, 16, True, 80), (3, None, True, 37), (2, 10, False, 70), (8, 16, False, 48)]


def problem(out: int, width: int, q: Quantization, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """W, s and z."""
    weight = torch.randn(out, width, generator=torch.Generator().manual_seed(seed))
    return weight, *numerics.find_scales(weight, q)


@pytest.mark.parametrize(("bits", "group_size", "symmetric", "width"), FORMS)
def test_steps_equal_those_of_autograd(
    bits: int, group_size: int | None, symmetric: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoround, "CACHED_WEIGHTS", 3 * width)
    weight, scale, zero = problem(13, width, Quantization(bits, group_size, symmetric))
    rounding = Rounding(weight, scale, zero, bits)
    generator = torch.Generator().manual_seed(1)
    v, m = rounding.offset.clone(), rounding.multiplier.clone()
    for rate in (0.4, 0.3, 0.2):
        gradient = torch.randn(13, width, generator=generator)
        v, m = slow_signed_step((weight, scale, zero), bits, gradient, v, m, (rate, SCALE_RATE * rate))
        rounding.descend(gradient, rate)
        assert torch.equal(rounding.multiplier, m)
        assert torch.equal(rounding.offset, v)


@pytest.mark.parametrize(("bits", "group_size", "symmetric", "width"), FORMS)
def test_what_is_learned_with_is_what_is_stored(bits: int, group_size: int | None, symmetric: bool, width: int) -> None:
    weight, scale, zero = problem(13, width, Quantization(bits, group_size, symmetric))
    rounding = Rounding(weight, scale, zero, bits)
    for seed in range(3):
        rounding.descend(torch.randn(13, width, generator=torch.Generator().manual_seed(seed)), 0.3)
    found = rounding.solution()
    lowest, highest = numerics.code_range(bits)
    assert found["codes"].dtype == torch.int8
    assert lowest <= int(found["codes"].min()) < int(found["codes"].max()) <= highest
    assert torch.equal(numerics.round_scales(found["scale"]), found["scale"])
    assert torch.equal(found["scale"].sign(), scale.sign())
    assert torch.equal(found["zero"], zero)
    dense = numerics.dequantize(found["codes"], found["scale"], found["zero"])
    assert torch.equal(rounding.weight_now(), dense)
    written = torch.empty(13, width)
    rounding.write(written)
    assert torch.equal(written, dense)


def test_before_any_step_codes_are_the_nearest() -> None:
    weight, scale, zero = problem(9, 48, Quantization(4, 16, False))
    found = Rounding(weight, scale, zero, 4).solution()
    assert torch.equal(found["codes"], numerics.quantize(weight, scale, zero, 4))


def test_a_weight_takes_one_of_the_two_codes_next_to_it() -> None:
    weight, scale, zero = problem(9, 48, Quantization(4, 16, True))
    rounding = Rounding(weight, scale, zero, 4)
    for seed in range(9):
        rounding.descend(torch.randn(9, 48, generator=torch.Generator().manual_seed(seed)), 1.0)
        found = rounding.solution()
        exact = numerics.grouped(weight, 16) / found["scale"][..., None]
        inside = exact.clamp(-8, 7)
        assert float((found["codes"].view_as(exact) - inside).abs().max()) <= 1.0


def test_weights_without_gradient_stay() -> None:
    weight, scale, zero = problem(9, 48, Quantization(4, 16, True))
    rounding = Rounding(weight, scale, zero, 4)
    rounding.descend(torch.zeros(9, 48), 1.0)
    assert not rounding.offset.any()
    assert torch.equal(rounding.multiplier, torch.ones(9, 3, 1))


def test_the_gradient_is_that_of_the_quadratic_form() -> None:
    generator = torch.Generator().manual_seed(0)
    y, target = (torch.randn(2, 5, 12, generator=generator) for _ in range(2))
    root = torch.randn(12, 12, generator=generator)
    sensitivity = root @ root.T
    y.requires_grad_()
    error = (y - target) / target.square().mean(-1, keepdim=True).sqrt()
    (0.5 * (error @ sensitivity * error).sum()).backward()
    found = output_gradient(y.detach(), target, sensitivity)
    assert y.grad is not None
    assert float((found - y.grad).norm() / y.grad.norm()) < 0.01


def test_a_sensitivity_of_nothing_is_the_identity() -> None:
    assert torch.equal(plainer(torch.zeros(5, 5)), torch.eye(5))
    root = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    found = plainer(root @ root.T)
    assert float(found.diagonal().mean()) == pytest.approx(1)
    assert bool((torch.linalg.eigvalsh(found) >= 0.999 * autoround.PLAIN).all())


def test_each_sample_comes_once_before_any_comes_again() -> None:
    found = list(batches(7, 3, 7, np.random.default_rng(0)))
    assert [len(x) for x in found] == [3] * 7
    order = torch.cat(found).tolist()
    assert all(sorted(order[i : i + 7]) == list(range(7)) for i in (0, 7, 14))
    assert order[:7] != order[7:14]


@pytest.mark.parametrize(("bits", "group_size", "symmetric", "width"), FORMS)
def test_learning_starts_from_the_given_codes_on_the_side_of_the_weight(
    bits: int, group_size: int | None, symmetric: bool, width: int
) -> None:
    weight, scale, zero = problem(13, width, Quantization(bits, group_size, symmetric))
    lowest, highest = numerics.code_range(bits)
    nearest = numerics.quantize(weight, scale, zero, bits)
    moved = nearest + torch.randint(-2, 3, nearest.shape, generator=torch.Generator().manual_seed(3), dtype=torch.int8)
    codes = moved.clamp(lowest, highest)
    start = near_codes(weight, codes, scale, zero)
    assert torch.equal(Rounding(start, scale, zero, bits).solution()["codes"], codes)
    for row, column in itertools.product(range(13), range(width)):
        group = column // (width // scale.shape[1])
        s, z = float(scale[row, group]), int(zero[row, group])
        steps = float(weight[row, column]) / s + z - int(codes[row, column])
        expected = (int(codes[row, column]) + max(-0.4, min(0.4, steps)) - z) * s
        assert float(start[row, column]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_without_any_inputs_there_is_no_factor() -> None:
    assert damped_factor(torch.zeros(7, 7)) is None
    assert damped_factor(torch.eye(7)) is not None


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


def run(stage: AutoRound, source: Artifact, place: Path, **fields: Any) -> tuple[Path, dict[str, Any]]:
    out = place / "out"
    out.mkdir(parents=True)
    return out, stage.run(source, out, context(place / "scratch", **fields))


def hashes(folder: Path) -> dict[str, str]:
    return {str(x.relative_to(folder)): hash_file(x) for x in list_files(folder)}


QUICK = AutoRound(group_size=16, iterations=3)


@pytest.mark.parametrize("fields", [{"bits": 5}, {"iterations": 0}, {"group_size": -1}, {"iters": 50}])
def test_unknown_values_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        AutoRound.model_validate(fields)


def test_the_head_is_refused(source: Artifact) -> None:
    with pytest.raises(UserError, match="targets: lm_head is outside the blocks"):
        AutoRound(group_size=16, targets=["lm_head", "*.mlp.*"]).plan(read_spec(source.path), 96)


def test_groups_that_do_not_divide_are_refused_before_anything_is_read(source: Artifact) -> None:
    with pytest.raises(UserError, match="group_size 64 does not divide the 48 inputs"):
        AutoRound().plan(read_spec(source.path), 96)


@pytest.mark.parametrize(("bits", "group_size", "symmetric"), [(4, 16, True), (3, None, True), (2, 16, False)])
def test_the_checkpoint_holds_what_was_planned(
    source: Artifact, tmp_path: Path, bits: Any, group_size: int | None, symmetric: bool
) -> None:
    stage = AutoRound(bits=bits, group_size=group_size, symmetric=symmetric, iterations=3, drift_correction=0)
    plan = stage.plan(read_spec(source.path), 96)
    out, result = run(stage, source, tmp_path)
    assert result["spec"] == plan.spec == read_spec(out)
    with Weights(source.path) as before, Weights(out) as after:
        for old, new in zip(read_spec(source.path).linears(), result["spec"].linears(), strict=True):
            weight = load_linear(before, old)
            if new.quantization is None:
                assert torch.equal(weight, load_linear(after, new))
            else:
                codes, scale, _ = load_packed(after, new)
                assert len(codes.unique()) > 2
                assert bool(scale.isfinite().all())
                error = float((load_linear(after, new) - weight).norm() / weight.norm())
                assert 0 < error < {2: 0.8, 3: 0.4, 4: 0.15}[bits]


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi3", "gpt2"])
def test_learning_brings_every_block_closer_to_its_target(family: str, tmp_path: Path) -> None:
    source = Artifact(tiny_folder(tmp_path / "source", family), "checkpoint", KEY)
    _, result = run(AutoRound(bits=3, group_size=16, iterations=20, drift_correction=0), source, tmp_path)
    rounded, learned = (result["report"][f"relative_error_{x}"] for x in ("rounded", "learned"))
    assert list(rounded) == list(learned) == ["0", "1", "2"]
    assert all(0 < learned[i] < 0.9 * rounded[i] for i in rounded)


def kl(parent: Any, folder: Path) -> float:
    """Mean KL of a checkpoint to its parent, in nats."""
    from transformers import AutoModelForCausalLM

    ids = torch.randint(2, VOCAB_SIZE, (20, 30), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        p, q = (x(ids).logits.log_softmax(-1) for x in (parent, AutoModelForCausalLM.from_pretrained(folder)))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_model_stays_closer_to_its_parent_than_with_rounding(symmetric: bool, tmp_path: Path) -> None:
    from strop.methods.rtn import Rtn

    source = Artifact(tiny_folder(tmp_path / "source", seed=1), "checkpoint", KEY)
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(2, VOCAB_SIZE, (300, 40)))
    stage = AutoRound(bits=3, group_size=16, symmetric=symmetric, iterations=50)
    learned, _ = run(stage, source, tmp_path)
    rounded = tmp_path / "rounded"
    rounded.mkdir()
    Rtn(bits=3, group_size=16, symmetric=symmetric).run(source, rounded, context(tmp_path / "scratch"))
    parent = tiny_model("llama", seed=1)
    assert kl(parent, learned) < 0.8 * kl(parent, rounded)


def test_moving_weights_first_brings_later_blocks_closer(tmp_path: Path) -> None:
    source = Artifact(tiny_folder(tmp_path / "source", seed=1), "checkpoint", KEY)
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(2, VOCAB_SIZE, (300, 40)))
    stages = (AutoRound(bits=3, group_size=16, iterations=10, drift_correction=x) for x in (0.0, 1.0))
    found = [run(stage, source, tmp_path / f"{i}")[1]["report"] for i, stage in enumerate(stages)]
    for part in ("rounded", "learned"):
        plain, moved = (x[f"relative_error_{part}"]["2"] for x in found)
        assert moved < 0.95 * plain


def test_only_targets_are_changed_and_the_walk_ends_with_the_last(source: Artifact, tmp_path: Path) -> None:
    stage = AutoRound(group_size=16, iterations=2, targets=["*.1.*.down_proj", "*.1.*.q_proj"])
    done: list[tuple[str, int, int]] = []
    out, result = run(stage, source, tmp_path, progress=lambda *x: done.append(x))
    assert done == [("sensitivity of blocks", 1, 2), ("sensitivity of blocks", 2, 2), ("autoround", 2, 2)]
    names = {x.name for x in result["spec"].linears() if x.quantization}
    assert names == {"model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj"}
    assert list(result["report"]["relative_error_learned"]) == ["1"]
    assert read_spec(out) == result["spec"]


def test_equal_work_gives_equal_bytes_and_another_seed_others(source: Artifact, tmp_path: Path) -> None:
    first, a = run(QUICK, source, tmp_path / "a")
    second, b = run(QUICK, source, tmp_path / "b")
    other, _ = run(QUICK, source, tmp_path / "c", seed=1)
    assert hashes(first) == hashes(second)
    assert a == b
    assert hashes(first) != hashes(other)


@pytest.mark.parametrize("stop", [("sensitivity of blocks", 2), ("autoround", 7), ("autoround", 21)])
def test_a_stopped_run_goes_on_at_the_next_block_and_ends_in_the_same_bytes(
    source: Artifact, tmp_path: Path, stop: tuple[str, int]
) -> None:
    expected, report = run(QUICK, source, tmp_path / "whole")

    def interrupt(label: str, done: int, total: int) -> None:
        if (label, done) == stop:
            raise KeyboardInterrupt

    place = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        run(QUICK, source, place, progress=interrupt)
    shutil.rmtree(place / "out")
    kept = {x: (x.stat().st_mtime_ns, hash_file(x)) for x in (place / "scratch").glob("block-*")}
    assert len(kept) == {2: 0, 7: 1, 21: 3}[stop[1]]
    found, again = run(QUICK, source, place)
    assert hashes(found) == hashes(expected)
    assert again == report
    assert {x: (x.stat().st_mtime_ns, hash_file(x)) for x in kept} == kept


def test_a_killed_run_goes_on_and_ends_in_the_same_bytes(source: Artifact, tmp_path: Path) -> None:
    expected, _ = run(QUICK, source, tmp_path / "whole")
    place = tmp_path / "killed"
    (place / "out").mkdir(parents=True)
    ids = context(place / "scratch").calibration
    code = f"""
import os, signal
from pathlib import Path
from strop.artifact import Artifact
from strop.methods.autoround import AutoRound
from strop.stage import Context
def kill(label, done, total):
    if label == "autoround" and done >= 14:
        os.kill(os.getpid(), signal.SIGKILL)
context = Context(scratch=Path({str(place / "scratch")!r}), threads=1, calibration=Path({str(ids)!r}), progress=kill)
source = Artifact(Path({str(source.path)!r}), "checkpoint", {KEY!r})
AutoRound(group_size=16, iterations=3).run(source, Path({str(place / "out")!r}), context)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert len(list((place / "scratch").glob("block-*"))) == 2
    shutil.rmtree(place / "out")
    found, _ = run(QUICK, source, place)
    assert hashes(found) == hashes(expected)


def change_norm(folder: Path, layer: int, value: float) -> None:
    """Set the weights of a layer's first norm: what its q, k and v read."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.{layer}.input_layernorm.weight"].fill_(value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_linears_without_inputs_are_rounded_to_nearest(source: Artifact, tmp_path: Path) -> None:
    change_norm(source.path, 1, 0.0)
    out, result = run(QUICK, source, tmp_path)
    with Weights(source.path) as before, Weights(out) as after:
        for old, new in zip(read_spec(source.path).layer_linears(1)[:4], result["spec"].layer_linears(1), strict=False):
            codes, scale, zero = load_packed(after, new)
            assert torch.equal(codes, numerics.quantize(load_linear(before, old), scale, zero, 4))


def test_outputs_that_are_not_finite_are_refused_with_the_place(source: Artifact, tmp_path: Path) -> None:
    change_norm(source.path, 1, float("nan"))
    with pytest.raises(UserError, match=r"autoround: model\.layers\.1\.self_attn\.q_proj, .*: .* not finite"):
        run(QUICK, source, tmp_path)


def test_samples_longer_than_a_step_are_taken_one_by_one(
    source: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoround, "BATCH_TOKENS", 10)
    _, result = run(QUICK, source, tmp_path)
    assert len(result["report"]["relative_error_learned"]) == 3


def test_samples_beyond_what_the_steps_need_are_left_out(
    source: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoround, "BATCH_TOKENS", 16)  # one sample a step
    stage = AutoRound(group_size=16, iterations=7)
    first, result = run(stage, source, tmp_path / "all")
    assert result["report"]["num_samples"] == 3  # 7 steps, each sample seen three times
    tokens = np.load(tmp_path / "all" / "tokens.npy")
    (tmp_path / "few").mkdir()
    np.save(tmp_path / "few" / "tokens.npy", tokens[:3])
    second, again = run(stage, source, tmp_path / "few")
    assert hashes(first) == hashes(second)
    assert result == again


def test_the_plan_says_how_much_of_the_text_is_used(source: Artifact) -> None:
    spec = read_spec(source.path)
    few, enough = (AutoRound(group_size=16, iterations=50).plan(spec, x) for x in (65536, 1024))
    assert few.notes == ("50 iterations use about 17066 of the 65536 calibration tokens",)
    assert enough.notes == ()
    assert few.memory_bytes > enough.memory_bytes
