"""Builds an ONNX graph node by node, its weights in a file of external data. Leaves out which nodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

ALIGNMENT, PAGE, LARGE = 64, 4096, 1 << 16
"""Where tensors begin in the data file: at a cache line, those of `LARGE` bytes and more at a page."""


class DataFile:
    """The file of external data, written front to back.

    Attributes:
        tensors: What was written, and views of it, in that order.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        """Write to the open, empty file `path`, which will lie beside the model."""
        self.file, self.path = file, path
        self.tensors: list[ir.Value] = []

    def add(self, name: str, dtype: ir.DataType, shape: Sequence[int], parts: Iterable[NDArray[Any]]) -> ir.Value:
        """Append one tensor, given in pieces that are written one after another."""
        size = _size_bytes(dtype, shape)
        step = PAGE if size >= LARGE else ALIGNMENT
        self.file.write(bytes(-self.file.tell() % step))
        start = self.file.tell()
        for part in parts:
            self.file.write(np.ascontiguousarray(part).data)
        assert self.file.tell() - start == size, name
        return self._value(name, dtype, shape, start)

    def view(self, value: ir.Value, name: str, shape: Sequence[int]) -> ir.Value:
        """Another tensor over the same bytes."""
        assert isinstance(value.const_value, ir.ExternalTensor)
        return self._value(name, value.const_value.dtype, shape, value.const_value.offset or 0)

    def _value(self, name: str, dtype: ir.DataType, shape: Sequence[int], start: int) -> ir.Value:
        size = _size_bytes(dtype, shape)
        tensor = ir.ExternalTensor(
            self.path.name, start, size, dtype, shape=ir.Shape(shape), name=name, base_dir=self.path.parent
        )
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype), const_value=tensor)
        self.tensors.append(value)
        return value


class GraphBuilder:
    """Nodes in the order of computation, and small constants, each stored once.

    Attributes:
        nodes: So far.
        constants: By name.
        domain: Of operators where none is given.
    """

    def __init__(self, domain: str) -> None:
        self.domain = domain
        self.nodes: list[ir.Node] = []
        self.constants: dict[str, ir.Value] = {}

    def node(
        self, operator: str, inputs: Sequence[ir.Value | None], attributes: Any = None, domain: str | None = None
    ) -> ir.Value:
        """Append a node with one output, and give that."""
        return self.several(operator, inputs, attributes, domain=domain)[0]

    def several(
        self,
        operator: str,
        inputs: Sequence[ir.Value | None],
        attributes: Any = None,
        *,
        domain: str | None = None,
        num_outputs: int = 1,
    ) -> list[ir.Value]:
        """Append a node, and give its outputs."""
        name, domain = f"{operator}_{len(self.nodes)}", self.domain if domain is None else domain
        node = ir.node(operator, inputs, attributes, domain=domain, num_outputs=num_outputs, name=name)
        for i, value in enumerate(node.outputs):
            value.name = f"{name}.{i}"
        self.nodes.append(node)
        return list(node.outputs)

    def split(self, x: ir.Value, widths: Sequence[int]) -> list[ir.Value]:
        """Cut the last axis into pieces."""
        return self.several("Split", [x, self.integers(widths)], {"axis": -1}, domain="", num_outputs=len(widths))

    def integers(self, values: Sequence[int]) -> ir.Value:
        """A list of int64."""
        return self.constant("integers_" + "_".join(map(str, values)), np.array(values, dtype=np.int64))

    def constant(self, name: str, array: NDArray[Any]) -> ir.Value:
        """A small tensor, kept inside the model; one of that name is made once."""
        if name not in self.constants:
            tensor = ir.tensor(array, name=name)
            self.constants[name] = ir.Value(
                name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
            )
        return self.constants[name]


def declare(name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    """An input of a graph; axes may have names."""
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def count_operators(graph: ir.Graph) -> dict[str, int]:
    """Operator -> number of nodes, sorted by name."""
    operators = [node.op_type for node in graph]
    return {name: operators.count(name) for name in sorted(set(operators))}


def _size_bytes(dtype: ir.DataType, shape: Sequence[int]) -> int:
    return -(-math.prod(shape) * dtype.bitwidth // 8)
