"""A program in a process of its own gives what it gives here, and its death or refusal is told in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.table_runtime import save_table

from strop.artifact import open_artifact
from strop.errors import UserError
from strop.program import open_program
from strop.worker import Worker, WorkerDied, multiply, time_laps

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def table(tmp_path: Path) -> Any:
    """Makes program folders that differ in how they behave."""
    generator = np.random.default_rng(0)
    last, before = generator.normal(size=(2, 11, 11)).astype(np.float32)

    def make(**behaviour: Any) -> Path:
        return save_table(tmp_path / "program", last, before, behaviour=behaviour).path

    return make


def test_logits_are_those_of_the_program_in_this_process(table: Any) -> None:
    folder, ids = table(), [3, 1, 4, 1, 5, 9, 2, 6]
    with Worker(folder, threads=1) as worker:
        logits = worker.logits(ids)
    here = open_program(open_artifact(folder)).open(1, 16).step(np.array([ids]), logits="all")[0]
    assert np.array_equal(logits, here)


def test_decode_is_greedy_and_stops_only_at_the_count(table: Any) -> None:
    folder, prompt = table(), [3, 1]
    with Worker(folder, threads=1) as worker:
        timing = worker.decode(prompt, 9)
        ids = [*prompt, *timing.tokens]
        greedy = worker.logits(ids).argmax(-1)
    assert list(timing.tokens) == greedy[1:-1].tolist()
    assert len(timing.token_s) == 8
    assert timing.ttft_s > 0


def test_time_per_token_is_that_of_the_steps(table: Any) -> None:
    with Worker(table(step_s=0.004), threads=1) as worker:
        timing = worker.decode([1, 2], 12)
    assert min(timing.token_s) >= 0.004
    assert min(timing.token_s) < 0.02
    assert timing.cpu_s == pytest.approx(timing.wall_s, rel=0.9)
    assert timing.wall_s >= 12 * 0.004


def test_what_a_library_prints_is_no_reply(table: Any) -> None:
    with Worker(table(chatter=True), threads=1) as worker:
        assert worker.logits([1]).shape == (1, 11)


def test_a_refusal_while_loading_is_the_users(table: Any) -> None:
    with pytest.raises(UserError, match="this table has no legs"):
        Worker(table(refuse=True), threads=1)


def test_a_refusal_while_running_leaves_the_worker_usable(table: Any) -> None:
    with Worker(table(), threads=1) as worker:
        with pytest.raises(UserError, match="max_tokens: 2004"):
            worker.decode([1, 2, 3, 4], 2000)
        assert len(worker.decode([1], 2).tokens) == 2


def test_a_worker_that_exits_tells_its_code_and_last_words(table: Any) -> None:
    with (
        Worker(table(exit_at=10), threads=1) as worker,
        pytest.raises(WorkerDied, match="exited with 7: table is wobbly"),
    ):
        worker.logits([1, 10])


def test_a_worker_that_is_killed_tells_the_signal(table: Any) -> None:
    with Worker(table(kill_at=10), threads=1) as worker:
        with pytest.raises(WorkerDied, match="SIGKILL, perhaps out of memory"):
            worker.logits([10])
        with pytest.raises(WorkerDied, match="SIGKILL"):
            worker.logits([1])


@linux_only
def test_memory_counts_what_the_program_took(table: Any) -> None:
    with Worker(table(ballast_bytes=50_000_000), threads=1) as worker:
        memory = worker.memory()
    assert memory.load_bytes - memory.interpreter_bytes > 50_000_000
    assert memory.load_bytes - memory.interpreter_bytes < 80_000_000
    assert memory.peak_bytes >= memory.steady_bytes >= 50_000_000
    assert memory.steady_bytes >= memory.unique_bytes


@linux_only
def test_cores_pin_the_process(table: Any) -> None:
    core = max(os.sched_getaffinity(0))
    with Worker(table(), threads=1, cores=[core]) as worker:
        assert os.sched_getaffinity(worker._process.pid) == {core}


def test_torch_is_not_imported_for_a_program_that_needs_none(table: Any, tmp_path: Path) -> None:
    code = f"""
        import sys
        from pathlib import Path
        from strop.artifact import open_artifact
        from strop.program import open_program
        import strop.worker
        open_program(open_artifact(Path({str(table())!r})), 1)
        sys.exit(",".join({{"torch", "transformers", "onnxruntime"}} & set(sys.modules)) or 0)
    """
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=path)


@linux_only
def test_a_worker_does_not_outlive_its_parent(table: Any) -> None:
    code = f"""
        import os, signal
        from pathlib import Path
        from strop.worker import Worker
        worker = Worker(Path({str(table())!r}), threads=1)
        print(worker._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    parent = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=path, stdout=subprocess.PIPE)
    assert parent.returncode == -signal.SIGKILL
    child = Path(f"/proc/{int(parent.stdout)}/status")
    deadline = time.monotonic() + 5
    while child.exists() and "zombie" not in child.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not child.exists() or "zombie" in child.read_text()


def test_steps_of_a_width_are_timed_one_by_one_and_leave_the_row_as_it_was(table: Any) -> None:
    with Worker(table(sleep_s=(0.002, 0.001)), threads=1) as worker:
        wide = worker.steps(5, 8, count=3, capacity=16, logits="all")
        narrow = worker.steps(5, 1, count=3, capacity=16)
        fresh = worker.steps(0, 2, count=1, capacity=2)
    assert [len(x.seconds) for x in (wide, narrow, fresh)] == [3, 3, 1]
    assert min(wide.seconds) >= 0.010
    assert 0.003 <= min(narrow.seconds) < min(wide.seconds)
    assert wide.wall_s == pytest.approx(sum(wide.seconds))
    assert wide.cpu_s < wide.wall_s  # it sleeps


def test_a_step_that_does_not_fit_is_refused(table: Any) -> None:
    with Worker(table(), threads=1) as worker:
        with pytest.raises(UserError, match="this session holds 8"):
            worker.steps(5, 4, count=1, capacity=8)
        with pytest.raises(UserError, match="max_tokens: 2000"):
            worker.steps(5, 1, count=1, capacity=2000)
        assert len(worker.steps(5, 3, count=2, capacity=8).seconds) == 2


def test_what_is_done_between_two_laps_is_not_timed() -> None:
    def pieces() -> Iterator[Callable[[], object]]:
        for _ in range(3):
            time.sleep(0.02)
            yield lambda: time.sleep(0.002)

    laps = time_laps(pieces())
    assert len(laps.seconds) == 3
    assert 0.002 <= min(laps.seconds) < 0.02
    assert laps.cpu_s < 0.02


def test_more_bytes_and_larger_matrices_take_longer(table: Any) -> None:
    with Worker(table(), threads=2) as worker:
        small, large = (worker.read(x, 5) for x in (1 << 20, 1 << 26))
        tiny, big = (worker.multiply(x, 5) for x in (16, 512))
    assert len(small.seconds) == len(tiny.seconds) == 5
    assert min(large.seconds) > 3 * min(small.seconds)
    assert min(big.seconds) > 3 * min(tiny.seconds)


def test_products_are_in_the_dtype_that_is_asked_for() -> None:
    for dtype, count in (("float32", 2), ("bfloat16", 3)):
        assert len(multiply(32, count, dtype).seconds) == count
