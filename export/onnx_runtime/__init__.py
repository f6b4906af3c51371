"""ONNX Runtime on the CPU: our own graph of its fused operators, packed codes taken over as they are.

Operators: MatMulNBits, GroupQueryAttention, skip-norms (ONNX Runtime contrib operators, domain com.microsoft). One
graph serves prefill and decoding; keys and values are updated in place. Activations are float32.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any, ClassVar, Literal

from strop.artifact import Artifact, Format
from strop.errors import MissingExtra
from strop.export.onnx_runtime import layout
from strop.program import Program, Traits
from strop.spec import ModelSpec
from strop.stage import Context, Plan, Stage


class OnnxRuntime(Stage):
    """Lower to ONNX Runtime, CPU.

    Attributes:
        accuracy_level: How quantized linears take their inputs: 4 as int8, quantized block by block (fastest); 1 as
            float32.
        trees: Let steps take trees of candidate tokens. Costs a little at every step.
    """

    gives: ClassVar[Format] = "program"

    accuracy_level: Literal[1, 4] = 4
    trees: bool = False

    def plan(self, spec: ModelSpec, num_calibration_tokens: int) -> Plan:  # noqa: ARG002 (the contract of a stage)
        """See `Stage.plan`."""
        layout.check(spec)
        size = layout.size_bytes(spec, self.trees)
        largest = max(x.in_features * x.out_features for x in spec.linears())
        return Plan(spec, size, 3 * 4 * largest, size / WRITTEN_PER_SECOND, layout.notes(spec))

    def run(self, source: Artifact, out: Path, context: Context) -> dict[str, Any]:
        """See `Stage.run`.

        Raises:
            MissingExtra: No onnx-ir.
        """
        from strop.model import CONFIG, Weights, copy_companions, read_spec

        try:
            from strop.export.onnx_runtime.graph import write_model
        except ModuleNotFoundError as error:
            raise MissingExtra("onnx-ir", "onnx", "exporting to onnx_runtime") from error
        spec = read_spec(source.path)
        layout.check(spec)
        with Weights(source.path) as weights:
            operators = write_model(spec, weights, out, accuracy_level=self.accuracy_level, trees=self.trees)
        shutil.copyfile(source.path / CONFIG, out / CONFIG)
        copy_companions(source.path, out)
        return {"spec": spec, "traits": self._traits(spec, context.threads), "report": {"operators": operators}}

    def _traits(self, spec: ModelSpec, threads: int) -> Traits:
        is_quantized = any(x.quantization is not None for x in spec.linears())
        return Traits(
            runtime="onnx_runtime",
            dtype="float32",
            threads=threads,
            device="cpu",
            context=spec.max_positions,
            vocab_size=spec.vocab_size,
            takes_trees=self.trees,
            kernels=_kernels(self.accuracy_level) if is_quantized else "MatMul float32",
        )

    @staticmethod
    def load(path: Path, traits: Traits) -> Program:
        """Open what `run` wrote. See `session.load`."""
        from strop.export.onnx_runtime import session

        return session.load(path, traits)

    @staticmethod
    def write_exact(path: Path, traits: Traits, out: Path) -> Traits | None:
        """See `program.Rounding`: inputs of quantized linears stay float32.

        Raises:
            MissingExtra: No onnx-ir.
        """
        if traits.kernels != _kernels(4):
            return None
        try:
            from strop.export.onnx_runtime.graph import copy_model
        except ModuleNotFoundError as error:
            raise MissingExtra("onnx-ir", "onnx", "checking an onnx_runtime program") from error
        copy_model(path, out, accuracy_level=1)
        return dataclasses.replace(traits, kernels=_kernels(1))


def _kernels(accuracy_level: int) -> str:
    """What the traits say computes quantized linears."""
    return f"MatMulNBits accuracy_level {accuracy_level}"


WRITTEN_PER_SECOND = 2e8
"""Bytes, for estimates."""
