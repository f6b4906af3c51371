"""Lower checkpoints of `chains.py` to programs: `python benchmarks/lower.py WORK RUNTIME CHAIN ...`.

WORK and the chains are those of `chains.py`, `parent` is the model itself. A program goes to a folder of WORK/programs
with the name of its chain and runtime, where `decode_duel.py` and `program_kl.py` can be pointed at it.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from strop import plugin
from strop.artifact import Artifact, Manifest, write_manifest
from strop.stage import Context, Stage


def main() -> None:
    """Build what is not there yet."""
    work, runtime, *chains = Path(sys.argv[1]), *sys.argv[2:]
    for chain in chains:
        out = work / "programs" / f"{chain}, {runtime}"
        if not out.exists():
            out.mkdir(parents=True)
            stage = plugin.find("export", runtime, Stage)()
            made = stage.run(Artifact(work / chain, "checkpoint", "0" * 64), out, Context(out))
            write_manifest(out, Manifest("program", "0" * 64, made["spec"].to_json(), asdict(made["traits"])))


if __name__ == "__main__":
    main()
