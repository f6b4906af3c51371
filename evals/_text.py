"""Tokens to measure on: windows that each lie in one document, so that intervals can be clustered by document."""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strop.calibration.text import documents
from strop.errors import UserError
from strop.program import Ints

SHORTEST = 8
"""Fewest tokens in a window of text to score; shorter documents and remainders are left out."""


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of one document.

    Attributes:
        ids: (n,) int64, BOS in front where the tokenizer has one.
        document: Index of the document.
        size_bytes: Of the UTF-8 text behind `ids[1:]`, what is predicted. A character that a window cuts in two, or a
            space that the tokenizer swallows, makes it wrong by that character.
    """

    ids: Ints
    document: int
    size_bytes: int


def cut(source: str, tokenizer: Any, count: int, length: int, shortest: int = SHORTEST) -> list[Window]:
    """Windows of a text's measuring half: the first of every document, then the second of every document, and so on.

    Args:
        source: Text source, as in `calibration.text.documents`.
        tokenizer: Of transformers.
        count: Most windows.
        length: Most tokens in one, BOS included. The last window of a document is shorter.
        shortest: Fewest tokens in one, BOS included; what is shorter is left out.

    Raises:
        UserError: The text gives less than two windows.
    """
    waiting = deque(
        (index, _pieces(text, tokenizer, length, shortest)) for index, text in enumerate(documents(source, "measure"))
    )
    found: list[Window] = []
    while waiting and len(found) < count:
        document, pieces = waiting.popleft()
        if ids := next(pieces, None):
            text = tokenizer.decode(ids[1:], clean_up_tokenization_spaces=False)
            found.append(Window(np.array(ids, dtype=np.int64), document, len(text.encode())))
            waiting.append((document, pieces))
    if len(found) < 2:
        raise UserError(f"text: {source} gives {len(found)} windows of {shortest} tokens or more, measuring needs 2")
    return found


def digest(windows: Sequence[Window]) -> str:
    """sha256 of the tokens and of where windows begin, hex."""
    content = hashlib.sha256()
    for window in windows:
        content.update(len(window.ids).to_bytes(8, "little") + window.ids.astype("<i8").tobytes())
    return content.hexdigest()


def _pieces(text: str, tokenizer: Any, length: int, shortest: int) -> Iterator[list[int]]:
    """Tokenizes only when asked for the first piece: most documents of a large source are never reached."""
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    # `verbose` off: transformers warns of text beyond the model's context, which is cut into windows here
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    for first in itertools.count(0, length - len(start)):
        piece = start + ids[first : first + length - len(start)]
        if len(piece) < shortest:
            return
        yield piece
