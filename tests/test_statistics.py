"""Intervals, quantiles and tests against slow references, and by simulation: how often they err."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from references import slow_harrell_davis

from strop.metric import Estimate
from strop.statistics import (
    bootstrap_mean,
    bootstrap_ratio_of_means,
    harrell_davis,
    holm,
    incomplete_beta,
    look_confidence,
    looks,
    mcnemar,
    min_samples,
    paired_log_ratio,
    quantile_estimate,
    quantile_ratio,
    student_quantile,
)

SIMULATIONS = 400


def misses(interval: Callable[[np.random.Generator], Estimate], truth: float) -> tuple[float, float]:
    """Shares of simulated samples whose lower bound lies above, and whose upper bound lies below, the truth."""
    generator = np.random.default_rng(7)
    found = [interval(generator) for _ in range(SIMULATIONS)]
    return sum(x.lower > truth for x in found) / SIMULATIONS, sum(x.upper < truth for x in found) / SIMULATIONS


def allowed(rate: float) -> float:
    """What an error rate may measure as in `SIMULATIONS` tries: 3 standard errors more."""
    return rate + 3 * math.sqrt(rate * (1 - rate) / SIMULATIONS)


def test_mean_is_that_of_all_values_whatever_the_cluster_sizes() -> None:
    values, clusters = np.arange(7.0), np.array([0, 0, 0, 0, 5, 5, 9])
    estimate = bootstrap_mean(values, clusters)
    assert estimate.value == 3
    assert estimate.lower < 3 < estimate.upper


def test_ratio_of_means_is_exact_where_every_cluster_has_the_same_ratio() -> None:
    denominator = np.array([1.0, 2.0, 5.0, 3.0])
    estimate = bootstrap_ratio_of_means(3 * denominator, denominator, [0, 1, 2, 3])
    assert (estimate.value, estimate.lower, estimate.upper) == (3, 3, 3)


def test_standard_error_behind_the_mean_is_the_slow_one_over_clusters() -> None:
    generator = np.random.default_rng(0)
    clusters = np.repeat(np.arange(200), 5)
    values = np.repeat(generator.normal(size=200), 5) + generator.normal(size=1000)
    means = [values[clusters == c].mean() for c in range(200)]
    slow = np.std(means, ddof=1) / math.sqrt(200)
    estimate = bootstrap_mean(values, clusters)
    assert (estimate.upper - estimate.lower) / (2 * 1.645) == pytest.approx(slow, rel=0.05)


def test_bounds_err_as_often_as_they_say_on_skewed_clusters() -> None:
    def interval(generator: np.random.Generator) -> Estimate:
        per_document = generator.lognormal(0, 0.5, 32)
        values = per_document[:, None] * generator.exponential(size=(32, 20))
        return bootstrap_mean(values.ravel(), np.repeat(np.arange(32), 20))

    above, below = misses(interval, math.exp(0.125))
    assert above <= allowed(0.05)
    assert below <= allowed(0.065)  # skewed: measured over 1,500 simulations as 6.1 %


def test_clusters_make_the_interval_wider_when_their_values_agree() -> None:
    values = np.repeat(np.random.default_rng(1).normal(size=30), 10)
    clustered = bootstrap_mean(values, np.repeat(np.arange(30), 10))
    independent = bootstrap_mean(values, np.arange(300))
    assert clustered.upper - clustered.lower > 2.5 * (independent.upper - independent.lower)


def test_interval_of_equal_values_is_a_point() -> None:
    assert bootstrap_mean([0.0] * 6, [0, 0, 1, 1, 2, 2]) == Estimate(0, 0, 0, 0.95)


def test_one_rare_event_leaves_a_finite_interval() -> None:
    values = np.zeros(40)
    values[3] = 1
    estimate = bootstrap_mean(values, np.arange(40) // 4)
    assert estimate.lower <= estimate.value < estimate.upper < 0.2


def test_an_interval_from_one_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 clusters"):
        bootstrap_mean([1, 2, 3], [0, 0, 0])


def test_same_seed_gives_the_same_bounds() -> None:
    values, clusters = np.random.default_rng(2).normal(size=30), np.arange(30)
    assert bootstrap_mean(values, clusters, seed=3) == bootstrap_mean(values, clusters, seed=3)
    assert bootstrap_mean(values, clusters, seed=3) != bootstrap_mean(values, clusters, seed=4)


def noisy_pairs(generator: np.random.Generator, ratio: float, pairs: int, noise: float) -> np.ndarray:
    """Times that share a slow drift, with noise of their own and now and then a stall."""
    drift = np.cumsum(generator.normal(0, noise, pairs))
    logs = drift[:, None] + generator.normal(0, noise, (pairs, 2))
    stalls = (generator.random((pairs, 2)) < 0.05) * generator.exponential(5 * noise, (pairs, 2))
    return np.exp(logs + stalls + [math.log(ratio), 0])


def test_trimmed_log_ratio_is_the_mean_of_the_middle_three_fifths() -> None:
    logs = np.array([-9.0, 0.1, 0.2, 0.3, 7.0])
    estimate = paired_log_ratio(np.stack([np.exp(logs), np.ones(5)], 1), np.arange(5))
    assert estimate.value == pytest.approx(math.exp(0.2))


def test_paired_ratio_errs_no_more_than_it_says() -> None:
    above, below = misses(lambda g: paired_log_ratio(noisy_pairs(g, 1, 20, 0.03), np.arange(20), 0.98), 1)
    assert above <= allowed(0.02)
    assert below <= allowed(0.02)


def test_a_run_of_equal_programs_seldom_fails_at_any_look() -> None:
    def fails(generator: np.random.Generator) -> bool:
        pairs = noisy_pairs(generator, 1.05, 80, 0.08)
        confidence = look_confidence(3)
        return any(paired_log_ratio(pairs[:n], np.arange(n) % 20, confidence).lower > 1.05 for n in looks(20, 80))

    generator = np.random.default_rng(11)
    failures = sum(fails(generator) for _ in range(150))
    assert failures / 150 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 150)


def test_a_slow_candidate_is_found() -> None:
    generator = np.random.default_rng(12)
    pairs = [noisy_pairs(generator, 1.15, 20, 0.03) for _ in range(50)]
    assert sum(paired_log_ratio(x, np.arange(20), 0.98).lower > 1.05 for x in pairs) >= 48


def test_paired_ratio_turns_over_with_its_pairs() -> None:
    pairs = noisy_pairs(np.random.default_rng(5), 2, 40, 0.05)
    there, back = paired_log_ratio(pairs, np.arange(40)), paired_log_ratio(pairs[:, ::-1], np.arange(40))
    assert there.value == pytest.approx(1 / back.value)
    assert there.lower == pytest.approx(1 / back.upper, rel=0.01)


def test_a_time_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        paired_log_ratio([[1, 0], [1, 1]], [0, 1])


@pytest.mark.parametrize("p", [0.5, 0.9, 0.99])
def test_harrell_davis_is_the_formula(p: float) -> None:
    values = np.random.default_rng(3).exponential(size=101)
    assert harrell_davis(values, p) == pytest.approx(slow_harrell_davis(list(values), p), rel=1e-5)


def test_harrell_davis_tells_a_quantile_of_a_large_sample() -> None:
    values = np.random.default_rng(4).uniform(size=20_000)
    assert harrell_davis(values, 0.99) == pytest.approx(0.99, abs=0.002)


def test_quantile_bounds_err_no_more_than_they_say() -> None:
    def interval(generator: np.random.Generator) -> Estimate:
        return quantile_estimate(generator.exponential(size=100), np.arange(100) // 5, 0.5)

    above, below = misses(interval, math.log(2))
    assert above <= allowed(0.05)
    assert below <= allowed(0.05)


def test_quantile_of_resampled_values_matches_the_estimate_without_resampling() -> None:
    values = np.random.default_rng(6).normal(size=300)
    estimate = quantile_estimate(values, np.arange(300), 0.9)
    assert estimate.value == harrell_davis(values, 0.9)
    assert estimate.lower < estimate.value < estimate.upper


def test_quantile_ratio_of_a_scaled_column_is_the_scale() -> None:
    column = np.random.default_rng(8).lognormal(size=120)
    estimate = quantile_ratio(np.stack([3 * column, column], 1), np.arange(120) // 2, 0.9)
    assert (estimate.value, estimate.lower, estimate.upper) == pytest.approx((3, 3, 3))


@pytest.mark.parametrize(("p", "expected"), [(0.5, 20), (0.9, 100), (0.95, 200), (0.99, 1000), (0.999, 10_000)])
def test_a_quantile_needs_ten_samples_beyond_it(p: float, expected: int) -> None:
    assert min_samples(p) == expected


@pytest.mark.parametrize(("a", "b"), [(2, 3), (0.5, 0.5), (91.8, 10.2), (8000, 9000.5)])
def test_incomplete_beta_is_the_integral(a: float, b: float) -> None:
    at = a / (a + b) * 1.01
    # a substitution x = sin² removes the poles at both ends
    angle = np.linspace(0, math.asin(math.sqrt(at)), 200_001)[1:]
    whole = np.linspace(0, math.pi / 2, 200_001)[1:-1]

    def density(t: np.ndarray) -> np.ndarray:
        return np.exp((2 * a - 1) * np.log(np.sin(t)) + (2 * b - 1) * np.log(np.cos(t)) - peak)

    peak = np.max((2 * a - 1) * np.log(np.sin(whole)) + (2 * b - 1) * np.log(np.cos(whole)))
    slow = np.trapezoid(density(angle), angle) / np.trapezoid(density(whole), whole)
    assert incomplete_beta(at, a, b) == pytest.approx(slow, rel=2e-4)
    assert incomplete_beta([0, 1], a, b).tolist() == [0, 1]


def test_incomplete_beta_of_integers_is_a_binomial_tail() -> None:
    a, b, x = 4, 9, 0.37
    n = a + b - 1
    tail = sum(math.comb(n, k) * x**k * (1 - x) ** (n - k) for k in range(a, n + 1))
    assert float(incomplete_beta(x, a, b)) == pytest.approx(tail, rel=1e-12)


def test_student_quantiles_are_those_of_the_tables() -> None:
    table = {(0.95, 1): 6.3138, (0.975, 9): 2.2622, (0.99, 30): 2.4573, (0.9995, 9): 4.7809}
    assert {k: round(student_quantile(*k), 4) for k in table} == table


def test_mcnemar_is_the_exact_binomial_test() -> None:
    def slow(n10: int, n01: int) -> float:
        n = n10 + n01
        outcomes = list(itertools.product([0, 1], repeat=n))
        return sum(abs(2 * sum(x) - n) >= abs(n10 - n01) for x in outcomes) / len(outcomes)

    for n10, n01 in [(0, 0), (3, 3), (1, 6), (9, 2)]:
        assert mcnemar(n10, n01) == pytest.approx(slow(n10, n01))


def test_holm_keeps_the_order_and_never_falls_below_a_smaller_one() -> None:
    assert holm([0.04, 0.01, 0.03, 0.6]) == pytest.approx([0.09, 0.04, 0.09, 0.6])
    assert holm([]) == []


def test_holm_holds_the_error_rate_of_a_family() -> None:
    p_values = np.random.default_rng(9).uniform(size=(2000, 5))
    wrong = sum(min(holm(list(family))) <= 0.05 for family in p_values) / 2000
    assert wrong <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


def test_looks_double_up_to_the_last() -> None:
    assert looks(20, 80) == (20, 40, 80)
    assert looks(20, 50) == (20, 40, 50)
    assert looks(20, 20) == (20,)


def test_resamples_without_a_denominator_do_not_spoil_the_ratio() -> None:
    clusters = np.repeat(np.arange(8), 4)
    denominator = np.where(clusters < 2, 1.0, 0.0)  # a tenth of the resamples draws neither of the two
    numerator = denominator * np.where(np.arange(32) % 3 == 0, 0.5, 1.0)
    found = bootstrap_ratio_of_means(numerator, denominator, clusters)
    assert found.lower <= found.value <= found.upper
    assert np.isfinite([found.lower, found.upper]).all()
