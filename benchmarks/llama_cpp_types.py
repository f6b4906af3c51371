"""llama.cpp's own types on the parent of `chains.py`, for the same comparison, with an importance matrix.

    python benchmarks/llama_cpp_types.py WORK LLAMA_PYTHON [--types Q4_0 Q4_K_M Q8_0]

WORK is a folder that `chains.py` filled. Writes the parent as an F32 GGUF file, the mean square of each linear's inputs
over the calibration tokens, and for each type WORK/llama.cpp TYPE.gguf and WORK/llama.cpp TYPE, its weights dequantized
to float32, a checkpoint that `chains.py` measures by that name. LLAMA_PYTHON is an interpreter with llama-cpp-python.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import numpy as np
import torch

from strop.artifact import Artifact
from strop.calibration.capture import Group, walk
from strop.export.gguf import Gguf, layout
from strop.gguf_file import read_gguf, tensor_names
from strop.model import read_spec
from strop.sources import fetch
from strop.stage import Context

KEY = "0" * 64


def importance(parent: Path, tokens: np.ndarray, names: dict[str, str]) -> dict[str, np.ndarray]:
    """Name of a tensor in the GGUF file -> mean square of each input (in,)."""
    found: dict[str, np.ndarray] = {}

    def visit(group: Group) -> bool:
        total, count = torch.zeros(group.linears[0].in_features, dtype=torch.float64), 0
        for x in group.inputs():
            total += x.square().sum(0, dtype=torch.float64)
            count += len(x)
        for linear in group.linears:
            found[names.get(f"{linear.name}.weight", linear.name)] = (total / count).float().numpy()
        return True

    walk(parent, read_spec(parent), torch.from_numpy(tokens), visit)
    return found


def main() -> None:
    """Write what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("python")
    parser.add_argument("--types", nargs="+", default=["Q4_0", "Q4_K_M"])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    work = arguments.work
    parent, whole = work / "parent", work / "parent.F32"
    if not whole.exists():
        whole.mkdir()
        Gguf().run(Artifact(parent, "checkpoint", KEY), whole, Context(whole))
    file = whole / layout.FILE
    matrix = work / "imatrix.npz"
    if not matrix.exists():
        np.savez(matrix, **importance(parent, np.load(work / "tokens.npy"), tensor_names(read_gguf(file))))
    script = Path(__file__).parent / "peers" / "llama_cpp_quantize.py"
    for kind in arguments.types:
        out, folder = work / f"llama.cpp {kind}.gguf", work / f"llama.cpp {kind}"
        if not folder.exists():
            subprocess.run([arguments.python, script, file, out, kind, matrix], check=True)
            folder.mkdir()
            fetch(str(out), "float32", folder)
        print(f"{kind}: {out.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()
