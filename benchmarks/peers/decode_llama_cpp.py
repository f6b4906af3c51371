"""A worker that decodes a GGUF file with llama.cpp, for `decode_duel.py`. Runs in an environment of its own.

`python decode_llama_cpp.py FILE THREADS`: prints `ready`, then for each JSON line {"prompt": [...], "num_tokens": n}
the seconds until the first token and of each later one. llama.cpp's defaults but for the threads; its own functions are
called, not the Python class around them, which copies logits.
"""

from __future__ import annotations

import json
import sys
import time

import llama_cpp
import numpy as np

CONTEXT = 2048


def main() -> None:
    """Load once, then answer requests."""
    path, threads = sys.argv[1], int(sys.argv[2])
    model = llama_cpp.Llama(
        path, n_ctx=CONTEXT, n_batch=CONTEXT, n_ubatch=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    context, vocabulary = model.ctx, model.n_vocab()
    memory = llama_cpp.llama_get_memory(context)

    def next_token(tokens: list[int]) -> int:
        array = (llama_cpp.llama_token * len(tokens))(*tokens)  # the batch holds a bare pointer to it
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens))):
            sys.exit("llama_decode failed")
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        return int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax())

    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        llama_cpp.llama_memory_clear(memory, True)
        seconds: list[float] = []
        tokens: list[int] = request["prompt"]
        made = []
        start = time.perf_counter()
        while len(made) < request["num_tokens"]:
            made.append(next_token(tokens))
            tokens = made[-1:]
            now = time.perf_counter()
            seconds.append(now - start)
            start = now
        print(json.dumps({"token_s": seconds, "tokens": made}), flush=True)


if __name__ == "__main__":
    main()
