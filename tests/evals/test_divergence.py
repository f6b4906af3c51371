"""What the figures of `divergence` say of scores, and which a sample cannot carry."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from strop.evals._scoring import SCORE, Comparison
from strop.evals.divergence import Divergence, by_position, histogram, summarize
from strop.metric import Measurement


def comparison(**columns: Any) -> Comparison:
    """Scores of 40 windows of 32 tokens; a column that is not given holds what equal programs score."""
    tokens = np.zeros(40 * 32, dtype=SCORE)
    tokens["nll"] = tokens["nll_parent"] = 1.0
    tokens["is_same_top"] = True
    tokens["margin"] = 0.5
    tokens["position"] = np.tile(np.arange(1, 33), 40)
    tokens["window"] = np.repeat(np.arange(40), 32)
    for name, values in columns.items():
        tokens[name] = values
    return Comparison(tokens, tokens["window"], np.full(40, 128), {"bos": True, "context": 32})


def test_equal_programs_have_no_distance_and_no_doubt_about_it() -> None:
    found = summarize(comparison(), 0)
    for name in ("kl_mean", "kl_median", "kl_p99", "kl_max", "delta_p_mean", "delta_p_rms"):
        assert (found[name].estimate.value, found[name].estimate.lower, found[name].estimate.upper) == (0, 0, 0)
    assert found["same_top"].estimate.lower == found["same_top"].estimate.upper == 100


def test_kl_figures_are_those_of_the_tokens() -> None:
    kl = np.random.default_rng(0).exponential(0.1, 40 * 32)
    found = summarize(comparison(kl=kl), 0)
    assert found["kl_mean"].estimate.value == pytest.approx(kl.mean())
    assert found["kl_max"].estimate.value == kl.max()
    assert found["kl_p99"].estimate.value == pytest.approx(np.quantile(kl, 0.99), rel=0.05)
    assert found["kl_mean"].estimate.lower < kl.mean() < found["kl_mean"].estimate.upper
    assert found["kl_mean"].samples == 40


def test_late_tokens_are_those_of_the_last_quarter_of_a_whole_window() -> None:
    late = np.tile(np.arange(1, 33) >= 24, 40)
    found = summarize(comparison(kl=np.where(late, 0.5, 0.1)), 0)
    assert found["kl_late"].estimate.value == pytest.approx(0.5)
    assert found["kl_late"].detail == {"tokens": int(late.sum()), "from": 24}
    early = summarize(comparison(position=np.tile(np.arange(32) % 20, 40)), 0)
    assert "kl_late" not in early
    assert "kl_late" in Divergence().names()


def test_a_ratio_to_the_parent_of_a_distance_to_it_is_the_distance() -> None:
    found = summarize(comparison(kl=np.linspace(0, 1, 40 * 32)), 0)
    assert found["kl_mean"].ratios["parent"] == found["kl_mean"].estimate


def test_top_1_is_compared_with_the_parents_own() -> None:
    right = np.arange(40 * 32) % 4 == 0
    found = summarize(comparison(is_top=right, is_top_parent=right | (np.arange(40 * 32) % 4 == 1)), 0)
    assert found["top_1"].estimate.value == 25
    assert found["top_1"].ratios["parent"].value == pytest.approx(0.5)


def test_a_changed_top_counts_off_ties_only_where_the_parent_was_sure() -> None:
    flipped = np.arange(40 * 32) % 2 == 0
    found = summarize(comparison(is_same_top=~flipped, margin=np.where(flipped, 0.05, 0.5)), 0)
    assert found["same_top"].estimate.value == 50
    assert found["same_top_off_ties"].estimate.value == 100


def test_change_in_probability_is_in_percentage_points() -> None:
    found = summarize(comparison(nll=-np.log(0.3), nll_parent=-np.log(0.5)), 0)
    assert found["delta_p_mean"].estimate.value == pytest.approx(-20)
    assert found["delta_p_rms"].estimate.value == pytest.approx(20)


def test_bounds_stay_within_what_is_possible() -> None:
    kl = np.zeros(40 * 32)
    kl[5] = 30.0
    found = summarize(comparison(kl=kl, is_same_top=kl == 0), 0)
    assert found["kl_mean"].estimate.lower >= 0
    assert found["same_top"].estimate.upper <= 100


def test_a_quantile_that_the_sample_cannot_carry_is_absent_and_says_why() -> None:
    assert "kl_p99_9" not in summarize(comparison(), 0)
    metric = Divergence(windows=3, length=64)
    assert set(Divergence().names()) - set(metric.names()) == {"kl_p99", "kl_p99_9"}
    assert metric.refusal("kl_p99") == "kl_p99 needs 1000 tokens, 3 windows of 64 give 189: raise `windows`"


def test_measurements_survive_json() -> None:
    kl = np.random.default_rng(0).exponential(0.1, 40 * 32)
    for measurement in summarize(comparison(kl=kl), 0).values():
        again = Measurement.from_json(json.loads(json.dumps(measurement.to_json(), allow_nan=False)))
        assert again.estimate == measurement.estimate


def test_positions_are_split_into_ranges_that_cover_all() -> None:
    rows = by_position(np.arange(100.0), np.arange(1, 101))
    assert sum(x["tokens"] for x in rows) == 100
    assert rows[0]["from"] == 1
    assert rows[-1]["to"] == 100
    assert [x["mean"] for x in rows] == sorted(x["mean"] for x in rows)


def test_histogram_counts_zeros_and_giants_too() -> None:
    counts = histogram(np.array([0.0, 1e-3, 1.0, 1e9]))["counts"]
    assert sum(counts) == 4
    assert counts[0] == counts[-1] == 1
