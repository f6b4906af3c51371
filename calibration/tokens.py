"""Token batches to calibrate on, cut from text or written by the model itself. Leaves out text sources (text.py)."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from strop.calibration.text import documents
from strop.errors import UserError
from strop.program import Ints, Program, Session
from strop.stage import Progress, no_progress

log = logging.getLogger(__name__)

CHOICE = 4
"""Text is tokenized until there are this many times the windows asked for; then the seed chooses among them."""
CHARACTERS_PER_TOKEN = 8
"""More than any tokenizer's average: text past this many characters per token cannot be needed."""
CACHE_BYTES = 400 * 2**20
"""Keys and values of the rows that generate together."""
MOST_ROWS = 32
TURN = "strop-turn"
"""Stands for the user's text while a chat template is taken apart."""


class CalibrationSpec(BaseModel):
    """The token batches that stages calibrate on.

    Attributes:
        source: `self` (the model's own generations), `python`, a `.txt` or `.jsonl` file, or `hub:NAME[:CONFIG]`.
        samples: Windows of tokens.
        length: Tokens of a window.
        seed: Chooses windows, or draws the generated tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    source: str = Field(default="self", min_length=1)
    samples: int = Field(default=128, gt=0)
    length: int = Field(default=512, gt=1)
    seed: int = Field(default=0, ge=0)


def calibration_tokens(
    calibration: CalibrationSpec,
    tokenizer: Any,
    open_program: Callable[[], Program],
    *,
    scratch: Path,
    progress: Progress = no_progress,
) -> Ints:
    """The token batches of a recipe.

    Args:
        calibration: What is asked for.
        tokenizer: Of the model.
        open_program: Opens the model where it has to generate.
        scratch: A folder that survives a kill.
        progress: Told of generated tokens.

    Returns:
        (samples, length) int64; fewer samples, with a warning logged, where the text gives no more.

    Raises:
        UserError: No text, or less than one window of it.
    """
    c = calibration
    if c.source == "self":
        return self_generated(open_program(), tokenizer, c, scratch=scratch, progress=progress)
    return windows(documents(c.source, "calibration"), tokenizer, c.samples, c.length, c.seed)


def windows(documents: Sequence[str], tokenizer: Any, samples: int, length: int, seed: int) -> Ints:
    """Windows of packed text: documents in random order, one after the other, cut every `length` tokens.

    Args:
        documents: Texts.
        tokenizer: A transformers tokenizer. Where it has a BOS token, each window starts with it.
        samples: Windows wanted.
        length: Tokens of a window, BOS included.
        seed: Order of the documents, choice of the windows.

    Returns:
        (samples, length) int64, or fewer rows where there is less text; then a warning is logged.

    Raises:
        UserError: Less text than one window.
    """
    generator = np.random.default_rng(seed)
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    step = length - len(start)
    wanted = CHOICE * samples * step
    longest = wanted * CHARACTERS_PER_TOKEN
    packed: list[int] = []
    for index in generator.permutation(len(documents)):
        text = documents[index]
        if len(text) > longest:
            log.warning("calibration: a document of %d characters is cut to %d", len(text), longest)
            text = text[:longest]
        text += "" if text.endswith("\n") else "\n\n"
        # `verbose` off: transformers warns of text beyond the model's context, which is cut into windows here.
        packed += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(packed) >= wanted:
            break
    available = len(packed) // step
    if available == 0:
        raise UserError(f"calibration: the text has {len(packed)} tokens, less than one window of {length}")
    if available < samples:
        log.warning("calibration: %d windows of %d tokens asked for, the text gives %d", samples, length, available)
    chosen = generator.permutation(available)[:samples]
    cut = np.array(packed[: available * step], dtype=np.int64).reshape(available, step)[chosen]
    return np.hstack([np.broadcast_to(np.array(start, dtype=np.int64), (len(cut), len(start))), cut])


def self_generated(
    program: Program,
    tokenizer: Any,
    calibration: CalibrationSpec,
    *,
    scratch: Path | None = None,
    progress: Progress = no_progress,
) -> Ints:
    """Windows that the model writes itself, drawn at temperature 1 (LLM-QAT, Liu et al. 2023, arXiv 2305.17888).

    With a chat template a row is a conversation: the model first writes the user's turn (Magpie, Xu et al. 2024,
    arXiv 2406.08464), then its answer, then the row starts afresh. Without one a row starts from BOS (where there is
    none, from a random token) and starts afresh after EOS. Fresh text does not see what the row held before.

    Args:
        program: The model.
        tokenizer: Of the model.
        calibration: Samples, length, seed.
        scratch: Where finished batches are kept, so that a killed run goes on; None: nowhere.
        progress: Told of tokens.

    Returns:
        (samples, length) int64. Which rows generate together does not change what is drawn for a row.

    Raises:
        UserError: The model's context is shorter than `length`.
    """
    c = calibration
    turns = _chat_turns(tokenizer)
    batch = _batch_size(program, c.length)
    found: list[Ints] = []
    for first in range(0, c.samples, batch):
        progress("self-generated tokens", first * c.length, c.samples * c.length)
        kept = scratch / f"rows-{first}.npy" if scratch else None
        if kept and kept.exists():
            found.append(np.load(kept))
            continue
        rows = [
            _Row(np.random.default_rng([c.seed, i]), tokenizer, turns, program.traits.vocab_size)
            for i in range(first, min(first + batch, c.samples))
        ]
        _fill(program.open(len(rows), c.length), rows, c.length)
        found.append(np.array([row.tokens[: c.length] for row in rows], dtype=np.int64))
        if kept:
            aside = kept.with_suffix(".tmp.npy")
            np.save(aside, found[-1])
            aside.replace(kept)
    return np.concatenate(found)


@dataclass
class _Row:
    """One row of generation.

    Attributes:
        generator: Of this row alone.
        turns: Token ids before the user's text and between it and the answer; None: no chat.
        tokens: Everything so far.
        pending: Ids to feed next.
        is_fresh: `pending` begins a text: the cache has to forget what it holds.
        is_answer: In a chat, the model's own turn.
    """

    generator: np.random.Generator
    tokenizer: Any
    turns: tuple[list[int], list[int]] | None
    vocab_size: int
    tokens: list[int] = field(default_factory=list)
    pending: deque[int] = field(default_factory=deque)
    is_fresh: bool = False
    is_answer: bool = False

    def start(self) -> None:
        """Begin a new text."""
        if self.turns is not None:
            first = self.turns[0]
        elif self.tokenizer.bos_token_id is not None:
            first = [self.tokenizer.bos_token_id]
        else:
            first = [int(self.generator.integers(len(self.tokenizer)))]
        self.feed(first)
        self.is_fresh, self.is_answer = True, False

    def feed(self, ids: Sequence[int]) -> None:
        self.tokens += ids
        self.pending.extend(ids)

    def draw(self, logits: NDArray[np.float32]) -> None:
        """Choose the next token from logits (vocab_size,)."""
        weights = np.exp(logits.astype(np.float64) - logits.max())
        total = np.cumsum(weights)
        token = int(np.searchsorted(total, self.generator.random() * total[-1], side="right"))
        if token != self.tokenizer.eos_token_id:
            self.feed([token])
        elif self.turns is not None and not self.is_answer:
            self.feed(self.turns[1])
            self.is_answer = True
        else:
            self.tokens.append(token)
            self.start()


def _fill(session: Session, rows: Sequence[_Row], length: int) -> None:
    """Generate until every row has `length` tokens."""
    for row in rows:
        row.start()
    while any(len(row.tokens) < length for row in rows):
        kept = np.where([row.is_fresh for row in rows], 0, session.lengths)
        if (kept != session.lengths).any():
            session.truncate(kept)
        # Rows bring from one id (the token just drawn) to a whole prompt; a step is as wide as the shortest allows.
        width = min(len(row.pending) for row in rows)
        ids = np.array([[row.pending.popleft() for _ in range(width)] for row in rows], dtype=np.int64)
        logits = session.step(ids)
        for index, row in enumerate(rows):
            row.is_fresh = False
            if not row.pending:
                row.draw(logits[index, 0])


def _batch_size(program: Program, length: int) -> int:
    """Rows whose keys and values fit into `CACHE_BYTES`."""
    bytes_per_token = sum(int(array.nbytes) for array in program.allocate(1, 1))
    return max(1, min(MOST_ROWS, CACHE_BYTES // (length * bytes_per_token)))


def _chat_turns(tokenizer: Any) -> tuple[list[int], list[int]] | None:
    """Token ids of a chat template before the user's text, and between it and the answer; None: no usable template."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        return None
    chat = [{"role": "user", "content": TURN}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        log.warning("calibration: the chat template takes no single user turn (%s), starting without it", error)
        return None
    before, _, after = text.partition(TURN)
    if not before or not after or TURN in after:
        log.warning("calibration: the chat template does not show where a turn begins and ends, starting without it")
        return None
    first, middle = (tokenizer(x, add_special_tokens=False)["input_ids"] for x in (before, after))
    return first, middle
