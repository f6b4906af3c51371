"""GPTQ against rounding, 4 bits in symmetric groups of 64: KL to the parent, seconds, peak memory. Results: `gptq.md`.

    python benchmarks/gptq.py MODEL CALIBRATION.txt MEASURE.txt WORK [--samples 128] [--windows 24] [key=value ...]

MODEL is anything that a recipe's `model.source` takes; `key=value` are fields of the stage `gptq`, and name the folder
in WORK that its checkpoint goes to. Each stage runs in a process of its own, so that its peak memory is its own. The
windows are the first of MEASURE, one after the other, each 1024 tokens with BOS in front.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from strop.artifact import Artifact, Manifest, write_manifest
from strop.calibration.text import documents
from strop.calibration.tokens import windows
from strop.layers import fold
from strop.methods.gptq import Gptq
from strop.methods.rtn import Rtn
from strop.model import load_decoder, load_tokenizer
from strop.sources import fetch
from strop.stage import Context
from strop.statistics import bootstrap_ratio_of_means

LENGTH = 512
WINDOW = 1024
KEY = "0" * 64


def quantize(work: Path, name: str, fields: dict[str, Any], threads: int) -> None:
    """Run one stage on WORK/parent and write what it took next to its output; a killed one is resumed."""
    stage = Rtn(**fields) if name.startswith("rtn") else Gptq(**fields)
    out, scratch = work / name, work / f"{name}.scratch"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    is_resumed = scratch.exists() and any(scratch.iterdir())
    scratch.mkdir(exist_ok=True)
    start = time.perf_counter()
    context = Context(scratch, threads=threads, calibration=work / "tokens.npy")
    result = stage.run(Artifact(work / "parent", "checkpoint", KEY), out, context)
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
def compare(parent: Path, hidden: torch.Tensor, other: Path, ids: torch.Tensor) -> dict[str, np.ndarray[Any, Any]]:
    """Per window: mean KL(parent ‖ other) in nats, share of equal top tokens, mean loss of both."""
    one, two = load_decoder(parent), load_decoder(other)
    fold(two)
    rows = []
    for x, y, window in zip(hidden, hidden_states(other, ids), ids, strict=True):
        p, q = one.logits(x).double().log_softmax(-1), two.logits(y).double().log_softmax(-1)
        targets = window[1:, None]
        losses = [-z[:-1].gather(1, targets).mean() for z in (p, q)]
        rows.append([(p.exp() * (p - q)).sum(-1).mean(), (p.argmax(-1) == q.argmax(-1)).double().mean(), *losses])
    table = np.array([[float(x) for x in row] for row in rows])
    return dict(zip(("kl", "same_top", "loss_parent", "loss"), table.T, strict=True))


def main() -> None:
    """Build what WORK does not hold yet, measure, print a row for each checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("model", "calibration", "measure"):
        parser.add_argument(name)
    parser.add_argument("work", type=Path)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("fields", nargs="*")
    arguments = parser.parse_args()
    work, parent = arguments.work, arguments.work / "parent"
    if not parent.exists():
        parent.mkdir(parents=True)
        fetch(arguments.model, "float32", parent)
    tokenizer = load_tokenizer(parent)
    text = documents(arguments.calibration, "calibration")
    np.save(work / "tokens.npy", windows(text, tokenizer, arguments.samples, LENGTH, seed=0))
    name = "-".join(["gptq", str(arguments.samples), *arguments.fields])
    given = {key: yaml.safe_load(value) for key, value in (x.split("=") for x in arguments.fields)}
    plain = {key: value for key, value in given.items() if key in Rtn.model_fields}
    baseline = "-".join(["rtn", *(f"{key}={value}" for key, value in plain.items())])
    for stage, fields in ((baseline, plain), (name, given)):
        if not (work / f"{stage}.json").exists():
            code = f"from gptq import *; quantize(Path({str(work)!r}), {stage!r}, {fields!r}, {arguments.threads})"
            subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)
    torch.set_num_threads(arguments.threads)
    ids = fixed_windows(tokenizer, arguments.measure, arguments.windows)
    hidden = hidden_states(parent, ids)
    rounded, found = (compare(parent, hidden, work / x, ids) for x in (baseline, name))
    print(f"parent perplexity {np.exp(found['loss_parent'].mean()):.3f} over {len(ids)} windows of {WINDOW}")
    for stage, scores in ((baseline, rounded), (name, found)):
        cost = json.loads((work / f"{stage}.json").read_text())
        seconds = "resumed" if cost["seconds"] is None else f"{cost['seconds']:.0f} s"
        print(
            f"| {stage} | KL {scores['kl'].mean():.4f} | same top {100 * scores['same_top'].mean():.2f} % "
            f"| perplexity {np.exp(scores['loss'].mean()):.3f} | {seconds} "
            f"| {cost['peak_bytes'] / 1e6:.0f} MB |"
        )
    ratio = bootstrap_ratio_of_means(found["kl"], rounded["kl"], np.arange(len(ids)))
    print(f"KL ratio {ratio.value:.3f}, 95 % bounds {ratio.lower:.3f} to {ratio.upper:.3f}")


if __name__ == "__main__":
    main()
