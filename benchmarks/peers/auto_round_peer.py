"""auto-round on the parent and the calibration tokens of `chains.py`, for the same comparison.

    AUTO_ROUND_PYTHON benchmarks/peers/auto_round_peer.py WORK [--bits 4] [--group-size 64] [--iterations 50]

WORK is a folder that `chains.py` filled: its parent/ and tokens.npy. Writes WORK/auto-round bits=N iterations=M, a
checkpoint of dequantized weights that `chains.py` measures by that name, and next to it seconds and peak memory. Runs
in an environment of its own (auto-round 0.16.1, torch 2.13.0).
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from auto_round import AutoRound
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Quantize once, and save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    work, name = arguments.work, f"auto-round bits={arguments.bits} iterations={arguments.iterations}"
    tokens = torch.from_numpy(np.load(work / "tokens.npy"))
    model = AutoModelForCausalLM.from_pretrained(work / "parent", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(work / "parent")
    start = time.perf_counter()
    rounding = AutoRound(
        model,
        tokenizer,
        scheme=f"W{arguments.bits}A16",
        group_size=arguments.group_size,
        sym=True,
        iters=arguments.iterations,
        nsamples=len(tokens),
        seqlen=tokens.shape[1],
        dataset=[{"input_ids": x[None], "attention_mask": torch.ones_like(x)[None]} for x in tokens],
        device_map="cpu",
    )
    # Not quantize_and_save(format="fake"): 0.16.1 then puts a float32 parent's tensors back in place of the rounded.
    rounded, _ = rounding.quantize()
    weights = {key: x.float().contiguous() for key, x in rounded.state_dict().items() if key != "lm_head.weight"}
    shutil.copytree(work / "parent", work / name, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(weights, work / name / "model.safetensors", metadata={"format": "pt"})
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (work / f"{name}.json").write_text(json.dumps({"seconds": seconds, "peak_bytes": peak}))


if __name__ == "__main__":
    main()
