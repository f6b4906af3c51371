"""Memory of fresh processes grows by what a program takes."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from fakes.table_runtime import save_table

from strop.artifact import read_manifest, write_manifest
from strop.evals.memory import CACHE, PROCESSES, Memory, resident
from strop.metric import MeasureContext

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_a_bigger_program_takes_as_much_more_as_it_is_bigger(tmp_path: Path) -> None:
    table = np.zeros((7, 7), np.float32)
    small = save_table(tmp_path / "small", table, table, key="s" * 64)
    big = save_table(tmp_path / "big", table, table, behaviour={"ballast_bytes": 60_000_000}, key="b" * 64)
    found = Memory(prompt_tokens=3, new_tokens=2).measure(big, {"parent": small}, MeasureContext(threads=1))
    cache = found.pop("cache_bytes_per_token")
    assert cache.estimate.value == 8  # one int64 a token
    assert cache.ratios["parent"].value == 1
    for measurement in found.values():
        processes = resident(small, 3, 2, 1)
        extra = measurement.estimate.value - max(x.steady_bytes for x in processes)
        assert 50e6 < extra < 80e6
        assert measurement.ratios["parent"].value > 1.5
        assert len(measurement.detail["processes"]) == PROCESSES
    assert found["peak_bytes"].estimate.value >= found["steady_bytes"].estimate.value
    assert found["peak_bytes"].estimate.lower == found["peak_bytes"].estimate.upper


def test_memory_of_a_gpu_is_not_the_processs(tmp_path: Path) -> None:
    table = np.zeros((7, 7), np.float32)
    program = save_table(tmp_path / "program", table, table, key="g" * 64)
    manifest = read_manifest(program.path)
    write_manifest(program.path, dataclasses.replace(manifest, traits={**(manifest.traits or {}), "device": "cuda"}))
    found = Memory(prompt_tokens=3, new_tokens=2).measure(program, {}, MeasureContext(threads=1))
    assert found.keys() == {CACHE}
