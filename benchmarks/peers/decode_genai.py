"""A worker that decodes with onnxruntime-genai, for `decode_duel.py`. Runs in an environment of its own.

`python decode_genai.py FOLDER THREADS`: prints `ready`, then for each JSON line {"prompt": [...], "num_tokens": n} the
seconds until the first token and of each later one.
"""

from __future__ import annotations

import json
import sys
import time

import onnxruntime_genai


def main() -> None:
    """Load once, then answer requests."""
    folder, threads = sys.argv[1], int(sys.argv[2])
    config = onnxruntime_genai.Config(folder)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = onnxruntime_genai.Model(config)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        length = len(request["prompt"]) + request["num_tokens"]
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(do_sample=False, min_length=length, max_length=length)
        generator = onnxruntime_genai.Generator(model, params)
        seconds, tokens = [], []
        start = time.perf_counter()
        generator.append_tokens(request["prompt"])
        while len(tokens) < request["num_tokens"]:
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
            now = time.perf_counter()
            seconds.append(now - start)
            start = now
        print(json.dumps({"token_s": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
