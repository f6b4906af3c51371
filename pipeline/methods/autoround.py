"""AutoRound: which way each weight is rounded, and each group's scale, learned by signed gradient descent.

Cheng et al. 2023, arXiv 2309.05516. A block is learned as a whole: its output, on inputs that the quantized blocks
before it give, is drawn to the unquantized block's output in the unquantized model. Other than in the paper, scales
start from least error weighted with the inputs' energy instead of from extremes, one multiplier moves both ends of a
group while the zero point stays, steps are smaller, and an error of the block's output counts by what it does to the
model's predictions (`calibration.blocks.sensitivities`) instead of by its square.

Legend: W (out, in) weights, Q (out, in) codes, s and z (out, groups) scales and zero points, V (out, in) what is added
to W / s before it is rounded, F (hidden, hidden) sensitivity of the predictions to the block's output.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from strop.artifact import Artifact, write_atomically
from strop.errors import UserError
from strop.spec import Linear, ModelSpec, Quantization
from strop.stage import BFLOAT16_SPEEDUP, GFLOPS_PER_THREAD, Context, Plan, Stage

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from strop.calibration.blocks import Block
    from strop.calibration.capture import Group

log = logging.getLogger(__name__)

BATCH_TOKENS = 1024
"""Tokens of one step."""
DRAWS = 3
"""Steps that see a sample, on average and where there are enough samples: more samples than that only cost time."""
SENSITIVITY_SAMPLES = 8
"""Samples that F is computed from."""
PLAIN = 0.1
"""Part of F that is replaced by a multiple of the identity: what so few tokens say of F is noisy."""
RATE = 0.5
"""Of the first step, by the number of steps; 1 in the paper. It falls linearly to zero."""
SCALE_RATE = 0.1
"""How fast a scale's multiplier moves, compared with V. All weights of its group move with it."""
REACH = 0.5
"""V stays within it: a weight takes one of the two codes next to it."""
PREPARED_TOKENS = 2**15
"""Tokens that H and C are computed from."""
START = 0.4
"""Largest distance of a weight to its first code, in steps: at 0.5 the smallest V would take another code."""
DAMPING = 0.01
"""Added to H's diagonal, as a part of the diagonal's mean."""
CACHED_WEIGHTS = 2**16
"""Weights that are taken through a step at once: they stay in the processor's cache."""


class AutoRound(Stage):
    """Learn which way weights are rounded, block by block, so that each block's output stays what it was.

    Attributes:
        bits: Width of a code.
        group_size: Inputs that share one scale; null: one scale per output channel.
        symmetric: Without zero points.
        targets: Patterns over full linear names, for example `*.mlp.*`; null: every linear inside the layers.
        iterations: Steps per block, each over 1024 tokens. So many samples are used that each is seen about three
            times, and the others are left out: at 50 iterations 34 of 512 tokens are used.
        drift_correction: How much of the inputs' drift away from the unquantized model's is made good before anything
            is learned, as in gptq.
    """

    needs_calibration: ClassVar[bool] = True

    bits: Literal[2, 3, 4, 8] = 4
    group_size: int | None = Field(default=64, gt=0)
    symmetric: bool = True
    targets: list[str] | None = Field(default=None, min_length=1)
    iterations: int = Field(default=200, gt=0)
    drift_correction: float = Field(default=0.5, ge=0, le=1)

    def plan(self, spec: ModelSpec, num_calibration_tokens: int) -> Plan:
        """See `Stage.plan`."""
        result, linears = self._quantized(spec)
        tokens = min(num_calibration_tokens, self.iterations * BATCH_TOKENS // DRAWS)
        followed = min(tokens, SENSITIVITY_SAMPLES * 512)
        inside = sum(x.in_features * x.out_features for layer in spec.layers for x in layer.linears.values())
        learned = sum(x.in_features * x.out_features for x in linears)
        head = spec.vocab_size * spec.hidden_size
        products = 2 * tokens * inside + followed * (3 * inside + 2 * head)
        prepared = min(tokens, PREPARED_TOKENS)
        products += prepared * (2 * inside + sum(x.in_features**2 for x in linears))  # about two linears share H and C
        products += self.iterations * min(num_calibration_tokens, BATCH_TOKENS) * 3 * learned
        block = max(sum(x.in_features * x.out_features for x in layer.linears.values()) for layer in spec.layers)
        widest = max(layer.intermediate_size for layer in spec.layers)
        step = BATCH_TOKENS * (12 * spec.hidden_size + 6 * widest)  # what a graph keeps
        note = f"{self.iterations} iterations use about {tokens} of the {num_calibration_tokens} calibration tokens"
        return Plan(
            spec=result,
            size_bytes=result.size_bytes(),
            memory_bytes=4
            * (2 * tokens * spec.hidden_size + 2 * prepared * (spec.hidden_size + widest) + step + 7 * block)
            + max(2 * followed * spec.hidden_size * len(spec.layers), 4 * head),
            seconds=2 * products / (2 * GFLOPS_PER_THREAD * 1e9 * BFLOAT16_SPEEDUP),
            notes=() if tokens == num_calibration_tokens else (note,),
        )

    def run(self, source: Artifact, out: Path, context: Context) -> dict[str, Any]:
        """See `Stage.run`. Finished blocks are kept in the scratch folder; a killed run goes on after them."""
        import numpy as np
        import torch

        from strop.calibration.blocks import walk_blocks
        from strop.model import read_spec, save_checkpoint

        torch.set_num_threads(context.threads)
        assert context.calibration is not None, "the runner provides it: needs_calibration"
        ids = torch.from_numpy(np.load(context.calibration)).to(context.device)
        ids = ids[: math.ceil(self.iterations * _batch_size(ids) / DRAWS)]
        spec = read_spec(source.path)
        result, linears = self._quantized(spec)
        waiting = {x.name for x in linears}
        first = next(i for i in range(len(spec.layers)) if waiting & {x.name for x in spec.layer_linears(i)})
        _measure_sensitivities(source.path, spec, ids, first, context)

        num_prepared = min(len(ids), math.ceil(PREPARED_TOKENS / ids.shape[1]))
        starts: dict[str, Rounding] = {}

        def prepare(group: Group) -> None:
            chosen = [x for x in group.linears if x.name in waiting]
            if chosen and not _path(context.scratch, group.layer).exists():
                starts.update(self._start(group, chosen))

        def visit(block: Block) -> bool:
            chosen = [x for x in block.linears if x.name in waiting]
            if chosen:
                if not _path(context.scratch, block.index).exists():
                    self._learn(block, chosen, starts, context)
                    starts.clear()
                kept = _load(_path(context.scratch, block.index))
                for linear in chosen:
                    _set_weight(block, linear, _dense(kept, linear))
                waiting.difference_update(x.name for x in chosen)
                context.progress("autoround", len(linears) - len(waiting), len(linears))
            return bool(waiting)

        walk_blocks(source.path, spec, ids, visit, prepare=prepare, num_prepared=num_prepared)
        save_checkpoint(out, result, source.path, _changed(result, linears, context.scratch))
        return {"spec": result, "report": {"num_samples": len(ids), **_report(spec, context.scratch)}}

    def _quantization(self) -> Quantization:
        return Quantization(self.bits, self.group_size, self.symmetric)

    def _quantized(self, spec: ModelSpec) -> tuple[ModelSpec, list[Linear]]:
        """The table of the output, and the linears of the input that change."""
        spec.refuse_experts("autoround", "rtn, hqq, gptq, awq, smoothquant, rotate")
        linears = spec.match(self.targets)
        if spec.head in linears:
            raise UserError(
                f"targets: {spec.head.name} is outside the blocks, where autoround has no output to learn from; "
                "allowed: linears inside the layers (rtn and gptq take the head)"
            )
        return spec.quantize({x.name: self._quantization() for x in linears}), linears

    def _start(self, group: Group, linears: Sequence[Linear]) -> dict[str, Rounding]:
        """Quantize linears that share their inputs as gptq does, in place, for learning to go on from there.

        Raises:
            UserError: The inputs are not finite.
        """
        from strop.calibration.capture import drift, hessian
        from strop.methods._compensation import choose_codes, correct_drift
        from strop.numerics import quantize, search_scales

        h = hessian(group.inputs())
        if not bool(h.isfinite().all()):
            place = ", ".join(x.name for x in linears)
            raise UserError(f"autoround: {place}: the inputs are not finite on the calibration text")
        c = drift(group.pairs()) * self.drift_correction if self.drift_correction else None
        order = h.diagonal().argsort(descending=True, stable=True)
        factor = damped_factor(h[order][:, order])
        found = {}
        for linear in linears:
            weight = group.weights[linear.name].clone()
            if factor is not None and c is not None:
                weight = correct_drift(weight, c, factor, order)
            scale, zero = search_scales(weight, self._quantization(), h.diagonal())
            if factor is None:
                codes = quantize(weight, scale, zero, self.bits)
            else:
                codes = choose_codes(weight, factor, scale, zero, self.bits, order)
            found[linear.name] = Rounding(near_codes(weight, codes, scale, zero), scale, zero, self.bits)
            group.weights[linear.name].copy_(found[linear.name].weight_now())
        return found

    def _learn(
        self, block: Block, linears: Sequence[Linear], roundings: Mapping[str, Rounding], context: Context
    ) -> None:
        """Learn the codes of a block's linears, and keep them.

        Raises:
            UserError: The block's outputs are not finite.
        """
        import numpy as np
        import torch

        if not bool(block.targets.isfinite().all()):
            place = linears[0].name.split(f".{block.index}.")[0]
            raise UserError(f"autoround: {place}.{block.index}: the outputs are not finite on the calibration text")
        for linear in linears:
            _set_weight(block, linear, roundings[linear.name].weight_now())
        kept = _load(_sensitivity_path(context.scratch, block.index))["sensitivity"]
        sensitivity = plainer(kept.to(block.targets.device))
        size = _batch_size(block.targets)
        generator = np.random.default_rng([context.seed, block.index])
        before = relative_error(block, torch.arange(size))
        parameters = {name: block.module(name).weight.requires_grad_() for name in roundings}
        for step, rows in enumerate(batches(len(block.targets), size, self.iterations, generator)):
            with torch.enable_grad():
                y = block.compute(rows)
            torch.autograd.backward(y, output_gradient(y.detach(), block.targets[rows], sensitivity))
            rate = RATE * (1 - step / self.iterations) / self.iterations
            for name, rounding in roundings.items():
                gradient = parameters[name].grad
                assert gradient is not None
                rounding.descend(gradient, rate)
                rounding.write(parameters[name].detach())
                parameters[name].grad = None
        after = relative_error(block, torch.arange(size))
        log.debug("autoround: block %d: error %.4g, learned from %.4g", block.index, after, before)
        _keep(_path(context.scratch, block.index), roundings, before, after)


# Maths.


class Rounding:
    """How one linear is rounded: Ŵ = (Q - z) s with Q = round(W / s + z + V) within the code's range, and s = m s₀.

    Attributes:
        offset: V (out, groups, group size), from -REACH to REACH.
        multiplier: m (out, groups, 1).
    """

    def __init__(self, weight: Tensor, scale: Tensor, zero: Tensor, bits: int) -> None:
        """Start from rounding to nearest.

        Args:
            weight: W (out, in), float32.
            scale: s₀ (out, groups), float32.
            zero: z (out, groups), int8.
            bits: Width of a code.
        """
        import torch

        from strop.numerics import code_range

        self._weight = weight.reshape(*scale.shape, -1)
        self._initial, self._zero = scale[..., None], zero[..., None].float()
        self._lowest, self._highest = code_range(bits)
        num_rows = max(1, CACHED_WEIGHTS // weight.shape[1])
        self._slices = [slice(i, i + num_rows) for i in range(0, len(weight), num_rows)]
        self.offset = torch.zeros_like(self._weight)
        self.multiplier = torch.ones_like(self._initial)

    def descend(self, gradient: Tensor, rate: float) -> None:
        """Move V and m one step down, in place (Cheng et al. 2023, eq. 3, with rounding passed straight through).

        Args:
            gradient: Of the loss by Ŵ (out, in), any float dtype.
            rate: How far V moves.
        """
        import torch

        scale = self._scale()
        for rows in self._slices:
            s, z = scale[rows], self._zero[rows]
            g = gradient[rows].float().view_as(self._weight[rows])
            u = torch.addcdiv(z, self._weight[rows], s)
            free = (u + self.offset[rows]).round_()
            q = free.clamp(self._lowest, self._highest)
            is_inside = free == q
            # dŴ/ds: Q - z - W / s where rounding decides, Q - z at the ends of the range.
            slope = q.sub_(torch.where(is_inside, u, z)).mul_(g).sum(-1, keepdim=True).mul_(self._initial[rows])
            self.multiplier[rows].sub_(slope.sign_(), alpha=SCALE_RATE * rate)
            self.offset[rows].addcmul_(g.mul_(is_inside).sign_(), s.sign(), value=-rate).clamp_(-REACH, REACH)

    def write(self, out: Tensor) -> None:
        """Put Ŵ into `out` (out, in), any float dtype."""
        scale = self._scale()
        for rows in self._slices:
            out[rows].view_as(self._weight[rows]).copy_(
                self._codes(rows, scale).sub_(self._zero[rows]).mul_(scale[rows])
            )

    def weight_now(self) -> Tensor:
        """Ŵ (out, in), float32."""
        import torch

        found = torch.empty_like(self._weight).flatten(1)
        self.write(found)
        return found

    def solution(self) -> dict[str, Tensor]:
        """codes Q (out, in) int8, scale s (out, groups) float32 holding bfloat16 values, zero z (out, groups) int8."""
        import torch

        scale = self._scale()
        codes = torch.cat([self._codes(rows, scale).to(torch.int8) for rows in self._slices])
        return {"codes": codes.flatten(1), "scale": scale[..., 0], "zero": self._zero[..., 0].to(torch.int8)}

    def _scale(self) -> Tensor:
        from strop.numerics import round_scales

        return round_scales(self._initial * self.multiplier)

    def _codes(self, rows: slice, scale: Tensor) -> Tensor:
        import torch

        u = torch.addcdiv(self._zero[rows], self._weight[rows], scale[rows])
        return u.add_(self.offset[rows]).round_().clamp_(self._lowest, self._highest)


def damped_factor(hessian: Tensor) -> Tensor | None:
    """`inverse_factor` of H (in, in), with as much damping as it takes; None where no damping is enough."""
    from strop.methods._compensation import MOST_DAMPING, inverse_factor

    damping = DAMPING
    while damping <= MOST_DAMPING:
        if (factor := inverse_factor(hessian, damping)) is not None:
            return factor
        damping *= 10
    return None


def near_codes(weight: Tensor, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The weight nearest to W among those within `START` steps of what codes stand for.

    Rounded to nearest it gives the codes, and it is the nearer to another code the more W is on that side.

    Args:
        weight: W (out, in), float32.
        codes: Q (out, in), int8.
        scale: s (out, groups), float32.
        zero: z (out, groups), int8.

    Returns:
        (out, in), float32.
    """
    q, s = codes.float().view(*scale.shape, -1), scale[..., None]
    given = (q - zero[..., None]) * s
    steps = (weight.view_as(given) - given).div_(s).clamp_(-START, START)
    return given.addcmul_(steps, s).flatten(1)


def output_gradient(y: Tensor, target: Tensor, sensitivity: Tensor) -> Tensor:
    """Of ½ Σ eᵀ F e by y, where e is (y - target) / root mean square of the target, token by token.

    Args:
        y: (B, T, hidden), float32.
        target: As y.
        sensitivity: F (hidden, hidden), float32.

    Returns:
        As y. Products are taken in bfloat16: only signs are made of it.
    """
    import torch

    from strop.calibration.blocks import mean_square

    error = (y - target) / mean_square(target)
    return (error.to(torch.bfloat16) @ sensitivity.to(torch.bfloat16)).float()


def plainer(sensitivity: Tensor) -> Tensor:
    """F, `PLAIN` of it replaced by the identity of the same trace, scaled to a mean diagonal of 1.

    The identity alone where F is zero: no output of the block changes a prediction.
    """
    import torch

    identity = torch.eye(len(sensitivity), device=sensitivity.device)
    size = sensitivity.diagonal().mean()
    return identity if size == 0 else (1 - PLAIN) * sensitivity / size + PLAIN * identity


def relative_error(block: Block, rows: Tensor) -> float:
    """Mean over the tokens of some samples: ‖y - target‖² / ‖target‖²."""
    from strop.calibration.blocks import mean_square

    target = block.targets[rows]
    return float((mean_square(block.compute(rows) - target) / mean_square(target)).mean())


def _batch_size(samples: Tensor) -> int:
    """Samples of one step, out of (samples, tokens, ...)."""
    return min(len(samples), max(1, BATCH_TOKENS // samples.shape[1]))


def batches(num_samples: int, size: int, count: int, generator: np.random.Generator) -> Iterator[Tensor]:
    """`count` batches of `size` samples' indices, in random order, each sample once before any comes again."""
    import numpy as np
    import torch

    rounds = math.ceil(count * size / num_samples)
    order = np.concatenate([generator.permutation(num_samples) for _ in range(rounds)])[: count * size]
    return iter(torch.split(torch.from_numpy(order), size))


# Files.


def _measure_sensitivities(folder: Path, spec: ModelSpec, ids: Tensor, first: int, context: Context) -> None:
    """Keep F of every block from `first` on, unless an earlier try did; the first block's is the last to be kept."""
    from safetensors.torch import save

    from strop.calibration.blocks import sensitivities

    if _sensitivity_path(context.scratch, first).exists():
        return
    for index, sensitivity in sensitivities(folder, spec, ids[:SENSITIVITY_SAMPLES], context.seed):
        write_atomically(_sensitivity_path(context.scratch, index), save({"sensitivity": sensitivity.cpu()}))
        context.progress("sensitivity of blocks", len(spec.layers) - index, len(spec.layers) - first)
        if index == first:
            return


def _sensitivity_path(scratch: Path, index: int) -> Path:
    return scratch / f"sensitivity-{index}.safetensors"


def _path(scratch: Path, index: int) -> Path:
    return scratch / f"block-{index}.safetensors"


def _keep(path: Path, roundings: Mapping[str, Rounding], before: float, after: float) -> None:
    import torch
    from safetensors.torch import save

    tensors = {"before": torch.tensor(before), "after": torch.tensor(after)}
    for name, rounding in roundings.items():
        tensors |= {f"{name}.{part}": x.cpu().contiguous() for part, x in rounding.solution().items()}
    write_atomically(path, save(tensors))


def _load(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def _dense(kept: Mapping[str, Tensor], linear: Linear) -> Tensor:
    """Ŵ (out, in), float32."""
    from strop.numerics import dequantize

    parts = (kept[f"{linear.name}.{part}"] for part in ("codes", "scale", "zero"))
    return dequantize(*parts)


def _set_weight(block: Block, linear: Linear, weight: Tensor) -> None:
    """Put Ŵ into its place, in the dtype of products."""
    from torch import nn

    from strop.calibration.blocks import product_dtype

    module, device = block.module(linear.name), block.targets.device
    module.weight = nn.Parameter(weight.to(device, product_dtype(device)), requires_grad=False)


def _changed(spec: ModelSpec, linears: Sequence[Linear], scratch: Path) -> Iterator[tuple[str, Tensor | None]]:
    """Stored tensors that take the place of the weights of `linears`. `spec`: the table of the output."""
    from strop.model import packed_tensors

    names = {x.name for x in linears}
    for index in range(len(spec.layers)):
        quantized = [x for x in spec.layer_linears(index) if x.name in names]
        kept = _load(_path(scratch, index)) if quantized else {}
        for linear in quantized:
            yield f"{linear.name}.weight", None
            codes, scale, zero = (kept[f"{linear.name}.{part}"] for part in ("codes", "scale", "zero"))
            yield from packed_tensors(linear, codes, scale, zero).items()


def _report(spec: ModelSpec, scratch: Path) -> dict[str, Any]:
    """Relative error of each block's output on some samples: rounded to nearest, and learned."""
    found = {i: _load(_path(scratch, i)) for i in range(len(spec.layers)) if _path(scratch, i).exists()}
    return {
        f"relative_error_{key}": {str(i): round(float(x[part]), 6) for i, x in found.items()}
        for key, part in (("rounded", "before"), ("learned", "after"))
    }
