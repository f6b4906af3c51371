"""Perplexity by brute force over a tiny vocabulary, and its paired ratio."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from fakes.table_runtime import save_table
from references import VOCAB_SIZE, slow_softmax, tiny_tokenizer

from strop.evals._text import cut
from strop.evals.perplexity import Perplexity
from strop.metric import MeasureContext, Measurement
from strop.statistics import bootstrap_mean

LINES = [f"The assert statement number {i} raises if the expression {i * 7} is not true in debug." for i in range(20)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Measurement], list[list[float]], int]:
    """Figures of a candidate; nats of each token of each document (candidate minus parent too); bytes of text."""
    folder = tmp_path_factory.mktemp("perplexity")
    text = folder / "text.jsonl"
    text.write_text("\n".join(f'{{"text": "{line}"}}' for line in LINES))
    tables = np.random.default_rng(0).normal(size=(3, VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32)
    parent = save_table(folder / "parent", tables[0], 0 * tables[0], key="a" * 64)
    candidate = save_table(folder / "candidate", tables[0] + 0.2 * tables[1], 0 * tables[0], key="b" * 64)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "parent")
    found = Perplexity(text=str(text), windows=20, length=24).measure(
        candidate, {"parent": parent}, MeasureContext(threads=1)
    )
    nats = []
    for window in cut(str(text), tokenizer, 20, 24):
        ids = window.ids.tolist()
        for table in (tables[0] + 0.2 * tables[1], tables[0]):
            rows = [slow_softmax(table[a].tolist()) for a in ids[:-1]]
            nats.append([-math.log(row[b]) for row, b in zip(rows, ids[1:], strict=True)])
    return found, nats, sum(x.size_bytes for x in cut(str(text), tokenizer, 20, 24))


def test_value_is_exp_of_the_mean_over_all_tokens(
    measured: tuple[dict[str, Measurement], list[list[float]], int],
) -> None:
    found, nats, _ = measured
    own = [x for row in nats[::2] for x in row]
    assert found["value"].estimate.value == pytest.approx(math.exp(math.fsum(own) / len(own)), rel=1e-6)


def test_ratio_is_that_of_both_perplexities(measured: tuple[dict[str, Measurement], list[list[float]], int]) -> None:
    found, nats, _ = measured
    own, parents = ([x for row in nats[i::2] for x in row] for i in (0, 1))
    expected = math.exp((math.fsum(own) - math.fsum(parents)) / len(own))
    assert found["ratio"].estimate.value == pytest.approx(expected, rel=1e-6)
    assert found["value"].ratios["parent"] == found["ratio"].estimate


def test_ratio_is_much_surer_than_either_perplexity(
    measured: tuple[dict[str, Measurement], list[list[float]], int],
) -> None:
    found, nats, _ = measured
    widths = [math.log(found[name].estimate.upper / found[name].estimate.lower) for name in ("ratio", "value")]
    assert widths[0] < 0.5 * widths[1]
    own = np.array([x for row in nats[::2] for x in row])
    clusters = np.repeat(np.arange(20), [len(row) for row in nats[::2]])
    slow = bootstrap_mean(own, clusters)
    assert found["value"].estimate.upper == pytest.approx(math.exp(slow.upper), rel=1e-6)


def test_bits_per_byte_are_nats_over_the_bytes_of_the_text(
    measured: tuple[dict[str, Measurement], list[list[float]], int],
) -> None:
    found, nats, size_bytes = measured
    total = math.fsum(x for row in nats[::2] for x in row)
    assert found["bits_per_byte"].estimate.value == pytest.approx(total / math.log(2) / size_bytes, rel=1e-6)


def test_a_program_against_itself_has_a_ratio_of_exactly_one(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(f'{{"text": "{line}"}}' for line in LINES))
    table = np.random.default_rng(0).normal(size=(VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32)
    parent = save_table(tmp_path / "parent", table, table)
    tiny_tokenizer().save_pretrained(tmp_path / "parent")
    found = Perplexity(text=str(text), windows=4, length=64).measure(
        parent, {"parent": parent}, MeasureContext(threads=1)
    )
    assert (found["ratio"].estimate.lower, found["ratio"].estimate.upper) == (1, 1)
