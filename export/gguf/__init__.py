"""One GGUF file for llama.cpp and what is built on it: codes taken over as they are, tokenizer and template inside.

strop runs no llama.cpp. It opens the file it wrote with its own reader and runs what is in it in PyTorch, so quality,
conformance and size are the file's. Speed and memory of such a program are PyTorch's.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from strop.artifact import Artifact, Format
from strop.export.gguf import layout
from strop.program import Program, Traits
from strop.spec import ModelSpec
from strop.stage import Context, Plan, Stage, Support

WRITTEN_PER_SECOND = 1e8
"""Bytes of float32 weights, for estimates."""


class Gguf(Stage):
    """Write a GGUF file, for llama.cpp.

    Symmetric codes of up to 4 bits and asymmetric ones of up to 3 become Q4_0, asymmetric 4-bit codes Q5_0, symmetric
    8-bit codes Q8_0, in groups that are multiples of 32; mxfp4 stays what it is.

    Attributes:
        type: Of matrices that are not quantized, the embedding too; null: what holds the checkpoint's dtype.
        requantize: Type that codes are rounded to anew where no block type holds them; null: they are refused.
    """

    gives: ClassVar[Format] = "program"

    type: layout.Type | None = None
    requantize: layout.Type | None = None

    def plan(self, spec: ModelSpec, num_calibration_tokens: int) -> Plan:  # noqa: ARG002 (the contract of a stage)
        """See `Stage.plan`."""
        layout.check(spec)
        slots = layout.slots(spec, self.type, self.requantize)
        largest = max(x.in_features * x.out_features for x in spec.linears())
        seconds = 4 * spec.num_parameters() / WRITTEN_PER_SECOND
        stored = layout.stored_spec(spec, slots)
        return Plan(stored, layout.size_bytes(slots), 4 * 4 * largest, seconds, layout.notes(spec, slots))

    def support(self, spec: ModelSpec) -> Support:
        """See `Stage.support`."""
        layout.check(spec)
        wider = False
        for slot in layout.slots(spec, self.type, self.requantize):
            q = None if slot.linear is None else slot.linear.quantization
            wider |= q is not None and layout.CODE_BITS.get(slot.type, q.bits) > q.bits
        return "widened" if wider else "native"

    def run(self, source: Artifact, out: Path, context: Context) -> dict[str, Any]:
        """See `Stage.run`."""
        from strop.export.gguf.file import write_file
        from strop.export.gguf.vocabulary import read_vocabulary
        from strop.model import Weights, copy_companions, read_config, read_spec

        spec = read_spec(source.path)
        layout.check(spec)
        slots = layout.slots(spec, self.type, self.requantize)
        vocabulary = read_vocabulary(source.path, spec.vocab_size)
        with Weights(source.path) as weights:
            write_file(
                out / layout.FILE, spec, weights, read_config(source.path),
                slots=slots, vocabulary=vocabulary, progress=context.progress,
            )  # fmt: skip
        copy_companions(source.path, out)
        traits = Traits(
            runtime="gguf",
            dtype="float32",
            threads=context.threads,
            device="cpu",
            context=layout.context_length(spec),
            vocab_size=spec.vocab_size,
            takes_trees=True,
            kernels=f"torch {version('torch')} on {layout.FILE} dequantized",
        )
        return {
            "spec": layout.stored_spec(spec, slots),
            "traits": traits,
            "report": {"types": layout.types(slots)},
        }

    @staticmethod
    def load(path: Path, traits: Traits) -> Program:
        """Open the file that `run` wrote, dequantized. Sets torch's threads for the whole process."""
        import torch

        from strop.export.eager import DecoderProgram
        from strop.export.gguf.file import load_decoder

        torch.set_num_threads(traits.threads)
        return DecoderProgram(load_decoder(path / layout.FILE), traits)

    @staticmethod
    def write_reference(path: Path, checkpoint: Path, out: Path) -> ModelSpec | None:
        """See `program.Recoding`."""
        from strop.export.gguf.file import write_rounded

        return write_rounded(path / layout.FILE, checkpoint, out)
