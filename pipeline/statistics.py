"""Intervals, paired ratios, percentiles and tests behind every measured value. Arrays in, `Estimate` out; numpy only.

Every interval resamples clusters (documents, prompts): tokens of one document are not independent, and treating them so
makes a 5 % test reject far more often. Bounds are one-sided. Same seed, same bounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from strop.metric import Estimate

Floats = NDArray[np.float64]

RESAMPLES = 2000
TRIM = 0.2
"""Share of the paired log ratios left out at each end."""
SMALLEST_ERROR = 0.3
"""Least standard error of a resample, as a share of the sample's: a resample that misses every rare event has none."""
CHUNK = 250_000
"""Numbers held at once while order statistics are resampled: about what the processor's cache holds."""


def bootstrap_mean(values: ArrayLike, clusters: ArrayLike, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Mean over all values, with bounds from the studentized cluster bootstrap.

    Args:
        values: (n,).
        clusters: (n,) label of the cluster that each value belongs to.
        confidence: Of each bound on its own.
        seed: Of the resampling.

    Raises:
        ValueError: Fewer than two clusters.
    """
    values = np.asarray(values, np.float64)
    return bootstrap_ratio_of_means(values, np.ones_like(values), clusters, confidence, seed)


def bootstrap_ratio_of_means(
    numerator: ArrayLike, denominator: ArrayLike, clusters: ArrayLike, confidence: float = 0.95, seed: int = 0
) -> Estimate:
    """Mean of `numerator` over mean of `denominator`, paired, with bounds from the studentized cluster bootstrap.

    Studentizing (Hall 1988; Hesterberg 2015, arXiv 1411.5279) keeps one-sided bounds honest on skewed values such as
    KL, where the percentile bootstrap's upper bound is too low. The standard error is the linearized one.

    Args:
        numerator: (n,).
        denominator: (n,), its mean not 0.
        clusters: (n,) label of the cluster that each pair belongs to.
        confidence: Of each bound on its own.
        seed: Of the resampling.

    Raises:
        ValueError: Fewer than two clusters.
    """
    index, count = _cluster_index(clusters)
    x = np.bincount(index, np.asarray(numerator, np.float64), count).astype(np.float64)
    y = np.bincount(index, np.asarray(denominator, np.float64), count).astype(np.float64)
    ratio, error = _ratio_and_error(np.ones((1, count)), x, y)
    value, own_error = float(ratio[0]), float(error[0])
    if not own_error:
        return Estimate(value, value, value, confidence)
    weights = _resample(count, seed)
    weights = weights[weights @ y != 0]  # a resample of clusters that have no denominator has no ratio
    ratios, errors = _ratio_and_error(weights, x, y)
    studentized = (ratios - value) / np.maximum(errors, SMALLEST_ERROR * own_error)
    low, high = (float(x) for x in np.quantile(studentized, [1 - confidence, confidence]))
    # a studentized bound can cross the estimate where nearly all clusters are equal
    return Estimate(value, min(value, value - high * own_error), max(value, value - low * own_error), confidence)


def paired_log_ratio(pairs: ArrayLike, clusters: ArrayLike, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Ratio of the first to the second of each pair: exp of the 20 %-trimmed mean of log ratios.

    Args:
        pairs: (n, 2), positive: what is measured, and what it is compared with, in the same pair.
        clusters: (n,) label (the prompt) of each pair.
        confidence: Of each bound on its own.
        seed: Of the resampling.

    Raises:
        ValueError: Fewer than two clusters, or a value that is not positive.
    """
    table = np.asarray(pairs, np.float64)
    if not (table > 0).all():
        raise ValueError("paired values must be positive")
    logs = np.log(table[:, 0] / table[:, 1])
    index, count = _cluster_index(clusters)
    value = float(_combine(logs, _trimming, np.ones((1, count)), index)[0])
    resampled = _combine(logs, _trimming, _resample(count, seed), index)
    return transform(_percentile_bounds(value, resampled, count, confidence), math.exp)


def harrell_davis(values: ArrayLike, p: float) -> float:
    """Quantile by Harrell and Davis (1982): every order statistic, weighted by a beta distribution.

    Args:
        values: (n,), in any order.
        p: Between 0 and 1, both excluded.
    """
    x = np.sort(np.asarray(values, np.float64))
    n = len(x)
    cumulative = incomplete_beta(np.arange(n + 1) / n, p * (n + 1), (1 - p) * (n + 1))
    return float(np.diff(cumulative) @ x)


def quantile_estimate(
    values: ArrayLike, clusters: ArrayLike, p: float, confidence: float = 0.95, seed: int = 0
) -> Estimate:
    """Harrell–Davis quantile with bounds from the percentile cluster bootstrap.

    Args:
        values: (n,).
        clusters: (n,) label of the cluster that each value belongs to.
        p: Between 0 and 1, both excluded.
        confidence: Of each bound on its own.
        seed: Of the resampling.

    Raises:
        ValueError: Fewer than two clusters.
    """
    x = np.asarray(values, np.float64)
    index, count = _cluster_index(clusters)
    resampled = _combine(x, _beta_table(p, len(x)), _resample(count, seed), index)
    return _percentile_bounds(harrell_davis(x, p), resampled, count, confidence)


def quantile_ratio(
    pairs: ArrayLike, clusters: ArrayLike, p: float, confidence: float = 0.95, seed: int = 0
) -> Estimate:
    """Quantile of the first column over the quantile of the second, both resampled by the same clusters.

    Args:
        pairs: (n, 2), positive.
        clusters: (n,) label (the prompt) of each pair.
        p: Between 0 and 1, both excluded.
        confidence: Of each bound on its own.
        seed: Of the resampling.

    Raises:
        ValueError: Fewer than two clusters.
    """
    table = np.asarray(pairs, np.float64)
    index, count = _cluster_index(clusters)
    weights, beta = _resample(count, seed), _beta_table(p, len(table))
    first, second = (_combine(column, beta, weights, index) for column in table.T)
    value = math.log(harrell_davis(table[:, 0], p) / harrell_davis(table[:, 1], p))
    return transform(_percentile_bounds(value, np.log(first / second), count, confidence), math.exp)


def transform(estimate: Estimate, function: Callable[[float], float]) -> Estimate:
    """The estimate of an increasing function of what was estimated."""
    value, lower, upper = (function(x) for x in (estimate.value, estimate.lower, estimate.upper))
    return Estimate(value, lower, upper, estimate.confidence, estimate.is_noisy)


def min_samples(p: float) -> int:
    """Fewest samples that carry the quantile p: ten beyond it (p90 needs 100, p95 200, p99 1000)."""
    return math.ceil(round(10 / min(p, 1 - p), 6))


def mcnemar(n10: int, n01: int) -> float:
    """Two-sided exact p-value that items are lost as often as they are won (McNemar 1947; binomial).

    Args:
        n10: Items that only the first got right.
        n01: Items that only the second got right.
    """
    n = n10 + n01
    tail = sum(math.comb(n, k) for k in range(min(n10, n01) + 1))
    return min(1.0, tail / 2 ** (n - 1)) if n else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the order given: rejecting those below alpha errs in at most alpha (Holm 1979)."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def looks(first: int, last: int) -> tuple[int, ...]:
    """After how many pairs a sequential comparison looks: `first`, doubled until `last` (20, 40, 80)."""
    doubled = itertools.takewhile(lambda pairs: pairs < last, (first * 2**i for i in itertools.count()))
    return (*doubled, last)


def look_confidence(num_looks: int) -> float:
    """Confidence of each one-sided bound at each of so many looks, so that all looks together err in about 5 %.

    Up to three looks as Pocock (1977) rounded down, beyond that Bonferroni.
    """
    return {1: 0.95, 2: 0.97, 3: 0.98}.get(num_looks, 1 - 0.05 / num_looks)


def incomplete_beta(x: ArrayLike, a: float, b: float) -> Floats:
    """Regularised incomplete beta function I_x(a, b), to about 1e-12.

    The continued fraction of DLMF 8.17.22, evaluated by the modified Lentz method (Thompson and Barnett 1986), on
    the side of the mean where it converges fast.

    Args:
        x: Any shape, between 0 and 1.
        a, b: Positive.
    """
    x = np.asarray(x, np.float64)
    is_upper = x > (a + 1) / (a + b + 2)
    z = np.where(is_upper, 1 - x, x)
    p, q = np.where(is_upper, b, a), np.where(is_upper, a, b)
    inside = (z > 0) & (z < 1)
    safe = np.where(inside, z, 0.5)
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    front = np.exp(p * np.log(safe) + q * np.log1p(-safe) - log_beta) / p
    part = np.where(inside, front * _beta_fraction(safe, p, q), z)
    return np.where(is_upper, 1 - part, part)


@cache
def student_quantile(p: float, degrees: int) -> float:
    """Quantile of Student's t, by bisection on `incomplete_beta`.

    Args:
        p: From 0.5 on, below 1.
        degrees: Of freedom.
    """
    low, high = 0.0, 1.0  # of x = degrees / (degrees + t^2), which falls as t grows
    for _ in range(60):
        x = (low + high) / 2
        low, high = (x, high) if incomplete_beta(x, degrees / 2, 0.5) < 2 * (1 - p) else (low, x)
    return math.sqrt(degrees * (1 - x) / x)


def _beta_fraction(x: Floats, a: Floats, b: Floats) -> Floats:
    """1 / (1 + d1 / (1 + d2 / (1 + ...))) with d of DLMF 8.17.23."""
    tiny = 1e-300
    c, d = np.ones_like(x), 1 - (a + b) * x / (a + 1)
    d = 1 / np.where(np.abs(d) < tiny, tiny, d)
    value = d
    for m in range(1, 500):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            c, d = 1 + term / c, 1 + term * d
            c, d = np.where(np.abs(c) < tiny, tiny, c), 1 / np.where(np.abs(d) < tiny, tiny, d)
            value = value * c * d
        if np.max(np.abs(c * d - 1), initial=0) < 1e-13:
            break
    return value


def _cluster_index(clusters: ArrayLike) -> tuple[NDArray[np.int64], int]:
    """Index of each value's cluster, and how many there are."""
    labels, index = np.unique(np.asarray(clusters), return_inverse=True)
    if len(labels) < 2:
        raise ValueError(f"an interval needs at least 2 clusters, there are {len(labels)}")
    return index.reshape(-1).astype(np.int64), len(labels)


def _resample(count: int, seed: int) -> Floats:
    """(RESAMPLES, count): how often each cluster was drawn."""
    return np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), RESAMPLES).astype(np.float64)


def _ratio_and_error(weights: Floats, x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Ratio of weighted cluster sums and its linearized standard error, per row of weights (rows, clusters)."""
    clusters, totals = x.shape[0], weights @ y
    ratio = weights @ x / totals
    # sum of w (x - ratio y)^2, expanded so that nothing of size (rows, clusters) is built; rounding can go below 0
    squares = weights @ x**2 - 2 * ratio * (weights @ (x * y)) + ratio**2 * (weights @ y**2)
    floor = 1e-12 * (weights @ x**2)
    squares = np.where(squares > floor, squares, 0)
    return ratio, np.sqrt(squares * clusters / (clusters - 1)) / np.abs(totals)


def _trimming(share: Floats) -> Floats:
    """Of a trimmed mean: how much weight lies below this share of the sorted sample."""
    kept: Floats = (np.clip(share, TRIM, 1 - TRIM) - TRIM) / (1 - 2 * TRIM)
    return kept


def _beta_table(p: float, n: int) -> Callable[[Floats], Floats]:
    """Of a Harrell–Davis quantile: how much weight lies below a share of the sorted sample, from a table."""
    a, b = p * (n + 1), (1 - p) * (n + 1)
    reach = 10 * math.sqrt(p * (1 - p) / n)
    grid = np.unique(np.clip(np.concatenate([np.linspace(p - reach, p + reach, 2001), [0, 1]]), 0, 1))
    table = incomplete_beta(grid, a, b)

    def below(share: Floats) -> Floats:
        return np.interp(share, grid, table)

    return below


def _combine(values: Floats, below: Callable[[Floats], Floats], weights: Floats, index: NDArray[np.int64]) -> Floats:
    """A weighted mean of order statistics, per row of cluster weights.

    Args:
        values: (n,).
        below: Share of the sorted sample -> weight of the statistic up to there, from 0 to 1.
        weights: (rows, clusters).
        index: (n,) cluster of each value.

    Returns:
        (rows,).
    """
    order = np.argsort(values, kind="stable")
    ranked, index = values[order], index[order]
    result = []
    step = max(1, CHUNK // len(values))
    for start in range(0, len(weights), step):
        cumulative = np.cumsum(weights[start : start + step, index], axis=1)
        share = below(cumulative / cumulative[:, -1:])
        result.append(np.diff(share, axis=1, prepend=0.0) @ ranked)
    return np.concatenate(result)


def _percentile_bounds(value: float, resampled: Floats, clusters: int, confidence: float) -> Estimate:
    """Percentile bounds, widened for few clusters as a t interval is wider than a normal one (Hesterberg 2015, §5)."""
    low, high = (float(x) - value for x in np.quantile(resampled, [1 - confidence, confidence]))
    # the resampled variance divides by n instead of n - 1, and its tails are normal
    student = student_quantile(confidence, clusters - 1) / NormalDist().inv_cdf(confidence)
    wider = student * math.sqrt(clusters / (clusters - 1))
    return Estimate(value, value + min(0.0, low) * wider, value + max(0.0, high) * wider, confidence)
