"""How many tokens `gptq` needs, as an expert that few reach has few: its error on other text, by tokens and damping.

    python benchmarks/few_tokens.py GGUF TEXT [--layer 3] [--bits 4]

Takes what `gate_proj` and `up_proj`, and what `down_proj` of one layer read of 16 x 1024 tokens of TEXT. A random part
of the first half calibrates 256 rows, the second half judges: Σ ‖(W - Ŵ) x‖² by that of rounding to nearest. Beside
gptq is rounding with scales of least error weighted by the same tokens' energy.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from strop.calibration.capture import Group, hessian, walk
from strop.methods._compensation import MOST_DAMPING, Compensation, relative_error
from strop.model import load_tokenizer
from strop.numerics import dequantize, find_scales, quantize, search_scales
from strop.sources import fetch
from strop.spec import Quantization

COUNTS = (4, 16, 64, 256, 1024, 4096)
SAMPLES, LENGTH, ROWS, GROUP_SIZE = 16, 1024, 256, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--bits", type=int, default=4, choices=(2, 3, 4, 8))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        spec = fetch(options.model, "float32", folder)
        text = options.text.read_text(encoding="utf-8")[: 8 * SAMPLES * LENGTH]
        ids = torch.tensor(load_tokenizer(folder)(text)["input_ids"][: SAMPLES * LENGTH]).view(SAMPLES, LENGTH)

        def visit(group: Group) -> bool:
            if group.layer == options.layer and group.linears[0].name.endswith(("gate_proj", "down_proj")):
                compare(group, options.bits)
            return group.layer <= options.layer

        walk(folder, spec, ids, visit)


def compare(group: Group, bits: int) -> None:
    """Print a row for each number of tokens."""
    x = torch.cat(list(group.inputs()))
    half = len(x) // 2
    weight = torch.cat([group.weights[y.name] for y in group.linears])[:ROWS]
    width, form, judge = weight.shape[1], Quantization(bits, GROUP_SIZE, True), hessian([x[half:]])
    stage, generator = Compensation(), torch.Generator().manual_seed(0)

    def error(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> float:
        return relative_error(weight, dequantize(codes, scale, zero), judge)

    def rounded(scale: torch.Tensor, zero: torch.Tensor) -> float:
        return error(quantize(weight, scale, zero, bits), scale, zero)

    nearest = rounded(*find_scales(weight, form))
    print(f"{group.linears[0].name}, {width} inputs, {bits} bits: {nearest:.4g} by rounding to nearest")
    for count in COUNTS:
        h = hessian([x[torch.randperm(half, generator=generator)[:count]]])
        found = [f"scales {rounded(*search_scales(weight, form, h.diagonal())) / nearest:.2f}"]
        for damping in (0.01, min(MOST_DAMPING, max(0.01, width / count)), 1.0):
            solution = stage._solve(weight, h, None, form, "here", damping=damping)
            found.append(f"gptq {damping:.3g}: {error(solution.codes, solution.scale, solution.zero) / nearest:.2f}")
        print(f"{count:5} tokens: {', '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
