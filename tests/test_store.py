"""The store: what is visible is whole, what is damaged is noticed, and two processes do not step on each other."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from strop.artifact import Artifact, read_manifest
from strop.errors import ConformanceError, UserError
from strop.stage import StageCost
from strop.store import Step, Store

KEY = "a" * 64
OTHER = "b" * 64
STEP = Step("w4", "rtn", {"bits": 4})


def write_small(out: Path, scratch: Path) -> Mapping[str, Any]:
    (out / "sub").mkdir()
    (out / "sub" / "b.bin").write_bytes(b"weights")
    (out / "a.txt").write_text("text")
    return {"report": {"skipped": []}}


def build(store: Store, key: str = KEY) -> Artifact:
    return store.build(key, "checkpoint", STEP, write_small)


def test_a_built_object_is_found_again_and_not_built_twice(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.get(KEY) is None
    built = build(store)

    def fail(out: Path, scratch: Path) -> Mapping[str, Any]:
        raise AssertionError("built twice")

    assert store.build(KEY, "checkpoint", STEP, fail) == built == store.get(KEY)
    assert not (tmp_path / "work" / KEY).exists()


def test_manifest_holds_hashes_and_the_lineage_so_far(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = build(store)
    second = store.build(OTHER, "program", Step("onnx", "onnx_runtime", {}), write_small, after=first)
    manifest = read_manifest(second.path)
    assert [x["name"] for x in manifest.lineage] == ["w4", "onnx"]
    assert manifest.lineage[0] == {
        "name": "w4", "use": "rtn", "key": KEY, "fields": {"bits": 4}, "report": {"skipped": []},
    }  # fmt: skip
    assert set(manifest.files) == {"a.txt", "sub/b.bin"}
    assert manifest.files["a.txt"]["size_bytes"] == 4


def test_objects_are_read_only(tmp_path: Path) -> None:
    built = build(Store(tmp_path))
    for path in [built.path, *built.path.rglob("*")]:
        assert not path.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)


def test_a_failure_leaves_only_scratch_and_the_next_try_finds_it(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def fail(out: Path, scratch: Path) -> Mapping[str, Any]:
        (out / "half").write_text("half")
        (scratch / "layer.0").write_text("done")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        store.build(KEY, "checkpoint", STEP, fail)
    assert store.get(KEY) is None

    def go_on(out: Path, scratch: Path) -> Mapping[str, Any]:
        assert list(out.iterdir()) == []
        assert (scratch / "layer.0").read_text() == "done"
        return write_small(out, scratch)

    store.build(KEY, "checkpoint", STEP, go_on)
    assert sorted(x.name for x in store.path(KEY).iterdir()) == ["a.txt", "strop.json", "sub"]


def test_what_conformance_refuses_is_not_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def refuse(artifact: Artifact) -> None:
        assert (artifact.path / "strop.json").is_file()
        raise ConformanceError("all codes are equal")

    with pytest.raises(ConformanceError):
        store.build(KEY, "checkpoint", STEP, write_small, accept=refuse)
    assert store.get(KEY) is None


def touch_content(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(b"WEIGHTS")


def remove(path: Path) -> None:
    path.parent.chmod(0o755)
    path.unlink()


def truncate(path: Path) -> None:
    path.chmod(0o644)
    os.truncate(path, 3)


@pytest.mark.parametrize("harm", [touch_content, remove, truncate])
def test_a_damaged_object_is_put_aside_and_built_again(tmp_path: Path, harm: Any) -> None:
    store = Store(tmp_path)
    built = build(store)
    harm(built.path / "sub" / "b.bin")
    assert store.get(KEY) is None
    assert len(list((tmp_path / "quarantine").iterdir())) == 1
    assert (build(store).path / "sub" / "b.bin").read_bytes() == b"weights"


def test_a_damaged_manifest_is_noticed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    manifest = build(store).path / "strop.json"
    manifest.chmod(0o644)
    manifest.write_text("{")
    assert store.get(KEY) is None


def test_verify_finds_a_change_that_kept_size_and_time(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = build(store).path / "sub" / "b.bin"
    times = path.stat()
    touch_content(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert store.get(KEY) is not None
    with pytest.raises(UserError, match=r"sub/b\.bin has another content"):
        store.verify()
    assert store.get(KEY) is None
    build(store)
    assert store.verify().startswith("1 objects")


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    def fill(out: Path, scratch: Path) -> Mapping[str, Any]:
        with Path("/dev/full").open("wb", buffering=0) as file:
            file.write(b"x")
        raise AssertionError

    with pytest.raises(UserError, match="no space left on the disk"):
        Store(tmp_path).build(KEY, "checkpoint", STEP, fill)


def test_a_full_disk_that_a_library_reports_its_own_way_is_one_line(tmp_path: Path) -> None:
    def fill(out: Path, scratch: Path) -> Mapping[str, Any]:
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    with pytest.raises(UserError, match="no space left on the disk"):
        Store(tmp_path).build(KEY, "checkpoint", STEP, fill)


def test_a_store_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written to"):
        build(Store(tmp_path / "file" / "store"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_store_still_serves_what_it_has(tmp_path: Path) -> None:
    store = Store(tmp_path)
    build(store)
    for folder in [tmp_path, *(x for x in tmp_path.rglob("*") if x.is_dir())]:
        folder.chmod(0o555)
    assert store.get(KEY) is not None
    with pytest.raises(UserError, match="cannot be written to"):
        build(store, OTHER)


BUILD_SLOWLY = """
import sys, time
from pathlib import Path
from strop.store import Step, Store

def write(out, scratch):
    with open(sys.argv[2], "a") as file:
        file.write("built\\n")
    time.sleep(0.5)
    return {}

Store(Path(sys.argv[1])).build("a" * 64, "checkpoint", Step("w4", "rtn", {}), write)
"""


def test_of_two_processes_one_builds_and_the_other_waits(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD_SLOWLY, str(tmp_path / "store"), str(tmp_path / "log")]
    workers = [subprocess.Popen(command) for _ in range(2)]
    assert [worker.wait(60) for worker in workers] == [0, 0]
    assert (tmp_path / "log").read_text() == "built\n"


def test_gc_removes_what_is_old_or_unfinished_and_leaves_locked_work(tmp_path: Path) -> None:
    store = Store(tmp_path)
    build(store)
    for key in (OTHER, "c" * 64):
        (tmp_path / "work" / key / "out").mkdir(parents=True)
        (tmp_path / "work" / key / "out" / "half").write_bytes(b"x" * 1000)
    with store.lock(OTHER, "w4"):
        store.gc()
    assert store.get(KEY) is not None
    assert [x.name for x in (tmp_path / "work").iterdir()] == [OTHER]
    store.gc(older_than_days=0)
    assert store.get(KEY) is None
    assert list((tmp_path / "work").iterdir()) == []


def test_measurements_and_costs_are_remembered(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.recall("measurements", KEY) is None
    store.remember("measurements", KEY, {"value": 1.5})
    assert store.recall("measurements", KEY) == {"value": 1.5}
    store.remember_cost(KEY, StageCost(2.0, 10))
    assert store.recall_cost(KEY) == StageCost(2.0, 10)
    (tmp_path / "measurements" / f"{KEY}.json").write_text("{")
    assert store.recall("measurements", KEY) is None


def test_equal_work_gives_equal_bytes(tmp_path: Path) -> None:
    first, second = build(Store(tmp_path / "a")), build(Store(tmp_path / "b"))
    assert (first.path / "strop.json").read_bytes() == (second.path / "strop.json").read_bytes()
    assert "time" not in json.dumps(json.loads((first.path / "strop.json").read_text()))


def test_ls_names_the_chain(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert "empty" in store.ls()
    build(store)
    assert "w4" in store.ls()
