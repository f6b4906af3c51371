"""KL of rounded keys and values by position, over windows of 4096 tokens. Results: `kv_cache.md`.

    python benchmarks/kv_cache.py MODEL CALIBRATION.txt MEASURE.txt WORK [--windows 2] [--length 4096]

MODEL is anything that a recipe's `model.source` takes. Scales of every form are found in one walk over the calibration
tokens, by the stage's own `solve`. Then parent and forms go through the same windows side by side, in steps of 128
tokens over their caches, all with one set of float32 weights: what differs is the cache alone. The windows are the
first of MEASURE, one after the other, BOS in front. A form that WORK holds scores of is not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from pathlib import Path

import numpy as np
import torch

from strop.calibration.capture import Stream, steps
from strop.calibration.text import documents
from strop.calibration.tokens import windows
from strop.export.eager import DecoderProgram
from strop.layers import Decoder
from strop.methods.kv_cache import KvCache
from strop.model import load_decoder, load_tokenizer
from strop.program import Traits
from strop.sources import fetch
from strop.statistics import bootstrap_ratio_of_means

CALIBRATED = 512
CHUNK = 128
BUCKETS = (1, 512, 1024, 2048, 3072, 4096)
FORMS = """
int8 tensor tensor|int8 head head|int8 channel head|int8 token token|fp8 tensor tensor|fp8 head head
int4 head head|int4 head head, clip false|int4 channel head|int4 channel channel|int4 channel token|int4 token token
"""


def forms() -> dict[str, KvCache]:
    """Name -> stage."""
    found = {}
    for name in FORMS.replace("\n", "|").strip("|").split("|"):
        form, keys, values = name.split(",")[0].split()
        fields = {"format": form, "keys": keys, "values": values, "clip": "clip false" not in name}
        found[name] = KvCache.model_validate(fields)
    return found


@torch.no_grad()
def calibrate(folder: Path, stages: dict[str, KvCache], ids: torch.Tensor, work: Path) -> dict[str, dict]:
    """Name of a form -> stored name -> scales."""
    path = work / "scales.pt"
    kept = torch.load(path) if path.exists() else {}
    left = {name: stage for name, stage in stages.items() if name not in kept}
    if not left:
        return kept
    spec = load_decoder(folder).spec
    stream = Stream(folder, spec, ids)
    found: dict[str, dict] = {name: {} for name in left}
    for index, layer in enumerate(spec.layers):
        stream.load_layer(index)
        for name, stage in left.items():
            found[name] |= {f"{layer.attention}.{part}": x for part, x in stage.solve(stream).items()}
        for step in steps(layer):
            step.advance(stream)
        stream.free_layer()
        print(f"layer {index + 1} of {len(spec.layers)}", flush=True)
    torch.save(kept | found, path)
    return kept | found


def rounded(parent: Decoder, stage: KvCache, scales: dict[str, torch.Tensor]) -> Decoder:
    """The parent's weights, not copied, over a cache of this form."""
    with torch.device("meta"):
        decoder = Decoder(stage.plan(parent.spec, 0).spec)
    decoder.load_state_dict(parent.state_dict(), strict=False, assign=True)
    for name, shape in decoder.spec.cache_scales().items():
        place, _, part = name.rpartition(".")
        index = next(i for i, x in enumerate(decoder.spec.layers) if x.attention == place)
        setattr(decoder.codecs[index], part, scales[name].reshape(shape).to(torch.bfloat16))
    return decoder.eval()


@torch.inference_mode()
def score(decoders: dict[str, Decoder], window: np.ndarray) -> dict[str, np.ndarray]:
    """Name -> KL(parent ‖ form) in nats and whether the top tokens are equal, (2, positions); `parent` is the first."""
    sessions = {}
    for name, decoder in decoders.items():
        traits = Traits("eager", "float32", 1, "cpu", len(window), decoder.spec.vocab_size, takes_trees=True)
        sessions[name] = DecoderProgram(decoder, traits).open(1, len(window))
    rows: dict[str, list] = {name: [] for name in decoders if name != "parent"}
    for start in range(0, len(window), CHUNK):
        ids = window[None, start : start + CHUNK]
        logits = {name: torch.from_numpy(x.step(ids, logits="all")[0]) for name, x in sessions.items()}
        top = logits["parent"].argmax(-1)
        p = logits.pop("parent").log_softmax(-1)
        weights = p.exp()
        for name, x in logits.items():
            kl = (weights * (p - x.log_softmax(-1))).sum(-1, dtype=torch.float64).clamp(min=0)
            rows[name].append(torch.stack((kl, (x.argmax(-1) == top).double())))
    return {name: torch.cat(x, 1).numpy() for name, x in rows.items()}


def main() -> None:
    """Calibrate and score what WORK does not hold yet, print a row for each form."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("model", "calibration", "measure"):
        parser.add_argument(name)
    parser.add_argument("work", type=Path)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--length", type=int, default=BUCKETS[-1])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--forms", nargs="+", help="of those listed here; default: all")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    work, parent = arguments.work, arguments.work / "parent"
    if not parent.exists():
        parent.mkdir(parents=True)
        fetch(arguments.model, "float32", parent)
    tokenizer = load_tokenizer(parent)
    text = documents(arguments.calibration, "calibration")
    ids = torch.from_numpy(windows(text, tokenizer, arguments.samples, CALIBRATED, seed=0))
    stages = {name: x for name, x in forms().items() if arguments.forms is None or name in arguments.forms}
    scales = calibrate(parent, stages, ids, work)
    measured = Path(arguments.measure).read_text(encoding="utf-8")
    tokens = tokenizer(measured, add_special_tokens=False, verbose=False)["input_ids"]
    width = arguments.length - 1
    cut = np.array(tokens[: arguments.windows * width], np.int64).reshape(arguments.windows, width)
    model = load_decoder(parent)
    found: dict[str, list] = {name: [] for name in stages}
    for number, row in enumerate(cut):
        path = work / f"scores_{number}_{arguments.length}.npz"
        kept = dict(np.load(path)) if path.exists() else {}
        left = {name: rounded(model, x, scales[name]) for name, x in stages.items() if name not in kept}
        if left:
            kept |= score({"parent": model, **left}, np.concatenate(([tokenizer.bos_token_id], row)))
            np.savez(path, **kept)
        for name in stages:
            found[name].append(kept[name])
        print(f"window {number + 1} of {len(cut)}", flush=True)
    report(stages, model, {name: np.stack(x) for name, x in found.items()})


def report(stages: dict[str, KvCache], model: Decoder, found: dict[str, np.ndarray]) -> None:
    """A row for each form: bytes, KL by position, its ratio to the first of the same format."""
    buckets = [x for x in BUCKETS if x < next(iter(found.values())).shape[2]] + [next(iter(found.values())).shape[2]]
    pairs = list(itertools.pairwise(buckets))
    heads = ["form: keys, values", "bytes a token", "KL", *(f"{a} to {b - 1}" for a, b in pairs), "same top, %"]
    print("| " + " | ".join([*heads, "KL ratio to the first of its format"]) + " |")
    print("|---" * (len(heads) + 1) + "|")
    first: dict[str, np.ndarray] = {}
    for name, scores in found.items():
        kl, same = scores[:, 0, 1:], scores[:, 1, 1:]
        base = first.setdefault(stages[name].format, kl)
        against = f"{kl.mean() / base.mean():.3f}"
        if len(kl) > 1:
            ratio = bootstrap_ratio_of_means(kl.mean(1), base.mean(1), np.arange(len(kl)))
            against += f" ({ratio.lower:.3f} to {ratio.upper:.3f})"
        by_position = [scores[:, 0, a:b].mean() for a, b in pairs]
        size = dataclasses.replace(model.spec, kv_cache=stages[name].plan(model.spec, 0).spec.kv_cache)
        cells = [name, str(size.kv_bytes_per_token()), *(f"{x:.3g}" for x in (kl.mean(), *by_position))]
        cells += [f"{100 * same.mean():.2f}", against]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
