"""What the runtimes `tensor_rt` and `tensorrt_rtx` share: everything but which library builds an engine, and where.

A strongly typed network is parsed from the graph of standard operators (`strop.export._onnx`), which onnxruntime runs
on the CPU too: that the graph computes what its checkpoint does is shown there, without a GPU.
"""

from __future__ import annotations

import shutil
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from strop.artifact import Artifact, Format, hash_file
from strop.errors import MissingExtra, UserError
from strop.export._onnx import layout
from strop.export._tensorrt import facts as engine_facts
from strop.export._tensorrt.facts import ENGINE, Facts
from strop.machine import gpus
from strop.program import Program, Traits
from strop.spec import DType, ModelSpec
from strop.stage import Context, Plan, Stage, Support

SECONDS_PER_LAYER = 1.5
"""To build an engine on one core, for estimates."""
ENGINE_BYTES, ENGINE_BYTES_PER_LAYER = 6_500_000, 700_000
"""Of an engine beside its weights, as tensorrt_rtx 1.7 writes its kernels; for estimates."""
BUILDER_BYTES = 1_500_000_000
"""Of the builder's process beside copies of the weights, for estimates."""


class EngineStage(Stage):
    """Lower to an engine. Subclasses name the library and the GPUs."""

    gives: ClassVar[Format] = "program"
    runtime: ClassVar[str]
    """Name in a recipe."""
    package: ClassVar[str]
    """Module of the library."""
    extra: ClassVar[str]
    """That installs the library."""

    dtype: Literal["float32", "float16", "bfloat16"] | None = Field(
        default=None, description="Of activations, and of weights that are not quantized; null: the checkpoint's."
    )
    max_batch: int = Field(default=1, ge=1, description="Most rows.")
    context: int | None = Field(
        default=None, ge=2, description="Tokens that a row's cache holds, its length is fixed; null: the model's."
    )
    prefill: int = Field(
        default=512, ge=1, description="Most new tokens of a row in one run; longer prompts take several."
    )
    verify: int = Field(
        default=8, ge=0, description="Most drafted tokens of a row: up to one more run under a profile of their own."
    )

    @abstractmethod
    def library(self) -> Any:
        """The module of the library.

        Raises:
            MissingExtra: It is not installed.
        """

    @abstractmethod
    def targets(self) -> list[str]:
        """Compute capabilities that an engine is built for.

        Raises:
            UserError: There is no GPU, and the library needs one.
        """

    def plan(self, spec: ModelSpec, num_calibration_tokens: int) -> Plan:  # noqa: ARG002 (the contract of a stage)
        """See `Stage.plan`."""
        self._check(spec)
        dtype = self._dtype(spec)
        size = layout.size_bytes(spec, dtype, self._context(spec))
        size += ENGINE_BYTES + ENGINE_BYTES_PER_LAYER * len(spec.layers)
        notes = layout.notes(spec, self.runtime, dtype)
        lack = engine_facts.lacks(self._facts(spec, "", "", ""))
        notes += () if lack is None else (f"{self.runtime} builds here but cannot run: {lack}; rows are NOT MEASURED",)
        return Plan(spec, size, BUILDER_BYTES + 2 * size, SECONDS_PER_LAYER * len(spec.layers), notes)

    def support(self, spec: ModelSpec) -> Support:
        """See `Stage.support`: whatever GPU is here."""
        layout.check(spec, self.runtime)
        return layout.support(spec)

    def run(self, source: Artifact, out: Path, context: Context) -> dict[str, Any]:
        """See `Stage.run`.

        Raises:
            MissingExtra: No onnx-ir, or not the library.
            UserError: The library refuses the network.
        """
        from strop.model import CONFIG, Weights, copy_companions, read_spec

        try:
            from strop.export._onnx.standard import write_model
        except ModuleNotFoundError as error:
            raise MissingExtra("onnx-ir", self.extra, f"exporting to {self.runtime}") from error
        from strop.export._tensorrt.builder import build

        library, spec = self.library(), read_spec(source.path)
        self._check(spec)
        with Weights(source.path) as weights:
            operators = write_model(
                spec, weights, context.scratch, dtype=self._dtype(spec), capacity=self._context(spec)
            )
        facts = self._facts(spec, library.__version__, "", hash_file(context.scratch / layout.DATA))
        engine = build(library, spec, context.scratch / layout.MODEL, facts, context.cache)
        (out / ENGINE).write_bytes(engine)
        facts = self._facts(spec, facts.version, hash_file(out / ENGINE), facts.weights_sha256)
        engine_facts.write(out, facts)
        shutil.copyfile(source.path / CONFIG, out / CONFIG)
        copy_companions(source.path, out)
        traits = Traits(
            runtime=self.runtime,
            dtype=self._dtype(spec),
            threads=context.threads,
            device="cuda",
            context=facts.context,
            vocab_size=spec.vocab_size,
            takes_trees=True,
            kernels=f"{facts.library} {facts.version}",
        )
        return {"spec": spec, "traits": traits, "report": {"operators": operators}}

    def _facts(self, spec: ModelSpec, version: str, engine: str, weights: str) -> Facts:
        context = self._context(spec)
        most = min(self.prefill, context)
        return Facts(
            library=self.package,
            version=version,
            compute_capabilities=tuple(self.targets()),
            max_batch=self.max_batch,
            context=context,
            prefill=most,
            verify=min(self.verify + 1, most),
            engine_sha256=engine,
            weights_sha256=weights,
        )

    def _dtype(self, spec: ModelSpec) -> DType:
        return spec.dtype if self.dtype is None else self.dtype

    def _context(self, spec: ModelSpec) -> int:
        """Tokens that a row's cache holds.

        Raises:
            UserError: More than the model has positions.
        """
        if self.context is not None and self.context > spec.max_positions:
            raise UserError(f"{self.runtime}: context {self.context}, the model has {spec.max_positions} positions")
        return self.context or spec.max_positions

    def _check(self, spec: ModelSpec) -> None:
        """Refuse what the network cannot hold.

        Raises:
            UserError: One line: where, what was found, what is allowed.
        """
        layout.check(spec, self.runtime)
        rounded = [x for x in spec.linears() if x.quantization is not None and x.quantization.activations is not None]
        if rounded and self._dtype(spec) == "float32":
            raise UserError(
                f"{self.runtime}: {rounded[0].name} rounds its inputs, which engines do beside 16-bit values; allowed: "
                "dtype float16, bfloat16"
            )
        for capability in self.targets():
            number = float(capability)
            if self._dtype(spec) == "bfloat16" and number < FIRST["bfloat16"]:
                raise UserError(f"{self.runtime}: GPUs of {capability} compute no bfloat16; allowed: float16, float32")
            for linear in spec.linears():
                form = "float" if linear.quantization is None else linear.quantization.format
                if number < FIRST.get(form, 0):
                    raise UserError(
                        f"{self.runtime}: GPUs of {capability} multiply no {form} weights, {linear.name} is "
                        f"such a one; allowed from {FIRST[form]} on"
                    )


FIRST = {"bfloat16": 8.0, "int": 8.0, "fp8": 8.9}
"""Smallest compute capability whose products take a type, by NVIDIA's tables."""


def load(path: Path, traits: Traits, library: Any) -> Program:
    """Open an engine on the first GPU.

    Args:
        path: What `EngineStage.run` wrote.
        traits: As it returned them.
        library: The module.

    Raises:
        UserError: It is missing, damaged, of another version, or not for this machine.
    """
    facts = engine_facts.read(path, traits.runtime)
    engine_facts.check(path, facts, library.__version__)
    import torch

    from strop.export._tensorrt.builder import deserialize
    from strop.export._tensorrt.session import EngineProgram
    from strop.model import read_spec

    if not torch.cuda.is_available():
        raise UserError(f"{path}: torch {torch.__version__} cannot use the GPU that is here: install a build with CUDA")
    engine = deserialize(library, path / ENGINE)
    return EngineProgram(engine, read_spec(path), facts, traits, torch.device("cuda"))


def lacks(path: Path, traits: Traits) -> str | None:
    """See `program.Elsewhere`."""
    return engine_facts.lacks(engine_facts.read(path, traits.runtime), gpus())
