"""Distillation of scales: gradients against autograd through the whole model, what learning must gain, resume."""

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
from references import VOCAB_SIZE, quantized, slow_kl, tiny_folder
from safetensors.torch import load_file
from torch import Tensor

from strop import numerics
from strop.artifact import Artifact, hash_file, list_files
from strop.calibration import blocks
from strop.conformance import check_checkpoint
from strop.errors import UserError
from strop.methods import qad
from strop.methods.qad import Qad, _batches, _State, _Student, divergence, scale_gradient
from strop.model import Weights, load_decoder, load_packed, read_spec
from strop.spec import Quantization
from strop.stage import Context

KEY = "0" * 64
FORM = Quantization(3, 16, symmetric=True)
IDS = torch.randint(0, VOCAB_SIZE, (12, 32), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Artifact]:
    """The teacher's folder, and the student rounded to 3 bits."""
    teacher = tiny_folder(tmp_path / "teacher")
    return teacher, Artifact(quantized(teacher, tmp_path / "student", FORM, head=False), "checkpoint", KEY)


def context(teacher: Path, scratch: Path, **changes: Any) -> Context:
    scratch.mkdir(parents=True, exist_ok=True)
    calibration = scratch.parent / "tokens.npy"
    np.save(calibration, IDS.numpy())
    artifacts = {"parent": Artifact(teacher, "checkpoint", KEY)}
    return Context(scratch, threads=1, calibration=calibration, artifacts=artifacts, **changes)


def run(stage: Qad, models: tuple[Path, Artifact], place: Path, **changes: Any) -> tuple[Path, dict[str, Any]]:
    out = place / "out"
    out.mkdir(parents=True)
    return out, stage.run(models[1], out, context(models[0], place / "scratch", **changes))


def hashes(folder: Path) -> dict[str, str]:
    return {str(x.relative_to(folder)): hash_file(x) for x in list_files(folder)}


def logits_of(folder: Path) -> Tensor:
    """Of all tokens of `IDS`."""
    decoder = load_decoder(folder)
    with torch.no_grad():
        x = decoder.embed(IDS, torch.arange(IDS.shape[1])[None])
        for index in range(len(decoder.layers)):
            x = decoder.block(index, x)
        return decoder.logits(x).flatten(0, 1)


def mean_kl(folder: Path, other: Path) -> float:
    return float(divergence(logits_of(other), logits_of(folder))) / IDS.numel()


def test_divergence_is_the_sum_over_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (2 * torch.randn(5, 11, generator=generator) for _ in range(2))
    slow = sum(slow_kl(a.tolist(), b.tolist()) for a, b in zip(p, q, strict=True))
    assert float(divergence(q, p)) == pytest.approx(slow, rel=1e-5)
    assert float(divergence(p, p)) == 0


@pytest.mark.parametrize("form", [Quantization(4, 8, symmetric=True), Quantization(3, None, symmetric=False)])
def test_the_gradient_by_multipliers_is_that_of_autograd(form: Quantization) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, gradient = (torch.randn(7, 24, generator=generator) for _ in range(2))
    scale, zero = numerics.find_scales(weight, form)
    codes = numerics.quantize(weight, scale, zero, form.bits)
    m = torch.ones_like(scale).requires_grad_()
    numerics.dequantize(codes, scale * m, zero).backward(gradient)
    assert m.grad is not None
    torch.testing.assert_close(scale_gradient(gradient, codes, zero, scale), m.grad)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float32, 1e-3)])
def test_gradients_are_those_of_autograd_through_the_whole_model(
    family: str, dtype: torch.dtype, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "product_dtype", lambda _: dtype)
    monkeypatch.setattr(qad, "HEAD_TOKENS", 50)  # pieces that do not divide the tokens
    teacher = tiny_folder(tmp_path / "teacher", family)
    form = Quantization(4, None, symmetric=family != "qwen3")
    folder = quantized(teacher, tmp_path / "student", form, head=family == "qwen3")
    spec, targets = read_spec(folder), logits_of(teacher)
    learners = [x for layer in spec.layers for x in layer.linears.values()]
    student = _Student(folder, learners, "cpu")
    loss, gradients = student.learn(IDS, torch.split(targets, 50))

    decoder = load_decoder(folder)
    multipliers: dict[str, Tensor] = {}
    with Weights(folder) as weights:
        for linear in learners:
            codes, scale, zero = load_packed(weights, linear)
            multipliers[linear.name] = torch.ones_like(scale).requires_grad_()
            dense = torch.nn.Linear(linear.in_features, linear.out_features, bias=False)
            old: Any = decoder.linear(linear.name)
            dense.bias = None if old.bias is None else torch.nn.Parameter(old.bias)
            del dense.weight
            dense.weight = numerics.dequantize(codes, scale * multipliers[linear.name], zero)  # type: ignore[assignment] # to learn through
            decoder.replace_linear(linear.name, dense)
    x = decoder.embed(IDS, torch.arange(IDS.shape[1])[None])
    for index in range(len(decoder.layers)):
        x = decoder.block(index, x)
    expected = divergence(decoder.logits(x).flatten(0, 1), targets) / IDS.numel()
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=tolerance)
    assert set(gradients) == set(multipliers)
    for name, m in multipliers.items():
        assert m.grad is not None
        error = (gradients[name] - m.grad).norm() / m.grad.norm()
        assert error < tolerance, name


def test_a_step_is_adams() -> None:
    ours = _State.start({"x": torch.ones(3, 2)})
    theirs = torch.nn.Parameter(torch.ones(3, 2))
    adam = torch.optim.Adam([theirs], lr=0.01, betas=qad.BETAS, eps=qad.EPSILON)
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        theirs.grad = torch.randn(3, 2, generator=generator)
        adam.step()
        ours.losses.append(0.0)
        ours.descend({"x": theirs.grad}, 0.01)
    torch.testing.assert_close(ours.multipliers["x"], theirs.data)


def test_batches_see_every_sample_once_an_epoch() -> None:
    found = list(_batches(7, 3, 2, seed=0))
    assert [len(x) for x in found] == [3, 3, 1, 3, 3, 1]
    epochs = [torch.cat(found[:3]), torch.cat(found[3:])]
    assert all(sorted(x.tolist()) == list(range(7)) for x in epochs)
    assert not torch.equal(*epochs)
    assert all(torch.equal(a, b) for a, b in zip(found, _batches(7, 3, 2, seed=0), strict=True))


def test_learning_brings_the_student_nearer_and_keeps_its_codes(
    models: tuple[Path, Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qad, "BATCH_TOKENS", 128)
    teacher, student = models
    out, result = run(Qad(epochs=8, rate=0.01), models, tmp_path)
    assert mean_kl(teacher, out) < 0.8 * mean_kl(teacher, student.path)
    losses = result["report"]["kl"]
    assert len(losses) == 8 * 3
    assert losses[0] == pytest.approx(mean_kl(teacher, student.path), rel=0.3)
    assert result["spec"] == read_spec(student.path)
    with Weights(student.path) as before, Weights(out) as after:
        for linear in read_spec(out).linears():
            if linear.quantization is not None:
                (old, scale, _), (new, learned, _) = (load_packed(x, linear) for x in (before, after))
                assert torch.equal(old, new)
                assert not torch.equal(scale, learned)
                assert torch.equal(learned, numerics.round_scales(learned))
        for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.1.input_layernorm.weight"):
            assert torch.equal(before.load(name), after.load(name))


def test_only_targets_learn(models: tuple[Path, Artifact], tmp_path: Path) -> None:
    out, _ = run(Qad(targets=["*.layers.1.mlp.*"], rate=0.05), models, tmp_path)
    with Weights(models[1].path) as before, Weights(out) as after:
        for linear in read_spec(out).linears():
            if linear.quantization is not None:
                (_, old, _), (_, new, _) = (load_packed(x, linear) for x in (before, after))
                assert torch.equal(old, new) == (".layers.1.mlp." not in linear.name)


def test_what_comes_out_conforms(models: tuple[Path, Artifact], tmp_path: Path) -> None:
    from strop.artifact import Manifest, write_manifest

    out, result = run(Qad(), models, tmp_path)
    write_manifest(out, Manifest("checkpoint", KEY, result["spec"].to_json(), report=result["report"]))
    check_checkpoint(Artifact(out, "checkpoint", KEY), models[1])
    stored = sum(x.nbytes for path in out.glob("*.safetensors") for x in load_file(path).values())
    assert stored == Qad().plan(read_spec(models[1].path), 0).size_bytes


def test_a_killed_run_goes_on_and_ends_in_the_same_bytes(models: tuple[Path, Artifact], tmp_path: Path) -> None:
    stage = "Qad(epochs=3)"
    expected, report = run(Qad(epochs=3), models, tmp_path / "whole")
    place = tmp_path / "killed"
    (place / "out").mkdir(parents=True)
    ids = context(models[0], place / "scratch").calibration
    code = f"""
import os, signal
from pathlib import Path
from strop.artifact import Artifact
from strop.methods import qad
from strop.methods.qad import Qad
from strop.stage import Context
qad.SAVED_STEPS = 2
qad.BATCH_TOKENS = {qad.BATCH_TOKENS}
def kill(label, done, total):
    if label == "qad" and done >= 3:
        os.kill(os.getpid(), signal.SIGKILL)
artifacts = {{"parent": Artifact(Path({str(models[0])!r}), "checkpoint", {KEY!r})}}
context = Context(scratch=Path({str(place / "scratch")!r}), threads=1, calibration=Path({str(ids)!r}),
                  artifacts=artifacts, progress=kill)
{stage}.run(Artifact(Path({str(models[1].path)!r}), "checkpoint", {KEY!r}), Path({str(place / "out")!r}), context)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    state = _State.load(place / "scratch")
    assert state is not None
    assert len(state.losses) == 2
    shutil.rmtree(place / "out")
    steps: list[int] = []
    found, again = run(
        Qad(epochs=3), models, place, progress=lambda label, done, _: steps.append(done) if label == "qad" else None
    )
    assert steps[0] == 3  # the first two are not taken again
    assert hashes(found) == hashes(expected)
    assert again == report


def test_a_teacher_of_another_vocabulary_is_refused(models: tuple[Path, Artifact], tmp_path: Path) -> None:
    other = tiny_folder(tmp_path / "other", vocab_size=VOCAB_SIZE + 32)
    with pytest.raises(UserError, match=f"teacher: its vocabulary has {VOCAB_SIZE + 32} tokens, the student's"):
        run(Qad(), (other, models[1]), tmp_path)


def test_a_loss_that_is_not_finite_is_refused(models: tuple[Path, Artifact], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = load_file(models[1].path / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    (models[1].path / "model.safetensors").chmod(0o644)
    save_file(tensors, models[1].path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"qad: the loss is not finite in step 1 of 1, at rate 0\.001"):
        run(Qad(), models, tmp_path)


def test_what_has_nothing_to_learn_is_refused(models: tuple[Path, Artifact], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="qad: no quantized linear to learn; put it after a stage that quantizes"):
        Qad().plan(read_spec(models[0]), 100)
    folder = quantized(models[0], tmp_path / "whole", FORM)
    folder_of_integers = quantized(models[0], tmp_path / "integers", Quantization(8, None, True, "dynamic"), head=False)
    with pytest.raises(UserError, match=r"qad: model\.layers\.0\.self_attn\.q_proj rounds its inputs"):
        Qad().plan(read_spec(folder_of_integers), 100)
    with pytest.raises(UserError, match="qad learns linears inside the layers, not lm_head"):
        Qad(targets=["*"]).plan(read_spec(folder), 100)
    with pytest.raises(ValidationError, match="rate"):
        Qad(rate=0)


def test_the_plan_grows_with_tokens_and_epochs(models: tuple[Path, Artifact]) -> None:
    spec = read_spec(models[1].path)
    one, more, twice = Qad().plan(spec, 1000), Qad().plan(spec, 2000), Qad(epochs=2).plan(spec, 1000)
    assert one.spec == spec
    assert one.seconds < twice.seconds < more.seconds
    assert one.memory_bytes < more.memory_bytes
