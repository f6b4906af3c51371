"""Which of ggml's types holds each matrix, and what llama.cpp can be told of a model, from its table alone. Torch-free.

ggml stores a matrix row by row in blocks of 32 weights, each with a scale d in float16: Q4_0, Q5_0 and Q8_0 hold
q · d with signed q of 4, 5 and 8 bits, Q4_1 holds q · d + m with q from 0 to 15 and a minimum m in float16. MXFP4 holds
what mxfp4 is: elements in E2M1 and a power of two.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from strop import gguf_file
from strop.errors import UserError, did_you_mean
from strop.spec import LayerSpec, Linear, ModelSpec, Norm, Quantization

Type = Literal["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q4_0"]
"""What a recipe can ask for."""
FILE = "model.gguf"
BLOCK = 32
"""Weights that share a scale."""
FLOAT_BYTES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
BLOCK_BYTES: Mapping[str, int] = {"Q8_0": 34, "Q5_0": 22, "Q4_1": 20, "Q4_0": 18, "MXFP4": 17}
CODE_BITS: Mapping[str, int] = {"Q4_0": 4, "Q5_0": 5, "Q8_0": 8}
"""Width of a signed code of the types that have no minimum, the smallest first."""
STORED_AS: Mapping[str, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
ALIGNMENT = 32
ARCHITECTURES: Mapping[str, str] = {
    **{family: name for name, (family, _) in gguf_file.ARCHITECTURES.items()},
    "mistral": "llama",
}
"""Family -> general.architecture."""
INTERLEAVED = ("llama", "smollm3")
"""Architectures whose heads are rotated in neighbouring pairs: rows of q and k are stored in that order."""
WINDOWLESS = ("llama", "qwen2", "qwen3", "smollm3", "gpt2")
"""Architectures that attend to everything."""
BIASES: Mapping[str, tuple[str, ...]] = {
    "llama": ("q", "k", "v", "o", "gate", "up", "down"),
    "qwen2": ("q", "k", "v"),
    "gpt2": ("qkv", "o", "up", "down"),
}
"""Roles of the linears whose biases llama.cpp adds; none elsewhere."""


@dataclass(frozen=True)
class Slot:
    """One tensor of the file.

    Attributes:
        name: llama.cpp's.
        source: The tensor of the checkpoint; of a linear's weight its name as if it were not quantized.
        type: ggml's.
        shape: Rows first.
        linear: Whose weight it is; None for norms, biases and positions.
        norm: Whose weight it is.
        num_heads: Of q and k, where their rows are interleaved head by head.
    """

    name: str
    source: str
    type: str
    shape: tuple[int, ...]
    linear: Linear | None = None
    norm: Norm | None = None
    num_heads: int | None = None

    @property
    def size_bytes(self) -> int:
        """Of its values."""
        if self.type in FLOAT_BYTES:
            return math.prod(self.shape) * FLOAT_BYTES[self.type]
        return math.prod(self.shape) // BLOCK * BLOCK_BYTES[self.type]


# Types.


def exact_type(q: Quantization, in_features: int) -> str | None:
    """The smallest block type that holds codes as they are, or None.

    Stored is Q - z, so zero points cost no minimum that float16 would round: of asymmetric codes of 2 and 3 bits it
    fits 4 bits, of 4 bits it fits 5. A scale is repeated for every block of its group.
    """
    if q.format == "mxfp4":
        return "MXFP4"
    if q.format != "int" or (q.group_size or in_features) % BLOCK:
        return None
    low, high = -(2 ** (q.bits - 1)), 2 ** (q.bits - 1) - 1
    if not q.symmetric:
        low, high = low - high, high - low
    return next((x for x, b in CODE_BITS.items() if -(2 ** (b - 1)) <= low and high < 2 ** (b - 1)), None)


def float_type(q: Quantization) -> str:
    """The smallest float type that holds (Q - z) · s: a scale has 8 significant bits, F16 11."""
    return "F16" if 8 + (q.bits - 1 if q.symmetric else q.bits) <= 11 else "F32"


def matrix_type(linear: Linear, dtype: str, kind: Type | None, requantize: Type | None) -> str:
    """How a matrix is stored.

    Args:
        linear: As the checkpoint's table has it.
        dtype: Of the checkpoint's unquantized tensors.
        kind: Asked for where it is not quantized; None: what holds the dtype.
        requantize: Asked for where no block type holds its codes.

    Raises:
        UserError: No type was asked for, or rows do not divide into its blocks.
    """
    q = linear.quantization
    if q is None:
        found: str = kind or STORED_AS[dtype]
    else:
        exact = exact_type(q, linear.in_features) or requantize
        if exact is None:
            width = "one group a row" if q.group_size is None else f"groups of {q.group_size}"
            raise UserError(
                f"gguf: no block type holds {linear.name}'s {q.bits}-bit {'' if q.symmetric else 'a'}symmetric codes "
                f"in {width} as they are, only {float_type(q)} holds their values: set requantize to that, or to a "
                "smaller type to round them anew"
            )
        found = exact
    if found in BLOCK_BYTES and linear.in_features % BLOCK:
        raise UserError(
            f"gguf: {found} stores blocks of {BLOCK}, which do not divide the {linear.in_features} inputs of "
            f"{linear.name}; allowed here: {', '.join(FLOAT_BYTES)}"
        )
    return found


def is_lossless(linear: Linear, dtype: str, stored: str) -> bool:
    """Whether a type holds a linear of the checkpoint as it is."""
    if linear.quantization is not None:
        return stored == exact_type(linear.quantization, linear.in_features)
    return stored in ("F32", STORED_AS[dtype])


# Tensors.


def matrices(spec: ModelSpec) -> list[tuple[str, Linear, int | None]]:
    """llama.cpp's name of every matrix, the linear that it holds, and the heads that its rows are interleaved by.

    The embedding is a linear too; a tied head that is quantized is it.
    """
    names, shares_codes = _names(spec), spec.is_tied and spec.head.quantization is not None
    embedding = spec.head if shares_codes else Linear(spec.embedding, spec.hidden_size, spec.vocab_size)
    found: list[tuple[str, Linear, int | None]] = [("token_embd.weight", embedding, None)]
    if not spec.is_tied:
        found.append(("output.weight", spec.head, None))
    is_interleaved = ARCHITECTURES[spec.family] in INTERLEAVED
    for layer in spec.layers:
        heads = {"q": layer.num_heads, "k": layer.num_kv_heads} if is_interleaved else {}
        found += [(f"{names[x.name]}.weight", x, heads.get(role)) for role, x in layer.linears.items()]
    return found


def slots(spec: ModelSpec, kind: Type | None, requantize: Type | None) -> list[Slot]:
    """Every tensor that comes from the checkpoint, in the order of the file.

    Raises:
        UserError: As `matrix_type`.
    """
    names = _names(spec)
    found = []
    for name, linear, heads in matrices(spec):
        stored = matrix_type(linear, spec.dtype, kind, requantize)
        shape = (linear.out_features, linear.in_features)
        found.append(Slot(name, f"{linear.name}.weight", stored, shape, linear, num_heads=heads))
        if linear.has_bias:
            base = name.removesuffix(".weight")
            found.append(Slot(f"{base}.bias", f"{linear.name}.bias", "F32", shape[:1], num_heads=heads))
    for norm in spec.norms():
        parts = ("weight", "bias") if norm.kind == "layer" else ("weight",)
        found += [
            Slot(
                f"{names[norm.name]}.{x}", f"{norm.name}.{x}", "F32", (norm.size,), norm=norm if x == "weight" else None
            )
            for x in parts
        ]
    if spec.position_embedding is not None:
        shape = (spec.max_positions, spec.hidden_size)
        found.append(Slot("position_embd.weight", f"{spec.position_embedding}.weight", "F32", shape))
    return found


def _names(spec: ModelSpec) -> dict[str, str]:
    """Module of the checkpoint -> llama.cpp's name."""
    inside = {hub: name for name, hub in gguf_file.MODULES[ARCHITECTURES[spec.family]].items()}
    found = {spec.final_norm.name: "output_norm"}
    for index, layer in enumerate(spec.layers):
        prefix = layer.input_norm.name.rpartition(".")[0] + "."
        modules: list[Linear | Norm] = [*layer.linears.values(), *layer.norms()]
        for module in modules:
            found[module.name] = f"blk.{index}.{inside[module.name.removeprefix(prefix)]}"
    return found


def size_bytes(found: list[Slot]) -> int:
    """Of all tensors as they lie in the file."""
    return sum(-(-x.size_bytes // ALIGNMENT) * ALIGNMENT for x in found)


def types(found: list[Slot]) -> dict[str, int]:
    """Type -> number of matrices stored so."""
    return dict(sorted(Counter(x.type for x in found if x.linear is not None).items()))


def stored_spec(spec: ModelSpec, found: list[Slot]) -> ModelSpec:
    """The table of what a file holds: matrices that it rounds itself have the quantization of their type."""
    rounded = {
        x.linear.name: x for x in found if x.linear is not None and not is_lossless(x.linear, spec.dtype, x.type)
    }
    if spec.is_tied and spec.embedding in rounded:
        rounded[spec.head.name] = rounded[spec.embedding]
    bits = {"Q8_0": 8, "Q4_1": 4, "Q4_0": 4}

    def swap(linear: Linear) -> Linear:
        if linear.name not in rounded:
            return linear
        kind = rounded[linear.name].type
        q = Quantization(bits[kind], BLOCK, kind != "Q4_1") if kind in bits else None
        return dataclasses.replace(linear, quantization=q, is_transposed=linear.is_transposed and q is None)

    layers = tuple(
        dataclasses.replace(x, linears={role: swap(y) for role, y in x.linears.items()}) for x in spec.layers
    )
    return dataclasses.replace(spec, layers=layers, head=swap(spec.head))


# What llama.cpp computes.


def context_length(spec: ModelSpec) -> int:
    """Tokens up to which llama.cpp computes what the model does: where it has no windows, the narrowest of them."""
    windows = [x.window for x in spec.layers if x.window is not None]
    is_windowless = ARCHITECTURES[spec.family] in WINDOWLESS
    return min([spec.max_positions, *windows]) if is_windowless else spec.max_positions


def check(spec: ModelSpec) -> None:
    """Refuse what llama.cpp would compute otherwise.

    Raises:
        UserError: One line: what the model has, what llama.cpp has in its place.
    """
    if spec.family not in ARCHITECTURES:
        raise UserError(f"gguf: {spec.family} has no architecture here; {did_you_mean(spec.family, ARCHITECTURES)}")
    spec.check_float_cache("gguf: the file")
    for linear in spec.linears():
        if linear.quantization is not None and linear.quantization.format not in ("int", "mxfp4"):
            raise UserError(
                f"gguf: no type of GGUF that strop writes holds {linear.quantization.format}, which {linear.name} is; "
                f"allowed: int, mxfp4; {linear.quantization.opened_by} opens the checkpoint itself"
            )
        if linear.quantization is not None and linear.quantization.activations is not None:
            raise UserError(
                f"gguf: {linear.name} rounds its inputs to int8 ({linear.quantization.activations}), which no type of "
                "GGUF tells; allowed: activations null, or onnx_runtime and eager for W8A8"
            )
    for what, found, allowed in _conditions(spec):
        if found != allowed:
            raise UserError(
                f"gguf: {what} is {found}, llama.cpp's {ARCHITECTURES[spec.family]} has {allowed}: the file would be "
                "another model"
            )


def notes(spec: ModelSpec, found: list[Slot]) -> tuple[str, ...]:
    """What a user should know of the file."""
    lines = ["read back and run in PyTorch: the row's quality and size are the file's, its speed is not llama.cpp's"]
    repeated = [
        x.linear.quantization.group_size or x.linear.in_features
        for x in found
        if x.linear is not None and x.linear.quantization is not None and x.type in BLOCK_BYTES
    ]
    if any(x > BLOCK for x in repeated):
        lines.append(
            f"GGUF has one scale for {BLOCK} weights: those of groups of {max(repeated)} are stored repeatedly"
        )
    if any(x.type == "Q5_0" and x.linear is not None and x.linear.quantization is not None for x in found):
        lines.append("4-bit asymmetric codes are stored as Q5_0: the minimum of Q4_1 would be rounded")
    if context_length(spec) < spec.max_positions:
        lines.append(f"llama.cpp has no windows here: context_length is {context_length(spec)}, the narrowest one")
    if spec.family == "phi3" and any(x.window is not None and x.window < spec.max_positions for x in spec.layers):
        lines.append(f"llama.cpp ignores phi3's window of {spec.layers[0].window}: it computes the same up to there")
    return tuple(lines)


def _conditions(spec: ModelSpec) -> Iterator[tuple[str, object, object]]:
    """(what, what the model has, what llama.cpp has)."""
    arch, layers = ARCHITECTURES[spec.family], spec.layers
    is_gemma = arch.startswith("gemma")
    yield "the embeddings' factor", spec.embedding_scale, spec.hidden_size**0.5 if is_gemma else 1.0
    if is_gemma:
        yield "an output matrix of its own", not spec.is_tied, False
        yield "a window of layer 0", layers[0].window is not None, True
    if arch == "phi3":
        yield "the width of all heads", layers[0].num_heads * layers[0].head_dim, spec.hidden_size
    yield "a softcap on logits", spec.logit_softcap is not None, arch == "gemma2"
    for index, layer in enumerate(layers):
        place = f"of layer {index}"
        for what in ("num_heads", "num_kv_heads", "head_dim", "intermediate_size", "softcap"):
            yield f"{what} {place}", getattr(layer, what), getattr(layers[0], what)
        yield f"a softcap on scores {place}", layer.softcap is not None, arch == "gemma2"
        yield f"keys and values {place} from another layer", layer.kv_from_layer is not None, False
        yield f"attention_scale {place}", layer.attention_scale, _attention_scale(spec)
        yield f"activation {place}", layer.activation, "gelu_tanh" if is_gemma or arch == "gpt2" else "silu"
        yield f"a rotary embedding {place}", layer.rope is not None, _has_rope(arch, index)
        if arch not in WINDOWLESS:
            yield f"the window {place}", layer.window, _window(arch, layers, index)
        extra = sorted(role for role, x in layer.linears.items() if x.has_bias and role not in BIASES.get(arch, ()))
        yield f"biases {place} on", extra, []


def _attention_scale(spec: ModelSpec) -> float:
    # llama.cpp knows the 27B models, whose queries are scaled otherwise, by their number of layers.
    head_dim = spec.layers[0].head_dim
    if len(spec.layers) == {"gemma2": 46, "gemma3_text": 62}.get(spec.family):
        head_dim = spec.hidden_size // spec.layers[0].num_heads
    return float(head_dim**-0.5)


def _has_rope(arch: str, index: int) -> bool:
    if arch == "smollm3":
        return (index + 1) % 4 != 0
    return arch != "gpt2"


def _window(arch: str, layers: tuple[LayerSpec, ...], index: int) -> int | None:
    """Every second layer of gemma2 and every sixth of gemma3 sees everything."""
    first = layers[0].window
    if arch == "phi3":
        return first
    return None if (index + 1) % {"gemma2": 2, "gemma3": 6}[arch] == 0 else first
