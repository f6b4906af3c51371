"""The contract of a measurement: a program in, values with intervals and a protocol fingerprint out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from strop.artifact import Artifact, hash_json
from strop.stage import Progress, no_progress

Direction = Literal["lower", "higher", "neither"]
"""Which way is better."""
Kind = Literal["quality", "speed"]
"""What a failed gate on the metric exits with (3 or 4). Speed, memory and size are `speed`."""


@dataclass(frozen=True)
class Estimate:
    """A value with bounds.

    Attributes:
        value: Point estimate.
        lower, upper: One-sided bounds, each at `confidence`; equal to `value` where nothing is random.
        confidence: Of each bound on its own.
        is_noisy: The guards found the machine too noisy: a gate on this is INCONCLUSIVE.
    """

    value: float
    lower: float
    upper: float
    confidence: float = 0.95
    is_noisy: bool = False

    @staticmethod
    def exact(value: float) -> Estimate:
        """An estimate of something that is counted, not sampled."""
        return Estimate(value, value, value, 1.0)


@dataclass(frozen=True)
class Measurement:
    """One measured quantity of one program.

    Attributes:
        estimate: Its value and bounds.
        unit: `nats`, `tokens/s`, `ms`, `bytes`, `ratio`, `%`.
        direction: Which way is better.
        samples: Independent units behind the interval (documents, pairs, generations), not tokens.
        protocol: Everything that must agree for two values to be compared, JSON.
        ratios: Reference name -> paired ratio of this program to that reference (for quantities that are distances
            to a reference by definition: the same value), what a gate with `of:` decides on.
        detail: For the report and its plots, JSON: series, tails, histograms, the machine.
    """

    estimate: Estimate
    unit: str
    direction: Direction
    samples: int
    protocol: Mapping[str, Any]
    ratios: Mapping[str, Estimate] = field(default_factory=dict)
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """sha256 of the protocol. Values with different fingerprints are not compared."""
        return hash_json(dict(self.protocol))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "fingerprint": self.fingerprint}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Measurement:
        """The measurement that `to_json` wrote."""
        rest = {k: v for k, v in data.items() if k not in ("fingerprint", "estimate", "ratios")}
        ratios = {k: Estimate(**v) for k, v in data["ratios"].items()}
        return Measurement(estimate=Estimate(**data["estimate"]), ratios=ratios, **rest)


@dataclass(frozen=True)
class MeasureContext:
    """What a metric may use while it measures.

    Attributes:
        threads: Threads of every program.
        seed: For every random generator.
        progress: Call it now and then.
    """

    threads: int = 2
    seed: int = 0
    progress: Progress = no_progress


class Metric(BaseModel, ABC):
    """Something a recipe can measure. Subclasses are frozen pydantic models whose fields are the YAML keys.

    Modules that define one import torch inside functions: `strop check` must not load it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: ClassVar[Kind]

    @abstractmethod
    def names(self) -> Mapping[str, str]:
        """What it measures with these fields: name without the module's (`kl_mean`) -> unit."""

    def refusal(self, name: str) -> str | None:  # noqa: ARG002  # subclasses use it
        """Why `name` is known but not measured with these fields (`tpot_p99_ms needs 1000 generations, ...`)."""
        return None

    def text_sources(self) -> tuple[str, ...]:
        """Text sources that it measures on: `check` compares them with the calibration's."""
        return ()

    @abstractmethod
    def measure(
        self, program: Artifact, references: Mapping[str, Artifact], context: MeasureContext
    ) -> dict[str, Measurement]:
        """Measure a program.

        Args:
            program: The exported program.
            references: `parent` (the untouched model in eager), and where there are such: `parent_same_runtime`,
                `plain`, `release`. All programs.
            context: Threads, seed.

        Returns:
            Name (as in `names`) -> measurement. What could not be measured is absent.
        """
