"""Mixtures of experts: every expert is quantized and calibrated on its own tokens, or the report says which is not."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from references import VOCAB_SIZE, decoder_of, slow_gptq, stored_weights, tiny_config, tiny_folder, tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from strop import recipe
from strop.artifact import Artifact, Manifest, hash_file, list_files, write_manifest
from strop.calibration.capture import Group, walk
from strop.conformance import check_checkpoint, check_program
from strop.errors import UserError
from strop.export.auto_gptq import AutoGptq
from strop.export.eager import Eager
from strop.export.gguf import Gguf
from strop.export.onnx_runtime import OnnxRuntime
from strop.export.torch_compile import TorchCompile
from strop.families import EXPERT_FAMILIES, build_spec
from strop.methods._experts import LEAST_TOKENS, SHOWN_EXPERTS
from strop.methods.autoround import AutoRound
from strop.methods.awq import Awq
from strop.methods.gptq import Gptq
from strop.methods.hqq import Hqq
from strop.methods.kv_cache import KvCache
from strop.methods.mixed_precision import MixedPrecision
from strop.methods.rotate import Rotate
from strop.methods.rtn import Rtn
from strop.methods.smoothquant import SmoothQuant
from strop.model import Weights, experts_note, load_decoder, load_linear, load_packed, read_spec
from strop.numerics import dequantize, find_scales, quantize
from strop.preflight import check
from strop.spec import LayerSpec, ModelSpec, Quantization
from strop.stage import Context, Stage
from strop.store import Store

KEY = "0" * 64
SAMPLES, LENGTH = 12, 30
IDS = np.random.default_rng(0).integers(2, VOCAB_SIZE, (SAMPLES, LENGTH))
FIVE: dict[str, dict[str, Any]] = {"mixtral": {"num_local_experts": 5}}
"""What gives a family five experts where it has another number."""


def moe_folder(folder: Path, family: str, **changes: Any) -> Artifact:
    return Artifact(tiny_folder(folder, family, **changes), "checkpoint", KEY)


def unreached_folder(folder: Path, family: str) -> Artifact:
    """A model of five experts whose expert 0 no token reaches.

    Its row of every router is 0, and the others are v, -v, u, -u: of them two logits are always above 0.
    """
    source = moe_folder(folder, family, **FIVE.get(family, {}))
    weights = load_file(folder / "model.safetensors")
    for layer in read_spec(folder).layers:
        if layer.moe is not None:
            name = f"{layer.moe.router.name}.weight"
            v, u = weights[name][1].clone(), weights[name][2].clone()
            weights[name] = torch.stack([torch.zeros_like(v), v, -v, u, -u])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return source


def run(stage: Stage, source: Artifact, out: Path) -> dict[str, Any]:
    out.mkdir()
    scratch = out.parent / f"{out.name}.scratch"
    scratch.mkdir()
    np.save(scratch / "tokens.npy", IDS)
    return stage.run(source, out, Context(scratch=scratch, threads=1, calibration=scratch / "tokens.npy"))


def finished(folder: Path, made: dict[str, Any], stage: Stage) -> Artifact:
    """With the manifest that the store would write."""
    files = {
        str(p.relative_to(folder)): {"sha256": hash_file(p), "size_bytes": p.stat().st_size} for p in list_files(folder)
    }
    traits = dataclasses.asdict(made["traits"]) if "traits" in made else None
    write_manifest(folder, Manifest(stage.gives, KEY, made["spec"].to_json(), traits, files=files))
    return Artifact(folder, stage.gives, KEY)


def logits_of(decoder: Any) -> Tensor:
    """Of all of `IDS`, (SAMPLES, LENGTH, V), without a cache."""
    with torch.no_grad():
        x = decoder.embed(torch.tensor(IDS), torch.arange(LENGTH)[None])
        for index in range(len(decoder.layers)):
            x = decoder.block(index, x)
        found: Tensor = decoder.logits(x)
    return found


def expert_layers(spec: ModelSpec) -> list[tuple[int, LayerSpec]]:
    return [(i, x) for i, x in enumerate(spec.layers) if x.moe is not None]


def prefix(layer: LayerSpec, expert: int) -> str:
    """How the names of an expert's linears begin."""
    return layer.linears[f"experts.{expert}.up"].name.rpartition(".")[0]


# The table.


@pytest.mark.parametrize(
    ("family", "changes", "layers", "experts"),
    [
        ("mixtral", {}, [0, 1, 2], 4),
        ("qwen2_moe", {}, [0, 2], 5),
        ("qwen2_moe", {"decoder_sparse_step": 3, "mlp_only_layers": []}, [2], 5),
        ("qwen3_moe", {}, [1], 5),
        ("qwen3_moe", {"decoder_sparse_step": 1, "mlp_only_layers": [0, 1]}, [2], 5),
    ],
)
def test_experts_are_in_the_layers_that_the_config_says(
    family: str, changes: dict[str, Any], layers: list[int], experts: int
) -> None:
    spec = decoder_of(tiny_model(family, **changes)).spec
    found = expert_layers(spec)
    assert [i for i, _ in found] == layers
    for _, layer in found:
        assert layer.moe is not None
        assert len(layer.moe.experts()) == experts + (family == "qwen2_moe")
        assert (layer.moe.shared_gate is not None) == (family == "qwen2_moe")
        assert layer.token_share("experts.3.up") == 2 / experts
        assert layer.token_share("q") == layer.token_share("shared.up") == 1


def test_routers_and_gates_are_no_targets() -> None:
    spec = decoder_of(tiny_model("qwen2_moe")).spec
    names = {x.name for x in spec.match(["*.mlp.*"])}
    assert "model.layers.0.mlp.experts.4.up_proj" in names
    assert "model.layers.0.mlp.shared_expert.up_proj" in names
    assert not names & {x.name for x in spec.gates()}
    with pytest.raises(UserError, match=r"targets: pattern '\*\.mlp\.gate' names only routers or gates .*up_proj"):
        spec.match(["*.mlp.gate"])


def test_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path, save_original_format=False)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.experts\.gate_up_proj holds all experts .*save_pretrained"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 6}, "num_experts_per_tok is 6, more than the 5 experts"),
        ({"num_experts": 10**9}, "1000000000 experts, but the checkpoint has only"),
        ({"num_experts": 4.5}, "num_experts must be a whole number"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers must be a list of layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number of at least 1"),
        ({"moe_intermediate_size": 48}, "experts.0.gate_proj.weight has shape"),
    ],
)
def test_configs_that_cannot_be_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    headers = {name: ("F32", tuple(x.shape)) for name, x in stored_weights(tiny_model("qwen2_moe")).items()}
    with pytest.raises(UserError, match=message) as caught:
        build_spec({**tiny_config("qwen2_moe").to_dict(), **changes}, headers, "float32")
    assert "\n" not in str(caught.value)


# Computing.


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_greedy_text_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = moe_folder(tmp_path / "source", family)
    model = AutoModelForCausalLM.from_pretrained(source.path).eval()
    made = run(Eager(), source, tmp_path / "eager")
    session = Eager.load(tmp_path / "eager", made["traits"]).open(1, 40)
    prompt = torch.tensor(IDS[:1, :7])
    expected = model.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None)[0, 7:].tolist()
    logits, found = session.step(prompt.numpy()), []
    for _ in range(20):
        found.append(int(logits[0, -1].argmax()))
        logits = session.step(np.array([[found[-1]]]))
    assert found == expected


# Stages.


@pytest.mark.parametrize(
    ("stage", "family"),
    [
        (Rtn(group_size=16), "mixtral"),
        (Hqq(group_size=16), "qwen3_moe"),
        (Gptq(group_size=16), "qwen2_moe"),
        (Awq(group_size=16), "qwen2_moe"),
        (Awq(group_size=16, symmetric=False), "mixtral"),
    ],
)
def test_every_expert_is_quantized(stage: Stage, family: str, tmp_path: Path) -> None:
    source = unreached_folder(tmp_path / "source", family)
    spec = read_spec(source.path)
    plan = stage.plan(spec, SAMPLES * LENGTH)
    made = run(stage, source, tmp_path / "out")
    assert made["spec"] == plan.spec == read_spec(tmp_path / "out")
    quantized = {x.name for x in made["spec"].linears() if x.quantization is not None}
    assert quantized == {x.name for layer in spec.layers for x in layer.linears.values()}
    stored = sum(x.nbytes for x in load_file(tmp_path / "out" / "model.safetensors").values())
    assert plan.size_bytes == stored
    with Weights(source.path) as before, Weights(tmp_path / "out") as after:
        for linear in made["spec"].match(None):
            codes, scale, _ = load_packed(after, linear)
            assert bool(scale.isfinite().all())
            assert bool((scale != 0).all())
            assert len(codes.unique()) > 2
        for gate in spec.gates():
            assert torch.equal(before.load(f"{gate.name}.weight"), after.load(f"{gate.name}.weight"))
    check_checkpoint(finished(tmp_path / "out", made, stage), source)


def test_a_program_computes_in_a_fresh_process_what_its_checkpoint_does(tmp_path: Path) -> None:
    source, stage = moe_folder(tmp_path / "source", "qwen2_moe"), Rtn(bits=8, group_size=16, symmetric=False)
    checkpoint = finished(tmp_path / "out", run(stage, source, tmp_path / "out"), stage)
    program = finished(tmp_path / "program", run(Eager(), checkpoint, tmp_path / "program"), Eager())
    assert check_program(program, checkpoint) < 1e-4


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_transformers_opens_experts_and_attention_of_two_widths(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM

    # A token near the border between two experts may go to either: all are chosen here.
    source = moe_folder(tmp_path / "source", family, num_experts_per_tok=4 if family == "mixtral" else 5)
    checkpoint = source
    for number, stage in enumerate(
        (Rtn(bits=8, group_size=16, targets=["*self_attn*"]), Rtn(bits=4, group_size=16, targets=["*experts*"]))
    ):
        checkpoint = finished(tmp_path / f"{number}", run(stage, checkpoint, tmp_path / f"{number}"), stage)
    check_checkpoint(checkpoint, source)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.path).eval()
    expected = logits_of(load_decoder(checkpoint.path))
    with torch.no_grad():
        found = model(torch.tensor(IDS)).logits
    # transformers unpacks experts to the dtype of their scales, bfloat16, and computes them in it.
    torch.testing.assert_close(found, expected, atol=0.01 * float(expected.abs().max()), rtol=0)
    assert caplog.text.count("Could not match") == 1, "of experts together, not of each"


# Calibration.


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_tokens_of_all_experts_sum_to_all_tokens_times_top_k(family: str, tmp_path: Path) -> None:
    source = moe_folder(tmp_path / "source", family)
    report = run(Gptq(group_size=16), source, tmp_path / "out")["report"]
    for _, layer in expert_layers(read_spec(source.path)):
        assert layer.moe is not None
        counts = [report["expert_tokens"][prefix(layer, i)] for i in range(layer.moe.num_experts)]
        assert sum(counts) == SAMPLES * LENGTH * layer.moe.top_k
        assert len(set(counts)) > 1
    assert len(report["expert_tokens"]) == sum(
        x.moe.num_experts for _, x in expert_layers(read_spec(source.path)) if x.moe
    )


def test_an_expert_that_no_token_reaches_is_rounded_to_nearest_and_named_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = unreached_folder(tmp_path / "source", "mixtral")
    with caplog.at_level(logging.WARNING):
        made = run(Gptq(bits=8, group_size=None, activations="static"), source, tmp_path / "out")
    names = [prefix(layer, 0) for _, layer in expert_layers(made["spec"])]
    assert made["report"]["rounded_to_nearest"] == names
    assert [made["report"]["expert_tokens"][x] for x in names] == [0, 0, 0]
    assert made["report"]["without_inputs"] == []
    (line,) = [x.getMessage() for x in caplog.records]
    assert line.startswith("gptq: 3 of 15 experts are reached by fewer than")
    assert f"{names[0]} (0), {names[1]} (0), {names[2]} (0)" in line
    form = Quantization(8, None, True)
    with Weights(source.path) as before, Weights(tmp_path / "out") as after:
        for old, new in zip(read_spec(source.path).match(None), made["spec"].match(None), strict=True):
            if new.name.rpartition(".")[0] in names:
                codes, scale, zero = load_packed(after, new)
                weight = load_linear(before, old)
                expected, _ = find_scales(weight, form)
                assert torch.equal(scale, expected)
                assert torch.equal(codes, quantize(weight, scale, zero, 8))
                # Inputs of experts are alike in size, so are their scales: that of all tokens stands in.
                assert 0.1 < float(after.load(f"{new.name}.input_scale")) * 127 < 100


def test_the_line_about_experts_names_only_some_of_many(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = moe_folder(tmp_path / "source", "mixtral")
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    out.mkdir()
    scratch.mkdir()
    np.save(scratch / "tokens.npy", IDS[:1, :4])
    with caplog.at_level(logging.WARNING):
        Gptq(group_size=16).run(source, out, Context(scratch=scratch, threads=1, calibration=scratch / "tokens.npy"))
    (line,) = [x.getMessage() for x in caplog.records]
    assert "12 of 12 experts" in line
    assert line.endswith(f"and {12 - SHOWN_EXPERTS} more, see the report")


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_gptq_of_an_expert_is_gptq_on_exactly_its_tokens(family: str, tmp_path: Path) -> None:
    source = moe_folder(tmp_path / "source", family)
    spec = read_spec(source.path)
    index, layer = expert_layers(spec)[0]
    name, expert = prefix(layer, 1), 1
    stage = Gptq(bits=4, group_size=16, act_order=False, drift_correction=0, targets=[f"{name}.*"])
    made = run(stage, source, tmp_path / "out")
    inputs = tokens_of_expert(family, index, expert)
    assert made["report"]["expert_tokens"] == {name: len(inputs)}
    assert len(inputs) > LEAST_TOKENS
    with Weights(source.path) as before, Weights(tmp_path / "out") as after:
        dense = {}
        for role in ("gate", "up", "down"):
            old = layer.linears[f"experts.{expert}.{role}"]
            new = next(x for x in made["spec"].linears() if x.name == old.name)
            x = (
                inputs
                if role != "down"
                else torch.nn.functional.silu(inputs @ dense["gate"].T) * (inputs @ dense["up"].T)
            )
            codes, scale, zero = load_packed(after, new)
            dense[role] = dequantize(codes, scale, zero)
            h = 2 * x.T @ x / len(x)
            damping = max(0.01, x.shape[1] / len(x))
            h += damping * h.diagonal().mean() * torch.eye(len(h))
            slow = slow_gptq(load_linear(before, old), h, scale, zero, 4, list(range(x.shape[1])))
            # float32 against float64: a value half way between two codes may go either way, and its row with it.
            assert (codes != slow).any(1).sum() <= 1


def tokens_of_expert(family: str, index: int, expert: int) -> Tensor:
    """What transformers sends to an expert of a layer, (tokens, H), in order."""
    model = tiny_model(family)
    seen: list[Tensor] = []
    block = model.model.layers[index].mlp
    handles = [
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, 1))),
        block.gate.register_forward_hook(lambda _, inputs, outputs: seen.append(outputs[2])),
    ]
    with torch.no_grad():
        model(torch.tensor(IDS))
    for handle in handles:
        handle.remove()
    hidden, chosen = seen
    return hidden[[expert in row for row in chosen.tolist()]]


def test_what_is_followed_are_the_tokens_that_the_changed_model_sends(tmp_path: Path) -> None:
    """Of the same tokens, X₀ is what an expert would read in the unchanged model, wherever that sends them."""
    spec = read_spec(tiny_folder(tmp_path, "qwen2_moe"))
    original = decoder_of(tiny_model("qwen2_moe"))
    moved: list[bool] = []

    def visit(group: Group) -> bool:
        pairs = list(group.pairs())
        if group.expert is not None:
            assert sum(len(x) for x in group.inputs()) == group.num_tokens
            assert sum(len(x) for _, x in pairs) == sum(len(x) for x, _ in pairs) == group.num_followed
            assert sum(len(x) for x in group.everyone()) == SAMPLES * LENGTH
        if group.layer == 2 and group.expert and len(group.linears) == 2:
            before = torch.cat([x for x, _ in pairs])
            every = normed(original, 2, torch.tensor(IDS[:4]))
            rows = [torch.cdist(row[None], every).argmin() for row in before]
            torch.testing.assert_close(before, every[torch.stack(rows)], atol=1e-4, rtol=1e-4)
            sent = original.layers[2].route(every).of("experts." + group.expert.rpartition(".")[2] + ".")[0]
            moved.append(not torch.equal(torch.stack(rows), sent))
        for linear in group.linears:
            group.weights[linear.name].copy_((group.weights[linear.name] * 3).round() / 3)
        return True

    walk(tmp_path, spec, torch.tensor(IDS), visit, num_followed=4)
    assert any(moved), "the changed model sends some tokens elsewhere"


def normed(decoder: Any, index: int, tokens: Tensor) -> Tensor:
    """What the router of a layer reads, (tokens, H)."""
    seen: list[Tensor] = []
    handle = decoder.layers[index].router.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        x = decoder.embed(tokens, torch.arange(tokens.shape[1])[None])
        for i in range(index + 1):
            x = decoder.block(i, x)
    handle.remove()
    return seen[0]


def test_the_model_stays_closer_to_its_parent_than_with_rounding(tmp_path: Path) -> None:
    source = moe_folder(tmp_path / "source", "mixtral")
    parent = logits_of(load_decoder(source.path)).log_softmax(-1)
    lost = []
    for stage in (Gptq(bits=3, group_size=16), Rtn(bits=3, group_size=16)):
        run(stage, source, tmp_path / type(stage).__name__)
        found = logits_of(load_decoder(tmp_path / type(stage).__name__)).log_softmax(-1)
        lost.append(float((parent.exp() * (parent - found)).sum(-1).mean()))
    assert lost[0] < lost[1]


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_awq_scales_what_goes_into_down_and_the_model_computes_the_same(family: str, tmp_path: Path) -> None:
    source = moe_folder(tmp_path / "source", family)
    report = run(Awq(bits=8, group_size=16), source, tmp_path / "out")["report"]
    spec = read_spec(source.path)
    for _, layer in expert_layers(spec):
        for role, linear in layer.linears.items():
            if "." in role:
                why = report["unscaled"].get(linear.name)
                assert why == (None if role.endswith(".down") else "the router and other experts read it too")
    assert any(x > 0 for name, x in report["exponent"].items() if ".experts." in name)
    found, expected = (logits_of(load_decoder(x)) for x in (tmp_path / "out", source.path))
    differs = (found - expected).abs().amax(-1) > 0.05 * float(expected.abs().max())
    assert float(differs.float().mean()) < 0.05, "but where a token is sent to another expert"
    total = sum(SAMPLES * LENGTH * layer.moe.top_k for _, layer in expert_layers(spec) if layer.moe)
    assert sum(report["expert_tokens"].values()) == total


def test_awq_names_experts_that_no_token_reaches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = unreached_folder(tmp_path / "source", "qwen3_moe")
    with caplog.at_level(logging.WARNING):
        report = run(Awq(group_size=16), source, tmp_path / "out")["report"]
    (name,) = [prefix(layer, 0) for _, layer in expert_layers(read_spec(source.path))]
    assert report["rounded_to_nearest"] == [name]
    assert report["without_inputs"] == []
    (line,) = [x.getMessage() for x in caplog.records]
    assert line.startswith(f"awq: 1 of 5 experts are reached by fewer than {LEAST_TOKENS} calibration tokens")
    assert line.endswith(f"{name} (0)")
    with Weights(source.path) as before, Weights(tmp_path / "out") as after:
        for new in read_spec(tmp_path / "out").match([f"{name}.*"]):
            old = next(x for x in read_spec(source.path).linears() if x.name == new.name)
            expected, _ = find_scales(load_linear(before, old), Quantization(4, 16, True))
            assert torch.equal(load_packed(after, new)[1], expected)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_a_smoothed_model_computes_the_same(family: str, tmp_path: Path) -> None:
    source = unreached_folder(tmp_path / "source", family)
    report = run(SmoothQuant(alpha=0.5, activations=None), source, tmp_path / "out")["report"]
    found, expected = (logits_of(load_decoder(x)) for x in (tmp_path / "out", source.path))
    torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)
    names = [prefix(layer, 0) for _, layer in expert_layers(read_spec(source.path))]
    assert report["calibrated_on_all_tokens"] == names
    with Weights(source.path) as before, Weights(tmp_path / "out") as after:
        for name in names:
            down = f"{name}.{'w2' if family == 'mixtral' else 'down_proj'}.weight"
            assert not torch.equal(before.load(down), after.load(down))
            assert report["alpha"][down.removesuffix(".weight")] == 0.5


def test_static_scales_of_all_experts_are_sensible(tmp_path: Path) -> None:
    source = unreached_folder(tmp_path / "source", "qwen2_moe")
    stage = SmoothQuant(activations="static")
    checkpoint = finished(tmp_path / "out", run(stage, source, tmp_path / "out"), stage)
    check_checkpoint(checkpoint, source)
    parent = logits_of(load_decoder(source.path))
    lost = (logits_of(load_decoder(checkpoint.path)) - parent).abs().mean() / parent.abs().mean()
    assert float(lost) < 0.1


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_a_cache_can_be_rounded(family: str, tmp_path: Path) -> None:
    source = moe_folder(tmp_path / "source", family)
    made = run(KvCache(), source, tmp_path / "out")
    check_checkpoint(finished(tmp_path / "out", made, KvCache()), source)
    assert made["spec"].kv_cache is not None
    assert len(made["report"]["relative_error"]) >= len(made["spec"].layers)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_a_rotated_model_computes_the_same(family: str, tmp_path: Path) -> None:
    source = moe_folder(tmp_path / "source", family)
    run(Rotate(), source, tmp_path / "out")
    found, expected = (logits_of(load_decoder(x)) for x in (tmp_path / "out", source.path))
    torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)
    with Weights(tmp_path / "out") as weights, Weights(source.path) as before:
        for gate in read_spec(source.path).gates():
            assert not torch.equal(weights.load(f"{gate.name}.weight"), before.load(f"{gate.name}.weight"))


# Refusals and `check`.


@pytest.mark.parametrize("stage", [AutoRound(), MixedPrecision(average_bits=4)])
def test_methods_that_do_not_take_experts_say_so(stage: Stage) -> None:
    spec = decoder_of(tiny_model("qwen3_moe")).spec
    with pytest.raises(
        UserError, match=r"^\w+: layer 1 of this qwen3_moe has 5 experts, .*; allowed: rtn, hqq, gptq, awq"
    ):
        stage.plan(spec, 100)


@pytest.mark.parametrize(
    "stage", [OnnxRuntime(), OnnxRuntime(operators="standard"), TorchCompile(), AutoGptq(), Gguf()]
)
def test_runtimes_that_do_not_take_experts_say_so(stage: Stage) -> None:
    plain = decoder_of(tiny_model("mixtral")).spec
    spec = plain.quantize({x.name: Quantization(4, 16, True) for x in plain.match(None)})
    with pytest.raises(UserError, match=r"eager|no architecture") as caught:
        stage.plan(spec, 100)
    assert "\n" not in str(caught.value)


def test_check_counts_experts(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny", "qwen2_moe")
    content = {
        "version": 1,
        "model": {"source": str(folder)},
        "calibration": {"source": "python", "samples": 4, "length": 16},
        "stages": [{"use": "gptq", "name": "w4", "group_size": 16}],
        "export": [{"use": "eager"}],
    }
    found = check(recipe.parse(content, "tiny"), Store(tmp_path / "store"))
    assert not [x for x in found.notes if "transformers" in x]
    stored = sum(x.nbytes for x in load_file(folder / "model.safetensors").values())
    assert found.spec.size_bytes() == stored
    assert "qwen2_moe, 3 layers" in found.table()
    run(Gptq(group_size=16), Artifact(folder, "checkpoint", KEY), tmp_path / "out")
    planned = next(x.plan for x in found.steps if x.name == "w4")
    assert planned.size_bytes == sum(x.nbytes for x in load_file(tmp_path / "out" / "model.safetensors").values())


@pytest.mark.parametrize(
    ("forms", "is_noted"),
    [
        ({"*": Quantization(4, 16, True)}, False),
        ({"*experts*": Quantization(4, 16, True), "*self_attn*": Quantization(8, None, False)}, False),
        ({"*self_attn*": Quantization(8, None, False)}, False),
        ({"*experts*": Quantization(4, 16, False)}, True),
        ({"*experts*": Quantization(8, None, True, "dynamic")}, True),
        ({"*experts.1.*": Quantization(4, 16, True)}, True),
        ({"*experts*down_proj": Quantization(8, 16, True), "*experts*[pe]_proj": Quantization(4, 16, True)}, True),
    ],
)
def test_experts_that_transformers_opens_to_other_weights_are_noted(
    forms: dict[str, Quantization], is_noted: bool
) -> None:
    spec = decoder_of(tiny_model("qwen3_moe")).spec
    for pattern, form in forms.items():
        spec = spec.quantize({x.name: form for x in spec.match([pattern]) if x != spec.head})
    assert (experts_note(spec) is not None) == is_noted
