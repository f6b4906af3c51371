"""Documents of text to calibrate on or to measure on. Leaves out tokens (tokens.py).

Sources: `python` (the language reference that ships with Python), a `.txt` or `.jsonl` file, `hub:NAME[:CONFIG]`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from strop.errors import MissingExtra, UserError

Split = Literal["calibration", "measure"]

SHINGLE_WORDS = 32
"""Two texts overlap where they share this many words in a row. WikiText-2's valid and test parts share none."""
DOCUMENT_CHARACTERS = 4000
"""Plain text without headings: paragraphs are gathered into documents of at least this length."""
HUB_CHARACTERS = 16 * 2**20
"""Text taken from the front of a hub data set: calibration needs a few million characters at most."""
TEXT_FIELDS = ("text", "prompt")
HEADING = re.compile(r"^ ?= [^=].*? = *$", re.MULTILINE)  # ` = Title = ` in WikiText; ` = = Section = = ` is not one


def documents(source: str, split: Split) -> list[str]:
    """The documents of a text source, in a fixed order.

    Args:
        source: `python`, a path that ends in `.txt` or `.jsonl`, or `hub:NAME[:CONFIG]`.
        split: `python` and `hub:` keep the texts for the two purposes apart. A file is one text for whoever names it:
            `overlap` finds out if both do.

    Returns:
        Non-empty documents.

    Raises:
        UserError: No such source, or no text in it.
        MissingExtra: `hub:` without the `datasets` library.
    """
    if source == "python":
        found: Iterable[str] = _python_topics(split)
    elif source.startswith("hub:"):
        found = _hub_documents(source, split)
    elif source.endswith(".txt"):
        found = _split_text(_read(source))
    elif source.endswith(".jsonl"):
        found = _json_lines(source, _read(source))
    else:
        raise UserError(f"text source {source!r}: allowed are python, a .txt or .jsonl file, hub:NAME[:CONFIG]")
    result = [x for x in found if x.strip()]
    if not result:
        raise UserError(f"text source {source!r}: holds no text")
    return result


def overlap(a: Iterable[str], b: Iterable[str]) -> str | None:
    """What two texts have in common: any run of `SHINGLE_WORDS` words (a shorter document counts as a whole).

    Returns:
        A description for an error line, None where nothing is shared.
    """
    seen = {hash(x) for document in a for x in _shingles(document)}
    shared = [x for document in b for x in _shingles(document) if hash(x) in seen]
    if not shared:
        return None
    return f"{len(shared)} passages of {SHINGLE_WORDS} words, the first begins {' '.join(shared[0])[:60]!r}"


def _shingles(document: str) -> Iterator[tuple[str, ...]]:
    words = document.split()
    for start in range(max(1, len(words) - SHINGLE_WORDS + 1)):
        yield tuple(words[start : start + SHINGLE_WORDS])


def _python_topics(split: Split) -> Iterator[str]:
    """The topics of Python's reference, each in one split by a hash of its name.

    Many topics repeat a part of a longer one: those are left out, so that the splits share nothing.
    """
    from pydoc_data.topics import topics

    seen: set[tuple[str, ...]] = set()
    kept: set[str] = set()
    for name in sorted(topics, key=lambda x: (-len(topics[x]), x)):
        shingles = set(_shingles(topics[name]))
        if seen.isdisjoint(shingles):
            seen |= shingles
            kept.add(name)
    for name in sorted(kept):
        is_calibration = hashlib.sha256(name.encode()).digest()[0] % 2 == 0
        if is_calibration == (split == "calibration"):
            yield topics[name]


def _split_text(text: str) -> Iterator[str]:
    """Documents at WikiText's first-level headings; where there are none, paragraphs gathered by length."""
    starts = [x.start() for x in HEADING.finditer(text)]
    if starts:
        bounds = [0, *starts, len(text)]
        yield from (text[a:b] for a, b in itertools.pairwise(bounds))
        return
    gathered = ""
    for paragraph in re.split(r"\n\s*\n", text):
        gathered += ("\n\n" if gathered else "") + paragraph
        if len(gathered) >= DOCUMENT_CHARACTERS:
            yield gathered
            gathered = ""
    yield gathered


def _json_lines(source: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{source}, line {number}: not JSON ({error.msg})") from error
        yield _text_field(record, f"{source}, line {number}")


def _hub_documents(source: str, split: Split) -> Iterator[str]:
    """The front of a data set's `train` split (calibration) or of its `test`, else `validation` split (measure)."""
    try:
        import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore] # optional, ships no types
    except ModuleNotFoundError as error:
        raise MissingExtra("datasets", "eval", f"text source {source!r}") from error
    name, _, config = source.removeprefix("hub:").partition(":")
    try:
        available = datasets.get_dataset_split_names(name, config or None)
        wanted = ("train",) if split == "calibration" else ("test", "validation")
        chosen = next((x for x in wanted if x in available), None)
        if chosen is None:
            raise UserError(f"text source {source!r}: has the splits {available}, none of {list(wanted)} to {split} on")
        records = datasets.load_dataset(name, config or None, split=chosen, streaming=True)
    except (OSError, ValueError) as error:
        raise UserError(f"text source {source!r}: cannot be opened ({str(error).splitlines()[0]})") from error
    taken = 0
    for record in records:
        document = _text_field(record, source)
        yield document
        taken += len(document)
        if taken >= HUB_CHARACTERS:
            return


def _text_field(record: object, place: str) -> str:
    found = [x for x in TEXT_FIELDS if isinstance(record, dict) and x in record]
    if not found:
        has = f"fields {sorted(record)}" if isinstance(record, dict) else type(record).__name__
        raise UserError(f"{place}: has {has}, a record needs a field {' or '.join(TEXT_FIELDS)}")
    assert isinstance(record, dict)
    value = record[found[0]]
    if not isinstance(value, str):
        raise UserError(f"{place}: field {found[0]} holds {type(value).__name__}, a text is needed")
    return value


def _read(source: str) -> str:
    try:
        return Path(source).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"text source {source!r}: no such file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"text source {source!r}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise UserError(f"text source {source!r}: cannot be read ({error.strerror})") from error
