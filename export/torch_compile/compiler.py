"""A checkpoint -> a package of compiled pieces and their weights. Leaves out running them (session.py).

The package is not the same bytes twice: the compiler writes paths of its folder and a random id into it. Weights are.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.errors import UserError
from strop.export.torch_compile import layout
from strop.export.torch_compile.pieces import Half, Head, pack
from strop.model import Weights, load_linear, load_packed, tensor_bytes
from strop.safetensors_file import Piece, write_json, write_tensors
from strop.spec import DType, Linear, ModelSpec, Norm
from strop.stage import Progress

STORED: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16"}
EXAMPLE_TOKENS = 8
"""Tokens that pieces for many tokens are traced with; any number from 2 on runs afterwards."""
CACHE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True)
class Entry:
    """One compiled function of the package.

    Attributes:
        name: `before.<layer>.one`, `after.<layer>.many`, `head.one`, ...: the first layer of its kind, and whether it
            takes one token or more.
        module: What is compiled.
        shapes: Of its inputs.
        axes: Of each input, the axis of the tokens.
        has_many: Takes more than one token.
    """

    name: str
    module: Half | Head
    shapes: tuple[tuple[int, ...], ...]
    axes: tuple[int, ...]
    has_many: bool


def entries(spec: ModelSpec, dtype: torch.dtype) -> Iterator[Entry]:
    """What a model needs compiled: two halves for each kind of layer, and the head; for one token and for more."""
    for tokens, suffix in ((1, "one"), (EXAMPLE_TOKENS, "many")):
        x = (1, tokens, spec.hidden_size)
        has_many = tokens > 1
        for index in sorted(set(layout.kinds(spec))):
            layer = spec.layers[index]
            rotary = () if layer.rope is None else ((1, 1, tokens, 2 * len(layer.rope.inv_freq)),) * 2
            before = Half(layer, dtype, is_before=True)
            yield Entry(f"before.{index}.{suffix}", before, (x, *rotary), (1, *(2 for _ in rotary)), has_many)
            heads = (1, tokens, layer.num_heads * layer.head_dim)
            after = Half(layer, dtype, is_before=False)
            yield Entry(f"after.{index}.{suffix}", after, (x, heads), (1, 1), has_many)
        yield Entry(f"head.{suffix}", Head(spec, dtype), (x,), (1,), has_many)


def compile_package(spec: ModelSpec, dtype: torch.dtype, out: Path, scratch: Path, progress: Progress) -> int:
    """Compile every piece ahead of time (AOTInductor, PyTorch 2) into one package.

    Args:
        spec: A table that `layout.check` let pass.
        dtype: Of activations.
        out: Folder of the package.
        scratch: Where the compiler works.
        progress: Told after each piece.

    Returns:
        Number of pieces.

    Raises:
        UserError: The C++ compiler does not work.
    """
    chosen = list(entries(spec, dtype))
    files: dict[str, Any] = {}
    # torch 2.13 warns of its own calls to what it deprecates.
    with _compiler_folder(scratch), torch.no_grad(), warnings.catch_warnings(action="ignore"):
        from torch._inductor import aot_compile
        from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler
        from torch._inductor.package.package import package_aoti

        for number, entry in enumerate(chosen):
            program, arguments = _traced(entry, dtype)
            options = {"aot_inductor.package": True, "cpp.dynamic_threads": True}
            try:
                files[entry.name] = aot_compile(program, arguments, options=options)
            except InductorError as error:
                reason = error.inner_exception
                if not isinstance(reason, CppCompileError | InvalidCxxCompiler):
                    raise
                raise UserError(f"export: torch_compile: the C++ compiler does not work: {reason}") from error
            progress("torch_compile", number + 1, len(chosen))
        package_aoti(str(out / layout.PACKAGE), files)
    return len(chosen)


def _traced(entry: Entry, dtype: torch.dtype) -> tuple[Any, tuple[list[Tensor], list[Tensor]]]:
    """The graph of a piece, and arguments like those that it will be called with."""
    inputs = [torch.zeros(shape, dtype=dtype) for shape in entry.shapes]
    tensors = [torch.zeros_like(x, device="cpu") for x in entry.module.tensors.values()]
    tokens = torch.export.Dim("tokens", min=2)
    sizes = [{axis: tokens} if entry.has_many else None for axis in entry.axes]
    shapes = {"inputs": sizes, "tensors": [None] * len(tensors)}
    program = torch.export.export(entry.module, (inputs, tensors), dynamic_shapes=shapes, strict=False)
    return program.module(), (inputs, tensors)


@contextlib.contextmanager
def _compiler_folder(scratch: Path) -> Iterator[None]:
    """Let the compiler work in a folder of ours instead of one that all programs of this user share."""
    before = os.environ.get(CACHE)
    os.environ[CACHE] = str(scratch / "inductor")
    try:
        yield
    finally:
        if before is None:
            del os.environ[CACHE]
        else:
            os.environ[CACHE] = before


# Weights.


def write_weights(spec: ModelSpec, dtype: DType, weights: Weights, out: Path) -> None:
    """Write every tensor that the pieces take, each once; one is in memory at a time.

    Args:
        spec: The checkpoint's table.
        dtype: Of activations, and of what is not quantized.
        weights: The checkpoint.
        out: Folder of the package.
    """
    found: dict[str, Piece] = {}
    for linear in spec.linears():
        found |= _linear(linear, dtype, weights)
    for norm in spec.norms():
        found |= _norm(norm, dtype, weights)
    tables = [] if spec.is_tied else [(spec.embedding, spec.vocab_size)]
    tables += [(spec.position_embedding, spec.max_positions)] if spec.position_embedding else []
    for name, rows in tables:
        found[f"{name}.weight"] = _float(f"{name}.weight", (rows, spec.hidden_size), dtype, weights)
    write_tensors(out, found)


def _linear(linear: Linear, dtype: DType, weights: Weights) -> dict[str, Piece]:
    rows, form = linear.out_features, layout.packing(linear)
    found = {}
    if linear.has_bias:
        found[f"{linear.name}.bias"] = _float(f"{linear.name}.bias", (rows,), dtype, weights)
    if form is None:

        def dense() -> memoryview:
            return tensor_bytes(load_linear(weights, linear), STORED[dtype])

        return {**found, f"{linear.name}.weight": Piece(STORED[dtype], (rows, linear.in_features), dense)}

    def part(name: str) -> memoryview:
        codes, scale, zero = load_packed(weights, linear)
        if name == "scales":
            return tensor_bytes(scale, "BF16")
        packed, offset = pack(form, codes, zero)
        return tensor_bytes(packed, "U8") if name == "codes" else tensor_bytes(offset, "BF16")

    shapes = {"codes": ("U8", (rows, form.groups, form.width)), "scales": ("BF16", (rows, form.groups))}
    if form.has_offsets:
        shapes["offsets"] = ("BF16", (rows, form.groups))
    return found | {
        f"{linear.name}.{name}": Piece(kind, shape, partial(part, name)) for name, (kind, shape) in shapes.items()
    }


def _norm(norm: Norm, dtype: DType, weights: Weights) -> dict[str, Piece]:
    parts = ("weight", "bias") if norm.kind == "layer" else ("weight",)
    return {f"{norm.name}.{x}": _float(f"{norm.name}.{x}", (norm.size,), dtype, weights) for x in parts}


def _float(name: str, shape: tuple[int, ...], dtype: DType, weights: Weights) -> Piece:
    return Piece(STORED[dtype], shape, lambda: tensor_bytes(weights.load(name), STORED[dtype]))


def write_facts(out: Path, isa: list[str]) -> None:
    """Write down what the package was compiled for."""
    write_json(out / layout.FACTS, {"torch": torch.__version__, "isa": isa})
