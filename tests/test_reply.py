"""Text streamed from a program equals the text of its tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from references import tiny_folder, tiny_tokenizer

from strop import recipe, runner
from strop.artifact import open_artifact
from strop.errors import UserError
from strop.program import open_program
from strop.reply import Reply, pieces, stop_ids
from strop.store import Store


@pytest.mark.parametrize("text", ["plain words", "naïve — 漢字 🙂 end", "🙂", "", " leading and trailing "])
def test_pieces_add_up_to_the_text(text: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = list(pieces(tokenizer, ids))
    assert "".join(found) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in x for x in found)


def test_an_unfinished_character_at_the_end_is_not_lost() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("a🙂", add_special_tokens=False)["input_ids"]
    assert "".join(pieces(tokenizer, ids[:-1])).startswith("a\N{REPLACEMENT CHARACTER}")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("reply")
    text = {"version": 1, "model": {"source": str(tiny_folder(place / "tiny"))}, "export": [{"use": "eager"}]}
    store = Store(place / "store")
    return store.path(runner.run(recipe.parse(text, "tiny"), store, place / "out").rows[0].key)


def test_a_reply_is_what_greedy_decoding_gives(program: Path) -> None:
    reply = Reply(program, threads=1)
    reply.stop_ids = frozenset()
    shown = "".join(reply.stream("assert", is_raw=True, max_new_tokens=6))
    session = open_program(open_artifact(program), 1).open()
    import numpy as np

    ids = reply.tokenizer("assert")["input_ids"]
    for _ in range(6):
        context = np.array([ids])
        session.truncate([0])
        ids.append(int(session.step(context)[0, 0].argmax()))
    assert shown == reply.tokenizer.decode(ids[-6:], skip_special_tokens=True)
    assert reply.num_tokens == 6
    assert reply.ttft_s is not None
    assert "TTFT" in reply.summary()


def test_the_chat_template_is_applied_unless_raw(program: Path) -> None:
    reply = Reply(program, threads=1)
    chat, raw = (reply.tokenizer.decode(reply.encode("hello", is_raw)) for is_raw in (False, True))
    assert chat == "<s>user\nhello</s>\n"
    assert raw.endswith("hello")
    assert "user" not in raw


def test_a_prompt_longer_than_the_context_is_one_line(program: Path) -> None:
    with pytest.raises(UserError, match=r"prompt: \d+ tokens, this program's context holds 128"):
        list(Reply(program, threads=1).stream("word " * 200))


def test_an_empty_prompt_is_one_line(program: Path) -> None:
    with pytest.raises(UserError, match="holds no tokens"):
        list(Reply(program, threads=1).stream("", is_raw=True))


def test_a_reply_stops_at_the_context_and_at_stop_tokens(program: Path) -> None:
    reply = Reply(program, threads=1)
    reply.stop_ids = frozenset()
    list(reply.stream("assert", max_new_tokens=1000))
    assert reply.num_tokens == 128 - len(reply.encode("assert"))


def test_only_a_program_replies(tmp_path: Path, program: Path) -> None:
    with pytest.raises(UserError, match="not a strop artifact"):
        Reply(tmp_path)
    checkpoint = next(x for x in program.parent.iterdir() if x != program)
    with pytest.raises(UserError, match="holds a checkpoint, only a program"):
        Reply(checkpoint)


def test_stop_tokens_come_from_the_generation_config_too(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    assert stop_ids(tmp_path, tiny_tokenizer()) == {1, 7}
