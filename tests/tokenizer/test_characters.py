"""BPE of characters with byte fallback (SentencePiece) in C++ gives the ids of `tokenizers`."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from megatron.tokenizer.fast_bpe import compile_fast_bpe
from tests.tokenizer.encoder_pair import (
    add_random_tokens,
    assert_equal_ids,
    assert_equal_line,
    draw_pattern_texts,
    draw_plane_texts,
    draw_token_texts,
)

BLANK = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TRAINING_TEXTS = [
    "The cat's 12345 WORDS don't end; they'LL go on in 2024/25.\n\n  def f(x):\n    return x_1 != 'a'\t",
    "\u4e2d\u6587\u5b57\u7b26\u4e2d\u6587 \u3042\u3044\u3046 \uac00 na\u00efve e\u0301 \U0001f642 \u00df" * 3,
    *draw_pattern_texts(200, seed=1),
]


@cache
def train_pieces(across_words: bool, words: int) -> str:
    """Train a BPE of characters on the texts, or on each of their words; return its JSON."""
    inner = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if not across_words:
        inner.pre_tokenizer = metaspace("never", True)
    special = ["<unk>", "<s>", "</s>", *BYTES]
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 90 + words, special_tokens=special, limit_alphabet=80, show_progress=False,
        initial_alphabet=[BLANK],
    )  # fmt: skip
    inner.train_from_iterator([text.replace(" ", BLANK) for text in TRAINING_TEXTS], trainer)
    saved = json.loads(inner.to_str())
    saved["added_tokens"] = saved["added_tokens"][:3]  # byte tokens are not added tokens
    return json.dumps(saved | {"normalizer": None, "pre_tokenizer": None})


def build(
    normalizer: Any = None, pre_tokenizer: Any = None, across_words: bool = True, words: int = 300
) -> Tokenizer:
    inner = Tokenizer.from_str(train_pieces(across_words, words))
    if normalizer is not None:
        inner.normalizer = normalizer
    if pre_tokenizer is not None:
        inner.pre_tokenizer = pre_tokenizer
    return inner


def llama() -> Any:
    return normalizers.Sequence([normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)])


def metaspace(scheme: str, splits: bool = False) -> Any:
    return pre_tokenizers.Metaspace(BLANK, scheme, split=splits)


REPLACE = normalizers.Replace(" ", BLANK)
KINDS: dict[str, tuple[Any, Any]] = {
    "llama-2": (llama(), None),
    "gemma": (REPLACE, pre_tokenizers.Split(" ", "merged_with_previous")),
    **{f"metaspace {scheme}": (None, metaspace(scheme)) for scheme in ("always", "first", "never")},
    **{f"words, metaspace {name}": (None, metaspace(name, True)) for name in ("always", "first", "never")},
    "replaced before metaspace": (REPLACE, metaspace("first")),
}
TOKENS = ["<|a|>", "<|a|>b", "the", "  ", "_x_", "\u4e2d", "a", f"{BLANK}a", "<s>", "a a"]


@cache
def make_hostile_texts(n: int) -> list[str]:
    blanks = [text.replace("e", BLANK).replace("t", " ") for text in draw_pattern_texts(n, seed=4)]
    edges = ["", " ", BLANK, "  ", f" {BLANK}", "a", " a", "\n", "\n a", "<s>", "<0x41>", "<unk>", "\x00"]
    return [*edges, *draw_pattern_texts(n, seed=2), *draw_plane_texts(n, seed=3), *blanks]


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_with_and_without_added_tokens_of_every_condition(name: str) -> None:
    for across_words in (True, False):
        inner = build(*KINDS[name], across_words)
        # pieces of two words
        assert any(BLANK in piece.lstrip(BLANK) for piece in inner.get_vocab()) == across_words
        assert assert_equal_ids(inner, make_hostile_texts(400)) > 1200
    rng = np.random.default_rng(4)
    texts = [*draw_token_texts([*TOKENS, BLANK], 150, seed=5), *make_hostile_texts(40)]
    for special in (True, False):
        inner = build(*KINDS[name])
        add_random_tokens(inner, TOKENS, rng)
        assert_equal_ids(inner, texts, special)


@pytest.mark.parametrize("name", ["llama-2", "metaspace first", "words, metaspace always"])
def test_long_texts_and_a_line_of_megabytes(name: str, tmp_path: Path) -> None:
    inner = build(*KINDS[name])
    texts = ["the" * 30_000, "\u4e2d\u6587" * 20_000, "\U0001f9ff" * 9_000, BLANK * 20_000, " " * 50_000]
    assert_equal_ids(inner, [*texts, *("x" * n + "\u00e9" * n for n in range(1, 70))])
    inner.add_special_tokens([AddedToken("<|a|>", lstrip=True, rstrip=True)])
    inner.add_tokens([AddedToken("cat", normalized=True)])
    words = ["the cat ", "x1 + 22", "\n\n  ", "\u4e2d\u6587 ", " <|a|>  ", "don't ", "caf\u00e9 is "]
    assert_equal_line(inner, words, tmp_path)


def test_real_texts(scaling_data: Path) -> None:
    lines = (scaling_data / "c4" / "c4_en_shard00000_first1000.jsonl").read_text().splitlines()[:100]
    texts = [json.loads(line)["text"][:5000] for line in lines]
    assert_equal_ids(build(llama(), words=2000), texts)


def test_other_tokenizers_are_left_to_the_library_with_the_reason() -> None:
    def merge_bytes(saved: dict[str, Any]) -> None:
        saved["model"]["vocab"]["<0x41><0x42>"] = 9999
        saved["model"]["merges"].append(["<0x41>", "<0x42>"])

    nfkc = json.loads(build(normalizers.NFKC(), words=5).to_str())["normalizer"]
    changes: dict[str, Callable[[Any], object]] = {
        "the vocabulary lacks <0x41>": lambda saved: saved["model"]["vocab"].pop("<0x41>"),
        "a merge joins the token of a byte": merge_bytes,
        "NFKC": lambda saved: saved.update(normalizer=nfkc),
        "adds U+2581": lambda saved: saved["normalizer"]["normalizers"].pop(),
        "ignore_merges": lambda saved: saved["model"].update(ignore_merges=True),
        "neither byte-level": lambda saved: saved.update(normalizer=None),
    }
    for reason, change in changes.items():
        saved = json.loads(build(llama(), words=5).to_str())
        change(saved)
        fast, why = compile_fast_bpe(json.dumps(saved))
        assert fast is None and reason in why
