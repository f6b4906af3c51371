"""Rounds alternate their direction, keep the order of what they tell, and repeat what a guard objects to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from strop.evals._rounds import WARM_UP_ROUNDS, collect, compare_copies, widen
from strop.metric import Estimate, MeasureContext
from strop.worker import Laps

ONE_THREAD = MeasureContext(threads=1)


class Scripted:
    """Pieces whose CPU shares were written down before; `log` tells in which order they ran."""

    def __init__(self, num_pieces: int, shares: Sequence[float] = ()) -> None:
        self.log: list[int] = []
        self.shares: Iterator[float] = iter([*[1.0] * WARM_UP_ROUNDS * num_pieces, *shares, *[1.0] * 1000])
        self.pieces = [self.piece(i) for i in range(num_pieces)]

    def piece(self, index: int) -> Any:
        def run() -> Laps:
            self.log.append(index)
            seconds = (index + 1.0, index + 2.0, index + 9.0)
            return Laps(seconds, next(self.shares) * sum(seconds), 0)

        return run


def test_odd_rounds_run_backwards_and_tell_forwards() -> None:
    scripted = Scripted(3)
    rounds = collect(scripted.pieces, 4, ONE_THREAD)
    counted = scripted.log[3 * WARM_UP_ROUNDS :]
    assert counted == [0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0]
    assert rounds.seconds().tolist() == [[2, 3, 4]] * 4
    assert rounds.seconds(best=True).tolist() == [[1, 2, 3]] * 4


def test_a_disturbed_round_is_repeated() -> None:
    rounds = collect(Scripted(2, [1, 1, 0.2, 0.2]).pieces, 4, ONE_THREAD)
    assert len(rounds.laps) == 4
    assert len(rounds.objections) == 1
    assert "computed for 20% of the time instead of 100%" in rounds.objections[0]
    assert not rounds.is_noisy


def test_one_slow_piece_among_many_does_not_count_as_a_disturbed_round() -> None:
    assert collect(Scripted(10, [0.2]).pieces, 2, ONE_THREAD).objections == []


def test_too_many_disturbed_rounds_are_a_noisy_machine() -> None:
    rounds = collect(Scripted(1, [0.1] * 100).pieces, 6, ONE_THREAD)
    assert rounds.is_noisy
    assert len(rounds.objections) == len(rounds.laps) == 4  # what there is, for the report


@pytest.mark.parametrize("factor", [1.0, 1.2, 1 / 1.2])
def test_copies_that_differ_widen_bounds_by_their_difference(factor: float) -> None:
    times = np.exp(np.random.default_rng(0).normal(0, 0.02, (20, 2))) * [factor, 1]
    copies = compare_copies(times, 0)
    assert copies.value == pytest.approx(factor, rel=0.03)
    found = widen(Estimate(10, 9, 11), copies)
    difference = 1.0 if factor == 1 else 1.2
    assert found.value == 10
    assert 9 / (1.1 * difference) < found.lower <= 9 / difference
    assert 11 * difference <= found.upper < 11 * 1.1 * difference
