"""CPU kernels of ONNX Runtime that multiply int8 by int8: `python benchmarks/int8_kernels.py IN OUT [--threads 1]`.

One linear IN -> OUT in each way that onnxruntime offers, its time for 1 to 512 tokens, and how far it is from the exact
product of the rounded inputs (by the standard deviation of the outputs). Results: `w8a8.md`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

CONTRIB = "com.microsoft"
TOKENS = (1, 4, 16, 64, 512)
STATIC_SCALE = 0.03
BLOCK = 64


class Graph:
    """Nodes of one graph with the input `x` (1, T, in), and the weights as each way takes them."""

    def __init__(self, codes: Any, scales: Any) -> None:
        self.codes, self.weight_scales, self.width = codes, scales, codes.shape[1]
        self.nodes: list[ir.Node] = []
        self.constants: dict[str, ir.Value] = {}
        self.x = ir.Value(name="x", shape=ir.Shape((1, "T", self.width)), type=ir.TensorType(ir.DataType.FLOAT))

    def constant(self, name: str, array: Any) -> ir.Value:
        """An initializer, once for each name."""
        if name not in self.constants:
            tensor = ir.tensor(np.ascontiguousarray(array), name=name)
            shape, kind = ir.Shape(array.shape), ir.TensorType(tensor.dtype)
            self.constants[name] = ir.Value(name=name, shape=shape, type=kind, const_value=tensor)
        return self.constants[name]

    def node(self, operator: str, inputs: Sequence[ir.Value], domain: str = "", **attributes: Any) -> ir.Value:
        """The output of a new node."""
        node = ir.node(operator, inputs, attributes, domain=domain, name=f"{operator}_{len(self.nodes)}")
        node.outputs[0].name = f"{node.name}.0"
        self.nodes.append(node)
        return node.outputs[0]

    def session(self, y: ir.Value, threads: int) -> onnxruntime.InferenceSession:
        """The graph with the output y, loaded."""
        y.type, y.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape((1, "T", len(self.codes)))
        initializers = list(self.constants.values())
        opsets = {"": 21, CONTRIB: 1}
        graph = ir.Graph(
            [self.x], [y], nodes=self.nodes, initializers=initializers, opset_imports=opsets, name="linear"
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 4
        model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    # What several ways share.

    def weight(self) -> ir.Value:
        """Codes (in, out), int8."""
        return self.constant("weight", self.codes.T)

    def scales(self) -> ir.Value:
        """One for each output."""
        return self.constant("scales", self.weight_scales)

    def middle(self) -> ir.Value:
        """The zero point of unsigned inputs."""
        return self.constant("middle", np.array(128, np.uint8))

    def token_scales(self) -> ir.Value:
        """(1, T, 1)."""
        largest = self.node("ReduceMax", [self.node("Abs", [self.x]), self.constant("axes", np.array([-1]))])
        return self.node("Div", [largest, self.constant("range", np.array(127.5, np.float32))])


def unsigned_by_token(g: Graph) -> ir.Value:
    """QuantizeLinear with a block as long as a row, MatMulIntegerToFloat: what the export writes."""
    scale = g.token_scales()
    middles = g.node("ConstantOfShape", [g.node("Shape", [scale])], value=ir.tensor(np.array([128], np.uint8)))
    codes = g.node("QuantizeLinear", [g.x, scale, middles], axis=-1, block_size=g.width)
    return g.node("MatMulIntegerToFloat", [codes, g.weight(), scale, g.scales(), g.middle()], CONTRIB)


def signed_by_token(g: Graph) -> ir.Value:
    """The same with signed inputs."""
    scale, int8 = g.token_scales(), int(ir.DataType.INT8)
    codes = g.node("QuantizeLinear", [g.x, scale], axis=-1, block_size=g.width, output_dtype=int8)
    return g.node("MatMulIntegerToFloat", [codes, g.weight(), scale, g.scales()], CONTRIB)


def explicit_by_token(g: Graph) -> ir.Value:
    """Standard operators only, rounding spelled out, MatMulInteger."""
    scale = g.token_scales()
    limits = [g.constant("lowest", np.array(-128, np.float32)), g.constant("highest", np.array(127, np.float32))]
    codes = g.node("Clip", [g.node("Round", [g.node("Div", [g.x, scale])]), *limits])
    unsigned = g.node("Add", [codes, g.constant("half", np.array(128, np.float32))])
    integers = g.node("Cast", [unsigned], to=int(ir.DataType.UINT8))
    sums = g.node("Cast", [g.node("MatMulInteger", [integers, g.weight(), g.middle()])], to=int(ir.DataType.FLOAT))
    return g.node("Mul", [g.node("Mul", [sums, scale]), g.scales()])


def static(g: Graph) -> ir.Value:
    """QuantizeLinear and MatMulIntegerToFloat: what the export writes."""
    scale = g.constant("scale", np.array(STATIC_SCALE, np.float32))
    codes = g.node("QuantizeLinear", [g.x, scale, g.middle()])
    return g.node("MatMulIntegerToFloat", [codes, g.weight(), scale, g.scales(), g.middle()], CONTRIB)


def static_qdq(g: Graph) -> ir.Value:
    """Quantize, dequantize, MatMul: onnxruntime fuses them."""
    scale = g.constant("scale", np.array(STATIC_SCALE, np.float32))
    x = g.node("DequantizeLinear", [g.node("QuantizeLinear", [g.x, scale, g.middle()]), scale, g.middle()])
    zeros = g.constant("zeros", np.zeros(len(g.codes), np.int8))
    return g.node("MatMul", [x, g.node("DequantizeLinear", [g.weight(), g.scales(), zeros], axis=1)])


def dynamic_by_tensor(g: Graph) -> ir.Value:
    """DynamicQuantizeMatMul: asymmetric, one scale for all tokens."""
    return g.node("DynamicQuantizeMatMul", [g.x, g.weight(), g.scales()], CONTRIB)


def n_bits(g: Graph) -> ir.Value:
    """MatMulNBits, 8 bits, accuracy_level 4: inputs rounded block by block."""
    blocks = (len(g.codes), g.width // BLOCK)
    codes = (g.codes.astype(np.int16) + 128).astype(np.uint8).reshape(*blocks, BLOCK)
    weight, scales = g.constant("codes", codes), g.constant("blocks", np.repeat(g.weight_scales[:, None], blocks[1], 1))
    shape = {"K": g.width, "N": blocks[0], "bits": 8, "block_size": BLOCK}
    return g.node("MatMulNBits", [g.x, weight, scales], CONTRIB, **shape, accuracy_level=4)


def floats(g: Graph) -> ir.Value:
    """MatMul in float32."""
    return g.node("MatMul", [g.x, g.constant("floats", (g.codes * g.weight_scales[:, None]).T.astype(np.float32))])


WAYS: tuple[Callable[[Graph], ir.Value], ...] = (
    unsigned_by_token, signed_by_token, explicit_by_token, static, static_qdq, dynamic_by_tensor, n_bits, floats
)  # fmt: skip


def exact(x: Any, g: Graph, scale: Any) -> Any:
    """The product of rounded inputs (T, in), integers summed in 64 bits."""
    codes = np.clip(np.rint(x / scale), -128, 127).astype(np.int64)
    return (codes @ g.codes.T.astype(np.int64)).astype(np.float64) * scale * g.weight_scales


def main() -> None:
    """Print a row for each way: microseconds for each number of tokens, and the error."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("width", type=int)
    parser.add_argument("rows", type=int)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    random = np.random.default_rng(0)
    codes = random.integers(-128, 128, (arguments.rows, arguments.width)).astype(np.int8)
    scales = (0.001 + 0.01 * random.random(arguments.rows)).astype(np.float32)
    inputs = {n: random.standard_normal((1, n, arguments.width)).astype(np.float32) for n in TOKENS}
    print("| µs, tokens: |", " | ".join(map(str, TOKENS)), "| error |")
    for way in WAYS:
        graph = Graph(codes, scales)
        session = graph.session(way(graph), arguments.threads)
        times, error = [], 0.0
        for n, x in inputs.items():
            scale: Any = np.abs(x[0]).max(-1, keepdims=True) / np.float32(127.5)
            expected = exact(x[0], graph, np.float32(STATIC_SCALE) if "static" in way.__name__ else scale)
            error = max(error, np.abs(session.run(None, {"x": x})[0][0] - expected).max() / expected.std())
            best, repeats = np.inf, max(1, 160 // (n + 7))
            for _ in range(12):
                start = time.perf_counter()
                for _ in range(repeats):
                    session.run(None, {"x": x})
                best = min(best, (time.perf_counter() - start) / repeats)
            times.append(f"{1e6 * best:.0f}")
        print(f"| {way.__name__} |", " | ".join(times), f"| {error:.1e} |", flush=True)


if __name__ == "__main__":
    main()
