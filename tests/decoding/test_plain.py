"""Tokens come from the distribution that temperature, top_k and top_p define, and stop when they should."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.decoding.plain import Sampler, generate
from strop.errors import UserError
from strop.program import Cache, Forward, Logits, Program, Step, Traits

VOCAB = 7


class Counting(Program):
    """After token t comes t + 1, and a little less surely t + 2."""

    traits = Traits("fake", "float32", 1, "cpu", 12, VOCAB, takes_trees=False)

    def allocate(self, batch: int, max_tokens: int) -> Cache:
        return [np.zeros((batch, 1, max_tokens, 1))]

    def bind(self, cache: Cache) -> Forward:
        def forward(step: Step) -> Logits:
            last = step.ids[0, step.logit_rows[0, 0]]
            logits = np.zeros((1, 1, VOCAB), np.float32)
            logits[0, 0, (last + 1) % VOCAB], logits[0, 0, (last + 2) % VOCAB] = 3, 2
            return logits

        return forward


def slow_probabilities(logits: list[float], temperature: float, top_k: int | None, top_p: float | None) -> list[float]:
    """One token at a time, as the papers say it; no two logits may be equal."""
    kept = sorted(range(len(logits)), key=lambda i: -logits[i])[:top_k]
    weights = {i: math.exp((logits[i] - max(logits)) / temperature) for i in kept}
    total, mass, nucleus = sum(weights.values()), 0.0, []
    for i in kept:
        if top_p is not None and mass >= top_p:
            break
        nucleus.append(i)
        mass += weights[i] / total
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(logits))]


@given(
    logits=st.lists(st.integers(-40, 40), min_size=1, max_size=12, unique=True),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([None, 1, 3, 50]),
    top_p=st.sampled_from([None, 0.05, 0.61, 0.97, 1.0]),
)
def test_probabilities_are_those_of_a_slow_reference(
    logits: list[int], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    scaled = [x / 7 for x in logits]
    sampler = Sampler(temperature, top_k=top_k, top_p=top_p)
    found = sampler.probabilities(np.array(scaled, np.float32))
    expected = slow_probabilities([float(np.float32(x)) for x in scaled], temperature, top_k, top_p)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (4, None), (None, 0.7), (5, 0.9)])
def test_warping_is_that_of_transformers(top_k: int | None, top_p: float | None) -> None:
    import torch
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = np.random.default_rng(0).normal(size=50).astype(np.float32) * 3
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.8)])
    if top_k is not None:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None:
        warpers.append(TopPLogitsWarper(top_p))
    expected = warpers(torch.zeros(1, 1, dtype=torch.long), torch.tensor(logits)[None]).softmax(-1)[0].numpy()
    np.testing.assert_allclose(Sampler(0.8, top_k=top_k, top_p=top_p).probabilities(logits), expected, atol=1e-6)


def test_draws_follow_the_probabilities() -> None:
    sampler = Sampler(1.3, top_k=5, top_p=0.95, seed=1)
    logits = np.array([0.1, 2.0, -1.0, 1.2, 0.7, 1.9, -3.0], np.float32)
    expected = sampler.probabilities(logits)
    draws = 20_000
    counts = np.bincount([sampler.pick(logits) for _ in range(draws)], minlength=VOCAB)
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    chi_square = (((counts - draws * expected) ** 2)[possible] / (draws * expected[possible])).sum()
    assert chi_square < 18.5  # 99.9 % point of chi-square with 4 degrees of freedom
    assert possible.sum() == 5


def test_greedy_takes_the_first_largest_logit() -> None:
    assert Sampler().pick(np.array([1, 3, 3], np.float32)) == 1
    assert Sampler().probabilities(np.array([1, 3, 3], np.float32)).tolist() == [0, 1, 0]


def run(prompt: list[int], count: int, sampler: Sampler | None = None, stop: tuple[int, ...] = ()) -> list[int]:
    session = Counting().open()
    return list(generate(session, prompt, max_new_tokens=count, sampler=sampler or Sampler(), stop_ids=stop))


def test_same_seed_same_tokens() -> None:
    def draw(seed: int) -> list[int]:
        return run([0], 11, Sampler(1.0, seed=seed))

    assert draw(5) == draw(5)
    assert len({tuple(draw(seed)) for seed in range(5)}) > 1


def test_generation_ends_at_the_count_the_stop_or_the_context() -> None:
    assert run([3, 2], 3) == [3, 4, 5]
    assert run([3, 2], 5, stop=(5, 6)) == [3, 4]
    assert run([0] * 10, 50) == [1, 2, 3]
    assert run([0] * 12, 50) == [1]
    assert run([0], 0) == []


def test_all_yielded_tokens_but_the_last_are_in_the_session() -> None:
    session = Counting().open()
    tokens = generate(session, [1, 2], max_new_tokens=3, sampler=Sampler())
    assert next(tokens) == 3
    assert session.lengths.tolist() == [2]
    assert list(tokens) == [4, 5]
    assert session.lengths.tolist() == [4]
    assert list(generate(session, [5], max_new_tokens=1, sampler=Sampler())) == [6]


def test_a_prompt_that_does_not_fit_is_refused_before_anything_runs() -> None:
    with pytest.raises(UserError, match="prompt: 13 tokens, and there is room for 12 in a context of 12"):
        generate(Counting().open(), [0] * 13, max_new_tokens=1, sampler=Sampler())
    with pytest.raises(UserError, match="no tokens"):
        generate(Counting().open(), [], max_new_tokens=1, sampler=Sampler())


@pytest.mark.parametrize("values", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_sampling_out_of_range_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"sampling: .* allowed: temperature of at least 0"):
        Sampler(**{"temperature": 1.0, **values})
