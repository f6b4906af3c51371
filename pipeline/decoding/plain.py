"""Token by token generation over any session: greedy or sampled. Leaves out speculation and text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from strop.errors import UserError
from strop.program import Logits, Session

Probabilities = NDArray[np.float64]


class Sampler:
    """Picks tokens: the largest logit, or a draw after temperature, then top_k, then top_p (Holtzman et al. 2020,
    arXiv 1904.09751), in transformers' order.

    Attributes:
        temperature: Divides logits; 0: greedy, whatever the other fields say.
        top_k: Only this many largest logits stay, and what equals the smallest of them; None: all.
        top_p: Only the fewest likeliest tokens whose probabilities reach this stay; None: all.
    """

    def __init__(
        self, temperature: float = 0.0, *, top_k: int | None = None, top_p: float | None = None, seed: int = 0
    ) -> None:
        """See the class.

        Raises:
            UserError: A value out of range.
        """
        if temperature < 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
            raise UserError(
                f"sampling: temperature {temperature}, top_k {top_k}, top_p {top_p}; allowed: temperature of at least "
                "0, top_k of at least 1, top_p above 0 and at most 1"
            )
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self._generator = np.random.default_rng(seed)

    @property
    def is_greedy(self) -> bool:
        """Takes the largest logit and draws nothing."""
        return self.temperature == 0

    def probabilities(self, logits: Logits) -> Probabilities:
        """What tokens are drawn from.

        Args:
            logits: (vocab,).

        Returns:
            (vocab,), sums to 1; one-hot where greedy.
        """
        found: Probabilities
        if self.is_greedy:
            found = np.zeros(logits.shape)
            found[int(logits.argmax())] = 1.0
            return found
        scaled = logits.astype(np.float64) / self.temperature
        if self.top_k is not None and self.top_k < len(scaled):
            scaled[scaled < np.partition(scaled, -self.top_k)[-self.top_k]] = -np.inf
        found = np.exp(scaled - scaled.max())
        found /= found.sum()
        if self.top_p is not None and self.top_p < 1:
            order = np.argsort(-found, kind="stable")
            before = np.cumsum(found[order]) - found[order]
            found[order[before >= self.top_p]] = 0.0
            found /= found.sum()
        return found

    def pick(self, logits: Logits) -> int:
        """One token for logits (vocab,)."""
        return int(logits.argmax()) if self.is_greedy else self.draw(self.probabilities(logits))

    def draw(self, probabilities: Probabilities) -> int:
        """One token with these probabilities (vocab,), by one number from this sampler's generator."""
        cumulative = np.cumsum(probabilities)
        return int(np.searchsorted(cumulative, self._generator.random() * cumulative[-1], side="right"))


def generate(
    session: Session, prompt: Sequence[int], *, max_new_tokens: int, sampler: Sampler, stop_ids: Collection[int] = ()
) -> Iterator[int]:
    """Tokens after a prompt, each as soon as it is known.

    Ends after `max_new_tokens`, before the first stop token, or when the session is full. All yielded tokens but the
    last are in the session then.

    Args:
        session: Of one row. What it holds already comes before the prompt.
        prompt: Token ids.
        max_new_tokens: At most this many.
        sampler: Picks each token.
        stop_ids: Tokens that end the text; they are not yielded.

    Raises:
        UserError: No prompt, or one that does not fit the session.
    """
    room = session.max_tokens - int(session.lengths[0])
    if len(prompt) == 0:
        raise UserError("prompt: it has no tokens; at least one is needed")
    if len(prompt) > room:
        raise UserError(
            f"prompt: {len(prompt)} tokens, and there is room for {room} in a context of {session.max_tokens}"
        )
    return _generate(session, prompt, min(max_new_tokens, room - len(prompt) + 1), sampler, frozenset(stop_ids))


def _generate(
    session: Session, prompt: Sequence[int], num_tokens: int, sampler: Sampler, stop_ids: frozenset[int]
) -> Iterator[int]:
    new = np.array([prompt], dtype=np.int64)
    for _ in range(num_tokens):
        token = sampler.pick(session.step(new)[0, 0])
        if token in stop_ids:
            return
        yield token
        new = np.array([[token]], dtype=np.int64)
