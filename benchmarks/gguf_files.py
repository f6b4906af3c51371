"""Exported GGUF files in llama.cpp and in strop: the same tokens, the same text, how far apart.

    python benchmarks/gguf_files.py MODEL TEXT WORK LLAMA_PYTHON [--windows 4]

MODEL is anything that a recipe's `model.source` takes, LLAMA_PYTHON an interpreter with llama-cpp-python. For each
file: whether both cut a sample of TEXT into the same tokens, how long greedy texts of eight prompts agree, and KL and
same top-1 of llama.cpp's logits to those of the very file in strop, over windows of 512 tokens of TEXT. Then the KL of
both to the parent. Results: `gguf.md`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strop.artifact import Artifact, Manifest, open_artifact, write_manifest
from strop.export.gguf import Gguf, layout
from strop.methods.rtn import Rtn
from strop.model import load_tokenizer
from strop.program import Program, open_program
from strop.sources import fetch
from strop.stage import Context, Stage

LENGTH, NUM_TOKENS, THREADS = 512, 48, 2
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "Question: What is 12 times 9?\nAnswer:",
    "The three laws of motion say that",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, the first person to walk on the Moon was",
    "A recipe for bread needs flour, water,",
)
FILES: dict[str, tuple[list[Stage], Gguf]] = {
    "F32": ([], Gguf()),
    "F16": ([], Gguf(type="F16")),
    "Q8_0": ([], Gguf(type="Q8_0")),
    "rtn 4 bits g32, Q8_0 embedding": ([Rtn(bits=4, group_size=32)], Gguf(type="Q8_0")),
    "rtn 8 bits g32": ([Rtn(bits=8, group_size=32, targets=["*"])], Gguf()),
    "rtn 4 bits g32 asymmetric, Q8_0 embedding": ([Rtn(bits=4, group_size=32, symmetric=False)], Gguf(type="Q8_0")),
    "Q4_0": ([], Gguf(type="Q4_0")),
}
Logits = NDArray[np.float32]


class LlamaCpp:
    """A file in llama.cpp, in a process of its own."""

    def __init__(self, python: str, path: Path) -> None:
        worker = Path(__file__).parent / "peers" / "llama_cpp_worker.py"
        command = [python, str(worker), str(path), str(THREADS), str(LENGTH + NUM_TOKENS)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._line().split()[1]

    def ask(self, **request: Any) -> Any:
        """One request and its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self._line())

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit("llama.cpp's process ended")
        return line


def run(stage: Stage, source: Path, out: Path) -> Path:
    """One stage, its output with a manifest as the store writes it; what is there already is taken."""
    if (out / "strop.json").exists():
        return out
    out.mkdir(parents=True)
    made = stage.run(Artifact(source, "checkpoint", "0" * 64), out, Context(out))
    traits = asdict(made["traits"]) if "traits" in made else None
    write_manifest(out, Manifest(stage.gives, "0" * 64, made["spec"].to_json(), traits, report=made["report"]))
    return out


def build(work: Path, name: str) -> Path:
    """The program of one of `FILES`."""
    stages, export = FILES[name]
    source = work / "parent"
    for i, stage in enumerate(stages):
        source = run(stage, source, work / f"{name}.{i}")
    return run(export, source, work / name)


def greedy(program: Program, prompt: list[int]) -> list[int]:
    """The likeliest token again and again."""
    session = program.open(1, len(prompt) + NUM_TOKENS)
    logits, tokens = session.step(np.array([prompt])), list[int]()
    while len(tokens) < NUM_TOKENS:
        tokens.append(int(logits[0, -1].argmax()))
        logits = session.step(np.array([tokens[-1:]]))
    return tokens


def log_softmax(x: Logits) -> NDArray[np.float64]:
    """In float64."""
    shifted = x.astype(np.float64) - x.max(-1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def kl(p: Logits, q: Logits) -> NDArray[np.float64]:
    """Nats at each position."""
    log_p, log_q = log_softmax(p), log_softmax(q)
    found: NDArray[np.float64] = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    return found


def agreed(ours: list[int], theirs: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


def main() -> None:
    """Print a line for each file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("python")
    parser.add_argument("--windows", type=int, default=4)
    arguments = parser.parse_args()
    work = arguments.work
    if not (work / "parent" / "strop.json").exists():
        (work / "parent").mkdir(parents=True, exist_ok=True)
        spec = fetch(arguments.model, "float32", work / "parent")
        write_manifest(work / "parent", Manifest("checkpoint", "0" * 64, spec.to_json()))
    tokenizer = load_tokenizer(work / "parent")
    text = arguments.text.read_text(encoding="utf-8")
    ids = tokenizer(text[:400_000], add_special_tokens=False)["input_ids"]
    windows = [
        [tokenizer.bos_token_id, *ids[i * (LENGTH - 1) : (i + 1) * (LENGTH - 1)]] for i in range(arguments.windows)
    ]
    prompts = [tokenizer(x)["input_ids"] for x in PROMPTS]
    parents: list[Logits] = []
    for name in FILES:
        path = build(work, name)
        program = open_program(open_artifact(path), THREADS)
        ours = [program.open(1, LENGTH).step(np.array([x]), logits="all")[0].copy() for x in windows]
        texts = [greedy(program, x) for x in prompts]
        del program
        parents = parents or ours
        peer = LlamaCpp(arguments.python, path / layout.FILE)
        sample = text[:20_000]
        same_tokens = peer.ask(tokenize=sample) == tokenizer(sample, add_special_tokens=False)["input_ids"]
        lengths = [agreed(a, peer.ask(greedy=x, num_tokens=NUM_TOKENS)) for a, x in zip(texts, prompts, strict=True)]
        theirs = []
        for window in windows:
            peer.ask(logits=window, out=str(work / "logits.npy"))
            theirs.append(np.load(work / "logits.npy"))
        peer.close()
        between = np.concatenate([kl(a, b) for a, b in zip(ours, theirs, strict=True)])
        same = np.mean([(a.argmax(-1) == b.argmax(-1)).mean() for a, b in zip(ours, theirs, strict=True)])
        to_parent = [np.mean([kl(p, x).mean() for p, x in zip(parents, y, strict=True)]) for y in (ours, theirs)]
        size = (path / layout.FILE).stat().st_size
        print(
            f"{name:42} {size / 1e6:6.1f} MB  tokens {'equal' if same_tokens else 'DIFFER'}"
            f"  greedy {lengths} of {NUM_TOKENS}"
            f"  KL {between.mean():.3g} (largest {between.max():.3g})  top-1 {100 * same:.2f} %"
            f"  to the parent: strop {to_parent[0]:.4g}, llama.cpp {to_parent[1]:.4g}"
            f"  (llama-cpp-python {peer.version})",
            flush=True,
        )


if __name__ == "__main__":
    main()
