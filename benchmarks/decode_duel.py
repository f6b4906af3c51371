"""Compare the speed of programs, one process each, taking turns.

    python benchmarks/decode_duel.py [--threads 2] [--rounds 4] [--restarts 5] NAME=FOLDER NAME=genai:FOLDER \
        NAME=llama_cpp:FILE ...

Every arm decodes the same number of tokens after the same prompt (of --prompt tokens), in ABBA order. All processes
are started anew `--restarts` times: where the kernel puts a process's memory alone moves its speed by some percent, so
ratios are taken per restart against the first arm, and their spread over restarts is what counts. `genai:` arms are
folders of onnxruntime-genai's model builder and need --genai, `llama_cpp:` arms are GGUF files and need --llama_cpp.
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

NUM_TOKENS = 128


class Arm(Protocol):
    """Something that decodes."""

    def decode(self, prompt: list[int]) -> list[float]:
        """Seconds until the first of 128 tokens, and of each after it."""

    def close(self) -> None:
        """End the process."""


class StropArm:
    """A program of strop."""

    def __init__(self, folder: str, threads: int) -> None:
        self.worker = Worker(Path(folder), threads)
        self.worker.__enter__()

    def decode(self, prompt: list[int]) -> list[float]:
        """See `Arm.decode`."""
        timing = self.worker.decode(prompt, NUM_TOKENS)
        return [timing.ttft_s, *timing.token_s]

    def close(self) -> None:
        """See `Arm.close`."""
        self.worker.__exit__(None, None, None)


class PeerArm:
    """A model of another tool, in a worker of `peers/`."""

    def __init__(self, tool: str, path: str, threads: int, python: str) -> None:
        command = [python, str(Path(__file__).parent / "peers" / f"decode_{tool}.py"), path, str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def decode(self, prompt: list[int]) -> list[float]:
        """See `Arm.decode`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"prompt": prompt, "num_tokens": NUM_TOKENS}) + "\n")
        self.process.stdin.flush()
        seconds: list[float] = json.loads(self.process.stdout.readline())["token_s"]
        return seconds

    def close(self) -> None:
        """See `Arm.close`."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(arms: Sequence[Arm], prompt: list[int], rounds: int) -> list[tuple[float, float]]:
    """Seconds to the first token and tokens/s after it of each arm: medians over rounds, after one to warm up."""
    for arm in arms:
        arm.decode(prompt)
    found: list[list[list[float]]] = [[] for _ in arms]
    order = list(range(len(arms)))
    for turn in range(rounds):
        for index in order if turn % 2 == 0 else reversed(order):
            found[index].append(arms[index].decode(prompt))
    return [
        (statistics.median(x[0] for x in runs), 1 / statistics.median(statistics.mean(x[1:]) for x in runs))
        for runs in found
    ]


def main() -> None:
    """Print one line an arm."""
    parser = argparse.ArgumentParser()
    parser.add_argument("arms", nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--restarts", type=int, default=5)
    parser.add_argument("--genai", default="python", help="interpreter that has onnxruntime-genai")
    parser.add_argument("--llama_cpp", default="python", help="interpreter that has llama-cpp-python")
    options = parser.parse_args()
    named = dict(x.split("=", 1) for x in options.arms)
    names, speeds, firsts = list(named), dict[str, list[float]](), dict[str, list[float]]()
    prompt = [100 + i % 40_000 for i in range(options.prompt)]
    for restart in range(options.restarts):
        turned = names[restart % len(names) :] + names[: restart % len(names)]
        arms: list[Arm] = []
        for name in turned:
            kind, _, folder = named[name].rpartition(":")
            arms.append(
                PeerArm(kind, folder, options.threads, getattr(options, kind))
                if kind
                else StropArm(folder, options.threads)
            )
        for name, (first, speed) in zip(turned, measure(arms, prompt, options.rounds), strict=True):
            firsts.setdefault(name, []).append(first)
            speeds.setdefault(name, []).append(speed)
        for arm in arms:
            arm.close()
    for name in names:
        print(
            f"{name:20} {statistics.median(speeds[name]):7.1f} tokens/s {ratio(speeds[name], speeds[names[0]])}"
            f"   first token {1000 * statistics.median(firsts[name]):7.1f} ms {ratio(firsts[names[0]], firsts[name])}"
        )


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Geometric mean of paired ratios with its standard error."""
    logs = [math.log(x / y) for x, y in zip(ours, theirs, strict=True)]
    return f"x{math.exp(statistics.mean(logs)):.3f} ± {statistics.stdev(logs) / len(logs) ** 0.5:.3f}"


if __name__ == "__main__":
    main()
