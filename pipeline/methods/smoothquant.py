"""SmoothQuant: inputs that are loud are scaled down and their weights up, so that both round to int8 with little error.

Xiao et al. 2022, arXiv 2211.10438. What comes before a group of linears takes the inverse of the scales, so the model
computes the same until it is rounded. Beyond the paper: o and down are smoothed too, o under grouped-query attention
equally for the query heads that read the same value; the exponent can be searched for each input, by the error of the
outputs once weights and inputs are rounded.

Legend: X (tokens, in) inputs, W (out, in) weights of linears that read them, s (in,) scales: W x = (W · s) (x / s).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from strop.artifact import Artifact
from strop.errors import UserError
from strop.methods._experts import NO_EXPERT, is_learned, report_experts
from strop.methods._folding import (
    Factors,
    Fold,
    Site,
    find_sites,
    folded_tensors,
    keep,
    kept_path,
    notes,
    read_kept,
    storable,
)
from strop.spec import Activations, Linear, ModelSpec, Quantization
from strop.stage import GFLOPS_PER_THREAD, Context, Plan, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from strop.calibration.capture import Group

log = logging.getLogger(__name__)

ALPHAS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Tried in a search, beside no scales at all."""
SAMPLE = 512
"""Tokens that a search computes outputs of."""
QUIETEST = 1e-3
"""Part of the mean magnitude that quieter inputs and weights are taken to have: other text may wake them."""
ROUNDING_OPERATIONS = 50
"""For each weight that is rounded: memory-bound, counted as operations."""


class SmoothQuant(Stage):
    """Move what makes inputs hard to round into the weights; round both to int8 (W8A8) or leave that to later stages.

    Attributes:
        alpha: How much is moved: 0 makes weights equally large, 1 inputs. null: searched by each input's output error.
        activations: Inputs are rounded `dynamic`: each token by a scale of its own, or `static`: all by one calibrated
            scale; weights to 8 bits with one scale per output channel. null: nothing is rounded.
        targets: Patterns over full linear names, for example `*.mlp.*`; null: every linear inside the layers.
    """

    needs_calibration: ClassVar[bool] = True

    alpha: float | None = Field(default=None, ge=0, le=1)
    activations: Activations | None = "dynamic"
    targets: list[str] | None = Field(default=None, min_length=1)

    def plan(self, spec: ModelSpec, num_calibration_tokens: int) -> Plan:
        """See `Stage.plan`."""
        result, linears = self._result(spec)
        inside = [x for layer in spec.layers for x in layer.linears.values()]
        widest = max(x.in_features for x in inside)
        forward = 2 * num_calibration_tokens * sum(x.in_features * x.out_features for x in inside)
        tried = 1 if self.alpha is not None else 1 + len(ALPHAS)
        weights = sum(x.in_features * x.out_features for x in linears)
        rounding = (tried + 1) * (2 * SAMPLE + ROUNDING_OPERATIONS) * weights
        block = max(sum(x.in_features * x.out_features for x in layer.linears.values()) for layer in spec.layers)
        return Plan(
            spec=result,
            size_bytes=result.size_bytes(),
            memory_bytes=4 * (num_calibration_tokens * (spec.hidden_size + widest) + 5 * block),
            seconds=(forward + rounding) / (2 * GFLOPS_PER_THREAD * 1e9),
            notes=notes("smoothquant", find_sites(spec, linears)),
        )

    def run(self, source: Artifact, out: Path, context: Context) -> dict[str, Any]:
        """See `Stage.run`. What is finished is kept in the scratch folder; a killed run goes on after it."""
        import numpy as np
        import torch

        from strop.calibration.capture import walk
        from strop.model import read_spec, save_checkpoint

        torch.set_num_threads(context.threads)
        assert context.calibration is not None, "the runner provides it: needs_calibration"
        ids = torch.from_numpy(np.load(context.calibration)).to(context.device)
        spec = read_spec(source.path)
        result, linears = self._result(spec)
        sites = find_sites(spec, linears)
        waiting = {x.readers[0].name: x for x in sites}
        order = torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(context.seed))

        def visit(group: Group) -> bool:
            site = waiting.pop(group.linears[0].name, None)
            if site is not None:
                path = kept_path(context.scratch, site)
                if not path.exists():
                    num_tokens = group.num_tokens if is_learned(group) else ids.numel()
                    sample = order[order < num_tokens][:SAMPLE].sort().values.to(ids.device)
                    keep(path, self._solve(group, site, source.path, sample))
                left = sum(len(x.chosen) for x in waiting.values())
                context.progress("smoothquant", len(linears) - left, len(linears))
            return bool(waiting)

        walk(source.path, spec, ids, visit)
        save_checkpoint(out, result, source.path, self._changed(source.path, result, sites, context.scratch))
        return {"spec": result, "report": _report(sites, context.scratch)}

    def _result(self, spec: ModelSpec) -> tuple[ModelSpec, list[Linear]]:
        """The table of the output, and the linears of the input whose inputs are scaled."""
        spec.check_cache("smoothquant")
        linears = spec.match(self.targets)
        if self.activations is None:
            return spec, linears
        form = Quantization(8, None, True, self.activations)
        return spec.quantize({x.name: form for x in linears}), linears

    def _solve(self, group: Group, site: Site, folder: Path, sample: Tensor) -> dict[str, Tensor]:
        """Scales of a site's inputs.

        Args:
            group: Its linears and what they read, in the model before.
            site: Of those linears.
            folder: The model before.
            sample: Indices of tokens, ascending.

        Returns:
            `scales` (see `Site.spread`), `alpha` (NaN: no scales), `largest` input before scaling, `input_scale` (one
            bfloat16 value in float32), `tokens` that reach an expert, and by linear `error`, the energy of the outputs'
            error on the sample by that of the outputs.

        Raises:
            UserError: The inputs are not finite.
        """
        import torch

        from strop.numerics import static_scale

        place = ", ".join(x.name for x in site.chosen)
        largest, x = observe(group.inputs() if is_learned(group) else group.everyone(), sample)
        if not bool(largest.isfinite().all()):
            raise UserError(f"smoothquant: {place}: the inputs are not finite on the calibration text")
        unscaled = largest.new_ones(site.num_scales)
        tried: list[tuple[float, Tensor]] = [(float("nan"), unscaled)]
        weight = torch.cat([group.weights[linear.name] for linear in site.chosen])
        if not bool(largest.any()):
            log.warning("smoothquant: %s: no input on the calibration text", place)
        elif isinstance(site.fold, Fold):
            alphas = ALPHAS if self.alpha is None else (self.alpha,)
            found = [(alpha, smoothing(largest, weight, site.fold, alpha)) for alpha in alphas]
            found = [(alpha, storable(folder, site.fold, scales)) for alpha, scales in found]
            tried = found if self.alpha is not None else [*tried, *found]
        expected = x @ weight.T
        best: tuple[float, float, Tensor, Tensor, Tensor] | None = None
        for alpha, scales in tried:
            s = site.spread(scales)
            input_scale = static_scale(largest / s)
            is_static = self.activations == "static"
            error = rounded_outputs(weight * s, x / s, input_scale if is_static else None).sub_(expected).square_()
            total = float(error.sum(dtype=torch.float64))
            if best is None or total < best[0]:
                best = total, alpha, scales, input_scale, error.sum(0)
        assert best is not None
        _, alpha, scales, input_scale, lost = best
        energy = expected.square_().sum(0).clamp_(min=torch.finfo(torch.float32).tiny)
        count = torch.tensor(group.num_tokens if group.expert else NO_EXPERT)
        kept = {
            "tokens": count,
            "scales": scales,
            "alpha": torch.tensor(alpha),
            "largest": largest.max(),
            "input_scale": input_scale,
        }
        start = 0
        for linear in site.chosen:
            rows = slice(start, start + linear.out_features)
            kept[f"{linear.name}.error"] = lost[rows].sum() / energy[rows].sum()
            start = rows.stop
        return kept

    def _changed(
        self, folder: Path, result: ModelSpec, sites: Sequence[Site], scratch: Path
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Stored tensors that differ from those of `folder`. `result`: the table of the output."""
        from strop.model import Weights, packed_tensors, read_spec
        from strop.numerics import find_scales, quantize

        form = {x.name: x for x in result.linears()}
        factors = Factors.gather(
            (x, read_kept(kept_path(scratch, x), "scales")) for x in sites if isinstance(x.fold, Fold)
        )
        rounded = {x.name for y in sites for x in y.chosen} if self.activations else set()
        with Weights(folder) as weights:
            yield from folded_tensors(weights, read_spec(folder), factors, rounded)
            for site in sites if self.activations else ():
                input_scale = read_kept(kept_path(scratch, site), "input_scale")
                for linear in site.chosen:
                    weight = factors.scaled(weights, linear)
                    scale, zero = find_scales(weight, Quantization(8, None, True))
                    codes = quantize(weight, scale, zero, 8)
                    yield from packed_tensors(form[linear.name], codes, scale, zero, input_scale).items()


# Maths.


def observe(inputs: Iterable[Tensor], sample: Tensor) -> tuple[Tensor, Tensor]:
    """The largest magnitude of each input, and all inputs of some tokens.

    Args:
        inputs: Batches, each (tokens, in).
        sample: Indices of tokens over all batches, ascending.

    Returns:
        (in,) and (len(sample), in), float32.
    """
    import torch

    magnitudes, taken, start = [], [], 0
    for x in inputs:
        magnitudes.append(x.abs().amax(0))
        here = sample[(sample >= start) & (sample < start + len(x))] - start
        taken.append(x[here])
        start += len(x)
    return torch.stack(magnitudes).amax(0).float(), torch.cat(taken).float()


def smoothing(largest: Tensor, weight: Tensor, fold: Fold, alpha: float) -> Tensor:
    """s = max|X|^alpha / max|W|^(1 - alpha) (Xiao et al. 2022, eq. 4), as distinct scales (size,), the largest 1.

    Args:
        largest: max|X| (in,), not all zero.
        weight: W (out, in).
        fold: Which inputs share a scale: of these the largest counts.
        alpha: 0: weights become equally large, 1: inputs do.
    """
    inputs, weights = (_audible(fold.largest(x)) for x in (largest, weight.abs().amax(0)))
    scales = inputs**alpha / weights ** (1 - alpha)
    return scales / scales.max()


def _audible(magnitude: Tensor) -> Tensor:
    """Magnitudes, none too small to divide by; all equal where all are zero."""
    least = float(QUIETEST * magnitude.mean())
    return magnitude.clamp(min=least if least > 0 else 1.0)


def rounded_outputs(weight: Tensor, inputs: Tensor, input_scale: Tensor | None) -> Tensor:
    """Outputs (tokens, out) of W (out, in) and X (tokens, in), both rounded to int8.

    Args:
        weight: W, rounded with one scale per row.
        inputs: X.
        input_scale: (1,); None: each token by its own.
    """
    from strop.numerics import find_scales, quantize, round_inputs, token_scales

    scale, zero = find_scales(weight, Quantization(8, None, True))
    codes = quantize(weight, scale, zero, 8).float()
    steps = token_scales(inputs) if input_scale is None else input_scale
    outputs: Tensor = round_inputs(inputs, steps) @ codes.T * (steps * scale.T)
    return outputs


# Reports.


def _report(sites: Iterable[Site], scratch: Path) -> dict[str, Any]:
    """What rounding would cost each linear or does, how its input was scaled, or why not."""
    report: dict[str, Any] = {"relative_error": {}, "alpha": {}, "unscaled": {}, "without_inputs": []}
    tokens: dict[str, int] = {}
    for site in sites:
        path = kept_path(scratch, site)
        count = int(read_kept(path, "tokens"))
        tokens |= {x.name.rpartition(".")[0]: count for x in site.chosen if count != NO_EXPERT}
        for name in (x.name for x in site.chosen):
            report["relative_error"][name] = round(float(read_kept(path, f"{name}.error")), 6)
            alpha = float(read_kept(path, "alpha"))
            if isinstance(site.fold, str):
                report["unscaled"][name] = site.fold
            elif not bool(read_kept(path, "largest") > 0):
                report["without_inputs"].append(name)
            else:
                report["alpha"][name] = None if alpha != alpha else round(alpha, 2)
    return report | report_experts("smoothquant", tokens, "calibrated on all tokens")
