"""What `strop doctor` looks at: versions, processor, threads, extras, store, and libraries that exclude each other."""

from __future__ import annotations

import importlib
import os
import re
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from strop.artifact import MANIFEST
from strop.gate import show
from strop.machine import describe_machine

EXCLUSIVE = (("onnxruntime", "onnxruntime-gpu"),)
"""Distributions that install the same module: with both, which one is imported is luck."""
IMPORTED = ("torch", "transformers", "onnxruntime")
"""Libraries that may be installed and still not load."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def examine(store: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """Look at everything.

    Args:
        store: Root of the store, there or not.

    Returns:
        (what, how it is) line by line, and the problems that the user should solve.
    """
    machine = describe_machine()
    lines = [
        ("strop", f"{version('strop')}, Python {machine['python']}, {machine['os']}"),
        ("processor", f"{machine['cpu']}, {' '.join(machine['isa']) or 'no known instruction sets'}"),
        ("cores", f"{machine['cores']} usable{_thread_settings()}"),
        ("memory", show(machine["memory_bytes"], "bytes")),
        ("GPU", ", ".join(machine.get("gpus", ())) or "none of NVIDIA's, or no driver"),
        ("store", _store(store)),
        ("C++ compiler", _compiler()),
        *((f"extra {name}", text) for name, text in _extras()),
    ]
    problems = [f"{' and '.join(x)} are both installed: uninstall one" for x in EXCLUSIVE if all(map(_version, x))]
    for name in IMPORTED:
        found, failure = _import(name)
        lines.append((name, found))
        problems += [failure] if failure else []
    if not os.access(_existing(store), os.W_OK):
        problems.append(f"{store} cannot be written to: choose another place with --store")
    return lines, problems


def _thread_settings() -> str:
    return "".join(f", {name}={os.environ[name]}" for name in THREADS if name in os.environ)


def _compiler() -> str:
    name = os.environ.get("CXX", "g++")
    return shutil.which(name) or f"{name} not on the path: torch_compile programs run but cannot be exported"


def _store(store: Path) -> str:
    free = show(shutil.disk_usage(_existing(store)).free, "bytes")
    objects = len(list(store.glob(f"objects/*/{MANIFEST}")))
    return f"{store}, {objects} objects, {free} free"


def _existing(path: Path) -> Path:
    return next(x for x in (path, *path.parents) if x.exists())


def _extras() -> Iterator[tuple[str, str]]:
    """Each extra with the versions of what it needs, or what is missing."""
    needs: dict[str, list[str]] = {}
    for requirement in requires("strop") or ():
        extra = re.search(r"extra == ['\"]([^'\"]+)", requirement)
        if extra:
            needs.setdefault(extra[1], []).append(re.split(r"[^\w.-]", requirement)[0])
    for extra_name, names in sorted(needs.items()):
        missing = [name for name in names if _version(name) is None]
        present = ", ".join(f"{name} {_version(name)}" for name in names if name not in missing)
        lacks = f"{', '.join(missing)} missing: pip install 'strop[{extra_name}]'" if missing else ""
        yield extra_name, "; ".join(x for x in (present, lacks) if x)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _import(name: str) -> tuple[str, str]:
    """How a library loads, and the problem where it is installed and does not."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        return ("not installed", "") if error.name == name else (str(error), f"{name} does not load: {error}")
    except (ImportError, OSError) as error:  # a shared library is missing or of another build
        return str(error), f"{name} does not load: {error}"
    if name == "torch":
        devices = module.cuda.device_count() if module.cuda.is_available() else 0
        return f"{module.__version__}, {module.get_num_threads()} threads, {devices} GPUs", ""
    if name == "onnxruntime":
        return f"{module.__version__}, {', '.join(module.get_available_providers())}", ""
    return str(module.__version__), ""
