"""How fast a program generates, as paired ratios to its references: the only figures of speed that a gate should bind.

Candidate and reference are two processes pinned to the same cores, each alone in its turn, prompt by prompt as AB, BA.
It ends after 20, 40 or 80 pairs: as soon as intervals are narrow. Bounds hold over all looks together at about 95 %.
A second copy of the candidate tells whether there is a difference where there should be none: where the kernel puts the
memory of a process alone moves its speed by some percent for as long as it lives. Such a difference widens every bound.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from strop.artifact import Artifact, read_manifest
from strop.errors import UserError
from strop.evals._pairs import Duel, Load, Pair, cores_for, warm_up
from strop.evals._text import Window, cut, digest
from strop.machine import processors
from strop.metric import Direction, Estimate, Kind, MeasureContext, Measurement, Metric
from strop.model import load_tokenizer
from strop.statistics import (
    look_confidence,
    looks,
    min_samples,
    paired_log_ratio,
    quantile_estimate,
    quantile_ratio,
)
from strop.worker import Timing, Worker

NARROW = {"tpot_ms": 0.05, "ttft_ms": 0.1}
"""Widest intervals, log of upper over lower, that need no more pairs. A generation has many tokens, but one first."""
NARROW_SHARE = 0.05
"""Or this share of the log ratio: nobody needs to know a factor of 6 to a hundredth."""
SAME_PAIRS = 10
"""Fewest pairs of the candidate against a second copy of itself."""
SAME_CONFIDENCE = 0.9995
"""Of each bound of that ratio: 1 lies outside by chance in 0.1 % of runs."""


@dataclass(frozen=True)
class Quantity:
    """Something that one generation has.

    Attributes:
        of: From a generation and the prompt's length.
        unit: Of it.
        direction: Which way is better.
        p: Quantile over generations.
    """

    of: Callable[[Timing, int], float]
    unit: str
    direction: Direction
    p: float = 0.5


def _ttft(timing: Timing, prompt_tokens: int) -> float:  # noqa: ARG001 (as every `of`)
    return 1000 * timing.ttft_s


def _tpot(timing: Timing, prompt_tokens: int) -> float:  # noqa: ARG001 (as every `of`)
    return 1000 * timing.tpot_s


TAILS = {"p90": 0.9, "p95": 0.95, "p99": 0.99}
QUANTITIES = {
    "decode_tokens_per_s": Quantity(lambda timing, _: 1 / timing.tpot_s, "tokens/s", "higher"),
    "prefill_tokens_per_s": Quantity(lambda timing, prompt: prompt / timing.ttft_s, "tokens/s", "higher"),
    "ttft_ms": Quantity(_ttft, "ms", "lower"),
    "tpot_ms": Quantity(_tpot, "ms", "lower"),
    **{f"ttft_{name}_ms": Quantity(_ttft, "ms", "lower", p) for name, p in TAILS.items()},
    **{f"tpot_{name}_ms": Quantity(_tpot, "ms", "lower", p) for name, p in TAILS.items()},
}


class Latency(Metric):
    """Time to the first token, time per token and tokens per second of one stream, paired with the references."""

    kind: ClassVar[Kind] = "speed"

    text: str = Field(default="python", min_length=1, description="text source of the prompts (its measuring half)")
    prompts: int = Field(default=20, ge=5, description="different prompts; intervals are clustered by prompt")
    prompt_tokens: int = Field(default=64, ge=2, description="tokens of a prompt")
    new_tokens: int = Field(default=16, ge=2, description="tokens generated after a prompt, end tokens ignored")
    min_pairs: int = Field(default=20, ge=10, description="pairs with each reference before the first look")
    max_pairs: int | None = Field(default=None, description="pairs after which it ends; default: 4 × min_pairs")

    @model_validator(mode="after")
    def _pairs_grow(self) -> Self:
        if self.max_pairs is not None and self.max_pairs < self.min_pairs:
            raise ValueError(f"max_pairs {self.max_pairs} is below min_pairs {self.min_pairs}")
        return self

    def names(self) -> Mapping[str, str]:
        """See `Metric.names`."""
        return {name: quantity.unit for name, quantity in QUANTITIES.items() if self.refusal(name) is None}

    def refusal(self, name: str) -> str | None:
        """See `Metric.refusal`. A percentile counts generations: tokens of one are not independent."""
        needed = min_samples(QUANTITIES[name].p) if name in QUANTITIES and QUANTITIES[name].p > 0.5 else 0
        if needed <= self.min_pairs:
            return None
        return f"{name} needs {needed} generations, min_pairs {self.min_pairs} gives no more: set min_pairs to {needed}"

    def text_sources(self) -> tuple[str, ...]:
        """See `Metric.text_sources`."""
        return (self.text,)

    def measure(
        self, program: Artifact, references: Mapping[str, Artifact], context: MeasureContext
    ) -> dict[str, Measurement]:
        """See `Metric.measure`. A reference that is the program itself has a ratio of exactly 1."""
        windows = self._prompts(program)
        load = Load([x.ids.tolist() for x in windows], self.new_tokens, context.threads)
        cores = cores_for(context.threads)
        averages = os.getloadavg()
        against: dict[str, Duel] = {}
        with ExitStack() as stack:
            ours, twin = (warm_up(stack.enter_context(Worker(program.path, load.threads, cores)), load) for _ in "AA")
            same = Duel(ours, twin, load)
            for name, reference in sorted(references.items()):
                if reference.key == program.key:
                    continue
                known = [x for x in against if references[x].key == reference.key]
                if known:
                    against[name] = against[known[0]]
                    continue
                with Worker(reference.path, load.threads, cores) as worker:
                    against[name] = Duel(ours, warm_up(worker, load), load)
                    self._fight(against[name], same, context)
            same.collect(self._same_pairs(self.min_pairs))
        itself = [name for name in references if name not in against]
        trial = Trial(same, against, itself, look_confidence(len(self._looks())), context.seed)
        protocol = self._protocol(program, windows, context)
        conditions = {"load_average_before": averages[0], "cores": cores, **describe(trial)}
        return {
            name: replace(
                summarize(QUANTITIES[name], trial),
                protocol=protocol,
                detail=conditions if name == "decode_tokens_per_s" else {},
            )
            for name in self.names()
        }

    def _fight(self, duel: Duel, same: Duel, context: MeasureContext) -> None:
        """Collect pairs until the intervals are narrow, the machine is too noisy or the last look has been."""
        for target in self._looks():
            context.progress("timing pairs", len(duel.pairs), self._looks()[-1])
            duel.collect(target)
            same.collect(self._same_pairs(target))
            trial = Trial(same, {"it": duel}, [], look_confidence(len(self._looks())), context.seed)
            are_narrow = all(is_narrow(ratio(QUANTITIES[x], duel.pairs, trial), width) for x, width in NARROW.items())
            if duel.is_noisy or same.is_noisy or are_narrow:
                return

    def _looks(self) -> tuple[int, ...]:
        return looks(self.min_pairs, self.max_pairs or 4 * self.min_pairs)

    def _same_pairs(self, pairs: int) -> int:
        """Pairs against itself that go with so many against a reference."""
        return max(SAME_PAIRS, pairs // 2)

    def _prompts(self, program: Artifact) -> list[Window]:
        tokenizer = load_tokenizer(program.path)
        found = cut(self.text, tokenizer, self.prompts, self.prompt_tokens, self.prompt_tokens)
        if len(found) < self.prompts:
            raise UserError(
                f"prompts: {self.text} gives {len(found)} of {self.prompt_tokens} tokens, {self.prompts} are asked for"
            )
        return found

    def _protocol(self, program: Artifact, windows: Sequence[Window], context: MeasureContext) -> dict[str, Any]:
        traits = read_manifest(program.path).traits or {}
        return {
            "text": self.text,
            "data_sha256": digest(windows),
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "threads": context.threads,
            "cores": len(cores_for(context.threads) or ()),
            "runtime": traits.get("runtime"),
            "dtype": traits.get("dtype"),
            "kernels": traits.get("kernels"),
            **processors(traits.get("device", "cpu")),
        }


@dataclass(frozen=True)
class Trial:
    """Everything that was timed.

    Attributes:
        same: The candidate against a second copy of itself.
        against: Reference -> the candidate against it.
        itself: References that are the candidate.
        confidence: Of each one-sided bound.
        seed: Of the bootstrap.
    """

    same: Duel
    against: Mapping[str, Duel]
    itself: Sequence[str]
    confidence: float
    seed: int

    def generations(self) -> list[Pair]:
        """Each generation of the candidate, as the first of a pair. Its second copy is the same program."""
        twins = [Pair(x.prompt, x.theirs, x.ours) for x in self.same.pairs]
        duels = {id(duel): duel for duel in self.against.values()}.values()  # two references can be one program
        return [*(pair for duel in duels for pair in duel.pairs), *self.same.pairs, *twins]


def summarize(quantity: Quantity, trial: Trial) -> Measurement:
    """Value and ratios of one quantity, protocol and detail left out."""
    generations = trial.generations()
    values = [quantity.of(x.ours, len(trial.same.load.prompts[0])) for x in generations]
    clusters = [x.prompt for x in generations]
    value = quantile_estimate(values, clusters, quantity.p, trial.confidence, trial.seed)
    spread = difference_of_copies(quantity, trial)
    ratios = dict.fromkeys(trial.itself, Estimate.exact(1.0))
    for name, duel in trial.against.items():
        is_noisy = trial.same.is_noisy or duel.is_noisy
        ratios[name] = replace(widen(ratio(quantity, duel.pairs, trial), spread), is_noisy=is_noisy)
    is_noisy = trial.same.is_noisy or any(x.is_noisy for x in trial.against.values())
    value = replace(widen(value, spread), is_noisy=is_noisy)
    return Measurement(value, quantity.unit, quantity.direction, len(generations), {}, ratios)


def difference_of_copies(quantity: Quantity, trial: Trial) -> float:
    """The factor by which two copies of the candidate may differ; 1 where chance explains what was seen."""
    itself = ratio(replace(quantity, p=0.5), trial.same.pairs, replace(trial, confidence=SAME_CONFIDENCE))
    return 1.0 if itself.lower <= 1 <= itself.upper else max(itself.upper, 1 / itself.lower)


def widen(estimate: Estimate, factor: float) -> Estimate:
    """The same with both bounds moved outwards by a factor."""
    return replace(estimate, lower=estimate.lower / factor, upper=estimate.upper * factor)


def ratio(quantity: Quantity, pairs: Sequence[Pair], trial: Trial) -> Estimate:
    """Of the candidate to what it was paired with: over pairs, or of quantiles over all of them."""
    prompt_tokens = len(trial.same.load.prompts[0])
    table = [[quantity.of(x.ours, prompt_tokens), quantity.of(x.theirs, prompt_tokens)] for x in pairs]
    clusters = [x.prompt for x in pairs]
    if quantity.p == 0.5:
        return paired_log_ratio(table, clusters, trial.confidence, trial.seed)
    return quantile_ratio(table, clusters, quantity.p, trial.confidence, trial.seed)


def is_narrow(estimate: Estimate, width: float) -> bool:
    """Whether more pairs would tell little more.

    Args:
        estimate: A ratio.
        width: Log of upper over lower that is narrow for a ratio near 1.
    """
    return math.log(estimate.upper / estimate.lower) <= max(width, NARROW_SHARE * abs(math.log(estimate.value)))


def describe(trial: Trial) -> dict[str, Any]:
    """What the report shows of a trial: how each arm started, what the guards saw, every pair's ratio. JSON."""
    itself = ratio(QUANTITIES["tpot_ms"], trial.same.pairs, replace(trial, confidence=SAME_CONFIDENCE))
    arms = {"candidate": trial.same.ours, "twin": trial.same.theirs, **{k: v.theirs for k, v in trial.against.items()}}
    duels = {"twin": trial.same, **trial.against}
    steps = np.array([1000 * step for x in trial.generations() for step in x.ours.token_s])
    return {
        "same_program": asdict(itself),
        "arms": {
            name: {
                "start_s": arm.worker.start_s,
                "load_s": arm.worker.load_s,
                "cold_ttft_ms": 1000 * arm.cold.ttft_s,
                "warm_up_generations": len(arm.warm_up_s),
                "cpu_share": arm.cpu_share,
            }
            for name, arm in arms.items()
        },
        "duels": {
            name: {
                "pairs": len(duel.pairs),
                "disturbed": list(duel.objections),
                "tpot_ratio": [x.ours.tpot_s / x.theirs.tpot_s for x in duel.pairs],
                "ttft_ratio": [x.ours.ttft_s / x.theirs.ttft_s for x in duel.pairs],
                "involuntary_switches": sum(x.ours.involuntary_switches for x in duel.pairs),
            }
            for name, duel in duels.items()
        },
        "inter_token_ms": {
            f"p{100 * p:g}": float(np.quantile(steps, p))
            for p in (0.5, 0.9, 0.95, 0.99)
            if len(steps) >= min_samples(p)
        },
    }
