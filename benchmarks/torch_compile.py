"""Build the programs that `torch_compile.md` compares: `python benchmarks/torch_compile.py MODEL OUT`.

MODEL is anything that a recipe's `model.source` takes. OUT gets one folder per checkpoint and per program; seconds that
each export took go to stdout.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path

from strop.artifact import Artifact, Manifest, write_manifest
from strop.export.eager import Eager
from strop.export.onnx_runtime import OnnxRuntime
from strop.export.torch_compile import TorchCompile
from strop.methods.rtn import Rtn
from strop.sources import fetch
from strop.stage import Context, Stage

CHECKPOINTS: dict[str, Stage] = {
    "w8": Rtn(bits=8, group_size=64, targets=["*"]),
    "w4": Rtn(bits=4, group_size=64, targets=["*"]),
}


def run(stage: Stage, source: Path, out: Path) -> None:
    """One stage, its output with a manifest as the store writes it."""
    out.mkdir(parents=True)
    scratch = out.with_name(f"{out.name}.scratch")
    scratch.mkdir()
    start = time.perf_counter()
    result = stage.run(Artifact(source, "checkpoint", "0" * 64), out, Context(scratch))
    print(f"{out.name}: {time.perf_counter() - start:.1f} s", flush=True)
    traits = asdict(result["traits"]) if "traits" in result else None
    write_manifest(out, Manifest(stage.gives, "0" * 64, result["spec"].to_json(), traits, report=result["report"]))


def main() -> None:
    """Build what is not there yet."""
    model, out = sys.argv[1], Path(sys.argv[2])
    for dtype in ("float32", "bfloat16"):
        parent = out / f"parent-{dtype}"
        if not parent.exists():
            parent.mkdir(parents=True)
            fetch(model, dtype, parent)
    jobs: dict[str, tuple[Stage, str]] = {
        "eager-bf16": (Eager(), "parent-bfloat16"),
        "compiled-bf16": (TorchCompile(), "parent-bfloat16"),
        "compiled-fp32": (TorchCompile(), "parent-float32"),
        "eager-fp32": (Eager(), "parent-float32"),
        **{name: (stage, "parent-float32") for name, stage in CHECKPOINTS.items()},
        **{f"compiled-{name}": (TorchCompile(dtype="bfloat16"), name) for name in CHECKPOINTS},
        **{f"onnx-{name}": (OnnxRuntime(), name) for name in CHECKPOINTS},
    }
    for name, (stage, source) in jobs.items():
        if not (out / name).exists():
            run(stage, out / source, out / name)


if __name__ == "__main__":
    main()
