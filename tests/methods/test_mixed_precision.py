"""Bits by sensitivity: the exact allocation, what is measured, and the stage with its resume."""

from __future__ import annotations

import itertools
import os
import random
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
from references import VOCAB_SIZE, decoder_of, tiny_folder, tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from strop.artifact import Artifact, Manifest, hash_file, list_files, write_manifest
from strop.conformance import check_checkpoint, check_program
from strop.errors import UserError
from strop.methods.gptq import Gptq
from strop.methods.mixed_precision import MixedPrecision, allocate
from strop.model import Weights, load_linear, read_spec
from strop.numerics import dequantize, quantize, search_scales
from strop.spec import Quantization
from strop.stage import Context

KEY = "0" * 64
IDS = np.random.default_rng(0).integers(2, 300, (6, 16))


# The allocation.


def slow_allocate(costs: list[list[int]], losses: list[list[float]], budget: int) -> float:
    """The least total loss within the budget, over every combination."""
    return min(
        sum(x[i] for x, i in zip(losses, chosen, strict=True))
        for chosen in itertools.product(*(range(len(x)) for x in costs))
        if sum(x[i] for x, i in zip(costs, chosen, strict=True)) <= budget
    )


def total(rows: list[list[Any]], chosen: list[int]) -> Any:
    return sum(row[choice] for row, choice in zip(rows, chosen, strict=True))


def problem(seed: int) -> tuple[list[list[int]], list[list[float]], int]:
    """Groups of uneven sizes; every third with losses that fall with the width, others with any."""
    source = random.Random(seed)
    widths = sorted(source.sample([2, 3, 4, 8], source.randint(1, 4)))
    sizes = [source.choice([3, 5, 8, 16, 17]) for _ in range(source.randint(1, 6))]
    costs = [[size * bits for bits in widths] for size in sizes]
    losses = [[source.choice([source.random(), 0.5, 4.0**-bits]) for bits in widths] for _ in sizes]
    low, high = (sum(pick(x) for x in costs) for pick in (min, max))
    return costs, losses, source.randint(low, high)


@pytest.mark.parametrize("seed", range(60))
def test_no_combination_within_the_budget_loses_less(seed: int) -> None:
    costs, losses, budget = problem(seed)
    chosen = allocate(costs, losses, budget)
    assert total(costs, chosen) <= budget
    assert total(losses, chosen) == pytest.approx(slow_allocate(costs, losses, budget), rel=1e-12, abs=1e-15)


def test_a_uniform_width_is_never_better() -> None:
    for seed in range(60):
        source = random.Random(seed)
        sizes = [source.randint(1, 1000) for _ in range(40)]
        costs = [[size * bits for bits in (2, 3, 4, 8)] for size in sizes]
        losses = [[source.lognormvariate(0, 2) * 4.0**-bits for bits in (2, 3, 4, 8)] for _ in sizes]
        for i in range(4):
            chosen = allocate(costs, losses, sum(x[i] for x in costs))
            assert total(costs, chosen) <= sum(x[i] for x in costs)
            assert total(losses, chosen) <= sum(x[i] for x in losses) * (1 + 1e-12)


def test_of_equal_losses_the_cheapest_is_taken() -> None:
    assert allocate([[2, 4, 8], [2, 4, 8]], [[1.0, 1.0, 0.5], [3.0, 0.0, 0.0]], 12) == [2, 1]
    assert allocate([[2, 4, 8]], [[1.0, 1.0, 1.0]], 8) == [0]


def test_a_budget_below_the_cheapest_choices_is_an_error() -> None:
    assert allocate([[2, 4], [3, 6]], [[1.0, 0.0], [1.0, 0.0]], 5) == [0, 0]
    with pytest.raises(ValueError, match="the cheapest cost 5"):
        allocate([[2, 4], [3, 6]], [[1.0, 0.0], [1.0, 0.0]], 4)


# The stage.


@pytest.fixture
def source(tmp_path: Path) -> Artifact:
    return Artifact(tiny_folder(tmp_path / "source"), "checkpoint", KEY)


def stage(**fields: Any) -> MixedPrecision:
    return MixedPrecision(**{"group_size": 16, "rounding": "nearest", **fields})


def context(folder: Path, **fields: Any) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.parent / "tokens.npy"
    if not path.exists():
        np.save(path, IDS)
    return Context(scratch=folder, threads=1, calibration=path, **fields)


def run(mixed: MixedPrecision, source: Artifact, place: Path, **fields: Any) -> tuple[Path, dict[str, Any]]:
    out = place / "out"
    out.mkdir(parents=True)
    return out, mixed.run(source, out, context(place / "scratch", **fields))


def hashes(folder: Path) -> dict[str, str]:
    return {str(x.relative_to(folder)): hash_file(x) for x in list_files(folder)}


def logits(folder: Path, ids: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        found: Tensor = AutoModelForCausalLM.from_pretrained(folder)(ids).logits.log_softmax(-1)
    return found


def kl(before: Tensor, after: Tensor) -> float:
    return float((before.exp() * (before - after)).sum(-1).mean())


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gpt2"])
@pytest.mark.parametrize(
    ("average", "choices", "symmetric"), [(4.0, [2, 3, 4, 8], True), (3.3, [8, 2, 4], False), (2.0, [2], True)]
)
def test_the_checkpoint_keeps_the_budget_and_conforms(
    family: str, average: float, choices: list[Any], symmetric: bool, tmp_path: Path
) -> None:
    source = Artifact(tiny_folder(tmp_path / "source", family), "checkpoint", KEY)
    mixed = stage(average_bits=average, choices=choices, symmetric=symmetric)
    spec = read_spec(source.path)
    plan = mixed.plan(spec, IDS.size)
    out, result = run(mixed, source, tmp_path)
    assert result["spec"] == read_spec(out)
    write_manifest(out, Manifest("checkpoint", KEY, result["spec"].to_json(), report=result["report"]))
    check_checkpoint(Artifact(out, "checkpoint", KEY), source)
    linears = list(result["spec"].linears())[:-1]
    sizes = {x.name: x.in_features * x.out_features for x in linears}
    bits = {x.name: x.quantization.bits for x in linears if x.quantization}
    assert bits == result["report"]["bits"]
    assert bits.keys() == sizes.keys()
    assert set(bits.values()) <= set(choices)
    spent = sum(bits[x] * size for x, size in sizes.items()) / sum(sizes.values())
    assert result["report"]["average_bits"] == pytest.approx(spent, abs=1e-6)
    assert spent <= average
    assert {x.name for x in plan.spec.linears() if x.quantization} == bits.keys()
    assert result["report"]["num_tokens"] == 96
    assert result["report"]["without_inputs"] == []


def test_linears_that_read_the_same_input_get_the_same_bits(source: Artifact, tmp_path: Path) -> None:
    _, result = run(stage(average_bits=3.5), source, tmp_path)
    for layer in result["spec"].layers:
        for group in layer.groups():
            assert len({x.quantization for x in group}) == 1
    assert len(set(result["report"]["bits"].values())) > 1


def test_it_predicts_less_and_the_model_is_closer_than_with_the_same_bits_everywhere(tmp_path: Path) -> None:
    source = Artifact(tiny_folder(tmp_path / "source", seed=1), "checkpoint", KEY)
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(2, VOCAB_SIZE, (30, 30)))
    ids = torch.randint(2, VOCAB_SIZE, (20, 30), generator=torch.Generator().manual_seed(5))
    outs = []
    for name, choices in (("mixed", [2, 3, 4, 8]), ("even", [3])):
        place = tmp_path / name
        place.mkdir()
        shutil.copy(tmp_path / "tokens.npy", place / "tokens.npy")
        outs.append(run(stage(average_bits=3.0, choices=choices), source, place))
    (mixed_out, found), (even_out, other) = outs
    assert found["report"]["uniform"] == {"bits": 3, "predicted_kl": other["report"]["predicted_kl"]}
    assert found["report"]["predicted_kl"] < other["report"]["predicted_kl"]
    assert found["spec"].size_bytes() <= other["spec"].size_bytes()
    parent = logits(source.path, ids)
    assert kl(parent, logits(mixed_out, ids)) < kl(parent, logits(even_out, ids))


def test_gptq_rounds_to_the_widths_that_were_chosen(tmp_path: Path) -> None:
    source = Artifact(tiny_folder(tmp_path / "source", seed=1), "checkpoint", KEY)
    ids = torch.randint(2, VOCAB_SIZE, (20, 30), generator=torch.Generator().manual_seed(5))
    outs = []
    for rounding in ("nearest", "gptq"):
        place = tmp_path / rounding
        place.mkdir()
        np.save(place / "tokens.npy", np.random.default_rng(0).integers(2, VOCAB_SIZE, (200, 30)))
        outs.append(run(stage(average_bits=3.0, rounding=rounding), source, place))
    (nearest, found), (compensated, other) = outs
    assert found["spec"] == other["spec"] == read_spec(compensated)
    assert len(set(other["report"]["bits"].values())) > 1
    assert other["report"]["gptq"]["relative_error"].keys() == other["report"]["bits"].keys()
    parent = logits(source.path, ids)
    assert kl(parent, logits(compensated, ids)) < kl(parent, logits(nearest, ids))


def test_with_one_width_to_choose_gptq_gives_what_the_stage_gives(source: Artifact, tmp_path: Path) -> None:
    out, _ = run(stage(average_bits=3.0, choices=[3], rounding="gptq"), source, tmp_path / "mixed")
    alone = tmp_path / "alone"
    alone.mkdir()
    Gptq(bits=3, group_size=16).run(source, alone, context(tmp_path / "mixed" / "other"))
    assert hash_file(out / "model.safetensors") == hash_file(alone / "model.safetensors")


@pytest.mark.parametrize("average", [4.0, 2.6])
def test_losses_are_measured_at_the_width_nearest_to_the_budget_and_close_at_others(
    average: float, tmp_path: Path
) -> None:
    source = Artifact(tiny_folder(tmp_path / "source"), "checkpoint", KEY)
    _, result = run(stage(average_bits=average), source, tmp_path)
    decoder, ids, ratios = decoder_of(tiny_model("llama")), torch.from_numpy(IDS), []
    for layer in read_spec(source.path).layers:
        for group in layer.groups():
            found = result["report"]["kl"][" ".join(x.name for x in group)]
            before, energy = whole(decoder, ids), energy_of_inputs(decoder, group[0].name, ids)
            for bits in (2, 3, 4, 8):
                kept = [decoder.linear(x.name).weight.data.clone() for x in group]
                for linear, weight in zip(group, kept, strict=True):
                    scale, zero = search_scales(weight, Quantization(bits, 16, True), energy)
                    rounded = dequantize(quantize(weight, scale, zero, bits), scale, zero)
                    decoder.linear(linear.name).weight.data.copy_(rounded)
                expected = kl(before, whole(decoder, ids))
                for linear, weight in zip(group, kept, strict=True):
                    decoder.linear(linear.name).weight.data.copy_(weight)
                if bits == round(average):
                    assert found[str(bits)] == pytest.approx(expected, rel=0.01)
                elif bits < 8:  # in 8 bits they are rounding noise
                    ratios.append(found[str(bits)] / expected)
    assert 0.4 < min(ratios) < max(ratios) < 2.5
    assert 0.7 < sorted(ratios)[len(ratios) // 2] < 1.4


def energy_of_inputs(decoder: Any, name: str, ids: Tensor) -> Tensor:
    """Σ x² (in,) of what a linear reads."""
    seen: list[Tensor] = []
    handle = decoder.linear(name).register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    whole(decoder, ids)
    handle.remove()
    return seen[0].flatten(0, 1).square().sum(0)


def whole(decoder: Any, ids: Tensor) -> Tensor:
    """Log probabilities (samples, tokens, V) of one forward pass."""
    with torch.no_grad():
        x = decoder.embed(ids, torch.arange(ids.shape[1])[None])
        for index in range(len(decoder.layers)):
            x = decoder.block(index, x)
        found: Tensor = decoder.logits(x).log_softmax(-1)
    return found


def test_weights_that_lie_on_the_grid_lose_nothing_and_get_the_fewest_bits(source: Artifact, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj"
    tensors = load_file(source.path / "model.safetensors")
    tensors[f"{name}.weight"] = torch.where(torch.arange(80) % 2 == 0, 0.0, -0.5).expand(48, 80).contiguous()
    save_file(tensors, source.path / "model.safetensors", metadata={"format": "pt"})
    _, result = run(stage(), source, tmp_path)
    assert result["report"]["kl"][name] == {"2": 0.0, "3": 0.0, "4": 0.0, "8": 0.0}
    assert result["report"]["bits"][name] == 2


def test_inputs_that_are_not_finite_are_refused_with_the_place(source: Artifact, tmp_path: Path) -> None:
    change_norm(source.path, float("nan"))
    with pytest.raises(UserError, match=r"model\.layers\.1\.self_attn\.q_proj: the inputs are not finite"):
        run(stage(targets=["*.1.*"]), source, tmp_path)


def test_the_stored_codes_are_the_rounded_weights(source: Artifact, tmp_path: Path) -> None:
    out, result = run(stage(average_bits=8.0), source, tmp_path)
    assert set(result["report"]["bits"].values()) == {8}
    with Weights(source.path) as before, Weights(out) as after:
        for old, new in zip(read_spec(source.path).linears(), result["spec"].linears(), strict=True):
            weight = load_linear(before, old)
            bound = 0 if new.quantization is None else float(weight.abs().max()) / 100
            assert float((load_linear(after, new) - weight).abs().max()) <= bound


def test_several_widths_run_in_an_onnx_program(source: Artifact, tmp_path: Path) -> None:
    import dataclasses

    from strop.export.onnx_runtime import OnnxRuntime

    out, result = run(stage(average_bits=4.5), source, tmp_path)
    assert len(set(result["report"]["bits"].values())) > 1
    write_manifest(out, Manifest("checkpoint", KEY, result["spec"].to_json()))
    checkpoint, program = Artifact(out, "checkpoint", KEY), tmp_path / "program"
    program.mkdir()
    made = OnnxRuntime().run(checkpoint, program, context(tmp_path / "scratch"))
    write_manifest(program, Manifest("program", KEY, made["spec"].to_json(), dataclasses.asdict(made["traits"])))
    check_program(Artifact(program, "program", KEY), checkpoint)


def test_only_targets_are_changed_and_only_their_layers_measured(source: Artifact, tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    mixed = stage(average_bits=3.0, targets=["*.0.*.down_proj", "*.2.*.[qk]_proj"])
    _, result = run(mixed, source, tmp_path, progress=lambda _, a, b: done.append((a, b)))
    names = {"model.layers.0.mlp.down_proj", *(f"model.layers.2.self_attn.{x}_proj" for x in "qk")}
    assert {x.name for x in result["spec"].linears() if x.quantization} == names == set(result["report"]["bits"])
    assert done == [(1, 2), (2, 2)]
    assert len(result["report"]["kl"]) == 2


@pytest.mark.parametrize(
    ("shape", "tokens", "used"), [((6, 16), 40, 48), ((6, 300), 1024, 1026), ((9, 300), 256, 256), ((2, 16), 99, 32)]
)
def test_as_many_calibration_tokens_are_used_as_asked_for(
    shape: tuple[int, int], tokens: int, used: int, tmp_path: Path
) -> None:
    source = Artifact(tiny_folder(tmp_path / "source", max_position_embeddings=512), "checkpoint", KEY)
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(2, 300, shape))
    _, result = run(stage(tokens=tokens, targets=["*.2.*.o_proj"]), source, tmp_path)
    assert result["report"]["num_tokens"] == used


def test_equal_work_gives_equal_bytes(source: Artifact, tmp_path: Path) -> None:
    first, a = run(stage(), source, tmp_path / "a")
    second, b = run(stage(), source, tmp_path / "b")
    assert hashes(first) == hashes(second)
    assert a == b


def test_a_killed_run_goes_on_at_the_next_layer_and_ends_in_the_same_bytes(source: Artifact, tmp_path: Path) -> None:
    expected, report = run(stage(), source, tmp_path / "whole")
    place = tmp_path / "killed"
    (place / "out").mkdir(parents=True)
    ids = context(place / "scratch").calibration
    code = f"""
import os, signal
from pathlib import Path
from strop.artifact import Artifact
from strop.methods.gptq import Gptq
from strop.methods.mixed_precision import MixedPrecision
from strop.stage import Context
def kill(label, done, total):
    if done >= 2:
        os.kill(os.getpid(), signal.SIGKILL)
context = Context(scratch=Path({str(place / "scratch")!r}), threads=1, calibration=Path({str(ids)!r}), progress=kill)
source = Artifact(Path({str(source.path)!r}), "checkpoint", {KEY!r})
MixedPrecision(group_size=16, rounding="nearest").run(source, Path({str(place / "out")!r}), context)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    kept = {x: (x.stat().st_mtime_ns, hash_file(x)) for x in (place / "scratch").iterdir()}
    assert len(kept) == 2
    shutil.rmtree(place / "out")
    found, again = run(stage(), source, place)
    assert hashes(found) == hashes(expected)
    assert again == report
    assert {x: (x.stat().st_mtime_ns, hash_file(x)) for x in kept} == kept


def change_norm(folder: Path, value: float) -> None:
    """Set the weights of the second layer's first norm: what its q, k and v read."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"].fill_(value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_linears_without_inputs_are_reported(source: Artifact, tmp_path: Path) -> None:
    change_norm(source.path, 0.0)
    _, result = run(stage(), source, tmp_path)
    names = [f"model.layers.1.self_attn.{x}_proj" for x in "qkvo"]
    assert result["report"]["without_inputs"] == names


def test_predictions_that_are_not_finite_are_refused_with_the_place(source: Artifact, tmp_path: Path) -> None:
    change_norm(source.path, float("nan"))
    with pytest.raises(UserError, match=r"model\.layers\.0\.self_attn\.q_proj: .*predictions are not finite"):
        run(stage(), source, tmp_path)
    assert list((tmp_path / "scratch").iterdir()) == []


# What is refused.


@pytest.mark.parametrize(
    "fields",
    [{"average_bits": 0}, {"average_bits": "4"}, {"choices": []}, {"choices": [5]}, {"tokens": 0}, {"budget": 4}],
)
def test_unknown_values_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        MixedPrecision.model_validate(fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"average_bits": 1.5}, r"average_bits 1\.5 cannot be reached with choices \[2, 3, 4, 8\]; allowed: 2 to 8"),
        ({"average_bits": 3.9, "choices": [8, 4]}, r"average_bits 3\.9 .* choices \[4, 8\]; allowed: 4 to 8"),
        ({"average_bits": 5.0, "choices": [4]}, "allowed: 4 to 4"),
        ({"group_size": 64}, r"group_size 64 does not divide the 48 inputs of model\.layers\.0"),
        ({"targets": ["*.mpl.*"]}, r"'\*\.mpl\.\*' matches no linear"),
        ({"targets": ["*"]}, "lm_head is matched.*a stage of its own"),
    ],
)
def test_what_cannot_be_done_is_refused_by_the_plan(source: Artifact, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        stage(**fields).plan(read_spec(source.path), 96)


def test_quantizing_twice_is_refused(source: Artifact, tmp_path: Path) -> None:
    out, _ = run(stage(targets=["*.0.*.o_proj"]), source, tmp_path)
    with pytest.raises(UserError, match=r"o_proj: already quantized to 4 bits"):
        stage().plan(read_spec(out), 96)


@pytest.mark.parametrize(("average", "choices"), [(4.0, [2, 3, 4, 8]), (3.3, [2, 4]), (2.5, [2, 3, 8]), (8.0, [8])])
def test_the_planned_size_is_that_of_the_budget(source: Artifact, average: float, choices: list[Any]) -> None:
    spec = read_spec(source.path)
    plan = stage(average_bits=average, choices=choices).plan(spec, 50)
    linears = list(plan.spec.linears())[:-1]
    sizes = [x.in_features * x.out_features for x in linears]
    used = sum(x.quantization.bits * n for x, n in zip(linears, sizes, strict=True) if x.quantization)
    largest = max(sum(x.in_features * x.out_features for x in group) for y in spec.layers for group in y.groups())
    assert average * sum(sizes) - 6 * largest <= used <= average * sum(sizes)
    assert plan.size_bytes == plan.spec.size_bytes()
    assert any("only 50 calibration tokens for 512" in x for x in plan.notes)
