"""Sessions keep rows of tokens straight, whatever the runtime: a fake one that shows exactly what it sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from strop.artifact import Artifact, Manifest, write_manifest
from strop.errors import UserError
from strop.program import Cache, Forward, Logits, Program, Step, Traits, Tree, open_program

VOCAB = 1000
TRAITS = Traits("fake", "float32", 1, "cpu", 40, VOCAB, takes_trees=True)


class Fake(Program):
    """Logits of a position are the ids and positions that it attends to, in order, padded with -1."""

    def __init__(self, traits: Traits = TRAITS) -> None:
        self.traits = traits

    def allocate(self, batch: int, max_tokens: int) -> Cache:
        return [np.zeros((batch, 1, max_tokens, 1), np.int64), np.zeros((batch, 1, max_tokens, 1), np.int64)]

    def bind(self, cache: Cache) -> Forward:
        ids, positions = cache[0][:, 0, :, 0], cache[1][:, 0, :, 0]

        def forward(step: Step) -> Logits:
            batch, width = step.ids.shape
            mask = np.tri(width, dtype=bool) if step.mask is None else step.mask
            found = np.full((batch, step.logit_rows.shape[1], VOCAB), -1, np.float32)
            for row in range(batch):
                start = int(step.lengths[row])
                ids[row, start : start + width] = step.ids[row]
                positions[row, start : start + width] = step.positions[row]
                for i, node in enumerate(step.logit_rows[row]):
                    seen = [*range(start), *(start + np.flatnonzero(mask[node]))]
                    found[row, i, : 2 * len(seen)] = np.stack((ids[row, seen], positions[row, seen]), 1).ravel()
            return found

        return forward


def seen(logits: Logits) -> list[int]:
    """The ids that one position attends to; its positions must be 0, 1, 2, ...."""
    pairs = logits[logits >= 0].astype(int).reshape(-1, 2)
    assert pairs[:, 1].tolist() == list(range(len(pairs)))
    return [int(x) for x in pairs[:, 0]]


def rows(*ids: Sequence[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def test_tokens_follow_each_other_over_steps() -> None:
    session = Fake().open()
    session.step(rows([5, 6, 7]))
    assert seen(session.step(rows([8]))[0, 0]) == [5, 6, 7, 8]
    assert session.lengths.tolist() == [4]


def test_rows_grow_by_their_own_counts() -> None:
    session = Fake().open(2)
    last = session.step(rows([5, 6, 7], [1, 0, 0]), counts=np.array([3, 1]))
    assert [seen(x[0]) for x in last] == [[5, 6, 7], [1]]
    last = session.step(rows([8, 0], [2, 3]), counts=np.array([1, 2]))
    assert [seen(x[0]) for x in last] == [[5, 6, 7, 8], [1, 2, 3]]


def test_logits_of_all_or_of_the_last_few() -> None:
    session = Fake().open()
    assert [seen(x) for x in session.step(rows([5, 6, 7]), logits="all")[0]] == [[5], [5, 6], [5, 6, 7]]
    session.truncate([0])
    assert [seen(x) for x in session.step(rows([5, 6, 7]), logits=2)[0]] == [[5, 6], [5, 6, 7]]
    with pytest.raises(ValueError, match="last 3 tokens of a row that brings 2"):
        session.step(rows([5, 6, 7]), counts=np.array([2]), logits=3)


def test_truncated_tokens_are_forgotten() -> None:
    session = Fake().open(2)
    session.step(rows([5, 6, 7], [1, 2, 3]))
    session.truncate([1, 3])
    last = session.step(rows([8], [4]))
    assert [seen(x[0]) for x in last] == [[5, 8], [1, 2, 3, 4]]
    with pytest.raises(ValueError, match="truncate"):
        session.truncate([3, 3])


TREE = Tree((-1, 0, 0, 1, -1))


def test_tree_nodes_see_their_ancestors_at_their_depth() -> None:
    assert TREE.depths().tolist() == [0, 1, 1, 2, 0]
    session = Fake().open()
    session.step(rows([5, 6]))
    found = session.step(rows([10, 11, 12, 13, 14]), tree=TREE, logits="all")[0]
    assert [seen(x) for x in found] == [[5, 6, 10], [5, 6, 10, 11], [5, 6, 10, 12], [5, 6, 10, 11, 13], [5, 6, 14]]


@pytest.mark.parametrize("path", [[], [0], [0, 1, 3], [0, 2], [4]])
def test_kept_path_is_what_the_next_token_sees(path: list[int]) -> None:
    session = Fake().open(2)
    session.step(rows([5, 6], [7, 0]), counts=np.array([2, 1]))
    session.step(rows([10, 11, 12, 13, 14], [20, 21, 22, 23, 24]), tree=TREE)
    session.keep([path, [0, 2]])
    first, second = session.step(rows([30], [31]))
    assert seen(first[0]) == [5, 6, *(10 + node for node in path), 30]
    assert seen(second[0]) == [7, 20, 22, 31]


def test_forks_go_their_own_ways() -> None:
    session = Fake().open()
    session.step(rows([5, 6]))
    twin = session.fork()
    session.step(rows([7]))
    assert seen(twin.step(rows([8]))[0, 0]) == [5, 6, 8]
    assert seen(session.step(rows([9]))[0, 0]) == [5, 6, 7, 9]


def test_random_walks_agree_with_a_list_of_tokens() -> None:
    generator = np.random.default_rng(3)
    session = Fake().open(3, 40)
    lists: list[list[int]] = [[], [], []]
    for _ in range(60):
        if max(map(len, lists)) > 30:
            lengths = [int(generator.integers(0, len(x) + 1)) for x in lists]
            session.truncate(lengths)
            lists = [x[:n] for x, n in zip(lists, lengths, strict=True)]
            continue
        counts = generator.integers(1, 5, 3)
        ids = generator.integers(0, VOCAB, (3, counts.max()))
        last = session.step(ids, counts=counts)
        for row, tokens in enumerate(lists):
            tokens.extend(ids[row, : counts[row]].tolist())
            assert seen(last[row, 0]) == tokens


def test_what_does_not_fit_is_one_line() -> None:
    with pytest.raises(UserError, match="41 is more than this program's context of 40"):
        Fake().open(1, 41)
    session = Fake().open(1, 4)
    session.step(rows([1, 2, 3]))
    with pytest.raises(UserError, match="3 \\+ 2 tokens do not fit: this session holds 4 a row"):
        session.step(rows([4, 5]))
    with pytest.raises(UserError, match="takes no trees"):
        Fake(dataclasses.replace(TRAITS, takes_trees=False)).open().step(rows([1]), tree=Tree((-1,)))


def test_only_programs_of_a_known_runtime_open(tmp_path: Path) -> None:
    write_manifest(tmp_path, Manifest("checkpoint", "0" * 64))
    with pytest.raises(UserError, match="a checkpoint, not a program"):
        open_program(Artifact(tmp_path, "checkpoint", "0" * 64))
    traits = dataclasses.asdict(dataclasses.replace(TRAITS, runtime="eagre"))
    write_manifest(tmp_path, Manifest("program", "0" * 64, traits=traits))
    with pytest.raises(UserError, match="no runtime named 'eagre'; did you mean 'eager'"):
        open_program(Artifact(tmp_path, "program", "0" * 64))
