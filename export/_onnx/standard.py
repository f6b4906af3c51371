"""A model's table and weights -> model.onnx of standard operators alone (opset 24), one graph for prefill and decoding.

Keys and values lie in tensors of fixed length (TensorScatter), what a token attends to comes as a mask, so ragged rows,
windows and trees need nothing else. Every value has one type: `dtype`, and float32 where norms, softmax under a softcap
and logits are computed. Quantized weights are codes behind DequantizeLinear. TensorRT takes this graph as it is.

DequantizeLinear there takes no zero points and no scale below zero, so W = (Q - z)·s is stored as (Q' - z')·|s|, with
codes moved by one where their sign's turn leaves the range, and x W splits into x (Q'·|s|) and (sums of x by group)
times (-z'·|s|): a product that is narrower than the first by the size of a group.

Legend: B rows, K new tokens a row, n rows of logits, H hidden size, D width of a head, V vocabulary, M tokens that the
cache holds, T of them that a step looks at, G groups of a linear's inputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from strop.export._onnx import layout
from strop.export._onnx.builder import DataFile, GraphBuilder, count_operators, declare
from strop.layers import rotary
from strop.model import Weights, load_linear, load_packed
from strop.spec import DType, LayerSpec, Linear, ModelSpec, Norm

if TYPE_CHECKING:
    from torch import Tensor

OPSETS = {"": 24}
IR_VERSION = 11
FLOAT, BOOL, INT4, INT8, INT64 = (getattr(ir.DataType, x) for x in ("FLOAT", "BOOL", "INT4", "INT8", "INT64"))
FLOAT8 = ir.DataType.FLOAT8E4M3FN
TYPES = {"float32": FLOAT, "float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
LOWEST = -1e9
"""A score that does not count: its exponential is 0, and unlike -inf it makes no NaN."""


def write_model(
    spec: ModelSpec, weights: Weights, out: Path, *, dtype: DType, capacity: int | None = None
) -> dict[str, int]:
    """Write model.onnx and model.onnx.data; equal inputs give equal bytes. One matrix is in memory at a time.

    Args:
        spec: A table that `layout.check` let pass.
        weights: Its checkpoint.
        out: Folder.
        dtype: Of activations, and of weights that are not quantized.
        capacity: M, where it is fixed; None: whatever is fed, up to the model's positions.

    Returns:
        Operator -> number of nodes.
    """
    data = out / layout.DATA
    with data.open("wb") as file:
        graph = _Lowering(spec, weights, DataFile(file, data), dtype, capacity).graph()
        size = file.tell()
    model = ir.Model(graph, ir_version=IR_VERSION, producer_name="strop", metadata_props={layout.DATA_BYTES: str(size)})
    ir.save(model, out / layout.MODEL)
    return count_operators(graph)


class _Lowering(GraphBuilder):
    """Builds the graph in the order of computation, writing each tensor when it comes up."""

    def __init__(self, spec: ModelSpec, weights: Weights, data: DataFile, dtype: DType, capacity: int | None) -> None:
        super().__init__("")
        self.spec, self.weights, self.data, self.capacity = spec, weights, data, capacity
        self.dtype, self.type = dtype, TYPES[dtype]
        self.inputs = _inputs(spec, self.type, capacity)
        self.stored: dict[str, ir.Value] = {}
        self.sums: dict[tuple[ir.Value, int], ir.Value] = {}
        """Input of linears, and groups -> its sums by group."""
        self.rounded: dict[tuple[ir.Value, float, ir.DataType], ir.Value] = {}
        """Input of linears, its static scale, and what it is rounded to -> what is left of it."""
        self.tables: dict[int, tuple[ir.Value, ir.Value]] = {}
        self.cache: dict[int, tuple[ir.Value, ir.Value]] = {}
        """Layer that owns some -> all its keys and values."""
        self.seen: dict[int, tuple[ir.Value, ir.Value]] = {}
        """And those of them that this step looks at."""

    def graph(self) -> ir.Graph:
        """Everything, from token ids to logits."""
        spec, last = self.spec, len(self.spec.layers) - 1
        some_mask = self.inputs[layout.mask_name(layout.windows(spec)[0])]
        self.num_seen = self.node("Shape", [some_mask], {"start": 3, "end": 4})
        x = self._embed()
        for index, layer in enumerate(spec.layers):
            heads = self._attention(index, self._norm(layer.input_norm, x))
            if index == last:
                # What the last layer does after attention is needed only where logits are asked for.
                x, heads = (
                    self._pick_rows(x, spec.hidden_size),
                    self._pick_rows(heads, layer.num_heads * layer.head_dim),
                )
            x = self._add(x, self._linear(layer.linears["o"], heads), layer.post_attention_norm)
            x = self._add(x, self._mlp(layer, self._norm(layer.mlp_norm, x)), layer.post_mlp_norm)
        logits = self._logits(self._norm(spec.final_norm, x))
        logits.name, logits.type, logits.shape = "logits", ir.TensorType(FLOAT), ir.Shape(("B", "n", spec.vocab_size))
        return ir.Graph(
            list(self.inputs.values()),
            [logits, *(x for pair in self.cache.values() for x in pair)],
            nodes=self.nodes,
            initializers=[*self.constants.values(), *self.data.tensors],
            opset_imports=OPSETS,
            name=spec.family,
        )

    # Pieces of a decoder.

    def _embed(self) -> ir.Value:
        spec = self.spec
        x = self.node("Gather", [self._table(), self.inputs["ids"]], {"axis": 0})
        if spec.embedding_scale != 1.0:
            x = self.node("Mul", [x, self._scalar(spec.embedding_scale)])
        if spec.position_embedding is not None:
            places = self._tensor(f"{spec.position_embedding}.weight", self.dtype)
            x = self.node("Add", [x, self.node("Gather", [places, self.inputs["positions"]], {"axis": 0})])
        return x

    def _attention(self, index: int, x: ir.Value) -> ir.Value:
        """Normed hidden states (B, K, H) -> what `o` takes (B, K, heads · D)."""
        layer, owner = self.spec.layers[index], layout.attends_to(self.spec, index)
        query, *new = self._project(layer, x)
        if owner == index:
            pair = [self._remember(f"{part}_{index}", y) for part, y in zip(("keys", "values"), new, strict=True)]
            self.cache[index] = pair[0], pair[1]
            starts, axes = self.integers([0]), self.integers([2])
            seen = [self.node("Slice", [y, starts, self.num_seen, axes]) for y in pair]
            self.seen[index] = seen[0], seen[1]
        keys, values = self.seen[owner]
        mask = self.inputs[layout.mask_name(layer.window)]
        if layer.softcap is None:
            attributes = {"scale": layer.attention_scale, "is_causal": 0}
            heads = self.node("Attention", [query, keys, values, mask], attributes)
        else:
            heads = self._capped_attention(layer, query, keys, values, mask)
        by_token = self.node("Transpose", [heads], {"perm": [0, 2, 1, 3]})
        return self.node("Reshape", [by_token, self.integers([0, 0, layer.num_heads * layer.head_dim])])

    def _remember(self, name: str, new: ir.Value) -> ir.Value:
        """New keys or values (B, kv_heads, K, D), written behind those of their rows: (B, kv_heads, M, D)."""
        past = self.inputs[f"past_{name}"]
        value = self.node("TensorScatter", [past, new, self.inputs["lengths"]], {"axis": 2, "mode": "linear"})
        value.name, value.type, value.shape = name, past.type, past.shape
        return value

    def _capped_attention(
        self, layer: LayerSpec, query: ir.Value, keys: ir.Value, values: ir.Value, mask: ir.Value
    ) -> ir.Value:
        """Attention with scores squeezed into ±softcap, heads of a group beside each other: (B, heads, K, D)."""
        assert layer.softcap is not None
        groups = [layer.num_kv_heads, layer.num_heads // layer.num_kv_heads]
        query = self.node("Reshape", [query, self.integers([0, *groups, -1, layer.head_dim])])
        keys, values, mask = (self.node("Unsqueeze", [y, self.integers([2])]) for y in (keys, values, mask))
        turned = self.node("Transpose", [keys], {"perm": [0, 1, 2, 4, 3]})
        scores = self.node("MatMul", [self.node("Mul", [query, self._scalar(layer.attention_scale)]), turned])
        scores = self._squeeze(self._cast(scores, FLOAT), layer.softcap)
        scores = self.node("Where", [mask, scores, self._scalar(LOWEST, FLOAT)])
        weights = self._cast(self.node("Softmax", [scores], {"axis": -1}), self.type)
        heads = self.node("MatMul", [weights, values])
        return self.node("Reshape", [heads, self.integers([0, layer.num_heads, -1, layer.head_dim])])

    def _project(self, layer: LayerSpec, x: ir.Value) -> list[ir.Value]:
        """Queries (B, heads, K, D) and, where the layer has its own, keys and values (B, kv_heads, K, D)."""
        num_heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
        if "qkv" in layer.linears:
            parts = self.split(self._linear(layer.linears["qkv"], x), [count * layer.head_dim for count in num_heads])
        else:
            parts = [self._linear(layer.linears[role], x) for role in ("q", "k", "v") if role in layer.linears]
        norms, found = (layer.q_norm, layer.k_norm, None), []
        for part, count, norm, turns in zip(parts, num_heads, norms, (True, True, False), strict=False):
            y = self.node("Reshape", [part, self.integers([0, 0, count, layer.head_dim])])
            y = self.node("Transpose", [y], {"perm": [0, 2, 1, 3]})
            y = y if norm is None else self._norm(norm, y)
            found.append(self._rotate(layer, y) if turns and layer.rope is not None else y)
        return found

    def _rotate(self, layer: LayerSpec, x: ir.Value) -> ir.Value:
        assert layer.rope is not None
        place, width = layout.ropes(self.spec).index(layer.rope), 2 * len(layer.rope.inv_freq)
        attributes = {"interleaved": 0, "rotary_embedding_dim": width if width < layer.head_dim else 0}
        return self.node("RotaryEmbedding", [x, *self._rotary(place), self.inputs["positions"]], attributes)

    def _rotary(self, place: int) -> tuple[ir.Value, ir.Value]:
        """cos and sin (positions, width / 2) of a rope, as the decoder computes them."""
        if place not in self.tables:
            rope = layout.ropes(self.spec)[place]
            positions = torch.arange(self.capacity or self.spec.max_positions)[None]
            frequencies = torch.tensor(rope.inv_freq, dtype=torch.float32)
            halves = [x[0, 0, :, len(frequencies) :] for x in rotary(rope, frequencies, positions, torch.float32)]
            cos, sin = (
                self._add_tensor(f"{part}_{place}", x, self.dtype)
                for part, x in zip(("cos", "sin"), halves, strict=True)
            )
            self.tables[place] = cos, sin
        return self.tables[place]

    def _mlp(self, layer: LayerSpec, x: ir.Value) -> ir.Value:
        linears = layer.linears
        if not layer.is_gated:
            inner = self._activate(layer, self._linear(linears["up"], x))
        else:
            if "gate_up" in linears:
                gate, up = self.split(self._linear(linears["gate_up"], x), [layer.intermediate_size] * 2)
            else:
                gate, up = self._linear(linears["gate"], x), self._linear(linears["up"], x)
            inner = self.node("Mul", [self._activate(layer, gate), up])
        return self._linear(linears["down"], inner)

    def _activate(self, layer: LayerSpec, x: ir.Value) -> ir.Value:
        if layer.activation == "silu":
            return self.node("Mul", [x, self.node("Sigmoid", [x])])
        return self.node("Gelu", [x], {"approximate": "tanh" if layer.activation == "gelu_tanh" else "none"})

    def _add(self, x: ir.Value, branch: ir.Value, norm: Norm | None) -> ir.Value:
        return self.node("Add", [x, branch if norm is None else self._norm(norm, branch)])

    def _norm(self, norm: Norm, x: ir.Value) -> ir.Value:
        """Over the last axis, in float32: squares of 16-bit values leave their range."""
        weights = [self._tensor(f"{norm.name}.weight", "float32", norm.offset)]
        if norm.kind == "layer":
            weights.append(self._tensor(f"{norm.name}.bias", "float32"))
        kind = "RMSNormalization" if norm.kind == "rms" else "LayerNormalization"
        y = self.node(kind, [self._cast(x, FLOAT), *weights], {"axis": -1, "epsilon": norm.eps})
        return self._cast(y, self.type)

    def _pick_rows(self, x: ir.Value, width: int) -> ir.Value:
        """(B, K, width) -> (B, n, width)."""
        flat = self.node("Reshape", [x, self.integers([-1, width])])
        return self.node("Gather", [flat, self.inputs["logit_rows"]], {"axis": 0})

    def _logits(self, x: ir.Value) -> ir.Value:
        logits, cap = self._cast(self._linear(self.spec.head, x), FLOAT), self.spec.logit_softcap
        return logits if cap is None else self._squeeze(logits, cap)

    def _squeeze(self, x: ir.Value, cap: float) -> ir.Value:
        """cap · tanh(x / cap), float32."""
        scaled = self.node("Div", [x, self._scalar(cap, FLOAT)])
        return self.node("Mul", [self.node("Tanh", [scaled]), self._scalar(cap, FLOAT)])

    # Matrix multiplications.

    def _linear(self, linear: Linear, x: ir.Value) -> ir.Value:
        """(…, in) -> (…, out)."""
        is_dense = linear.quantization is None
        y = self.node("MatMul", [x, self._dense(linear)]) if is_dense else self._quantized(linear, x)
        return self.node("Add", [y, self._tensor(f"{linear.name}.bias", self.dtype)]) if linear.has_bias else y

    def _dense(self, linear: Linear) -> ir.Value:
        """Wᵀ (in, out); of a tied head the embedding turned."""
        if linear is self.spec.head and self.spec.is_tied:
            return self.node("Transpose", [self._table()], {"perm": [1, 0]})
        return self._add_tensor(f"{linear.name}.weight", load_linear(self.weights, linear).T, self.dtype)

    def _quantized(self, linear: Linear, x: ir.Value) -> ir.Value:
        """Products with codes behind DequantizeLinear, and with offsets where there are any."""
        q = linear.quantization
        assert q is not None
        kind = FLOAT8 if q.format == "fp8" else INT8 if layout.stored_bits(linear) == 8 else INT4
        if q.activations == "static":
            x = self._round(x, float(self.weights.load(f"{linear.name}.input_scale").float()[0]), kind)
        codes, scale, zero = load_packed(self.weights, linear)
        if kind != FLOAT8:
            codes, scale, zero = unsigned_scales(codes, scale, zero, layout.stored_bits(linear))
        groups = linear.num_groups()
        # 8 bits by channel are what engines multiply as such; then the scales are a list, not a matrix.
        is_blocked = kind == INT4 or groups > 1
        parts = [
            self._add_codes(f"{linear.name}.codes", codes.T, kind),
            self._add_tensor(f"{linear.name}.scales", scale.T if is_blocked else scale[:, 0], self.dtype),
        ]
        form = {"axis": 0, "block_size": linear.in_features // groups} if is_blocked else {"axis": 1}
        y = self.node("MatMul", [x, self.node("DequantizeLinear", parts, form)])
        if not bool(zero.any()):
            return y
        offsets = self._add_tensor(f"{linear.name}.offsets", (-zero.float() * scale).T, self.dtype)
        return self.node("Add", [y, self.node("MatMul", [self._sum(x, groups), offsets])])

    def _sum(self, x: ir.Value, groups: int) -> ir.Value:
        """Sums of x (…, in) by group: (…, G)."""
        if (x, groups) not in self.sums:
            if groups == 1:
                total = self.node("ReduceSum", [x, self.integers([-1])], {"keepdims": 1})
            else:
                by_group = self.node("Reshape", [x, self.integers([0, 0, groups, -1])])
                total = self.node("ReduceSum", [by_group, self.integers([-1])], {"keepdims": 0})
            self.sums[x, groups] = total
        return self.sums[x, groups]

    def _round(self, x: ir.Value, scale: float, kind: ir.DataType) -> ir.Value:
        """x on the grid of int8 or fp8 with a static scale."""
        if (x, scale, kind) not in self.rounded:
            step, zero = self._scalar(scale), self.constant(f"zero_{kind.name}", np.array(0, kind.numpy()))
            codes = self.node("QuantizeLinear", [x, step, zero])
            self.rounded[x, scale, kind] = self.node("DequantizeLinear", [codes, step, zero])
        return self.rounded[x, scale, kind]

    # Constants.

    def _table(self) -> ir.Value:
        """The token embedding (V, H). Codes of a tied head are dequantized for it."""
        spec = self.spec
        if not spec.is_tied or spec.head.quantization is None:
            return self._tensor(f"{spec.embedding}.weight", self.dtype)
        name = f"{spec.head.name}.rows"
        if name not in self.stored:
            self._add_tensor(name, load_linear(self.weights, spec.head), self.dtype)
        return self.stored[name]

    def _tensor(self, name: str, dtype: DType, offset: float = 0.0) -> ir.Value:
        """A tensor of the checkpoint, stored once."""
        if name not in self.stored:
            self._add_tensor(name, self.weights.load(name).float() + offset, dtype)
        return self.stored[name]

    def _add_tensor(self, name: str, values: Tensor, dtype: DType) -> ir.Value:
        rounded = values.to(getattr(torch, dtype)).contiguous()
        array = rounded.view(torch.uint16).numpy() if rounded.itemsize == 2 else rounded.numpy()
        self.stored[name] = self.data.add(name, TYPES[dtype], tuple(values.shape), (array,))
        return self.stored[name]

    def _add_codes(self, name: str, codes: Tensor, kind: ir.DataType) -> ir.Value:
        array = codes.contiguous().view(torch.int8).numpy()
        self.stored[name] = self.data.add(name, kind, tuple(codes.shape), (_pack(array) if kind == INT4 else array,))
        return self.stored[name]

    def _scalar(self, value: float, dtype: ir.DataType | None = None) -> ir.Value:
        dtype = self.type if dtype is None else dtype
        return self.constant(f"scalar_{value}_{dtype.name}", np.array(value, dtype=dtype.numpy()))

    def _cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        return x if self.type == dtype == FLOAT else self.node("Cast", [x], {"to": int(dtype)})


def unsigned_scales(codes: Tensor, scale: Tensor, zero: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same weights (Q - z)·s with no scale below zero.

    Args:
        codes: Q (out, in), int8.
        scale: s (out, G), float32.
        zero: z (out, G), int8.
        bits: Width of the codes that are given back.

    Returns:
        Q' int8 within `bits`, |s|, z' int16, of the same shapes: (Q' - z')·|s| = (Q - z)·s.
    """
    groups = codes.reshape(*scale.shape, -1).to(torch.int16)
    sign = torch.where(scale < 0, -1, 1).to(torch.int16)
    groups, zero = groups * sign[..., None], zero.to(torch.int16) * sign
    above = (groups.amax(-1) - (2 ** (bits - 1) - 1)).clamp(min=0)
    return (groups - above[..., None]).to(torch.int8).reshape(codes.shape), scale.abs(), zero - above


def _inputs(spec: ModelSpec, dtype: ir.DataType, capacity: int | None) -> dict[str, ir.Value]:
    """Name -> graph input."""
    declared: list[tuple[str, ir.DataType, tuple[int | str, ...]]] = [
        ("ids", INT64, ("B", "K")),
        ("positions", INT64, ("B", "K")),
        ("lengths", INT64, ("B",)),
        ("logit_rows", INT64, ("B", "n")),
    ]
    declared += [(layout.mask_name(x), BOOL, ("B", 1, "K", "T")) for x in layout.windows(spec)]
    for i, layer in enumerate(spec.layers):
        if layer.kv_from_layer is None:
            shape = ("B", layer.num_kv_heads, capacity or "M", layer.head_dim)
            declared += [(f"past_{part}_{i}", dtype, shape) for part in ("keys", "values")]
    return {name: declare(name, kind, shape) for name, kind, shape in declared}


def _pack(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """4-bit codes, two a byte, the earlier one lower."""
    flat = np.pad(codes.reshape(-1).view(np.uint8) & np.uint8(15), (0, codes.size % 2))
    packed: NDArray[np.uint8] = flat[0::2] | (flat[1::2] << np.uint8(4))
    return packed
