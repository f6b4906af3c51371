"""The process's memory after onnxruntime has loaded a model: weights in huge pages, no second copy resident.

Linux only, and only what the kernel grants: elsewhere, and where it refuses, everything stays as it is.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

HUGE_PAGE = 1 << 21
DONT_NEED, COLLAPSE = 4, 25
"""Of madvise(2). COLLAPSE is there since Linux 6.1."""
MAPS = Path("/proc/self/maps")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Mapping(NamedTuple):
    """A range of the process's addresses.

    Attributes:
        is_writable: Private and writable.
        name: The file it maps, `[heap]`, or nothing.
    """

    start: int
    end: int
    is_writable: bool
    name: str


def mappings() -> set[Mapping]:
    """Every mapping of the process; empty where the system does not tell."""
    if not MAPS.exists():
        return set()
    found = set()
    for line in MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        address, access, _, _, _, *name = line.split(maxsplit=5)
        start, end = (int(x, 16) for x in address.split("-"))
        found.add(Mapping(start, end, access == "rw-p", name[0] if name else ""))
    return found


def settle(before: set[Mapping], data: Path) -> None:
    """Gather what was allocated since into huge pages, and let go of the pages of the weights' file.

    onnxruntime lays weights out anew in memory from the allocator. Decoding reads all of them for every token, so
    fewer pages mean fewer misses of the address cache. The file's pages were read once; those that are needed again
    (rows of the embedding) come back when touched.

    Args:
        before: `mappings()` before the model was loaded.
        data: The weights' file.
    """
    madvise = ctypes.CDLL(None).madvise
    new = mappings() - before
    for x in new:
        if x.name == str(data.resolve()):
            madvise(ctypes.c_void_p(x.start), ctypes.c_size_t(x.end - x.start), DONT_NEED)
    if not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(encoding="utf-8"):
        return
    for x in new:
        start, end = -(-x.start // HUGE_PAGE) * HUGE_PAGE, x.end // HUGE_PAGE * HUGE_PAGE
        if x.is_writable and x.name in ("", "[heap]") and end > start:
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), COLLAPSE)
