"""Codes chosen column by column, each rounding error made good by the columns that are still to come: GPTQ.

Frantar et al. 2022, arXiv 2210.17323. On top of the paper: scales of least error weighted with the inputs' energy
instead of from extremes, groups that keep their place under act-order, so nothing but codes and scales is stored, and
weights moved first to make good what their inputs have drifted away from the unquantized model's. Shared by `gptq`,
which is this alone, `autoround`, which learns on from there, and `mixed_precision`, which chooses the widths.

Legend: W (out, in) weights, H (in, in) Hessian, Q (out, in) codes, s and z (out, groups) scales and zero points,
U (in, in) upper triangular with H⁻¹ = Uᵀ U.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.artifact import Artifact, write_atomically
from strop.errors import UserError
from strop.methods._experts import is_learned, report_experts
from strop.spec import Linear, ModelSpec, NumberFormat, Quantization
from strop.stage import GFLOPS_PER_THREAD, Context

if TYPE_CHECKING:
    from torch import Tensor

    from strop.calibration.capture import Group

log = logging.getLogger(__name__)

FOLLOWED_PER_INPUT = 4
"""Tokens for each input of an expert that are computed with the unquantized model too, or its drift stays: it would be
lost in their noise."""
BLOCK_SIZE = 32
"""Columns that are finished before the columns after them are updated. Changes speed, not what is computed."""
FOLLOWED = 0.25
"""Part of the samples computed with the unquantized model too. Chosen for its time; its effect on KL is unmeasured."""
MOST_DAMPING = 1.0
"""A Hessian that this does not make invertible is not one."""


@dataclass(frozen=True)
class Compensation:
    """How linears are quantized, each after the other, against the inputs that calibration text gives them.

    Attributes:
        act_order: Begin with the columns whose inputs have the most energy.
        damping: Added to the Hessian's diagonal, as a part of the diagonal's mean.
        drift_correction: How much of the inputs' drift away from the unquantized model's is made good.
    """

    act_order: bool = True
    damping: float = 0.01
    drift_correction: float = 0.5

    def cost(self, spec: ModelSpec, linears: Sequence[Linear], num_tokens: int) -> tuple[int, float]:
        """Peak memory in bytes and rough seconds of `quantize`."""
        inside = [x for layer in spec.layers for x in layer.linears.values()]
        widest = max(x.in_features for x in inside)
        followed = FOLLOWED if self.drift_correction else 0.0
        share = {x.name: layer.token_share(role) for layer in spec.layers for role, x in layer.linears.items()}
        forward = (1 + followed) * sum(2 * share[x.name] * x.in_features * x.out_features for x in inside)
        squares = sum(share.get(x.name, 1.0) * x.in_features**2 for x in linears)
        hessians = (1 + 2 * followed) * squares / 2  # about two linears share an input
        solving = sum(2 * x.in_features**2 * (x.out_features + x.in_features) for x in linears)
        block = max(sum(x.in_features * x.out_features for x in layer.linears.values()) for layer in spec.layers)
        memory = 4 * int((1 + followed) * num_tokens * (spec.hidden_size + widest) + 2 * block + 8 * widest**2)
        return memory, (num_tokens * (forward + hessians) + solving) / (2 * GFLOPS_PER_THREAD * 1e9)

    def quantize(
        self, source: Artifact, out: Path, context: Context, forms: Mapping[str, Quantization]
    ) -> dict[str, Any]:
        """Quantize linears, each to its own form. A stage's `run`, but for the forms.

        Finished linears are kept in the scratch folder; a killed run goes on after them.

        Args:
            source: As in `Stage.run`, `out` and `context` too.
            out: Where to write.
            context: Seed, threads, calibration, scratch space.
            forms: Linear name -> its quantization.
        """
        import numpy as np
        import torch

        from strop.calibration.capture import walk
        from strop.model import read_spec, save_checkpoint

        torch.set_num_threads(context.threads)
        assert context.calibration is not None, "the runner provides it: needs_calibration"
        ids = torch.from_numpy(np.load(context.calibration)).to(context.device)
        spec = read_spec(source.path)
        linears, result = [x for x in spec.linears() if x.name in forms], spec.quantize(forms)
        waiting = {x.name for x in linears}

        def visit(group: Group) -> bool:
            chosen = [x for x in group.linears if x.name in waiting]
            if chosen:
                for form in dict.fromkeys(forms[x.name] for x in chosen):
                    self._quantize(group, [x for x in chosen if forms[x.name] == form], form, context.scratch)
                waiting.difference_update(x.name for x in chosen)
                context.progress("gptq", len(linears) - len(waiting), len(linears))
            return bool(waiting)

        num_followed = math.ceil(FOLLOWED * len(ids)) if self.drift_correction else 0
        walk(source.path, spec, ids, visit, num_followed=num_followed)
        save_checkpoint(out, result, source.path, _changed(result, linears, context.scratch))
        return {"spec": result, "report": self._report(linears, context.scratch)}

    def _quantize(self, group: Group, linears: Sequence[Linear], form: Quantization, scratch: Path) -> None:
        """Quantize linears of one input and format, unless an earlier try did, and put the result in their place."""
        import torch

        from strop.calibration.capture import drift, hessian
        from strop.numerics import LARGEST_E2M1, dequantize, global_scale

        if not all(_path(scratch, x).exists() for x in linears):
            weight = torch.cat([group.weights[x.name] for x in linears])
            h = hessian(group.inputs() if group.num_tokens else [weight.new_zeros(1, weight.shape[1])])
            damping = self._damping(group)
            if is_learned(group):
                needed = FOLLOWED_PER_INPUT * weight.shape[1] if group.expert else 1
                c = drift(group.pairs()) if self.drift_correction and group.num_followed >= needed else None
                place = ", ".join(x.name for x in linears)
                solution = self._solve(weight, h, c, form, place, damping=damping)
            else:
                solution = _round(weight, form)
            seen = group.inputs if is_learned(group) else group.everyone
            largest = max(float(x.abs().max()) for x in seen()) if form.activations == "static" else 0.0
            # Engines run these linears as one matrix, which has one such scale.
            unit = float(global_scale(LARGEST_E2M1 * solution.scale.max())) if form.format == "nvfp4" else 0.0
            numbers = {"largest": largest, "unit": unit, "asked": damping}
            if group.expert:
                numbers["tokens"] = group.num_tokens
            start = 0
            for linear in linears:
                rows = slice(start, start + linear.out_features)
                part = solution.rows(rows)
                error = relative_error(weight[rows], dequantize(part.codes, part.scale, part.zero), h)
                _keep(_path(scratch, linear), part, {"error": error, **numbers})
                start = rows.stop
        for linear in linears:
            kept = _load(_path(scratch, linear))
            group.weights[linear.name].copy_(dequantize(kept["codes"], kept["scale"], kept["zero"]))

    def _damping(self, group: Group) -> float:
        """Of a group's Hessian: for an expert at least inputs by tokens, as few tokens say little of other ones.

        On linears of SmolLM2-135M at 4 bits, judged on other text (benchmarks/gptq.md): of 64 to 1024 tokens, damping
        of 0.01 made 0.78 to 1.29 times the error of rounding to nearest, this 0.53 to 0.75 times.
        """
        if group.expert is None:
            return self.damping
        return min(MOST_DAMPING, max(self.damping, group.linears[0].in_features / max(1, group.num_tokens)))

    def _solve(
        self,
        weight: Tensor,
        hessian: Tensor,
        drift: Tensor | None,
        form: Quantization,
        place: str,
        *,
        damping: float | None = None,
    ) -> Solution:
        """Codes of W, with as much damping as it takes, from `damping` on; None: from the field's.

        Raises:
            UserError: The Hessian is not finite, or cannot be inverted however much it is damped.
        """
        import torch

        from strop.numerics import search_scales

        energy = hessian.diagonal()
        if not bool(hessian.isfinite().all()):
            raise UserError(f"gptq: {place}: the inputs are not finite on the calibration text")
        if not bool(energy.any()):
            log.warning("gptq: %s: no input on the calibration text, rounded to nearest", place)
            return _round(weight, form)
        order = energy.argsort(descending=True, stable=True) if self.act_order else torch.arange(len(energy))
        damping = damping or self.damping
        while (factor := inverse_factor(hessian[order][:, order], damping)) is None:
            if damping >= MOST_DAMPING:
                raise UserError(f"gptq: {place}: the Hessian cannot be inverted, not even with damping {damping:g}")
            damping = min(10 * damping, MOST_DAMPING)
            log.warning("gptq: %s: the Hessian cannot be inverted, damping raised to %g", place, damping)
        if drift is not None:
            weight = correct_drift(weight, drift * self.drift_correction, factor, order)
        scale, zero = search_scales(weight, form, energy)
        codes = choose_codes(weight, factor, scale, zero, form.bits, order, form.format)
        return Solution(codes, scale, zero, damping)

    def _report(self, linears: Sequence[Linear], scratch: Path) -> dict[str, Any]:
        """What each linear lost, where more damping was needed, how many tokens reached each expert."""
        kept = {x.name: _load(_path(scratch, x)) for x in linears}
        damping = {name: float(x["damping"]) for name, x in kept.items()}
        tokens = {name.rpartition(".")[0]: int(x["tokens"]) for name, x in kept.items() if "tokens" in x}
        return {
            "relative_error": {name: round(float(x["error"]), 6) for name, x in kept.items()},
            "raised_damping": {name: x for name, x in damping.items() if x > float(kept[name]["asked"])},
            "without_inputs": [name for name, x in damping.items() if x == 0 and "tokens" not in kept[name]],
            **report_experts("gptq", tokens),
        }


@dataclass(frozen=True)
class Solution:
    """Codes of some rows, and what they stand for.

    Attributes:
        codes: Q (out, in), of `numerics.code_dtype`.
        scale: s (out, groups), float32 as `numerics.find_scales` rounds them.
        zero: z (out, groups), int8.
        damping: That it took; 0 where there were no inputs and W was rounded to nearest.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    damping: float

    def rows(self, rows: slice) -> Solution:
        """Some of the rows."""
        return Solution(self.codes[rows], self.scale[rows], self.zero[rows], self.damping)


# Maths.


def _round(weight: Tensor, form: Quantization) -> Solution:
    """To nearest, as `rtn` does."""
    from strop.numerics import find_scales, quantize

    scale, zero = find_scales(weight, form)
    return Solution(quantize(weight, scale, zero, form.bits, form.format), scale, zero, damping=0.0)


def inverse_factor(hessian: Tensor, damping: float) -> Tensor | None:
    """U of H damped, the upper triangular factor of its inverse: H⁻¹ = Uᵀ U.

    Computed in float64 as the inverse of a factor of H, never through H⁻¹ itself: H = M Mᵀ with M upper triangular is
    a Cholesky factorization from the last column to the first, and U = M⁻¹.

    Args:
        hessian: H (in, in), float32.
        damping: Added to the diagonal, as a part of its mean.

    Returns:
        (in, in) float32; None where the damped H is not positive definite.
    """
    import torch

    damped = hessian.double()
    damped.diagonal().add_(damping * damped.diagonal().mean())
    lower, info = torch.linalg.cholesky_ex(damped.flip(0, 1))
    if int(info) != 0:
        return None
    identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    factor: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1).float()
    return factor


def correct_drift(weight: Tensor, drift: Tensor, factor: Tensor, order: Tensor) -> Tensor:
    """W + W C H⁻¹: the weight of least Σ ‖W x₀ - W' x‖², as if x₀ was still there.

    Args:
        weight: W (out, in), float32.
        drift: C (in, in), the mean of 2 (x₀ - x) xᵀ.
        factor: U (in, in) of H with rows and columns in `order`.
        order: (in,).

    Returns:
        W' (out, in), float32.
    """
    moved = weight.clone()
    moved[:, order] += (weight @ drift)[:, order] @ factor.T @ factor
    return moved


def choose_codes(
    weight: Tensor, factor: Tensor, scale: Tensor, zero: Tensor, bits: int, order: Tensor, format: NumberFormat = "int"
) -> Tensor:
    """Codes of least output error, column by column (Frantar et al. 2022, algorithm 1).

    Args:
        weight: W (out, in), float32.
        factor: U (in, in) of H with rows and columns in `order`.
        scale: s (out, groups), of the groups as they lie in W.
        zero: z (out, groups), int8.
        bits: Width of a code.
        order: (in,), columns as they are to be taken.
        format: What a code is: errors are made good on whatever grid they are made on.

    Returns:
        Q (out, in), of `numerics.code_dtype`.
    """
    import torch

    from strop.numerics import code_dtype, round_codes_

    width = weight.shape[1]
    group_of = order // (width // scale.shape[1])
    # Columns become rows: each step reads and writes contiguous memory.
    w, s, z = weight.T[order].contiguous(), scale.T[group_of].contiguous(), zero.float().T[group_of].contiguous()
    q, diagonal = torch.empty_like(w), factor.diagonal().tolist()
    for start in range(0, width, BLOCK_SIZE):
        stop = min(start + BLOCK_SIZE, width)
        errors = torch.empty_like(w[start:stop])
        for i in range(start, stop):
            round_codes_(torch.div(w[i], s[i], out=q[i]), z[i], bits, format)
            error = torch.sub(q[i], z[i], out=errors[i - start]).mul_(s[i]).sub_(w[i]).div_(-diagonal[i])
            w[i + 1 : stop].addr_(factor[i, i + 1 : stop], error, alpha=-1)
        w[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return q.to(code_dtype(format))[order.argsort()].T.contiguous()


def relative_error(weight: Tensor, other: Tensor, hessian: Tensor) -> float:
    """Energy of the outputs' error by that of the outputs: Σ ‖(W - Ŵ) x‖² / Σ ‖W x‖² over the calibration text."""
    import torch

    lost, total = ((x @ hessian).mul_(x).sum(dtype=torch.float64) for x in (weight - other, weight))
    return float(lost / total) if total > 0 else 0.0


# Files.


def _path(scratch: Path, linear: Linear) -> Path:
    return scratch / f"{linear.name}.safetensors"


def _keep(path: Path, solution: Solution, found: dict[str, float]) -> None:
    import torch
    from safetensors.torch import save

    tensors = {"codes": solution.codes, "scale": solution.scale, "zero": solution.zero}
    numbers = {"damping": solution.damping, **found}
    stored = {name: x.cpu().contiguous() for name, x in tensors.items()}
    write_atomically(path, save({**stored, **{k: torch.tensor(x, dtype=torch.float64) for k, x in numbers.items()}}))


def _load(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def _changed(spec: ModelSpec, linears: Sequence[Linear], scratch: Path) -> Iterator[tuple[str, Tensor | None]]:
    """Stored tensors that take the place of the weights of `linears`. `spec`: the table of the output."""
    from strop.model import packed_tensors
    from strop.numerics import static_scale

    quantized = {x.name: x for x in spec.linears()}
    for linear in linears:
        kept = _load(_path(scratch, linear))
        form, unit = quantized[linear.name].quantization, kept["unit"].float().reshape(1)
        assert form is not None
        parts = (kept["codes"], kept["scale"], kept["zero"], static_scale(kept["largest"], form.format))
        yield from packed_tensors(quantized[linear.name], *parts, global_scale=unit).items()
