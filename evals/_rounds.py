"""Rounds: the same pieces of work timed again and again in turn, so that what drifts, drifts for all of them alike.

Rounds run forwards and backwards in turn, which takes a steady drift out of every comparison within a round. The guards
are those of paired generations. Where the kernel puts a process's memory alone moves its speed by some percent for as
long as it lives: a second copy of the program tells by how much, and bounds widen by that. Leaves out what the times
mean (step_cost.py, roofline.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strop.artifact import Artifact, read_manifest
from strop.evals._pairs import MOST_RERUNS, cores_for, cpu_share, object_to, stolen_share
from strop.machine import processors
from strop.metric import Estimate, MeasureContext
from strop.statistics import Floats, paired_log_ratio
from strop.worker import Laps

Piece = Callable[[], Laps]
"""Work that a worker does and times."""
WARM_UP_ROUNDS = 3
"""Before any that counts. They tell what share of its threads' time a round computes for."""
SAME_CONFIDENCE = 0.9995
"""Of each bound of the ratio of two copies: 1 lies outside by chance in 0.1 % of runs."""


@dataclass(frozen=True)
class Rounds:
    """What was timed.

    Attributes:
        laps: (rounds, pieces), pieces in the order given, whichever way a round ran.
        objections: Why each round that a guard objected to was repeated, one line each.
        is_noisy: Too many were: then they are among `laps`.
    """

    laps: Sequence[Sequence[Laps]]
    objections: Sequence[str]
    is_noisy: bool

    def seconds(self, best: bool = False) -> Floats:
        """(rounds, pieces): each piece's time, of several the median or the best."""
        pick: Callable[[Sequence[float]], float] = min if best else median
        return np.array([[pick(x.seconds) for x in laps] for laps in self.laps], np.float64)


def collect(pieces: Sequence[Piece], count: int, context: MeasureContext) -> Rounds:
    """Do rounds until there are `count` to which no guard objects, or too many were repeated.

    Args:
        pieces: What a round consists of. In odd rounds they run in the opposite order.
        count: Rounds that are wanted.
        context: Its threads are those of every worker behind the pieces.
    """
    usual = median(cpu_share(_whole(_round(pieces, i)), context.threads) for i in range(WARM_UP_ROUNDS))
    kept: list[list[Laps]] = []
    disturbed: list[list[Laps]] = []
    objections: list[str] = []
    while len(kept) < count:
        context.progress("timing rounds", len(kept), count)
        stolen = stolen_share()
        laps = _round(pieces, len(kept) + len(disturbed))
        objection = object_to([_whole(laps)], [usual], stolen(), context.threads)
        if objection is None:
            kept.append(laps)
            continue
        disturbed.append(laps)
        objections.append(objection)
        if len(disturbed) > MOST_RERUNS * count:
            return Rounds([*kept, *disturbed], objections, True)
    return Rounds(kept, objections, False)


def compare_copies(pairs: NDArray[np.float64], seed: int) -> Estimate:
    """Ratio of the times that two copies of a program took for one piece.

    Args:
        pairs: (rounds, 2).
        seed: Of the bootstrap.
    """
    return paired_log_ratio(pairs, range(len(pairs)), SAME_CONFIDENCE, seed)


def widen(estimate: Estimate, copies: Estimate) -> Estimate:
    """The same with bounds moved outwards by as much as two copies may differ, where chance does not explain it."""
    factor = 1.0 if copies.lower <= 1 <= copies.upper else max(copies.upper, 1 / copies.lower)
    return replace(estimate, lower=estimate.lower / factor, upper=estimate.upper * factor)


def circumstances(program: Artifact, context: MeasureContext) -> dict[str, Any]:
    """The part of a protocol that says on what, and with which kernels, times were measured."""
    traits = read_manifest(program.path).traits or {}
    return {
        "threads": context.threads,
        "cores": len(cores_for(context.threads) or ()),
        **{x: traits.get(x) for x in ("runtime", "dtype", "kernels")},
        **processors(traits.get("device", "cpu")),
    }


def _round(pieces: Sequence[Piece], index: int) -> list[Laps]:
    """Laps of each piece, in the order of the pieces."""
    if index % 2 == 0:
        return [piece() for piece in pieces]
    return [piece() for piece in reversed(pieces)][::-1]


def _whole(laps: Sequence[Laps]) -> Laps:
    """A round as one: a single step is too short to judge by the share of it that was computed."""
    seconds = tuple(x for lap in laps for x in lap.seconds)
    return Laps(seconds, sum(x.cpu_s for x in laps), sum(x.involuntary_switches for x in laps))
