"""The network of TensorRT's engines on the CPU: `python benchmarks/tensorrt.py MODEL TEXT`, for `tensorrt.md`.

MODEL is anything that a recipe's `model.source` takes, TEXT a file. The graph that TensorRT parses runs in onnxruntime,
in float32 and in float16, plain and with 4-bit weights in groups of 64, and is compared with the checkpoint in eager
float32 over `--tokens` (256) of TEXT. onnxruntime computes most of float16 in float32 on a CPU and rounds what lies
between two operators, so the float16 figures show what rounding values costs, not what a GPU's sums do.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from strop.artifact import Artifact, Manifest, write_manifest
from strop.export._onnx.standard import write_model
from strop.export.eager import Eager
from strop.export.onnx_runtime import STANDARD, OnnxRuntime
from strop.methods.rtn import Rtn
from strop.model import Weights, load_tokenizer, read_spec
from strop.program import Logits, Program, Traits
from strop.sources import fetch
from strop.spec import DType
from strop.stage import Context

KEY = "0" * 64


def main() -> None:
    """Print one line for each form and type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "parent").mkdir()
        fetch(options.model, "float32", place / "parent")
        ids = load_tokenizer(place / "parent").encode(options.text.read_text(encoding="utf-8"))[: options.tokens]
        (place / "int4").mkdir()
        made = Rtn().run(Artifact(place / "parent", "checkpoint", KEY), place / "int4", Context(place))
        write_manifest(place / "int4", Manifest("checkpoint", KEY, made["spec"].to_json()))
        for name in ("parent", "int4"):
            traits = Traits("eager", "float32", 1, "cpu", options.tokens, made["spec"].vocab_size, takes_trees=True)
            expected = logits(Eager.load(place / name, traits), ids)
            for dtype in ("float32", "float16"):
                found = logits(graph(place / name, place / f"{name}-{dtype}", dtype, traits), ids)
                largest = np.abs(found - expected).max() / np.sqrt(np.mean(expected**2))
                same = float((found.argmax(-1) == expected.argmax(-1)).mean())
                print(f"{name} {dtype}: KL {kl(expected, found):.3g}, largest {largest:.3g}, same top-1 {same:.2%}")


def graph(source: Path, out: Path, dtype: DType, traits: Traits) -> Program:
    """The graph of a checkpoint in onnxruntime, its cache as long as the text."""
    out.mkdir()
    with Weights(source) as weights:
        write_model(read_spec(source), weights, out, dtype=dtype, capacity=traits.context)
    return OnnxRuntime.load(out, replace(traits, runtime="onnx_runtime", dtype=dtype, kernels=STANDARD))


def logits(program: Program, ids: list[int]) -> Logits:
    """(tokens, vocabulary)."""
    return program.open(1, len(ids)).step(np.array([ids]), logits="all")[0].copy()


def kl(p: Logits, q: Logits) -> float:
    """Mean KL(p ‖ q) over tokens, nats."""
    p64, q64 = (x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64), -1, keepdims=True) for x in (p, q))
    return float((np.exp(p64) * (p64 - q64)).sum(-1).mean())


if __name__ == "__main__":
    main()
