"""Build the ONNX Runtime programs that `onnx_runtime.md` compares: `python benchmarks/build_programs.py MODEL OUT`.

MODEL is anything that a recipe's `model.source` takes. OUT gets one folder per checkpoint and per program.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from strop.artifact import Artifact, Manifest, write_manifest
from strop.export.eager import Eager
from strop.export.onnx_runtime import OnnxRuntime
from strop.methods.rtn import Rtn
from strop.sources import fetch
from strop.stage import Context, Stage

HEAD = ["lm_head"]
CHECKPOINTS: dict[str, list[Stage]] = {
    "w4g64_h8": [Rtn(), Rtn(bits=8, targets=HEAD)],
    "w4g32_h8": [Rtn(group_size=32), Rtn(bits=8, group_size=64, targets=HEAD)],
    "w4g32_h4": [Rtn(group_size=32), Rtn(group_size=32, targets=HEAD)],
    "w4g64_h4": [Rtn(), Rtn(targets=HEAD)],
}


def run(stage: Stage, source: Path, out: Path) -> None:
    """One stage, its output with a manifest as the store writes it."""
    out.mkdir(parents=True)
    result = stage.run(Artifact(source, "checkpoint", "0" * 64), out, Context(out))
    traits = asdict(result["traits"]) if "traits" in result else None
    write_manifest(out, Manifest(stage.gives, "0" * 64, result["spec"].to_json(), traits, report=result["report"]))


def main() -> None:
    """Build what is not there yet."""
    model, out = sys.argv[1], Path(sys.argv[2])
    parent = out / "parent"
    if not parent.exists():
        parent.mkdir(parents=True)
        fetch(model, "float32", parent)
        run(Eager(), parent, out / "parent-eager")
        run(OnnxRuntime(), parent, out / "parent-onnx")
    for name, (linears, head) in CHECKPOINTS.items():
        if not (out / f"{name}-onnx").exists():
            run(linears, parent, out / f"{name}-linears")
            run(head, out / f"{name}-linears", out / name)
            run(OnnxRuntime(), out / name, out / f"{name}-onnx")


if __name__ == "__main__":
    main()
