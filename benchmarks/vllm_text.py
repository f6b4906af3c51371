"""A checkpoint in vLLM and in strop: how long their greedy texts are equal, over twenty prompts.

    python benchmarks/vllm_text.py CHECKPOINT VLLM_PYTHON [--dtype float32] [--num-tokens 32]

CHECKPOINT is a folder that a stage wrote; vLLM opens it as it is. strop computes with it dequantized. Where texts part,
the lead of strop's largest logit over the next says whether it was a tie that rounding decides.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import torch

from strop.layers import fold
from strop.model import load_decoder, load_tokenizer

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "Question: What is 12 times 9?\nAnswer:",
    "The three laws of motion say that",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, the first person to walk on the Moon was",
    "A recipe for bread needs flour, water,",
    "The opposite of hot is",
    "Water boils at a temperature of",
    "import numpy as np\n\ndef mean(x):\n",
    "The largest planet of the solar system is",
    "To be or not to be,",
    "My favourite season is autumn because",
    "The chemical symbol of gold is",
    "Translate to French: good morning.",
    "A triangle has three",
    "The stock market fell today after",
    "Her name was Alice, and she",
    "SELECT name FROM customers WHERE",
)


@torch.inference_mode()
def greedy(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[tuple[int, float]]]:
    """For each prompt its tokens, each with the lead of its logit over the next."""
    decoder = load_decoder(folder)
    fold(decoder)
    found = []
    for prompt in prompts:
        ids, tokens = list(prompt), []
        for _ in range(num_tokens):
            x = decoder.embed(torch.tensor([ids]), torch.arange(len(ids))[None])
            for index in range(len(decoder.layers)):
                x = decoder.block(index, x)
            best = decoder.logits(x[0, -1:])[0].topk(2)
            tokens.append((int(best.indices[0]), float(best.values[0] - best.values[1])))
            ids.append(tokens[-1][0])
        found.append(tokens)
    return found


def main() -> None:
    """Print a line for each prompt and one for all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("python")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-tokens", type=int, default=32)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.checkpoint)
    prompts = [tokenizer(x)["input_ids"] for x in PROMPTS]
    script = Path(__file__).parent / "peers" / "vllm_greedy.py"
    command = [arguments.python, str(script), str(arguments.checkpoint), arguments.dtype, str(arguments.num_tokens)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    answer = subprocess.run(
        command, input=json.dumps(prompts), text=True, stdout=subprocess.PIPE, check=True, env=environment
    )
    theirs = json.loads(next(x for x in reversed(answer.stdout.splitlines()) if x.startswith("[[")))
    equal = []
    for text, ours, other in zip(
        PROMPTS, greedy(arguments.checkpoint, prompts, arguments.num_tokens), theirs, strict=True
    ):
        parted = next((i for i, ((x, _), y) in enumerate(zip(ours, other, strict=True)) if x != y), None)
        equal.append(len(ours) if parted is None else parted)
        end = "equal" if parted is None else f"part after {parted} tokens, where strop's lead is {ours[parted][1]:.3g}"
        print(f"{text[:30]!r}: {end}", flush=True)
    whole = sum(x == arguments.num_tokens for x in equal)
    print(
        f"{whole} of {len(equal)} texts of {arguments.num_tokens} tokens equal; mean {np.mean(equal):.1f}", flush=True
    )


if __name__ == "__main__":
    main()
