"""Runs model.onnx in onnxruntime, its buffers bound once and changed in place. Imports neither torch nor onnx."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strop.errors import MissingExtra, UserError
from strop.export._onnx import layout as shared
from strop.export.onnx_runtime import layout, memory
from strop.machine import instruction_sets
from strop.program import Cache, Forward, Logits, Program, Step, Traits

Array = NDArray[Any]
Tables = Mapping[str, Array]
"""`cos_0`, `sin_0`, ... -> (positions, width / 2) float32."""

KEPT_CALLS = 4
"""Sets of buffers that a session keeps, for the (K, n) it met last: decoding, checking a draft, a prefill."""
SPIN_US = "200"
"""How long a thread waits awake for its next piece of work: between two operators, not between two steps. Longer gains
about 1 % when the cores are free and loses half the speed and more when they are shared."""
VNNI = {"avx512_vnni", "avx_vnni", "amx_int8"}
"""Instructions that multiply int8 and uint8 exactly. On x86-64 without them sums of two products saturate, unless
onnxruntime is told to take unsigned weights, which is slower."""
LARGE_STEP = 64
"""New tokens a row from which on a step gives its working memory back afterwards, which otherwise stays for good."""
BLOCKED = np.float32(-1e9)
"""Added to scores that do not count: their exponential is 0, and unlike -inf it makes no NaN."""
DTYPES: Mapping[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
}
ROWS_BEFORE = "lengths"
"""Input that only the graph of standard operators has: tokens that each row holds before the step."""


def load(path: Path, traits: Traits) -> OnnxProgram:
    """Open a program.

    Args:
        path: Folder with model.onnx and model.onnx.data.
        traits: As the export returned them; threads may differ.

    Raises:
        MissingExtra: No onnxruntime.
        UserError: A file is missing, truncated or damaged, or the model is not the one that the traits describe.
    """
    # Read when the library loads: 1.32 otherwise writes a device id and a database of events into ~/.cache.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
        from onnxruntime.capi import onnxruntime_pybind11_state as state
    except ModuleNotFoundError as error:
        raise MissingExtra("onnxruntime", "onnx", "running an onnx_runtime program") from error
    model, data = path / shared.MODEL, path / shared.DATA
    for file in (model, data):
        if not file.is_file():
            raise UserError(f"{path}: not an onnx_runtime program, {file.name} is missing")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = traits.threads
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.spin_duration_us", SPIN_US)
    # What it fuses DequantizeLinear and MatMul to would otherwise round inputs to int8, which the graph does not say.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if not VNNI & set(instruction_sets()):
        options.add_session_config_entry("session.x64quantprecision", "1")
    before = memory.mappings()
    try:
        session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    except (state.Fail, state.InvalidArgument, state.InvalidGraph, state.InvalidProtobuf, state.NoSuchFile,
            state.NotImplemented, state.RuntimeException) as error:  # fmt: skip
        size, reason = data.stat().st_size, " ".join(str(error).split())
        raise UserError(
            f"{model}: onnxruntime {onnxruntime.__version__} cannot open it, with {size} bytes of data: {reason}"
        ) from error
    giving_back = onnxruntime.RunOptions()
    giving_back.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    program = OnnxProgram(session, giving_back, traits, path)
    memory.settle(before, data)
    return program


class OnnxProgram(Program):
    """A model.onnx in memory."""

    def __init__(self, session: Any, giving_back: Any, traits: Traits, path: Path) -> None:
        """Check that the session is the program that the traits describe.

        Raises:
            UserError: It is not.
        """
        self.session, self.giving_back = session, giving_back
        self.traits = traits
        self.inputs: dict[str, tuple[str, tuple[Any, ...]]] = {
            x.name: (x.type, tuple(x.shape)) for x in session.get_inputs()
        }
        self.outputs = [x.name for x in session.get_outputs()]
        metadata = session.get_modelmeta().custom_metadata_map
        size = (path / shared.DATA).stat().st_size
        if metadata.get(shared.DATA_BYTES) != str(size):
            raise UserError(
                f"{path / shared.DATA}: has {size} bytes, {shared.MODEL} asks for {metadata.get(shared.DATA_BYTES)}"
            )
        self.is_standard = ROWS_BEFORE in self.inputs
        self.has_trees = any(x.startswith(("bias", "mask")) for x in self.inputs)
        vocab_size = session.get_outputs()[0].shape[2]
        if (vocab_size, self.has_trees) != (traits.vocab_size, traits.takes_trees):
            raise UserError(f"{path / shared.MODEL}: is not the program that its strop.json describes")
        self._ropes = json.loads(metadata.get(layout.ROPES, "[]"))
        self._tables: Tables = {}

    def allocate(self, batch: int, max_tokens: int) -> Cache:
        """See `Program.allocate`."""
        past = [x for name, x in self.inputs.items() if name.startswith("past_")]
        return [np.zeros((batch, heads, max_tokens, width), DTYPES[kind]) for kind, (_, heads, _, width) in past]

    def bind(self, cache: Cache) -> Forward:
        """See `Program.bind`."""
        capacity = cache[0].shape[2]
        past = [x for x in self.inputs if x.startswith("past_")]
        fixed = {**dict(zip(past, cache, strict=True)), **self._rotary(capacity)}
        calls: OrderedDict[tuple[int, int, int], _Call] = OrderedDict()

        def forward(step: Step) -> Logits:
            seen = shared.span(step, capacity) if self.is_standard else capacity
            key = (step.ids.shape[1], step.logit_rows.shape[1], seen)
            call = calls.get(key)
            if call is None:
                sizes = {"B": len(step.ids), "K": key[0], "n": key[1], "T": seen, "M": capacity}
                call = calls[key] = _Call(self, fixed, sizes)
                if len(calls) > KEPT_CALLS:
                    calls.popitem(last=False)
            else:
                calls.move_to_end(key)
            return call(step)

        return forward

    def _rotary(self, length: int) -> Tables:
        """Tables of at least `length` positions, in float32 as the decoder computes them."""
        if not all(len(x) >= length for x in self._tables.values()) or not self._tables:
            places = np.arange(length, dtype=np.float32)[:, None]
            tables = {}
            for i, rope in enumerate(self._ropes):
                angles = places * np.array(rope["inv_freq"], dtype=np.float32)
                tables[f"cos_{i}"] = np.cos(angles) * np.float32(rope["factor"])
                tables[f"sin_{i}"] = np.sin(angles) * np.float32(rope["factor"])
            self._tables = tables
        return self._tables


class _Call:
    """One shape of step: its buffers, bound by address, and what fills them."""

    def __init__(self, program: OnnxProgram, fixed: Tables, sizes: Mapping[str, int]) -> None:
        batch, width = sizes["B"], sizes["K"]
        self.run, self.binding = program.session.run_with_iobinding, program.session.io_binding()
        self.run_options = program.giving_back if width >= LARGE_STEP else None
        self.buffers: dict[str, Array] = dict(fixed)
        for name, (dtype, shape) in program.inputs.items():
            if name not in fixed:
                self.buffers[name] = np.zeros([sizes.get(x, x) for x in shape], DTYPES[dtype])
            self._bind(self.binding.bind_input, name, self.buffers[name])
        self.logits: Logits = np.zeros((batch, sizes["n"], program.traits.vocab_size), np.float32)
        for name in program.outputs:
            # Keys and values are written where they are read; `keys_0.2` are layer 0's, which layer 2 shares.
            target = self.logits if name == "logits" else self.buffers[f"past_{name.partition('.')[0]}"]
            self._bind(self.binding.bind_output, name, target)
        if "total" in self.buffers:
            self.buffers["total"][0] = sizes["M"]
        self.ids, self.rows = self.buffers["ids"], self.buffers["logit_rows"]
        self.lengths, self.positions = self.buffers.get(ROWS_BEFORE), self.buffers.get("positions")
        self.counts, self.ends = self.buffers.get("counts"), self.buffers.get("ends")
        self.firsts = np.arange(batch, dtype=np.int64)[:, None] * width
        self.biases = [(_window(x), y[:, 0]) for x, y in self.buffers.items() if x.startswith("bias")]
        self.masks = [(shared.mask_window(x), y) for x, y in self.buffers.items() if x.startswith("mask")]

    def __call__(self, step: Step) -> Logits:
        """Run a step: (B, n, vocab), overwritten by the next step of this shape."""
        self.ids[...] = step.ids
        if self.lengths is not None:
            self.lengths[...] = step.lengths
        if self.counts is not None and self.ends is not None:
            self.counts[...] = step.counts
            self.ends[...] = step.lengths + step.counts - 1
        self.rows[...] = step.logit_rows + self.firsts
        if self.positions is not None:
            self.positions[...] = step.positions
        for window, bias in self.biases:
            _fill(bias, step, window)
        for window, mask in self.masks:
            mask[...] = shared.visible(step, mask.shape[3], window)
        self.run(self.binding, self.run_options)
        return self.logits

    @staticmethod
    def _bind(bind: Any, name: str, array: Array) -> None:
        bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def _window(name: str) -> int | None:
    _, _, width = name.partition("_")
    return int(width) if width else None


def _fill(bias: NDArray[np.float32], step: Step, window: int | None) -> None:
    """Write the attention bias of a step, in place.

    The kernel is causal by place in the cache already; what remains is which new tokens see which, and windows,
    which count positions.

    Args:
        bias: (B, K, M).
        step: Its mask (K, K), or None: causal.
        window: Of the layers that read this bias.
    """
    width = step.ids.shape[1]
    bias[...] = 0
    for row, length in enumerate(step.lengths.tolist()):
        new = slice(length, length + width)
        if step.mask is not None:
            bias[row, :, new] = np.where(step.mask, 0, BLOCKED)
        if window is not None:
            places = np.arange(length + width)
            places[new] = step.positions[row]
            bias[row, :, : length + width][places <= step.positions[row][:, None] - window] = BLOCKED
