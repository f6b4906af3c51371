"""Windows of packed text, and windows that a (fake) model writes itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from strop.calibration import tokens
from strop.calibration.tokens import CalibrationSpec, calibration_tokens, self_generated, windows
from strop.errors import UserError
from strop.program import Cache, Forward, Program, Step, Traits

BOS, EOS, VOCABULARY = 1, 2, 64


class Characters:
    """A tokenizer with one id per character: letters from 10 on, `<` starts and `>` ends a turn."""

    bos_token_id: int | None = BOS
    eos_token_id = EOS
    chat_template: str | None = None

    def __len__(self) -> int:
        return VOCABULARY

    def __call__(self, text: str, add_special_tokens: bool = True, **_: object) -> dict[str, list[int]]:
        assert not add_special_tokens
        special = {"<": BOS, ">": EOS, "\n": 5, "?": 6, "!": 7}
        return {"input_ids": [special.get(x, 10 + ord(x.lower()) % 26) for x in text]}

    def apply_chat_template(self, chat: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert add_generation_prompt
        return "<?" + chat[0]["content"] + "><!"


class Chain(Program):
    """A model whose next token depends on the last token and on how many tokens the row holds.

    Keeps the row's tokens in its cache, so that a wrong `truncate` is noticed.
    """

    def __init__(self, table: NDArray[np.float32]) -> None:
        self.table = table
        self.traits = Traits("fake", "float32", 1, "cpu", context=64, vocab_size=VOCABULARY, takes_trees=False)
        self.seen: list[tuple[list[int], int]] = []

    def allocate(self, batch: int, max_tokens: int) -> Cache:
        return [np.zeros((batch, 1, max_tokens, 1), dtype=np.int64)]

    def bind(self, cache: Cache) -> Forward:
        def forward(step: Step) -> NDArray[np.float32]:
            for row, ids in enumerate(step.ids):
                start = int(step.lengths[row])
                cache[0][row, 0, start : start + len(ids), 0] = ids
                self.seen.append((cache[0][row, 0, : start + len(ids), 0].tolist(), row))
            return self.table[step.ids[:, -1]][:, None]

        return forward


def even_chain(eos_probability: float = 0.1) -> Chain:
    """Letters with equal probability, EOS now and then, nothing else."""
    table = np.full((VOCABULARY, VOCABULARY), -np.inf, dtype=np.float32)
    table[:, 10:36] = np.log((1 - eos_probability) / 26)
    table[:, EOS] = np.log(eos_probability)
    return Chain(table)


@pytest.fixture
def tokenizer() -> Any:
    return Characters()


def ids_of(text: str) -> list[int]:
    return Characters()(text, add_special_tokens=False)["input_ids"]


def test_windows_start_with_bos_and_hold_the_text_in_order(tokenizer: Any) -> None:
    texts = ["abcdefghij" * 3, "klmnopqrst" * 2 + "\n"]
    found = windows(texts, tokenizer, samples=3, length=8, seed=0)
    assert found.shape == (3, 8)
    assert found.dtype == np.int64
    assert (found[:, 0] == BOS).all()
    packed = {tuple(ids_of(a + "\n\n" + b)) for a, b in (texts, texts[::-1])} | {tuple(ids_of(texts[1] + texts[0]))}
    for row in found[:, 1:].tolist():
        assert any(tuple(row) == x[i : i + 7] for x in packed for i in range(0, len(x), 7))
    assert len({tuple(x) for x in found.tolist()}) == 3


def test_windows_without_a_bos_token_are_text_only(tokenizer: Any) -> None:
    tokenizer.bos_token_id = None
    found = windows(["abcdefgh"], tokenizer, samples=2, length=4, seed=0)
    assert sorted(found.tolist()) == sorted([ids_of("abcd"), ids_of("efgh")])


def test_the_seed_decides_the_windows(tokenizer: Any) -> None:
    texts = ["".join(chr(97 + (i * j) % 26) for i in range(60)) for j in range(1, 12)]
    first, again, other = (windows(texts, tokenizer, 5, 8, seed) for seed in (3, 3, 4))
    assert (first == again).all()
    assert (first != other).any()


def test_fewer_tokens_than_asked_are_said(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = windows(["abcdefghijklm\n"], tokenizer, samples=8, length=8, seed=0)
    assert len(found) == 2
    assert "8 windows of 8 tokens asked for, the text gives 2" in caplog.text


def test_less_than_one_window_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="5 tokens, less than one window of 8"):
        windows(["abc"], tokenizer, samples=8, length=8, seed=0)


def test_a_huge_document_is_cut_with_a_notice(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []
    original = tokenizer.__call__

    class Counting(Characters):
        def __call__(self, text: str, **rest: Any) -> dict[str, list[int]]:
            asked.append(len(text))
            return original(text, **rest)

    with caplog.at_level(logging.WARNING):
        found = windows(["a" * 100_000], Counting(), samples=2, length=16, seed=0)
    assert found.shape == (2, 16)
    assert sum(asked) < 2000
    assert "a document of 100000 characters is cut" in caplog.text


def test_self_generated_rows_start_afresh_after_eos(tokenizer: Any) -> None:
    program = even_chain()
    found = self_generated(program, tokenizer, CalibrationSpec(samples=5, length=40, seed=1))
    assert found.shape == (5, 40)
    assert (found[:, 0] == BOS).all()
    ends = np.argwhere(found[:, :-1] == EOS)
    assert len(ends) > 5
    assert (found[ends[:, 0], ends[:, 1] + 1] == BOS).all()
    # What the model saw: a fresh text never holds an EOS, and begins with BOS.
    assert all(x[0] == BOS and EOS not in x and BOS not in x[1:] for x, _ in program.seen)


def test_self_generated_tokens_follow_the_models_distribution(tokenizer: Any) -> None:
    table = np.full((VOCABULARY, VOCABULARY), -np.inf, dtype=np.float32)
    table[:, [20, 21, 22]] = np.log(np.array([0.6, 0.3, 0.1], dtype=np.float32))
    found = self_generated(Chain(table), tokenizer, CalibrationSpec(samples=64, length=64, seed=0))
    drawn = found[:, 1:]
    shares = np.array([(drawn == x).mean() for x in (20, 21, 22)])
    assert shares.sum() == 1.0
    assert np.abs(shares - [0.6, 0.3, 0.1]).max() < 4 * np.sqrt(0.25 / drawn.size)


def test_self_generated_chats_have_a_template_around_both_turns(tokenizer: Any) -> None:
    tokenizer.chat_template = "yes"
    program = even_chain()
    found = self_generated(program, tokenizer, CalibrationSpec(samples=6, length=50, seed=2))
    user, model = ids_of("<?"), ids_of("><!")
    for row in found.tolist():
        assert row[:2] == user
        turn = 0
        for i, token in enumerate(row[: -len(model)]):
            if token == EOS:
                wanted = model if turn % 2 == 0 else [EOS, *user]
                assert row[i : i + len(wanted)] == wanted
                turn += 1
        assert turn > 1
    assert all(x[:2] == user[: len(x)] and x.count(BOS) <= 2 for x, _ in program.seen)


def test_self_generation_without_bos_draws_first_tokens(tokenizer: Any) -> None:
    tokenizer.bos_token_id = None
    found = self_generated(even_chain(1e-9), tokenizer, CalibrationSpec(samples=20, length=8, seed=0))
    assert len(set(found[:, 0].tolist())) > 5


def test_batches_do_not_change_what_is_drawn(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = CalibrationSpec(samples=7, length=30, seed=5)
    together = self_generated(even_chain(), tokenizer, spec)
    monkeypatch.setattr(tokens, "MOST_ROWS", 2)
    assert (self_generated(even_chain(), tokenizer, spec) == together).all()


def test_a_killed_generation_goes_on_with_the_next_batch(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "MOST_ROWS", 2)
    spec = CalibrationSpec(samples=6, length=20, seed=5)
    expected = self_generated(even_chain(), tokenizer, spec)

    def stop_at(label: str, done: int, total: int) -> None:
        if done * 2 > total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        self_generated(even_chain(), tokenizer, spec, scratch=tmp_path, progress=stop_at)
    program = even_chain()
    assert (self_generated(program, tokenizer, spec, scratch=tmp_path) == expected).all()
    assert len(program.seen) <= 2 * spec.length


def test_a_context_shorter_than_a_window_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="context of 64"):
        self_generated(even_chain(), tokenizer, CalibrationSpec(samples=1, length=65))


def test_only_self_opens_the_model(tokenizer: Any, tmp_path: Path) -> None:
    opened: list[Program] = []

    def opener() -> Program:
        opened.append(even_chain())
        return opened[-1]

    open_program: Callable[[], Program] = opener
    text = tmp_path / "text.txt"
    text.write_text("abc " * 100, encoding="utf-8")
    spec = CalibrationSpec(source=str(text), samples=2, length=8)
    assert calibration_tokens(spec, tokenizer, open_program, scratch=tmp_path).shape == (2, 8)
    assert not opened
    assert calibration_tokens(
        CalibrationSpec(samples=2, length=8), tokenizer, open_program, scratch=tmp_path
    ).shape == (2, 8)
    assert len(opened) == 1


@pytest.mark.parametrize("fields", [{"samples": 0}, {"length": 1}, {"seed": -1}, {"source": ""}, {"lenght": 512}])
def test_unknown_values_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CalibrationSpec.model_validate(fields)
