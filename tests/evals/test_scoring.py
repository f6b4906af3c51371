"""Scores of a pair of programs against slow sums over whole rows, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.table_runtime import save_table
from references import VOCAB_SIZE, slow_kl, slow_softmax, tiny_tokenizer

from strop.artifact import Artifact
from strop.errors import ConformanceError, UserError
from strop.evals._scoring import CHUNK, Job, compare, score
from strop.evals._text import SHORTEST, cut
from strop.stage import no_progress

LENGTH = CHUNK + 41
"""A window takes two steps, the second of another width."""


def tables(seed: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """What the tokens before the next one say about it."""
    last, before = scale * np.random.default_rng(seed).normal(size=(2, VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32)
    return last, before


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture
def text(tmp_path: Path) -> str:
    """20 documents, some longer than two windows, some too short for one."""
    generator = np.random.default_rng(1)
    path = tmp_path / "text.jsonl"
    words = ["assert", "expression", "statement", "raise", "if", "the", "value", "debug", "ünïcode"]
    lengths = [300, 2, *generator.integers(20, 60, 18)]
    lines = [json.dumps({"text": " ".join(generator.choice(words, n))}) for n in lengths]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def job(tmp_path: Path, text: str, tokenizer: Any) -> Callable[..., Job]:
    """Makes jobs over two table programs."""

    def make(parent: Any = None, candidate: Any = None, **fields: Any) -> Job:
        artifacts = {}
        for name, made, key in (
            ("parent", parent or tables(0), "a" * 64),
            ("candidate", candidate or tables(1), "b" * 64),
        ):
            artifacts[name] = save_table(tmp_path / name, *made, key=key)
            tokenizer.save_pretrained(tmp_path / name)
        return Job(**{
            **artifacts, "text": text, "windows": 30, "length": LENGTH, "threads": 1, "progress": no_progress, **fields
        })  # fmt: skip

    compare.cache_clear()
    return make


def test_kl_is_the_slow_sum() -> None:
    parent, candidate = np.random.default_rng(2).normal(size=(2, 9, 7)).astype(np.float32)
    found = score(parent, candidate, np.arange(9) % 7)["kl"]
    slow = [slow_kl(p.tolist(), q.tolist()) for p, q in zip(parent, candidate, strict=True)]
    assert found == pytest.approx(slow, rel=1e-12)


def test_kl_of_equal_logits_is_exactly_zero_and_of_nearly_equal_ones_never_below() -> None:
    logits = 20 * np.random.default_rng(3).normal(size=(64, 1001)).astype(np.float32)
    targets = np.zeros(64, np.int64)
    assert (score(logits, logits.copy(), targets)["kl"] == 0).all()
    nearly = np.nextafter(logits, np.float32(np.inf))
    assert (score(logits, nearly, targets)["kl"] >= 0).all()


def test_kl_does_not_depend_on_a_shift_of_the_logits() -> None:
    parent, candidate = np.random.default_rng(4).normal(size=(2, 5, 7)).astype(np.float32)
    targets = np.zeros(5, np.int64)
    shifted = score(parent + np.float32(512), candidate - np.float32(256), targets)["kl"]
    assert shifted == pytest.approx(score(parent, candidate, targets)["kl"], abs=1e-4)


def test_tops_margin_and_likelihood_are_those_of_the_slow_softmax() -> None:
    parent, candidate = np.random.default_rng(5).normal(size=(2, 6, 7)).astype(np.float32)
    targets = np.array([0, 1, 2, 3, 4, 5])
    found = score(parent, candidate, targets)
    for row, (p_logits, q_logits) in enumerate(zip(parent.tolist(), candidate.tolist(), strict=True)):
        p, q = slow_softmax(p_logits), slow_softmax(q_logits)
        ranked = sorted(p, reverse=True)
        assert found["nll_parent"][row] == pytest.approx(-math.log(p[row]))
        assert found["nll"][row] == pytest.approx(-math.log(q[row]))
        assert found["margin"][row] == pytest.approx(ranked[0] - ranked[1])
        assert found["is_same_top"][row] == (p.index(max(p)) == q.index(max(q)))
        assert found["is_top"][row] == (q.index(max(q)) == row)
        assert found["is_top_parent"][row] == (p.index(max(p)) == row)


def test_stepping_in_chunks_scores_every_token_as_whole_rows_do(job: Callable[..., Job], tokenizer: Any) -> None:
    made = job(windows=4)
    comparison = compare(made)
    windows = cut(made.text, tokenizer, made.windows, made.length)
    expected = []
    for number, window in enumerate(windows):
        ids = window.ids
        for t in range(1, len(ids)):
            rows = []
            for last, before in (tables(0), tables(1)):
                rows.append((last[ids[t - 1]] + (before[ids[t - 2]] if t > 1 else 0)).tolist())
            p, q = slow_softmax(rows[0]), slow_softmax(rows[1])
            expected.append((slow_kl(*rows), -math.log(p[ids[t]]), -math.log(q[ids[t]]), t, number))
    found = comparison.tokens[["kl", "nll_parent", "nll", "position", "window"]]
    assert np.array(found.tolist()) == pytest.approx(np.array(expected), rel=1e-6)
    assert max(len(x.ids) for x in windows) > CHUNK + 1


def test_a_program_against_itself_is_exactly_itself(job: Callable[..., Job]) -> None:
    made = job()
    comparison = compare(Job(made.parent, made.parent, made.text, 30, LENGTH, 1, no_progress))
    assert (comparison.tokens["kl"] == 0).all()
    assert comparison.tokens["is_same_top"].all()


def test_documents_are_the_clusters_unless_they_are_few(job: Callable[..., Job], tmp_path: Path) -> None:
    made = job()
    assert compare(made).protocol["clusters"] == "document"
    assert compare(made).num_clusters == 19  # one of the 20 is too short
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(Path(made.text).read_text().splitlines()[:3]))
    comparison = compare(Job(made.candidate, made.parent, str(few), 30, 40, 1, no_progress))
    assert comparison.protocol["clusters"] == "window"
    assert comparison.num_clusters > 2


def test_windows_come_from_every_document_before_any_gives_a_second(text: str, tokenizer: Any) -> None:
    documents = [x.document for x in cut(text, tokenizer, 24, 60)]
    assert documents[:19] == [0, *range(2, 20)]
    assert len(documents) == 24


def test_windows_put_together_are_the_text(text: str, tokenizer: Any) -> None:
    windows = [x for x in cut(text, tokenizer, 1000, 50) if x.document == 0]
    whole = tokenizer(json.loads(Path(text).read_text().splitlines()[0])["text"], add_special_tokens=False)["input_ids"]
    pieces = [x.ids.tolist() for x in windows]
    assert all(x[0] == tokenizer.bos_token_id for x in pieces)
    joined = [token for x in pieces for token in x[1:]]
    assert joined == whole[: len(joined)]
    assert len(whole) - len(joined) < SHORTEST - 1


def test_bytes_are_those_of_the_predicted_text(text: str, tokenizer: Any) -> None:
    first = json.loads(Path(text).read_text().splitlines()[2])["text"]
    window = cut(text, tokenizer, 2, 1000)[1]
    assert window.size_bytes == len(first.encode())


def test_the_protocol_changes_with_the_text_and_the_program(job: Callable[..., Job], tmp_path: Path) -> None:
    made = job()
    base = compare(made).protocol
    other = tmp_path / "other.jsonl"
    other.write_text(Path(made.text).read_text().replace("debug", "break"))
    changed = compare(Job(made.candidate, made.parent, str(other), 30, LENGTH, 1, no_progress)).protocol
    assert changed["data_sha256"] != base["data_sha256"]
    threads = compare(Job(made.candidate, made.parent, made.text, 30, LENGTH, 2, no_progress)).protocol
    assert threads["candidate"]["threads"] == 2
    assert base["bos"] is True


def test_logits_that_are_not_finite_are_a_broken_program(job: Callable[..., Job]) -> None:
    last, before = tables(1)
    last[:, 5] = np.nan
    with pytest.raises(ConformanceError, match=r"fakes.table_runtime: .*not finite \(window 0"):
        compare(job(candidate=(last, before)))


def test_a_parent_far_worse_than_a_guess_is_a_broken_protocol(job: Callable[..., Job]) -> None:
    with pytest.raises(UserError, match=r"broken protocol: the parent's perplexity of .* vocabulary of 307"):
        compare(job(parent=tables(0, scale=8)))


def test_a_candidate_far_worse_than_a_guess_is_only_that(job: Callable[..., Job]) -> None:
    assert compare(job(candidate=tables(1, scale=8))).tokens["nll"].mean() > math.log(VOCAB_SIZE) + 3


def test_another_models_tokenizer_is_refused(job: Callable[..., Job]) -> None:
    last, before = tables(0)
    with pytest.raises(UserError, match=r"tokenizer: makes token \d+, the model has 60"):
        compare(job(parent=(last[:60, :60], before[:60, :60])))


def test_another_vocabulary_is_refused(job: Callable[..., Job]) -> None:
    last, before = tables(0)
    wider = np.pad(last, ((0, 3), (0, 3))), np.pad(before, ((0, 3), (0, 3)))
    with pytest.raises(UserError, match="the candidate has 310 tokens and its parent 307"):
        compare(job(candidate=wider))


def test_a_text_without_windows_is_refused(job: Callable[..., Job], tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("hm")
    made = job()
    with pytest.raises(UserError, match="gives 0 windows"):
        compare(Job(made.candidate, made.parent, str(short), 30, LENGTH, 1, no_progress))


def test_the_artifacts_of_a_job_are_what_its_result_is_remembered_by(job: Callable[..., Job]) -> None:
    made = job()
    calls: list[int] = []

    def progress(label: str, done: int, total: int) -> None:
        calls.append(done)

    first = compare(made)
    again = Job(Artifact(made.candidate.path, "program", "b" * 64), made.parent, made.text, 30, LENGTH, 1, progress)
    assert compare(again) is first
    assert not calls


def test_windows_can_be_whole_ones_only(job: Callable[..., Job]) -> None:
    made = job()
    some, whole = compare(made), compare(dataclasses.replace(made, shortest=LENGTH))
    assert set(np.bincount(whole.tokens["window"])) == {LENGTH - 1}
    assert len(set(np.bincount(some.tokens["window"]))) > 1
