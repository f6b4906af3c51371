"""TensorRT: an engine whose kernels are chosen by timing them, so it needs the GPU that it is for where it is built.

Everything before the build call is what `tensorrt_rtx` does too, whose builder runs without a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from strop.errors import MissingExtra, UserError
from strop.export import _tensorrt
from strop.machine import gpus
from strop.program import Program, Traits


class TensorRt(_tensorrt.EngineStage):
    """Lower to a TensorRT engine, for the NVIDIA GPU that is here."""

    runtime: ClassVar[str] = "tensor_rt"
    package: ClassVar[str] = "tensorrt"
    extra: ClassVar[str] = "tensorrt"

    def library(self) -> Any:
        """See `EngineStage.library`."""
        return _library("exporting to tensor_rt")

    def targets(self) -> list[str]:
        """See `EngineStage.targets`."""
        here = gpus()
        if not here:
            raise UserError(
                "export: tensor_rt builds engines by timing kernels, and no NVIDIA GPU or driver is here; allowed: "
                "a machine with one, or tensorrt_rtx, which builds without"
            )
        return [here[0].compute_capability]

    @staticmethod
    def load(path: Path, traits: Traits) -> Program:
        """Open what `run` wrote, on the first GPU. See `_tensorrt.load`."""
        return _tensorrt.load(path, traits, _library("running a tensor_rt program"))

    @staticmethod
    def lacks(path: Path, traits: Traits) -> str | None:
        """See `program.Elsewhere`."""
        return _tensorrt.lacks(path, traits)


def _library(purpose: str) -> Any:
    try:
        import tensorrt
    except ModuleNotFoundError as error:
        raise MissingExtra("tensorrt", "tensorrt", purpose) from error
    return tensorrt
