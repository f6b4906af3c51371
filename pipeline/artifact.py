"""Finished folders and their manifest, `strop.json`. Leaves out where they are kept (store.py)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from strop.errors import UserError

Format = Literal["checkpoint", "speculative", "program", "tokens"]
MANIFEST = "strop.json"
MANIFEST_VERSION = 1


@dataclass(frozen=True)
class Artifact:
    """A finished, read-only folder.

    Attributes:
        path: The folder.
        format: `checkpoint` (weights), `speculative` (target and drafter), `program` (something that runs) or `tokens`
            (calibration tokens).
        key: sha256 (64 hex digits) of everything that determined its content.
    """

    path: Path
    format: Format
    key: str


@dataclass(frozen=True)
class Manifest:
    """The content of `strop.json`. Holds no times, paths or host names, so equal work gives equal bytes.

    Attributes:
        format: As in `Artifact`.
        key: As in `Artifact`.
        spec: `ModelSpec.to_json()` of a checkpoint or of the checkpoint that a program was lowered from.
        traits: `Traits` of a program as a dict, None for other formats.
        lineage: One entry per stage from the source on: {"name", "use", "key", "fields", "report"}.
        files: Relative path -> {"sha256", "size_bytes"}, without `strop.json` itself.
        report: What the last stage wants a reader to know (skipped layers, dampings), JSON.
    """

    format: Format
    key: str
    spec: dict[str, Any] | None = None
    traits: dict[str, Any] | None = None
    lineage: tuple[dict[str, Any], ...] = ()
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an artifact folder.

    Raises:
        UserError: There is none, it is damaged, or a newer version wrote it.
    """
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{folder}: not a strop artifact, {MANIFEST} is missing") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: damaged, not JSON ({error})") from error
    if not isinstance(data, dict) or data.pop("strop", None) != MANIFEST_VERSION:
        raise UserError(f"{path}: written by another version of strop, this one reads version {MANIFEST_VERSION}")
    if data.pop("digest", None) != _digest(data):
        raise UserError(f"{path}: damaged, its content was changed after it was written")
    try:
        return Manifest(**{**data, "lineage": tuple(data.get("lineage", ()))})
    except TypeError as error:
        raise UserError(f"{path}: damaged, {error}") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `strop.json`, replacing the one that is there."""
    fields = {k: getattr(manifest, k) for k in Manifest.__dataclass_fields__}
    data = json.loads(json.dumps(fields))  # as it will be read: keys are text, tuples are lists
    data = {"strop": MANIFEST_VERSION, "digest": _digest(data), **data}
    write_atomically(folder / MANIFEST, json.dumps(data, indent=1, sort_keys=True).encode())


def _digest(data: Mapping[str, Any]) -> str:
    """sha256 of a manifest's content: a change by hand or by a failing disk shows."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def open_artifact(folder: Path) -> Artifact:
    """The artifact in a folder, by its manifest.

    Raises:
        UserError: As `read_manifest`.
    """
    manifest = read_manifest(folder)
    return Artifact(folder, manifest.format, manifest.key)


def list_files(folder: Path) -> list[Path]:
    """Every file below `folder` but its manifest, sorted by relative path."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)


def hash_file(path: Path) -> str:
    """sha256 of a file's content, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text. NaN and infinities are refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def hash_json(value: Mapping[str, Any] | list[Any] | str) -> str:
    """sha256 of `canonical_json(value)`, hex."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file aside, fsync it, then rename it into place: readers see the old or the new content."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
