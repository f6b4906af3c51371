"""The contract of a compression stage or an export: artifact in, artifact out. Leaves out who runs it (runner.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from strop.artifact import Artifact, Format
from strop.spec import ModelSpec

Support = Literal["native", "widened", "dequantized"]
"""How a program holds a quantized weight: in its own bits, in more, or as floats."""
GFLOPS_PER_THREAD = 60.0
"""What `plan` assumes one thread computes in float32; estimates only, measured times are in the report."""
BFLOAT16_SPEEDUP = 1.5
"""Over products in float32, all that is not a product included; as `plan` assumes."""


class ArtifactRef(str):
    """A field that names another artifact: `parent`, another stage's `name`, or a model source.

    The runner resolves it into `Context.artifacts` under the same text, and its key enters the stage's key.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls, core_schema.str_schema(min_length=1))


class Progress(Protocol):
    """Where long work says how far it is."""

    def __call__(self, label: str, done: int, total: int) -> None:
        """`done` of `total` units of `label` are finished."""


def no_progress(label: str, done: int, total: int) -> None:
    """A `Progress` that says nothing."""


@dataclass(frozen=True)
class Context:
    """What a stage may use while it runs.

    Attributes:
        scratch: A folder that survives a kill: what a stage finds there is from an earlier try with the same key.
        seed: For every random generator.
        threads: Threads to compute with.
        device: `cpu` or `cuda`.
        calibration: `.npy` file of token ids (samples, length) int64, where the stage asks for it, else None.
        artifacts: What its `ArtifactRef` fields name.
        cache: A folder that stays from run to run, for what only saves time; None: there is none.
        progress: Call it now and then during long work.
    """

    scratch: Path
    seed: int = 0
    threads: int = 2
    device: str = "cpu"
    calibration: Path | None = None
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)
    cache: Path | None = None
    progress: Progress = no_progress


@dataclass(frozen=True)
class StageCost:
    """What a stage took, measured by the runner.

    Attributes:
        seconds: Wall time; of the last try only where an earlier one was killed.
        peak_memory_bytes: Largest resident set while it ran.
    """

    seconds: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class Plan:
    """What `check` says of a stage before any weight is read.

    Attributes:
        spec: The table of its output.
        size_bytes: Of its output.
        memory_bytes: Peak while it runs.
        seconds: Rough time on this machine.
        notes: Lines worth a user's attention (a widened format, a group that gets no calibration).
        cache_bytes_per_token: Of an export: keys and values of one token; None: not known here.
    """

    spec: ModelSpec
    size_bytes: int
    memory_bytes: int
    seconds: float
    notes: tuple[str, ...] = ()
    cache_bytes_per_token: int | None = None


class Stage(BaseModel, ABC):
    """A step of a recipe. Subclasses are frozen pydantic models whose fields are the YAML keys.

    Modules that define one import torch inside functions: `strop check` must not load it.

    Attributes:
        takes: What it is applied to.
        gives: What it makes.
        needs_calibration: It reads the recipe's calibration tokens.
        lowers_parent: Of an export: the untouched parent is lowered too, for a row beside its compressed children.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    takes: ClassVar[Format] = "checkpoint"
    gives: ClassVar[Format] = "checkpoint"
    needs_calibration: ClassVar[bool] = False
    lowers_parent: ClassVar[bool] = True

    @abstractmethod
    def plan(self, spec: ModelSpec, num_calibration_tokens: int) -> Plan:
        """What this stage would make of a model, from its table alone.

        Raises:
            UserError: It cannot be applied: names the field, what was found, what is allowed.
        """

    def support(self, spec: ModelSpec) -> Support:
        """Of an export: how its program holds the weights of a table whose layers are all quantized alike.

        Raises:
            UserError: It takes none of them, as `plan` says too.
        """
        self.plan(spec, 0)
        return "native"

    @abstractmethod
    def run(self, source: Artifact, out: Path, context: Context) -> dict[str, Any]:
        """Write the output's files into the empty folder `out`, `strop.json` apart.

        Args:
            source: The input, read-only.
            out: Where to write. Whatever is there when `run` raises is thrown away.
            context: Seed, threads, calibration, scratch space.

        Returns:
            What goes into the manifest: `spec` (a `ModelSpec`, of a checkpoint) or `traits` (`Traits`, of a
            program), and `report` (JSON: skipped layers, dampings; the same for equal work, no times).
        """
