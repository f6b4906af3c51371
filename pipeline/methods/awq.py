"""AWQ: weights whose inputs are large are scaled up before rounding and their inputs down, so that they lose less.

Lin et al. 2023, arXiv 2306.00978. What comes before a group of linears takes the inverse of their inputs' scales: a
norm's gain, the rows of v for o, the rows of up for down. So the model computes the same until it is rounded. Beyond
the paper: every exponent's error follows from the Hessian, without a forward pass, and is that after clipping, which
asks for smaller exponents than rounding between the extremes does; the magnitude of an input is its root mean square,
which is the Hessian's diagonal; o is scaled under grouped-query attention too, equally for the query heads that read
the same value; weights are clipped on a signed grid, by the Hessian within each group.

Legend: W (out, in) weights of linears that read the same input, H (in, in) Hessian of that input, s (in,) its scales:
W x = (W · s) (x / s). Not to be confused with `scale` and `zero` (out, groups) of the codes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

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
from strop.spec import Linear, ModelSpec, Quantization
from strop.stage import GFLOPS_PER_THREAD, Context, Plan, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from strop.calibration.capture import Group

log = logging.getLogger(__name__)

EXPONENTS = tuple(x / 10 for x in range(11))
"""Tried on the inputs' magnitudes, in this order; 0: no scales."""
PATIENCE = 2
"""Exponents in a row that are no better than the best before, and the search ends."""
QUIETEST = 1e-3
"""Part of the mean magnitude that quieter inputs are taken to have: other text may wake them."""
SEARCH_OPERATIONS = 70_000
"""For each weight: some five exponents times thirty scales, memory-bound; counted as operations."""


class Awq(Stage):
    """Quantize the weights of linears, scaled by the magnitude of their inputs first and clipped by output error.

    Attributes:
        bits: Width of a code.
        group_size: Inputs that share one scale; null: one scale per output channel.
        symmetric: Without zero points.
        targets: Patterns over full linear names, for example `*.mlp.*`; null: every linear inside the layers.
    """

    needs_calibration: ClassVar[bool] = True

    bits: Literal[2, 3, 4, 8] = 4
    group_size: int | None = Field(default=64, gt=0)
    symmetric: bool = True
    targets: list[str] | None = Field(default=None, min_length=1)

    def plan(self, spec: ModelSpec, num_calibration_tokens: int) -> Plan:
        """See `Stage.plan`."""
        result, linears = self._quantized(spec)
        tokens = num_calibration_tokens
        inside = [x for layer in spec.layers for x in layer.linears.values()]
        widest = max(x.in_features for x in inside)
        share = {x.name: layer.token_share(role) for layer in spec.layers for role, x in layer.linears.items()}
        forward = sum(2 * share[x.name] * x.in_features * x.out_features for x in inside)
        hessians = sum(share.get(x.name, 1.0) * x.in_features**2 for x in linears) / 2  # about two share an input
        searching = sum((SEARCH_OPERATIONS + 10 * x.in_features) * x.in_features * x.out_features for x in linears)
        block = max(sum(x.in_features * x.out_features for x in layer.linears.values()) for layer in spec.layers)
        return Plan(
            spec=result,
            size_bytes=result.size_bytes(),
            memory_bytes=4 * int(tokens * (spec.hidden_size + widest) + 3 * block + 8 * widest**2),
            seconds=(tokens * (forward + hessians) + searching) / (2 * GFLOPS_PER_THREAD * 1e9),
            notes=notes("awq", find_sites(spec, linears)),
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
        result, linears = self._quantized(spec)
        sites = find_sites(spec, linears)
        waiting = {x.readers[0].name: x for x in sites}

        def visit(group: Group) -> bool:
            site = waiting.pop(group.linears[0].name, None)
            if site is not None:
                self._quantize(group, site, source.path, context.scratch)
                left = sum(len(x.chosen) for x in waiting.values())
                context.progress("awq", len(linears) - left, len(linears))
            return bool(waiting)

        walk(source.path, spec, ids, visit)
        save_checkpoint(out, result, source.path, self._changed(source.path, result, sites, context.scratch))
        return {"spec": result, "report": _report(sites, context.scratch)}

    def _quantization(self) -> Quantization:
        return Quantization(self.bits, self.group_size, self.symmetric)

    def _quantized(self, spec: ModelSpec) -> tuple[ModelSpec, list[Linear]]:
        """The table of the output, and the linears of the input that change."""
        spec.check_cache("awq")
        linears = spec.match(self.targets)
        return spec.quantize({x.name: self._quantization() for x in linears}), linears

    def _quantize(self, group: Group, site: Site, folder: Path, scratch: Path) -> None:
        """Quantize the linears of a site, unless an earlier try did, and put the result in their place.

        In the walk the inputs stay as they were, so the weights are divided by their scales again.
        """
        from safetensors.torch import load_file

        from strop.numerics import dequantize

        path = kept_path(scratch, site)
        if not path.exists():
            keep(path, self._solve(group, site, folder))
        kept = load_file(path)
        for linear in site.chosen:
            weight = dequantize(*(kept[f"{linear.name}.{x}"] for x in ("codes", "scale", "zero")))
            group.weights[linear.name].copy_(weight / site.spread(kept["scales"]))

    def _solve(self, group: Group, site: Site, folder: Path) -> dict[str, Tensor]:
        """Scales of the inputs, then codes of each linear.

        Returns:
            `scales` (see `Site.spread`), `exponent`, `energy` of the inputs, `tokens` that reach an expert, by linear
            `codes`, `scale`, `zero` and `error`, the energy of the outputs' error by that of the outputs.

        Raises:
            UserError: The inputs are not finite.
        """
        import torch

        from strop.calibration.capture import hessian
        from strop.numerics import dequantize

        place = ", ".join(x.name for x in site.chosen)
        width = site.chosen[0].in_features
        h = hessian(group.inputs()) if is_learned(group) else group.weights[site.chosen[0].name].new_zeros(width, width)
        if not bool(h.isfinite().all()):
            raise UserError(f"awq: {place}: the inputs are not finite on the calibration text")
        energy = h.diagonal().sum()
        tried: Iterable[tuple[float, Tensor]] = [(0.0, h.new_ones(site.num_scales))]
        if not bool(energy > 0):
            if is_learned(group):
                log.warning("awq: %s: no input on the calibration text, rounded to nearest", place)
        elif isinstance(site.fold, Fold):
            tried = ((x, storable(folder, site.fold, scales)) for x, scales in candidates(h, site.fold))
        weight = torch.cat([group.weights[x.name] for x in site.chosen])
        best = search(weight, h, self._quantization(), ((x, scales, site.spread(scales)) for x, scales in tried))
        found = {"scales": best.scales, "exponent": torch.tensor(best.exponent), "energy": energy}
        found["tokens"] = torch.tensor(group.num_tokens if group.expert else NO_EXPERT)
        start = 0
        for linear in site.chosen:
            rows = slice(start, start + linear.out_features)
            codes, scale, zero = best.codes[rows], best.scale[rows], best.zero[rows]
            lost = output_energy(dequantize(codes, scale, zero) / site.spread(best.scales) - weight[rows], h)
            total = output_energy(weight[rows], h)
            error = torch.tensor(lost / total if total > 0 else 0.0)
            parts = {"codes": codes, "scale": scale, "zero": zero, "error": error}
            found |= {f"{linear.name}.{key}": value for key, value in parts.items()}
            start = rows.stop
        return found

    def _changed(
        self, folder: Path, result: ModelSpec, sites: Sequence[Site], scratch: Path
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Stored tensors that differ from those of `folder`. `result`: the table of the output."""
        from safetensors.torch import load_file

        from strop.model import Weights, packed_tensors, read_spec
        from strop.numerics import quantize, round_scales

        quantized = {x.name: x for x in result.linears()}
        factors = Factors.gather(
            (x, read_kept(kept_path(scratch, x), "scales")) for x in sites if isinstance(x.fold, Fold)
        )
        with Weights(folder) as weights:
            yield from folded_tensors(weights, read_spec(folder), factors, {x.name for y in sites for x in y.chosen})
            for site in sites:
                kept = load_file(kept_path(scratch, site))
                for linear in site.chosen:
                    codes, scale, zero = (kept[f"{linear.name}.{x}"] for x in ("codes", "scale", "zero"))
                    if linear.name in factors.rows:
                        # A row's grid is as large as the row: only the scale's rounding can change a code.
                        scale = round_scales(scale / factors.rows[linear.name][:, None])
                        codes = quantize(factors.scaled(weights, linear), scale, zero, self.bits)
                    yield f"{linear.name}.weight", None
                    yield from packed_tensors(quantized[linear.name], codes, scale, zero).items()


# Maths.


@dataclass(frozen=True)
class Trial:
    """Codes of W · s, and what they lose.

    Attributes:
        exponent: Of the inputs' magnitudes.
        scales: Distinct scales that s came from.
        codes: Q (out, in), int8.
        scale: (out, groups), float32 holding bfloat16 values.
        zero: (out, groups), int8.
        lost: `output_energy` of the error.
    """

    exponent: float
    scales: Tensor
    codes: Tensor
    scale: Tensor
    zero: Tensor
    lost: float


def candidates(hessian: Tensor, fold: Fold) -> Iterator[tuple[float, Tensor]]:
    """Powers of the inputs' magnitudes (Lin et al. 2023, eq. 5), as distinct scales (size,) with their exponents.

    The largest is 1: no row that is divided by its scale gets too small for its codes, and no input larger than the
    largest was.

    Args:
        hessian: H (in, in), not zero.
        fold: Which inputs share a scale.
    """
    magnitude = fold.pool(hessian.diagonal()).sqrt()
    magnitude = magnitude.clamp(min=float(QUIETEST * magnitude.mean()))
    magnitude = magnitude / magnitude.max()
    return ((exponent, magnitude**exponent) for exponent in EXPONENTS)


def search(
    weight: Tensor, hessian: Tensor, quantization: Quantization, tried: Iterable[tuple[float, Tensor, Tensor]]
) -> Trial:
    """The scales that leave the least output error once W · s is clipped and rounded; the first of equal ones.

    Args:
        weight: W (out, in), float32.
        hessian: H (in, in).
        quantization: Bits, group size, symmetric or not.
        tried: (exponent, distinct scales, s (in,) or (1,)), at least one.
    """
    from strop.numerics import dequantize, quantize, search_scales

    best, num_worse = None, 0
    for exponent, scales, s in tried:
        scaled = weight * s
        scale, zero = search_scales(scaled, quantization, blocks(hessian / (s[:, None] * s), quantization.group_size))
        codes = quantize(scaled, scale, zero, quantization.bits)
        lost = output_energy(dequantize(codes, scale, zero) / s - weight, hessian)
        if best is None or lost < best.lost:
            best, num_worse = Trial(exponent, scales, codes, scale, zero, lost), 0
        else:
            num_worse += 1
        if num_worse == PATIENCE:
            break
    assert best is not None
    return best


def output_energy(weight: Tensor, hessian: Tensor) -> float:
    """Mean of 2 ‖W x‖² over the calibration text, summed in float64."""
    import torch

    return float((weight @ hessian).mul_(weight).sum(dtype=torch.float64))


def blocks(hessian: Tensor, group_size: int | None) -> Tensor:
    """H (in, in) within each group of inputs: (groups, group_size, group_size)."""
    size = group_size or len(hessian)
    num_groups = len(hessian) // size
    return hessian.reshape(num_groups, size, num_groups, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()


# Reports.


def _report(sites: Iterable[Site], scratch: Path) -> dict[str, Any]:
    """What each linear lost, how its input was scaled, or why not."""
    report: dict[str, Any] = {"relative_error": {}, "exponent": {}, "unscaled": {}, "without_inputs": []}
    tokens: dict[str, int] = {}
    for site in sites:
        path = kept_path(scratch, site)
        count = int(read_kept(path, "tokens"))
        tokens |= {x.name.rpartition(".")[0]: count for x in site.chosen if count != NO_EXPERT}
        for name in (x.name for x in site.chosen):
            report["relative_error"][name] = round(float(read_kept(path, f"{name}.error")), 6)
            if not bool(read_kept(path, "energy") > 0):
                report["without_inputs"] += [name] if count == NO_EXPERT else []
            elif isinstance(site.fold, Fold):
                report["exponent"][name] = round(float(read_kept(path, "exponent")), 2)
            if isinstance(site.fold, str):
                report["unscaled"][name] = site.fold
    return report | report_experts("awq", tokens)
