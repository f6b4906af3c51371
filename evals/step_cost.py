"""What a step costs by its width: t(k) with k new tokens a row, relative to t(1). Speculation pays by this curve.

A step checks k drafted tokens at once; only a measured t(k) tells how many are worth drafting (Chen et al. 2024, arXiv
2402.12374). All widths take turns in rounds, each step after one of its kind that is not timed, and t(k) / t(1) is
paired within a round. The parent on the same runtime takes turns with the program where it is another one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from strop.artifact import Artifact, Manifest, read_manifest
from strop.errors import UserError
from strop.evals._pairs import WARM_UP_TOKENS, Load, cores_for, warm_up
from strop.evals._rounds import Rounds, circumstances, collect, compare_copies, widen
from strop.metric import Estimate, Kind, MeasureContext, Measurement, Metric
from strop.statistics import Floats, paired_log_ratio, quantile_estimate
from strop.worker import Worker

COMPARED = "parent_same_runtime"
"""The one reference whose curve is of use: another runtime's has another shape."""


class StepCost(Metric):
    """Time of one step with k new tokens, in ms and relative to one with a single token."""

    kind: ClassVar[Kind] = "speed"

    widths: list[int] = Field(
        default=[1, 2, 4, 8, 16, 32, 64], min_length=1, description="new tokens of a step; 1 is measured in any case"
    )
    contexts: list[int] = Field(
        default=[128], min_length=1, description="cached tokens; values are of the first, the report has all curves"
    )
    repeats: int = Field(default=20, ge=5, description="rounds, each with one step of every width")

    @model_validator(mode="after")
    def _values_are_allowed(self) -> Self:
        for name, values, least in (("widths", self.widths, 1), ("contexts", self.contexts, 0)):
            if min(values) < least or len(set(values)) < len(values):
                raise ValueError(f"{name} {values}: allowed are different numbers of at least {least}")
        return self

    def names(self) -> Mapping[str, str]:
        """See `Metric.names`."""
        widths = self._widths()
        return {**{f"t{k}_ms": "ms" for k in widths}, **{f"t{k}_ratio": "ratio" for k in widths if k > 1}}

    def refusal(self, name: str) -> str | None:
        """See `Metric.refusal`."""
        asked = re.fullmatch(r"t([1-9]\d*)_(ms|ratio)", name)
        if asked is None or name in self.names() or name == "t1_ratio":
            return None
        return f"{name} is not among what these widths measure: add {asked[1]} to widths {self.widths}"

    def measure(
        self, program: Artifact, references: Mapping[str, Artifact], context: MeasureContext
    ) -> dict[str, Measurement]:
        """See `Metric.measure`. Empty for a model that runs through transformers: it computes a row anew."""
        manifest = read_manifest(program.path)
        if (manifest.spec or {}).get("opaque_bytes") is not None:
            return {}
        self._check_room(program, manifest)
        reference = references.get(COMPARED)
        arms = [program, *([reference] if reference is not None and reference.key != program.key else [])]
        averages, cores = os.getloadavg(), cores_for(context.threads)
        with ExitStack() as stack:
            workers = [stack.enter_context(Worker(x.path, context.threads, cores)) for x in (*arms, program)]
            for worker in workers:
                warm_up(worker, Load([range(WARM_UP_TOKENS)], WARM_UP_TOKENS, context.threads))
            curves = [self._time(workers, cached, context) for cached in self.contexts]
        described = [describe(x, context.seed) for x in curves]
        detail = {"load_average_before": averages[0], "cores": cores, "curves": described}
        protocol = {**self.model_dump(), "logits": "all", **circumstances(program, context)}
        itself = {COMPARED: Estimate.exact(1.0)} if reference is not None and len(arms) == 1 else {}
        return {
            name: replace(x, protocol=protocol, ratios=x.ratios or itself, detail=detail if name == "t1_ms" else {})
            for name, x in summarize(curves[0], context.seed).items()
        }

    def _time(self, workers: Sequence[Worker], cached: int, context: MeasureContext) -> Curve:
        """One context's rounds. A second copy of the program, the last worker, ends each with a step of 1."""
        widths = self._widths()
        capacity = cached + widths[-1]
        *arms, twin = workers
        turns = [(worker, width) for width in widths for worker in arms]
        pieces = [
            partial(worker.steps, cached, width, count=1, capacity=capacity, logits="all")
            for worker, width in (*turns, (twin, 1))
        ]
        rounds = collect(pieces, self.repeats, context)
        times = rounds.seconds()
        seconds = times[:, :-1].reshape(len(times), len(widths), len(arms)).transpose(2, 0, 1)
        return Curve(cached, tuple(widths), seconds, compare_copies(times[:, [0, -1]], context.seed), rounds)

    def _widths(self) -> list[int]:
        return sorted({1, *self.widths})

    def _check_room(self, program: Artifact, manifest: Manifest) -> None:
        """Refuse contexts that the program cannot hold, before any process starts."""
        room = (manifest.traits or {})["context"]
        if max(self.contexts) + max(self.widths) > room:
            raise UserError(
                f"step_cost: contexts up to {max(self.contexts)} and widths up to {max(self.widths)} do not fit "
                f"the context of {program.path.name}, {room} tokens"
            )


@dataclass(frozen=True)
class Curve:
    """t(k) after some cached tokens.

    Attributes:
        cached: How many.
        widths: Of the steps, ascending, 1 first.
        seconds: (programs, rounds, widths), the candidate first.
        copies: Ratio of t(1) of the candidate to that of a second copy.
        rounds: Where the times are from.
    """

    cached: int
    widths: tuple[int, ...]
    seconds: Floats
    copies: Estimate
    rounds: Rounds


def summarize(curve: Curve, seed: int) -> dict[str, Measurement]:
    """Times and ratios of the candidate, each paired with the second program's where there is one; no protocol."""
    found: dict[str, Measurement] = {}
    relative = curve.seconds / curve.seconds[:, :, :1]
    for index, width in enumerate(curve.widths):
        for name, unit, values in (
            (f"t{width}_ms", "ms", 1000 * curve.seconds[:, :, index]),
            (f"t{width}_ratio", "ratio", relative[:, :, index]),
        ):
            if name == "t1_ratio":
                continue
            number = range(values.shape[1])
            ratios = {}
            if len(values) == 2:
                ratios[COMPARED] = _judged(paired_log_ratio(values.T, number, seed=seed), curve, unit)
            estimate = _judged(quantile_estimate(values[0], number, 0.5, seed=seed), curve, unit)
            found[name] = Measurement(estimate, unit, "lower", len(number), {}, ratios)
    return found


def _judged(estimate: Estimate, curve: Curve, unit: str) -> Estimate:
    """With what the guards saw. Ratios compare widths within one process, which is no matter of copies."""
    estimate = widen(estimate, curve.copies) if unit == "ms" else estimate
    return replace(estimate, is_noisy=curve.rounds.is_noisy)


def describe(curve: Curve, seed: int) -> dict[str, Any]:
    """A whole curve as JSON: what a planner of speculation and the report read."""
    return {
        "cached": curve.cached,
        **{
            name: _points(replace(curve, seconds=seconds[None]), seed)
            for name, seconds in zip(("points", COMPARED), curve.seconds, strict=False)  # the second may not be there
        },
        "rounds": len(curve.rounds.laps),
        "disturbed": list(curve.rounds.objections),
        "same_program": asdict(curve.copies),
    }


def _points(curve: Curve, seed: int) -> list[dict[str, Any]]:
    """Of its only program, by width."""
    found = summarize(curve, seed)
    return [
        {
            "width": k,
            "ms": asdict(found[f"t{k}_ms"].estimate),
            "ratio": asdict(found[f"t{k}_ratio"].estimate if k > 1 else Estimate.exact(1.0)),
        }
        for k in curve.widths
    ]
