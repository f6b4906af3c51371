"""Mean KL of programs to a parent: `python benchmarks/program_kl.py TEXT PARENT NAME=FOLDER NAME=genai:FOLDER ...`.

PARENT and FOLDER are programs of strop, `genai:` folders come from onnxruntime-genai's model builder and run in plain
onnxruntime. `--windows` (24) of 512 tokens of TEXT (a file), a BOS token in front of each; nats, over all positions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from strop.artifact import open_artifact
from strop.model import load_tokenizer
from strop.program import open_program

LENGTH = 512
Logits = NDArray[np.float32]


def of_program(folder: Path, threads: int) -> Callable[[NDArray[np.int64]], Logits]:
    """ids (1, T) -> logits (T, V)."""
    program = open_program(open_artifact(folder), threads)
    session = program.open(1, LENGTH)

    def logits(ids: NDArray[np.int64]) -> Logits:
        session.truncate([0])
        return session.step(ids, logits="all")[0]

    return logits


def of_genai(folder: Path) -> Callable[[NDArray[np.int64]], Logits]:
    """The same for a model of onnxruntime-genai."""
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    decoder = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
    empty = np.zeros((1, decoder["num_key_value_heads"], 0, decoder["head_size"]), np.float32)
    past = {x.name: empty for x in session.get_inputs() if x.name.startswith("past")}

    def logits(ids: NDArray[np.int64]) -> Logits:
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), **past}
        found: Logits = session.run(["logits"], feeds)[0][0]
        return found

    return logits


def log_softmax(x: Logits) -> NDArray[np.float64]:
    """In float64."""
    shifted = x.astype(np.float64) - x.max(-1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def main() -> None:
    """Print one line an arm."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("parent", type=Path)
    parser.add_argument("arms", nargs="+")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    count, threads = arguments.windows, arguments.threads
    tokenizer = load_tokenizer(arguments.parent)
    ids = np.array(tokenizer(arguments.text.read_text(encoding="utf-8")[:400_000])["input_ids"], np.int64)
    windows = ids[: count * (LENGTH - 1)].reshape(count, -1)
    windows = np.concatenate([np.full((count, 1), tokenizer.bos_token_id), windows], 1)
    reference = of_program(arguments.parent, threads)
    arms = {}
    for arm in arguments.arms:
        name, _, place = arm.partition("=")
        kind, _, folder = place.rpartition(":")
        arms[name] = of_genai(Path(folder)) if kind else of_program(Path(folder), threads)
    divergences: dict[str, list[NDArray[np.float64]]] = {name: [] for name in arms}
    same: dict[str, list[float]] = {name: [] for name in arms}
    for window in windows:
        p = log_softmax(reference(window[None]))
        for name, logits in arms.items():
            q = log_softmax(logits(window[None]))
            divergences[name].append((np.exp(p) * (p - q)).sum(-1))
            same[name].append(float((p.argmax(-1) == q.argmax(-1)).mean()))
    for name in arms:
        means = np.array([x.mean() for x in divergences[name]])
        error = means.std(ddof=1) / len(means) ** 0.5
        print(f"{name:20} KL {means.mean():.6g} ± {error:.2g}  same top-1 {100 * np.mean(same[name]):.2f} %")


if __name__ == "__main__":
    main()
