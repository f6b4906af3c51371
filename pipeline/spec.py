"""The architecture of a model as one table, without torch: what `check`, the decoder and every runtime read.

Leaves out how a config.json of each family becomes this table (families.py) and the weights (model.py).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from strop.errors import UserError, did_you_mean

DType = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
ROLES = (("qkv", "q", "k", "v"), ("o",), ("gate_up", "gate", "up"), ("down",))
"""Of a layer's linears, in the order of computation, those together that read the same input."""
CHOSEN, SHARED = "experts.", "shared."
"""How roles of linears of experts begin: of those that tokens are sent to by choice, and of the one that all reach."""
SCALE_BYTES = 2
"""Scales that are no part of a number format are stored in bfloat16 (see numerics.round_scales)."""
PART_BYTES: Mapping[str, int] = {"I64": 8, "F32": 4, "I32": 4, "BF16": SCALE_BYTES, "I8": 1, "U8": 1, "F8_E4M3": 1}
"""safetensors dtype -> bytes of one value, of what quantized linears are stored in."""


Activations = Literal["dynamic", "static"]
NumberFormat = Literal["int", "fp8", "mxfp4", "nvfp4", "nf4", "llm_int8"]


@dataclass(frozen=True)
class FixedFormat:
    """What a number format leaves no choice about.

    Attributes:
        bits: Of an element.
        group_size: Inputs that share one scale; None: they are one output channel, or all of the matrix.
    """

    bits: int
    group_size: int | None


FIXED_FORMATS: Mapping[NumberFormat, FixedFormat] = {
    "fp8": FixedFormat(8, None),
    "mxfp4": FixedFormat(4, 32),
    "nvfp4": FixedFormat(4, 16),
    "nf4": FixedFormat(4, 64),
    "llm_int8": FixedFormat(8, None),
}
"""All but `int`."""
BITSANDBYTES = ("nf4", "llm_int8")
"""Formats that checkpoints of bitsandbytes hold, one in each of them."""
QUANT_STATE = "weight.quant_state.bitsandbytes__nf4"
"""Part of a linear in nf4: what bitsandbytes says of it, in JSON."""


@dataclass(frozen=True)
class Quantization:
    """How one linear is computed: its weight in few bits, and maybe its inputs.

    Integers are stored as compressed-tensors pack-quantized, with integer inputs as its int-quantized; the other
    formats as its float-quantized, mxfp4-pack-quantized and nvfp4-pack-quantized, or as bitsandbytes has them.

    Attributes:
        bits: 2, 3, 4 or 8; what `FIXED_FORMATS` says where the format is not `int`.
        group_size: Inputs that share one scale; None: one scale per output channel. As `bits`.
        symmetric: True: no zero points, codes in [-2^(bits-1), 2^(bits-1) - 1]. False: integer zero points.
        activations: Inputs are rounded to the weight's 8-bit format, symmetric (W8A8). `dynamic`: each token by a scale
            from its own largest value. `static`: all by one scale, found by calibration and stored. None: they are not
            rounded.
        format: What a weight is. `int`: an integer. `fp8`: E4M3, up to 448, without infinities (Micikevicius et al.
            2022, arXiv 2209.05433). `mxfp4`: E2M1, blocks with a power of two as scale (OCP Microscaling v1.0; Rouhani
            et al. 2023, arXiv 2310.10537). `nvfp4`: E2M1, blocks with a scale in E4M3, and one in float32 over them.
            `nf4`: one of 16 quantiles of a normal distribution (Dettmers et al. 2023, arXiv 2305.14314). `llm_int8`: an
            integer from -127 to 127 (Dettmers et al. 2022, arXiv 2208.07339): the weights alone, bitsandbytes rounds
            inputs but for outliers when it runs.
        per_tensor: Of fp8: one scale for the whole matrix.
    """

    bits: int
    group_size: int | None
    symmetric: bool
    activations: Activations | None = None
    format: NumberFormat = "int"
    per_tensor: bool = False

    @property
    def opened_by(self) -> str:
        """Who runs the checkpoint itself."""
        return "transformers with bitsandbytes" if self.format in BITSANDBYTES else "vLLM"

    @property
    def is_packed(self) -> bool:
        """Whether it is integers in int32 words, without rounded inputs: the form that most runtimes take."""
        return self.format == "int" and self.activations is None


CacheFormat = Literal["int8", "int4", "fp8"]
CacheScales = Literal["tensor", "head", "channel", "token"]
TOKEN_SCALE_BYTES = 4
"""A scale that is computed for each token is kept in float32."""


@dataclass(frozen=True)
class CacheQuantization:
    """How keys and values are kept in the cache: rounded symmetrically, keys as they are cached, after rope.

    Attributes:
        format: `int8` and `int4`: codes in [-2^(bits-1), 2^(bits-1) - 1]. `fp8`: floats with 4 bits of exponent and 3
            of mantissa, largest 448 (E4M3).
        keys, values: What shares a scale. `tensor`: a layer; `head`: a head of it; `channel`: one of the head_dim
            values of a head. These are found by calibration and stored. `token`: a head of one token, by a scale that
            follows from its largest value when it is cached.
    """

    format: CacheFormat
    keys: CacheScales
    values: CacheScales

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if self.format == "int4" else 8

    def token_bytes(self, num_heads: int, head_dim: int) -> int:
        """Of the keys and values of one token in one layer, with scales of its own."""
        own = sum(TOKEN_SCALE_BYTES for scales in (self.keys, self.values) if scales == "token")
        return num_heads * (2 * head_dim * self.bits // 8 + own)


@dataclass(frozen=True)
class Linear:
    """One stored weight matrix y = W x + b, W (out_features, in_features).

    Attributes:
        name: Tensor name without `.weight`, as stored in the checkpoint.
        is_transposed: The unquantized tensor is stored (in, out), as gpt2's Conv1D does.
        quantization: None: stored in the model's dtype.
    """

    name: str
    in_features: int
    out_features: int
    has_bias: bool = False
    is_transposed: bool = False
    quantization: Quantization | None = None

    def num_groups(self) -> int:
        """Groups of inputs along one row: columns of the scale matrix (out_features, num_groups)."""
        if self.quantization is None or self.quantization.group_size is None:
            return 1
        return self.in_features // self.quantization.group_size

    def parts(self) -> dict[str, tuple[str | None, tuple[int, ...]]]:
        """Its stored tensors: last part of the name -> (safetensors dtype, None for the model's; shape)."""
        rows, columns, groups, q = self.out_features, self.in_features, self.num_groups(), self.quantization
        found: dict[str, tuple[str | None, tuple[int, ...]]] = {"bias": (None, (rows,))} if self.has_bias else {}
        if q is None:
            return {**found, "weight": (None, (columns, rows) if self.is_transposed else (rows, columns))}
        if q.is_packed:
            found["weight_packed"] = "I32", (rows, -(-columns * q.bits // 32))  # rows padded to whole words
            found["weight_scale"], found["weight_shape"] = ("BF16", (rows, groups)), ("I64", (2,))
            if not q.symmetric:
                found["weight_zero_point"] = "I32", (-(-rows * q.bits // 32), groups)
        elif q.format == "llm_int8":
            found["weight"], found["SCB"], found["weight_format"] = (
                ("I8", (rows, columns)),
                ("F32", (rows,)),
                ("U8", ()),
            )
        elif q.format == "nf4":
            found["weight"], found["weight.absmax"] = ("U8", (rows * columns // 2, 1)), ("F32", (rows * groups,))
            found["weight.quant_map"], found[QUANT_STATE] = ("F32", (16,)), ("U8", (len(quant_state(rows, columns)),))
        elif q.bits == 8:
            found["weight"] = "I8" if q.format == "int" else "F8_E4M3", (rows, columns)
            found["weight_scale"] = "BF16", (1,) if q.per_tensor else (rows, 1)
            if q.activations == "static":
                found["input_scale"] = "BF16", (1,)
        else:
            found["weight_packed"] = "U8", (rows, columns // 2)
            found["weight_scale"] = "U8" if q.format == "mxfp4" else "F8_E4M3", (rows, groups)
            if q.format == "nvfp4":
                found["weight_global_scale"] = "F32", (1,)
        return found

    def size_bytes(self, dtype: str) -> int:
        """Bytes of all its stored tensors in a checkpoint of `dtype`."""
        width = DTYPE_BYTES[dtype]
        return sum(math.prod(shape) * (PART_BYTES[kind] if kind else width) for kind, shape in self.parts().values())


@dataclass(frozen=True)
class Norm:
    """A normalization over the last axis.

    Attributes:
        name: Tensor name without `.weight`.
        size: Width of the axis.
        kind: `rms`: x / rms(x) · (offset + w). `layer`: LayerNorm with bias.
        eps: Added to the variance.
        offset: 1.0 for the gemma families, which store w - 1.
    """

    name: str
    size: int
    kind: Literal["rms", "layer"]
    eps: float
    offset: float = 0.0


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding over the first 2·len(inv_freq) values of each head, halves not interleaved.

    Attributes:
        inv_freq: Inverse frequencies after any scaling (linear, llama3, yarn, longrope).
        factor: Multiplies cos and sin (yarn and longrope), else 1.
    """

    inv_freq: tuple[float, ...]
    factor: float = 1.0


@dataclass(frozen=True)
class Moe:
    """Experts in the place of a layer's MLP: y = Σ wₑ · expertₑ(x) over the `top_k` largest of w = softmax(R x).

    Where there is a shared expert, sigmoid(g x) · shared(x) is added (Jiang et al. 2024, arXiv 2401.04088; Yang et al.
    2024, arXiv 2407.10671). R and g are never quantized: they are tiny, they decide which expert computes, and other
    libraries have no packed form for them.

    Attributes:
        num_experts: To choose from.
        top_k: Experts that a token reaches.
        normalizes: The chosen weights are divided by their sum.
        router: R (num_experts, hidden_size).
        shared_gate: g (1, hidden_size); None where there is no shared expert.
    """

    num_experts: int
    top_k: int
    normalizes: bool
    router: Linear
    shared_gate: Linear | None = None

    def experts(self) -> list[str]:
        """How the roles of each expert's linears begin, in the order of computation: `experts.0.`, ..., `shared.`."""
        return [f"{CHOSEN}{i}." for i in range(self.num_experts)] + ([SHARED] if self.shared_gate else [])

    def gates(self) -> list[Linear]:
        """What reads the experts' input and is never quantized: the router, and the shared expert's gate."""
        return [self.router, self.shared_gate] if self.shared_gate else [self.router]


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: x += post(attn(norm(x))), then x += post(mlp(norm(x))).

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads, a divisor of num_heads.
        head_dim: Width of a head.
        intermediate_size: Width of the MLP, or of each expert that is chosen.
        attention_scale: Multiplies q·k.
        linears: Role -> linear. Attention: `q`,`k`,`v` or one `qkv` (rows in that order); `o`. MLP: `gate`,`up` or
            one `gate_up`, or only `up` where is_gated is False; `down`. Where there are experts, those of each:
            `experts.0.gate`, ..., `shared.down`. Always in the order of computation.
        input_norm, mlp_norm: Before attention and before the MLP.
        post_attention_norm, post_mlp_norm: On the branch's output before it is added (gemma2, gemma3), else None.
        q_norm, k_norm: Per head before rope (qwen3, gemma3), else None.
        rope: None where the layer has no rotary embedding (gpt2, some layers of smollm3).
        window: Attends to the last `window` positions, itself included; None: all.
        softcap: cap·tanh(score / cap) on attention scores (gemma2), else None.
        activation: On gate (or on up where is_gated is False).
        kv_from_layer: Uses that layer's keys and values instead of its own (then there is no k, v); None: its own.
        moe: How tokens are sent to experts; None: there is one MLP for all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    attention_scale: float
    linears: dict[str, Linear]
    input_norm: Norm
    mlp_norm: Norm
    activation: Literal["silu", "gelu", "gelu_tanh"]
    is_gated: bool = True
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    rope: Rope | None = None
    window: int | None = None
    softcap: float | None = None
    kv_from_layer: int | None = None
    moe: Moe | None = None

    @property
    def attention(self) -> str:
        """Name of the module that holds its attention's linears."""
        return next(iter(self.linears.values())).name.rpartition(".")[0]

    def groups(self) -> list[list[Linear]]:
        """Its linears by the input that they read, in the order of computation: attention's, `o`, the MLP's, `down`.

        The last two come once for each expert, because only the tokens that it is chosen for are its input.
        """
        return [[self.linears[role] for role in part if role in self.linears] for part in _parts(self.moe)]

    def token_share(self, role: str) -> float:
        """The part of all tokens that reaches a linear, where every expert is chosen as often as the others."""
        return 1.0 if self.moe is None or not role.startswith(CHOSEN) else self.moe.top_k / self.moe.num_experts

    def gates(self) -> list[Linear]:
        """As `Moe.gates`; none where there are no experts."""
        return [] if self.moe is None else self.moe.gates()

    def norms(self) -> Iterator[Norm]:
        """Every norm of the layer that is there."""
        for norm in (
            self.input_norm,
            self.q_norm,
            self.k_norm,
            self.post_attention_norm,
            self.mlp_norm,
            self.post_mlp_norm,
        ):
            if norm is not None:
                yield norm


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer.

    Attributes:
        family: `model_type` of config.json.
        dtype: Of the unquantized tensors in the checkpoint.
        max_positions: Longest context.
        embedding: Tensor name (with `.weight` left off) of the token embedding (vocab_size, hidden_size).
        embedding_scale: Multiplies embeddings (gemma), else 1.
        position_embedding: Tensor name of learned positions (max_positions, hidden_size) (gpt2), else None.
        head: The output matrix. Where `is_tied` and it is not quantized it has no tensor of its own. Where
            `is_tied` and it is quantized, its codes are the embedding too: runtimes look tokens up in them.
        is_tied: Embedding and head are one matrix.
        logit_softcap: cap·tanh(logit / cap) (gemma2), else None.
        kv_cache: How keys and values are kept in the cache; None: as they are computed.
        opaque_bytes: Bytes of all tensors of a family that is not known here. Then there are no layers, and of the
            other fields only `family`, `dtype`, `vocab_size` and `max_positions` mean anything. Else None.
    """

    family: str
    dtype: DType
    vocab_size: int
    hidden_size: int
    max_positions: int
    embedding: str
    layers: tuple[LayerSpec, ...]
    final_norm: Norm
    head: Linear
    is_tied: bool
    embedding_scale: float = 1.0
    position_embedding: str | None = None
    logit_softcap: float | None = None
    kv_cache: CacheQuantization | None = None
    opaque_bytes: int | None = None

    def linears(self) -> Iterator[Linear]:
        """Every linear in the order of computation, the head last; routers and gates of experts apart."""
        for layer in self.layers:
            yield from layer.linears.values()
        yield self.head

    def gates(self) -> Iterator[Linear]:
        """Routers and gates of shared experts, which stay in the checkpoint's dtype."""
        for layer in self.layers:
            yield from layer.gates()

    def refuse_experts(self, what: str, allowed: str) -> None:
        """Refuse layers that send tokens to experts.

        Args:
            what: The method or runtime that cannot take them.
            allowed: What can.

        Raises:
            UserError: There are some.
        """
        for index, layer in enumerate(self.layers):
            if layer.moe is not None:
                raise UserError(
                    f"{what}: layer {index} of this {self.family} has {layer.moe.num_experts} experts, which it does "
                    f"not take; allowed: {allowed}"
                )

    def layer_linears(self, index: int) -> list[Linear]:
        """The linears of one layer in the order of computation."""
        return list(self.layers[index].linears.values())

    def match(self, targets: Sequence[str] | None) -> list[Linear]:
        """The linears that `targets` name.

        Args:
            targets: Shell-style patterns over full linear names (`*.mlp.*`, `lm_head`). None: every linear inside
                the layers, not the head.

        Raises:
            UserError: A pattern matches nothing, or the family is not known.
        """
        if self.opaque_bytes is not None:
            raise UserError(
                f"model: {self.family} is not a known family: it can run in eager, but no stage can change it"
            )
        inside = list(self.linears())[:-1]
        if targets is None:
            return inside
        for pattern in targets:
            if not any(fnmatch.fnmatchcase(x.name, pattern) for x in self.linears()):
                last_parts = {x.name.rsplit(".", 1)[-1] for x in self.linears()}
                if any(fnmatch.fnmatchcase(x.name, pattern) for x in self.gates()):
                    raise UserError(
                        f"targets: pattern {pattern!r} names only routers or gates of experts, which are never "
                        f"quantized; allowed: names that end in {', '.join(sorted(last_parts))}"
                    )
                raise UserError(
                    f"targets: pattern {pattern!r} matches no linear; names end in {did_you_mean(pattern, last_parts)}"
                )
        return [x for x in self.linears() if any(fnmatch.fnmatchcase(x.name, p) for p in targets)]

    def quantize(self, choices: Mapping[str, Quantization]) -> ModelSpec:
        """This table with the named linears quantized.

        Args:
            choices: Linear name -> its quantization.

        Raises:
            UserError: A linear is quantized already, its width is not a multiple of the group size, or inputs are to be
                rounded for weights that no int8 engine multiplies them with.
        """
        for linear in self.linears():
            if linear.name in choices:
                _check_fit(linear, choices[linear.name])

        def swap(linear: Linear) -> Linear:
            q = choices.get(linear.name)
            return linear if q is None else dataclasses.replace(linear, quantization=q, is_transposed=False)

        layers = tuple(
            dataclasses.replace(x, linears={role: swap(y) for role, y in x.linears.items()}) for x in self.layers
        )
        result = dataclasses.replace(self, layers=layers, head=swap(self.head))
        _check_mix(result)
        return result

    def cache_scales(self) -> dict[str, tuple[int, ...]]:
        """Stored name -> shape of every scale of keys and values, those that are computed for each token left out."""
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in self.layers:
            if self.kv_cache is None or layer.kv_from_layer is not None:
                continue
            by_kind = {
                "tensor": (1,),
                "head": (layer.num_kv_heads, 1, 1),
                "channel": (layer.num_kv_heads, 1, layer.head_dim),
            }
            for part, scales in (("k", self.kv_cache.keys), ("v", self.kv_cache.values)):
                if scales in by_kind:
                    shapes[f"{layer.attention}.{part}_scale"] = by_kind[scales]
        return shapes

    def check_cache(self, stage: str) -> None:
        """Refuse to change keys or values whose scales are already found.

        Raises:
            UserError: The table has such scales.
        """
        if self.cache_scales():
            raise UserError(
                f"{stage} changes keys or values, whose scales an earlier stage calibrated: put kv_cache after it"
            )

    def check_float_cache(self, runtime: str) -> None:
        """Refuse a rounded cache for a runtime that has none.

        Raises:
            UserError: The table has one.
        """
        if self.kv_cache is not None:
            raise UserError(
                f"{runtime} keeps keys and values as floats, kv_cache asks for {self.kv_cache.format}; allowed: eager, "
                "and onnx_runtime with operators: contrib for int8 and int4"
            )

    def num_parameters(self) -> int:
        """Weights and biases, a tied matrix counted once."""
        if self.opaque_bytes is not None:
            return self.opaque_bytes // DTYPE_BYTES[self.dtype]
        total = sum(x.in_features * x.out_features + (x.out_features if x.has_bias else 0) for x in self.linears())
        total += sum(x.in_features * x.out_features for x in self.gates())
        total += 0 if self.is_tied else self.vocab_size * self.hidden_size
        total += self.max_positions * self.hidden_size if self.position_embedding else 0
        return total + sum(n.size * (2 if n.kind == "layer" else 1) for n in self.norms())

    def norms(self) -> Iterator[Norm]:
        """Every norm, the final one last."""
        for layer in self.layers:
            yield from layer.norms()
        yield self.final_norm

    def size_bytes(self) -> int:
        """Bytes of all tensors of the checkpoint that this table describes (safetensors headers come on top)."""
        if self.opaque_bytes is not None:
            return self.opaque_bytes
        width = DTYPE_BYTES[self.dtype]
        total = sum(x.size_bytes(self.dtype) for layer in self.layers for x in layer.linears.values())
        total += sum(x.size_bytes(self.dtype) for x in self.gates())
        total += self.vocab_size * self.hidden_size * width
        total += self.max_positions * self.hidden_size * width if self.position_embedding else 0
        total += sum(n.size * (2 if n.kind == "layer" else 1) * width for n in self.norms())
        if not self.is_tied or self.head.quantization is not None:
            total += self.head.size_bytes(self.dtype)
        return total + SCALE_BYTES * sum(map(math.prod, self.cache_scales().values()))

    def kv_bytes_per_token(self, dtype_bytes: int = 4) -> int:
        """Bytes of keys and values that one cached token takes: `dtype_bytes` each, unless they are rounded."""
        own = [x for x in self.layers if x.kv_from_layer is None]
        if self.kv_cache is not None:
            return sum(self.kv_cache.token_bytes(x.num_kv_heads, x.head_dim) for x in own)
        return sum(2 * x.num_kv_heads * x.head_dim * dtype_bytes for x in own)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` reads them back to an equal table."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> ModelSpec:
        """The table that `to_json` wrote."""
        layers = tuple(
            LayerSpec(
                **{
                    **x,
                    "moe": (moe := _moe(x.get("moe"))),
                    "linears": {r: _linear(x["linears"][r]) for r in chain(*_parts(moe)) if r in x["linears"]},
                    **{
                        k: _norm(x[k])
                        for k in ("input_norm", "mlp_norm", "post_attention_norm", "post_mlp_norm", "q_norm", "k_norm")
                    },
                    "rope": Rope(tuple(x["rope"]["inv_freq"]), x["rope"]["factor"]) if x["rope"] else None,
                }
            )
            for x in data["layers"]
        )
        cache = data.get("kv_cache")
        return ModelSpec(
            **{
                **data,
                "layers": layers,
                "head": _linear(data["head"]),
                "final_norm": _norm(data["final_norm"]),
                "kv_cache": CacheQuantization(**cache) if cache else None,
            }
        )


def quant_state(rows: int, columns: int) -> bytes:
    """What bitsandbytes keeps of a matrix in nf4 beside its numbers, as it writes it."""
    block = FIXED_FORMATS["nf4"].group_size
    return json.dumps({"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": [rows, columns]}).encode()


def _check_mix(spec: ModelSpec) -> None:
    """Refuse a table that no one library reads."""
    found: dict[str, str] = {}
    for linear in spec.linears():
        if linear.quantization is not None:
            found.setdefault(linear.quantization.format, linear.name)
    theirs = [x for x in found if x in BITSANDBYTES]
    if theirs and len(found) > 1:
        other = next(x for x in found if x != theirs[0])
        raise UserError(
            f"format {theirs[0]}: a checkpoint of bitsandbytes holds one format, found {other} of {found[other]} too"
        )
    experts = (x for layer in spec.layers for role, x in layer.linears.items() if role.startswith(CHOSEN))
    for linear in experts if theirs else ():
        if linear.quantization is not None:
            raise UserError(
                f"format {theirs[0]}: {linear.name} is of an expert, which transformers does not open in it; allowed: "
                "targets without experts, or another format"
            )
    head = spec.head.quantization
    if head is not None and head.format in BITSANDBYTES and spec.is_tied:
        raise UserError(
            f"format {head.format}: {spec.head.name} is the embedding too, which bitsandbytes keeps as it is"
        )


def _check_fit(linear: Linear, q: Quantization) -> None:
    """Refuse to quantize a linear in a way that no engine computes, or twice."""
    if linear.quantization is not None:
        raise UserError(f"{linear.name}: already quantized to {linear.quantization.bits} bits by an earlier stage")
    if q.activations is not None and q.format == "int" and (q.bits, q.group_size, q.symmetric) != (8, None, True):
        raise UserError(
            f"activations {q.activations} of {linear.name}: int8 inputs go with bits 8, group_size null and "
            f"symmetric true, found bits {q.bits}, group_size {q.group_size or 'null'} and symmetric "
            f"{str(q.symmetric).lower()}"
        )
    if q.group_size is None or linear.in_features % q.group_size == 0:
        return
    if q.format != "int":
        raise UserError(
            f"format {q.format}: its blocks of {q.group_size} do not divide the {linear.in_features} inputs of "
            f"{linear.name}; allowed here: int or fp8, or targets without it"
        )
    fits = [g for g in (8, 16, 32, 48, 64, 96, 128, 192, 256, 512) if linear.in_features % g == 0]
    raise UserError(
        f"group_size {q.group_size} does not divide the {linear.in_features} inputs of {linear.name}; "
        f"allowed here: {fits or 'null (per channel)'}"
    )


def _parts(moe: Moe | None) -> Sequence[Sequence[str]]:
    """Roles of a layer's linears, those together that read the same input, in the order of computation."""
    if moe is None:
        return ROLES
    return [*ROLES[:2], *([f"{x}{role}" for role in part] for x in moe.experts() for part in ROLES[2:])]


def _moe(data: Mapping[str, Any] | None) -> Moe | None:
    if data is None:
        return None
    gate = data["shared_gate"]
    return Moe(**{**data, "router": _linear(data["router"]), "shared_gate": _linear(gate) if gate else None})


def _linear(data: Mapping[str, Any]) -> Linear:
    q = data["quantization"]
    return Linear(**{**data, "quantization": Quantization(**q) if q else None})


def _norm(data: Mapping[str, Any] | None) -> Norm | None:
    return Norm(**data) if data else None
