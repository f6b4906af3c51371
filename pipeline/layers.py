"""Our own small decoder, built from a `ModelSpec`. Leaves out reading weights (model.py) and sessions (program.py).

Legend: B rows, K new tokens a row, T keys in sight, H hidden size, D width of a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop import numerics
from strop.kv_codes import Codec
from strop.spec import BITSANDBYTES, CHOSEN, SHARED, LayerSpec, Linear, ModelSpec, Norm, Rope

Rotary = tuple[Tensor, Tensor]
"""cos and signed sin, each (B, 1, K, 2·len(inv_freq)): x·cos + swapped halves of x·sin."""
Attend = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""q (B, heads, K, D), k and v (B, kv_heads, K, D) or None for a layer without its own -> (B, heads, K, D)."""
_STORED: Mapping[str, torch.dtype] = {
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class QuantLinear(nn.Module):
    """y = W x + b with W kept packed, exactly the tensors of the checkpoint; dequantized at every call.

    Attributes:
        packed: int32 (out, words).
        scale: s (out, groups), bfloat16.
        zero: Packed z, int32 (words, groups); None where symmetric.
        bias: (out,) or None.
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor | None
    bias: Tensor | None

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        super().__init__()
        assert linear.quantization is not None
        q, self.quantization = linear.quantization, linear.quantization
        self.in_features, self.out_features, self.num_groups = (
            linear.in_features,
            linear.out_features,
            linear.num_groups(),
        )
        words, zero_words = (-(-n * q.bits // 32) for n in (linear.in_features, linear.out_features))
        self.register_buffer("packed", torch.empty(linear.out_features, words, dtype=torch.int32))
        self.register_buffer("scale", torch.empty(linear.out_features, self.num_groups, dtype=torch.bfloat16))
        zero = None if q.symmetric else torch.empty(zero_words, self.num_groups, dtype=torch.int32)
        self.register_buffer("zero", zero)
        self.register_buffer("bias", torch.empty(linear.out_features, dtype=dtype) if linear.has_bias else None)

    def dense(self) -> Tensor:
        """W (out, in), float32."""
        return self._dequantize(self.packed, self.scale, self._zeros())

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of W, float32.

        Args:
            indices: Any shape, int64.

        Returns:
            (*indices.shape, in).
        """
        flat = indices.flatten()
        rows = self._dequantize(self.packed[flat], self.scale[flat], self._zeros()[flat])
        return rows.reshape(*indices.shape, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) -> (…, out), in the dtype of x."""
        return F.linear(x, self.dense().to(x.dtype), self.bias)

    def _zeros(self) -> Tensor:
        shape = (self.out_features, self.num_groups)
        if self.zero is None:
            return torch.zeros(shape, dtype=torch.int8, device=self.packed.device)
        return numerics.unpack(self.zero, self.quantization.bits, shape, axis=0)

    def _dequantize(self, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        codes = numerics.unpack(packed, self.quantization.bits, (len(packed), self.in_features))
        return numerics.dequantize(codes, scale, zero)


class IntegerLinear(nn.Module):
    """y = W x + b with W in int8 and x rounded to int8, multiplied as integers.

    The integers are held in float32, where their products and, up to 2²⁴, sums of products are exact: what an int8
    engine computes, but for the order in which the result is scaled.

    Attributes:
        codes: Q (out, in), int8 as stored, float32 after `fold`.
        scale: s (out, 1), bfloat16.
        input_scale: (1,), bfloat16; None where each token has a scale of its own.
        bias: (out,) or None.
        rounds_inputs: False: x stays as it is.
    """

    codes: Tensor
    scale: Tensor
    input_scale: Tensor | None
    bias: Tensor | None

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        super().__init__()
        assert linear.quantization is not None
        is_static, rows = linear.quantization.activations == "static", linear.out_features
        self.register_buffer("codes", torch.empty(rows, linear.in_features, dtype=torch.int8))
        self.register_buffer("scale", torch.empty(rows, 1, dtype=torch.bfloat16))
        self.register_buffer("input_scale", torch.empty(1, dtype=torch.bfloat16) if is_static else None)
        self.register_buffer("bias", torch.empty(rows, dtype=dtype) if linear.has_bias else None)
        self.rounds_inputs = True

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of W, float32: (*indices.shape, in)."""
        return self.codes[indices].float() * self.scale[indices].float()

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) -> (…, out), in the dtype of x."""
        scale = self.scale.float().T
        inputs = x.float()
        if self.rounds_inputs:
            input_scale = numerics.token_scales(x) if self.input_scale is None else self.input_scale.float()
            inputs, scale = numerics.round_inputs(x, input_scale), input_scale * scale
        y = (F.linear(inputs, self.codes.float()) * scale).to(x.dtype)
        return y if self.bias is None else y + self.bias


class FixedLinear(nn.Module):
    """y = W x + b with W in a format other than `int`, exactly the checkpoint's tensors, and x rounded to fp8 or not.

    Dequantized at every call. Products of two numbers of fp8 are exact in float32, so where x is rounded too, this is
    what an fp8 engine computes, but for the order of sums and of scaling.

    Attributes:
        quantization: Of W.
        parts: Of W and the scale of inputs: names as in `Linear.parts`.
        bias: (out,) or None.
        rounds_inputs: False: x stays as it is.
    """

    bias: Tensor | None

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        super().__init__()
        assert linear.quantization is not None
        self.quantization = linear.quantization
        self.in_features, self.out_features = linear.in_features, linear.out_features
        stored = {part: x for part, x in linear.parts().items() if part != "bias"}
        self.parts = tuple(stored)
        for part, (kind, shape) in stored.items():
            assert kind is not None
            self.register_buffer(_buffer(part), torch.empty(shape, dtype=_STORED[kind]))
        self.register_buffer("bias", torch.empty(linear.out_features, dtype=dtype) if linear.has_bias else None)
        self.rounds_inputs = linear.quantization.activations is not None

    def part(self, name: str) -> Tensor:
        """As it is stored."""
        return self.get_buffer(_buffer(name))

    def dense(self) -> Tensor:
        """W (out, in), float32."""
        return numerics.dequantize(*numerics.load_fixed(self.part, self.quantization, self.out_features))

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of W, float32: (*indices.shape, in)."""
        flat = indices.flatten()
        if self.quantization.format in BITSANDBYTES:
            return self.dense()[indices]

        def load(name: str) -> Tensor:
            stored = self.part(name)
            return stored[flat] if stored.ndim == 2 else stored

        rows = numerics.dequantize(*numerics.load_fixed(load, self.quantization, len(flat)))
        return rows.reshape(*indices.shape, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) -> (…, out), in the dtype of x."""
        if self.quantization.activations is None:
            return F.linear(x, self.dense().to(x.dtype), self.bias)
        codes, scale, _ = numerics.load_fixed(self.part, self.quantization, self.out_features)
        inputs, scale = x.float(), scale.T
        if self.rounds_inputs:
            is_static = self.quantization.activations == "static"
            input_scale = self.part("input_scale").float() if is_static else numerics.token_scales(x, "fp8")
            inputs, scale = numerics.round_inputs(x, input_scale, "fp8"), input_scale * scale
        y = (F.linear(inputs, codes.float()) * scale).to(x.dtype)
        return y if self.bias is None else y + self.bias


class RmsNorm(nn.Module):
    """x / rms(x) · (offset + w); over gemma's offset in float32, as transformers does."""

    def __init__(self, norm: Norm, dtype: torch.dtype) -> None:
        super().__init__()
        self.size, self.eps, self.offset = (norm.size,), norm.eps, norm.offset
        self.weight = nn.Parameter(torch.empty(norm.size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape whose last axis is the norm's size."""
        if self.offset:
            return F.rms_norm(x.float(), self.size, self.weight.float() + self.offset, self.eps).to(x.dtype)
        return F.rms_norm(x, self.size, self.weight.to(x.dtype), self.eps)  # they differ under autocast


class Expert(nn.Module):
    """down(activation(gate x) · up x), of one expert."""

    gate: nn.Module
    up: nn.Module
    down: nn.Module

    def __init__(self, spec: LayerSpec, prefix: str, dtype: torch.dtype) -> None:
        super().__init__()
        for role in ("gate", "up", "down"):
            self.add_module(role, _linear(spec.linears[prefix + role], dtype))
        self.activation = _ACTIVATIONS[spec.activation]

    def inner(self, x: Tensor) -> Tensor:
        """What `down` takes: (…, H) -> (…, width)."""
        inner: Tensor = self.activation(self.gate(x)) * self.up(x)
        return inner

    def forward(self, x: Tensor) -> Tensor:
        """(…, H) -> (…, H)."""
        y: Tensor = self.down(self.inner(x))
        return y


@dataclass(frozen=True)
class Routes:
    """Where tokens are sent.

    Attributes:
        experts: (tokens, top_k) int64, of the largest weight first.
        weights: (tokens, top_k), in the dtype of the hidden states.
        shared: Weight of the shared expert, (tokens, 1); None where there is none.
    """

    experts: Tensor
    weights: Tensor
    shared: Tensor | None

    def of(self, expert: str) -> tuple[Tensor, Tensor]:
        """Indices (n,) of the tokens that reach an expert, ascending, and its weights (n, 1) for them.

        Args:
            expert: How the roles of its linears begin (`Moe.experts`).
        """
        if expert == SHARED:
            assert self.shared is not None
            return torch.arange(len(self.shared), device=self.shared.device), self.shared
        index = int(expert.removeprefix(CHOSEN).removesuffix("."))
        tokens, place = (self.experts == index).nonzero(as_tuple=True)
        return tokens, self.weights[tokens, place, None]

    def reached(self) -> list[str]:
        """The experts that some token reaches, in the order of computation."""
        chosen = [f"{CHOSEN}{index}." for index in sorted(set(self.experts.flatten().tolist()))]
        return chosen if self.shared is None else [*chosen, SHARED]


class Layer(nn.Module):
    """One decoder layer. Its linears are attributes named by role: `q`, `k`, `v` or `qkv`, `o`, `gate`, `up`, ...

    With experts, `experts` and `shared` hold their linears.
    """

    qkv: nn.Module
    q: nn.Module
    k: nn.Module
    v: nn.Module
    o: nn.Module
    gate_up: nn.Module
    gate: nn.Module
    up: nn.Module
    down: nn.Module
    router: nn.Module
    shared_gate: nn.Module
    experts: nn.ModuleList
    shared: nn.Module

    def __init__(self, spec: LayerSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        for role, linear in spec.linears.items():
            if "." not in role:
                self.add_module(role, _linear(linear, dtype))
        if spec.moe is not None:
            chosen = range(spec.moe.num_experts)
            self.experts = nn.ModuleList(Expert(spec, f"{CHOSEN}{i}.", dtype) for i in chosen)
            self.router = _linear(spec.moe.router, dtype)
            if spec.moe.shared_gate is not None:
                self.shared = Expert(spec, SHARED, dtype)
                self.shared_gate = _linear(spec.moe.shared_gate, dtype)
        self.input_norm, self.mlp_norm = make_norm(spec.input_norm, dtype), make_norm(spec.mlp_norm, dtype)
        self.post_attention_norm = _optional_norm(spec.post_attention_norm, dtype)
        self.post_mlp_norm = _optional_norm(spec.post_mlp_norm, dtype)
        self.q_norm, self.k_norm = _optional_norm(spec.q_norm, dtype), _optional_norm(spec.k_norm, dtype)
        self.activation = _ACTIVATIONS[spec.activation]
        self.is_fused, self.has_fused_mlp = "qkv" in spec.linears, "gate_up" in spec.linears

    def forward(self, x: Tensor, rotary: Rotary | None, attend: Attend) -> Tensor:
        """x (B, K, H) -> (B, K, H).

        Args:
            x: Hidden states.
            rotary: Of this layer's rope at the tokens' positions; None where the layer has no rope.
            attend: What keeps keys and values and computes attention over them.
        """
        x = self.add_attention(x, self.attention(x, rotary, attend))
        return self.add_mlp(x, self.inner(x)) if self.spec.moe is None else self.add_experts(x)

    def attention(self, x: Tensor, rotary: Rotary | None, attend: Attend) -> Tensor:
        """What `o` takes: (B, K, heads · D). Arguments as `forward`."""
        q, k, v = self._project(self.input_norm(x))
        if rotary is not None:
            q = _rotate(q, rotary)
            k = None if k is None else _rotate(k, rotary)
        return attend(q, k, v).transpose(1, 2).flatten(2)

    def add_attention(self, x: Tensor, heads: Tensor) -> Tensor:
        """x (B, K, H) and what `o` takes -> x after attention."""
        y: Tensor = self.o(heads)
        return x + (y if self.post_attention_norm is None else self.post_attention_norm(y))

    def inner(self, x: Tensor) -> Tensor:
        """What `down` takes, from x (B, K, H) after attention: (B, K, intermediate_size)."""
        return self._activate(self.mlp_norm(x))

    def add_mlp(self, x: Tensor, inner: Tensor) -> Tensor:
        """x (B, K, H) after attention and what `down` takes -> x after the layer."""
        return self.add_branch(x, self.down(inner))

    def add_branch(self, x: Tensor, y: Tensor) -> Tensor:
        """x (B, K, H) after attention and what the MLP or the experts give -> x after the layer."""
        return x + (y if self.post_mlp_norm is None else self.post_mlp_norm(y))

    def route(self, x: Tensor) -> Routes:
        """Where to send tokens, from what experts take: x (tokens, H), normed."""
        moe = self.spec.moe
        assert moe is not None
        weights, experts = self.router(x).float().softmax(-1).topk(moe.top_k, dim=-1)
        if moe.normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routes(experts, weights.to(x.dtype), None if moe.shared_gate is None else self.shared_gate(x).sigmoid())

    def add_experts(self, x: Tensor) -> Tensor:
        """x (B, K, H) after attention -> x after the layer, of a layer with experts."""
        inputs: Tensor = self.mlp_norm(x).flatten(0, -2)
        routes, y = self.route(inputs), torch.zeros_like(inputs)
        for expert in routes.reached():
            tokens, weights = routes.of(expert)
            y = y.index_add(0, tokens, self.expert(expert)(inputs[tokens]) * weights)
        return self.add_branch(x, y.view(x.shape))

    def expert(self, prefix: str) -> Expert:
        """The expert whose linears' roles begin so."""
        found = self.get_submodule(prefix.removesuffix("."))
        assert isinstance(found, Expert)
        return found

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x (B, K, H) -> q (B, heads, K, D), k, v (B, kv_heads, K, D), normed per head, before rope."""
        s = self.spec
        shape = (*x.shape[:2], -1, s.head_dim)
        if self.is_fused:
            heads = self.qkv(x).view(shape).transpose(1, 2)
            q, k, v = heads.split((s.num_heads, s.num_kv_heads, s.num_kv_heads), dim=1)
        else:
            q = self.q(x).view(shape).transpose(1, 2)
            if s.kv_from_layer is not None:
                return q if self.q_norm is None else self.q_norm(q), None, None
            k, v = self.k(x).view(shape).transpose(1, 2), self.v(x).view(shape).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _activate(self, x: Tensor) -> Tensor:
        """Normed x (B, K, H) -> (B, K, intermediate_size)."""
        gate: Tensor
        up: Tensor
        if self.has_fused_mlp:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
        elif self.spec.is_gated:
            gate, up = self.gate(x), self.up(x)
        else:
            return self.activation(self.up(x))
        return self.activation(gate) * up


class Decoder(nn.Module):
    """A decoder-only transformer with a K/V cache, rows of different length, trees and sliding windows.

    Weights are not initialized: `tensors` is what to fill. Only `forward` needs a cache; `block` walks the layers
    one at a time without.

    Attributes:
        spec: The table it was built from.
        layers: One `Layer` each.
        codecs: How the cache holds keys and values, of each layer that owns some.
        embedding: None where it is tied to the head: then tokens are looked up in the head's matrix.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        dtype: torch.dtype = getattr(torch, spec.dtype)
        self.layers = nn.ModuleList(Layer(layer, dtype) for layer in spec.layers)
        self.norm = make_norm(spec.final_norm, dtype)
        self.head = _linear(spec.head, dtype)
        self.embedding = None if spec.is_tied else _table(spec.vocab_size, spec.hidden_size, dtype)
        self.positions = _table(spec.max_positions, spec.hidden_size, dtype) if spec.position_embedding else None
        owners = [x for x in spec.layers if x.kv_from_layer is None]
        self.codecs = nn.ModuleList(Codec(spec, x, spec.kv_cache) for x in owners)
        self._places: dict[str, tuple[nn.Module, str]] = {spec.head.name: (self, "head")}
        for layer in self.layers:
            assert isinstance(layer, Layer)
            for role, linear in layer.spec.linears.items():
                part, _, role = role.rpartition(".")
                self._places[linear.name] = layer.get_submodule(part), role
            for gate, role in zip(layer.spec.gates(), ("router", "shared_gate"), strict=False):
                self._places[gate.name] = layer, role
        self._ropes: list[Rope] = list(dict.fromkeys(x.rope for x in spec.layers if x.rope is not None))
        self._rope_of = [None if x.rope is None else self._ropes.index(x.rope) for x in spec.layers]
        self._slot_of = cache_slots(spec)
        self._frequencies: dict[torch.device, list[Tensor]] = {}

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.weight.device

    # Weights.

    def linear(self, name: str) -> nn.Module:
        """The linear that is stored under `name` (without `.weight`), a router or a gate too."""
        place, role = self._places[name]
        module = getattr(place, role)
        assert isinstance(module, nn.Module)
        return module

    def replace_linear(self, name: str, module: nn.Module) -> None:
        """Put another module in that linear's place. With tied embeddings `lm_head` is both."""
        place, role = self._places[name]
        setattr(place, role, module)

    def tensors(self) -> dict[str, Tensor]:
        """Stored tensor name -> the weight it fills, as a view in the stored orientation; writing to it is filling.

        Left out: `weight_shape` of quantized linears, and an embedding that quantized tied codes stand in for.
        """
        spec = self.spec
        found: dict[str, Tensor] = {}
        for linear in (*spec.linears(), *spec.gates()):
            found.update(_stored(linear.name, self.linear(linear.name), linear.is_transposed))
        if spec.is_tied and isinstance(self.head, nn.Linear):
            found.pop(f"{spec.head.name}.weight")
        shared = self.head.weight if isinstance(self.head, nn.Linear) and spec.is_tied else None
        table = shared if self.embedding is None else self.embedding.weight
        if isinstance(table, Tensor):
            found[f"{spec.embedding}.weight"] = table
        if self.positions is not None:
            found[f"{spec.position_embedding}.weight"] = self.positions.weight
        for norm, module in zip(spec.norms(), self._norms(), strict=True):
            found[f"{norm.name}.weight"] = module.weight
            if isinstance(module, nn.LayerNorm):
                found[f"{norm.name}.bias"] = module.bias
        for name in spec.cache_scales():
            place, _, part = name.rpartition(".")
            index = next(i for i, x in enumerate(spec.layers) if x.attention == place)
            found[name] = getattr(self.codecs[self._slot_of[index]], part)
        return found

    def _norms(self) -> list[RmsNorm | nn.LayerNorm]:
        """In the order of `ModelSpec.norms`."""
        found: list[RmsNorm | nn.LayerNorm] = []
        for x in self.layers:
            assert isinstance(x, Layer)
            each = (x.input_norm, x.q_norm, x.k_norm, x.post_attention_norm, x.mlp_norm, x.post_mlp_norm)
            found.extend(norm for norm in each if norm is not None)
        return [*found, self.norm]

    # Computing.

    def allocate(self, batch: int, max_tokens: int) -> list[Tensor]:
        """A zeroed cache: keys and values of each layer that owns some, as its codec holds them."""
        codecs = self._codecs()
        return [y for x in codecs for y in x.allocate(batch, max_tokens, self.dtype, self.device)]

    def _codecs(self) -> list[Codec]:
        return [x for x in self.codecs if isinstance(x, Codec)]

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """What the first layer takes.

        Args:
            ids: (B, K) int64.
            positions: (B, K) int64; used only by learned position embeddings.

        Returns:
            (B, K, H).
        """
        if self.embedding is not None:
            x = F.embedding(ids, self.embedding.weight)
        elif isinstance(self.head, QuantLinear | IntegerLinear | FixedLinear):
            x = self.head.rows(ids).to(self.dtype)
        else:
            assert isinstance(self.head, nn.Linear)
            x = F.embedding(ids, self.head.weight)
        if self.spec.embedding_scale != 1.0:
            # transformers rounds the scale to the weights' dtype first.
            x = x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype, device=x.device)
        return x if self.positions is None else x + F.embedding(positions, self.positions.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: hidden states after the last layer (…, H) -> (…, V) float32."""
        logits: Tensor = self.head(self.norm(hidden)).float()
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        lengths: Tensor,
        cache: Sequence[Tensor],
        mask: Tensor | None,
        logit_rows: Tensor,
    ) -> Tensor:
        """One step over a cache (see `program.Step` for the meaning of each argument).

        Padding needs no care here: what it writes lies past a row's length and is overwritten by the next step.

        Args:
            ids: (B, K) int64.
            positions: (B, K) int64; where `mask` is None they must be lengths, lengths + 1, ...
            lengths: (B,) int64, tokens in the cache.
            cache: What `allocate` gave; changed in place.
            mask: (K, K) bool, which new tokens attend to which; None: causal.
            logit_rows: (B, n) int64.

        Returns:
            (B, n, V) float32.
        """
        step = CacheStep(cache, lengths, positions, mask, self._codecs())
        rotary = self.rotary(positions)
        x = self.embed(ids, positions)
        for index, layer in enumerate(self.layers):
            rope = self._rope_of[index]
            x = layer(
                x, None if rope is None else rotary[rope], step.attend(self.spec.layers[index], self._slot_of[index])
            )
        if logit_rows.shape[1] < ids.shape[1]:
            x = x.gather(1, logit_rows[:, :, None].expand(-1, -1, x.shape[2]))
        return self.logits(x)

    def block(
        self,
        index: int,
        x: Tensor,
        positions: Tensor | None = None,
        kept: dict[int, tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """One layer over whole sequences, causal, no cache.

        Args:
            index: Of the layer.
            x: (B, T, H).
            positions: (B, T); None: 0, 1, ....
            kept: Keys and values by layer. This layer adds its own; a layer with `kv_from_layer` reads them here.

        Returns:
            (B, T, H).

        Raises:
            KeyError: The layer shares another's keys and values and `kept` has none.
        """
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
        rotary, attend = self.whole(index, positions, {} if kept is None else kept)
        hidden: Tensor = self.layers[index](x, rotary, attend)
        return hidden

    def whole(
        self, index: int, positions: Tensor, kept: dict[int, tuple[Tensor, Tensor]]
    ) -> tuple[Rotary | None, Attend]:
        """What a layer needs to run over whole sequences without a cache: `rotary` and `attend` of `Layer.forward`.

        Args:
            index: Of the layer.
            positions: (B, T), or (1, T) where all rows have the same.
            kept: As in `block`.
        """
        spec, length = self.spec.layers[index], positions.shape[1]

        def attend(q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            if k is not None and v is not None:
                kept[index] = k, v
            k, v = kept[index if spec.kv_from_layer is None else spec.kv_from_layer]
            is_causal = spec.window is None or length <= spec.window
            start = torch.zeros(1, dtype=torch.int64, device=q.device)
            mask = None if is_causal else _mask(start, positions, None, range(length), spec.window)
            return _attention(spec, q, k, v, mask, is_causal)

        rope = self._rope_of[index]
        return None if rope is None else self.rotary(positions)[rope], attend

    def rotary(self, positions: Tensor) -> list[Rotary]:
        """cos and sin of each distinct rope at positions (B, K), computed in float32."""
        if positions.device not in self._frequencies:
            tensors = [torch.tensor(x.inv_freq, dtype=torch.float32, device=positions.device) for x in self._ropes]
            self._frequencies[positions.device] = tensors
        pairs = zip(self._ropes, self._frequencies[positions.device], strict=True)
        return [rotary(rope, frequencies, positions, self.dtype) for rope, frequencies in pairs]


def rotary(rope: Rope, frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> Rotary:
    """cos and sin of a rope at positions (B, K), computed in float32.

    Args:
        rope: Its factor is applied.
        frequencies: Its `inv_freq`, float32, on the positions' device.
        positions: (B, K) int64.
        dtype: Of the result.
    """
    angles = positions[:, None, :, None].float() * frequencies
    cos, sin = angles.cos() * rope.factor, angles.sin() * rope.factor
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def cache_slots(spec: ModelSpec) -> list[int]:
    """For each layer the index, among the layers that own keys and values, of those that it attends to."""
    owners = [i for i, x in enumerate(spec.layers) if x.kv_from_layer is None]
    return [owners.index(i if x.kv_from_layer is None else x.kv_from_layer) for i, x in enumerate(spec.layers)]


def fold(decoder: Decoder) -> None:
    """Unpack weights for good, in place, one at a time, so that no step does it.

    Every `QuantLinear`, and every `FixedLinear` that does not round its inputs, becomes a dense `nn.Linear` of the
    decoder's dtype, the codes of every `IntegerLinear` and of the other `FixedLinear` float32.
    """
    for linear in decoder.spec.linears():
        module = decoder.linear(linear.name)
        if isinstance(module, IntegerLinear):
            module.codes = module.codes.float()
        elif isinstance(module, FixedLinear) and module.quantization.activations is not None:
            module.weight = module.part("weight").float()
        elif isinstance(module, QuantLinear | FixedLinear):
            decoder.replace_linear(linear.name, _dense(module, decoder.dtype))


def round_inputs(decoder: Decoder, *, rounds: bool) -> None:
    """Let every linear of 8-bit inputs round them, or take them as they are, in place."""
    for linear in decoder.spec.linears():
        module = decoder.linear(linear.name)
        if isinstance(module, IntegerLinear | FixedLinear):
            module.rounds_inputs = rounds


def round_cache(decoder: Decoder, *, rounds: bool) -> None:
    """Let caches that are allocated from now on round keys and values as the table says, or hold them as they are."""
    for codec in decoder.codecs:
        assert isinstance(codec, Codec)
        codec.form = decoder.spec.kv_cache if rounds else None


def _dense(module: QuantLinear | FixedLinear, dtype: torch.dtype) -> nn.Linear:
    linear = _empty_linear(module.in_features, module.out_features, module.bias is not None, dtype)
    with torch.no_grad():
        linear.weight.copy_(module.dense())
        if module.bias is not None:
            linear.bias.copy_(module.bias)
    return linear


# Attention.


@dataclass(frozen=True)
class _View:
    """What one step's queries see of the cache under one window: keys of `span`, and which of them."""

    span: range
    mask: Tensor | None
    is_causal: bool


class CacheStep:
    """Keys and values of one step: written to the cache, then attended to up to the longest row."""

    def __init__(
        self,
        cache: Sequence[Tensor],
        lengths: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        codecs: Sequence[Codec] | None = None,
    ) -> None:
        """Begin a step.

        Args:
            cache: As in `Decoder.forward`, like the rest. Without codecs: k and v of each layer that owns some.
            lengths: (B,) int64.
            positions: (B, K) int64.
            mask: (K, K) bool or None.
            codecs: Of each layer that owns keys and values; None: they are cached as they are.
        """
        self.codecs = codecs
        self.cache, self.lengths, self.positions, self.mask = cache, lengths, positions, mask
        self.width = positions.shape[1]
        rows = lengths.tolist()
        self.shortest, self.longest = min(rows), max(rows)
        self.views: dict[int | None, _View] = {}
        self.index = None
        if self.shortest != self.longest:
            self.index = lengths[:, None] + torch.arange(self.width, device=lengths.device)

    def attend(self, spec: LayerSpec, slot: int) -> Attend:
        """Attention for one layer, whose keys and values are the `slot`-th of the cache."""
        codec = None if self.codecs is None else self.codecs[slot]
        width = 2 if self.codecs is None else len(self.cache) // len(self.codecs)
        kept = self.cache[width * slot : width * (slot + 1)]
        if spec.window not in self.views:
            self.views[spec.window] = self._view(spec.window)
        view = self.views[spec.window]

        def attend(q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            if k is not None and v is not None:
                for array, new in zip(kept, [k, v] if codec is None else codec.encode(k, v), strict=True):
                    self._write(array, new)
            seen = [array[:, :, view.span.start : view.span.stop] for array in kept]
            keys, values = seen if codec is None else codec.decode(seen, q.dtype)
            return _attention(spec, q, keys, values, view.mask, view.is_causal)

        return attend

    def _write(self, array: Tensor, new: Tensor) -> None:
        """Put new (B, kv_heads, K, D) after each row's cached tokens."""
        if self.index is None:
            array[:, :, self.longest : self.longest + self.width] = new
        else:
            rows = torch.arange(len(new), device=new.device)[:, None]
            array.transpose(1, 2)[rows, self.index] = new.transpose(1, 2)

    def _view(self, window: int | None) -> _View:
        stop = self.longest + self.width
        start = 0 if window is None else max(0, self.shortest - window + 1)
        is_even = self.index is None
        if is_even and self.width == 1:
            return _View(range(start, stop), None, False)
        if is_even and stop == self.width and self.mask is None and (window is None or stop <= window):
            return _View(range(stop), None, True)
        span = range(start, stop)
        return _View(span, _mask(self.lengths, self.positions, self.mask, span, window), False)


def _mask(lengths: Tensor, positions: Tensor, tree: Tensor | None, span: range, window: int | None) -> Tensor:
    """Which keys each new token attends to.

    Args:
        lengths: (B,) or (1,), cached tokens.
        positions: (B, K) of the new tokens.
        tree: (K, K) bool or None for causal.
        span: Cache slots that are looked at; new tokens sit at lengths .. lengths + K.
        window: Positions within reach, the token's own included.

    Returns:
        (B, 1, K, T) bool.
    """
    width = positions.shape[1]
    device = positions.device
    if tree is None:
        tree = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    slots = torch.arange(span.start, span.stop, device=device)
    offset = slots - lengths[:, None]
    is_new = (offset >= 0) & (offset < width)
    node = offset.clamp(0, width - 1)
    seen = (tree[:, node].transpose(0, 1) & is_new[:, None]) | (offset < 0)[:, None]
    if window is not None:
        node = node.expand(len(positions), -1)
        at = torch.where(is_new, positions.gather(1, node), slots)
        seen = seen & (at[:, None] > positions[:, :, None] - window)
    return seen[:, None]


def _attention(spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """softmax(scale · q kᵀ) v over q (B, heads, K, D), k and v (B, kv_heads, T, D); `is_causal` needs K = T."""
    if spec.softcap is not None:
        return _capped_attention(spec, q, k, v, mask, is_causal)
    if q.shape[2] == 1 and q.dtype != torch.float32:
        # Heads of a group are as good as more queries. torch 2.13 on CPU is 3 to 5 times faster so in bfloat16 than
        # with enable_gqa.
        grouped = q.reshape(len(q), spec.num_kv_heads, -1, q.shape[3])
        y = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=spec.attention_scale)
        return y.reshape(q.shape)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal,
        scale=spec.attention_scale,
        enable_gqa=spec.num_heads > spec.num_kv_heads,
    )


def _capped_attention(spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """The same with scores squeezed into ±softcap, which no fused kernel of torch offers on CPU."""
    assert spec.softcap is not None
    repeats = spec.num_heads // spec.num_kv_heads
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(2, 3) * spec.attention_scale
    scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if is_causal:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def _rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotary embedding of x (B, heads, K, D) over its first values, halves not interleaved."""
    cos, sin = rotary
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((_rotate(x[..., :width], rotary), x[..., width:]), -1)
    return torch.addcmul(x * cos, x.roll(width // 2, -1), sin)


# Building.


def _linear(linear: Linear, dtype: torch.dtype) -> nn.Module:
    if linear.quantization is not None:
        if linear.quantization.format != "int":
            return FixedLinear(linear, dtype)
        return QuantLinear(linear, dtype) if linear.quantization.is_packed else IntegerLinear(linear, dtype)
    return _empty_linear(linear.in_features, linear.out_features, linear.has_bias, dtype)


def _empty_linear(in_features: int, out_features: int, has_bias: bool, dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(in_features, out_features, has_bias, device="meta", dtype=dtype).to_empty(device="cpu")


def _table(rows: int, width: int, dtype: torch.dtype) -> nn.Embedding:
    return nn.Embedding(rows, width, device="meta", dtype=dtype).to_empty(device="cpu")


def make_norm(norm: Norm, dtype: torch.dtype) -> RmsNorm | nn.LayerNorm:
    """The module of a norm, without values."""
    if norm.kind == "rms":
        return RmsNorm(norm, dtype)
    return nn.LayerNorm(norm.size, eps=norm.eps, device="meta", dtype=dtype).to_empty(device="cpu")


def _optional_norm(norm: Norm | None, dtype: torch.dtype) -> RmsNorm | nn.LayerNorm | None:
    return None if norm is None else make_norm(norm, dtype)


def _buffer(part: str) -> str:
    """Of a part of a linear: names of buffers have no dots."""
    return part.replace(".", "_")


def _stored(name: str, module: nn.Module, is_transposed: bool) -> dict[str, Tensor]:
    """Stored name -> tensor of one linear."""
    found: dict[str, Tensor] = {}
    if isinstance(module, QuantLinear):
        found[f"{name}.weight_packed"], found[f"{name}.weight_scale"] = module.packed, module.scale
        if module.zero is not None:
            found[f"{name}.weight_zero_point"] = module.zero
    elif isinstance(module, IntegerLinear):
        found[f"{name}.weight"], found[f"{name}.weight_scale"] = module.codes, module.scale
        if module.input_scale is not None:
            found[f"{name}.input_scale"] = module.input_scale
    elif isinstance(module, FixedLinear):
        found.update({f"{name}.{part}": module.part(part) for part in module.parts})
    else:
        assert isinstance(module, nn.Linear)
        found[f"{name}.weight"] = module.weight.T if is_transposed else module.weight
    if isinstance(module.bias, Tensor):
        found[f"{name}.bias"] = module.bias
    return found
