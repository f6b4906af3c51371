"""Runs an engine: torch tensors as its buffers, a profile for each step. Leaves out what may be loaded (facts.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from strop.errors import UserError
from strop.export._onnx import layout
from strop.export._tensorrt.facts import PROFILES, Facts
from strop.program import Cache, Forward, Ints, Logits, Program, Step, Traits
from strop.spec import ModelSpec

PREFILL, VERIFY = range(len(PROFILES))


class ExecutionContext(Protocol):
    """What is used of TensorRT's IExecutionContext. Calls that give False have failed."""

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        """Choose the range of shapes."""

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """Give an input's shape."""

    def set_tensor_address(self, name: str, memory: int) -> bool:
        """Give the address of an input or output."""

    def execute_async_v3(self, stream_handle: int) -> bool:
        """Queue one run."""


class Engine(Protocol):
    """What is used of TensorRT's ICudaEngine."""

    def create_execution_context(self) -> ExecutionContext | None:
        """A context, or None where memory does not suffice."""


@dataclass(frozen=True)
class Piece:
    """A part of a step that one run of the engine computes.

    Attributes:
        columns: Of the step's new tokens.
        asked: Columns of the step's logit rows that lie here for at least one row.
    """

    columns: slice
    asked: Ints


class EngineProgram(Program):
    """An engine in the memory of a device, with a context for each profile."""

    def __init__(self, engine: Engine, spec: ModelSpec, facts: Facts, traits: Traits, device: torch.device) -> None:
        """Make the contexts.

        Args:
            engine: Deserialized.
            spec: The table that it was built from.
            facts: What it was built for.
            traits: Of the program.
            device: Where its buffers are.

        Raises:
            UserError: The device's memory does not suffice.
        """
        self.engine, self.spec, self.facts, self.traits, self.device = engine, spec, facts, traits, device
        self.dtype: torch.dtype = getattr(torch, traits.dtype)
        self.owners = [i for i, x in enumerate(spec.layers) if x.kv_from_layer is None]
        self.contexts = [self._context(profile) for profile in range(len(PROFILES))]
        self.bound: list[tuple[int, ...]] = [()] * len(PROFILES)
        """Rows and addresses of the cache that each context was last given: it is given anew only where they differ."""

    def _context(self, profile: int) -> ExecutionContext:
        context = self.engine.create_execution_context()
        if context is None:
            raise UserError(f"{self.traits.runtime}: no memory on the GPU for a context of profile {PROFILES[profile]}")
        _require(context.set_optimization_profile_async(profile, self.stream), f"profile {PROFILES[profile]}")
        return context

    @property
    def stream(self) -> int:
        """Handle of the stream that everything is queued on."""
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0

    def allocate(self, batch: int, max_tokens: int) -> Cache:  # noqa: ARG002 (an engine's cache has one length)
        """See `Program.allocate`. Tensors hold the engine's context, whatever is asked for.

        Raises:
            UserError: More rows than the engine was built for.
        """
        if batch > self.facts.max_batch:
            raise UserError(
                f"this {self.traits.runtime} program takes {self.facts.max_batch} rows, not {batch}: export it with "
                f"max_batch: {batch}"
            )
        layers = [self.spec.layers[i] for i in self.owners]
        shapes = [(batch, x.num_kv_heads, self.facts.context, x.head_dim) for x in layers for _ in ("keys", "values")]
        return [torch.zeros(shape, dtype=self.dtype, device=self.device) for shape in shapes]

    def bind(self, cache: Cache) -> Forward:
        """See `Program.bind`."""
        names = [f"{part}_{i}" for i in self.owners for part in ("keys", "values")]
        fixed = dict(zip(names, cache, strict=True))

        def forward(step: Step) -> Logits:
            batch, num_rows = step.logit_rows.shape
            logits: Logits = np.empty((batch, num_rows, self.traits.vocab_size), np.float32)
            for profile, piece in self._pieces(step):
                start, stop = piece.columns.start, piece.columns.stop
                rows = step.logit_rows[:, piece.asked] if piece.asked.size else np.full((batch, 1), start)
                here = (rows >= start) & (rows < stop)
                found = self._run(profile, fixed, step, piece.columns, np.where(here, rows - start, 0))
                if piece.asked.size:
                    old = logits[:, piece.asked]
                    logits[:, piece.asked] = np.where(here[..., None], found, old)
            return logits

        return forward

    def _pieces(self, step: Step) -> Iterator[tuple[int, Piece]]:
        """The profile and the columns of every run that makes up a step.

        Raises:
            UserError: A tree that is wider than the engine takes at once.
        """
        width = step.ids.shape[1]
        profile = VERIFY if width <= self.facts.most_tokens(VERIFY) else PREFILL
        most = self.facts.most_tokens(profile)
        if step.mask is not None and width > most:
            raise UserError(
                f"a tree of {width} tokens is more than this {self.traits.runtime} program takes at once: {most}"
            )
        for start in range(0, width, most):
            stop = min(start + most, width)
            asked = np.flatnonzero(((step.logit_rows >= start) & (step.logit_rows < stop)).any(0))
            # Ragged rows may ask for more columns than a run gives logits of; running twice writes equal keys.
            for first in range(0, max(asked.size, 1), most):
                yield profile, Piece(slice(start, stop), asked[first : first + most])

    def _run(self, profile: int, fixed: dict[str, Tensor], step: Step, columns: slice, rows: Ints) -> Logits:
        """(B, n, V) logits of `rows` (B, n) among the step's `columns`."""
        part = Step(
            step.ids[:, columns], step.counts, step.lengths + columns.start, step.positions[:, columns], step.mask, rows
        )
        batch, width = part.ids.shape
        num_places = layout.span(part, self.facts.context)
        arrays = {
            "ids": part.ids,
            "positions": part.positions,
            "lengths": part.lengths,
            "logit_rows": rows + np.arange(batch)[:, None] * width,
            **{layout.mask_name(x): layout.visible(part, num_places, x) for x in layout.windows(self.spec)},
        }
        # An engine reads addresses, and slices of numpy's keep their strides when torch copies them.
        inputs = {name: torch.tensor(np.ascontiguousarray(x), device=self.device) for name, x in arrays.items()}
        logits = torch.empty((*rows.shape, self.traits.vocab_size), dtype=torch.float32, device=self.device)
        context, outputs = self.contexts[profile], {"logits": logits}
        place = (batch, *(x.data_ptr() for x in fixed.values()))
        if self.bound[profile] != place:
            # New keys and values are written where the old ones lie: input and output are one buffer.
            inputs, outputs = inputs | {f"past_{name}": x for name, x in fixed.items()}, outputs | fixed
        for name, tensor in inputs.items():
            _require(context.set_input_shape(name, tuple(tensor.shape)), f"shape {list(tensor.shape)} of {name}")
        for name, tensor in {**inputs, **outputs}.items():
            _require(context.set_tensor_address(name, tensor.data_ptr()), f"address of {name}")
        self.bound[profile] = place
        _require(context.execute_async_v3(self.stream), f"a step of {width} tokens under profile {PROFILES[profile]}")
        found: Logits = logits.cpu().numpy()  # waits for the run, so its inputs live until then
        return found


def _require(is_done: bool, what: str) -> None:
    if not is_done:
        raise RuntimeError(f"TensorRT refused {what}")
