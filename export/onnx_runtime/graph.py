"""A model's table and weights -> model.onnx, one graph for prefill and decoding. Leaves out running it (session.py).

Legend: B rows, K new tokens a row, n rows of logits, H hidden size, V vocabulary, M tokens that the cache holds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from strop import numerics
from strop.export._onnx import layout as shared
from strop.export._onnx.builder import DataFile, GraphBuilder, count_operators, declare
from strop.export.onnx_runtime import layout
from strop.model import Weights, load_linear, load_packed
from strop.spec import LayerSpec, Linear, ModelSpec, Norm

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

CONTRIB = "com.microsoft"
OPSETS = {"": 21, CONTRIB: 1}
IR_VERSION = 10
FLOAT, INT32, INT64, INT8, UINT8 = (getattr(ir.DataType, x) for x in ("FLOAT", "INT32", "INT64", "INT8", "UINT8"))
FLOAT8 = ir.DataType.FLOAT8E4M3FN
NF4 = 1
"""Of MatMulBnb4's types."""
INTEGER, ATTENTION = "MatMulIntegerToFloat", "GroupQueryAttention"
K_QUANT_TYPE, V_QUANT_TYPE, BIT_WIDTH = "k_quant_type", "v_quant_type", "kv_cache_bit_width"
K_SCALE, V_SCALE = 12, 13
"""Attributes and inputs of attention. Its CPU kernel takes one type of scales for both: onnxruntime 1.32, int8 and
int4, PER_TENSOR or PER_CHANNEL, with whatever else the graph asks of it. Scales by head are scales by channel here."""
MIDDLE = 128
"""What rounded inputs are stored as above their value: on x86-64 without AVX-VNNI-INT8, onnxruntime 1.32 is quick only
where one side of an integer product is unsigned."""


def write_model(spec: ModelSpec, weights: Weights, out: Path, *, accuracy_level: int, trees: bool) -> dict[str, int]:
    """Write model.onnx and model.onnx.data; equal inputs give equal bytes. One matrix is in memory at a time.

    Args:
        spec: A table that `layout.check` let pass.
        weights: Its checkpoint.
        out: Folder.
        accuracy_level: Of MatMulNBits: 4 quantizes activations to int8, 1 keeps float32.
        trees: Add inputs for positions and attention bias.

    Returns:
        Operator -> number of nodes.
    """
    with (out / shared.DATA).open("wb") as file:
        graph = _Lowering(spec, weights, DataFile(file, out / shared.DATA), accuracy_level, trees).graph()
        size = file.tell()
    ropes = [{"inv_freq": x.inv_freq, "factor": x.factor} for x in shared.ropes(spec)]
    metadata = {shared.DATA_BYTES: str(size), layout.ROPES: json.dumps(ropes)}
    ir.save(ir.Model(graph, ir_version=IR_VERSION, producer_name="strop", metadata_props=metadata), out / shared.MODEL)
    return count_operators(graph)


def copy_exact(source: Path, out: Path) -> None:
    """Write the program of one folder into another, with no input of a linear, no key and no value rounded.

    Weights stay what they are.
    """
    model = ir.load(source / shared.MODEL)
    for node in list(model.graph):
        if node.op_type == "MatMulNBits":
            node.attributes.add(ir.AttrInt64("accuracy_level", 1))
        elif node.op_type == INTEGER:
            _multiply_floats(model.graph, node)
        elif node.op_type == ATTENTION and K_QUANT_TYPE in node.attributes:
            _cache_floats(node)
        elif node.op_type == "DequantizeLinear":
            _leave_inputs(node)
    outputs = set(model.graph.outputs)
    for node in reversed(model.graph):
        if not any(x.uses() or x in outputs for x in node.outputs):
            model.graph.remove(node, safe=True)
    ir.save(model, out / shared.MODEL)
    shutil.copyfile(source / shared.DATA, out / shared.DATA)


def _cache_floats(node: ir.Node) -> None:
    """Let an attention keep keys and values as they are."""
    packed = 8 // node.attributes[BIT_WIDTH].as_int()
    for name in (K_QUANT_TYPE, V_QUANT_TYPE, BIT_WIDTH):
        node.attributes.pop(name)
    for place in (K_SCALE, V_SCALE):
        node.replace_input_with(place, None)
    for value in (*node.inputs[3:5], *node.outputs[1:3]):
        if value is not None and value.shape is not None and value.dtype != FLOAT:
            *rows, width = value.shape
            value.dtype, value.shape = FLOAT, ir.Shape((*rows, width * packed))


def _leave_inputs(node: ir.Node) -> None:
    """Let what reads a rounded input read it as it was; of a weight there is nothing to leave."""
    codes, found = node.inputs[0], node.outputs[0]
    rounding = None if codes is None else codes.producer()
    if rounding is not None and rounding.op_type == "QuantizeLinear":
        for reader, place in tuple(found.uses()):
            reader.replace_input_with(place, rounding.inputs[0])


def _multiply_floats(graph: ir.Graph, node: ir.Node) -> None:
    """Make a product of integers one of floats, of the inputs before they were rounded."""
    codes, weight, _, scales = node.inputs[:4]
    rounding = None if codes is None else codes.producer()
    assert rounding is not None
    cast = ir.node("Cast", [weight], {"to": int(FLOAT)}, name=f"{node.name}.cast")
    scaled = ir.node("Mul", [cast.outputs[0], scales], name=f"{node.name}.scale")
    for before in (cast, scaled):
        before.outputs[0].name = f"{before.name}.0"
    graph.insert_before(node, [cast, scaled])
    node.op_type, node.domain = "MatMul", ""
    node.resize_inputs(2)
    node.replace_input_with(0, rounding.inputs[0])
    node.replace_input_with(1, scaled.outputs[0])


class _Lowering(GraphBuilder):
    """Builds the graph in the order of computation, writing each tensor when it comes up."""

    def __init__(self, spec: ModelSpec, weights: Weights, data: DataFile, accuracy_level: int, trees: bool) -> None:
        super().__init__(CONTRIB)
        self.spec, self.weights, self.data = spec, weights, data
        self.accuracy_level, self.trees = accuracy_level, trees
        self.inputs = _inputs(spec, trees)
        self.stored: dict[str, list[ir.Value]] = {}
        self.rounded: dict[tuple[ir.Value, float | None], tuple[ir.Value, ir.Value]] = {}
        """Input of linears, and its scale where that is static -> its codes and their scale."""
        self.middles: dict[bool, ir.Value] = {}
        """Whether rows were picked -> `MIDDLE` for each token."""
        self.is_picked = False
        self.new: dict[int, tuple[ir.Value | None, ir.Value | None]] = {}
        """Layer -> its keys and values of the new tokens, where they are not one tensor with the queries."""
        self.cache: dict[int, list[ir.Value]] = {}
        """Layer -> keys and values of all tokens."""
        self.scales: dict[int, list[ir.Value | None]] = {}
        """Layer that owns some -> scales of its keys and of its values, where they are rounded."""

    def graph(self) -> ir.Graph:
        """Everything, from token ids to logits."""
        spec, last = self.spec, len(self.spec.layers) - 1
        x, branch = self._embed(), None
        for index, layer in enumerate(spec.layers):
            normed, x = self._norm(layer.input_norm, x, branch)
            branch = self._attention(index, normed)
            if index == last:
                # What the last layer does after attention is needed only where logits are asked for.
                self.is_picked = True
                x, branch = (
                    self._pick_rows(x, spec.hidden_size),
                    self._pick_rows(branch, layer.num_heads * layer.head_dim),
                )
            branch = self._linear([layer.linears["o"]], branch)
            if layer.post_attention_norm is not None:
                branch, _ = self._norm(layer.post_attention_norm, branch, None)
            normed, x = self._norm(layer.mlp_norm, x, branch)
            branch = self._mlp(layer, normed)
            if layer.post_mlp_norm is not None:
                branch, _ = self._norm(layer.post_mlp_norm, branch, None)
        normed, _ = self._norm(spec.final_norm, x, branch)
        logits = self._logits(normed)
        logits.name, logits.type, logits.shape = "logits", ir.TensorType(FLOAT), ir.Shape(("B", "n", spec.vocab_size))
        return ir.Graph(
            list(self.inputs.values()),
            [logits, *(x for cache in self.cache.values() for x in cache)],
            nodes=self.nodes,
            initializers=[*self.constants.values(), *self.data.tensors],
            opset_imports=OPSETS,
            name=spec.family,
        )

    # Pieces of a decoder.

    def _embed(self) -> ir.Value:
        spec, ids = self.spec, self.inputs["ids"]
        if layout.shares_codes(spec):
            codes, scales, *zeros = self._packed([spec.head])
            packing = layout.packing(spec.head)
            rows = self.data.view(codes, f"{spec.embedding}.codes", (spec.vocab_size, packing.row_bytes))
            x = self.node(
                "GatherBlockQuantized",
                [rows, ids, scales, *zeros],
                {"bits": packing.bits, "block_size": packing.block, "gather_axis": 0, "quantize_axis": 1},
            )
        else:
            x = self.node("Gather", [self._table(), ids], {"axis": 0}, domain="")
        if spec.embedding_scale != 1.0:
            x = self.node("Mul", [x, self._scalar(spec.embedding_scale)], domain="")
        if spec.position_embedding is not None:
            places = self._floats(f"{spec.position_embedding}.weight", (spec.max_positions, spec.hidden_size))
            x = self.node("Add", [x, self.node("Gather", [places, self.inputs["positions"]], domain="")], domain="")
        return x

    def _attention(self, index: int, x: ir.Value) -> ir.Value:
        """Normed hidden states -> what `o` takes."""
        layer, owner = self.spec.layers[index], shared.attends_to(self.spec, index)
        rotates_inside = layout.rotates_inside(self.spec, index)
        query, key, value = self._project(index, x)
        if owner == index:
            past = [self.inputs[f"past_{part}_{index}"] for part in ("keys", "values")]
        else:
            # It writes the owner's keys and values once more to the same place.
            (key, value), past = self.new[owner], self.cache[owner]
        rope: list[ir.Value | None] = [None, None]
        if rotates_inside and layer.rope is not None:
            place = shared.ropes(self.spec).index(layer.rope)
            rope = [self.inputs[f"cos_{place}"], self.inputs[f"sin_{place}"]]
        tree: list[ir.Value | None] = [None, None]
        if self.trees:
            tree = [self.inputs["positions"] if rotates_inside else None, self.inputs[layout.bias_name(layer.window)]]
        steps = [self.inputs["ends"], self.inputs["total"]]
        attributes: dict[str, int | float | str] = {
            "num_heads": layer.num_heads,
            "kv_num_heads": layer.num_kv_heads,
            "scale": layer.attention_scale,
            "do_rotary": int(rotates_inside),
        }
        if layer.softcap is not None:
            attributes["softcap"] = layer.softcap
        if layer.window is not None and not self.trees:
            # It counts places in the cache. In a tree these are not positions, so there the bias holds the window.
            attributes["local_window_size"] = layer.window
        if self.spec.kv_cache is not None:
            attributes |= dict.fromkeys((K_QUANT_TYPE, V_QUANT_TYPE), "PER_CHANNEL")
            attributes[BIT_WIDTH] = self.spec.kv_cache.bits
        scales = self._cache_scales(owner)
        output, *self.cache[index] = self.several(
            ATTENTION,
            [query, key, value, *past, *steps, *rope, *tree, None, *scales, None, None, self.inputs["counts"]],
            attributes,
            num_outputs=3,
        )
        for after, before, part in zip(self.cache[index], past, ("keys", "values"), strict=True):
            after.name = f"{part}_{owner}" if owner == index else f"{part}_{owner}.{index}"
            after.type, after.shape = before.type, before.shape
        self.new[index] = (key, value)
        return output

    def _cache_scales(self, owner: int) -> list[ir.Value | None]:
        """Scales (1, kv_heads, 1, head_dim) of a layer's keys and values."""
        layer = self.spec.layers[owner]
        if self.spec.kv_cache is None:
            return [None, None]
        if owner not in self.scales:
            shape, names = (1, layer.num_kv_heads, 1, layer.head_dim), [f"{layer.attention}.{x}_scale" for x in "kv"]
            found = [np.broadcast_to(self._load(name), shape) for name in names]
            self.scales[owner] = [self.data.add(name, FLOAT, shape, (x,)) for name, x in zip(names, found, strict=True)]
        return self.scales[owner]

    def _project(self, index: int, x: ir.Value) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
        """Queries, keys and values (B, K, heads · D), or all in one (qkv, None, None)."""
        layer = self.spec.layers[index]
        linears = [layer.linears[role] for role in ("qkv", "q", "k", "v") if role in layer.linears]
        is_one = len(linears) == 1 or (layout.can_fuse(linears) and len({self._input_scale(y) for y in linears}) == 1)
        rotates_here = layer.rope is not None and not layout.rotates_inside(self.spec, index)
        is_owner, is_shared = layer.kv_from_layer is None, any(y.kv_from_layer == index for y in self.spec.layers)
        parts = [self._linear(linears, x)] if is_one else [self._linear([linear], x) for linear in linears]
        if is_one and is_owner:
            if not (rotates_here or is_shared or layer.q_norm or layer.k_norm):
                return parts[0], None, None
            kv_width = layer.num_kv_heads * layer.head_dim
            parts = self.split(parts[0], [layer.num_heads * layer.head_dim, kv_width, kv_width])
        heads = [layer.num_heads, layer.num_kv_heads]
        for i, norm in enumerate((layer.q_norm, layer.k_norm)[: len(parts)]):
            if norm is not None:
                attributes = {"num_branches": heads[i], "epsilon": norm.eps}
                parts[i] = self.node("BranchwiseRMSNorm", [parts[i], *self._norm_weights(norm)], attributes)
            if rotates_here:
                parts[i] = self._rotate(layer, parts[i], heads[i])
        return (parts[0], parts[1], parts[2]) if is_owner else (parts[0], None, None)

    def _rotate(self, layer: LayerSpec, x: ir.Value, num_heads: int) -> ir.Value:
        assert layer.rope is not None
        place, width = shared.ropes(self.spec).index(layer.rope), 2 * len(layer.rope.inv_freq)
        tables = [self.inputs[f"{part}_{place}"] for part in ("cos", "sin")]
        attributes = {"num_heads": num_heads, "rotary_embedding_dim": width if width < layer.head_dim else 0}
        return self.node("RotaryEmbedding", [x, self.inputs["positions"], *tables], attributes)

    def _mlp(self, layer: LayerSpec, x: ir.Value) -> ir.Value:
        linears = layer.linears
        if not layer.is_gated:
            return self._linear([linears["down"]], self._activate(layer, self._linear([linears["up"]], x)))
        if "gate_up" in linears:
            gate, up = self.split(self._linear([linears["gate_up"]], x), [layer.intermediate_size] * 2)
        else:
            # Not joined as q, k and v are: splitting the result costs what the second multiplication does.
            gate, up = self._linear([linears["gate"]], x), self._linear([linears["up"]], x)
        inner = self.node("Mul", [self._activate(layer, gate), up], domain="")
        return self._linear([linears["down"]], inner)

    def _activate(self, layer: LayerSpec, x: ir.Value) -> ir.Value:
        if layer.activation == "silu":
            return self.node("QuickGelu", [x], {"alpha": 1.0})
        return self.node("FastGelu" if layer.activation == "gelu_tanh" else "Gelu", [x])

    def _norm(self, norm: Norm, x: ir.Value, branch: ir.Value | None) -> tuple[ir.Value, ir.Value]:
        """norm(x + branch) and x + branch."""
        kind = "SimplifiedLayerNormalization" if norm.kind == "rms" else "LayerNormalization"
        weights, attributes = self._norm_weights(norm), {"epsilon": norm.eps}
        if branch is None:
            return self.node(kind, [x, *weights], {**attributes, "axis": -1}, domain=""), x
        if norm is self.spec.final_norm:
            return self.node(f"Skip{kind}", [x, branch, *weights], attributes), x
        output, *unused, total = self.several(f"Skip{kind}", [x, branch, *weights], attributes, num_outputs=4)
        for value in unused:
            value.name = ""
        return output, total

    def _pick_rows(self, x: ir.Value, width: int) -> ir.Value:
        """(B, K, width) -> (B, n, width)."""
        flat = self.node("Reshape", [x, self.integers([-1, width])], domain="")
        return self.node("Gather", [flat, self.inputs["logit_rows"]], {"axis": 0}, domain="")

    def _logits(self, x: ir.Value) -> ir.Value:
        logits, cap = self._linear([self.spec.head], x), self.spec.logit_softcap
        if cap is None:
            return logits
        scaled = self.node("Div", [logits, self._scalar(cap)], domain="")
        return self.node("Mul", [self.node("Tanh", [scaled], domain=""), self._scalar(cap)], domain="")

    # Matrix multiplications.

    def _linear(self, linears: Sequence[Linear], x: ir.Value) -> ir.Value:
        """Outputs of linears that can be one, side by side."""
        first, rows = linears[0], sum(y.out_features for y in linears)
        bias = None
        if first.has_bias:
            bias = self._joined(linears, "bias", FLOAT, (rows,), (self._load(f"{y.name}.bias") for y in linears))
        if first.quantization is None or layout.is_float8(first):
            matrix = self._dense(linears) if first.quantization is None else self._dequantized(linears)
            y = self.node("FusedMatMul", [x, matrix], {"transB": 1})
            return y if bias is None else self.node("Add", [y, bias], domain="")
        if layout.rounds_inputs(first) or layout.is_nf4(first):
            multiply = self._multiply_quantiles if layout.is_nf4(first) else self._multiply_integers
            y = multiply(linears, x)
            return y if bias is None else self.node("Add", [y, bias], domain="")
        codes, scales, *zeros = self._packed(linears)
        packing = layout.packing(first)
        attributes = {"K": first.in_features, "N": rows, "bits": packing.bits, "block_size": packing.block}
        optional = [] if bias is None else [*([] if zeros else [None]), None, bias]
        return self.node(
            "MatMulNBits",
            [x, codes, scales, *zeros, *optional],
            {**attributes, "accuracy_level": self.accuracy_level},
        )

    def _multiply_integers(self, linears: Sequence[Linear], x: ir.Value) -> ir.Value:
        """Outputs of linears that round their inputs, biases apart. Sums are exact; the scales are applied to them."""
        rows, columns = sum(y.out_features for y in linears), linears[0].in_features
        codes, steps = self._round(x, columns, self._input_scale(linears[0]))
        packed = [load_packed(self.weights, y) for y in linears]
        weight = np.concatenate([y.numpy().T for y, _, _ in packed], axis=1)
        scales = np.concatenate([y.numpy().flatten() for _, y, _ in packed])
        stored = [
            self._joined(linears, "codes", INT8, (columns, rows), (weight,)),
            self._joined(linears, "scales", FLOAT, (rows,), (scales,)),
        ]
        return self.node(INTEGER, [codes, stored[0], steps, stored[1], self._middle()])

    def _round(self, x: ir.Value, width: int, input_scale: float | None) -> tuple[ir.Value, ir.Value]:
        """Codes (B, K, width) of an input, and their scale: of each token (B, K, 1), or the given one.

        A token of zeros has the scale 0 and codes that mean nothing, and gives products that are 0.
        """
        if (x, input_scale) not in self.rounded:
            if input_scale is None:
                largest = self.node("ReduceMax", [self.node("Abs", [x], domain=""), self.integers([-1])], domain="")
                scale = self.node("Div", [largest, self._scalar(numerics.INPUT_RANGE)], domain="")
                if self.is_picked not in self.middles:
                    value, shape = ir.tensor(np.array([MIDDLE], np.uint8)), self.node("Shape", [scale], domain="")
                    self.middles[self.is_picked] = self.node("ConstantOfShape", [shape], {"value": value}, domain="")
                middle, blocks = self.middles[self.is_picked], {"axis": -1, "block_size": width}
            else:
                scale, middle, blocks = self._scalar(input_scale), self._middle(), {}
            self.rounded[x, input_scale] = self.node("QuantizeLinear", [x, scale, middle], blocks, domain=""), scale
        return self.rounded[x, input_scale]

    def _middle(self) -> ir.Value:
        return self.constant("middle", np.array(MIDDLE, dtype=np.uint8))

    def _input_scale(self, linear: Linear) -> float | None:
        """Where the inputs of a linear are rounded by a static scale."""
        if linear.quantization is None or linear.quantization.activations != "static":
            return None
        return float(self._load(f"{linear.name}.input_scale")[0])

    def _dense(self, linears: Sequence[Linear]) -> ir.Value:
        """W (out, in) of unquantized linears, rows below rows; a tied head is the embedding."""
        if linears[0] is self.spec.head and self.spec.is_tied:
            return self._table()
        shape = (sum(x.out_features for x in linears), linears[0].in_features)
        return self._joined(linears, "weight", FLOAT, shape, (load_linear(self.weights, x).numpy() for x in linears))

    def _multiply_quantiles(self, linears: Sequence[Linear], x: ir.Value) -> ir.Value:
        """Outputs of linears in nf4, biases apart: bitsandbytes' bytes as they are, rows after rows."""
        first, rows = linears[0], sum(y.out_features for y in linears)
        assert first.quantization is not None
        block = first.quantization.group_size
        assert block is not None
        size, names = rows * first.in_features, [y.name for y in linears]
        codes = (self.weights.load(f"{y}.weight").numpy() for y in names)
        scales = (self.weights.load(f"{y}.weight.absmax").numpy() for y in names)
        stored = [
            self._joined(linears, "codes", UINT8, (size // 2,), codes),
            self._joined(linears, "scales", FLOAT, (size // block,), scales),
        ]
        attributes = {"K": first.in_features, "N": rows, "block_size": block, "quant_type": NF4}
        return self.node("MatMulBnb4", [x, *stored], attributes)

    def _dequantized(self, linears: Sequence[Linear]) -> ir.Value:
        """W (out, in) of linears in fp8, rows below rows, made anew at every step: onnxruntime does not fold it."""
        rows, columns = sum(y.out_features for y in linears), linears[0].in_features
        packed = [load_packed(self.weights, y) for y in linears]
        codes = self._joined(
            linears, "codes", FLOAT8, (rows, columns), (y.view(torch.uint8).numpy() for y, _, _ in packed)
        )
        scales = self._joined(linears, "scales", FLOAT, (rows,), (y.numpy() for _, y, _ in packed))
        return self.node("DequantizeLinear", [codes, scales], {"axis": 0}, domain="")

    def _packed(self, linears: Sequence[Linear]) -> list[ir.Value]:
        """Codes, scales and, where there are any, zero points of quantized linears, as MatMulNBits takes them."""
        packing, rows = layout.packing(linears[0]), sum(x.out_features for x in linears)
        name = _joined_name(linears)
        if name not in self.stored:
            codes = (rows, packing.num_blocks, packing.block * packing.bits // 8)
            self.stored[name] = [
                self._joined(linears, "codes", UINT8, codes, (_codes(self.weights, x) for x in linears)),
                self._joined(
                    linears, "scales", FLOAT, (rows, packing.num_blocks), (_scales(self.weights, x) for x in linears)
                ),
            ]
            if packing.has_zeros:
                zeros = (rows, packing.zero_bytes)
                self.stored[name].append(
                    self._joined(linears, "zeros", UINT8, zeros, (_zeros(self.weights, x) for x in linears))
                )
        return self.stored[name]

    # Constants.

    def _joined(
        self,
        linears: Sequence[Linear],
        part: str,
        dtype: ir.DataType,
        shape: Sequence[int],
        pieces: Iterable[NDArray[Any]],
    ) -> ir.Value:
        return self.data.add(f"{_joined_name(linears)}.{part}", dtype, shape, pieces)

    def _table(self) -> ir.Value:
        """The token embedding (V, H)."""
        return self._floats(f"{self.spec.embedding}.weight", (self.spec.vocab_size, self.spec.hidden_size))

    def _norm_weights(self, norm: Norm) -> list[ir.Value]:
        weight = self._floats(f"{norm.name}.weight", (norm.size,), norm.offset)
        return [weight, self._floats(f"{norm.name}.bias", (norm.size,))] if norm.kind == "layer" else [weight]

    def _floats(self, name: str, shape: Sequence[int], offset: float = 0.0) -> ir.Value:
        """A tensor of the checkpoint in float32, stored once."""
        if name not in self.stored:
            self.stored[name] = [self.data.add(name, FLOAT, shape, (self._load(name) + np.float32(offset),))]
        return self.stored[name][0]

    def _load(self, name: str) -> Floats:
        values: Floats = self.weights.load(name).float().numpy()
        return values

    def _scalar(self, value: float) -> ir.Value:
        return self.constant(f"scalar_{value}", np.array(value, dtype=np.float32))


def _inputs(spec: ModelSpec, trees: bool) -> dict[str, ir.Value]:
    """Name -> graph input."""
    kind = FLOAT if spec.kv_cache is None else {8: INT8, 4: UINT8}[spec.kv_cache.bits]
    declared: list[tuple[str, ir.DataType, tuple[int | str, ...]]] = [
        ("ids", INT64, ("B", "K")),
        ("ends", INT32, ("B",)),
        ("counts", INT32, ("B",)),
        ("total", INT32, (1,)),
        ("logit_rows", INT64, ("B", "n")),
    ]
    if layout.needs_positions(spec, trees):
        declared.append(("positions", INT64, ("B", "K")))
    if trees:
        declared += [(layout.bias_name(x), FLOAT, ("B", 1, "K", "M")) for x in shared.windows(spec)]
    for i, rope in enumerate(shared.ropes(spec)):
        declared += [(f"{part}_{i}", FLOAT, ("M", len(rope.inv_freq))) for part in ("cos", "sin")]
    for i, layer in enumerate(spec.layers):
        if layer.kv_from_layer is None:
            shape = ("B", layer.num_kv_heads, "M", layout.cache_width(spec, layer))
            declared += [(f"past_{part}_{i}", kind, shape) for part in ("keys", "values")]
    return {name: declare(name, dtype, shape) for name, dtype, shape in declared}


def _joined_name(linears: Sequence[Linear]) -> str:
    return "+".join(x.name for x in linears)


# A quantized linear of the checkpoint -> MatMulNBits. Both store codes plus 2^(bits-1), lowest bits first.


def _codes(weights: Weights, linear: Linear) -> Bytes:
    """(out, row_bytes): the checkpoint's own bytes where rows have no gaps and keep their bits."""
    q, packing = linear.quantization, layout.packing(linear)
    assert q is not None
    if q.format != "int":
        return _padded(load_packed(weights, linear)[0].numpy(), packing)
    words = weights.load(f"{linear.name}.weight_packed")
    if q.bits == packing.bits and packing.num_blocks * packing.block == linear.in_features:
        rows: Bytes = words.numpy().view(np.uint8)[:, : packing.row_bytes]
        return rows
    return _padded(numerics.unpack(words, q.bits, (linear.out_features, linear.in_features)).numpy(), packing)


def _padded(codes: NDArray[np.int8], packing: layout.Packing) -> Bytes:
    """Codes (out, in) in rows of whole blocks."""
    padded = np.zeros((len(codes), packing.num_blocks * packing.block), np.int8)
    padded[:, : codes.shape[1]] = codes
    return _pack(padded, packing.bits)


def _scales(weights: Weights, linear: Linear) -> Floats:
    """(out, num_blocks)."""
    is_integer = linear.quantization is not None and linear.quantization.format == "int"
    stored = weights.load(f"{linear.name}.weight_scale").float() if is_integer else load_packed(weights, linear)[1]
    scales: Floats = stored.numpy()
    return np.repeat(scales, layout.packing(linear).repeats, axis=1)


def _zeros(weights: Weights, linear: Linear) -> Bytes:
    """(out, zero_bytes)."""
    q, packing = linear.quantization, layout.packing(linear)
    assert q is not None
    words = weights.load(f"{linear.name}.weight_zero_point")
    zeros = numerics.unpack(words, q.bits, (linear.out_features, linear.num_groups()), axis=0).numpy()
    return _pack(np.repeat(zeros, packing.repeats, axis=1), packing.bits)


def _pack(codes: NDArray[np.int8], bits: int) -> Bytes:
    """Signed codes (rows, columns) -> bytes (rows, ceil(columns · bits / 8))."""
    per_byte = 8 // bits
    unsigned = (codes.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    unsigned = np.pad(unsigned, ((0, 0), (0, -codes.shape[1] % per_byte)))
    packed = np.zeros((len(codes), unsigned.shape[1] // per_byte), np.uint8)
    for i in range(per_byte):
        packed |= unsigned[:, i::per_byte] << np.uint8(bits * i)
    return packed
