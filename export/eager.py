"""PyTorch without compilation: the runtime that every other one is compared with.

A quantized checkpoint runs dequantized, and where its inputs are rounded, with the very integers that an engine
multiplies: right for quality, never a speed row. A family that strop does not know runs through transformers, behind
the same `Program`: no trees, rows of a batch one after another, and a row that was truncated is computed anew.
"""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strop.artifact import Artifact, Format, list_files
from strop.program import Cache, Forward, Logits, Program, Step, Traits
from strop.spec import DTYPE_BYTES, ModelSpec
from strop.stage import Context, Plan, Stage, Support

if TYPE_CHECKING:
    from strop.layers import Decoder


class Eager(Stage):
    """Run in PyTorch as it is, in the checkpoint's dtype."""

    gives: ClassVar[Format] = "program"

    def plan(self, spec: ModelSpec, num_calibration_tokens: int) -> Plan:  # noqa: ARG002 (the contract of a stage)
        """See `Stage.plan`."""
        notes = []
        if any(x.quantization is not None for x in spec.linears()):
            notes.append("eager dequantizes: it is the reference for quality, not a speed row")
        if any(x.quantization is not None and x.quantization.format == "llm_int8" for x in spec.linears()):
            notes.append(
                "bitsandbytes rounds inputs too when it runs llm_int8, but for outliers: measured are the weights"
            )
        if spec.opaque_bytes is not None:
            notes.append(
                f"{spec.family} is not a known family: it runs through transformers, without trees, rows of a batch "
                "one after another, and cannot be compressed or lowered to another runtime"
            )
        dense = spec.num_parameters() * DTYPE_BYTES[spec.dtype]
        integer = [x for x in spec.linears() if x.quantization is not None and x.quantization.activations is not None]
        dense += (4 - DTYPE_BYTES[spec.dtype]) * sum(x.in_features * x.out_features for x in integer)
        cached = spec.kv_bytes_per_token(DTYPE_BYTES[spec.dtype]) if spec.opaque_bytes is None else None
        return Plan(spec, spec.size_bytes(), dense, 1.0, tuple(notes), cached)

    def support(self, spec: ModelSpec) -> Support:  # noqa: ARG002 (all are)
        """See `Stage.support`."""
        return "dequantized"

    def run(self, source: Artifact, out: Path, context: Context) -> dict[str, Any]:
        """See `Stage.run`. The weights are not copied: the files of the checkpoint are linked."""
        from strop.model import read_spec

        spec = read_spec(source.path)
        for path in list_files(source.path):
            target = out / path.relative_to(source.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(path, target)
        is_known = spec.opaque_bytes is None
        traits = Traits(
            runtime="eager",
            dtype=spec.dtype,
            threads=context.threads,
            device=context.device,
            context=spec.max_positions,
            vocab_size=spec.vocab_size,
            takes_trees=is_known,
            kernels=f"torch {version('torch')}" + ("" if is_known else f", transformers {version('transformers')}"),
        )
        return {"spec": spec, "traits": traits, "report": {}}

    @staticmethod
    def load(path: Path, traits: Traits) -> Program:
        """Weights into memory, ready to run. Sets torch's threads for the whole process.

        Args:
            path: What `run` wrote, with its `strop.json`.
            traits: As `run` returned them; threads and device may differ.
        """
        import torch

        from strop.layers import fold
        from strop.model import load_decoder, read_spec

        torch.set_num_threads(traits.threads)
        if read_spec(path).opaque_bytes is not None:
            return TransformersProgram(_load_transformers(path, traits.device), traits)
        decoder = load_decoder(path, traits.device)
        fold(decoder)
        return DecoderProgram(decoder, traits)


def _link(source: Path, target: Path) -> None:
    """A hard link, or a copy where the file system cannot link there."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


class DecoderProgram(Program):
    """Our own decoder in PyTorch."""

    def __init__(self, decoder: Decoder, traits: Traits) -> None:
        self.decoder = decoder.eval()
        self.traits = traits

    def allocate(self, batch: int, max_tokens: int) -> Cache:
        """See `Program.allocate`."""
        return list(self.decoder.allocate(batch, max_tokens))

    def bind(self, cache: Cache) -> Forward:
        """See `Program.bind`."""
        import torch

        decoder, device = self.decoder, self.decoder.device

        @torch.inference_mode()
        def forward(step: Step) -> Logits:
            arrays = (step.ids, step.positions, step.lengths, step.logit_rows)
            ids, positions, lengths, rows = (torch.tensor(x, device=device) for x in arrays)
            mask = None if step.mask is None else torch.tensor(step.mask, device=device)
            logits: Logits = decoder(ids, positions, lengths, cache, mask, rows).cpu().numpy()
            return logits

        return forward


@dataclass
class _Row:
    """What transformers knows of one row."""

    tokens: list[int] = field(default_factory=list)
    cache: Any = None


class TransformersProgram(Program):
    """A causal language model of transformers, for families that strop does not know.

    Every row has a `DynamicCache` of its own, so rows may differ in length. A row shortened by `truncate` is computed
    anew from its tokens: caches of sliding windows and of recurrent layers cannot be cut.
    """

    def __init__(self, model: Any, traits: Traits) -> None:
        self.model = model
        self.traits = traits
        parameters = inspect.signature(model.forward).parameters
        # transformers renamed the argument in 5.2x and warns about the old name.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters

    def allocate(self, batch: int, max_tokens: int) -> Cache:  # noqa: ARG002 (its caches grow)
        """See `Program.allocate`. Not arrays: a `_Row` each, which only `bind` reads."""
        return [_Row() for _ in range(batch)]

    def bind(self, cache: Cache) -> Forward:
        """See `Program.bind`."""

        def forward(step: Step) -> Logits:
            counts, lengths = step.counts.tolist(), step.lengths.tolist()
            return np.stack(
                [
                    self._advance(row, length, step.ids[i, :count].tolist(), step.logit_rows[i].clip(0, count - 1))
                    for i, (row, length, count) in enumerate(zip(cache, lengths, counts, strict=True))
                ]
            )

        return forward

    def _advance(self, row: _Row, length: int, ids: Sequence[int], logit_rows: Any) -> Logits:
        """Append ids to a row of which the first `length` tokens hold; (n, vocab) logits of `logit_rows`."""
        import torch
        from transformers import DynamicCache

        if row.cache is None or length < len(row.tokens):
            row.tokens, row.cache = [*row.tokens[:length], *ids], DynamicCache(config=self.model.config)
            new: Sequence[int] = row.tokens
        else:
            row.tokens, new = [*row.tokens, *ids], ids
        wanted = len(ids) - int(logit_rows.min())
        arguments = {"logits_to_keep": wanted} if self._keeps_logits else {}
        with torch.no_grad():
            inputs = torch.tensor([new], device=self.model.device)
            result = self.model(inputs, use_cache=True, **{self._cache_name: row.cache}, **arguments)
        last = result.logits[0, -wanted:].float().cpu().numpy()
        found: Logits = last[logit_rows - logit_rows.min()]
        return found


def _load_transformers(path: Path, device: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers has no annotation here
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype="auto", local_files_only=True, trust_remote_code=False
    )
    return model.to(device).eval()
