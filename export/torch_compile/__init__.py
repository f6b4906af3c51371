"""PyTorch compiled ahead of time: an AOTInductor package that another process runs without compiling anything.

One block is compiled for each kind of layer and serves all layers of it, weights being arguments: compiling takes
seconds instead of minutes, and weights exist once. Needs a C++ compiler where it is exported, not where it runs.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, ClassVar, Literal

from strop.artifact import Artifact, Format
from strop.errors import UserError
from strop.export.torch_compile import layout
from strop.program import Program, Traits
from strop.spec import DTYPE_BYTES, DType, ModelSpec
from strop.stage import Context, Plan, Stage, Support

SECONDS_PER_PIECE = 10.0
"""To compile one, for estimates."""


class TorchCompile(Stage):
    """Lower to a package of compiled PyTorch functions (AOTInductor), CPU.

    Attributes:
        dtype: Of activations, and of weights that are not quantized; null: the checkpoint's.
    """

    gives: ClassVar[Format] = "program"

    dtype: Literal["float32", "bfloat16"] | None = None

    def plan(self, spec: ModelSpec, num_calibration_tokens: int) -> Plan:  # noqa: ARG002 (the contract of a stage)
        """See `Stage.plan`."""
        layout.check(spec)
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            raise UserError(f"export: torch_compile needs a C++ compiler to export, {compiler} is not on the path")
        size = layout.size_bytes(spec, self._dtype(spec))
        pieces = 2 * (2 * len(set(layout.kinds(spec))) + 1)
        largest = max(x.in_features * x.out_features for x in spec.linears())
        cached = spec.kv_bytes_per_token(DTYPE_BYTES[self._dtype(spec)])
        memory = 1_500_000_000 + 3 * 4 * largest
        return Plan(spec, size, memory, pieces * SECONDS_PER_PIECE, layout.notes(spec), cached)

    def support(self, spec: ModelSpec) -> Support:
        """See `Stage.support`."""
        layout.check(spec)
        return "widened" if layout.notes(spec) else "native"

    def run(self, source: Artifact, out: Path, context: Context) -> dict[str, Any]:
        """See `Stage.run`."""
        import torch

        from strop.export.torch_compile import compiler
        from strop.machine import describe_machine
        from strop.model import CONFIG, Weights, copy_companions, read_spec

        spec = read_spec(source.path)
        layout.check(spec)
        torch.set_num_threads(context.threads)
        dtype = self._dtype(spec)
        with Weights(source.path) as weights:
            compiler.write_weights(spec, dtype, weights, out)
        pieces = compiler.compile_package(spec, getattr(torch, dtype), out, context.scratch, context.progress)
        compiler.write_facts(out, describe_machine()["isa"])
        shutil.copyfile(source.path / CONFIG, out / CONFIG)
        copy_companions(source.path, out)
        traits = Traits(
            runtime="torch_compile",
            dtype=dtype,
            threads=context.threads,
            device="cpu",
            context=spec.max_positions,
            vocab_size=spec.vocab_size,
            takes_trees=True,
            kernels=f"AOTInductor {torch.__version__}",
        )
        return {"spec": spec, "traits": traits, "report": {"pieces": pieces}}

    @staticmethod
    def load(path: Path, traits: Traits) -> Program:
        """Open what `run` wrote. See `session.load`."""
        from strop.export.torch_compile import session
        from strop.model import read_spec

        return session.load(path, read_spec(path), traits)

    def _dtype(self, spec: ModelSpec) -> DType:
        """Of the program.

        Raises:
            UserError: float16, which the CPU kernels do not compute.
        """
        if self.dtype is not None:
            return self.dtype
        if spec.dtype == "float16":
            raise UserError("export: torch_compile runs float32 or bfloat16; give it a dtype, the model is float16")
        return spec.dtype
