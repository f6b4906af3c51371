"""Run a recipe again and again: exit code, wall time, and the peak memory of all its processes together.

    python benchmarks/quickstart.py STROP STORE [--runs 10] [--cold] [--again] [--memory] [-- ARGUMENTS of strop run]

STROP is the console script of an installed strop, STORE a folder for the stores. By default runs share one store and
measure speed anew (`--remeasure`); with --cold each run has an empty store of its own (the wheel is downloaded again);
with --again nothing is measured anew. With --memory the sum of the processes' proportional set sizes is read twice a
second from /proc: that takes 4 % of a core, so speed is better measured without. A line per run goes to stdout, the
runs' own output to STORE/run-N.log.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path


def descendants(root: int) -> list[int]:
    """Process ids of `root` and everything below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue  # it ended while we looked
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for process in found:
        found.extend(children.get(process, []))
    return found


def proportional_bytes(process: int) -> int:
    """Proportional set size of one process in bytes, 0 when it is gone."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def run(command: list[str], log: Path, is_memory_read: bool) -> tuple[int, float, int]:
    """Exit code, seconds, and peak bytes of the command and its descendants, 0 where memory is not read."""
    started = time.monotonic()
    peak = 0
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while is_memory_read and process.poll() is None:
            peak = max(peak, sum(map(proportional_bytes, descendants(process.pid))))
            time.sleep(0.5)
        process.wait()
    return process.returncode, time.monotonic() - started, peak


def main() -> None:
    arguments, passed = sys.argv[1:], []
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, passed = arguments[:cut], arguments[cut + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strop")
    parser.add_argument("store", type=Path)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args(arguments)
    options.store.mkdir(parents=True, exist_ok=True)

    codes = []
    for number in range(options.runs):
        store = options.store / (f"store-{number}" if options.cold else "store")
        command = [
            options.strop,
            "run",
            *(passed or ["quickstart"]),
            "--store",
            str(store),
            "--out",
            str(options.store / f"report-{number}"),
        ]
        if not options.cold and not options.again:
            command.append("--remeasure")
        load = os.getloadavg()[0]
        code, seconds, peak = run(command, options.store / f"run-{number}.log", options.memory)
        codes.append(code)
        memory = f", peak {peak / 2**30:.2f} GiB" if peak else ""
        print(f"run {number}: exit {code}, {seconds:.1f} s{memory}, load before {load:.2f}", flush=True)
    print(f"exit 0 in {codes.count(0)} of {len(codes)}")


if __name__ == "__main__":
    main()
