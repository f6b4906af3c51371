"""ONNX Runtime on the CPU: our own graph of its fused operators, packed codes taken over as they are.

Operators: MatMulNBits, MatMulIntegerToFloat, MatMulBnb4, GroupQueryAttention, skip-norms (ONNX Runtime contrib
operators, domain com.microsoft). One graph serves prefill and decoding; keys and values are updated in place.
Activations are float32.
`operators: standard` writes a graph without them, which any ONNX runtime of opset 24 takes, and TensorRT's parser.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any, ClassVar, Literal

from strop.artifact import Artifact, Format
from strop.errors import MissingExtra
from strop.export._onnx import layout as shared
from strop.export.onnx_runtime import layout
from strop.program import Program, Traits
from strop.spec import ModelSpec
from strop.stage import Context, Plan, Stage, Support


class OnnxRuntime(Stage):
    """Lower to ONNX Runtime, CPU.

    Attributes:
        accuracy_level: How linears of which only the weights are quantized take their inputs: 4 as int8, quantized
            block by block (fastest); 1 as float32.
        trees: Let steps take trees of candidate tokens. Costs a little at every step.
        operators: `contrib`: ONNX Runtime's own fused operators, fastest. `standard`: those of ONNX alone, for other
            runtimes; takes trees, and inputs of linears stay float32.
    """

    gives: ClassVar[Format] = "program"

    accuracy_level: Literal[1, 4] = 4
    trees: bool = False
    operators: Literal["contrib", "standard"] = "contrib"

    def plan(self, spec: ModelSpec, num_calibration_tokens: int) -> Plan:  # noqa: ARG002 (the contract of a stage)
        """See `Stage.plan`."""
        largest = max(x.in_features * x.out_features for x in spec.linears())
        if self.operators == "standard":
            shared.check(spec, "onnx_runtime")
            size = shared.size_bytes(spec, "float32", spec.max_positions)
            notes = shared.notes(spec, "onnx_runtime", "float32")
        else:
            layout.check(spec)
            size, notes = layout.size_bytes(spec, self.trees), layout.notes(spec)
        return Plan(spec, size, 3 * 4 * largest, size / WRITTEN_PER_SECOND, notes, spec.kv_bytes_per_token(4))

    def support(self, spec: ModelSpec) -> Support:
        """See `Stage.support`."""
        if self.operators == "standard":
            shared.check(spec, "onnx_runtime")
            return shared.support(spec)
        layout.check(spec)
        return layout.support(spec)

    def run(self, source: Artifact, out: Path, context: Context) -> dict[str, Any]:
        """See `Stage.run`.

        Raises:
            MissingExtra: No onnx-ir.
        """
        from strop.model import CONFIG, Weights, copy_companions, read_spec

        try:
            from strop.export._onnx import standard
            from strop.export.onnx_runtime import graph
        except ModuleNotFoundError as error:
            raise MissingExtra("onnx-ir", "onnx", "exporting to onnx_runtime") from error
        spec = read_spec(source.path)
        with Weights(source.path) as weights:
            if self.operators == "standard":
                shared.check(spec, "onnx_runtime")
                operators = standard.write_model(spec, weights, out, dtype="float32")
            else:
                layout.check(spec)
                operators = graph.write_model(spec, weights, out, accuracy_level=self.accuracy_level, trees=self.trees)
        shutil.copyfile(source.path / CONFIG, out / CONFIG)
        copy_companions(source.path, out)
        return {"spec": spec, "traits": self._traits(spec, context.threads), "report": {"operators": operators}}

    def _traits(self, spec: ModelSpec, threads: int) -> Traits:
        return Traits(
            runtime="onnx_runtime",
            dtype="float32",
            threads=threads,
            device="cpu",
            context=spec.max_positions,
            vocab_size=spec.vocab_size,
            takes_trees=self.trees or self.operators == "standard",
            kernels=self._kernels(spec),
        )

    def _kernels(self, spec: ModelSpec) -> str:
        """What the traits say computes quantized linears."""
        quantized = [x for x in spec.linears() if x.quantization is not None]
        if self.operators == "standard":
            return STANDARD + (ROUNDED if any(map(layout.rounds_inputs, quantized)) else "")
        kernels = {
            f"{LEVEL}{self.accuracy_level}": any(map(layout.is_packed, quantized)),
            INTEGER: any(map(layout.rounds_inputs, quantized)),
            FLOAT8: any(map(layout.is_float8, quantized)),
            QUANTILES: any(map(layout.is_nf4, quantized)),
        }
        linears = ", ".join(name for name, is_there in kernels.items() if is_there) or FLOAT
        return linears if spec.kv_cache is None else f"{linears}{CACHE}{spec.kv_cache.format}"

    @staticmethod
    def load(path: Path, traits: Traits) -> Program:
        """Open what `run` wrote. See `session.load`."""
        from strop.export.onnx_runtime import session

        return session.load(path, traits)

    @staticmethod
    def write_exact(path: Path, traits: Traits, out: Path) -> Traits | None:
        """See `program.Rounding`: inputs of linears, keys and values stay float32, products become those of floats.

        Raises:
            MissingExtra: No onnx-ir.
        """
        kernels = traits.kernels.replace(f"{LEVEL}4", f"{LEVEL}1").replace(INTEGER, FLOAT).partition(CACHE)[0]
        kernels = kernels.replace(ROUNDED, "")
        if kernels == traits.kernels:
            return None
        try:
            from strop.export.onnx_runtime.graph import copy_exact
        except ModuleNotFoundError as error:
            raise MissingExtra("onnx-ir", "onnx", "checking an onnx_runtime program") from error
        copy_exact(path, out)
        return dataclasses.replace(traits, kernels=kernels)


STANDARD, ROUNDED = "standard operators", ", QuantizeLinear"
LEVEL, INTEGER, FLOAT = "MatMulNBits accuracy_level ", "MatMulIntegerToFloat", "MatMul float32"
FLOAT8, QUANTILES = "DequantizeLinear float8", "MatMulBnb4"
CACHE = ", GroupQueryAttention over a cache in "
"""Kernels, as the traits name them."""
WRITTEN_PER_SECOND = 2e8
"""Bytes, for estimates."""
