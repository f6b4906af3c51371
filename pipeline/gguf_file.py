"""One GGUF file: its header, the config.json that it amounts to, its weights dequantized into the hub's layout.

Torch-free. GGUF keeps llama.cpp's names and layouts: q and k rows interleaved for rope (llama, smollm3), gemma's norms
with 1 added, gpt2's matrices transposed; all of that is undone here. What llama.cpp hard-codes because no key holds it
(smollm3's layers without rope, gemma's local rope and attention scale) is filled in with the same rules. Mistral is
stored as llama, which computes the same but for the window of the first release, which no GGUF holds. Tokenizers are
left to transformers (sources.py).
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from strop.errors import UserError, did_you_mean

Array = NDArray[np.float32]

ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
}
"""general.architecture -> model_type and class of config.json."""
_MODULES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_MODULES: Mapping[str, str] = {
    **_MODULES,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MODULES: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "smollm3"), _MODULES),
    **dict.fromkeys(("gemma2", "gemma3"), _GEMMA_MODULES),
    "phi3": {**_MODULES, "ffn_up": "mlp.gate_up_proj"},
    "gpt2": {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
}
"""general.architecture -> llama.cpp's name of a module (within its layer) -> the hub's."""
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_NUMBERS: Mapping[int, str] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_LONGEST_KEPT = 1024
"""Numbers of an array that are kept; vocabularies and merges are only counted."""


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies.

    Attributes:
        shape: Rows first, as torch counts.
        type: ggml's number of the storage type.
        offset: Of its first byte in the file.
    """

    shape: tuple[int, ...]
    type: int
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class Gguf:
    """The header of a file.

    Attributes:
        metadata: Key -> number, text or short list of numbers.
        counts: Key -> length, for every list.
        tensors: llama.cpp's name -> where it lies. Without an `output` matrix that equals the embedding.
        is_retied: The file stores such a matrix.
    """

    path: Path
    metadata: Mapping[str, Any]
    counts: Mapping[str, int]
    tensors: Mapping[str, GgufTensor]
    is_retied: bool

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return str(self.metadata["general.architecture"])

    def types(self) -> list[str]:
        """Names of the storage types that matrices have, sorted."""
        from gguf import GGMLQuantizationType

        return sorted({GGMLQuantizationType(x.type).name for x in self.tensors.values() if len(x.shape) > 1})


# The header.


class _Cursor:
    """Reads values one after the other. What lies past the end of the file raises struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def text(self) -> str:
        length = self.number("<Q")
        start = self.at
        self.skip(length)
        return self.data[start : self.at].decode("utf-8", errors="replace")

    def skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.data):
            raise struct.error("past the end")

    def value(self, kind: int) -> tuple[Any, int | None]:
        """A value and, for a list, its length; a list of texts, or a long one, is None."""
        if kind in _NUMBERS:
            value = self.number(_NUMBERS[kind])
            return (_shortest(value) if kind == 6 else value), None
        if kind == _STRING:
            return self.text(), None
        if kind != _ARRAY:
            raise ValueError(f"value of type {kind}")
        inner, count = self.number("<I"), self.number("<Q")
        if inner == _STRING:
            for _ in range(count):
                self.skip(self.number("<Q"))
            return None, count
        if inner not in _NUMBERS:
            raise ValueError(f"list of type {inner}")
        if count <= _LONGEST_KEPT:
            return [self.number(_NUMBERS[inner]) for _ in range(count)], count
        self.skip(count * struct.calcsize(_NUMBERS[inner]))
        return None, count


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def read_gguf(path: Path) -> Gguf:
    """The header of a GGUF file, in well under a second whatever its size.

    Raises:
        UserError: Not a GGUF file, truncated, in parts, or of another version.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    size = path.stat().st_size
    with path.open("rb") as file:
        magic = file.read(8)
        if magic[:4] != b"GGUF":
            raise UserError(f"{path}: not a GGUF file, it begins with {magic[:4]!r}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(path, data)
            except struct.error as error:
                raise UserError(f"{path}: truncated, its header goes on past the {size} bytes there are") from error
            except (ValueError, KeyError) as error:
                raise UserError(f"{path}: damaged or newer than this reader ({error})") from error


def _parse(path: Path, data: mmap.mmap) -> Gguf:
    cursor = _Cursor(data)
    cursor.skip(4)
    version, num_tensors, num_values = cursor.number("<I"), cursor.number("<Q"), cursor.number("<Q")
    if version not in (2, 3):
        raise UserError(f"{path}: GGUF version {version}; allowed: 2, 3, little-endian")
    metadata: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for _ in range(num_values):
        key = cursor.text()
        value, count = cursor.value(cursor.number("<I"))
        if count is not None:
            counts[key] = count
        if value is not None:
            metadata[key] = value
    if metadata.get("split.count", 1) > 1:
        raise UserError(
            f"{path}: one of {metadata['split.count']} parts; allowed: a whole file (llama-gguf-split --merge)"
        )
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = did_you_mean(str(architecture), ARCHITECTURES)
        raise UserError(f"{path}: general.architecture {architecture!r} is not supported; {known}")
    tensors = _parse_tensors(cursor, num_tensors, int(metadata.get("general.alignment", 32)))
    for name, tensor in tensors.items():
        if tensor.offset + tensor.size_bytes > len(data):
            raise UserError(
                f"{path}: truncated, {name} ends at byte {tensor.offset + tensor.size_bytes}, the file has {len(data)}"
            )
    is_retied = _is_same(data, tensors.get("output.weight"), tensors.get("token_embd.weight"))
    if is_retied:
        del tensors["output.weight"]
    return Gguf(path, metadata, counts, tensors, is_retied)


def _parse_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    entries = []
    for _ in range(count):
        name = cursor.text()
        shape = tuple(cursor.number("<Q") for _ in range(cursor.number("<I")))[::-1]
        entries.append((name, shape, cursor.number("<I"), cursor.number("<Q")))
    start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in entries:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if not shape or 0 in shape or shape[-1] % block:
            raise ValueError(f"{name} has shape {list(shape)}")
        tensors[name] = GgufTensor(shape, kind, start + offset, math.prod(shape) // block * block_bytes)
    return tensors


def _is_same(data: mmap.mmap, one: GgufTensor | None, other: GgufTensor | None) -> bool:
    """Whether two tensors hold the same bytes. Different ones end the comparison early."""
    if one is None or other is None or (one.type, one.shape) != (other.type, other.shape):
        return False
    step = 2**20
    return all(
        data[one.offset + i : one.offset + min(i + step, one.size_bytes)]
        == data[other.offset + i : other.offset + min(i + step, one.size_bytes)]
        for i in range(0, one.size_bytes, step)
    )


# The config.


def config(gguf: Gguf) -> dict[str, Any]:
    """What config.json would say of the model.

    Raises:
        UserError: A key that it needs is missing, or it asks for something that is not supported.
    """
    family, model_class = ARCHITECTURES[gguf.architecture]
    ids = {
        f"{name}_token_id": gguf.metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    shared = {
        "model_type": family,
        "architectures": [model_class],
        "vocab_size": _embedding(gguf).shape[0],
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **ids,  # None too: some families' defaults name a token
    }
    return shared | (_gpt2_config(gguf) if family == "gpt2" else _llama_config(gguf))


def _embedding(gguf: Gguf) -> GgufTensor:
    if "token_embd.weight" not in gguf.tensors:
        raise UserError(f"{gguf.path}: has no tensor token_embd.weight")
    return gguf.tensors["token_embd.weight"]


def _get(gguf: Gguf, name: str, default: Any = None) -> Any:
    """The value of a key of this architecture."""
    key = f"{gguf.architecture}.{name}"
    value = gguf.metadata.get(key, default)
    if value is None:
        raise UserError(f"{gguf.path}: its metadata has no {key}")
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UserError(f"{gguf.path}: {key} differs from layer to layer, which is not supported")
        return value[0]
    return value


def _gpt2_config(gguf: Gguf) -> dict[str, Any]:
    return {
        "n_embd": _get(gguf, "embedding_length"),
        "n_layer": _get(gguf, "block_count"),
        "n_head": _get(gguf, "attention.head_count"),
        "n_inner": _get(gguf, "feed_forward_length"),
        "n_positions": _get(gguf, "context_length"),
        "layer_norm_epsilon": _get(gguf, "attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _llama_config(gguf: Gguf) -> dict[str, Any]:
    hidden, num_heads = _get(gguf, "embedding_length"), _get(gguf, "attention.head_count")
    head_dim = _get(gguf, "attention.key_length", hidden // num_heads)
    fields: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": _get(gguf, "feed_forward_length"),
        "num_hidden_layers": _get(gguf, "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _get(gguf, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": _get(gguf, "attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": _get(gguf, "context_length"),
    }
    if gguf.architecture.startswith("gemma"):
        return fields | _gemma_config(gguf, fields)
    fields |= {"hidden_act": "silu", "rope_parameters": _rope(gguf, head_dim)}
    if gguf.architecture == "phi3":
        window = _get(gguf, "attention.sliding_window", 0)
        original = _get(gguf, "rope.scaling.original_context_length", fields["max_position_embeddings"])
        return fields | {"sliding_window": window or None, "original_max_position_embeddings": original}
    if gguf.architecture != "qwen2":
        fields["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    if gguf.architecture in ("llama", "smollm3"):
        fields["mlp_bias"] = "blk.0.ffn_up.bias" in gguf.tensors
    return fields


def _gemma_config(gguf: Gguf, fields: Mapping[str, Any]) -> dict[str, Any]:
    # llama.cpp knows the 27B models, whose queries are scaled otherwise, by their number of layers.
    is_27b = fields["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[gguf.architecture]
    found = {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": _get(gguf, "attention.sliding_window", 4096),
        "query_pre_attn_scalar": (
            fields["hidden_size"] // fields["num_attention_heads"] if is_27b else fields["head_dim"]
        ),
    }
    if gguf.architecture == "gemma2":
        return found | {
            "attn_logit_softcapping": _get(gguf, "attn_logit_softcapping", 50.0),
            "final_logit_softcapping": _get(gguf, "final_logit_softcapping", 30.0),
            "rope_parameters": _rope(gguf, fields["head_dim"]),
        }
    layers = range(1, fields["num_hidden_layers"] + 1)
    local = {"rope_type": "default", "rope_theta": _get(gguf, "rope.freq_base_swa", 10_000.0)}
    return found | {
        "layer_types": ["sliding_attention" if i % 6 else "full_attention" for i in layers],
        "rope_parameters": {"full_attention": _rope(gguf, fields["head_dim"], 1e6), "sliding_attention": local},
    }


def _rope(gguf: Gguf, head_dim: int, base: float = 10_000.0) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _get(gguf, "rope.freq_base", base)}
    width = _get(gguf, "rope.dimension_count", head_dim)
    if width != head_dim:
        rope["partial_rotary_factor"] = width / head_dim
    if "rope_freqs.weight" in gguf.tensors:
        return rope | _llama3_rope(gguf, rope["rope_theta"], width)
    if "rope_factors_short.weight" in gguf.tensors:
        factors = {f"{x}_factor": _factors(gguf, f"rope_factors_{x}.weight") for x in ("long", "short")}
        return rope | factors | {"rope_type": "longrope"}
    kind = _get(gguf, "rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise UserError(f"{gguf.path}: rope.scaling.type {kind!r} is not supported; allowed: none, linear, yarn")
    if kind == "none":
        return rope
    rope |= {"rope_type": kind, "factor": _get(gguf, "rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = _get(gguf, "rope.scaling.original_context_length")
    return rope


def _factors(gguf: Gguf, name: str) -> list[float]:
    if name not in gguf.tensors:
        raise UserError(f"{gguf.path}: has no tensor {name}")
    return [_shortest(x) for x in _dequantized(gguf, name)]


def _llama3_rope(gguf: Gguf, base: float, width: int) -> dict[str, Any]:
    """The llama3 scaling that a file's frequency divisors come from: those of Meta's models, any factor."""
    stored = np.array(_factors(gguf, "rope_freqs.weight"))
    factor = float(stored.max())
    rope: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    waves = 2 * math.pi * base ** (np.arange(0, width, 2) / width)
    smooth = np.clip((8192 / waves - 1) / 3, 0, 1)
    if len(stored) != len(waves) or not np.allclose(stored, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise UserError(f"{gguf.path}: rope_freqs.weight is not the scaling of Llama 3.1 to 3.3; no other is supported")
    return rope


# The weights.


def tensor_names(gguf: Gguf) -> dict[str, str]:
    """The hub's tensor name -> llama.cpp's, for every weight.

    Raises:
        UserError: A tensor that the architecture is not known to have (experts, for example).
    """
    modules = MODULES[gguf.architecture]
    layers = "transformer.h" if gguf.architecture == "gpt2" else "model.layers"
    names = {}
    for name in gguf.tensors:
        if name in _ROPE_TENSORS:
            continue
        found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        if found is None or found[2] not in modules:
            raise UserError(f"{gguf.path}: tensor {name} is not one that {gguf.architecture} models are known to have")
        prefix = "" if found[1] is None else f"{layers}.{found[1]}."
        names[f"{prefix}{modules[found[2]]}.{found[3]}"] = name
    return names


def _is_transposed(gguf: Gguf, name: str) -> bool:
    """gpt2's linears are stored (in, out) on the hub; embeddings, head and norms are not."""
    return gguf.architecture == "gpt2" and name.startswith("blk.") and len(gguf.tensors[name].shape) == 2


def headers(gguf: Gguf) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The hub's tensor name -> (`F32`, shape), as `model.read_headers` gives for the folder that this becomes."""
    shapes = {hub: (gguf.tensors[name].shape, _is_transposed(gguf, name)) for hub, name in tensor_names(gguf).items()}
    return {hub: ("F32", shape[::-1] if is_transposed else shape) for hub, (shape, is_transposed) in shapes.items()}


def load(gguf: Gguf, name: str) -> Array:
    """One weight by llama.cpp's name, dequantized, in the hub's layout, float32."""
    values = _dequantized(gguf, name)
    if gguf.architecture in ("llama", "smollm3") and re.fullmatch(r"blk\.\d+\.attn_[qk]\.\w+", name):
        key = "attention.head_count" if ".attn_q." in name else "attention.head_count_kv"
        num_heads = _get(gguf, key, _get(gguf, "attention.head_count"))
        paired = values.reshape(num_heads, -1, 2, *values.shape[1:])
        values = paired.swapaxes(1, 2).reshape(values.shape)
    if gguf.architecture.startswith("gemma") and name.endswith("norm.weight"):
        values = values - np.float32(1)
    if _is_transposed(gguf, name):
        values = values.T
    return np.ascontiguousarray(values)


def _dequantized(gguf: Gguf, name: str) -> Array:
    from gguf import GGMLQuantizationType, dequantize

    tensor = gguf.tensors[name]
    kind = GGMLQuantizationType(tensor.type)
    data = np.memmap(gguf.path, dtype=np.uint8, mode="r", offset=tensor.offset, shape=(tensor.size_bytes,))
    dtypes = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    try:
        if kind in dtypes:
            values = data.view(dtypes[kind]).reshape(tensor.shape).astype(np.float32)
        else:
            values = dequantize(data.reshape(*tensor.shape[:-1], -1), kind)
    except NotImplementedError as error:
        raise UserError(f"{gguf.path}: {name} is stored as {kind.name}, which cannot be dequantized") from error
    return cast(Array, values)
