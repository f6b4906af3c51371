"""Rounding to nearest: each weight takes the closest code of its group's grid, without calibration.

The baseline of every quantization paper (for example Frantar et al. 2022, arXiv 2210.17323). The grid of integers is
signed (see `numerics.find_scales`), which costs nothing at run time and halves the rounding step of a group's larger
side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from strop.artifact import Artifact
from strop.errors import UserError
from strop.methods._formats import Override, notes, quantizations
from strop.spec import Linear, ModelSpec, NumberFormat
from strop.stage import GFLOPS_PER_THREAD, Context, Plan, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from strop.model import Weights

OPERATIONS_PER_WEIGHT = 40
"""Reading, searching the extremes, dividing, rounding, packing, writing: memory-bound, counted as operations."""


class Rtn(Stage):
    """Round the weights of linears to nearest.

    Attributes:
        format: `int`; `fp8` (E4M3, one scale per output channel); `mxfp4` (E2M1, blocks of 32 with a power of two as
            scale); `nvfp4` (E2M1, blocks of 16 with a scale in E4M3); or a checkpoint of bitsandbytes: `nf4` (quantiles
            of a normal distribution, blocks of 64), `llm_int8` (integers, one scale per output channel). The three
            fields below are for `int` alone.
        bits: Width of a code.
        group_size: Inputs that share one scale; null: one scale per output channel.
        symmetric: Without zero points.
        activations: `dynamic`: inputs are rounded too, each token by a scale of its own (W8A8): to int8, which takes
            bits: 8 and group_size: null, or with `fp8` to that. A static scale needs text: see `gptq`, `smoothquant`.
        per_tensor: Of `fp8`, one scale for the whole matrix.
        overrides: What is otherwise for some of the targets, such as `{targets: ["*.down_proj"], bits: 8}`: the fields
            above. The first that fits holds; one that names a format begins from what that has, others from these.
        targets: Patterns over full linear names, for example `*.mlp.*`; null: every linear inside the layers.
    """

    format: NumberFormat = "int"
    bits: Literal[2, 3, 4, 8] = 4
    group_size: int | None = Field(default=64, gt=0)
    symmetric: bool = True
    activations: Literal["dynamic"] | None = None
    per_tensor: bool = False
    overrides: list[Override] = Field(default_factory=list)
    targets: list[str] | None = Field(default=None, min_length=1)

    def plan(self, spec: ModelSpec, num_calibration_tokens: int) -> Plan:  # noqa: ARG002 # needs none
        result, linears = self._quantized(spec)
        weights = [x.in_features * x.out_features for x in linears]
        return Plan(
            spec=result,
            size_bytes=result.size_bytes(),
            memory_bytes=6 * 4 * max(weights),  # W, its groups, the quotients, codes and words of one linear
            seconds=OPERATIONS_PER_WEIGHT * sum(weights) / (GFLOPS_PER_THREAD * 1e9),
            notes=notes(result),
        )

    def run(self, source: Artifact, out: Path, context: Context) -> dict[str, Any]:
        import torch

        from strop.model import Weights, load_linear, packed_tensors, read_spec, save_checkpoint
        from strop.numerics import find_scales, global_scale, quantize

        torch.set_num_threads(context.threads)
        spec = read_spec(source.path)
        result, linears = self._quantized(spec)
        stored, forms = {x.name: x for x in result.linears()}, quantizations(self, linears)

        def changed(weights: Weights) -> Iterator[tuple[str, Tensor | None]]:
            shared = _largest(weights, spec, [x for x in linears if forms[x.name].format == "nvfp4"])
            for done, linear in enumerate(linears, 1):
                form = forms[linear.name]
                weight, largest = load_linear(weights, linear), shared.get(linear.name)
                scale, zero = find_scales(weight, form, largest)
                codes = quantize(weight, scale, zero, form.bits, form.format)
                unit = None if largest is None else global_scale(largest)
                yield from packed_tensors(stored[linear.name], codes, scale, zero, global_scale=unit).items()
                context.progress("rtn", done, len(linears))

        with Weights(source.path) as weights:
            save_checkpoint(out, result, source.path, changed(weights))
        return {"spec": result, "report": {"num_linears": len(linears)}}

    def _quantized(self, spec: ModelSpec) -> tuple[ModelSpec, list[Linear]]:
        """The table of the output, and the linears of the input that change."""
        linears = spec.match(self.targets)
        choices = quantizations(self, linears)
        if any(x.activations == "static" for x in choices.values()):
            raise UserError(
                "overrides: activations static needs text, which rtn has none of; allowed: dynamic, or gptq"
            )
        return spec.quantize(choices), linears


def _largest(weights: Weights, spec: ModelSpec, linears: Sequence[Linear]) -> dict[str, Tensor]:
    """Linear name -> largest magnitude in all of `linears` that read its input: engines run them as one matrix."""
    from strop.model import load_linear

    found = {x.name: load_linear(weights, x).abs().max() for x in linears}
    for group in (y for layer in spec.layers for y in layer.groups()):
        names = [x.name for x in group if x.name in found]
        found.update({name: max(found[x] for x in names) for name in names})
    return found
