"""HQQ: scales and zero points fitted to the weights alone by half-quadratic splitting.

Badri and Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models" (mobiusml.github.io/hqq_blog): the
error W - Ŵ is split into outliers E, which cost |E|ᵖ with p < 1, and a rest, which costs its square; codes, outliers
and grid are found in turn. The original solves for a zero point that is a real number and keeps the scale. Zero points
of strop's packed form are integers, so here the scale is solved for, from several zero points. That gains less: on a
135M model it helps at 3 bits, and at 4 bits it is no better than rounding (benchmarks/awq_hqq.md).

Legend: W (out, in) weights, Q codes, s scales, z zero points, Ŵ = (Q - z) · s, E outliers of the error.
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

    from strop.model import Weights

P = 0.7
"""What outliers cost: |E|ᵖ."""
BETA = 10.0
"""Twice the cost of the squared rest. P and BETA are the original's, in the weights' own units: errors below 0.17 are
no outliers, which is all errors of most language models. Counting them in steps of the grid instead loses a lot."""
SMALLEST_OUTLIER = BETA ** (-1 / (2 - P))
"""Errors up to this are none: |e| = |e|ᵖ⁻¹ / β."""
ITERATIONS = 4
"""From each start; the original stops by itself after about as many."""
OPERATIONS_PER_WEIGHT = 8000
"""Starts times iterations times some fifteen passes: memory-bound, counted as operations."""


class Hqq(Stage):
    """Quantize the weights of linears with scales and zero points fitted to the weights alone.

    Attributes:
        bits: Width of a code.
        group_size: Inputs that share one scale; null: one scale per output channel.
        symmetric: Without zero points.
        targets: Patterns over full linear names, for example `*.mlp.*`; null: every linear inside the layers.
    """

    bits: Literal[2, 3, 4, 8] = 4
    group_size: int | None = Field(default=64, gt=0)
    symmetric: bool = False
    targets: list[str] | None = Field(default=None, min_length=1)

    def plan(self, spec: ModelSpec, num_calibration_tokens: int) -> Plan:  # noqa: ARG002 # needs none
        """See `Stage.plan`."""
        result, linears = self._quantized(spec)
        weights = [x.in_features * x.out_features for x in linears]
        return Plan(
            spec=result,
            size_bytes=result.size_bytes(),
            memory_bytes=6 * 4 * max(weights),  # W, its groups, Ŵ, the quotients, codes and words of one linear
            seconds=OPERATIONS_PER_WEIGHT * sum(weights) / (2 * GFLOPS_PER_THREAD * 1e9),
        )

    def run(self, source: Artifact, out: Path, context: Context) -> dict[str, Any]:
        """See `Stage.run`."""
        import torch

        from strop.model import Weights, load_linear, packed_tensors, read_spec, save_checkpoint
        from strop.numerics import find_scales, quantize

        torch.set_num_threads(context.threads)
        spec, form = read_spec(source.path), self._quantization()
        result, linears = self._quantized(spec)
        stored = {x.name: x for x in result.linears()}
        errors: dict[str, float] = {}

        def changed(weights: Weights) -> Iterator[tuple[str, Tensor | None]]:
            for done, linear in enumerate(linears, 1):
                weight = load_linear(weights, linear)
                scale, zero = half_quadratic(weight, form)
                codes = quantize(weight, scale, zero, self.bits)
                yield linear.name + ".weight", None
                yield from packed_tensors(stored[linear.name], codes, scale, zero).items()
                lost, rounded = (split_error(weight, *x, self.bits) for x in ((scale, zero), find_scales(weight, form)))
                errors[linear.name] = round(lost / rounded, 6) if rounded > 0 else 1.0
                context.progress("hqq", done, len(linears))

        with Weights(source.path) as weights:
            save_checkpoint(out, result, source.path, changed(weights))
        return {"spec": result, "report": {"error_to_rounding": errors}}

    def _quantization(self) -> Quantization:
        return Quantization(self.bits, self.group_size, self.symmetric)

    def _quantized(self, spec: ModelSpec) -> tuple[ModelSpec, list[Linear]]:
        """The table of the output, and the linears of the input that change."""
        linears = spec.match(self.targets)
        return spec.quantize({x.name: self._quantization() for x in linears}), linears


# Maths.


def split_error(weight: Tensor, scale: Tensor, zero: Tensor, bits: int) -> float:
    """Σ `cost` of W - Ŵ with W rounded to nearest, summed in float64.

    Args:
        weight: W (out, in), float32.
        scale: s (out, groups).
        zero: z (out, groups), int8.
        bits: Width of a code.
    """
    import torch

    from strop.numerics import dequantize, quantize

    error = weight - dequantize(quantize(weight, scale, zero, bits), scale, zero)
    return float(cost(error, outliers(error)).sum(dtype=torch.float64))


def outliers(error: Tensor) -> Tensor:
    """E of least `cost`, approximately: sign(e) · max(|e| - |e|ᵖ⁻¹ / β, 0)."""
    size = error.abs()
    return (size - size.pow(P - 1) / BETA).clamp_(min=0).mul_(error.sign())


def cost(error: Tensor, outlier: Tensor) -> Tensor:
    """|E|ᵖ + β/2 (e - E)² of each weight."""
    return outlier.abs().pow_(P) + (error - outlier).square_().mul_(BETA / 2)


def half_quadratic(weight: Tensor, quantization: Quantization) -> tuple[Tensor, Tensor]:
    """Scales and zero points of small Σ `cost` in each group, never larger than with `numerics.find_scales`.

    Args:
        weight: W (out, in), any float dtype.
        quantization: Bits, group size, symmetric or not.

    Returns:
        As `numerics.find_scales`, which wins where all is equal.
    """
    import torch

    from strop.numerics import SEARCH_WEIGHTS

    rows = max(1, SEARCH_WEIGHTS // weight.shape[1])
    found = [_solve(x.float(), quantization) for x in torch.split(weight, rows)]
    return torch.cat([scale for scale, _ in found]), torch.cat([zero for _, zero in found])


def _solve(weight: Tensor, quantization: Quantization) -> tuple[Tensor, Tensor]:
    """`half_quadratic` over a few rows."""
    import torch

    from strop.numerics import code_range, find_scales, grouped

    lowest, highest = code_range(quantization.bits)
    groups = grouped(weight, quantization.group_size)
    first_scale, first_zero = find_scales(weight, quantization)
    best_scale, best_zero = first_scale, first_zero
    least = torch.full_like(first_scale, torch.inf)
    for shift in (0,) if quantization.symmetric else (0, -1, 1):
        scale, zero = first_scale, (first_zero.int() + shift).clamp(lowest, highest).to(torch.int8)
        z = zero[..., None].float()
        for iteration in range(ITERATIONS + 1):
            steps = (groups / scale[..., None]).round_().add_(z).clamp_(lowest, highest).sub_(z)
            error = groups - steps * scale[..., None]
            outlier = outliers(error) if bool(error.abs().max() > SMALLEST_OUTLIER) else torch.zeros_like(error)
            lost = cost(error, outlier).sum(-1)
            is_better = lost < least
            least = torch.where(is_better, lost, least)
            best_scale = torch.where(is_better, scale, best_scale)
            best_zero = torch.where(is_better, zero, best_zero)
            if iteration < ITERATIONS:
                scale = fit_scale(steps, groups - outlier, scale)
    return best_scale, best_zero


def fit_scale(steps: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    """s of least Σ (s · steps - target)² in each group, as it is stored; those of groups without any step stay.

    Args:
        steps: Q - z (out, groups, group_size).
        target: W - E (out, groups, group_size).
        scale: s before, (out, groups); the new one has its sign.
    """
    import torch

    from strop.numerics import round_scales

    fitted = (steps * target).sum(-1) / steps.square().sum(-1)
    return round_scales(torch.where(fitted * scale > 0, fitted, scale))  # 0 / 0 is not above 0
