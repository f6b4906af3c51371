"""A program in a process of its own, driven over a pipe: what is timed shares no thread, heap or import with the rest.

The child is `python -m strop.worker`. Requests and replies are JSON lines; logits follow their line as bytes.
What the machine itself can do is timed in the same process, so that cores and threads are those of the program. Linux
tells what the memory figures need; elsewhere the rest works. Leaves out what the timings mean (evals/).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from strop.artifact import open_artifact
from strop.decoding.plain import Sampler, generate
from strop.errors import ConformanceError, UserError
from strop.program import Logits, Program, Session, open_program

STDERR_TAIL = 2000
"""Characters of a dead worker's stderr that its error shows."""
CLOSE_SECONDS = 5.0
"""A worker that was told to end and has not by then is killed."""
SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when its parent dies."""


class WorkerDied(RuntimeError):
    """The worker's process ended by itself. The message ends in what it last wrote to stderr."""


@dataclass(frozen=True)
class Timing:
    """One generation.

    Attributes:
        ttft_s: From the prompt's submission until the first token is known; the cache was allocated before.
        token_s: Time of each later token.
        cpu_s: CPU time of all threads of the process meanwhile.
        involuntary_switches: How often the kernel took a core away from it meanwhile.
        tokens: The generated ids.
    """

    ttft_s: float
    token_s: tuple[float, ...]
    cpu_s: float
    involuntary_switches: int
    tokens: tuple[int, ...]

    @property
    def wall_s(self) -> float:
        """Of the whole generation."""
        return self.ttft_s + sum(self.token_s)

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first."""
        return sum(self.token_s) / len(self.token_s)


@dataclass(frozen=True)
class Laps:
    """Pieces of work timed one after another. What lies between them is in none of the figures.

    Attributes:
        seconds: Of each.
        cpu_s: CPU time of all threads of the process meanwhile.
        involuntary_switches: How often the kernel took a core away from it meanwhile.
    """

    seconds: tuple[float, ...]
    cpu_s: float
    involuntary_switches: int

    @property
    def wall_s(self) -> float:
        """Of all of them."""
        return sum(self.seconds)


class Memory(NamedTuple):
    """Resident bytes of a worker's process, its interpreter and libraries included.

    Attributes:
        load_bytes: When the program was loaded.
        peak_bytes: The most so far.
        steady_bytes: Now.
        unique_bytes: Now, without pages that another process maps too.
        interpreter_bytes: Before the program was loaded.
        cache_bytes_per_token: That keys and values of one more token take; None: the program does not tell.
    """

    load_bytes: int
    peak_bytes: int
    steady_bytes: int
    unique_bytes: int
    interpreter_bytes: int
    cache_bytes_per_token: int | None = None


class Worker:
    """A program loaded in a fresh process. A context manager; leaving it ends the process.

    Attributes:
        start_s: From starting the process until it was ready.
        load_s: Of that, importing the runtime and loading the program (compiling too, where the runtime does).
    """

    def __init__(self, artifact: Path, threads: int, cores: Sequence[int] | None = None) -> None:
        """Start the process and wait until it has loaded the program.

        Args:
            artifact: Folder of a program.
            threads: Of the program.
            cores: Pin the process to these; None: leave it where the kernel puts it.

        Raises:
            UserError: The program cannot be loaded.
            WorkerDied: The process ended while it loaded.
        """
        command = [sys.executable, "-m", "strop.worker", str(artifact), "--threads", str(threads)]
        command += ["--cores", *map(str, cores)] if cores is not None else []
        counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
        # a plug-in that this process can import, the child can
        paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONHASHSEED": "0"}
        self._artifact = artifact
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (`_end` closes it)
        start = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **counts, **paths},
        )
        try:
            self.load_s = float(self._reply())
        except BaseException:
            self._end(at_once=True)
            raise
        self.start_s = time.perf_counter() - start

    def decode(self, prompt: Sequence[int], num_tokens: int) -> Timing:
        """Generate exactly `num_tokens` (at least 2) greedily, end tokens ignored, with a session of its own."""
        reply = self._call("decode", prompt=list(prompt), num_tokens=num_tokens)
        return Timing(**{**reply, "token_s": tuple(reply["token_s"]), "tokens": tuple(reply["tokens"])})

    def steps(
        self, cached: int, width: int, *, count: int, capacity: int, logits: Literal["last", "all"] = "last"
    ) -> Laps:
        """Time single steps of one row.

        Args:
            cached: Tokens that the row holds before each step.
            width: New tokens of each step.
            count: Steps to time. One more of the same width goes before them.
            capacity: Tokens that the session has room for. It is kept for the next call with the same row.
            logits: Of the last new token or of all.

        Raises:
            UserError: The capacity is too small, or more than the program's context.
        """
        arguments = {"cached": cached, "width": width, "count": count, "capacity": capacity, "logits": logits}
        return self._laps("steps", **arguments)

    def read(self, size_bytes: int, passes: int) -> Laps:
        """Time reading so many bytes of memory from front to back, by as many threads as the program has."""
        return self._laps("read", size_bytes=size_bytes, passes=passes)

    def multiply(self, size: int, passes: int) -> Laps:
        """Time products of two square matrices of the program's dtype: numpy's in float32, else torch's."""
        return self._laps("multiply", size=size, passes=passes)

    def memory(self) -> Memory:
        """Resident bytes of the process.

        Raises:
            UserError: Not on Linux.
        """
        return Memory(**self._call("memory"))

    def logits(self, ids: Sequence[int]) -> Logits:
        """(len(ids), vocab) float32: logits at every position of one fresh row."""
        shape = self._call("logits", ids=list(ids))
        assert self._process.stdout is not None
        size = 4 * shape[0] * shape[1]
        content = self._process.stdout.read(size)
        if len(content) < size:
            raise self._death()
        return np.frombuffer(content, dtype=np.float32).reshape(shape)

    def close(self) -> None:
        """End the process."""
        self._end(at_once=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(at_once=error is not None)

    def _call(self, name: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"call": name, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._death() from error
        return self._reply()

    def _laps(self, name: str, **arguments: Any) -> Laps:
        reply = self._call(name, **arguments)
        return Laps(**{**reply, "seconds": tuple(reply["seconds"])})

    def _reply(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._death()
        reply = json.loads(line)
        for kind in (UserError, ConformanceError):
            if kind.__name__ in reply:
                raise kind(reply[kind.__name__])
        return reply["value"]

    def _death(self) -> WorkerDied:
        code = self._process.wait()
        reason = f"exited with {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        reason += ", perhaps out of memory" if code == -signal.SIGKILL else ""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - 4 * STDERR_TAIL))
        tail = self._stderr.read().decode(errors="replace")[-STDERR_TAIL:].strip()
        return WorkerDied(f"the worker that ran {self._artifact} {reason}" + (f": {tail}" if tail else ""))

    def _end(self, at_once: bool) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:  # it died with a request unread
            at_once = True
        if at_once:
            self._process.kill()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._stderr.close()


def decode(program: Program, prompt: Sequence[int], num_tokens: int) -> Timing:
    """What `Worker.decode` does, in this process."""
    session = program.open(1, len(prompt) + num_tokens)
    tokens: list[int] = []
    gc.collect()
    gc.disable()
    try:
        switches, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, time.process_time()
        stamps = [time.perf_counter()]
        for token in generate(session, prompt, max_new_tokens=num_tokens, sampler=Sampler()):
            tokens.append(token)
            stamps.append(time.perf_counter())
        cpu = time.process_time() - cpu
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches
    finally:
        gc.enable()
    times = [float(x) for x in np.diff(stamps)]
    return Timing(times[0], tuple(times[1:]), cpu, switches, tuple(tokens))


def steps(
    program: Program, cached: int, width: int, *, count: int, capacity: int, logits: Literal["last", "all"] = "last"
) -> Laps:
    """What `Worker.steps` does, in this process."""
    session = _filled(program, cached, capacity)
    ids = np.arange(width, dtype=np.int64)[None] % program.traits.vocab_size

    def pieces() -> Iterator[Callable[[], object]]:
        session.step(ids, logits=logits)
        for _ in range(count):
            session.truncate([cached])
            yield partial(session.step, ids, logits=logits)
        session.truncate([cached])

    return time_laps(pieces())


def read(size_bytes: int, passes: int, threads: int) -> Laps:
    """What `Worker.read` does, in this process, by numpy's fastest reduction: memory is what limits it."""
    parts = np.array_split(_numbers(size_bytes), threads)
    with ThreadPoolExecutor(threads) as pool:
        return time_laps([lambda: list(pool.map(np.bitwise_or.reduce, parts))] * passes)


def multiply(size: int, passes: int, dtype: str) -> Laps:
    """What `Worker.multiply` does, in this process."""
    a, b, out, matmul = _matrices(size, dtype)
    return time_laps([partial(matmul, a, b, out=out)] * passes)


def time_laps(pieces: Iterable[Callable[[], object]]) -> Laps:
    """Time each piece of work; what an iterator does between two pieces is not timed."""
    seconds: list[float] = []
    cpu, switches = 0.0, 0
    gc.collect()
    gc.disable()
    try:
        for piece in pieces:
            switches -= resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            cpu -= time.process_time()
            start = time.perf_counter()
            piece()
            seconds.append(time.perf_counter() - start)
            cpu += time.process_time()
            switches += resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    finally:
        gc.enable()
    return Laps(tuple(seconds), cpu, switches)


@lru_cache(maxsize=2)
def _filled(program: Program, cached: int, capacity: int) -> Session:
    """A session of one row with that many tokens in it, and room for `capacity`."""
    session = program.open(1, capacity)
    if cached:
        session.step(np.arange(cached, dtype=np.int64)[None] % program.traits.vocab_size)
    return session


@lru_cache(maxsize=1)
def _numbers(size_bytes: int) -> NDArray[np.int64]:
    return np.ones(size_bytes // 8, np.int64)


@lru_cache(maxsize=1)
def _matrices(size: int, dtype: str) -> tuple[Any, Any, Any, Callable[..., object]]:
    """Two factors, room for their product, and what multiplies them."""
    factors = np.random.default_rng(0).standard_normal((2, size, size), dtype=np.float32)
    if dtype == "float32":
        return factors[0], factors[1], np.empty((size, size), np.float32), np.matmul
    import torch

    a, b = torch.from_numpy(factors).to(getattr(torch, dtype))
    return a, b, torch.empty_like(a), torch.matmul


def resident_bytes(field: str) -> int:
    """One field of this process's /proc/self/status, such as VmRSS or VmHWM.

    Raises:
        UserError: Not on Linux.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError as error:
        raise UserError("memory is measured on Linux only: there is no /proc/self/status") from error
    return _kilobytes(status, field)


def _kilobytes(text: str, field: str) -> int:
    """The field's value in bytes, in the format of /proc: `VmRSS:      1234 kB`."""
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{field}:")) * 1024


def _serve(program: Program, before: int, loaded: int, out: IO[bytes]) -> None:
    """Answer requests until stdin ends, as it does when the parent dies."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        call = request.pop("call")
        array = np.empty(0, np.float32)
        try:
            if call == "decode":
                value: Any = asdict(decode(program, **request))
            elif call == "steps":
                value = asdict(steps(program, **request))
            elif call == "read":
                value = asdict(read(**request, threads=program.traits.threads))
            elif call == "multiply":
                value = asdict(multiply(**request, dtype=program.traits.dtype))
            elif call == "memory":
                value = _memory(program, before, loaded)._asdict()
            else:
                ids = np.array([request["ids"]], dtype=np.int64)
                array = program.open(1, ids.shape[1]).step(ids, logits="all")[0]
                value = array.shape
        except (UserError, ConformanceError) as error:
            _send(out, {_kind(error): str(error)})
        else:
            _send(out, {"value": value}, np.asarray(array, np.float32).tobytes())


def cache_bytes_per_token(program: Program) -> int | None:
    """What a session grows by with each token that it has room for; None where a cache is no array."""
    sizes = []
    for tokens in (1, 2):
        arrays = program.allocate(1, tokens)
        if not all(hasattr(x, "nbytes") for x in arrays):
            return None
        sizes.append(sum(int(x.nbytes) for x in arrays))
    return sizes[1] - sizes[0]


def _memory(program: Program, before: int, loaded: int) -> Memory:
    gc.collect()
    peak, now = resident_bytes("VmHWM"), resident_bytes("VmRSS")
    rollup = Path("/proc/self/smaps_rollup").read_text()
    unique = _kilobytes(rollup, "Private_Clean") + _kilobytes(rollup, "Private_Dirty")
    return Memory(loaded, peak, now, unique, before, cache_bytes_per_token(program))


def _kind(error: UserError | ConformanceError) -> str:
    return ConformanceError.__name__ if isinstance(error, ConformanceError) else UserError.__name__


def _send(out: IO[bytes], reply: dict[str, Any], content: bytes = b"") -> None:
    out.write(json.dumps(reply).encode() + b"\n" + content)
    out.flush()


def main() -> None:
    """The child process."""
    parser = argparse.ArgumentParser(prog="python -m strop.worker", description="Run a program for the parent process.")
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cores", type=int, nargs="*")
    options = parser.parse_args()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not end up among the replies
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGKILL)
        if options.cores is not None:
            os.sched_setaffinity(0, options.cores)
    before = resident_bytes("VmRSS") if sys.platform == "linux" else 0
    start = time.perf_counter()
    try:
        program = open_program(open_artifact(options.artifact), options.threads)
    except (UserError, ConformanceError) as error:
        _send(out, {_kind(error): str(error)})
        return
    _send(out, {"value": time.perf_counter() - start})
    _serve(program, before, resident_bytes("VmRSS") if sys.platform == "linux" else 0, out)


if __name__ == "__main__":
    main()
