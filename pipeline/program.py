"""Engines and their sessions. The session's bookkeeping is here once; a runtime implements only the forward call.

Torch-free: arrays at this boundary are numpy; the K/V cache may be any array type that the runtime allocates.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from strop import plugin
from strop.artifact import Artifact, Manifest, read_manifest, write_manifest
from strop.errors import UserError
from strop.spec import ModelSpec
from strop.stage import Stage

Ints = NDArray[np.int64]
Logits = NDArray[np.float32]
Array = Any
"""A numpy array or torch tensor: slicing, assignment and fancy indices are all that `Session` asks of it."""
Cache = list[Array]
"""Keys and values of each layer that owns some: [k0, v0, k1, v1, ...], each (B, kv_heads, max_tokens, head_dim) or,
where they are rounded, codes of that (strop.kv_codes), and then after the two their scales by token, if there are any.
"""


@dataclass(frozen=True)
class Traits:
    """What a program is and how it runs.

    Attributes:
        runtime: Module name in `strop.export`.
        dtype: Of activations.
        threads: Intra-op threads.
        device: `cpu` or `cuda`.
        context: Most tokens in one row, prompt and output together.
        vocab_size: Width of the logits.
        takes_trees: `step` accepts a tree.
        kernels: What computes, for the fingerprint (for example `MatMulNBits accuracy_level 4`).
    """

    runtime: str
    dtype: str
    threads: int
    device: str
    context: int
    vocab_size: int
    takes_trees: bool
    kernels: str = ""


@dataclass(frozen=True)
class Tree:
    """Candidate tokens of one step, in topological order, the same for every row.

    Attributes:
        parents: For each of the K nodes the index of its parent in this step, or -1 for the last cached token.
    """

    parents: tuple[int, ...]

    def depths(self) -> Ints:
        """(K,): 0 for children of the last cached token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return np.array(depths, dtype=np.int64)

    def mask(self) -> NDArray[np.bool_]:
        """(K, K): node i attends to node j, itself and its ancestors."""
        mask = np.eye(len(self.parents), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask


@dataclass(frozen=True)
class Step:
    """One forward call. B rows, K new tokens a row, right-padded where rows bring fewer.

    Attributes:
        ids: (B, K) token ids.
        counts: (B,) how many of the K are real.
        lengths: (B,) tokens in the cache before this step. New keys and values go to lengths .. lengths + K.
        positions: (B, K) position of each new token.
        mask: (K, K) which new tokens attend to which; None: causal.
        logit_rows: (B, n) which of the K positions give logits.
    """

    ids: Ints
    counts: Ints
    lengths: Ints
    positions: Ints
    mask: NDArray[np.bool_] | None
    logit_rows: Ints


Forward = Callable[[Step], Logits]
"""Runs one step, updates the bound cache in place, returns (B, n, vocab) float32, valid until the next step."""


class Program(ABC):
    """An engine: weights in memory, ready to run. One program may serve several sessions, one at a time."""

    traits: Traits

    @abstractmethod
    def allocate(self, batch: int, max_tokens: int) -> Cache:
        """A zeroed cache for `batch` rows of at most `max_tokens`."""

    @abstractmethod
    def bind(self, cache: Cache) -> Forward:
        """The forward call over this cache."""

    def open(self, batch: int = 1, max_tokens: int | None = None) -> Session:
        """A new session.

        Args:
            batch: Rows.
            max_tokens: Most tokens a row will hold; None: the program's context.

        Raises:
            UserError: More tokens than the program's context.
        """
        max_tokens = max_tokens or self.traits.context
        if max_tokens > self.traits.context:
            raise UserError(f"max_tokens: {max_tokens} is more than this program's context of {self.traits.context}")
        return Session(self, batch, max_tokens)


class Session:
    """Rows of tokens with their K/V cache.

    Attributes:
        lengths: (B,) tokens in each row. Read it, change it only through `truncate` and `keep`.
        max_tokens: Most tokens a row can hold.
    """

    def __init__(self, program: Program, batch: int, max_tokens: int) -> None:
        self.program = program
        self.max_tokens = max_tokens
        self.lengths: Ints = np.zeros(batch, dtype=np.int64)
        self._cache = program.allocate(batch, max_tokens)
        self._forward = program.bind(self._cache)
        self._before: Ints = self.lengths

    def step(
        self,
        ids: Ints,
        *,
        counts: Ints | None = None,
        tree: Tree | None = None,
        logits: Literal["last", "all"] | int = "last",
    ) -> Logits:
        """Append tokens to every row and compute logits.

        Args:
            ids: (B, K), right-padded with any id where a row brings fewer than K.
            counts: (B,) real tokens of each row, at least 1; None: K.
            tree: The K tokens are nodes of this tree instead of a sequence; then `counts` must be None. All K stay
                in the cache until `keep` picks a path.
            logits: `last`: of each row's last real token. `all`: of all K positions (padding gives noise).
                n: of each row's last n real tokens.

        Returns:
            (B, 1 or K or n, vocab) float32, valid until the next step.

        Raises:
            UserError: More tokens than `max_tokens`, or a tree on a program that takes none.
        """
        batch, width = ids.shape
        if max(self.lengths.tolist()) + width > self.max_tokens:
            raise UserError(
                f"{int(self.lengths.max())} + {width} tokens do not fit: this session holds {self.max_tokens} a row, "
                f"the program's context is {self.program.traits.context}"
            )
        if tree is not None and not self.program.traits.takes_trees:
            raise UserError(f"this {self.program.traits.runtime} program takes no trees: export it with trees: true")
        if counts is None:
            counts, offsets, rows = _whole_step(batch, width, logits)
        else:
            _, offsets, rows = _whole_step(batch, width, "all")
            if logits != "all":
                rows = _last_rows(counts, 1 if logits == "last" else logits)
        mask = None if tree is None else tree.mask()
        offsets = offsets if tree is None else tree.depths()
        result = self._forward(Step(ids, counts, self.lengths, self.lengths[:, None] + offsets, mask, rows))
        self._before, self.lengths = self.lengths, self.lengths + counts
        return result

    def truncate(self, lengths: Sequence[int] | Ints) -> None:
        """Forget everything after the first `lengths` (B,) tokens of each row."""
        shorter = np.asarray(lengths, dtype=np.int64)
        if shorter.shape != self.lengths.shape or (shorter > self.lengths).any() or (shorter < 0).any():
            raise ValueError(f"truncate to {shorter.tolist()} of {self.lengths.tolist()}")
        self.lengths = shorter.copy()

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """After a tree step: keep one path of nodes per row, moved to contiguous positions, and forget the rest.

        Args:
            paths: For each row the kept nodes of the last step, from the root on; may be empty.
        """
        for row, path in enumerate(paths):
            if list(path) == list(range(len(path))):
                continue  # it lies where it belongs
            start = int(self._before[row])
            source = [start + node for node in path]
            target = slice(start, start + len(path))
            for array in self._cache:
                array[row, :, target] = array[row][:, source]
        self.lengths = self._before + np.array([len(path) for path in paths], dtype=np.int64)

    def fork(self) -> Session:
        """An independent copy that continues from the same tokens."""
        twin = copy.copy(self)
        twin._cache = [copy.deepcopy(array) for array in self._cache]
        twin._forward = self.program.bind(twin._cache)
        twin.lengths = self.lengths.copy()
        return twin


@lru_cache(maxsize=64)
def _whole_step(batch: int, width: int, logits: Literal["last", "all"] | int) -> tuple[Ints, Ints, Ints]:
    """Counts (B,), offsets (K,) and logit rows (B, n) of a step that brings `width` tokens to every row.

    The same for every token of a decoding, and small arrays take longer to make than to read: they are made once.
    """
    counts, offsets = np.full(batch, width, dtype=np.int64), np.arange(width, dtype=np.int64)
    every = np.tile(offsets, (batch, 1))
    rows = every if logits == "all" else _last_rows(counts, 1 if logits == "last" else logits)
    for array in (counts, offsets, rows):
        array.setflags(write=False)
    return counts, offsets, rows


def _last_rows(counts: Ints, last: int) -> Ints:
    """(B, last): the last real tokens of each row."""
    if last > counts.min():
        raise ValueError(f"logits of the last {last} tokens of a row that brings {counts.min()}")
    rows: Ints = counts[:, None] - np.arange(last, 0, -1, dtype=np.int64)
    return rows


def with_threads(traits: Traits, threads: int) -> Traits:
    """The same traits with another thread count."""
    return dataclasses.replace(traits, threads=threads)


class Loader(Protocol):
    """What an export stage has besides `plan` and `run`."""

    @staticmethod
    def load(path: Path, traits: Traits) -> Program:
        """The program that its `run` wrote into `path`, ready to run."""


@runtime_checkable
class Rounding(Protocol):
    """What an export stage has besides whose programs round more than their dtype does."""

    @staticmethod
    def write_exact(path: Path, traits: Traits, out: Path) -> Traits | None:
        """Write into `out` the program of `path` without that rounding: it tells a wrong program from a coarse one.

        Returns:
            Its traits; None, and nothing is written, where `path` does not round either.
        """


@runtime_checkable
class Recoding(Protocol):
    """What an export stage has besides whose programs hold weights in a form of their own."""

    @staticmethod
    def write_reference(path: Path, checkpoint: Path, out: Path) -> ModelSpec | None:
        """Write into `out` a checkpoint with its weights rounded as those of the program of `path` are.

        Computed from the checkpoint: it tells a program that rounds from one that mixes things up.

        Returns:
            The table of what was written; None, and nothing is, where the program holds the checkpoint's own weights.
        """


@runtime_checkable
class Elsewhere(Protocol):
    """What an export stage has besides whose programs may need a device that the machine of the export lacks."""

    @staticmethod
    def lacks(path: Path, traits: Traits) -> str | None:
        """What this machine lacks to run the program of `path`; None where nothing is known to be missing."""


def lacks(program: Artifact) -> str | None:
    """Why this machine cannot run a program that elsewhere runs as it is; None where it can be tried.

    Nothing of such a program can be measured here, which is no fault of the program: who measures says NOT MEASURED.
    """
    manifest = read_manifest(program.path)
    if manifest.traits is None:
        return None
    traits = Traits(**manifest.traits)
    stage = _export(traits)
    return stage.lacks(program.path, traits) if isinstance(stage, Elsewhere) else None


def write_reference(program: Artifact, checkpoint: Artifact, out: Path) -> Artifact:
    """The checkpoint that a program has to agree with: its own, or where it rounds weights, that one rounded too.

    Args:
        program: What an export made.
        checkpoint: What it was made from.
        out: An empty folder.
    """
    manifest = read_manifest(program.path)
    assert manifest.traits is not None, "a program"
    stage = _export(Traits(**manifest.traits))
    spec = stage.write_reference(program.path, checkpoint.path, out) if isinstance(stage, Recoding) else None
    if spec is None:
        return checkpoint
    write_manifest(out, Manifest("checkpoint", checkpoint.key, spec.to_json()))
    return dataclasses.replace(checkpoint, path=out)


def write_exact(artifact: Artifact, out: Path) -> Artifact | None:
    """A program's twin that rounds no more than its dtype does; None where it is one itself.

    Args:
        artifact: A program.
        out: An empty folder.
    """
    manifest = read_manifest(artifact.path)
    assert manifest.traits is not None, "a program"
    traits = Traits(**manifest.traits)
    stage = _export(traits)
    exact = stage.write_exact(artifact.path, traits, out) if isinstance(stage, Rounding) else None
    if exact is None:
        return None
    write_manifest(out, dataclasses.replace(manifest, traits=dataclasses.asdict(exact)))
    return dataclasses.replace(artifact, path=out)


def open_program(artifact: Artifact, threads: int | None = None) -> Program:
    """Load a program from the store or any folder, through the runtime that wrote it.

    Args:
        artifact: Its format must be `program`.
        threads: Intra-op threads; None: as many as it was exported for.

    Raises:
        UserError: Not a program, or its runtime is not installed here.
    """
    manifest = read_manifest(artifact.path)
    if manifest.traits is None:
        raise UserError(f"{artifact.path}: a {manifest.format}, not a program: export it first")
    traits = Traits(**manifest.traits)
    stage = cast(type[Loader], _export(traits))
    return stage.load(artifact.path, traits if threads is None else with_threads(traits, threads))


def _export(traits: Traits) -> type[Stage]:
    return plugin.find("export", traits.runtime, Stage)  # type: ignore[type-abstract]  # it finds concrete ones
