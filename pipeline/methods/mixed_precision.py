"""Bits by sensitivity: each group of linears takes the width that a budget of average bits affords it, chosen exactly.

How much a group minds is measured: the KL divergence between what the model predicts and what it predicts with that
group alone rounded, on a little calibration text, at the width nearest to the budget. Other widths follow from it by
the error of the group's outputs, to whose square KL is proportional where it is small. Widths of least total KL within
the budget are a multiple-choice knapsack (Kellerer et al. 2004, Knapsack Problems, chapter 11), solved exactly; the sum
over groups as in HAWQ-V3 (Yao et al. 2021, arXiv 2011.10680), with KL in place of a second-order estimate of the loss.
Left out: errors that groups make together.

Legend: W (out, in) weights of a linear, Ŵ rounded. A group: linears of a block that read the same input, such as q, k
and v. They share a width, because engines that run them as one matrix need that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from strop.artifact import Artifact, write_atomically
from strop.errors import UserError
from strop.methods._compensation import Compensation
from strop.spec import Linear, ModelSpec, Quantization
from strop.stage import GFLOPS_PER_THREAD, Context, Plan, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from strop.calibration.sensitivity import Site
    from strop.model import Weights

SAMPLE_TOKENS = 128
"""Length that calibration samples are cut to where there are enough: many short texts say more than a long one."""
HEAD_TOKENS = 128
"""Tokens whose logits are in memory together (see calibration/sensitivity.py)."""
SEARCH_OPERATIONS = 300
"""For each weight and width: every shrink with both signs, a few operations each."""


class MixedPrecision(Stage):
    """Quantize linears to different widths, the most bits where they matter most.

    Attributes:
        average_bits: Largest average width of a code over the weights that are quantized. Scales and zero points come
            on top.
        choices: Widths of a code to choose from.
        group_size: Inputs that share one scale; null: one scale per output channel.
        symmetric: Without zero points.
        targets: Patterns over full linear names, for example `*.mlp.*`; null: every linear inside the layers.
        tokens: So many calibration tokens are used to find out what matters: the time grows with them.
        rounding: How codes are chosen once the widths are known: `gptq`, as that stage does by default, on all of the
            calibration text; `nearest` takes no more time.
    """

    needs_calibration: ClassVar[bool] = True

    average_bits: float = Field(default=4.0, gt=0)
    choices: list[Literal[2, 3, 4, 8]] = Field(default=[2, 3, 4, 8], min_length=1)
    group_size: int | None = Field(default=64, gt=0)
    symmetric: bool = True
    targets: list[str] | None = Field(default=None, min_length=1)
    tokens: int = Field(default=512, gt=0)
    rounding: Literal["gptq", "nearest"] = "gptq"

    def plan(self, spec: ModelSpec, num_calibration_tokens: int) -> Plan:
        """See `Stage.plan`. The table is a stand-in of the same budget: calibration decides which linear gets what."""
        groups = self._groups(spec)
        result = spec.quantize(self._quantizations(groups, _even(_costs(groups, self._widths), self._budget(groups))))
        blocks = [sum(x.in_features * x.out_features for x in layer.linears.values()) for layer in spec.layers]
        head = spec.vocab_size * spec.hidden_size
        tokens = min(self.tokens, num_calibration_tokens)
        layers = [x for x, layer in enumerate(spec.layers) for group in groups if group[0] in layer.linears.values()]
        forward = sum(2 * (sum(blocks[x:]) + head) for x in layers)
        rounding = (len(self._widths) + 1) * (SEARCH_OPERATIONS + 2 * tokens) * _num_weights(groups)
        changed = max(layers.count(x) for x in layers)
        memory = (
            2 * head + 2 * max(blocks) + 2 * changed * tokens * spec.hidden_size + 6 * HEAD_TOKENS * spec.vocab_size
        )
        linears = [x for group in groups for x in group]
        after = Compensation().cost(spec, linears, num_calibration_tokens) if self.rounding == "gptq" else (0, 0.0)
        notes = [f"which linear gets how many bits follows from calibration: at most {self.average_bits:g} on average"]
        if not self.symmetric and len(self._widths) > 1:
            notes.append("transformers cannot open asymmetric codes of several widths: strop and its runtimes can")
        if num_calibration_tokens < self.tokens:
            notes.append(f"tokens: there are only {num_calibration_tokens} calibration tokens for {self.tokens}")
        return Plan(
            spec=result,
            size_bytes=result.size_bytes(),
            memory_bytes=max(4 * memory, after[0]),
            seconds=(tokens * forward + rounding) / (2 * GFLOPS_PER_THREAD * 1e9) + after[1],
            notes=tuple(notes),
        )

    def run(self, source: Artifact, out: Path, context: Context) -> dict[str, Any]:
        """See `Stage.run`. What a block gave is kept in the scratch folder; a killed run goes on after it."""
        import torch

        from strop.calibration.sensitivity import divergences
        from strop.model import Weights, read_spec, save_checkpoint

        torch.set_num_threads(context.threads)
        assert context.calibration is not None, "the runner provides it: needs_calibration"
        ids = self._sample(torch.from_numpy(np.load(context.calibration))).to(context.device)
        spec = read_spec(source.path)
        groups = self._groups(spec)
        spec.quantize(self._quantizations(groups, [0] * len(groups)))  # refuses what cannot be, before it is measured
        budget = self._budget(groups)
        names = {x.name for group in groups for x in group}
        layers = [i for i, layer in enumerate(spec.layers) if any(x.name in names for x in layer.linears.values())]
        waiting = [x for x in layers if not _path(context.scratch, x).exists()]
        trials: dict[str, _Trial] = {}

        def vary(site: Site) -> Iterator[tuple[str, dict[str, Tensor]]]:
            linears = [x for x in site.linears if x.name in names]
            if linears:
                trials[linears[0].name] = trial = self._try(site, linears)
                if trial.reference is not None:
                    yield linears[0].name, trial.rounded

        for layer, found in divergences(source.path, spec, ids, vary, layers=waiting):
            _keep(_path(context.scratch, layer), {name: x.measured(found.get(name, 0.0)) for name, x in trials.items()})
            trials.clear()
            context.progress("mixed_precision", layers.index(layer) + 1, len(layers))
        measured = {name: x for layer in layers for name, x in _load(_path(context.scratch, layer)).items()}
        table = [measured[group[0].name].losses for group in groups]
        chosen = allocate(_costs(groups, self._widths), table, budget)
        forms = self._quantizations(groups, chosen)
        result = spec.quantize(forms)
        report = self._report(groups, table, chosen) | {
            "num_tokens": ids.numel(),
            "without_inputs": [x.name for group in groups if not measured[group[0].name].energy.any() for x in group],
        }
        if self.rounding == "gptq":
            report["gptq"] = Compensation().quantize(source, out, context, forms)["report"]
            return {"spec": result, "report": report}
        with Weights(source.path) as weights:
            save_checkpoint(out, result, source.path, _changed(weights, result, groups, measured))
        return {"spec": result, "report": report}

    @property
    def _widths(self) -> list[int]:
        """The choices, fewest bits first."""
        return sorted(set(self.choices))

    def _quantization(self, bits: int) -> Quantization:
        return Quantization(bits, self.group_size, self.symmetric)

    def _quantizations(self, groups: Sequence[Sequence[Linear]], chosen: Sequence[int]) -> dict[str, Quantization]:
        """Linear name -> its quantization. `chosen`: an index into the widths for each group."""
        return {
            x.name: self._quantization(self._widths[choice])
            for group, choice in zip(groups, chosen, strict=True)
            for x in group
        }

    def _groups(self, spec: ModelSpec) -> list[list[Linear]]:
        """What shares a width: of the linears that change, those of a block that read the same input.

        Raises:
            UserError: `targets` match nothing, or the head.
        """
        spec.refuse_experts("mixed_precision", "rtn, hqq, gptq, awq, smoothquant, rotate")
        names = {x.name for x in spec.match(self.targets)}
        if spec.head.name in names:
            raise UserError(
                f"targets: {spec.head.name} is matched, but only linears inside the layers can be: give the head a "
                "stage of its own"
            )
        groups = ([x for x in group if x.name in names] for layer in spec.layers for group in layer.groups())
        return [x for x in groups if x]

    def _budget(self, groups: Sequence[Sequence[Linear]]) -> int:
        """Bits of all codes together.

        Raises:
            UserError: No choice is small enough, or the largest everywhere leaves some of it unused.
        """
        least, most = self._widths[0], self._widths[-1]
        if not least <= self.average_bits <= most:
            raise UserError(
                f"average_bits {self.average_bits:g} cannot be reached with choices {self._widths}; allowed: "
                f"{least} to {most}"
            )
        return math.floor(self.average_bits * _num_weights(groups))

    def _sample(self, ids: Tensor) -> Tensor:
        """(N, T) of the calibration ids (samples, length): at least `tokens`, where there are so many."""
        length = min(ids.shape[1], max(SAMPLE_TOKENS, math.ceil(self.tokens / len(ids))))
        return ids[: math.ceil(self.tokens / length), :length]

    def _try(self, site: Site, linears: Sequence[Linear]) -> _Trial:
        """Round a group to every width, the one nearest to the budget first.

        Raises:
            UserError: Its inputs are not finite.
        """
        from strop.numerics import dequantize

        energy = site.inputs.square().sum(0)
        if not bool(energy.isfinite().all()):
            raise UserError(f"mixed_precision: {linears[0].name}: the inputs are not finite on the calibration text")
        errors: dict[int, float] = {}
        reference: int | None = None
        kept: dict[str, Tensor] = {}
        for bits in sorted(self._widths, key=lambda x: abs(x - self.average_bits)):
            form = self._quantization(bits)
            rounded = {x.name: dequantize(*_round(site.weights[x.name], form, energy)) for x in linears}
            errors[bits] = sum(output_error(site.weights[x] - w, site.inputs) for x, w in rounded.items())
            if reference is None and errors[bits] > 0:
                reference, kept = bits, rounded
        return _Trial(energy, [errors[bits] for bits in self._widths], reference and errors[reference], kept)

    def _report(
        self, groups: Sequence[Sequence[Linear]], table: Sequence[Sequence[float]], chosen: Sequence[int]
    ) -> dict[str, Any]:
        """Who got what, and what the sum over groups predicts of it and of the best single width within the budget."""
        used = sum(cost[choice] for cost, choice in zip(_costs(groups, self._widths), chosen, strict=True))
        uniform = max(i for i, bits in enumerate(self._widths) if bits <= self.average_bits)
        best = min(range(uniform + 1), key=lambda i: sum(row[i] for row in table))
        return {
            "average_bits": round(used / _num_weights(groups), 6),
            "predicted_kl": _rounded_number(sum(row[choice] for row, choice in zip(table, chosen, strict=True))),
            "uniform": {"bits": self._widths[best], "predicted_kl": _rounded_number(sum(row[best] for row in table))},
            "bits": {name: q.bits for name, q in self._quantizations(groups, chosen).items()},
            "kl": {
                " ".join(x.name for x in group): {
                    str(bits): _rounded_number(loss) for bits, loss in zip(self._widths, row, strict=True)
                }
                for group, row in zip(groups, table, strict=True)
            },
        }


@dataclass(frozen=True)
class Measured:
    """What is known of a group.

    Attributes:
        losses: KL at each width, fewest bits first.
        energy: Σ x² of each of its inputs (in,), which scales are searched with.
    """

    losses: list[float]
    energy: Tensor


@dataclass(frozen=True)
class _Trial:
    """A group rounded to every width.

    Attributes:
        energy: As in `Measured`.
        errors: Σ ‖(W - Ŵ) x‖² at each width, fewest bits first.
        reference: Of the width that `rounded` is of; None where no width makes an error.
        rounded: Linear name -> Ŵ.
    """

    energy: Tensor
    errors: list[float]
    reference: float | None
    rounded: dict[str, Tensor]

    def measured(self, kl: float) -> Measured:
        """With the KL that `rounded` gave."""
        return Measured([kl * x / self.reference if self.reference else 0.0 for x in self.errors], self.energy)


# Maths.


def output_error(difference: Tensor, inputs: Tensor) -> float:
    """Σ ‖(W - Ŵ) x‖² of a difference (out, in) over inputs (tokens, in)."""
    import torch

    return float((inputs @ difference.T).square().sum(dtype=torch.float64))


def allocate(costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], budget: int) -> list[int]:
    """One choice for each group, of least total loss among all whose total cost is within the budget.

    Dynamic programming over the pairs (cost, loss) that the first groups can reach, of which only those stay that no
    other beats in both (Nemhauser and Ullmann 1969, Management Science 15): never more than there are different costs.

    Args:
        costs: Of each choice of each group.
        losses: The same shape.
        budget: Largest total cost.

    Returns:
        An index for each group; the cheapest of equal losses.

    Raises:
        ValueError: The cheapest choices together exceed the budget.
    """
    rest = [sum(min(x) for x in costs[i:]) for i in range(len(costs) + 1)]
    if rest[0] > budget:
        raise ValueError(f"no choices cost as little as {budget}, the cheapest cost {rest[0]}")
    cost, loss = np.zeros(1, dtype=np.int64), np.zeros(1)
    reached = []
    for i, (group_costs, group_losses) in enumerate(zip(costs, losses, strict=True)):
        cost = (cost[:, None] + np.array(group_costs, dtype=np.int64)).ravel()
        loss = (loss[:, None] + np.array(group_losses)).ravel()
        order = np.lexsort((loss, cost))
        order = order[cost[order] + rest[i + 1] <= budget]
        least = np.minimum.accumulate(loss[order])
        kept = order[np.concatenate(([True], least[1:] < least[:-1]))]
        cost, loss = cost[kept], loss[kept]
        reached.append(kept)
    chosen = []
    at = len(loss) - 1
    for kept, group_costs in zip(reversed(reached), reversed(costs), strict=True):
        at, choice = divmod(int(kept[at]), len(group_costs))
        chosen.append(choice)
    return chosen[::-1]


def _even(costs: Sequence[Sequence[int]], budget: int) -> list[int]:
    """Choices that fill the budget as evenly as can be: one width for all, one more from the first group on."""
    widest = max(i for i in range(len(costs[0])) if sum(x[i] for x in costs) <= budget)
    chosen, left = [widest] * len(costs), budget - sum(x[widest] for x in costs)
    for i, cost in enumerate(costs):
        step = cost[widest + 1] - cost[widest] if widest + 1 < len(cost) else left + 1
        if step <= left:
            chosen[i], left = widest + 1, left - step
    return chosen


def _costs(groups: Sequence[Sequence[Linear]], widths: Sequence[int]) -> list[list[int]]:
    """Bits of the codes of each group at each width."""
    return [[bits * _num_weights([group]) for bits in widths] for group in groups]


def _num_weights(groups: Sequence[Sequence[Linear]]) -> int:
    return sum(x.in_features * x.out_features for group in groups for x in group)


def _round(weight: Tensor, quantization: Quantization, energy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zero points of W, as `numerics.dequantize` takes them; energy (in,) of the inputs."""
    from strop.numerics import quantize, search_scales

    scale, zero = search_scales(weight, quantization, energy)
    return quantize(weight, scale, zero, quantization.bits), scale, zero


def _rounded_number(value: float) -> float:
    """Six digits: what a report needs."""
    return float(f"{value:.6g}")


# Files.


def _path(scratch: Path, layer: int) -> Path:
    return scratch / f"layer{layer}.safetensors"


def _keep(path: Path, groups: Mapping[str, Measured]) -> None:
    """Keep what was measured of a block, by the first linear of each group.

    Raises:
        UserError: It is not finite.
    """
    import torch
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    for name, group in groups.items():
        if not all(math.isfinite(x) for x in group.losses):
            raise UserError(
                f"mixed_precision: {name}: the model's predictions are not finite on the calibration text, or are not "
                "with it rounded"
            )
        tensors[f"{name} losses"] = torch.tensor(group.losses, dtype=torch.float64)
        tensors[f"{name} energy"] = group.energy.cpu()
    write_atomically(path, save(tensors))


def _load(path: Path) -> dict[str, Measured]:
    """What `_keep` kept."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    names = [key.removesuffix(" losses") for key in tensors if key.endswith(" losses")]
    return {x: Measured(tensors[f"{x} losses"].tolist(), tensors[f"{x} energy"]) for x in names}


def _changed(
    weights: Weights, spec: ModelSpec, groups: Sequence[Sequence[Linear]], measured: Mapping[str, Measured]
) -> Iterator[tuple[str, Tensor | None]]:
    """Stored tensors that take the place of the weights of `groups`. `spec`: the table of the output."""
    from strop.model import load_linear, packed_tensors

    quantized = {x.name: x for x in spec.linears()}
    for group in groups:
        for linear in group:
            stored = quantized[linear.name]
            assert stored.quantization is not None
            found = _round(load_linear(weights, linear), stored.quantization, measured[group[0].name].energy)
            yield f"{linear.name}.weight", None
            yield from packed_tensors(stored, *found).items()
