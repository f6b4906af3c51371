"""What an engine was built for, written beside it and checked before a byte of it is given to TensorRT.

Imports nothing heavy. Leaves out building (builder.py) and running (session.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.artifact import hash_file
from strop.errors import UserError
from strop.machine import Gpu, gpus
from strop.safetensors_file import read_json

ENGINE = "model.engine"
FACTS = "engine.json"
PROFILES = ("prefill", "verify")
"""Ranges of step widths that an engine is tuned for, by index: whole prompts, and single or drafted tokens."""


@dataclass(frozen=True)
class Facts:
    """What an engine was built by, for and from.

    Attributes:
        library: `tensorrt` or `tensorrt_rtx`.
        version: Of it; engines run on no other.
        compute_capabilities: GPUs that it runs on, such as `8.9`.
        max_batch: Most rows.
        context: Tokens that each row's cache holds.
        prefill: Most new tokens a row under the profile `prefill`.
        verify: The same under `verify`.
        engine_sha256: Of the engine's file.
        weights_sha256: Of the tensors that it was built from, as the ONNX graph held them.
    """

    library: str
    version: str
    compute_capabilities: tuple[str, ...]
    max_batch: int
    context: int
    prefill: int
    verify: int
    engine_sha256: str
    weights_sha256: str

    def most_tokens(self, profile: int) -> int:
        """New tokens a row that a step may bring under a profile."""
        return (self.prefill, self.verify)[profile]


def write(path: Path, facts: Facts) -> None:
    """Write `FACTS` into a folder."""
    content = {**dataclasses.asdict(facts), "profiles": list(PROFILES)}
    (path / FACTS).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read(path: Path, runtime: str) -> Facts:
    """Read what `write` wrote.

    Raises:
        UserError: The engine or its facts are missing or damaged.
    """
    for name in (ENGINE, FACTS):
        if not (path / name).is_file():
            raise UserError(f"{path}: not a {runtime} program, {name} is missing")
    found = read_json(path / FACTS)
    names = {x.name for x in dataclasses.fields(Facts)}
    if not isinstance(found, Mapping) or found.keys() != names | {"profiles"}:
        raise UserError(f"{path / FACTS}: damaged, it must say {', '.join(sorted(names))} and profiles")
    if found["profiles"] != list(PROFILES):
        raise UserError(
            f"{path / FACTS}: profiles are {found['profiles']}, known are {list(PROFILES)}: export it again"
        )
    values = {k: v for k, v in found.items() if k != "profiles"}
    return Facts(**{**values, "compute_capabilities": tuple(found["compute_capabilities"])})


def check(path: Path, facts: Facts, version: str, here: Sequence[Gpu] | None = None) -> None:
    """Refuse to load an engine that is not for this machine or is not the one that was built.

    Args:
        path: Its folder.
        facts: What `read` found there.
        version: Of the library that would load it.
        here: GPUs of this machine; None: ask the driver.

    Raises:
        UserError: One line: its file changed, another version, another GPU, or none.
    """
    if hash_file(path / ENGINE) != facts.engine_sha256:
        raise UserError(f"{path / ENGINE}: its content is not what {FACTS} lists, and it is code: not loaded")
    if version != facts.version:
        raise UserError(
            f"{path / ENGINE}: built by {facts.library} {facts.version}, here is {version}: export it again"
        )
    if (lack := lacks(facts, here)) is not None:
        raise UserError(f"{path / ENGINE}: {lack}")


def lacks(facts: Facts, here: Sequence[Gpu] | None = None) -> str | None:
    """What this machine lacks to run an engine; None where it has a GPU that fits.

    Args:
        facts: Of the engine.
        here: GPUs of this machine, the first of which would run it; None: ask the driver.
    """
    here = gpus() if here is None else here
    needed = f"it runs on GPUs of compute capability {' or '.join(facts.compute_capabilities)}"
    if not here:
        return f"{needed}, and no NVIDIA GPU or driver is here"
    if here[0].compute_capability not in facts.compute_capabilities:
        return f"{needed}, here is {here[0].name} of {here[0].compute_capability}: export it again for this one"
    return None
