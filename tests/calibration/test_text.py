"""Documents from every kind of source, and texts that have something in common."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strop.calibration.text import DOCUMENT_CHARACTERS, SHINGLE_WORDS, documents, overlap
from strop.errors import MissingExtra, UserError

WORDS = [f"word{i}" for i in range(200)]


def test_python_splits_are_even_and_share_nothing() -> None:
    ours, theirs = documents("python", "calibration"), documents("python", "measure")
    assert overlap(ours, theirs) is None
    shares = [sum(map(len, x)) for x in (ours, theirs)]
    assert max(shares) < 2 * min(shares)
    assert documents("python", "calibration") == ours


def test_wikitext_headings_start_documents(tmp_path: Path) -> None:
    path = tmp_path / "wiki.txt"
    path.write_text(" \n = One = \n\n text = 1 \n = = Part = = \n more \n = Two = Three = \n end \n", encoding="utf-8")
    found = documents(str(path), "measure")
    assert [x.split("\n")[0].strip() for x in found] == ["= One =", "= Two = Three ="]
    assert "= = Part = =" in found[0]


def test_plain_text_keeps_every_word_in_documents_of_bounded_length(tmp_path: Path) -> None:
    path = tmp_path / "plain.txt"
    paragraphs = [" ".join(WORDS[i : i + 20]) for i in range(180)]
    path.write_text("\n\n".join(paragraphs), encoding="utf-8")
    found = documents(str(path), "calibration")
    assert " ".join(found).split() == " ".join(paragraphs).split()
    assert all(DOCUMENT_CHARACTERS <= len(x) < 2 * DOCUMENT_CHARACTERS for x in found[:-1])
    assert len(found) > 1


def test_json_lines_take_text_or_prompt(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "one"}\n\n{"prompt": "two", "id": 3}\n{"text": " "}\n', encoding="utf-8")
    assert documents(str(path), "calibration") == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b" \n\n \n", "holds no text"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("a.jsonl", b'{"text": 3}', "line 1: field text holds int"),
        ("a.jsonl", b'{"text": "x"}\n{"question": "y"}', r"line 2: has fields \['question'\].*text or prompt"),
        ("a.jsonl", b'["x"]', "line 1: has list"),
        ("a.jsonl", b"{", "line 1: not JSON"),
        ("a.csv", b"x", "allowed are python"),
    ],
)
def test_unusable_files_are_refused_in_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        documents(str(path), "calibration")
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()
    for path in (tmp_path / "absent.txt", tmp_path / "folder.txt"):
        with pytest.raises(UserError, match=path.name):
            documents(str(path), "calibration")


def test_hub_without_datasets_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"pip install 'strop\[eval\]'"):
        documents("hub:some/set", "calibration")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for `datasets` that records what was asked for; its sets have a `train` and a `validation` split."""
    asked: list[Any] = []

    def load_dataset(name: str, config: str | None, split: str, streaming: bool) -> Iterator[dict[str, str]]:
        asked.append((name, config, split, streaming))
        return iter([{"text": split}, {"text": ""}])

    module = types.ModuleType("datasets")
    module.get_dataset_split_names = lambda *_: ["train", "validation"]  # type: ignore[attr-defined] # made here
    module.load_dataset = load_dataset  # type: ignore[attr-defined] # made here
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_hub_sets_are_streamed_from_the_split_of_the_purpose(hub: list[Any]) -> None:
    assert documents("hub:owner/set:config", "calibration") == ["train"]
    assert documents("hub:owner/set", "measure") == ["validation"]
    assert hub == [("owner/set", "config", "train", True), ("owner/set", None, "validation", True)]


@pytest.mark.parametrize(("shared", "is_found"), [(SHINGLE_WORDS - 1, False), (SHINGLE_WORDS, True), (120, True)])
def test_overlap_finds_runs_of_words_whatever_the_spacing(shared: int, is_found: bool) -> None:
    ours = ["unrelated", " ".join(WORDS)]
    theirs = ["before " + "\n  ".join(WORDS[50 : 50 + shared]) + " after"]
    found = overlap(ours, theirs)
    assert (found is not None) == is_found
    assert (overlap(theirs, ours) is not None) == is_found
    assert found is None or "word50" in found


def test_overlap_compares_short_documents_as_a_whole() -> None:
    assert overlap(["What is 2 + 2?"], ["other", "What is  2 + 2?"]) is not None
    assert overlap(["What is 2 + 2?"], ["What is 2 + 3?"]) is None
