"""Tokenizers go into GGUF in llama.cpp's terms: it would cut text as the model's own tokenizer does."""

from __future__ import annotations

import json
import pydoc_data.topics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from references import tiny_folder, tiny_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from strop.artifact import Artifact
from strop.errors import UserError
from strop.export.gguf import Gguf, layout
from strop.export.gguf.vocabulary import SPLITS, read_vocabulary
from strop.model import load_tokenizer
from strop.sources import fetch
from strop.stage import Context

TEXT = "if True: assert 3 > 2, 'naïve'\n\tcafés ≠ 東京  x"
PATTERNS = {name: pattern for (pattern, _), name in SPLITS.items()}


def saved(folder: Path, tokenizer: Tokenizer, **special: str) -> Path:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def byte_level(folder: Path, pre_tokenizer: Any, *, ignore_merges: bool = False) -> Path:
    """`tiny_tokenizer` with another rule that cuts text."""
    tiny_tokenizer().save_pretrained(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizer
    content = json.loads(tokenizer.to_str())
    content["model"]["ignore_merges"] = ignore_merges
    return saved(folder, Tokenizer.from_str(json.dumps(content)), bos_token="<s>", eos_token="</s>")


def sentencepiece(folder: Path) -> Path:
    """Byte pairs of characters that fall back to bytes, merged as SentencePiece does: whatever gives the best token."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizer
    learner.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    learner.train_from_iterator([pydoc_data.topics.topics["assert"]], trainers.BpeTrainer(vocab_size=260))
    learned = sorted(learner.get_vocab(), key=learner.get_vocab().__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *learned]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [(x[:i], x[i:]) for x in learned for i in range(1, len(x)) if x[:i] in vocab and x[i:] in vocab]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens(["▁▁x"])
    return saved(folder, tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def slow_spm(text: str, tokens: Sequence[str], scores: Sequence[float]) -> list[int]:
    """llama.cpp's SentencePiece: again and again the neighbours whose token scores highest, the first of equals."""
    ids: Mapping[str, int] = {token: i for i, token in enumerate(tokens)}
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in ids]
        if not pairs:
            break
        i = -max(pairs)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    found: list[int] = []
    for piece in pieces:
        found += [ids[piece]] if piece in ids else [ids[f"<0x{x:02X}>"] for x in piece.encode()]
    return found


@pytest.mark.parametrize(
    ("pre_tokenizer", "ignore_merges", "name"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=False), False, "gpt-2"),
        (
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            ),
            False,
            "smollm",
        ),
        *(
            (
                pre_tokenizers.Sequence(
                    [
                        pre_tokenizers.Split(Regex(pattern), "isolated"),
                        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                    ]
                ),
                ignores,
                name,
            )
            for (pattern, ignores), name in SPLITS.items()
        ),
    ],
)
def test_rules_that_cut_text_have_llama_cpps_names(
    pre_tokenizer: Any, ignore_merges: bool, name: str, tmp_path: Path
) -> None:
    found = read_vocabulary(byte_level(tmp_path, pre_tokenizer, ignore_merges=ignore_merges), 307)
    assert (found.model, found.pre) == ("gpt2", name)


def test_patterns_are_those_that_transformers_reads_under_the_same_names() -> None:
    module = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    known = {name: module.GGUF_PRE_TOKENIZER_SPLITS[name] for name in PATTERNS}
    assert known == PATTERNS


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r"\s"), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
        ),
        pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel()]),
    ],
)
def test_rules_without_a_name_are_refused(pre_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no name in llama\.cpp; known: gpt-2, smollm, llama-bpe") as caught:
        read_vocabulary(byte_level(tmp_path, pre_tokenizer), 307)
    assert "\n" not in str(caught.value)


def test_other_models_than_byte_pairs_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    with pytest.raises(UserError, match="its tokenizer is a Unigram; allowed: BPE"):
        read_vocabulary(saved(tmp_path, tokenizer, unk_token="<unk>"), 307)


def test_sentencepiece_scores_merge_as_the_tokenizer_does(tmp_path: Path) -> None:
    folder = sentencepiece(tmp_path)
    found, tokenizer = read_vocabulary(folder, 600), load_tokenizer(folder)
    assert (found.model, found.pre) == ("llama", None)
    assert found.scores is not None
    for text in (pydoc_data.topics.topics["assert"][:700], TEXT, "a", "  two  spaces"):
        expected = tokenizer(text, add_special_tokens=False).input_ids
        assert slow_spm(text, found.tokens, found.scores) == expected
    assert found.flags == {"add_bos_token": False, "add_eos_token": False, "add_space_prefix": True}


def test_every_token_has_its_kind(tmp_path: Path) -> None:
    folder = sentencepiece(tmp_path)
    found, size = read_vocabulary(folder, 600), len(load_tokenizer(folder))
    assert found.kinds[:4] == (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, TokenType.BYTE)
    assert found.kinds[259] == TokenType.NORMAL
    assert (found.tokens[size - 1], found.kinds[size - 1]) == ("  x", TokenType.USER_DEFINED)
    assert (found.tokens[size], found.kinds[size]) == (f"[PAD{size}]", TokenType.UNUSED)
    assert (len(found.tokens), len(found.kinds), len(found.scores or ())) == (600, 600, 600)
    assert found.ids == {"bos": 1, "eos": 2, "unk": 0}


def test_tokens_beyond_the_embedding_are_left_out(tmp_path: Path) -> None:
    folder = sentencepiece(tmp_path)
    found, size = read_vocabulary(folder, 300), len(load_tokenizer(folder))
    assert size > 300
    assert len(found.tokens) == len(set(found.tokens)) == 300


def test_the_end_of_a_turn_is_told_beside_the_end_of_text(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert read_vocabulary(folder, 307).ids == {"bos": 0, "eos": 1, "eot": 7}


def test_the_tokenizer_is_read_back_with_its_template(tmp_path: Path) -> None:
    source, out, back = tiny_folder(tmp_path / "model"), tmp_path / "out", tmp_path / "back"
    out.mkdir()
    back.mkdir()
    Gguf().run(Artifact(source, "checkpoint", "a" * 64), out, Context(tmp_path, threads=1))
    fetch(str(out / layout.FILE), "float32", back)
    ours, theirs = load_tokenizer(source), load_tokenizer(back)
    assert ours(TEXT).input_ids == theirs(TEXT).input_ids
    assert ours.chat_template == theirs.chat_template
    assert (theirs.bos_token, theirs.eos_token) == ("<s>", "</s>")


def test_a_sentencepiece_tokenizer_is_read_back(tmp_path: Path) -> None:
    source, out, back = tiny_folder(tmp_path / "model", vocab_size=600), tmp_path / "out", tmp_path / "back"
    sentencepiece(source)
    out.mkdir()
    back.mkdir()
    Gguf().run(Artifact(source, "checkpoint", "a" * 64), out, Context(tmp_path, threads=1))
    fetch(str(out / layout.FILE), "float32", back)
    text = pydoc_data.topics.topics["assert"][:700]
    assert load_tokenizer(source)(text).input_ids == load_tokenizer(back)(text).input_ids
