"""Chains of stages against each other: KL to the parent, bytes, seconds, memory. Results: `gptq.md` and others.

    python benchmarks/chains.py MODEL CALIBRATION.txt MEASURE.txt WORK "rtn" "rotate + rtn" "rtn bits=3" ...

MODEL is anything that a recipe's `model.source` takes. A chain is stages with their fields as a recipe names them; the
ratios are to the first. What chains have in common is built once. Each stage runs in a process of its own, so that its
peak memory is its own, and is resumed where it was killed. A folder of WORK that was not built here, such as another
tool's checkpoint (`peers/`), is measured by its name too. The windows are the first of MEASURE, one after the other,
each 1024 tokens with BOS in front; calibration is on `--samples` windows of 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from strop import plugin
from strop.artifact import Artifact, Manifest, write_manifest
from strop.calibration.text import documents
from strop.calibration.tokens import windows
from strop.layers import fold
from strop.model import load_decoder, load_tokenizer, read_spec
from strop.sources import fetch
from strop.stage import Context, Stage
from strop.statistics import bootstrap_ratio_of_means

LENGTH = 512
WINDOW = 1024
KEY = "0" * 64
TASKS, ITEMS = ("arc_easy", "piqa"), 500
SCORES = ("kl", "same_top", "loss_parent", "loss")
Scores = dict[str, np.ndarray[Any, Any]]


def build(work: Path, before: str, text: str, threads: int) -> None:
    """Run one stage on what the chain `before` gave and write what it took next to its output."""
    use, *given = text.split()
    fields = {key: yaml.safe_load(value) for key, value in (x.split("=", 1) for x in given)}
    stage = plugin.find("methods", use, Stage).model_validate(fields)
    name = f"{before} + {text}" if before else text
    out, scratch = work / name, work / f"{name}.scratch"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    is_resumed = scratch.exists() and any(scratch.iterdir())
    scratch.mkdir(exist_ok=True)
    start = time.perf_counter()
    context = Context(scratch, threads=threads, calibration=work / "tokens.npy")
    result = stage.run(Artifact(work / (before or "parent"), "checkpoint", KEY), out, context)
    seconds = time.perf_counter() - start
    write_manifest(out, Manifest("checkpoint", KEY, result["spec"].to_json(), report=result["report"]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (work / f"{name}.json").write_text(json.dumps({"seconds": None if is_resumed else seconds, "peak_bytes": peak}))


def fixed_windows(tokenizer: Any, path: str, count: int) -> torch.Tensor:
    """(count, WINDOW) token ids: the text cut every WINDOW - 1 tokens, BOS in front of each."""
    text = Path(path).read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][: count * (WINDOW - 1)]
    cut = torch.tensor(ids).view(count, WINDOW - 1)
    return torch.cat([torch.full((count, 1), tokenizer.bos_token_id), cut], 1)


@torch.inference_mode()
def hidden_states(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """(windows, tokens, hidden), before the final norm."""
    decoder = load_decoder(folder)
    fold(decoder)
    found = []
    for window in ids:
        x = decoder.embed(window[None], torch.arange(WINDOW)[None])
        for index in range(len(decoder.layers)):
            x = decoder.block(index, x)
        found.append(x)
    return torch.cat(found)


@torch.inference_mode()
def compare(parent: Path, hidden: torch.Tensor, other: Path, ids: torch.Tensor) -> Scores:
    """Per window: mean KL(parent ‖ other) in nats, share of equal top tokens, mean loss of both.

    KL is computed from the difference of the logits, as in `sensitivity.divergence`.
    """
    one, two = load_decoder(parent), load_decoder(other)
    fold(two)
    rows = []
    for x, y, window in zip(hidden, hidden_states(other, ids), ids, strict=True):
        p, d = one.logits(x), two.logits(y)
        is_same = (p.argmax(-1) == d.argmax(-1)).double().mean()
        loss_other = torch.nn.functional.cross_entropy(d[:-1], window[1:])
        loss = torch.nn.functional.cross_entropy(p[:-1], window[1:])
        d.sub_(p)
        p = p.log_softmax(-1)
        mean = (p.exp() * d).sum(-1)
        kl = (d.add_(p).logsumexp(-1) - mean).double().mean()
        rows.append([float(z) for z in (kl, is_same, loss, loss_other)])
    return dict(zip(SCORES, np.array(rows).T, strict=True))


def kept_scores(work: Path, chain: str, hidden: Callable[[], torch.Tensor], ids: torch.Tensor) -> Scores:
    """`compare`, unless it was done before with these windows."""
    path = work / f"{chain}.scores.npz"
    if path.exists():
        kept = dict(np.load(path))
        if np.array_equal(kept.pop("ids"), ids.numpy()):
            return kept
    scores = compare(work / "parent", hidden(), work / chain, ids)
    np.savez(path, ids=ids.numpy(), **scores)
    return scores


@torch.inference_mode()
def logit_error(parent: Path, hidden: torch.Tensor, other: Path, ids: torch.Tensor) -> float:
    """Largest difference of a logit in the first window, relative to the root mean square of the parent's."""
    expected = load_decoder(parent).logits(hidden[0])
    found = load_decoder(other).logits(hidden_states(other, ids[:1])[0])
    return float((found - expected).abs().max() / expected.square().mean().sqrt())


@torch.inference_mode()
def kept_answers(work: Path, chain: str, tokenizer: Any, task: str, folder: Path) -> np.ndarray[Any, Any]:
    """Of the first `ITEMS` questions of a task, which are answered right; from an earlier call where there was one.

    The answer is the choice whose tokens have the largest log probability by byte, after `Question: …\nAnswer:`, as in
    lm-eval's `acc_norm`.
    """
    path = work / f"{chain}.{task}.npy"
    if path.exists():
        return np.load(path)
    decoder = load_decoder(work / chain)
    fold(decoder)
    right = []
    with (folder / f"{task}.jsonl").open(encoding="utf-8") as file:
        items = [json.loads(line) for line in islice(file, ITEMS)]
    for item in items:
        question = tokenizer(f"Question: {item['ctx']}\nAnswer:", add_special_tokens=False)["input_ids"]
        question = [tokenizer.bos_token_id, *question]
        choices = [tokenizer(f" {x}", add_special_tokens=False)["input_ids"] for x in item["choices"]]
        width = len(question) + max(map(len, choices)) - 1
        ids = torch.zeros(len(choices), width, dtype=torch.int64)
        for row, choice in zip(ids, choices, strict=True):
            both = torch.tensor([*question, *choice])[:-1]
            row[: len(both)] = both
        x = decoder.embed(ids, torch.arange(width).expand(ids.shape))
        for index in range(len(decoder.layers)):
            x = decoder.block(index, x)
        log_p = decoder.logits(x[:, len(question) - 1 :]).log_softmax(-1)
        found = [
            float(row[: len(choice)].gather(1, torch.tensor(choice)[:, None]).sum()) / len(text.encode())
            for row, choice, text in zip(log_p, choices, item["choices"], strict=True)
        ]
        right.append(int(np.argmax(found)) == item["label"])
    np.save(path, np.array(right))
    return np.array(right)


def main() -> None:
    """Build what WORK does not hold yet, measure, print a row for each chain."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("model", "calibration", "measure"):
        parser.add_argument(name)
    parser.add_argument("work", type=Path)
    parser.add_argument("chains", nargs="+")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--skip", type=int, default=0, help="windows at the start of MEASURE that are left out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--logits", action="store_true", help="largest difference of a logit in the first window too")
    parser.add_argument("--tasks", type=Path, help="folder of arc_easy.jsonl and piqa.jsonl: share answered right")
    arguments = parser.parse_args()
    work, parent = arguments.work, arguments.work / "parent"
    if not parent.exists():
        parent.mkdir(parents=True)
        fetch(arguments.model, "float32", parent)
    tokenizer = load_tokenizer(parent)
    text = documents(arguments.calibration, "calibration")
    tokens = windows(text, tokenizer, arguments.samples, LENGTH, seed=0)
    if (work / "tokens.npy").exists() and not np.array_equal(np.load(work / "tokens.npy"), tokens):
        parser.error(f"{work} was calibrated on other tokens: take another folder")
    np.save(work / "tokens.npy", tokens)
    for chain in arguments.chains:
        stages = chain.split(" + ")
        for i, stage in enumerate(stages):
            name = " + ".join(stages[: i + 1])
            if not (work / f"{name}.json").exists() and not (work / name / "config.json").exists():
                call = f"build(Path({str(work)!r}), {' + '.join(stages[:i])!r}, {stage!r}, {arguments.threads})"
                code = f"from chains import *; {call}"
                subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)
    torch.set_num_threads(arguments.threads)
    ids = fixed_windows(tokenizer, arguments.measure, arguments.skip + arguments.windows)[arguments.skip :]

    tasks = TASKS if arguments.tasks else ()

    @cache
    def hidden() -> torch.Tensor:
        return hidden_states(parent, ids)

    first = None
    for chain in arguments.chains:
        scores = kept_scores(work, chain, hidden, ids)
        cost_file = work / f"{chain}.json"
        cost = json.loads(cost_file.read_text()) if cost_file.exists() else {"seconds": None, "peak_bytes": 0}
        logits = f"logits within {logit_error(parent, hidden(), work / chain, ids):.2g} | " if arguments.logits else ""
        right = {name: kept_answers(work, chain, tokenizer, name, arguments.tasks).mean() for name in tasks}
        answers = "".join(f"{name} {100 * x:.1f} % | " for name, x in right.items())
        seconds = "resumed or built elsewhere" if cost["seconds"] is None else f"{cost['seconds']:.0f} s"
        print(
            f"| {chain} | KL {scores['kl'].mean():.4g} | same top {100 * scores['same_top'].mean():.2f} % "
            f"| perplexity {np.exp(scores['loss'].mean()):.3f} (parent {np.exp(scores['loss_parent'].mean()):.3f}) "
            f"| {logits}{answers}{read_spec(work / chain).size_bytes()} bytes | {seconds} "
            f"| {cost['peak_bytes'] / 1e6:.0f} MB |",
            flush=True,
        )
        first = scores if first is None else first
        ratio = bootstrap_ratio_of_means(scores["kl"], first["kl"], np.arange(len(ids)))
        print(f"  KL ratio {ratio.value:.3f}, 95 % bounds {ratio.lower:.3f} to {ratio.upper:.3f}", flush=True)


if __name__ == "__main__":
    main()
