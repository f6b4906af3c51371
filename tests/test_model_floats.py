"""Checkpoints in float formats: strop, transformers and their own bytes agree on what was written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from references import VOCAB_SIZE, tiny_folder
from torch import Tensor
from transformers import AutoModelForCausalLM

from strop.artifact import Artifact, Manifest, write_manifest
from strop.conformance import check_checkpoint
from strop.errors import ConformanceError, UserError
from strop.export.eager import Eager
from strop.layers import FixedLinear, fold, round_inputs
from strop.methods.gptq import Gptq
from strop.methods.rtn import Rtn
from strop.model import Weights, load_decoder, load_linear, read_config, read_headers, read_spec, stored_tensors
from strop.numerics import dequantize, find_scales, quantize
from strop.safetensors_file import WEIGHTS
from strop.spec import ModelSpec, Quantization
from strop.stage import Context

KEY = "0" * 64
WIDTHS = {"hidden_size": 192, "intermediate_size": 64, "head_dim": 32}
FIELDS: list[dict[str, Any]] = [
    {"format": "fp8"},
    {"format": "fp8", "activations": "dynamic"},
    {"format": "fp8", "per_tensor": True, "activations": "dynamic"},
    {"format": "mxfp4"},
    {"format": "nvfp4"},
    {"format": "nf4"},
    {"format": "llm_int8"},
]
THEIRS = ("nf4", "llm_int8")
WEIGHTS_ONLY = [x for x in FIELDS if "activations" not in x and x["format"] not in THEIRS]
IDS = torch.arange(40).reshape(2, 20) * 7


def rounded(source: Path, out: Path, fields: Mapping[str, Any]) -> ModelSpec:
    """What `rtn` makes of a folder, as an artifact."""
    out.mkdir()
    result = Rtn.model_validate(fields).run(Artifact(source, "checkpoint", KEY), out, Context(out.parent, threads=1))
    spec: ModelSpec = result["spec"]
    write_manifest(out, Manifest("checkpoint", KEY, spec.to_json()))
    return spec


def eager_logits(folder: Path, rounds: bool = True) -> Tensor:
    decoder = load_decoder(folder)
    fold(decoder)
    round_inputs(decoder, rounds=rounds)
    positions = torch.arange(IDS.shape[1]).expand(IDS.shape)
    with torch.inference_mode():
        x = decoder.embed(IDS, positions)
        for index in range(len(decoder.layers)):
            x = decoder.block(index, x)
        return decoder.logits(x)


def opened_logits(folder: Path) -> Tensor:
    with torch.inference_mode():
        found: Tensor = AutoModelForCausalLM.from_pretrained(folder)(IDS).logits
    return found.float()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_checkpoints_hold_the_nearest_codes_as_planned(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    widths = WIDTHS if family == "llama" else {"n_embd": 192, "n_inner": 64}
    source = tiny_folder(tmp_path / "source", family, **widths)
    plan = Rtn.model_validate(fields).plan(read_spec(source), 0)
    spec = rounded(source, tmp_path / "out", fields)
    assert spec == plan.spec
    content = (tmp_path / "out" / WEIGHTS).read_bytes()
    assert len(content) - 8 - int.from_bytes(content[:8], "little") == spec.size_bytes() == plan.size_bytes
    assert read_headers(tmp_path / "out") == stored_tensors(spec)
    decoder = load_decoder(tmp_path / "out")
    with Weights(source) as before, Weights(tmp_path / "out") as after:
        for old, new in zip(read_spec(source).match(None), spec.match(None), strict=True):
            weight, q = load_linear(before, old), new.quantization
            assert q is not None
            expected = load_linear(after, new)
            module = decoder.linear(new.name)
            assert isinstance(module, FixedLinear)
            assert torch.equal(module.dense(), expected)
            assert torch.equal(module.rows(torch.tensor([[3, 0]])), expected[torch.tensor([[3, 0]])])
            if q.format != "nvfp4":  # its largest scale is shared with others
                scale, zero = find_scales(weight, q)
                assert torch.equal(expected, dequantize(quantize(weight, scale, zero, q.bits, q.format), scale, zero))
            assert float((expected - weight).norm() / weight.norm()) < (0.03 if q.bits == 8 else 0.15)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_opens_what_bitsandbytes_holds(dtype: str, tmp_path: Path) -> None:
    for name in ("bitsandbytes", "accelerate"):
        pytest.importorskip(name)
    source = tiny_folder(tmp_path / "source", dtype=dtype, **WIDTHS)
    for format in THEIRS:
        folder = tmp_path / format
        spec = rounded(source, folder, {"format": format})
        (folder / "strop.json").unlink()
        assert read_spec(folder).layers == spec.layers
        opened = AutoModelForCausalLM.from_pretrained(folder).dequantize()
        modules = dict(opened.named_modules())
        with Weights(folder) as weights:
            for linear in spec.match(None):
                found, expected = modules[linear.name].weight.float(), load_linear(weights, linear)
                torch.testing.assert_close(found, expected, rtol=1e-6 if dtype == "float32" else 0.004, atol=0)
        if dtype == "float32":
            with torch.inference_mode():
                torch.testing.assert_close(opened(IDS).logits, eager_logits(folder), atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("fields", WEIGHTS_ONLY, ids=str)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_transformers_opens_them_to_the_same_logits(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", family, **WIDTHS)
    rounded(source, tmp_path / "out", fields)
    settings = read_config(tmp_path / "out")["quantization_config"]
    assert settings.get("dequantize", False) == (fields["format"] != "fp8")
    torch.testing.assert_close(opened_logits(tmp_path / "out"), eager_logits(tmp_path / "out"), atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("fields", [x for x in FIELDS if "activations" in x], ids=str)
def test_transformers_rounds_inputs_as_we_do(fields: dict[str, Any], tmp_path: Path) -> None:
    spec = rounded(tiny_folder(tmp_path / "source", **WIDTHS), tmp_path / "out", fields)
    opened, decoder = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), load_decoder(tmp_path / "out")
    opened(IDS)  # unpacks the weights
    modules, generator = dict(opened.named_modules()), torch.Generator().manual_seed(0)
    for linear in spec.match(None):
        x = 2 * torch.randn(2, 5, linear.in_features, generator=generator)
        with torch.inference_mode():
            found, ours = modules[linear.name](x), decoder.linear(linear.name)(x)
        torch.testing.assert_close(found, ours, atol=1e-5, rtol=1e-5)
    plain, exact = eager_logits(tmp_path / "out"), eager_logits(tmp_path / "out", rounds=False)
    assert not torch.equal(plain, exact)
    assert float((plain - exact).norm() / exact.norm()) < 0.3


def test_static_scales_cover_the_inputs_of_the_calibration_text(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", **WIDTHS)
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, VOCAB_SIZE, (4, 24)))
    for name in ("out", "scratch"):
        (tmp_path / name).mkdir()
    context = Context(tmp_path / "scratch", threads=1, calibration=tmp_path / "ids.npy")
    stage = Gptq(format="fp8", activations="static")
    spec = stage.run(Artifact(source, "checkpoint", KEY), tmp_path / "out", context)["spec"]
    assert spec == read_spec(tmp_path / "out") == stage.plan(read_spec(source), 96).spec
    opened, decoder = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), load_decoder(tmp_path / "out")
    opened(IDS)
    modules = dict(opened.named_modules())
    x = torch.randn(2, 5, 192, generator=torch.Generator().manual_seed(0))
    name = spec.layers[1].linears["q"].name
    with torch.inference_mode():
        torch.testing.assert_close(modules[name](x), decoder.linear(name)(x), atol=1e-5, rtol=1e-5)


def test_linears_that_run_as_one_share_the_global_scale(tmp_path: Path) -> None:
    spec = rounded(tiny_folder(tmp_path / "source", **WIDTHS), tmp_path / "out", {"format": "nvfp4"})
    with Weights(tmp_path / "out") as weights:
        for layer in spec.layers:
            for group in layer.groups():
                assert len({float(weights.load(f"{x.name}.weight_global_scale")) for x in group}) == 1


def test_a_format_for_each_pattern(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", dtype="bfloat16", **WIDTHS)
    chain = [
        {"format": "mxfp4", "targets": ["*.mlp.*"]},
        {"format": "fp8", "targets": ["*.v_proj", "*.o_proj"]},
        {"bits": 8, "group_size": 32, "targets": ["*.q_proj"]},
        {"format": "nvfp4", "targets": ["*.k_proj"]},
    ]
    folder = source
    for i, fields in enumerate(chain):
        spec = rounded(folder, tmp_path / str(i), fields)
        folder = tmp_path / str(i)
    found = {
        role: (x.quantization.format, x.quantization.bits)
        for role, x in spec.layers[0].linears.items()
        if x.quantization
    }
    expected = {"q": ("int", 8), "k": ("nvfp4", 4), "v": ("fp8", 8), "o": ("fp8", 8)}
    assert found == expected | dict.fromkeys(("gate", "up", "down"), ("mxfp4", 4))
    assert read_config(folder)["quantization_config"]["format"] == "mixed-precision"
    (folder / "strop.json").unlink()
    assert read_spec(folder).layers == spec.layers
    opened = AutoModelForCausalLM.from_pretrained(folder)
    opened(IDS)  # unpacks the weights
    modules = dict(opened.named_modules())
    with Weights(folder) as weights:
        for linear in spec.match(None):
            assert torch.equal(modules[linear.name].weight, load_linear(weights, linear).bfloat16())


def test_bitsandbytes_holds_one_format(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", **WIDTHS)
    spec = Rtn(format="llm_int8").plan(read_spec(source), 0).spec
    assert "bitsandbytes rounds inputs too when it runs llm_int8" in " ".join(Eager().plan(spec, 0).notes)
    rounded(source, tmp_path / "once", {"format": "nf4", "targets": ["*.mlp.*"]})
    for fields in ({"bits": 8}, {"format": "llm_int8"}, {"format": "fp8"}):
        with pytest.raises(UserError, match=r"format (nf4|llm_int8): a checkpoint of bitsandbytes holds one format"):
            Rtn.model_validate({**fields, "targets": ["*.q_proj"]}).plan(read_spec(tmp_path / "once"), 0)
    with pytest.raises(UserError, match="format nf4: lm_head is the embedding too, which bitsandbytes keeps"):
        Rtn.model_validate({"format": "nf4", "targets": ["lm_head"]}).plan(read_spec(source), 0)


def test_experts_are_stored_in_formats_too_but_not_for_bitsandbytes(tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", "mixtral", **WIDTHS)
    for fields in FIELDS:
        if fields["format"] in THEIRS:
            with pytest.raises(
                UserError, match=r"experts\.0.* is of an expert, which transformers does not open in it"
            ):
                Rtn.model_validate(fields).plan(read_spec(source), 0)
            continue
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        spec = rounded(source, folder, fields)
        assert {x.quantization for x in spec.match(None)} == {spec.layers[0].linears["experts.0.up"].quantization}
        check_checkpoint(Artifact(folder, "checkpoint", KEY), manifested(source))
        if fields == {"format": "fp8"}:
            torch.testing.assert_close(opened_logits(folder), eager_logits(folder), atol=5e-5, rtol=1e-5)
    notes = Rtn(format="nvfp4").plan(read_spec(source), 0).notes
    assert notes == Gptq(format="nvfp4").plan(read_spec(source), 96).notes
    assert "experts in nvfp4 are for vLLM" in notes[0]


@pytest.mark.parametrize("fields", [x for x in FIELDS if x["format"] not in THEIRS], ids=str)
def test_a_tied_head_is_the_embedding_too(fields: dict[str, Any], tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", **WIDTHS)
    spec = rounded(source, tmp_path / "out", {**fields, "targets": ["*"]})
    assert spec.is_tied
    check_checkpoint(Artifact(tmp_path / "out", "checkpoint", KEY), manifested(source))
    decoder = load_decoder(tmp_path / "out")
    assert decoder.embedding is None
    with Weights(tmp_path / "out") as weights:
        table = weights.load("model.embed_tokens.weight")
        assert torch.equal(table, load_linear(weights, spec.head))
    assert torch.equal(decoder.embed(IDS, IDS), table[IDS])
    torch.testing.assert_close(
        eager_logits(tmp_path / "out", rounds=False), unfolded_logits(tmp_path / "out"), atol=5e-5, rtol=1e-5
    )


def unfolded_logits(folder: Path) -> Tensor:
    """Weights unpacked at every call, inputs as they are."""
    decoder = load_decoder(folder)
    round_inputs(decoder, rounds=False)
    x = decoder.embed(IDS, torch.arange(IDS.shape[1]).expand(IDS.shape))
    for index in range(len(decoder.layers)):
        x = decoder.block(index, x)
    return decoder.logits(x)


def manifested(folder: Path) -> Artifact:
    write_manifest(folder, Manifest("checkpoint", KEY, read_spec(folder).to_json()))
    return Artifact(folder, "checkpoint", KEY)


@pytest.mark.parametrize(
    ("fields", "part", "value", "message"),
    [
        ({"format": "fp8"}, "weight", 127, "not finite"),
        ({"format": "fp8"}, "weight", 56, "every code of"),
        ({"format": "mxfp4"}, "weight_packed", 0x22, "every code of"),
        ({"format": "nvfp4"}, "weight_scale", 0, "scales of zero"),
        ({"format": "nvfp4"}, "weight_scale", 127, "not finite"),
    ],
)
def test_damage_is_found(fields: dict[str, Any], part: str, value: int, message: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = tiny_folder(tmp_path / "source", **WIDTHS)
    spec = rounded(source, tmp_path / "out", fields)
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    tensors[f"{spec.layers[1].linears['up'].name}.{part}"].view(torch.uint8).fill_(value)
    save_file(tensors, tmp_path / "out" / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ConformanceError, match=message):
        check_checkpoint(Artifact(tmp_path / "out", "checkpoint", KEY), manifested(source))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "mxfp6-pack-quantized"}, "mxfp6-pack-quantized.*not supported; allowed: .*nvfp4-pack-quantized"),
        ({"weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 16}}, "not supported"),
        ({"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}, "not supported"),
        (
            {"input_activations": {"num_bits": 4, "type": "float", "strategy": "group", "dynamic": True}},
            "not supported",
        ),
    ],
)
def test_foreign_formats_are_refused_in_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    rounded(tiny_folder(tmp_path / "source", **WIDTHS), tmp_path / "out", {"format": "mxfp4"})
    (tmp_path / "out" / "strop.json").unlink()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"].update(change)
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        read_spec(tmp_path / "out")


OVERRIDES: list[dict[str, Any]] = [
    {"targets": ["*.1.*.v_proj"], "format": "fp8", "activations": "dynamic"},
    {"targets": ["*.v_proj"], "bits": 8},
    {"targets": ["*.mlp.*"], "format": "nvfp4"},
]


@pytest.mark.parametrize("method", [Rtn, Gptq])
def test_overrides_by_pattern_are_stages_of_their_own(method: Any, tmp_path: Path) -> None:
    source = tiny_folder(tmp_path / "source", **WIDTHS)
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, VOCAB_SIZE, (4, 24)))
    for name in ("out", "scratch"):
        (tmp_path / name).mkdir()
    context = Context(tmp_path / "scratch", threads=1, calibration=tmp_path / "ids.npy")
    stage = method.model_validate({"bits": 3, "group_size": 32, "overrides": OVERRIDES})
    spec = stage.run(Artifact(source, "checkpoint", KEY), tmp_path / "out", context)["spec"]
    assert spec == stage.plan(read_spec(source), 96).spec == read_spec(tmp_path / "out")
    fp8 = Quantization(8, None, True, "dynamic", "fp8")
    for index, layer in enumerate(spec.layers):
        found = {role: x.quantization for role, x in layer.linears.items()}
        assert found["v"] == (fp8 if index == 1 else Quantization(8, 32, True))
        assert {found[x] for x in ("gate", "up", "down")} == {Quantization(4, 16, True, format="nvfp4")}
        assert {found[x] for x in ("q", "k", "o")} == {Quantization(3, 32, True)}
    if method is Rtn:
        for role, fields in {"q": {"bits": 3, "group_size": 32}, "v": {**OVERRIDES[0], "targets": None}}.items():
            folder, linear = tmp_path / role, spec.layers[1].linears[role]
            rounded(source, folder, fields)
            with Weights(folder) as one, Weights(tmp_path / "out") as other:
                assert torch.equal(load_linear(one, linear), load_linear(other, linear))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"targets": ["*.x_proj"]}, r"overrides\[0\]: pattern '\*\.x_proj' matches none of the stage's targets"),
        ({"targets": ["*.q_proj"], "format": "mxfp4", "bits": 3}, r"overrides\[0\]: bits 3: format mxfp4 has 4"),
        ({"targets": ["*.q_proj"], "activations": "static", "format": "fp8"}, "activations static needs text"),
        ({"targets": ["*.q_proj"], "group_size": 36}, "group_size 36 does not divide the 48 inputs"),
    ],
)
def test_bad_overrides_are_refused_in_one_line(overrides: Any, message: str, tmp_path: Path) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source"))  # 48 wide
    with pytest.raises(UserError, match=message) as caught:
        Rtn.model_validate({"group_size": 16, "overrides": [overrides]}).plan(spec, 0)
    assert "\n" not in str(caught.value)


def test_what_an_override_leaves_out_is_left_out_of_its_key() -> None:
    one, other = ({"targets": ["*.q_proj"], "bits": 8, **x} for x in ({}, {"group_size": 64}))
    dumped = [Rtn.model_validate({"group_size": 32, "overrides": [x]}).model_dump(mode="json") for x in (one, other)]
    assert [x["overrides"] for x in dumped] == [[one], [other]]


@pytest.mark.parametrize("stage", [Rtn, Gptq])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "mxfp4", "bits": 3}, "bits 3: format mxfp4 has 4; leave bits out, or take int"),
        ({"format": "fp8", "bits": 4}, "bits 4: format fp8 has 8"),
        ({"format": "fp8", "group_size": 64}, "group_size 64: format fp8 has null; leave group_size out"),
        ({"format": "nvfp4", "group_size": 32}, "group_size 32: format nvfp4 has 16"),
        ({"format": "fp8", "symmetric": False}, "symmetric false: format fp8 has true"),
        ({"format": "nvfp4", "activations": "dynamic"}, "activations dynamic: format nvfp4 is for weights only"),
        ({"per_tensor": True}, "per_tensor true: only format fp8 has one scale for a matrix, found int"),
        ({"format": "mxfp4"}, "format mxfp4: its blocks of 32 do not divide the 48 inputs of model.layers.0"),
    ],
)
def test_bad_combinations_are_refused_in_one_line(
    stage: Any, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    spec = read_spec(tiny_folder(tmp_path / "source"))  # 48 wide
    with pytest.raises(UserError) as caught:
        stage.model_validate(fields).plan(spec, 96)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_what_the_format_has_may_be_said() -> None:
    for fields in ({"format": "mxfp4", "bits": 4, "group_size": 32}, {"format": "fp8", "bits": 8, "group_size": None}):
        assert Rtn.model_validate(fields).format == fields["format"]
    assert Quantization(4, 16, True, None, "nvfp4") == Quantization(4, 16, True, format="nvfp4")
