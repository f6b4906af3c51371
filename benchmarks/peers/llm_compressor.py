"""llm-compressor's GPTQ on the parent and the calibration tokens of `chains.py`, for the same comparison.

    LLMCOMPRESSOR_PYTHON benchmarks/peers/llm_compressor.py WORK [--bits 4] [--group-size 64]

WORK is a folder that `chains.py` filled: its parent/ and tokens.npy. Writes WORK/llm-compressor gptq bits=N, a
checkpoint that `chains.py` measures by that name, and next to it seconds and peak memory. Runs in an environment of
its own (llmcompressor 0.14.0.1, torch 2.13.0).
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Quantize once, and save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    work, name = arguments.work, f"llm-compressor gptq bits={arguments.bits}"
    tokens = np.load(work / "tokens.npy")
    model = AutoModelForCausalLM.from_pretrained(work / "parent", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(work / "parent")
    samples = Dataset.from_dict({"input_ids": tokens.tolist(), "attention_mask": np.ones_like(tokens).tolist()})
    weights = {
        "num_bits": arguments.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": arguments.group_size,
    }
    recipe = GPTQModifier(config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"])
    start = time.perf_counter()
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=samples,
        recipe=recipe,
        max_seq_length=tokens.shape[1],
        num_calibration_samples=len(tokens),
    )
    model.save_pretrained(work / name, save_compressed=True)
    tokenizer.save_pretrained(work / name)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (work / f"{name}.json").write_text(json.dumps({"seconds": seconds, "peak_bytes": peak}))


if __name__ == "__main__":
    main()
