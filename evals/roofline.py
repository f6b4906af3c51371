"""How near a program comes to what the machine allows: bytes and FLOPs of its table against peaks measured beside it.

The roofline (Williams et al. 2009, Communications of the ACM 52(4)): a step takes at least its bytes at the speed of
memory, and at least its FLOPs at the speed of arithmetic. Utilization as in PaLM (Chowdhery et al. 2022, arXiv
2204.02311). Peaks are reached by plain reads and by one large product in the program's dtype, in the same process and
the same rounds as the steps. Weights that fit the processor's cache, and kernels that multiply in less than the
program's dtype (int8), can exceed them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from strop.artifact import Artifact, read_manifest
from strop.errors import UserError
from strop.evals._pairs import WARM_UP_TOKENS, Load, cores_for, warm_up
from strop.evals._rounds import Rounds, circumstances, collect, compare_copies, widen
from strop.evals._work import Work, work
from strop.metric import Direction, Estimate, Kind, MeasureContext, Measurement, Metric
from strop.program import Traits
from strop.spec import ModelSpec
from strop.statistics import Floats, quantile_estimate
from strop.worker import Worker

Bound = Literal["memory", "compute", "overhead"]
STEPS = 8
"""Single tokens timed at each end of a round, by a copy of the program each."""
PASSES = 3
"""Of each probe in a round; the best counts."""
EXPLAINED = 0.5
"""Share of a time that the floor has to make up for memory or arithmetic to be what bounds it."""
OF_THE_MACHINE = ("floor_ms", "ridge", "read_gb_per_s", "gemm_gflop_per_s")
"""What does not depend on which copy of the program is timed."""
QUANTITIES: Mapping[str, tuple[str, Direction]] = {
    "mbu": ("ratio", "higher"),
    "mfu": ("ratio", "higher"),
    "gap": ("ratio", "lower"),
    "decode_ms": ("ms", "lower"),
    "floor_ms": ("ms", "lower"),
    "prefill_ms": ("ms", "lower"),
    "bytes_per_token": ("bytes", "lower"),
    "flops_per_token": ("FLOP", "lower"),
    "decode_intensity": ("FLOP/byte", "neither"),
    "prefill_intensity": ("FLOP/byte", "neither"),
    "ridge": ("FLOP/byte", "neither"),
    "read_gb_per_s": ("GB/s", "neither"),
    "gemm_gflop_per_s": ("GFLOP/s", "neither"),
}


class Roofline(Metric):
    """Memory bandwidth used while decoding, arithmetic used in prefill, and the gap to the floor of a token's time."""

    kind: ClassVar[Kind] = "speed"

    context: int = Field(default=128, ge=0, description="cached tokens while decoding")
    prompt_tokens: int = Field(default=256, ge=1, description="tokens of the prefill")
    repeats: int = Field(default=20, ge=5, description="rounds of decoding, both probes and prefill")
    probe_bytes: int = Field(
        default=1 << 28, ge=1 << 20, description="read by the memory probe, far more than the caches hold"
    )
    gemm_size: int = Field(default=2048, ge=16, description="rows and columns of the matrices that are multiplied")

    def names(self) -> Mapping[str, str]:
        """See `Metric.names`. `mbu`, `gap` and `floor_ms` are of decoding a token, `mfu` is of prefill."""
        return {name: unit for name, (unit, _) in QUANTITIES.items()}

    def measure(
        self,
        program: Artifact,
        references: Mapping[str, Artifact],  # noqa: ARG002 (the contract of a metric)
        context: MeasureContext,
    ) -> dict[str, Measurement]:
        """See `Metric.measure`.

        Empty where no table says what the program holds (families only transformers knows), and on a GPU, whose peaks
        are not those that are probed here.
        """
        manifest = read_manifest(program.path)
        if manifest.spec is None or manifest.traits is None or manifest.spec["opaque_bytes"] is not None:
            return {}
        spec, traits = ModelSpec.from_json(manifest.spec), Traits(**manifest.traits)
        if traits.device != "cpu":
            return {}
        if max(self.context + 1, self.prompt_tokens) > traits.context:
            raise UserError(
                f"roofline: context {self.context} and prompt_tokens {self.prompt_tokens} do not fit the context of "
                f"{program.path.name}, {traits.context} tokens"
            )
        job = Job(work(spec, traits, self.context, 1), work(spec, traits, 0, self.prompt_tokens), context.seed)
        averages, cores = os.getloadavg(), cores_for(context.threads)
        with ExitStack() as stack:
            worker, twin = (stack.enter_context(Worker(program.path, context.threads, cores)) for _ in "AA")
            for x in (worker, twin):
                warm_up(x, Load([range(WARM_UP_TOKENS)], WARM_UP_TOKENS, context.threads))
            trial = self._time(worker, twin, context)
        detail = {"load_average_before": averages[0], "cores": cores, **describe(job, trial)}
        protocol = {**self.model_dump(), **circumstances(program, context)}
        return {
            name: replace(x, protocol=protocol, detail=detail if name == "mbu" else {})
            for name, x in summarize(job, trial).items()
        }

    def _time(self, worker: Worker, twin: Worker, context: MeasureContext) -> Trial:
        """All rounds. Both copies decode, one at each end of a round."""
        ours, theirs = (
            partial(x.steps, self.context, 1, count=STEPS, capacity=self.context + 1) for x in (worker, twin)
        )
        pieces = [
            ours,
            partial(worker.read, self.probe_bytes, PASSES),
            partial(worker.multiply, self.gemm_size, PASSES),
            partial(worker.steps, 0, self.prompt_tokens, count=1, capacity=self.prompt_tokens),
            theirs,
        ]
        rounds = collect(pieces, self.repeats, context)
        usual, best = rounds.seconds(), rounds.seconds(best=True)
        return Trial(
            usual[:, [0, -1]], usual[:, 3], self.probe_bytes / best[:, 1], 2 * self.gemm_size**3 / best[:, 2], rounds
        )


@dataclass(frozen=True)
class Job:
    """What the program was to do.

    Attributes:
        decode: Of one token after the cached ones.
        prefill: Of the whole prompt.
        seed: Of the bootstrap.
    """

    decode: Work
    prefill: Work
    seed: int


@dataclass(frozen=True)
class Trial:
    """What was timed, round by round.

    Attributes:
        decode_s: (rounds, 2), of two copies of the program.
        prefill_s: (rounds,).
        bytes_per_s, flops_per_s: (rounds,), what the probes reached.
        rounds: Where it is from.
    """

    decode_s: Floats
    prefill_s: Floats
    bytes_per_s: Floats
    flops_per_s: Floats
    rounds: Rounds

    def uses(self, done: Work, seconds: Floats) -> tuple[Floats, Floats]:
        """(rounds,) each: shares of the peak of memory and of arithmetic that some work came to."""
        return done.size_bytes / (seconds * self.bytes_per_s), done.flops / (seconds * self.flops_per_s)


def verdict(mbu: float, mfu: float) -> Bound:
    """What bounds a step: memory or arithmetic, whichever it uses more of; but overhead where it uses less than half.

    Half of the time or more is then spent on what no byte and no FLOP explains: starting kernels, threads that wait
    for each other, unpacking codes, activations.

    Args:
        mbu: Share of the memory's peak.
        mfu: Share of the arithmetic's peak.
    """
    if max(mbu, mfu) < EXPLAINED:
        return "overhead"
    return "memory" if mbu >= mfu else "compute"


def summarize(job: Job, trial: Trial) -> dict[str, Measurement]:
    """Every quantity, protocol and detail left out: what is counted exactly, the rest as medians over rounds."""
    seconds = trial.decode_s.mean(axis=1)
    mbu, decode_mfu = trial.uses(job.decode, seconds)
    floor = seconds * np.maximum(mbu, decode_mfu)
    counted = {
        "bytes_per_token": float(job.decode.size_bytes),
        "flops_per_token": float(job.decode.flops),
        "decode_intensity": job.decode.intensity,
        "prefill_intensity": job.prefill.intensity,
    }
    timed = {
        "mbu": mbu,
        "mfu": trial.uses(job.prefill, trial.prefill_s)[1],
        "gap": seconds / floor,
        "decode_ms": 1000 * seconds,
        "floor_ms": 1000 * floor,
        "prefill_ms": 1000 * trial.prefill_s,
        "ridge": trial.flops_per_s / trial.bytes_per_s,
        "read_gb_per_s": trial.bytes_per_s / 1e9,
        "gemm_gflop_per_s": trial.flops_per_s / 1e9,
    }
    number, copies = len(seconds), compare_copies(trial.decode_s, job.seed)
    found = {}
    for name, (unit, direction) in QUANTITIES.items():
        if name in counted:
            found[name] = Measurement(Estimate.exact(counted[name]), unit, direction, 1, {})
        else:
            estimate = _median(timed[name], job.seed)
            estimate = estimate if name in OF_THE_MACHINE else widen(estimate, copies)
            estimate = replace(estimate, is_noisy=trial.rounds.is_noisy)
            found[name] = Measurement(estimate, unit, direction, number, {})
    return found


def describe(job: Job, trial: Trial) -> dict[str, Any]:
    """What the report shows beside the quantities, JSON: both points under the roof, and what they consist of."""
    points, copies = {}, compare_copies(trial.decode_s, job.seed)
    for name, done, seconds in (
        ("decode", job.decode, trial.decode_s.mean(axis=1)),
        ("prefill", job.prefill, trial.prefill_s),
    ):
        mbu, mfu = (widen(_median(x, job.seed), copies) for x in trial.uses(done, seconds))
        points[name] = {
            "bound": verdict(mbu.value, mfu.value),
            "intensity": done.intensity,
            "flops_per_s": asdict(widen(_median(done.flops / seconds, job.seed), copies)),
            "mbu": asdict(mbu),
            "mfu": asdict(mfu),
            "bytes": dict(done.read_bytes),
            "flops": dict(done.flops_of),
        }
    return {
        "points": points,
        "peaks": {
            "bytes_per_s": asdict(_median(trial.bytes_per_s, job.seed)),
            "flops_per_s": asdict(_median(trial.flops_per_s, job.seed)),
        },
        "rounds": len(trial.rounds.laps),
        "disturbed": list(trial.rounds.objections),
        "same_program": asdict(copies),
    }


def _median(values: Floats, seed: int) -> Estimate:
    return quantile_estimate(values, range(len(values)), 0.5, seed=seed)
