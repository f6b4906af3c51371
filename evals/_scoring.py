"""A candidate's and its parent's logits on one text, token for token: what `divergence` and `perplexity` summarize.

Both programs are stepped through sessions, chunk by chunk, so the cached path is what is measured and memory stays
small. Every token after the first of a window is scored. Leaves out the summaries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strop.artifact import Artifact
from strop.errors import ConformanceError, UserError
from strop.evals._text import SHORTEST, Window, cut, digest
from strop.machine import describe_machine
from strop.model import load_tokenizer
from strop.program import Ints, Logits, Program, open_program
from strop.stage import Progress

CHUNK = 128
"""Positions in one step: 50 MB of logits for a vocabulary of 100,000."""
BLOCK = 4
"""Rows compared at once: their float64 logits stay in the processor's cache."""
FEWEST_DOCUMENTS = 16
"""Texts of fewer documents are resampled by window."""
EXCESS_NATS = 2.0
"""A parent this much worse than a uniform guess is not worth a comparison."""

Scores = NDArray[np.void]
"""One record of `SCORE` per scored token."""
SCORE = np.dtype(
    [
        ("kl", "f8"),  # of the parent's distribution from the candidate's, nats
        ("nll_parent", "f8"),  # of the text's token, nats
        ("nll", "f8"),  # the candidate's
        ("is_same_top", "?"),
        ("margin", "f8"),  # between the parent's two most likely tokens, in probability
        ("is_top", "?"),  # the candidate's most likely token is the text's
        ("is_top_parent", "?"),
        ("position", "i8"),  # in its window; the token at position 1 was predicted from that at 0
        ("window", "i8"),
    ]
)


@dataclass(frozen=True)
class Job:
    """What is scored. Equal jobs give equal scores: programs are named by their keys, `progress` apart.

    Attributes:
        candidate, parent: Programs.
        text: Text source.
        windows: Most windows.
        length: Most tokens in a window.
        threads: Of both programs.
        progress: Told of finished windows.
        shortest: Fewest tokens in a window.
    """

    candidate: Artifact
    parent: Artifact
    text: str
    windows: int
    length: int
    threads: int
    progress: Progress = field(compare=False)
    shortest: int = SHORTEST


@dataclass(frozen=True)
class Comparison:
    """The scores of a job.

    Attributes:
        tokens: Scores of all tokens, in order.
        clusters: (tokens,) what intervals resample: the document, or in texts of few documents the window.
        size_bytes: (windows,) of the text that was scored.
        protocol: What must agree for two results to be compared.
    """

    tokens: Scores
    clusters: Ints
    size_bytes: Ints
    protocol: dict[str, Any]

    @property
    def num_clusters(self) -> int:
        """Independent units."""
        return len(np.unique(self.clusters))


@lru_cache(maxsize=2)
def compare(job: Job) -> Comparison:
    """Score a candidate against its parent. The last results are remembered: two metrics share one pass.

    Raises:
        UserError: The tokenizer or the vocabularies do not fit, or the parent is worse than a guess.
        ConformanceError: Logits are not finite.
    """
    tokenizer = load_tokenizer(job.parent.path)
    windows = cut(job.text, tokenizer, job.windows, job.length, job.shortest)
    parent = open_program(job.parent, job.threads)
    # a program against itself is exactly itself, however its threads add up
    candidate = parent if job.candidate.key == job.parent.key else open_program(job.candidate, job.threads)
    _check_vocabulary(windows, parent, candidate)
    tokens = np.concatenate(list(_score_windows(windows, parent, candidate, job.progress)))
    _check_parent(tokens, parent.traits.vocab_size)
    documents = np.array([x.document for x in windows], dtype=np.int64)
    by_document = len(set(documents)) >= FEWEST_DOCUMENTS
    protocol = {
        "text": job.text,
        "data_sha256": digest(windows),
        "bos": tokenizer.bos_token_id is not None,
        "context": job.length,
        "stride": job.length - (tokenizer.bos_token_id is not None),
        "tokens": len(tokens),
        "clusters": "document" if by_document else "window",
        "parent": _describe(parent),
        "candidate": _describe(candidate),
        "isa": describe_machine()["isa"],
    }
    clusters = documents[tokens["window"]] if by_document else tokens["window"]
    return Comparison(tokens, clusters, np.array([x.size_bytes for x in windows], dtype=np.int64), protocol)


def score(parent: Logits, candidate: Logits, targets: Ints) -> Scores:
    """Compare two rows of logits for each of a few tokens. Sums in float64.

    Args:
        parent: (T, vocab) float32, finite.
        candidate: (T, vocab) float32, finite. The same array as `parent` gives a KL of exactly 0.
        targets: (T,) the text's tokens.

    Returns:
        (T,) records; `position` and `window` are left 0.
    """
    scores = np.zeros(len(targets), dtype=SCORE)
    for start in range(0, len(targets), BLOCK):
        rows = slice(start, start + BLOCK)
        _score_block(parent[rows], candidate[rows], targets[rows], scores[rows])
    return scores


def _score_block(parent: Logits, candidate: Logits, targets: Ints, scores: Scores) -> None:
    """Fill `scores` in place."""
    p, q = _log_softmax(parent), _log_softmax(candidate)
    at = np.arange(len(targets))
    top, top_candidate = parent.argmax(-1), candidate.argmax(-1)
    scores["nll_parent"], scores["nll"] = -p[at, targets], -q[at, targets]
    scores["is_same_top"] = top == top_candidate
    scores["is_top_parent"], scores["is_top"] = top == targets, top_candidate == targets
    np.subtract(p, q, out=q)
    np.exp(p, out=p)
    # rounding can leave a sum of 1e-17 below the 0 that it cannot be below
    scores["kl"] = np.maximum(np.einsum("tv,tv->t", p, q), 0)
    largest = p[at, top]
    p[at, top] = 0
    scores["margin"] = largest - p.max(-1)


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


def _score_windows(windows: list[Window], parent: Program, candidate: Program, progress: Progress) -> Any:
    """Scores of each chunk of each window."""
    longest = max(len(x.ids) for x in windows)
    theirs = parent.open(1, longest)
    ours = theirs if candidate is parent else candidate.open(1, longest)
    for number, window in enumerate(windows):
        progress("scoring windows", number, len(windows))
        theirs.truncate([0])
        ours.truncate([0])
        for start in range(0, len(window.ids) - 1, CHUNK):
            ids = window.ids[None, start : min(start + CHUNK, len(window.ids) - 1)]
            targets = window.ids[start + 1 : start + 1 + ids.shape[1]]
            expected = theirs.step(ids, logits="all")[0]
            found = expected if ours is theirs else ours.step(ids, logits="all")[0]
            for program, logits in ((parent, expected), (candidate, found)):
                _check_finite(program, logits, f"window {number}, position {start}")
            scores = score(expected, found, targets)
            scores["position"], scores["window"] = np.arange(start + 1, start + 1 + len(scores)), number
            yield scores
    progress("scoring windows", len(windows), len(windows))


def _check_finite(program: Program, logits: Logits, place: str) -> None:
    # the sum of finite logits is finite: one pass, no mask of the whole chunk
    if not math.isfinite(float(logits.sum(dtype=np.float64))):
        raise ConformanceError(f"{program.traits.runtime}: the program's logits are not finite ({place} or just after)")


def _check_vocabulary(windows: list[Window], parent: Program, candidate: Program) -> None:
    largest = max(int(x.ids.max()) for x in windows)
    if largest >= parent.traits.vocab_size:
        raise UserError(
            f"tokenizer: makes token {largest}, the model has {parent.traits.vocab_size}: it is another model's"
        )
    if parent.traits.vocab_size != candidate.traits.vocab_size:
        raise UserError(
            f"vocabulary: the candidate has {candidate.traits.vocab_size} tokens and its parent "
            f"{parent.traits.vocab_size}: token for token they cannot be compared"
        )


def _check_parent(tokens: Scores, vocab_size: int) -> None:
    """The candidate may be that bad, then a gate says so; of the parent it tells that the protocol is broken."""
    nll = float(tokens["nll_parent"].mean())
    if nll > math.log(vocab_size) + EXCESS_NATS:
        raise UserError(
            f"broken protocol: the parent's perplexity of {math.exp(min(nll, 700)):.3g} is far beyond its vocabulary "
            f"of {vocab_size}: wrong tokenizer, or weights that are not the model's"
        )


def _describe(program: Program) -> dict[str, Any]:
    traits = program.traits
    return {"runtime": traits.runtime, "dtype": traits.dtype, "kernels": traits.kernels, "threads": traits.threads}
