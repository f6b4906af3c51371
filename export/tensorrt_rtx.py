"""TensorRT for RTX: an engine built ahead of time, with or without a GPU here, for consumer GPUs of NVIDIA's.

The engine holds kernels in a form that is compiled for the very GPU when it is loaded. Without one this row's program
is built and kept, and everything that would be measured of it is NOT MEASURED.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from strop.errors import MissingExtra
from strop.export import _tensorrt
from strop.machine import gpus
from strop.program import Program, Traits

CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
Capability = Literal["7.5", "8.0", "8.6", "8.9", "12.0", "12.1"]
DEFAULT = ["8.9", "12.0"]
"""Where no GPU is here to build for: RTX 40 and 50."""


class TensorrtRtx(_tensorrt.EngineStage):
    """Lower to a TensorRT-RTX engine, for NVIDIA GPUs; builds without one.

    Attributes:
        compute_capabilities: GPUs that the engine is for; null: the one that is here, without one 8.9 and 12.0.
    """

    runtime: ClassVar[str] = "tensorrt_rtx"
    package: ClassVar[str] = "tensorrt_rtx"
    extra: ClassVar[str] = "tensorrt-rtx"

    compute_capabilities: list[Capability] | None = Field(default=None, min_length=1)

    def library(self) -> Any:
        """See `EngineStage.library`."""
        return _library("exporting to tensorrt_rtx")

    def targets(self) -> list[str]:
        """See `EngineStage.targets`."""
        here = [x.compute_capability for x in gpus()[:1] if x.compute_capability in CAPABILITIES]
        return list(self.compute_capabilities or here or DEFAULT)

    @staticmethod
    def load(path: Path, traits: Traits) -> Program:
        """Open what `run` wrote, on the first GPU. See `_tensorrt.load`."""
        return _tensorrt.load(path, traits, _library("running a tensorrt_rtx program"))

    @staticmethod
    def lacks(path: Path, traits: Traits) -> str | None:
        """See `program.Elsewhere`."""
        return _tensorrt.lacks(path, traits)


def _library(purpose: str) -> Any:
    try:
        import tensorrt_rtx
    except ModuleNotFoundError as error:
        raise MissingExtra("tensorrt_rtx", "tensorrt-rtx", purpose) from error
    return tensorrt_rtx
