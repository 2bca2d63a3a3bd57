"""BPE of characters with byte fallback (SentencePiece) in C++ gives the ids of `tokenizers`."""

import json
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
    draw_mutated_texts,
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


def train(
    normalizer: Any = None, pre_tokenizer: Any = None, training_splitter: Any = None, words: int = 300
) -> Tokenizer:
    """Train a BPE of characters; `training_splitter` splits the text of the training only."""
    inner = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", BLANK)
    if training_splitter is not None:
        inner.pre_tokenizer = training_splitter
    special = ["<unk>", "<s>", "</s>", *BYTES]
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 90 + words, special_tokens=special, limit_alphabet=80, show_progress=False,
        initial_alphabet=[BLANK],
    )  # fmt: skip
    inner.train_from_iterator([text.replace(" ", BLANK) for text in TRAINING_TEXTS], trainer)
    saved = json.loads(inner.to_str())
    saved["added_tokens"] = saved["added_tokens"][:3]  # the tokens of bytes are no added tokens
    inner = Tokenizer.from_str(json.dumps(saved | {"normalizer": None, "pre_tokenizer": None}))
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


def hostile_texts(n: int = 500) -> list[str]:
    blanks = [text.replace("e", BLANK).replace("t", " ") for text in draw_pattern_texts(n, seed=4)]
    edges = ["", " ", BLANK, "  ", f" {BLANK}", "a", " a", "\n", "\n a", "<s>", "<0x41>", "<unk>", "\x00"]
    return [*edges, *draw_pattern_texts(n, seed=2), *draw_plane_texts(n, seed=3), *blanks]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("splitter", [None, metaspace("never", True)], ids=["across words", "within words"])
def test_a_trained_tokenizer_of_each_kind(name: str, splitter: Any) -> None:
    inner = train(*KINDS[name], splitter)
    crossing = [piece for piece in inner.get_vocab() if BLANK in piece.lstrip(BLANK)]
    assert bool(crossing) == (splitter is None)  # pieces of two words
    assert assert_equal_ids(inner, hostile_texts()) > 1500


TOKENS = ["<|a|>", "<|a|>b", "the", "  ", "_x_", "\u4e2d", "a", f"{BLANK}a", "<s>", "a a"]


@pytest.mark.parametrize("name", KINDS)
def test_added_tokens_with_every_condition(name: str) -> None:
    rng = np.random.default_rng(4)
    inner = train(*KINDS[name])
    for _ in range(2):
        changed = Tokenizer.from_str(inner.to_str())
        add_random_tokens(changed, TOKENS, rng)
        for special in (True, False):
            texts = [*draw_token_texts([*TOKENS, BLANK], 150, seed=5), *hostile_texts(40)]
            assert_equal_ids(Tokenizer.from_str(changed.to_str()), texts, special)


@pytest.mark.parametrize("name", ["llama-2", "metaspace first", "words, metaspace always"])
def test_long_texts_without_blanks(name: str) -> None:
    inner = train(*KINDS[name])
    texts = ["the" * 30_000, "\u4e2d\u6587" * 20_000, "\U0001f9ff" * 9_000, BLANK * 20_000, " " * 50_000]
    assert_equal_ids(inner, [*texts, *("x" * n + "\u00e9" * n for n in range(1, 70))])


@pytest.mark.parametrize("name", ["llama-2", "metaspace first", "words, metaspace always"])
def test_a_line_of_megabytes_has_the_ids_of_its_whole_text(name: str, tmp_path: Path) -> None:
    inner = train(*KINDS[name])
    inner.add_special_tokens([AddedToken("<|a|>", lstrip=True, rstrip=True)])
    inner.add_tokens([AddedToken("cat", normalized=True)])
    words = ["the cat ", "x1 + 22", "\n\n  ", "\u4e2d\u6587 ", " <|a|>  ", "don't ", "caf\u00e9 is "]
    assert_equal_line(inner, words, tmp_path)


def test_real_text_and_its_mutations(scaling_data: Path) -> None:
    lines = (scaling_data / "c4" / "c4_en_shard00000_first1000.jsonl").read_text().splitlines()[:150]
    texts = [json.loads(line)["text"][:5000] for line in lines]
    inner = train(llama(), words=2000)
    assert_equal_ids(inner, [*texts, *draw_mutated_texts(texts, 2000, seed=5)])


def test_other_tokenizers_are_left_to_the_library_with_the_reason() -> None:
    def refusal_reason(change: Any) -> str:
        saved = json.loads(train(llama(), words=5).to_str())
        change(saved)
        fast, reason = compile_fast_bpe(json.dumps(saved))
        assert fast is None
        return reason

    def without_a_byte(saved: dict[str, Any]) -> None:
        del saved["model"]["vocab"]["<0x41>"]

    def merge_of_bytes(saved: dict[str, Any]) -> None:
        saved["model"]["vocab"]["<0x41><0x42>"] = 9999
        saved["model"]["merges"].append(["<0x41>", "<0x42>"])

    assert "the vocabulary lacks <0x41>" in refusal_reason(without_a_byte)
    assert "a merge joins the token of a byte" in refusal_reason(merge_of_bytes)
    nfkc = json.loads(train(normalizers.NFKC(), words=5).to_str())["normalizer"]
    assert "NFKC" in refusal_reason(lambda saved: saved.update(normalizer=nfkc))
    assert "adds U+2581" in refusal_reason(lambda saved: saved["normalizer"]["normalizers"].pop())
    assert "ignore_merges" in refusal_reason(lambda saved: saved["model"].update(ignore_merges=True))
    assert "neither byte-level" in refusal_reason(lambda saved: saved.update(normalizer=None))
