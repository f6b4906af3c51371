"""Rounding to nearest: each weight takes the closest code of its group's grid, without calibration.

The baseline of every quantization paper (for example Frantar et al. 2022, arXiv 2210.17323). The grid is signed (see
`numerics.find_scales`), which costs nothing at run time and halves the rounding step of a group's larger side.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from strop.artifact import Artifact
from strop.spec import Linear, ModelSpec, Quantization
from strop.stage import GFLOPS_PER_THREAD, Context, Plan, Stage

if TYPE_CHECKING:
    from torch import Tensor

OPERATIONS_PER_WEIGHT = 40
"""Reading, searching the extremes, dividing, rounding, packing, writing: memory-bound, counted as operations."""


class Rtn(Stage):
    """Round the weights of linears to nearest.

    Attributes:
        bits: Width of a code.
        group_size: Inputs that share one scale; null: one scale per output channel.
        symmetric: Without zero points.
        activations: `dynamic`: inputs are rounded too, to int8 and each token by a scale of its own (W8A8), which takes
            bits: 8 and group_size: null. A static scale needs text: see `gptq` and `smoothquant`.
        targets: Patterns over full linear names, for example `*.mlp.*`; null: every linear inside the layers.
    """

    bits: Literal[2, 3, 4, 8] = 4
    group_size: int | None = Field(default=64, gt=0)
    symmetric: bool = True
    activations: Literal["dynamic"] | None = None
    targets: list[str] | None = Field(default=None, min_length=1)

    def plan(self, spec: ModelSpec, num_calibration_tokens: int) -> Plan:  # noqa: ARG002 # needs none
        result, linears = self._quantized(spec)
        weights = [x.in_features * x.out_features for x in linears]
        return Plan(
            spec=result,
            size_bytes=result.size_bytes(),
            memory_bytes=6 * 4 * max(weights),  # W, its groups, the quotients, codes and words of one linear
            seconds=OPERATIONS_PER_WEIGHT * sum(weights) / (GFLOPS_PER_THREAD * 1e9),
        )

    def run(self, source: Artifact, out: Path, context: Context) -> dict[str, Any]:
        import torch

        from strop.model import Weights, load_linear, packed_tensors, read_spec, save_checkpoint
        from strop.numerics import find_scales, quantize

        torch.set_num_threads(context.threads)
        spec = read_spec(source.path)
        result, linears = self._quantized(spec)
        stored = {x.name: x for x in result.linears()}

        def changed(weights: Weights) -> Iterator[tuple[str, Tensor | None]]:
            for done, linear in enumerate(linears, 1):
                weight = load_linear(weights, linear)
                scale, zero = find_scales(weight, self._quantization())
                codes = quantize(weight, scale, zero, self.bits)
                yield from packed_tensors(stored[linear.name], codes, scale, zero).items()
                context.progress("rtn", done, len(linears))

        with Weights(source.path) as weights:
            save_checkpoint(out, result, source.path, changed(weights))
        return {"spec": result, "report": {"num_linears": len(linears)}}

    def _quantization(self) -> Quantization:
        return Quantization(self.bits, self.group_size, self.symmetric, self.activations)

    def _quantized(self, spec: ModelSpec) -> tuple[ModelSpec, list[Linear]]:
        """The table of the output, and the linears of the input that change."""
        linears = spec.match(self.targets)
        return spec.quantize({x.name: self._quantization() for x in linears}), linears
