"""Configs of every family, old and new style, become the table that their weights fit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from references import stored_weights, tiny_config, tiny_model

from strop.errors import UserError
from strop.families import FAMILIES, build_spec, opaque_spec
from strop.spec import Activations, ModelSpec, Quantization

Headers = dict[str, tuple[str, tuple[int, ...]]]


def headers(family: str, **changes: Any) -> Headers:
    weights = stored_weights(tiny_model(family, **changes))
    return {name: ("F32", tuple(tensor.shape)) for name, tensor in weights.items()}


def spec_of(family: str, config: Mapping[str, Any] | None = None, **changes: Any) -> ModelSpec:
    config = tiny_config(family, **changes).to_dict() if config is None else config
    return build_spec(config, headers(family, **changes), "float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_as_transformers_counts_them(family: str) -> None:
    assert spec_of(family).num_parameters() == tiny_model(family).num_parameters()


def test_reading_a_config_does_not_import_torch() -> None:
    code = "import sys, strop.families; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Rotary embeddings.

ROPES: Mapping[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768,
    },
    "yarn tuned": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 4096,
        "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 16, "beta_slow": 2, "truncate": False,
    },
    "yarn given": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 4096,
        "attention_factor": 1.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_frequencies_are_those_of_transformers(rope: dict[str, Any], head_dim: int) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    changes = {"rope_parameters": rope, "head_dim": head_dim, "max_position_embeddings": 131072}
    expected = LlamaRotaryEmbedding(tiny_config("llama", **changes))
    found = spec_of("llama", **changes).layers[0].rope
    assert found is not None
    assert found.factor == expected.attention_scaling
    # Mostly equal; a power that torch rounds the other way is one unit in the last place off.
    np.testing.assert_allclose(np.float32(found.inv_freq), expected.inv_freq.numpy(), rtol=1.3e-7)


def test_rope_of_older_configs_reads_the_same() -> None:
    new = tiny_config("llama", rope_parameters=ROPES["llama3"], max_position_embeddings=131072).to_dict()
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    scaling = dict(ROPES["llama3"])
    old |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    assert spec_of("llama", old) == spec_of("llama", new)
    scaling["type"] = scaling.pop("rope_type")
    assert spec_of("llama", old) == spec_of("llama", new)


def test_gemma3_has_a_local_and_a_global_rope_in_both_styles() -> None:
    new = tiny_config("gemma3_text").to_dict()
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert spec_of("gemma3_text", old) == spec_of("gemma3_text", new)
    local, everywhere, again = (x.rope for x in spec_of("gemma3_text").layers)
    assert local == again != everywhere


def test_longrope_keeps_to_the_context_whose_factors_it_uses() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 2.0, 4.0, 8.0]}
    changes = {"max_position_embeddings": 4096, "original_max_position_embeddings": 64, "rope_parameters": rope}
    spec = spec_of("phi3", **changes)
    assert spec.max_positions == 64
    assert spec.layers[0].rope is not None
    assert spec.layers[0].rope.factor > 1


def test_fields_left_out_take_the_values_of_transformers() -> None:
    for family in FAMILIES:
        config = tiny_config(family)
        silent = {
            k: v for k, v in config.to_dict().items() if v != getattr(type(config)(), k, None) or k == "vocab_size"
        }
        silent["max_position_embeddings"] = config.max_position_embeddings
        assert spec_of(family, {**silent, "model_type": family}) == spec_of(family)


# Windows.


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("mistral", {"sliding_window": 7}, [7, 7, 7]),
        ("mistral", {"sliding_window": None}, [None] * 3),
        ("qwen2", {"sliding_window": 7}, [None] * 3),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 2}, [None, None, 7]),
        ("gemma2", {"layer_types": None}, [5, None, 5]),
        ("gemma3_text", {"layer_types": None, "num_hidden_layers": 7}, [5, 5, 5, 5, 5, None, 5]),
        ("phi3", {"sliding_window": 7}, [7, 7, 7]),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 7}, [None, 7, None]),
    ],
)
def test_windows_are_where_transformers_has_them(
    family: str, changes: dict[str, Any], windows: list[int | None]
) -> None:
    assert [x.window for x in spec_of(family, **changes).layers] == windows


# Checkpoints of the bare model.


def test_gpt2_without_its_prefix_is_found() -> None:
    bare = {name.removeprefix("transformer."): x for name, x in headers("gpt2").items()}
    spec = build_spec(tiny_config("gpt2").to_dict(), bare, "float32")
    assert spec.layers[0].linears["qkv"].name == "h.0.attn.c_attn"
    assert spec.embedding == "wte"


# Quantized checkpoints.


def packed_headers(names: set[str], bits: int, group: int | None, symmetric: bool) -> Headers:
    """Headers of the tiny llama with some linears packed."""
    found = headers("llama", tie_word_embeddings=False)
    for name in names:
        rows, columns = found.pop(f"{name}.weight")[1]
        groups = 1 if group is None else columns // group
        found[f"{name}.weight_packed"] = ("I32", (rows, -(-columns * bits // 32)))
        found[f"{name}.weight_scale"] = ("BF16", (rows, groups))
        found[f"{name}.weight_shape"] = ("I64", (2,))
        if not symmetric:
            found[f"{name}.weight_zero_point"] = ("I32", (-(-rows * bits // 32), groups))
    return found


def group_of(targets: list[str], bits: int = 4, group: int | None = 16, symmetric: bool = True) -> dict[str, Any]:
    """One config group as llm-compressor writes it."""
    return {
        "targets": targets,
        "input_activations": None,
        "output_activations": None,
        "weights": {
            "num_bits": bits,
            "type": "int",
            "symmetric": symmetric,
            "strategy": "channel" if group is None else "group",
            "group_size": group,
            "dynamic": False,
            "actorder": None,
        },
    }


def settings(*groups: dict[str, Any], ignore: tuple[str, ...] = ("lm_head",), **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {f"group_{i}": x for i, x in enumerate(groups)},
        "ignore": list(ignore),
        **changes,
    }


def quantized(tensors: Headers, quantization_config: dict[str, Any]) -> ModelSpec:
    config = tiny_config("llama", tie_word_embeddings=False).to_dict()
    return build_spec({**config, "quantization_config": quantization_config}, tensors, "float32")


INSIDE = {x.name for x in build_spec(tiny_config("llama").to_dict(), headers("llama"), "float32").match(None)}


@pytest.mark.parametrize(
    ("bits", "group", "symmetric"), [(4, 16, True), (8, None, False), (3, 16, False), (2, 16, True)]
)
def test_targets_linear_means_every_linear_that_is_not_ignored(bits: int, group: int | None, symmetric: bool) -> None:
    tensors = packed_headers(INSIDE, bits, group, symmetric)
    spec = quantized(tensors, settings(group_of(["Linear"], bits, group, symmetric)))
    assert {x.quantization for x in spec.match(None)} == {Quantization(bits, group, symmetric)}
    assert spec.head.quantization is None


def test_names_win_over_patterns_and_patterns_over_classes() -> None:
    attention = {x for x in INSIDE if "self_attn" in x}
    one = "model.layers.1.self_attn.o_proj"
    tensors = packed_headers(INSIDE - attention, 4, 16, True)
    tensors |= {k: v for k, v in packed_headers(attention, 8, 16, True).items() if "self_attn" in k}
    for name in [x for x in tensors if x.startswith(f"{one}.")]:
        del tensors[name]
    tensors |= {k: v for k, v in packed_headers({one}, 2, None, True).items() if k.startswith(f"{one}.")}
    for name in attention:
        tensors.pop(f"{name}.weight", None)
    spec = quantized(
        tensors,
        settings(group_of(["Linear"]), group_of([r"re:.*self_attn\..*"], 8), group_of([one], 2, None)),
    )
    bits = {x.name: x.quantization.bits for x in spec.match(None) if x.quantization is not None}
    assert bits == {name: 2 if name == one else 8 if name in attention else 4 for name in INSIDE}


def test_ignored_patterns_stay_dense() -> None:
    dense = {x for x in INSIDE if x.endswith("down_proj")}
    tensors = packed_headers(INSIDE - dense, 4, 16, True)
    spec = quantized(tensors, settings(group_of(["Linear"]), ignore=("lm_head", "re:.*down_proj")))
    assert {x.name for x in spec.match(None) if x.quantization is None} == dense


INPUTS = {
    "dynamic": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
    "static": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False},
}


def int8_headers(activations: str) -> Headers:
    """Headers of a model whose inner linears are int-quantized."""
    found = dict(headers("llama", tie_word_embeddings=False))
    for name in INSIDE:
        shape = found[f"{name}.weight"][1]
        found[f"{name}.weight"] = ("I8", shape)
        found[f"{name}.weight_scale"] = ("BF16", (shape[0], 1))
        if activations == "static":
            found[f"{name}.input_scale"] = ("BF16", (1,))
    return found


def int8_group(activations: str, **changes: Any) -> dict[str, Any]:
    inputs = {"format": "int-quantized", "input_activations": INPUTS[activations]}
    return {**group_of(["Linear"], 8, None), **inputs, **changes}


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_int8_weights_with_rounded_inputs_are_read(activations: Activations) -> None:
    spec = quantized(int8_headers(activations), settings(int8_group(activations), format="int-quantized"))
    assert {x.quantization for x in spec.match(None)} == {Quantization(8, None, True, activations)}
    assert spec.head.quantization is None


ROUNDED_OTHERWISE: Mapping[str, dict[str, Any]] = {
    "four bits": {**INPUTS["dynamic"], "num_bits": 4},
    "floats": {**INPUTS["dynamic"], "type": "float"},
    "asymmetric": {**INPUTS["dynamic"], "symmetric": False},
    "dynamic by tensor": {**INPUTS["dynamic"], "strategy": "tensor"},
    "by group": {**INPUTS["dynamic"], "strategy": "group"},
    "not said how": {"num_bits": 8, "strategy": ["token"]},
}


@pytest.mark.parametrize("inputs", ROUNDED_OTHERWISE.values(), ids=ROUNDED_OTHERWISE)
def test_inputs_that_are_rounded_otherwise_are_refused(inputs: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="int-quantized of 8 bits, symmetric, channel") as error:
        quantized(int8_headers("dynamic"), settings(int8_group("dynamic", input_activations=inputs)))
    assert "\n" not in str(error.value)


def test_int8_weights_that_no_group_names_are_refused() -> None:
    with pytest.raises(UserError, match="is stored in codes, but no group of quantization_config names it"):
        quantized(int8_headers("dynamic"), settings(int8_group("dynamic"), ignore=("lm_head", "re:.*down_proj")))
    config = tiny_config("llama", tie_word_embeddings=False).to_dict()
    with pytest.raises(UserError, match="is stored in codes, but there is no quantization_config"):
        build_spec(config, int8_headers("dynamic"), "float32")


def test_a_static_scale_that_is_missing_is_refused() -> None:
    with pytest.raises(UserError, match=r"no tensor model\.layers\.0\.self_attn\.q_proj\.input_scale"):
        quantized(int8_headers("dynamic"), settings(int8_group("static")))


REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "another method": ({"quant_method": "gptq"}, "compressed-tensors"),
    "another format": (settings(group_of(["Linear"]), format="float-quantized"), "pack-quantized"),
    "five bits": (settings(group_of(["Linear"], 5)), "2, 3, 4, 8"),
    "activations": (settings({**group_of(["Linear"]), "input_activations": {"num_bits": 8}}), "weights only"),
    "nothing named": (settings(group_of(["Embedding"])), "no group of quantization_config names it"),
}


@pytest.mark.parametrize(("found", "allowed"), REFUSED.values(), ids=REFUSED)
def test_other_quantized_formats_are_refused_by_name(found: dict[str, Any], allowed: str) -> None:
    with pytest.raises(UserError, match=allowed):
        quantized(packed_headers(INSIDE, 4, 16, True), found)


def test_a_named_linear_must_be_stored_packed() -> None:
    with pytest.raises(UserError, match="not stored in codes"):
        quantized(headers("llama", tie_word_embeddings=False), settings(group_of(["Linear"])))


def test_activation_order_with_an_index_is_refused() -> None:
    tensors = packed_headers(INSIDE, 4, 16, True)
    tensors["model.layers.0.mlp.down_proj.weight_g_idx"] = ("I32", (80,))
    with pytest.raises(UserError, match="g_idx"):
        quantized(tensors, settings(group_of(["Linear"])))


# What is refused.


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"model_type": "lama"}, "did you mean 'llama'"),
        ("llama", {"model_type": None}, "allowed: gemma2"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "allowed: default, linear"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor must be a positive number"),
        ("llama", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ("llama", {"hidden_size": "48"}, "hidden_size must be a whole number"),
        ("llama", {"num_key_value_heads": 4}, "does not divide"),
        ("llama", {"intermediate_size": 96}, r"has shape \[80, 48\], its config.json asks for \[96, 48\]"),
        ("llama", {"num_hidden_layers": 4}, "no tensor model.layers.3"),
        ("llama", {"attention_bias": True}, "no tensor model.layers.0.self_attn.q_proj.bias"),
        ("gemma2", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gpt2", {"add_cross_attention": True}, "cross attention"),
    ],
)
def test_what_does_not_fit_is_named(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        build_spec({**tiny_config(family).to_dict(), **changes}, headers(family), "float32")
    assert "\n" not in str(caught.value)


# Families that are not known.


def test_an_unknown_family_has_a_size_but_no_stage_can_change_it() -> None:
    config = {"model_type": "novel", "vocab_size": 11, "n_positions": 99}
    spec = opaque_spec(config, {"a": ("F32", (3, 5)), "b": ("BF16", (7,)), "c": ("U8", (2,))}, "float32")
    assert (spec.size_bytes(), spec.max_positions, spec.vocab_size) == (3 * 5 * 4 + 7 * 2 + 2, 99, 11)
    assert ModelSpec.from_json(spec.to_json()) == spec
    with pytest.raises(UserError, match="novel is not a known family"):
        spec.match(None)


ODD: tuple[Any, ...] = (None, "x", -1, 0, 1.5, 10**9, [], {}, ["x"], {"x": 1}, True, float("nan"))


def assert_read_or_refused(config: dict[str, Any], tensors: Headers) -> None:
    line = ""
    try:
        build_spec(config, tensors, "float32")
    except UserError as error:
        line = str(error)
    assert "\n" not in line
    assert len(line) < 400


@pytest.mark.parametrize("family", FAMILIES)
def test_odd_values_are_read_or_refused_in_one_line(family: str) -> None:
    tensors = headers(family)
    config = {**tiny_config(family).to_dict(), "use_sliding_window": True}
    for key in (*config, "rope_scaling", "rope_theta", "quantization_config", "text_config", "n_inner"):
        for value in ODD:
            assert_read_or_refused({**config, key: value}, tensors)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn", "longrope", None, []])
def test_odd_ropes_are_read_or_refused_in_one_line(kind: Any) -> None:
    tensors, config = headers("phi3"), tiny_config("phi3").to_dict()
    rope = {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
    extra = "original_max_position_embeddings beta_fast beta_slow attention_factor short_factor mscale mscale_all_dim"
    for key in (*rope, *extra.split(), "partial_rotary_factor"):
        for value in ODD:
            for family in ("phi3", "llama"):
                changed = {"rope_parameters": {**rope, key: value}, "model_type": family}
                assert_read_or_refused({**config, **changed}, tensors)


def test_odd_quantization_configs_are_read_or_refused_in_one_line() -> None:
    tensors = packed_headers(INSIDE, 4, 16, True)
    config = tiny_config("llama", tie_word_embeddings=False).to_dict()
    whole, group = settings(group_of(["Linear"])), group_of(["Linear"])
    for value in (*ODD, ["re:("], [7]):
        changes = [{**whole, key: value} for key in whole]
        changes += [settings({**group, key: value}) for key in group]
        changes += [settings({**group, "weights": {**group["weights"], key: value}}) for key in group["weights"]]
        for change in changes:
            assert_read_or_refused({**config, "quantization_config": change}, tensors)
