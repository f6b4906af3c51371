"""Two programs timed side by side: workers on the same cores, strictly alternating, guarded against a noisy machine.

Pairing adjacent measurements is what makes a shared machine usable (duet benchmarking: Bulej et al. 2020, arXiv
2001.05811). Leaves out what is made of the times (latency.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import mean, median, pstdev
from typing import Protocol

from strop.worker import Timing, Worker

WARM_UP_WINDOW = 5
"""Warm-up is over when so many generations in a row are steady..."""
WARM_UP_MOST = 30
"""...or after so many, or after..."""
WARM_UP_SECONDS = 15.0
WARM_UP_TOKENS = 8
STEADY_VARIATION = 0.05
STEADY_TREND = 0.03
LARGEST_STEAL = 0.05
"""Share of the cores' time that other virtual machines took during a pair."""
LARGEST_SWITCHES = 150.0
"""Involuntary context switches per second of computing: a core shared with an equal takes a few hundred."""
SMALLEST_CPU_SHARE = 0.85
"""Of the share of its threads' time that an arm computed for when it had warmed up."""
MOST_RERUNS = 0.5
"""Pairs repeated, as a share of the pairs wanted, before the machine counts as noisy."""


class Effort(Protocol):
    """What the guards want to know of something that a process did."""

    @property
    def wall_s(self) -> float:
        """How long it took."""

    @property
    def cpu_s(self) -> float:
        """CPU time of all threads of the process meanwhile."""

    @property
    def involuntary_switches(self) -> int:
        """How often the kernel took a core away from the process meanwhile."""


@dataclass(frozen=True)
class Load:
    """What every generation does.

    Attributes:
        prompts: Token ids, equally long; used in turn.
        new_tokens: Tokens to generate.
        threads: Of each program.
    """

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    threads: int


@dataclass(frozen=True)
class Pair:
    """One prompt through both programs, one right after the other.

    Attributes:
        prompt: Its index.
        ours, theirs: The candidate's and the reference's generation.
    """

    prompt: int
    ours: Timing
    theirs: Timing


@dataclass(frozen=True)
class Arm:
    """A warm worker.

    Attributes:
        worker: Ready to be timed.
        cold: Its very first generation, of `WARM_UP_TOKENS`.
        warm_up_s: Seconds of each generation until it was steady.
        cpu_share: CPU time over wall time and threads, when steady.
    """

    worker: Worker
    cold: Timing
    warm_up_s: tuple[float, ...]
    cpu_share: float


@dataclass
class Duel:
    """A candidate against a reference, pair by pair.

    Attributes:
        ours, theirs: The two arms.
        load: What both generate.
        pairs: What counts.
        disturbed: What a guard objected to, and so was repeated.
        objections: Why, one line each.
        is_noisy: Too many were: then `disturbed` is among `pairs`, and no more are collected.
    """

    ours: Arm
    theirs: Arm
    load: Load
    pairs: list[Pair] = field(default_factory=list)
    disturbed: list[Pair] = field(default_factory=list)
    objections: list[str] = field(default_factory=list)
    is_noisy: bool = False

    def collect(self, target: int) -> None:
        """Time pairs until there are `target`, in the order A B, B A, A B... What a guard objects to is repeated."""
        while len(self.pairs) < target and not self.is_noisy:
            index = len(self.pairs) + len(self.disturbed)
            prompt = index % len(self.load.prompts)
            arms = (self.ours, self.theirs) if index % 2 == 0 else (self.theirs, self.ours)
            stolen = stolen_share()
            timings = [arm.worker.decode(self.load.prompts[prompt], self.load.new_tokens) for arm in arms]
            objection = object_to(timings, [arm.cpu_share for arm in arms], stolen(), self.load.threads)
            ours, theirs = timings if index % 2 == 0 else timings[::-1]
            if objection:
                self.disturbed.append(Pair(prompt, ours, theirs))
                self.objections.append(objection)
            else:
                self.pairs.append(Pair(prompt, ours, theirs))
            if len(self.disturbed) > MOST_RERUNS * target:
                self.is_noisy = True
                self.pairs += self.disturbed


def warm_up(worker: Worker, load: Load) -> Arm:
    """Generate a few tokens until the times are steady."""
    timings: list[Timing] = []
    start = time.monotonic()
    while len(timings) < WARM_UP_MOST:
        timings.append(worker.decode(load.prompts[0], WARM_UP_TOKENS))
        is_late = time.monotonic() - start > WARM_UP_SECONDS and len(timings) >= WARM_UP_WINDOW
        if is_late or is_steady([x.wall_s for x in timings]):
            break
    share = median(cpu_share(x, load.threads) for x in timings[-WARM_UP_WINDOW:])
    return Arm(worker, timings[0], tuple(x.wall_s for x in timings), share)


def is_steady(times: Sequence[float]) -> bool:
    """Whether the last `WARM_UP_WINDOW` times vary little and have no trend (Theil–Sen slope)."""
    last = times[-WARM_UP_WINDOW:]
    if len(last) < WARM_UP_WINDOW or pstdev(last) >= STEADY_VARIATION * mean(last):
        return False
    slope = median((b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(last), 2))
    return abs(slope) * WARM_UP_WINDOW < STEADY_TREND * mean(last)


def stolen_share() -> Callable[[], float]:
    """Start watching: the result tells what share of all cores' time was stolen since, 0 where no system tells."""
    stolen, total = _jiffies()

    def since() -> float:
        stolen_now, total_now = _jiffies()
        return (stolen_now - stolen) / max(total_now - total, 1)

    return since


def cores_for(threads: int) -> list[int] | None:
    """The cores that both arms are pinned to; None where the system cannot pin."""
    return sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else None


def object_to(efforts: Sequence[Effort], usual: Sequence[float], stolen: float, threads: int) -> str | None:
    """Why what was timed together does not count; None where it does.

    Args:
        efforts: What each process did.
        usual: The share of its threads' time that each computes for otherwise.
        stolen: Share of the cores' time that went to other virtual machines meanwhile.
        threads: Of each process.
    """
    if stolen > LARGEST_STEAL:
        return f"{stolen:.0%} of the processor stolen"
    for effort, share in zip(efforts, usual, strict=True):
        switches = effort.involuntary_switches / effort.cpu_s
        if switches > LARGEST_SWITCHES:
            return f"{switches:.0f} involuntary context switches per second of computing"
        if cpu_share(effort, threads) < SMALLEST_CPU_SHARE * share:
            return f"computed for {cpu_share(effort, threads):.0%} of the time instead of {share:.0%}"
    return None


def cpu_share(effort: Effort, threads: int) -> float:
    """CPU time over wall time and threads."""
    return effort.cpu_s / (effort.wall_s * threads)


def _jiffies() -> tuple[int, int]:
    """Stolen and total time of all cores since boot, as Linux tells them."""
    path = Path("/proc/stat")
    if not path.is_file():
        return 0, 0
    fields = [int(x) for x in path.read_text().split("\n", 1)[0].split()[1:9]]
    return fields[7], sum(fields)
