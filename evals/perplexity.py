"""Perplexity of a program and its paired ratio to the parent's, and bits per byte.

Comparable only under one protocol (tokenizer, BOS, context, which half of a window is scored), so the ratio comes from
the same tokens: its interval is that of paired differences (arXiv 2411.00640, Miller 2024, §4), never of two intervals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from pydantic import Field

from strop.artifact import Artifact
from strop.evals._scoring import Comparison, Job, compare
from strop.evals._text import SHORTEST
from strop.metric import Kind, MeasureContext, Measurement, Metric
from strop.statistics import bootstrap_mean, bootstrap_ratio_of_means, transform

LARGEST_NLL = 700.0
"""exp of more is no float: a program this broken is reported as this bad."""


class Perplexity(Metric):
    """Perplexity on held-out text. With the fields of `divergence`, both come from one pass over it."""

    kind: ClassVar[Kind] = "quality"

    text: str = Field(default="python", min_length=1, description="text source to measure on (its measuring half)")
    windows: int = Field(default=48, ge=2, description="most windows of text")
    length: int = Field(default=512, ge=16, description="tokens of a window")
    shortest: int = Field(default=SHORTEST, ge=2, description="fewest tokens of a window; `length`: only whole ones")

    def names(self) -> Mapping[str, str]:
        """See `Metric.names`."""
        return {"value": "ratio", "ratio": "ratio", "bits_per_byte": "bits"}

    def text_sources(self) -> tuple[str, ...]:
        """See `Metric.text_sources`."""
        return (self.text,)

    def measure(
        self, program: Artifact, references: Mapping[str, Artifact], context: MeasureContext
    ) -> dict[str, Measurement]:
        """See `Metric.measure`."""
        job = Job(
            program, references["parent"], self.text, self.windows, self.length, context.threads, context.progress,
            shortest=self.shortest,
        )  # fmt: skip
        return summarize(compare(job), context.seed)


def summarize(comparison: Comparison, seed: int) -> dict[str, Measurement]:
    """The candidate's figures, each with its paired ratio to the parent's.

    Args:
        comparison: Scores of a candidate and its parent.
        seed: Of the bootstrap.
    """
    tokens, clusters = comparison.tokens, comparison.clusters
    nll, nll_parent = tokens["nll"], tokens["nll_parent"]
    value = transform(bootstrap_mean(nll, clusters, seed=seed), _exp)
    ratio = transform(bootstrap_mean(nll - nll_parent, clusters, seed=seed), _exp)
    # each token carries its share of its window's bytes, so that resampling tokens resamples bytes
    counts = np.bincount(tokens["window"], minlength=len(comparison.size_bytes))
    size_bytes = (comparison.size_bytes / counts)[tokens["window"]]
    bits = bootstrap_ratio_of_means(nll / math.log(2), size_bytes, clusters, seed=seed)
    bits_ratio = bootstrap_ratio_of_means(nll, nll_parent, clusters, seed=seed)
    detail = {"parent": _exp(float(nll_parent.mean())), "by_window": _by_window(comparison)}
    found = {
        "value": (value, "ratio", ratio, detail),
        "ratio": (ratio, "ratio", ratio, {}),
        "bits_per_byte": (bits, "bits", bits_ratio, {}),
    }
    return {
        name: Measurement(
            estimate, unit, "lower", comparison.num_clusters, comparison.protocol, {"parent": to_parent}, more
        )
        for name, (estimate, unit, to_parent, more) in found.items()
    }


def _by_window(comparison: Comparison) -> list[dict[str, float]]:
    """Perplexity of each window, the candidate's and the parent's."""
    rows = []
    for window in range(len(comparison.size_bytes)):
        tokens = comparison.tokens[comparison.tokens["window"] == window]
        rows.append({"value": _exp(float(tokens["nll"].mean())), "parent": _exp(float(tokens["nll_parent"].mean()))})
    return rows


def _exp(x: float) -> float:
    return math.exp(min(x, LARGEST_NLL))
