"""Text from a program: a prompt in, pieces of text out as they are generated, with their times.

Leaves out how tokens are chosen (decoding/).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from strop.artifact import Artifact, open_artifact
from strop.decoding.plain import Sampler, generate
from strop.errors import UserError
from strop.model import load_tokenizer
from strop.program import open_program

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Ends the text of tokens that stop in the middle of a character."""


class Reply:
    """A loaded program that answers prompts.

    Attributes:
        load_s: What loading took.
        ttft_s: Of the last answer, until its first token; None before.
        tpot_s: Of the last answer, mean time of each later token; None where it had only one.
        num_tokens: Of the last answer.
    """

    def __init__(self, folder: Path, threads: int | None = None) -> None:
        """Load a program.

        Raises:
            UserError: The folder holds no program.
        """
        artifact: Artifact = open_artifact(folder)
        if artifact.format != "program":
            raise UserError(f"{folder}: holds a {artifact.format}, only a program can generate; export it first")
        began = time.perf_counter()
        self.tokenizer: Any = load_tokenizer(folder)
        self.program = open_program(artifact, threads)
        self.load_s = time.perf_counter() - began
        self.stop_ids = stop_ids(folder, self.tokenizer)
        self.ttft_s: float | None = None
        self.tpot_s: float | None = None
        self.num_tokens = 0

    def stream(
        self, prompt: str, *, is_raw: bool = False, max_new_tokens: int = 128, sampler: Sampler | None = None
    ) -> Iterator[str]:
        """The answer to a prompt, piece by piece.

        Args:
            prompt: What the user says.
            is_raw: Continue the text as it is, instead of putting it into the model's chat template.
            max_new_tokens: Most tokens of the answer.
            sampler: How tokens are chosen; None: greedily.

        Raises:
            UserError: No tokens, or more than the program's context holds.
        """
        ids = self.encode(prompt, is_raw)
        context = self.program.traits.context
        if not ids:
            raise UserError("prompt: holds no tokens")
        if len(ids) >= context:
            raise UserError(f"prompt: {len(ids)} tokens, this program's context holds {context} with the answer")
        session = self.program.open(max_tokens=min(context, len(ids) + max_new_tokens))
        tokens = generate(
            session, ids, max_new_tokens=min(max_new_tokens, context - len(ids)), sampler=sampler or Sampler(),
            stop_ids=self.stop_ids,
        )  # fmt: skip
        yield from pieces(self.tokenizer, self._timed(tokens))

    def encode(self, prompt: str, is_raw: bool = False) -> list[int]:
        """Token ids of a prompt, in the chat template where the model has one."""
        if is_raw or not self.tokenizer.chat_template:
            return list(self.tokenizer(prompt)["input_ids"])
        messages = [{"role": "user", "content": prompt}]
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def summary(self) -> str:
        """One line about the last answer."""
        if self.ttft_s is None:
            return "no token was generated"
        tpot = "" if self.tpot_s is None else f", TPOT {self.tpot_s * 1e3:.1f} ms ({1 / self.tpot_s:.1f} tokens/s)"
        return f"loaded in {self.load_s:.1f} s, {self.num_tokens} tokens, TTFT {self.ttft_s * 1e3:.0f} ms{tpot}"

    def _timed(self, tokens: Iterable[int]) -> Iterator[int]:
        began = first = time.perf_counter()
        self.ttft_s = self.tpot_s = None
        self.num_tokens = 0
        for token in tokens:
            self.num_tokens += 1
            if self.num_tokens == 1:
                first = time.perf_counter()
                self.ttft_s = first - began
            else:
                self.tpot_s = (time.perf_counter() - first) / (self.num_tokens - 1)
            yield token


def pieces(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """Text of tokens as they come: a character that takes several tokens appears once it is whole."""
    waiting: list[int] = []
    shown = ""
    for token in tokens:
        waiting.append(token)
        text = tokenizer.decode(waiting, skip_special_tokens=True)
        if text.endswith(UNFINISHED):
            continue
        yield text[len(shown) :]
        # Some tokenizers drop the space before a first word: one shown token stays in front, so it is not the first.
        waiting = [token]
        shown = tokenizer.decode(waiting, skip_special_tokens=True)
    rest = tokenizer.decode(waiting, skip_special_tokens=True)[len(shown) :]
    if rest:
        yield rest


def stop_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: the tokenizer's own and those of generation_config.json."""
    found = {tokenizer.eos_token_id}
    path = folder / "generation_config.json"
    if path.is_file():
        listed = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        found |= set(listed if isinstance(listed, list) else [listed])
    return frozenset(x for x in found if isinstance(x, int))
