"""The content-addressed store: finished artifacts, unfinished work, measurements and costs, each under a key.

    objects/KEY/       finished, read-only, never changed
    work/KEY/          `out` (thrown away after a kill) and `scratch` (kept: a stage goes on from it)
    stats/KEY.json     size and modification time of each file when it was last hashed, so a look-up need not hash
    costs/KEY.json     seconds and peak memory of building it, apart from it, so that equal work gives equal bytes
    checks/KEY.json    that a program which could not run where it was made was found to be sound elsewhere
    measurements/      remembered measurements
    cache/             what only saves time: a stage may look there and leave something
    quarantine/        damaged objects, put aside
    wheels/            packages that held a model

Nothing half-written is ever visible: everything is written aside, synced, then renamed. Leaves out what a key is made
of (runner.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TextIO

from strop.artifact import (
    MANIFEST,
    Artifact,
    Format,
    Manifest,
    hash_file,
    list_files,
    read_manifest,
    write_atomically,
    write_manifest,
)
from strop.errors import UserError
from strop.stage import StageCost

log = logging.getLogger(__name__)

Write = Callable[[Path, Path], Mapping[str, Any]]
"""Fills the empty folder `out`, may keep what it wants in `scratch`, returns manifest fields (see `Stage.run`)."""
Accept = Callable[[Artifact], None]
"""Looks at what was written before it is kept; raises to refuse it."""
Table = Literal["measurements", "costs", "checks"]
SHORT = 12
"""Digits of a key that people are shown."""


@dataclass(frozen=True)
class Step:
    """One entry of a manifest's lineage, without the report that the stage will give.

    Attributes:
        name: Of the stage in its recipe.
        use: Method, runtime or `source`.
        fields: Its fields, JSON.
    """

    name: str
    use: str
    fields: Mapping[str, Any]


class Store:
    """A store below one folder. Opening one touches nothing, and what is finished can be read from a read-only one.

    Attributes:
        root: Its folder.
    """

    def __init__(self, root: Path | None = None) -> None:
        """A store below `root`; None: $STROP_STORE, or ~/.cache/strop."""
        chosen = root or Path(os.environ.get("STROP_STORE") or Path.home() / ".cache" / "strop")
        self.root = chosen.expanduser().absolute()

    @property
    def wheels(self) -> Path:
        """Where packages that hold a model are kept."""
        return self.root / "wheels"

    def path(self, key: str) -> Path:
        """Where the finished object of a key is, or will be."""
        return self.root / "objects" / key

    # ------------------------------------------------------------------------------------------------- objects

    def get(self, key: str) -> Artifact | None:
        """The finished object of a key, or None. A damaged one is put aside, with a warning, and counts as absent."""
        folder = self.path(key)
        if not folder.is_dir():
            return None
        damage = self._damage(key, read_all=False)
        if damage is None:
            return Artifact(folder, read_manifest(folder).format, key)
        log.warning("store: %s is damaged (%s): put aside, it will be built again", key[:SHORT], damage)
        self._put_aside(key)
        return None

    def build(
        self, key: str, format: Format, step: Step, write: Write, *, after: Artifact | None = None,
        accept: Accept | None = None,
    ) -> Artifact:  # fmt: skip
        """The finished object of a key, written by `write` where there is none yet.

        Two processes that want the same key: one writes, the other waits. A failure leaves nothing but `scratch`.

        Args:
            key: sha256 of everything that determines the content.
            format: Of the object.
            step: What is done, for the lineage.
            write: Does it.
            after: The artifact that it is made from, whose lineage it continues.
            accept: Called with the written artifact before it becomes visible; what it raises is passed on.

        Raises:
            UserError: The disk is full, the store cannot be written to, or `write` says so.
        """
        done = self.get(key)
        if done is not None:
            return done
        with self.lock(key, step.name), Writing(self.root):
            done = self.get(key)
            if done is not None:
                return done
            work = self.root / "work" / key
            out, scratch = work / "out", work / "scratch"
            _remove(out)
            out.mkdir(parents=True)
            scratch.mkdir(exist_ok=True)
            try:
                fields = write(out, scratch)
                _finish(out, _manifest(out, key, format, step, fields, after))
                if accept is not None:
                    accept(Artifact(out, format, key))
                return self._publish(key, out)
            finally:
                _remove(out)

    def _publish(self, key: str, out: Path) -> Artifact:
        folder = self.path(key)
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._remember_stats(key, out)
        out.rename(folder)
        _sync(folder.parent)
        # The top folder keeps its write bit until here: moving a folder to another parent needs it.
        folder.chmod(0o555)
        _remove(self.root / "work" / key)
        return Artifact(folder, read_manifest(folder).format, key)

    @contextmanager
    def lock(self, key: str, name: str) -> Iterator[None]:
        """Hold a key. Where another process holds it, say so once and wait.

        Raises:
            UserError: The store cannot be written to.
        """
        with Writing(self.root):
            file = _lock(self.root / "locks" / key, f"{name} ({key[:SHORT]})")
        with file:
            yield

    def _damage(self, key: str, *, read_all: bool) -> str | None:
        """What is wrong with an object, or None. Hashes only files that changed since last time, unless `read_all`."""
        folder = self.path(key)
        try:
            manifest = read_manifest(folder)
        except UserError as error:
            return str(error)
        if manifest.key != key:
            return f"{MANIFEST} says {manifest.key[:SHORT]}"
        known = self._read("stats", key) or {}
        for name, entry in manifest.files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            stat = path.stat()
            if stat.st_size != entry["size_bytes"]:
                return f"{name} has {stat.st_size} bytes, not {entry['size_bytes']}"
            if (read_all or known.get(name) != stat.st_mtime_ns) and hash_file(path) != entry["sha256"]:
                return f"{name} has another content"
        extra = {str(p.relative_to(folder)) for p in list_files(folder)} - set(manifest.files)
        if extra:
            return f"{min(extra)} does not belong there"
        with contextlib.suppress(OSError):  # a read-only store serves what it has
            self._remember_stats(key, folder)
        return None

    def _remember_stats(self, key: str, folder: Path) -> None:
        """Note the files' times; the note's own time is when the object was last used."""
        stats = {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in list_files(folder)}
        if stats == self._read("stats", key):
            os.utime(self.root / "stats" / f"{key}.json")
        else:
            _write_json(self.root / "stats" / f"{key}.json", stats)

    def _put_aside(self, key: str) -> None:
        with Writing(self.root):
            place = self.root / "quarantine"
            place.mkdir(parents=True, exist_ok=True)
            self.path(key).chmod(0o755)
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                self.path(key).rename(place / f"{key}.{time.time_ns()}")

    # -------------------------------------------------------------------------------- measurements and costs

    def remember(self, table: Table, key: str, value: Mapping[str, Any]) -> None:
        """Keep a small JSON value under a key, replacing what was there.

        Raises:
            UserError: The disk is full or the store cannot be written to.
        """
        with Writing(self.root):
            _write_json(self.root / table / f"{key}.json", value)

    def recall(self, table: Table, key: str) -> dict[str, Any] | None:
        """What `remember` kept, or None."""
        return self._read(table, key)

    def remember_cost(self, key: str, cost: StageCost) -> None:
        """Keep what building an object took."""
        self.remember("costs", key, {"seconds": cost.seconds, "peak_memory_bytes": cost.peak_memory_bytes})

    def recall_cost(self, key: str) -> StageCost | None:
        """What building an object took, or None where nobody knows."""
        data = self.recall("costs", key)
        return None if data is None else StageCost(**data)

    def _read(self, table: str, key: str) -> dict[str, Any] | None:
        try:
            data = json.loads((self.root / table / f"{key}.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
            return None
        return data if isinstance(data, dict) else None

    # ------------------------------------------------------------------------------------------- housekeeping

    def ls(self) -> str:
        """One line per object: key, format, size, days since its last use, its chain of stages."""
        lines = []
        for key in self._keys():
            try:
                manifest = read_manifest(self.path(key))
            except UserError as error:
                lines.append(f"{key[:SHORT]}  damaged: {error}")
                continue
            size = sum(x["size_bytes"] for x in manifest.files.values()) / 1e6
            chain = " > ".join(x["name"] for x in manifest.lineage)
            lines.append(f"{key[:SHORT]}  {manifest.format:11}  {size:9.1f} MB  {self._idle_days(key):5.1f} d  {chain}")
        return "\n".join(lines) or f"{self.root}: empty"

    def gc(self, older_than_days: float = 30.0) -> str:
        """Delete unfinished work, damaged objects, and objects that no run has used for so many days.

        What another process is working on is left alone.
        """
        freed, num_kept = 0, 0
        with Writing(self.root):
            for key in self._keys():
                if self._idle_days(key) < older_than_days:
                    num_kept += 1
                    continue
                freed += self._delete_unlocked(key, self.path(key))
                for table in ("stats", "costs", "checks"):
                    (self.root / table / f"{key}.json").unlink(missing_ok=True)
            for work in _folders(self.root / "work"):
                freed += self._delete_unlocked(work.name, work)
            for damaged in _folders(self.root / "quarantine"):
                freed += _size(damaged)
                _remove(damaged)
        return f"freed {freed / 1e6:.1f} MB, kept {num_kept} objects"

    def verify(self) -> str:
        """Hash every file of every object.

        Raises:
            UserError: Some are damaged: they are put aside, so the next run builds them again.
        """
        damaged = []
        for key in self._keys():
            damage = self._damage(key, read_all=True)
            if damage is not None:
                self._put_aside(key)
                damaged.append(f"{key[:SHORT]}: {damage}")
        if damaged:
            raise UserError(f"{self.root}: {len(damaged)} damaged, put aside: {'; '.join(damaged)}")
        return f"{len(self._keys())} objects, all as they were written"

    def _keys(self) -> list[str]:
        return [x.name for x in _folders(self.root / "objects")]

    def _idle_days(self, key: str) -> float:
        try:
            used = (self.root / "stats" / f"{key}.json").stat().st_mtime
        except FileNotFoundError:
            used = self.path(key).stat().st_mtime
        return max(0.0, time.time() - used) / 86400

    def _delete_unlocked(self, key: str, folder: Path) -> int:
        """Delete a folder unless a process holds its key. Returns the bytes freed."""
        path = self.root / "locks" / key
        file = _try_lock(path)
        if file is None:
            log.info("store: %s is being worked on, left alone", key[:SHORT])
            return 0
        with file:
            freed = _size(folder)
            _remove(folder)
            path.unlink(missing_ok=True)
        return freed


class Writing:
    """Turns a full or read-only disk, whoever reports it, into one line. Other errors pass."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Libraries wrap the system's error in exceptions of their own (SafetensorError), so the text counts too.
        if error is None or isinstance(error, UserError):
            return
        number = error.errno if isinstance(error, OSError) else None
        if number in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error):
            raise UserError(
                f"no space left on the disk of {self.root}: free some with `strop store gc`, "
                "or choose another place with --store"
            ) from error
        if number in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR) and _is_below(error, self.root):
            reason = error.strerror if isinstance(error, OSError) else ""
            raise UserError(
                f"store {self.root} cannot be written to ({reason}): choose another place with --store"
            ) from error


def _is_below(error: BaseException, root: Path) -> bool:
    name = getattr(error, "filename", None)
    return isinstance(name, str) and Path(name).is_relative_to(root)


def _try_lock(path: Path, *, wait: bool = False) -> TextIO | None:
    """Lock a file until it is closed. None: another process holds it (or deleted it between opening and locking)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists() and os.fstat(file.fileno()).st_ino == path.stat().st_ino:
            return file
    except BlockingIOError:
        pass
    file.close()
    return None


def _lock(path: Path, what: str) -> TextIO:
    """Lock a file until it is closed, waiting as long as it takes."""
    file = _try_lock(path)
    if file is None:
        log.info("waiting for another strop process that works on %s", what)
    while file is None:
        file = _try_lock(path, wait=True)
    return file


def _manifest(
    out: Path, key: str, format: Format, step: Step, fields: Mapping[str, Any], after: Artifact | None
) -> Manifest:
    spec, traits, report = fields.get("spec"), fields.get("traits"), dict(fields.get("report", {}))
    before = read_manifest(after.path).lineage if after is not None else ()
    entry = {"name": step.name, "use": step.use, "key": key, "fields": dict(step.fields), "report": report}
    files = {str(p.relative_to(out)): {"sha256": hash_file(p), "size_bytes": p.stat().st_size} for p in list_files(out)}
    return Manifest(
        format=format,
        key=key,
        spec=None if spec is None else spec.to_json(),
        traits=None if traits is None else {k: getattr(traits, k) for k in traits.__dataclass_fields__},
        lineage=(*before, entry),
        files=files,
        report=report,
    )


def _finish(out: Path, manifest: Manifest) -> None:
    """Write the manifest, sync every file and folder, take the write bits away (the top folder's apart)."""
    write_manifest(out, manifest)
    folders = [out, *(p for p in out.rglob("*") if p.is_dir())]
    for path in [*list_files(out), out / MANIFEST]:
        _sync(path)
        path.chmod(0o444)
    for folder in reversed(folders):
        _sync(folder)
        if folder != out:
            folder.chmod(0o555)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(value, sort_keys=True).encode())


def _folders(place: Path) -> Sequence[Path]:
    return sorted(x for x in place.iterdir() if x.is_dir()) if place.is_dir() else []


def _size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and p.stat().st_nlink == 1)


def _remove(folder: Path) -> None:
    """Delete a folder that may be read-only."""
    if not folder.exists():
        return
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir() and not p.is_symlink())]:
        path.chmod(0o755)
    shutil.rmtree(folder)
