"""AWQ, HQQ and rounding on a real model: KL to the parent, seconds, peak memory. Results: `awq_hqq.md`.

    python benchmarks/awq_hqq.py MODEL CALIBRATION.txt MEASURE.txt WORK [--samples 128] [--windows 24] STAGE ...

STAGE is a stage as a recipe has it, for example '{use: hqq, symmetric: true}'. Each runs in a process of its own, so
that its peak memory is its own, and one that WORK has finished already is only measured. Model, calibration tokens and
windows are those of `gptq.py`. With `--windows 0` nothing is measured.
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
from gptq import KEY, LENGTH, compare, fixed_windows, hidden_states

from strop import plugin
from strop.artifact import Artifact, Manifest, write_manifest
from strop.calibration.text import documents
from strop.calibration.tokens import windows
from strop.model import load_tokenizer
from strop.sources import fetch
from strop.stage import Context, Stage
from strop.statistics import bootstrap_mean, bootstrap_ratio_of_means


def build(work: Path, name: str, settings: dict[str, Any], tokens: str, threads: int) -> None:
    """Run one stage on WORK/parent and write what it took next to its output; a killed one is resumed."""
    fields = {key: value for key, value in settings.items() if key != "use"}
    stage = plugin.find("methods", settings["use"], Stage)(**fields)
    out, scratch = work / name, work / f"{name}.scratch"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    is_resumed = scratch.exists() and any(scratch.iterdir())
    scratch.mkdir(exist_ok=True)
    start = time.perf_counter()
    context = Context(scratch, threads=threads, calibration=work / tokens)
    result = stage.run(Artifact(work / "parent", "checkpoint", KEY), out, context)
    seconds = time.perf_counter() - start
    usage = resource.getrusage(resource.RUSAGE_SELF)
    write_manifest(out, Manifest("checkpoint", KEY, result["spec"].to_json(), report=result["report"]))
    cost = {"seconds": seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime, "is_resumed": is_resumed}
    (work / f"{name}.json").write_text(json.dumps({**cost, "peak_bytes": usage.ru_maxrss * 1024}))


def name_of(settings: dict[str, Any], samples: int) -> str:
    """Folder of a stage's checkpoint."""
    needs_tokens = plugin.find("methods", settings["use"], Stage).needs_calibration
    fields = [f"{key}={value}" for key, value in settings.items() if key != "use"]
    return "-".join([settings["use"], *([str(samples)] if needs_tokens else []), *fields])


def main() -> None:
    """Build what WORK does not hold yet, measure, print a row for each stage."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("model", "calibration", "measure"):
        parser.add_argument(name)
    parser.add_argument("work", type=Path)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("stages", nargs="+", type=yaml.safe_load)
    arguments = parser.parse_args()
    work, parent = arguments.work, arguments.work / "parent"
    if not parent.exists():
        parent.mkdir(parents=True)
        fetch(arguments.model, "float32", parent)
    tokenizer = load_tokenizer(parent)
    tokens = f"tokens-{arguments.samples}.npy"
    if not (work / tokens).exists():
        text = documents(arguments.calibration, "calibration")
        np.save(work / tokens, windows(text, tokenizer, arguments.samples, LENGTH, seed=0))
    names = [name_of(x, arguments.samples) for x in arguments.stages]
    for name, settings in zip(names, arguments.stages, strict=True):
        if not (work / f"{name}.json").exists():
            call = f"build(Path({str(work)!r}), {name!r}, {settings!r}, {tokens!r}, {arguments.threads})"
            code = f"from pathlib import Path; from awq_hqq import build; {call}"
            subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)
    if not arguments.windows:
        return
    torch.set_num_threads(arguments.threads)
    ids = fixed_windows(tokenizer, arguments.measure, arguments.windows)
    hidden = hidden_states(parent, ids)
    first = None
    for name in names:
        scores = compare(parent, hidden, work / name, ids)
        first = first or scores
        cost = json.loads((work / f"{name}.json").read_text())
        took = f"{cost['seconds']:.0f} s, {cost['cpu_seconds']:.0f} s of one core"
        mean = bootstrap_mean(scores["kl"], np.arange(len(ids)))
        ratio = "1"
        if scores is not first:
            bounds = bootstrap_ratio_of_means(scores["kl"], first["kl"], np.arange(len(ids)))
            ratio = f"{bounds.value:.3f} ({bounds.lower:.3f} to {bounds.upper:.3f})"
        print(
            f"| {name} | KL {mean.value:.4f} ({mean.lower:.4f} to {mean.upper:.4f}) | of the first {ratio} "
            f"| same top {100 * scores['same_top'].mean():.2f} % | perplexity {np.exp(scores['loss'].mean()):.3f} "
            f"of the parent's {np.exp(scores['loss_parent'].mean()):.3f} "
            f"| {'resumed' if cost['is_resumed'] else took} | {cost['peak_bytes'] / 1e6:.0f} MB |",
            flush=True,
        )


if __name__ == "__main__":
    main()
