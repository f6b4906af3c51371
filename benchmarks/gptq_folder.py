"""An exported folder in AutoGPTQ's layout, opened by transformers and GPTQModel, against the same folder in strop.

    python benchmarks/gptq_folder.py MODEL WORK GPTQ_PYTHON

MODEL is anything that a recipe's `model.source` takes, GPTQ_PYTHON an interpreter with transformers, optimum and
gptqmodel. For each setting: KL and same top-1 of their logits to strop's over 8 prompts of 64 random tokens.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from gguf_files import kl, run

from strop.artifact import Manifest, open_artifact, write_manifest
from strop.export.auto_gptq import AutoGptq
from strop.methods.rtn import Rtn
from strop.program import open_program
from strop.sources import fetch

ROWS, LENGTH = 8, 64
SETTINGS = {
    "4 bits g64": Rtn(bits=4, group_size=64),
    "8 bits g64": Rtn(bits=8, group_size=64),
    "4 bits g64 asymmetric": Rtn(bits=4, group_size=64, symmetric=False),
}


def main() -> None:
    """Print a line for each setting."""
    model, work, python = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    parent = work / "parent"
    if not (parent / "strop.json").exists():
        parent.mkdir(parents=True, exist_ok=True)
        spec = fetch(model, "float32", parent)
        write_manifest(parent, Manifest("checkpoint", "0" * 64, spec.to_json()))
    worker = Path(__file__).parent / "peers" / "gptq_logits.py"
    for name, stage in SETTINGS.items():
        path = run(AutoGptq(), run(stage, parent, work / f"{name}.0"), work / name)
        program = open_program(open_artifact(path), 2)
        ids = np.random.default_rng(0).integers(0, program.traits.vocab_size, (ROWS, LENGTH), dtype=np.int64)
        ours = program.open(ROWS, LENGTH).step(ids, logits="all")
        np.save(work / "ids.npy", ids)
        command = [python, str(worker), str(path), str(work / "ids.npy"), str(work / "logits.npy")]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip().splitlines()[-1]
        theirs = np.load(work / "logits.npy")
        same = 100 * float((ours.argmax(-1) == theirs.argmax(-1)).mean())
        print(f"{name:24} KL {kl(ours, theirs).mean():.3g}  top-1 {same:.2f} %  ({said})", flush=True)


if __name__ == "__main__":
    main()
