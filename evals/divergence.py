"""How far a program's next-token distribution is from its parent's: KL, equal top tokens, change in probability.

KL divergence catches what averages of perplexity and equal accuracy hide (Dutta et al. 2024, arXiv 2407.09141). The
figures are those of llama.cpp's `--kl-divergence`. Bounds are one-sided and resample documents.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from strop.artifact import Artifact
from strop.evals._scoring import Comparison, Job, compare
from strop.evals._text import SHORTEST
from strop.metric import Direction, Estimate, Kind, MeasureContext, Measurement, Metric
from strop.statistics import bootstrap_mean, bootstrap_ratio_of_means, min_samples, quantile_estimate, transform

QUANTILES = {"kl_median": 0.5, "kl_p90": 0.9, "kl_p99": 0.99, "kl_p99_9": 0.999}
UNITS = {
    **dict.fromkeys(("kl_mean", "kl_late", *QUANTILES, "kl_max"), "nats"),
    **dict.fromkeys(("same_top", "same_top_off_ties", "delta_p_mean", "delta_p_rms", "top_1"), "%"),
}
TIE = 0.1
"""Where the parent's two most likely tokens are closer in probability than this, either may come first."""
LATE = 0.75
"""Tokens at positions from this part of `length` on are late: `kl_late` is their mean."""
NUM_BUCKETS = 16
"""Of positions, in the detail."""
EXPONENTS = np.arange(-9, 2.25, 0.25)
"""Edges of the histogram in the detail, log10 of nats."""

Floats = NDArray[np.float64]


class Divergence(Metric):
    """Distance of the program's next-token distribution to the parent's on held-out text."""

    kind: ClassVar[Kind] = "quality"

    text: str = Field(default="python", min_length=1, description="text source to measure on (its measuring half)")
    windows: int = Field(default=48, ge=2, description="most windows of text")
    length: int = Field(default=512, ge=16, description="tokens of a window")
    shortest: int = Field(default=SHORTEST, ge=2, description="fewest tokens of a window; `length`: only whole ones")

    def names(self) -> Mapping[str, str]:
        """See `Metric.names`."""
        return {name: unit for name, unit in UNITS.items() if self.refusal(name) is None}

    def refusal(self, name: str) -> str | None:
        """See `Metric.refusal`."""
        needed = min_samples(QUANTILES.get(name, 0.5))
        given = self.windows * (self.length - 1)
        if given >= needed:
            return None
        return f"{name} needs {needed} tokens, {self.windows} windows of {self.length} give {given}: raise `windows`"

    def text_sources(self) -> tuple[str, ...]:
        """See `Metric.text_sources`."""
        return (self.text,)

    def measure(
        self, program: Artifact, references: Mapping[str, Artifact], context: MeasureContext
    ) -> dict[str, Measurement]:
        """See `Metric.measure`. The ratio to `parent` of a distance to it is the same value."""
        job = Job(
            program, references["parent"], self.text, self.windows, self.length, context.threads, context.progress,
            shortest=self.shortest,
        )  # fmt: skip
        return {k: v for k, v in summarize(compare(job), context.seed).items() if k in self.names()}


def summarize(comparison: Comparison, seed: int) -> dict[str, Measurement]:
    """Every figure that the number of scored tokens carries.

    Args:
        comparison: Scores of a candidate and its parent.
        seed: Of the bootstrap.
    """
    tokens, clusters = comparison.tokens, comparison.clusters
    kl = tokens["kl"]
    delta = 100 * (np.exp(-tokens["nll"]) - np.exp(-tokens["nll_parent"]))
    is_clear = tokens["margin"] > TIE
    same, clear = 100.0 * tokens["is_same_top"], is_clear.astype(float)
    estimates = {
        "kl_mean": _clip(bootstrap_mean(kl, clusters, seed=seed), 0, np.inf),
        "kl_max": Estimate.exact(float(kl.max())),
        "same_top": _clip(bootstrap_mean(same, clusters, seed=seed), 0, 100),
        "delta_p_mean": bootstrap_mean(delta, clusters, seed=seed),
        "delta_p_rms": transform(_clip(bootstrap_mean(delta**2, clusters, seed=seed), 0, np.inf), np.sqrt),
        "top_1": _clip(bootstrap_mean(100.0 * tokens["is_top"], clusters, seed=seed), 0, 100),
    }
    if is_clear.any():
        off_ties = bootstrap_ratio_of_means(same * clear, clear, clusters, seed=seed)
        estimates["same_top_off_ties"] = _clip(off_ties, 0, 100)
    late = (tokens["position"] >= LATE * comparison.protocol["context"]).astype(float)
    if late.any():
        late_mean = bootstrap_ratio_of_means(kl * late, late, clusters, seed=seed)
        estimates["kl_late"] = _clip(late_mean, 0, np.inf)
    for name, p in QUANTILES.items():
        if len(kl) >= min_samples(p):
            estimates[name] = _clip(quantile_estimate(kl, clusters, p, seed=seed), 0, np.inf)
    details: dict[str, dict[str, Any]] = {
        "kl_mean": {"by_position": by_position(kl, tokens["position"]), "histogram": histogram(kl)},
        "delta_p_mean": {f"p{100 * p:g}": float(np.quantile(delta, p)) for p in (0.01, 0.99)},
        "same_top_off_ties": {"tokens": int(is_clear.sum()), "parent_margin_above": TIE},
        "kl_late": {"tokens": int(late.sum()), "from": math.ceil(LATE * comparison.protocol["context"])},
    }
    result = {}
    for name, estimate in estimates.items():
        ratio = _top_1_ratio(comparison, seed) if name == "top_1" else estimate
        result[name] = Measurement(
            estimate, UNITS[name], _direction(name), comparison.num_clusters, comparison.protocol,
            {} if ratio is None else {"parent": ratio}, details.get(name, {}),
        )  # fmt: skip
    return result


def by_position(values: Floats, positions: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Mean in each of a few ranges of positions: damage that grows with the context shows here.

    Args:
        values: (tokens,).
        positions: (tokens,), from 1 on.

    Returns:
        Ranges that hold tokens: `from`, `to` (both included), `mean`, `tokens`.
    """
    edges = np.unique(np.linspace(1, int(positions.max()) + 1, NUM_BUCKETS + 1).astype(np.int64))
    rows = []
    for start, end in itertools.pairwise(edges):
        inside = values[(positions >= start) & (positions < end)]
        if len(inside):
            rows.append({"from": int(start), "to": int(end) - 1, "mean": float(inside.mean()), "tokens": len(inside)})
    return rows


def histogram(values: Floats) -> dict[str, Any]:
    """Counts over `EXPONENTS`: `log10_edges` (n + 1) and `counts` (n); what lies outside is in the first or last."""
    exponents = np.clip(np.log10(np.maximum(values, 1e-300)), EXPONENTS[0], EXPONENTS[-1])
    counts, _ = np.histogram(exponents, EXPONENTS)
    return {"log10_edges": EXPONENTS.tolist(), "counts": counts.tolist()}


def _top_1_ratio(comparison: Comparison, seed: int) -> Estimate | None:
    tokens = comparison.tokens
    if not tokens["is_top_parent"].any():
        return None
    return bootstrap_ratio_of_means(tokens["is_top"], tokens["is_top_parent"], comparison.clusters, seed=seed)


def _direction(name: str) -> Direction:
    if name == "delta_p_mean":
        return "neither"
    return "higher" if name.startswith(("same_top", "top_1")) else "lower"


def _clip(estimate: Estimate, lowest: float, highest: float) -> Estimate:
    """Bounds within what the quantity can be."""
    return transform(estimate, lambda x: float(min(max(x, lowest), highest)))
