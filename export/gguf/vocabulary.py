"""A checkpoint's tokenizer in llama.cpp's terms: tokens, their kinds, merges or scores, special ids, chat template.

llama.cpp has two kinds of byte pair encoding. Its `gpt2` works on bytes spelled as letters, cut beforehand by a rule
that it knows by name; its `llama` on characters, spaces spelled `▁`, bytes as a last resort (SentencePiece). Leaves out
other models (Unigram, WordPiece) and the normalizers in front, which llama.cpp does not have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

from strop.errors import UserError
from strop.model import load_tokenizer
from strop.safetensors_file import read_json

SPACE = "▁"
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
LOWEST_SCORE = -1e6
"""Of tokens that no merge gives; merges have their negative rank."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{0}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{0}"
    r"|\p{N}{1}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: Mapping[tuple[str, bool], str] = {
    (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST, True): "llama-bpe",
    (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST, False): "dbrx",
    (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST, False): "qwen2",
    (_CASED.replace("{0}", "").replace("{1}", ""), True): "tekken",
    (_CASED.replace("{0}", _CONTRACTIONS + "?").replace("{1}", "{1,3}"), False): "gpt-4o",
}
"""(pattern that text is cut by, whether a whole piece that is a token is taken without merging) -> llama.cpp's name."""


@dataclass(frozen=True)
class Vocabulary:
    """What a file says of its tokenizer.

    Attributes:
        model: `gpt2` or `llama`.
        pre: llama.cpp's name of the rule that cuts text, of `gpt2` only.
        tokens: As many as the embedding has rows.
        kinds: Of each token.
        scores: Of each token, of `llama` only: the highest merges first.
        merges: Two tokens with a space between them, the first merged first. llama.cpp reads them of `gpt2` only, other
            readers of both.
        ids: `bos`, `eos`, `eot` (the end of a chat turn where another token is the end of text), `unk`, `pad`.
        flags: `add_bos_token`, `add_eos_token` and, of `llama` only, `add_space_prefix`.
        chat_template: One, or several by name.
    """

    model: str
    pre: str | None
    tokens: tuple[str, ...]
    kinds: tuple[TokenType, ...]
    scores: tuple[float, ...] | None
    merges: tuple[str, ...]
    ids: Mapping[str, int]
    flags: Mapping[str, bool]
    chat_template: str | Mapping[str, str] | None


def read_vocabulary(folder: Path, vocab_size: int) -> Vocabulary:
    """The tokenizer of a checkpoint.

    Args:
        folder: The checkpoint.
        vocab_size: Rows of the embedding: tokens beyond are left out, what is missing is filled with unused ones.

    Raises:
        UserError: It is not one that llama.cpp has.
    """
    tokenizer = load_tokenizer(folder)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        raise UserError(f"gguf: {folder}: its tokenizer is a {model['type']}; allowed: BPE")
    is_bytes = any(x["type"] == "ByteLevel" for x in _parts(content.get("pre_tokenizer")))
    pre = _pre_tokenizer(content, folder) if is_bytes else None
    if not is_bytes and not model.get("byte_fallback"):
        raise UserError(f"gguf: {folder}: its tokenizer works neither on bytes nor falls back to them")
    merges = [tuple(x.split(" ", 1)) if isinstance(x, str) else tuple(x) for x in model["merges"]]
    spelled = {token: index for token, index in model["vocab"].items() if index < vocab_size}
    added = {x["id"]: x for x in content["added_tokens"] if x["id"] < vocab_size}
    texts = {index: token for token, index in spelled.items()} | {i: x["content"] for i, x in added.items()}
    tokens, kinds = [], []
    for index in range(vocab_size):
        kind = _kind(texts.get(index), added.get(index), model.get("unk_token"), is_bytes)
        text = texts.get(index, f"[PAD{index}]")
        # Text is searched for added tokens before spaces are respelled.
        tokens.append(text.replace(SPACE, " ") if kind == TokenType.USER_DEFINED and not is_bytes else text)
        kinds.append(kind)
    return Vocabulary(
        model="gpt2" if is_bytes else "llama",
        pre=pre,
        tokens=tuple(tokens),
        kinds=tuple(kinds),
        scores=None if is_bytes else _scores(merges, texts, vocab_size),
        merges=tuple(" ".join(x) for x in merges),
        ids={name: x for name, x in _ids(tokenizer, folder) if x < vocab_size},
        flags=_flags(tokenizer, is_bytes),
        chat_template=tokenizer.chat_template,
    )


def add_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    """Put a tokenizer into a file's metadata."""
    writer.add_tokenizer_model(vocabulary.model)
    if vocabulary.pre is not None:
        writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types([int(x) for x in vocabulary.kinds])
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    writer.add_token_merges(vocabulary.merges)
    for name, index in vocabulary.ids.items():
        getattr(writer, f"add_{name}_token_id")(index)
    for name, value in vocabulary.flags.items():
        getattr(writer, f"add_{name}")(value)
    template = vocabulary.chat_template
    if isinstance(template, str):
        writer.add_chat_template(template)
    elif template is not None:
        writer.add_chat_template([{"name": name, "template": text} for name, text in template.items()])


def _parts(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The steps of a pre-tokenizer or normalizer, one after the other."""
    if step is None:
        return
    if step["type"] == "Sequence":
        for inner in step.get("pretokenizers") or step.get("normalizers") or ():
            yield from _parts(inner)
    else:
        yield step


def _pre_tokenizer(content: Mapping[str, Any], folder: Path) -> str:
    """llama.cpp's name of the rule by which a byte-level tokenizer cuts text.

    Raises:
        UserError: It has none.
    """
    steps = list(_parts(content["pre_tokenizer"]))
    kinds = [x["type"] for x in steps]
    is_plain = steps[-1].get("use_regex", True)
    name = None
    if kinds == ["ByteLevel"] and is_plain:
        name = "gpt-2"
    elif kinds == ["Digits", "ByteLevel"] and is_plain and steps[0]["individual_digits"]:
        name = "smollm"
    elif kinds == ["Split", "ByteLevel"] and not is_plain and steps[0]["behavior"] == "Isolated":
        pattern = steps[0]["pattern"].get("Regex")
        name = SPLITS.get((pattern, bool(content["model"].get("ignore_merges"))))
    if name is None or steps[-1].get("add_prefix_space"):
        raise UserError(
            f"gguf: {folder}: how its tokenizer cuts text ({', '.join(kinds)}) has no name in llama.cpp; known: gpt-2, "
            f"smollm, {', '.join(SPLITS.values())}"
        )
    return name


def _kind(text: str | None, added: Mapping[str, Any] | None, unknown: str | None, is_bytes: bool) -> TokenType:
    if text is None:
        return TokenType.UNUSED
    if text == unknown and not is_bytes:
        return TokenType.UNKNOWN
    if added is not None:
        return TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    return TokenType.BYTE if not is_bytes and BYTE.fullmatch(text) else TokenType.NORMAL


def _scores(merges: Sequence[tuple[str, ...]], texts: Mapping[int, str], vocab_size: int) -> tuple[float, ...]:
    """Scores by which llama.cpp merges in the order of the merges."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    found = (ranks.get(texts.get(index, "")) for index in range(vocab_size))
    return tuple(LOWEST_SCORE if x is None else -float(x) for x in found)


def _ids(tokenizer: Any, folder: Path) -> Iterator[tuple[str, int]]:
    path = folder / "generation_config.json"
    told = read_json(path).get("eos_token_id") if path.is_file() else None
    ends = [told] if isinstance(told, int) else list(told or ())
    if tokenizer.eos_token_id is not None:
        ends = [tokenizer.eos_token_id, *(x for x in ends if x != tokenizer.eos_token_id)]
    named = {"bos": tokenizer.bos_token_id, "unk": tokenizer.unk_token_id, "pad": tokenizer.pad_token_id}
    yield from ((name, x) for name, x in named.items() if x is not None)
    yield from zip(("eos", "eot"), ends, strict=False)


def _flags(tokenizer: Any, is_bytes: bool) -> dict[str, bool]:
    """What the tokenizer adds to a text, found by giving it one."""
    ids = tokenizer("a").input_ids
    found = {"add_bos_token": ids[0] == tokenizer.bos_token_id, "add_eos_token": ids[-1] == tokenizer.eos_token_id}
    if not is_bytes:
        found["add_space_prefix"] = tokenizer.tokenize("a")[0].startswith(SPACE)
    return found
