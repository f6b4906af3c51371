"""A family's config.json and tensor headers -> `ModelSpec`. Torch-free, so `strop check` can use it.

Leaves out reading the files (model.py). What a config leaves unsaid takes the value that transformers would give it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from strop.errors import UserError, did_you_mean
from strop.spec import (
    FIXED_FORMATS,
    QUANT_STATE,
    SHARED,
    Activations,
    CacheFormat,
    CacheQuantization,
    CacheScales,
    DType,
    LayerSpec,
    Linear,
    ModelSpec,
    Moe,
    Norm,
    NumberFormat,
    Quantization,
    Rope,
)

Config = Mapping[str, Any]
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> (safetensors dtype such as `F32`, shape)."""
Activation = Literal["silu", "gelu", "gelu_tanh"]
Floats = NDArray[np.float32]

_DEFAULTS: Mapping[str, Config] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "gemma2": {
        "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    },
    "phi3": {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "smollm3": {"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
    "mixtral": {
        "num_key_value_heads": 8, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "num_local_experts": 8,
        "num_experts_per_tok": 2, "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "num_key_value_heads": 16, "sliding_window": 4096, "qkv_bias": True, "num_local_experts": 60,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4, "sliding_window": 4096, "num_local_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "gpt2": {"tie_word_embeddings": True, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5},
}  # fmt: skip
"""What transformers assumes where a config is silent, for the fields read here and only where families differ."""
FAMILIES: tuple[str, ...] = tuple(_DEFAULTS)
"""Every `model_type` whose architecture is known."""
EXPERT_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Those whose layers may have experts."""
WITHOUT_ATTENTION_BIAS = ("mistral", "qwen2", "mixtral", "qwen2_moe")
"""Those that do not read the field attention_bias."""
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
BITS = (2, 3, 4, 8)
CACHE_TYPES: Mapping[CacheFormat, tuple[str, int]] = {"int8": ("int", 8), "int4": ("int", 4), "fp8": ("float", 8)}
"""Type and bits of compressed-tensors."""
CACHE_STRATEGIES: Mapping[CacheScales, str] = {"tensor": "tensor", "head": "attn_head"}
"""What compressed-tensors calls it."""
CACHE_KEY = "strop_kv_cache"
"""Of config.json, for what compressed-tensors has no words for: other libraries read over it."""
FORMATS: Mapping[str, NumberFormat] = {
    "pack-quantized": "int",
    "int-quantized": "int",
    "float-quantized": "fp8",
    "mxfp4-pack-quantized": "mxfp4",
    "nvfp4-pack-quantized": "nvfp4",
}
"""What compressed-tensors calls a format -> what is stored in it."""
GROUPED = ("group", "tensor_group")
STRATEGIES: Mapping[str, tuple[str, ...]] = {
    "fp8": ("channel", "tensor"),
    "mxfp4": ("group",),
    "nvfp4": ("tensor_group",),
}
"""What may share a scale, in its words."""
LARGEST_HEAD_DIM = 4096
"""Far above any model's; keeps a damaged config from filling memory with frequencies."""
UNSAID_CONTEXT = 2048
"""Tokens that a model of an unknown family is given where its config names no limit."""
_TENSOR_BYTES: Mapping[str, int] = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}


def build_spec(config: Config, tensors: Tensors, dtype: DType) -> ModelSpec:
    """The table of a checkpoint.

    Args:
        config: config.json.
        tensors: Every tensor of the checkpoint.
        dtype: Of the unquantized tensors.

    Raises:
        UserError: The family, or something that its config asks for, is not supported, or a tensor is missing or
            has another shape than the config says.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _DEFAULTS:
        raise UserError(
            f"config.json: model_type {family!r} is not a known family; {did_you_mean(str(family), FAMILIES)}"
        )
    complete = {**_DEFAULTS[family], **config}
    spec = _gpt2(complete, tensors, dtype) if family == "gpt2" else _llama_like(complete, tensors, dtype)
    spec = dataclasses.replace(
        spec.quantize(_read_quantizations(config, spec, tensors)), kv_cache=_read_cache_quantization(config)
    )
    _check_shapes(spec, tensors)
    return spec


def opaque_spec(config: Config, tensors: Tensors, dtype: DType) -> ModelSpec:
    """The table of a family that is not known here: no layers, only what running it through transformers needs.

    Args:
        config: config.json.
        tensors: Every tensor of the checkpoint.
        dtype: Of most tensors.

    Raises:
        UserError: The config names no family at all, or does not say how large the vocabulary is.
    """
    if not isinstance(config.get("model_type"), str):
        raise UserError("config.json: model_type is missing")
    inner = {**config, **_section(config, "text_config")}
    vocab = _count(inner, "vocab_size")
    contexts = (inner.get(key) for key in ("max_position_embeddings", "n_positions", "max_sequence_length"))
    return ModelSpec(
        family=config["model_type"],
        dtype=dtype,
        vocab_size=vocab,
        hidden_size=0,
        max_positions=next((x for x in contexts if isinstance(x, int) and x > 0), UNSAID_CONTEXT),
        embedding="",
        layers=(),
        final_norm=Norm("", 0, "rms", 0.0),
        head=Linear("", 0, vocab),
        is_tied=False,
        opaque_bytes=sum(math.prod(shape) * _TENSOR_BYTES.get(kind, 1) for kind, shape in tensors.values()),
    )


# Llama and the families that derive from it.


def _llama_like(config: Config, tensors: Tensors, dtype: DType) -> ModelSpec:
    family = config["model_type"]
    prefix = _prefix("model.", "embed_tokens", tensors)
    hidden = _count(config, "hidden_size")
    vocab = _count(config, "vocab_size")
    num_layers = _num_layers(config, "num_hidden_layers", tensors)
    is_gemma = family.startswith("gemma")
    if config.get("use_bidirectional_attention"):
        raise UserError("config.json: use_bidirectional_attention is not supported; allowed: false")
    ropes = _ropes(config, num_layers)
    windows = _windows(config, num_layers)
    layers = [
        dataclasses.replace(_llama_layer(config, f"{prefix}layers.{i}"), rope=ropes[i], window=windows[i])
        for i in range(num_layers)
    ]
    if family in EXPERT_FAMILIES:
        places = _expert_layers(config, num_layers)
        _check_experts(config, tensors, [f"{prefix}layers.{i}" for i in places])
        layers = [_with_experts(config, f"{prefix}layers.{i}", x) if i in places else x for i, x in enumerate(layers)]
    return ModelSpec(
        family=family,
        dtype=dtype,
        vocab_size=vocab,
        hidden_size=hidden,
        max_positions=_max_positions(config),
        embedding=f"{prefix}embed_tokens",
        layers=tuple(layers),
        final_norm=_rms_norm(config, f"{prefix}norm", hidden),
        head=Linear("lm_head", hidden, vocab),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        embedding_scale=hidden**0.5 if is_gemma else 1.0,
        logit_softcap=_optional_number(config, "final_logit_softcapping") if is_gemma else None,
    )


def _llama_layer(config: Config, name: str) -> LayerSpec:
    family = config["model_type"]
    hidden = _count(config, "hidden_size")
    inner = _count(config, "intermediate_size")
    num_heads = _count(config, "num_attention_heads")
    num_kv_heads = _count(config, "num_key_value_heads", num_heads)
    head_dim = _head_dim(config)
    if num_heads % num_kv_heads:
        raise UserError(f"config.json: num_key_value_heads {num_kv_heads} does not divide {num_heads} attention heads")
    has_four_norms = family in ("gemma2", "gemma3_text")
    has_head_norms = family in ("qwen3", "qwen3_moe", "gemma3_text")
    after = f"{name}.post_attention_layernorm"
    return LayerSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        attention_scale=_number(config, "query_pre_attn_scalar", head_dim if not family.startswith("gemma") else None)
        ** -0.5,
        linears=_llama_linears(config, name, (num_heads * head_dim, num_kv_heads * head_dim)),
        input_norm=_rms_norm(config, f"{name}.input_layernorm", hidden),
        mlp_norm=_rms_norm(config, f"{name}.pre_feedforward_layernorm" if has_four_norms else after, hidden),
        activation=_activation(config, "hidden_activation" if family.startswith("gemma") else "hidden_act"),
        post_attention_norm=_rms_norm(config, after, hidden) if has_four_norms else None,
        post_mlp_norm=_rms_norm(config, f"{name}.post_feedforward_layernorm", hidden) if has_four_norms else None,
        q_norm=_rms_norm(config, f"{name}.self_attn.q_norm", head_dim) if has_head_norms else None,
        k_norm=_rms_norm(config, f"{name}.self_attn.k_norm", head_dim) if has_head_norms else None,
        softcap=_optional_number(config, "attn_logit_softcapping") if family == "gemma2" else None,
    )


def _llama_linears(config: Config, name: str, widths: tuple[int, int]) -> dict[str, Linear]:
    family = config["model_type"]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = widths
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    if family == "phi3":
        return {
            "qkv": Linear(f"{attention}.qkv_proj", hidden, q + 2 * kv),
            "o": Linear(f"{attention}.o_proj", q, hidden),
            "gate_up": Linear(f"{mlp}.gate_up_proj", hidden, 2 * inner),
            "down": Linear(f"{mlp}.down_proj", inner, hidden),
        }
    has_biases = bool(config.get("attention_bias", False)) and family not in WITHOUT_ATTENTION_BIAS
    has_qkv_biases = has_biases or family == "qwen2" or (family == "qwen2_moe" and bool(config["qkv_bias"]))
    has_mlp_biases = bool(config.get("mlp_bias", False)) and family in ("llama", "smollm3")
    return {
        "q": Linear(f"{attention}.q_proj", hidden, q, has_qkv_biases),
        "k": Linear(f"{attention}.k_proj", hidden, kv, has_qkv_biases),
        "v": Linear(f"{attention}.v_proj", hidden, kv, has_qkv_biases),
        "o": Linear(f"{attention}.o_proj", q, hidden, has_biases),
        "gate": Linear(f"{mlp}.gate_proj", hidden, inner, has_mlp_biases),
        "up": Linear(f"{mlp}.up_proj", hidden, inner, has_mlp_biases),
        "down": Linear(f"{mlp}.down_proj", inner, hidden, has_mlp_biases),
    }


def _windows(config: Config, num_layers: int) -> list[int | None]:
    """Sliding window of each layer."""
    family = config["model_type"]
    is_optional = family.startswith("qwen") or family == "smollm3"
    if family == "llama" or (is_optional and not config.get("use_sliding_window", False)):
        return [None] * num_layers
    window = None if config.get("sliding_window") is None else _count(config, "sliding_window")
    if family in ("mistral", "mixtral", "phi3", "qwen3_moe"):
        return [window] * num_layers
    return [window if slides else None for slides in _sliding_layers(config, num_layers)]


def _sliding_layers(config: Config, num_layers: int) -> list[bool]:
    """Whether each layer is of the type sliding_attention."""
    kinds = _listed(config, "layer_types", num_layers)
    if kinds is None:
        return [_slides(config, i) for i in range(num_layers)]
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UserError(
                f"config.json: layer_types {kind!r} is not supported; allowed: full_attention, sliding_attention"
            )
    return [kind == "sliding_attention" for kind in kinds]


def _slides(config: Config, index: int) -> bool:
    """What transformers assumes of a layer where the config has no layer_types."""
    family = config["model_type"]
    if family == "gemma2":
        return index % 2 == 0
    if family == "gemma3_text":
        return (index + 1) % _count(config, "sliding_window_pattern", 6) != 0
    if family == "smollm3":
        return not _no_rope_layers(config, _count(config, "num_hidden_layers"))[index]
    first = config["max_window_layers"] if isinstance(config.get("max_window_layers"), int) else 28
    return index % 2 == 0 and index < first if family == "qwen2_moe" else index >= first


# Mixtures of experts.


def _expert_layers(config: Config, num_layers: int) -> list[int]:
    """Layers that have experts."""
    if config["model_type"] == "mixtral":
        return list(range(num_layers))
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(x, int) for x in dense):
        raise UserError(f"config.json: mlp_only_layers must be a list of layers, found {_brief(dense)}")
    step = _count(config, "decoder_sparse_step", 1)
    return [i for i in range(num_layers) if i not in dense and (i + 1) % step == 0]


def _num_experts(config: Config) -> int:
    return _count(config, "num_experts" if config.get("num_experts") is not None else "num_local_experts")


def _check_experts(config: Config, tensors: Tensors, layers: Sequence[str]) -> None:
    """Refuse more experts than can be, and those in one tensor, as transformers 5 holds them in memory.

    It writes them so only where it is told to (save_original_format=False).
    """
    for name in (f"{x}.mlp.experts.gate_up_proj" for x in layers):
        if name in tensors:
            raise UserError(
                f"{name} holds all experts of a layer; allowed: tensors of their own for each expert, as "
                "save_pretrained of transformers writes them by default"
            )
    num_experts, top_k = _num_experts(config), _count(config, "num_experts_per_tok")
    if num_experts > len(tensors):
        raise UserError(f"config.json: {num_experts} experts, but the checkpoint has only {len(tensors)} tensors")
    if top_k > num_experts:
        raise UserError(f"config.json: num_experts_per_tok is {top_k}, more than the {num_experts} experts")


def _with_experts(config: Config, name: str, layer: LayerSpec) -> LayerSpec:
    """The layer with experts in the place of its MLP."""
    hidden, is_mixtral = _count(config, "hidden_size"), config["model_type"] == "mixtral"
    num_experts = _num_experts(config)
    width = _count(config, "intermediate_size" if is_mixtral else "moe_intermediate_size")
    block = f"{name}.block_sparse_moe" if is_mixtral else f"{name}.mlp"
    parts = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    has_shared = config["model_type"] == "qwen2_moe"
    moe = Moe(
        num_experts=num_experts,
        top_k=_count(config, "num_experts_per_tok"),
        normalizes=bool(config.get("norm_topk_prob", False)),
        router=Linear(f"{block}.gate", hidden, num_experts),
        shared_gate=Linear(f"{block}.shared_expert_gate", hidden, 1) if has_shared else None,
    )
    linears = {role: x for role, x in layer.linears.items() if role in ("q", "k", "v", "o")}
    for expert in moe.experts():
        inner = _count(config, "shared_expert_intermediate_size") if expert == SHARED else width
        place = f"{block}.shared_expert" if expert == SHARED else f"{block}.{expert.removesuffix('.')}"
        linears[f"{expert}gate"] = Linear(f"{place}.{parts[0]}", hidden, inner)
        linears[f"{expert}up"] = Linear(f"{place}.{parts[1]}", hidden, inner)
        linears[f"{expert}down"] = Linear(f"{place}.{parts[2]}", inner, hidden)
    return dataclasses.replace(layer, intermediate_size=width, linears=linears, moe=moe)


# GPT-2.


def _gpt2(config: Config, tensors: Tensors, dtype: DType) -> ModelSpec:
    prefix = _prefix("transformer.", "wte", tensors)
    hidden, vocab = _count(config, "n_embd"), _count(config, "vocab_size")
    num_heads = _count(config, "n_head")
    inner = _count(config, "n_inner", 4 * hidden)
    if hidden % num_heads or config.get("add_cross_attention"):
        raise UserError(
            "config.json: gpt2 with cross attention, or whose n_head does not divide n_embd, is not supported"
        )

    def norm(name: str) -> Norm:
        return Norm(name, hidden, "layer", _number(config, "layer_norm_epsilon", 1e-5))

    def layer(index: int) -> LayerSpec:
        name = f"{prefix}h.{index}"
        scale = (hidden // num_heads) ** -0.5 if config.get("scale_attn_weights", True) else 1.0
        return LayerSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden // num_heads,
            intermediate_size=inner,
            attention_scale=scale / (index + 1) if config.get("scale_attn_by_inverse_layer_idx") else scale,
            linears={
                "qkv": Linear(f"{name}.attn.c_attn", hidden, 3 * hidden, True, True),
                "o": Linear(f"{name}.attn.c_proj", hidden, hidden, True, True),
                "up": Linear(f"{name}.mlp.c_fc", hidden, inner, True, True),
                "down": Linear(f"{name}.mlp.c_proj", inner, hidden, True, True),
            },
            input_norm=norm(f"{name}.ln_1"),
            mlp_norm=norm(f"{name}.ln_2"),
            activation=_activation(config, "activation_function"),
            is_gated=False,
        )

    return ModelSpec(
        family="gpt2",
        dtype=dtype,
        vocab_size=vocab,
        hidden_size=hidden,
        max_positions=_count(config, "n_positions", 1024),
        embedding=f"{prefix}wte",
        layers=tuple(layer(i) for i in range(_num_layers(config, "n_layer", tensors))),
        final_norm=norm(f"{prefix}ln_f"),
        head=Linear("lm_head", hidden, vocab),
        is_tied=bool(config["tie_word_embeddings"]),
        position_embedding=f"{prefix}wpe",
    )


# Parts that families share.


def _prefix(prefix: str, embedding: str, tensors: Tensors) -> str:
    """Checkpoints of the bare model (as the hub's gpt2) leave the prefix of tensor names off."""
    return "" if f"{embedding}.weight" in tensors else prefix


def _count(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"config.json: {key} must be a whole number of at least 1, found {_brief(value)}")
    return value


def _num_layers(config: Config, key: str, tensors: Tensors) -> int:
    found = _count(config, key)
    if found > len(tensors):
        raise UserError(f"config.json: {key} is {found}, but the checkpoint has only {len(tensors)} tensors")
    return found


def _number(place: Config, key: str, default: float | None = None) -> float:
    value = place.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1e-12 <= value <= 1e12:
        raise UserError(f"config.json: {key} must be a positive number, found {_brief(value)}")
    return float(value)


def _optional_number(place: Config, key: str) -> float | None:
    return _number(place, key) if place.get(key) else None


def _section(place: Config, key: str) -> Config:
    """A nested object; an empty one where it is missing or null."""
    value = place.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise UserError(f"config.json: {key} must be an object, found {_brief(value)}")
    return value or {}


def _listed(config: Config, key: str, length: int) -> list[Any] | None:
    value = config.get(key)
    if value is not None and (not isinstance(value, list) or len(value) != length):
        raise UserError(f"config.json: {key} must be a list of {length}, found {_brief(value)}")
    return value


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _head_dim(config: Config) -> int:
    found = _count(config, "head_dim", _count(config, "hidden_size") // _count(config, "num_attention_heads"))
    if found > LARGEST_HEAD_DIM:
        raise UserError(f"config.json: heads of {found} values are not supported; allowed: at most {LARGEST_HEAD_DIM}")
    return found


def _activation(config: Config, key: str) -> Activation:
    default = "gelu_pytorch_tanh" if key == "hidden_activation" else "silu"
    name = config.get(key, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UserError(f"config.json: {key} {_brief(name)} is not supported; {did_you_mean(str(name), ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _rms_norm(config: Config, name: str, size: int) -> Norm:
    offset = 1.0 if config["model_type"].startswith("gemma") else 0.0
    return Norm(name, size, "rms", _number(config, "rms_norm_eps", 1e-6), offset)


def _max_positions(config: Config) -> int:
    limit = _count(config, "max_position_embeddings")
    rope = _rope_parameters(config)
    if _rope_type(config, rope) == "longrope":
        # Past the original context transformers switches all positions, cached ones too, to the long factors. The
        # short factors are exact up to there.
        return min(limit, _original_context(config, rope))
    return limit


# Rotary embeddings.


def _ropes(config: Config, num_layers: int) -> list[Rope | None]:
    """Rotary embedding of each layer."""
    if config["model_type"] == "gemma3_text":
        return list(_gemma3_ropes(config, num_layers))
    rope = _rope(config, _rope_parameters(config))
    if config["model_type"] == "smollm3":
        return [rope if has_rope else None for has_rope in _no_rope_layers(config, num_layers)]
    return [rope] * num_layers


def _no_rope_layers(config: Config, num_layers: int) -> Sequence[int]:
    """1 for layers *with* rope, as smollm3's field of that name has it."""
    interval = _count(config, "no_rope_layer_interval", 4)
    listed = _listed(config, "no_rope_layers", num_layers)
    return [int((i + 1) % interval != 0) for i in range(num_layers)] if listed is None else listed


def _gemma3_ropes(config: Config, num_layers: int) -> list[Rope]:
    both = _section(config, "rope_parameters")
    full = {"rope_theta": config.get("rope_theta") or 1e6, **_section(both, "full_attention")}
    local = {"rope_theta": config.get("rope_local_base_freq") or 1e4, **_section(both, "sliding_attention")}
    full.update(_section(config, "rope_scaling"))
    ropes = {True: _rope(config, local), False: _rope(config, full)}
    return [ropes[slides] for slides in _sliding_layers(config, num_layers)]


def _rope_parameters(config: Config) -> dict[str, Any]:
    """transformers 5 keeps everything in `rope_parameters`; before it was `rope_theta` beside `rope_scaling`."""
    found = _section(config, "rope_scaling") or _section(config, "rope_parameters")
    return {
        "rope_theta": config.get("rope_theta") or 10_000.0,
        "partial_rotary_factor": config.get("partial_rotary_factor") or 1.0,
        **{key: value for key, value in found.items() if value is not None},
    }


def _rope_type(config: Config, rope: Config) -> str:
    name = rope.get("rope_type", rope.get("type", "default"))
    if config["model_type"] == "phi3" and name in ("su", "yarn"):
        return "longrope"
    if not isinstance(name, str) or name not in ROPE_TYPES:
        raise UserError(
            f"config.json: rope type {_brief(name)} is not supported; {did_you_mean(str(name), ROPE_TYPES)}"
        )
    return name


def _original_context(config: Config, rope: Config) -> int:
    context = _count(config, "max_position_embeddings")
    for place in (rope, config):
        context = _count(place, "original_max_position_embeddings", context)
    if context < 2:
        raise UserError(f"config.json: original_max_position_embeddings must be at least 2, found {context}")
    return context


def _rope(config: Config, rope: Config) -> Rope:
    """Frequencies as transformers computes them, in float32."""
    head_dim = _head_dim(config)
    width = int(head_dim * _number(rope, "partial_rotary_factor", 1.0))
    kind, base = _rope_type(config, rope), _number(rope, "rope_theta")
    if base <= 1:
        raise UserError(f"config.json: rope_theta must be above 1, found {base}")
    if width % 2 or not 2 <= width <= head_dim or (width < head_dim and config["model_type"] != "phi3"):
        raise UserError(f"config.json: rotary embedding over {width} of {head_dim} values per head is not supported")
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    # float64 here comes closest to torch.pow, which is good to one unit in the last place of float32.
    periods = np.power(base, exponents.astype(np.float64)).astype(np.float32)
    frequencies = (1 / periods).astype(np.float32)
    factor = 1.0
    if kind == "linear":
        frequencies = (frequencies / np.float32(_number(rope, "factor"))).astype(np.float32)
    elif kind == "llama3":
        frequencies = _llama3(frequencies, rope, _original_context(config, rope))
    elif kind == "yarn":
        frequencies, factor = _yarn(periods, rope, _scale_factor(config, rope), _original_context(config, rope))
    elif kind == "longrope":
        frequencies, factor = _longrope(periods, rope, _scale_factor(config, rope), _original_context(config, rope))
    return Rope(tuple(float(x) for x in frequencies), factor)


def _scale_factor(config: Config, rope: Config) -> float:
    """How many times longer than the original the context is."""
    if "factor" in rope:
        return _number(rope, "factor")
    return _count(config, "max_position_embeddings") / _original_context(config, rope)


def _llama3(frequencies: Floats, rope: Config, original: int) -> Floats:
    """Long waves slowed by `factor`, short ones kept, a ramp between (Llama 3.1, Dubey et al. 2024, 2407.21783)."""
    factor, low, high = (np.float32(_number(rope, k)) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise UserError(f"config.json: high_freq_factor {high} must be above low_freq_factor {low}")
    waves = 1 / frequencies * np.float32(2 * math.pi)
    scaled = np.where(waves > original / low, frequencies / factor, frequencies)
    smooth = (1 / waves * np.float32(original) - low) / (high - low)
    ramp = (1 - smooth) * scaled / factor + smooth * scaled
    is_between = (waves >= original / high) & (waves <= original / low)
    return np.where(is_between, ramp, scaled).astype(np.float32)


def _yarn(periods: Floats, rope: Config, factor: float, original: int) -> tuple[Floats, float]:
    """Interpolated where waves are long, extrapolated where short (Peng et al. 2023, arXiv 2309.00071)."""
    width, base = 2 * len(periods), _number(rope, "rope_theta")

    def boundary(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = boundary(_optional_number(rope, "beta_fast") or 32), boundary(_optional_number(rope, "beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(width // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = 1 - ramp
    frequencies = 1 / (np.float32(factor) * periods) * (1 - keep) + 1 / periods * keep

    def magnitude(strength: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0

    attention = _optional_number(rope, "attention_factor")
    if attention is None:
        numerator, denominator = (_optional_number(rope, key) for key in ("mscale", "mscale_all_dim"))
        attention = magnitude(numerator) / magnitude(denominator) if numerator and denominator else magnitude(1)
    return frequencies.astype(np.float32), attention


def _longrope(periods: Floats, rope: Config, factor: float, original: int) -> tuple[Floats, float]:
    """One factor per frequency, here those for contexts up to the original (Ding et al. 2024, arXiv 2402.13753)."""
    short = rope.get("short_factor")
    numbers = [x for x in short if isinstance(x, int | float) and 1e-12 <= x <= 1e12] if isinstance(short, list) else []
    if numbers != short or len(numbers) != len(periods):
        raise UserError(f"config.json: short_factor must be {len(periods)} positive numbers, found {_brief(short)}")
    attention = _optional_number(rope, "attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return (1 / (np.array(numbers, dtype=np.float32) * periods)).astype(np.float32), attention


# Quantized checkpoints (compressed-tensors, and bitsandbytes).


def _read_quantizations(config: Config, spec: ModelSpec, tensors: Tensors) -> dict[str, Quantization]:
    """Linear name -> how it is stored, for every linear that has codes."""
    packed = [
        name
        for name in (x.name for x in spec.linears())
        if f"{name}.weight_packed" in tensors or tensors.get(f"{name}.weight", ("", ()))[0] in ("I8", "F8_E4M3")
    ]
    settings = _section(config, "quantization_config") or _section(config, "compression_config")
    if not settings:
        if packed:
            raise UserError(f"config.json: {packed[0]} is stored in codes, but there is no quantization_config")
        return {}
    if settings.get("quant_method") == "bitsandbytes":
        return _read_bitsandbytes(spec, tensors)
    if settings.get("quant_method") != "compressed-tensors":
        raise UserError(
            f"config.json: quantization_config of {_brief(settings.get('quant_method'))} is not supported; allowed: "
            f"compressed-tensors with format {', '.join(FORMATS)}"
        )
    targets = _targets(settings)
    ignored = dict.fromkeys(_names(settings, "ignore"))
    found: dict[str, Quantization] = {}
    for name in (x.name for x in spec.linears()):
        matched = None if _matches(name, ignored) else _best_match(name, targets)
        if matched is None and name in packed:
            raise UserError(f"config.json: {name} is stored in codes, but no group of quantization_config names it")
        if matched is not None and name in packed:
            found[name] = _quantization(targets[matched], settings.get("format"))
        elif matched is not None and f"{name}.weight" in tensors:
            raise UserError(f"config.json: quantization_config names {name}, but its weight is not stored in codes")
    return found


def _read_bitsandbytes(spec: ModelSpec, tensors: Tensors) -> dict[str, Quantization]:
    """The same for a checkpoint of bitsandbytes, whose config names no linears: by the tensors that are there."""
    found: dict[str, Quantization] = {}
    for name in (x.name for x in spec.linears()):
        form: NumberFormat | None = None
        if f"{name}.{QUANT_STATE}" in tensors and f"{name}.weight.nested_absmax" not in tensors:
            form = "nf4"
        elif f"{name}.SCB" in tensors:
            form = "llm_int8"
        elif any(f"{name}.weight.{x}" in tensors for x in ("absmax", "quant_map")):
            raise UserError(
                f"config.json: quantization_config of bitsandbytes, but {name} is not nf4 with plain scales; allowed: "
                "nf4 in blocks of 64 without double quantization, and int8"
            )
        if form is not None:
            found[name] = Quantization(FIXED_FORMATS[form].bits, FIXED_FORMATS[form].group_size, True, format=form)
    return found


def _targets(settings: Config) -> dict[str, Config]:
    """Target -> the config group that names it."""
    groups = _section(settings, "config_groups")
    return {target: _section(groups, key) for key in groups for target in _names(_section(groups, key), "targets")}


def _names(place: Config, key: str) -> list[str]:
    """Targets as compressed-tensors writes them: full names, classes and `re:` patterns."""
    names = place.get(key) or []
    try:
        for name in names:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
    except (TypeError, AttributeError, re.error) as error:
        raise UserError(
            f"config.json: {key} of quantization_config must be names and re: patterns, found {_brief(names)}"
        ) from error
    return list(names)


def _matches(name: str, targets: Mapping[str, Any]) -> bool:
    return _best_match(name, targets) is not None


def _best_match(name: str, targets: Mapping[str, Any]) -> str | None:
    """The target that wins for a linear: its name, then a `re:` pattern, then its class."""
    if name in targets:
        return name
    patterns = sorted(x for x in targets if x.startswith("re:"))
    found = next((x for x in patterns if re.match(x[3:], name)), None)
    return found or ("Linear" if "Linear" in targets else None)


def _quantization(group: Config, outer_format: object) -> Quantization:
    weights = _section(group, "weights")
    form = group.get("format") or outer_format
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    format: NumberFormat = FORMATS.get(str(form), "int")
    kind, size = "int" if format == "int" else "float", _count(weights, "group_size") if strategy in GROUPED else None
    is_symmetric = bool(weights.get("symmetric", True))
    inputs = _section(group, "input_activations")
    activations = _activations(inputs, kind)
    if format == "int":
        is_packed = form == "pack-quantized" and not inputs and bits in BITS and strategy in ("group", "channel")
        is_w8a8 = form == "int-quantized" and activations and (bits, strategy, is_symmetric) == (8, "channel", True)
        is_supported = bool(is_packed or is_w8a8)
    else:
        only, strategies = FIXED_FORMATS[format], STRATEGIES[format]
        is_fit = strategy in strategies and is_symmetric and (bits, size) == (only.bits, only.group_size)
        is_supported = is_fit and (not inputs or (format == "fp8" and activations is not None))
    is_plain = weights.get("type", "int") == kind and not group.get("output_activations") and not weights.get("dynamic")
    if not (is_supported and is_plain and isinstance(bits, int)):
        raise UserError(
            f"config.json: quantization_config with format {_brief(form)}, {_brief(bits)} bits, type "
            f"{_brief(weights.get('type'))}, strategy {_brief(strategy)} is not supported; allowed: pack-quantized "
            f"ints of {', '.join(map(str, BITS))} bits, group or channel, weights only; int-quantized of 8 bits, "
            "symmetric, channel, with int8 inputs; float-quantized of 8 bits, channel or tensor, with such inputs or "
            "none; mxfp4- and nvfp4-pack-quantized"
        )
    return Quantization(bits, size, is_symmetric, activations, format, strategy == "tensor")


def _activations(inputs: Config, kind: str) -> Activations | None:
    """How inputs are rounded; None where they are not, or in a way that is not known here.

    Args:
        inputs: The config of inputs.
        kind: Type that the weights have.
    """
    if (inputs.get("num_bits"), inputs.get("type", "int"), inputs.get("symmetric", True)) != (8, kind, True):
        return None
    if inputs.get("dynamic"):
        return "dynamic" if inputs.get("strategy") == "token" else None
    return "static" if inputs.get("strategy") == "tensor" else None


# Rounded keys and values.


def _read_cache_quantization(config: Config) -> CacheQuantization | None:
    """How keys and values are cached: compressed-tensors' kv_cache_scheme, or what that has no words for."""
    own = _section(config, CACHE_KEY)
    if own:
        named = {own.get("keys"), own.get("values")}
        if own.get("format") not in get_args(CacheFormat) or not named <= set(get_args(CacheScales)):
            raise UserError(f"config.json: {CACHE_KEY} must name format, keys and values, found {_brief(own)}")
        return CacheQuantization(own["format"], own["keys"], own["values"])
    settings = _section(config, "quantization_config") or _section(config, "compression_config")
    scheme = _section(settings, "kv_cache_scheme")
    if not scheme:
        return None
    formats = {form: name for name, form in CACHE_TYPES.items()}
    form = formats.get((scheme.get("type", "int"), scheme.get("num_bits", 8)))
    kinds = {strategy: kind for kind, strategy in CACHE_STRATEGIES.items()}
    kind = kinds.get(scheme.get("strategy") or "tensor")
    if form is None or kind is None or scheme.get("dynamic") or not scheme.get("symmetric", True):
        raise UserError(
            f"config.json: kv_cache_scheme {_brief(scheme)} is not supported; allowed: symmetric, static, int of 8 or "
            f"4 bits or float of 8, strategy {', '.join(kinds)}"
        )
    return CacheQuantization(form, kind, kind)


def cache_scheme(form: CacheQuantization) -> dict[str, Any] | None:
    """compressed-tensors' kv_cache_scheme; None where it has no words: one scheme is for keys and values alike."""
    if form.keys != form.values or form.keys not in CACHE_STRATEGIES:
        return None
    kind, bits = CACHE_TYPES[form.format]
    strategy = CACHE_STRATEGIES[form.keys]
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False}


# The table against what is stored.


def _check_shapes(spec: ModelSpec, tensors: Tensors) -> None:
    for name, shape in expected_shapes(spec).items():
        if name not in tensors:
            raise UserError(f"the checkpoint has no tensor {name}, which its config.json asks for")
        if tensors[name][1] != shape:
            raise UserError(f"{name} has shape {list(tensors[name][1])}, its config.json asks for {list(shape)}")
    for linear in spec.linears():
        if f"{linear.name}.weight_g_idx" in tensors:
            raise UserError(f"{linear.name}: activation order with a g_idx is not supported; allowed: static groups")


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that the table describes."""
    shapes: dict[str, tuple[int, ...]] = {f"{spec.embedding}.weight": (spec.vocab_size, spec.hidden_size)}
    if spec.position_embedding is not None:
        shapes[f"{spec.position_embedding}.weight"] = (spec.max_positions, spec.hidden_size)
    for norm in spec.norms():
        shapes[f"{norm.name}.weight"] = (norm.size,)
        if norm.kind == "layer":
            shapes[f"{norm.name}.bias"] = (norm.size,)
    for linear in (*spec.gates(), *spec.linears()):
        if linear is spec.head and spec.is_tied and linear.quantization is None:
            continue
        shapes.update({f"{linear.name}.{part}": shape for part, (_, shape) in linear.parts().items()})
    return {**shapes, **spec.cache_scales()}
