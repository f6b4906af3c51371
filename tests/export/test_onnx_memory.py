"""What is done to memory after loading leaves its content alone."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from strop.export.onnx_runtime import memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and calls madvise")


def test_settling_keeps_every_byte(tmp_path: Path) -> None:
    data = tmp_path / "weights with a space"
    content = np.random.default_rng(0).integers(0, 256, 5 << 20, dtype=np.uint8)
    data.write_bytes(content.tobytes())
    before = memory.mappings()
    weights = content.copy()
    with data.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        total = int(view.sum())
        memory.settle(before, data)
        assert int(view.sum()) == total
        del view
    assert np.array_equal(weights, content)


def test_the_files_pages_are_let_go(tmp_path: Path) -> None:
    data = tmp_path / "weights"
    data.write_bytes(bytes(8 << 20))
    before = memory.mappings()
    with data.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        view.sum()
        assert resident(data) >= 8 << 20
        memory.settle(before, data)
        assert resident(data) < 1 << 20
        del view


def resident(file: Path) -> int:
    """Bytes of a file's mappings that are in memory."""
    found, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        key, *rest = line.split()
        if "-" in key:
            is_inside = line.endswith(str(file))
        elif key == "Rss:" and is_inside:
            found += int(rest[0]) * 1024
    return found
