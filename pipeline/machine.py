"""What a number was measured on: processor, memory, system, libraries. Leaves out measuring its speed."""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FLAGS = (
    "avx",
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "sve",
)
"""Instruction sets that kernels choose by."""
LIBRARIES = (
    "torch",
    "transformers",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "tensorrt-rtx-cu12",
    "numpy",
    "compressed-tensors",
    "safetensors",
)

CUDA_DRIVER = "libcuda.so.1"
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
"""Of CUDA's CUdevice_attribute."""


@dataclass(frozen=True)
class Gpu:
    """A GPU of NVIDIA's.

    Attributes:
        compute_capability: What code it runs, such as `8.9`.
    """

    name: str
    compute_capability: str


def describe_machine() -> dict[str, Any]:
    """Processor, instruction sets, usable cores, memory in bytes, GPUs if any, system, Python and library versions."""
    found_gpus = [f"{x.name} of {x.compute_capability}" for x in gpus()]
    return {
        "cpu": _cpu_facts().get("model name") or platform.processor() or platform.machine(),
        "isa": instruction_sets(),
        "cores": usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        **({"gpus": found_gpus} if found_gpus else {}),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "libraries": {name: found for name in LIBRARIES if (found := _version(name))},
    }


def processors(device: str) -> dict[str, Any]:
    """What a program of a device computes on, for the fingerprint of its speed.

    Args:
        device: `cpu` or `cuda`: then the first GPU too.
    """
    machine = describe_machine()
    found = {"cpu": machine["cpu"], "isa": machine["isa"]}
    return found if device == "cpu" else {**found, "gpu": machine.get("gpus", [None])[0]}


def instruction_sets() -> list[str]:
    """Those of `FLAGS` that the processor has."""
    facts = _cpu_facts()
    flags = facts.get("flags", facts.get("Features", "")).split()
    return [x for x in FLAGS if x in flags]


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> list[Gpu]:
    """GPUs that NVIDIA's driver shows to this process, in CUDA's order; none where there is no driver."""
    try:
        driver = ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return []
    count, found = ctypes.c_int(), []
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    for index in range(count.value):
        device, name, numbers = ctypes.c_int(), ctypes.create_string_buffer(256), [ctypes.c_int(), ctypes.c_int()]
        failed = driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetName(name, len(name), device)
        for number, attribute in zip(numbers, (CAPABILITY_MAJOR, CAPABILITY_MINOR), strict=True):
            failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        if not failed:
            found.append(Gpu(name.value.decode(errors="replace"), ".".join(str(x.value) for x in numbers)))
    return found


def _cpu_facts() -> dict[str, str]:
    """Of the first processor, as Linux tells them; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    first = path.read_text(encoding="utf-8").split("\n\n")[0]
    lines = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
