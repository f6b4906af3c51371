"""Compare decode speed of programs, one process each, taking turns.

    python benchmarks/decode_duel.py [--threads 2] [--rounds 4] [--restarts 5] NAME=FOLDER NAME=genai:FOLDER ...

Every arm decodes the same number of tokens after the same prompt, in ABBA order. All processes are started anew
`--restarts` times: where the kernel puts a process's memory alone moves its speed by some percent, so ratios are
taken per restart against the first arm, and their spread over restarts is what counts. `genai:` arms need --genai.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from strop.worker import Worker

PROMPT = list(range(100, 125))
NUM_TOKENS = 128


class Arm(Protocol):
    """Something that decodes."""

    def decode(self) -> list[float]:
        """Seconds of each of 127 tokens after the first."""

    def close(self) -> None:
        """End the process."""


class StropArm:
    """A program of strop."""

    def __init__(self, folder: str, threads: int) -> None:
        self.worker = Worker(Path(folder), threads)
        self.worker.__enter__()

    def decode(self) -> list[float]:
        """See `Arm.decode`."""
        return list(self.worker.decode(PROMPT, NUM_TOKENS).token_s)

    def close(self) -> None:
        """See `Arm.close`."""
        self.worker.__exit__(None, None, None)


class GenaiArm:
    """A model of onnxruntime-genai."""

    def __init__(self, folder: str, threads: int, python: str) -> None:
        command = [python, str(Path(__file__).parent / "peers" / "decode_genai.py"), folder, str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def decode(self) -> list[float]:
        """See `Arm.decode`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"prompt": PROMPT, "num_tokens": NUM_TOKENS}) + "\n")
        self.process.stdin.flush()
        seconds: list[float] = json.loads(self.process.stdout.readline())["token_s"][1:]
        return seconds

    def close(self) -> None:
        """See `Arm.close`."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(arms: Sequence[Arm], rounds: int) -> list[float]:
    """Tokens/s of each arm: the median over rounds of its mean speed, after one round to warm up."""
    for arm in arms:
        arm.decode()
    found: list[list[float]] = [[] for _ in arms]
    order = list(range(len(arms)))
    for turn in range(rounds):
        for index in order if turn % 2 == 0 else reversed(order):
            found[index].append(statistics.mean(arms[index].decode()))
    return [1 / statistics.median(x) for x in found]


def main() -> None:
    """Print one line an arm."""
    parser = argparse.ArgumentParser()
    parser.add_argument("arms", nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--restarts", type=int, default=5)
    parser.add_argument("--genai", default="python", help="interpreter that has onnxruntime-genai")
    options = parser.parse_args()
    named = dict(x.split("=", 1) for x in options.arms)
    names, speeds = list(named), dict[str, list[float]]()
    for restart in range(options.restarts):
        turned = names[restart % len(names) :] + names[: restart % len(names)]
        arms: list[Arm] = []
        for name in turned:
            kind, _, folder = named[name].rpartition(":")
            arms.append(GenaiArm(folder, options.threads, options.genai) if kind else StropArm(folder, options.threads))
        for name, speed in zip(turned, measure(arms, options.rounds), strict=True):
            speeds.setdefault(name, []).append(speed)
        for arm in arms:
            arm.close()
    for name in names:
        ratios = [math.log(x / y) for x, y in zip(speeds[name], speeds[names[0]], strict=True)]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        print(
            f"{name:20} {statistics.median(speeds[name]):7.1f} tokens/s  x{math.exp(statistics.mean(ratios)):.3f} "
            f"of {names[0]} (standard error {100 * error:.1f} %)"
        )


if __name__ == "__main__":
    main()
