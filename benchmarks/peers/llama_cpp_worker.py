"""A worker that runs a GGUF file in llama.cpp, for `gguf_files.py`. Runs in an environment of its own.

`python llama_cpp_worker.py FILE THREADS CONTEXT`: prints `ready VERSION`, then answers JSON lines: {"tokenize": text}
with ids, {"greedy": ids, "num_tokens": n} with ids, {"logits": ids, "out": path} by saving (T, V) float32 there. Keys
and values are float32, so that what is left is llama.cpp's rounding of inputs to int8.
"""

from __future__ import annotations

import json
import sys

import llama_cpp
import numpy as np


def main() -> None:
    """Load once, then answer requests."""
    path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    kinds = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    model = llama_cpp.Llama(
        path, n_ctx=context, n_batch=context, n_threads=threads, n_threads_batch=threads, logits_all=True,
        verbose=False, flash_attn=False, **kinds,
    )  # fmt: skip
    print(f"ready {llama_cpp.__version__}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "tokenize" in request:
            print(json.dumps(model.tokenize(request["tokenize"].encode(), add_bos=False, special=False)), flush=True)
            continue
        ids = request.get("greedy") or request["logits"]
        model.reset()
        model.eval(ids)
        if "out" in request:
            np.save(request["out"], np.array(model.scores[: len(ids)], dtype=np.float32))
            print("null", flush=True)
            continue
        tokens: list[int] = []
        while len(tokens) < request["num_tokens"]:
            tokens.append(int(model.scores[model.n_tokens - 1].argmax()))
            model.eval(tokens[-1:])
        print(json.dumps(tokens), flush=True)


if __name__ == "__main__":
    main()
