"""Resident memory of a process that loads a program and generates, and what its cache grows by with each token.

Compared exactly: the largest of three processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import Field

from strop.artifact import Artifact, read_manifest
from strop.evals._pairs import cores_for
from strop.metric import Estimate, Kind, MeasureContext, Measurement, Metric
from strop.worker import Memory as Resident
from strop.worker import Worker

PROCESSES = 3
CACHE = "cache_bytes_per_token"


class Memory(Metric):
    """Peak and steady memory of a fresh process, interpreter and libraries included (Linux only)."""

    kind: ClassVar[Kind] = "speed"

    prompt_tokens: int = Field(default=256, ge=1, description="tokens of the prompt")
    new_tokens: int = Field(default=16, ge=2, description="tokens generated after it")

    def names(self) -> Mapping[str, str]:
        """See `Metric.names`: when loaded, the most until the end, after generating; keys and values of one token."""
        return dict.fromkeys(("load_bytes", "peak_bytes", "steady_bytes", CACHE), "bytes")

    def measure(
        self, program: Artifact, references: Mapping[str, Artifact], context: MeasureContext
    ) -> dict[str, Measurement]:
        """See `Metric.measure`."""
        artifacts = {"": program, **references}
        found = {}
        for number, (name, artifact) in enumerate(artifacts.items()):
            context.progress("measuring memory", number, len(artifacts))
            found[name] = resident(artifact, self.prompt_tokens, self.new_tokens, context.threads)
        ours = found.pop("")
        traits = read_manifest(program.path).traits or {}
        protocol = {**self.model_dump(), "threads": context.threads, "runtime": traits["runtime"]}
        return {
            name: Measurement(
                Estimate.exact(float(_most(ours, name))),
                unit,
                "lower",
                PROCESSES,
                protocol,
                {
                    key: Estimate.exact(_most(ours, name) / _most(x, name))
                    for key, x in found.items()
                    if _tells(x, name)
                },
                _detail(ours, name),
            )
            for name, unit in self.names().items()
            if _tells(ours, name) and (traits["device"] == "cpu" or name == CACHE)  # a GPU's memory is not seen here
        }


@lru_cache(maxsize=16)
def resident(artifact: Artifact, prompt_tokens: int, new_tokens: int, threads: int) -> tuple[Resident, ...]:
    """Of each of a few fresh processes. Remembered: every row is compared with the same parent."""
    vocab_size = (read_manifest(artifact.path).traits or {})["vocab_size"]
    prompt = [i % vocab_size for i in range(prompt_tokens)]
    found = []
    for _ in range(PROCESSES):
        with Worker(artifact.path, threads, cores_for(threads)) as worker:
            worker.decode(prompt, new_tokens)
            found.append(worker.memory())
    return tuple(found)


def _tells(processes: tuple[Resident, ...], name: str) -> bool:
    """Whether the program has that figure: one that runs through another library may not tell its cache."""
    return all(getattr(x, name) is not None for x in processes)


def _most(processes: tuple[Resident, ...], name: str) -> int:
    return max(int(getattr(x, name)) for x in processes)


def _detail(processes: tuple[Resident, ...], name: str) -> dict[str, Any]:
    """Each process's figure, and what its interpreter took before."""
    return {
        "processes": [getattr(x, name) for x in processes],
        "interpreter_bytes": _most(processes, "interpreter_bytes"),
        "unique_bytes": _most(processes, "unique_bytes"),
    }
