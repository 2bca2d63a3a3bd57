"""The C++ encoder compared with the `tokenizers` library, id by id."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from megatron import _csrc
from megatron.tokenizer.bpe import BpeTokenizer, load_hf_tokenizer
from megatron.tokenizer.code_points import load_gpt2_classes
from megatron.tokenizer.encoder import FastEncoder, LibraryEncoder, build_fast_bpe
from megatron.tokenizer.fast_bpe import compile_fast_bpe
from megatron.tokenizer.train_bpe import train_bpe
from tests.tokenizer.encoder_pair import draw_pattern_texts, draw_plane_texts

ODD_TEXTS = [
    "", " ", "  ", "\n", "a", "'", "''s", "'s 't 're 've 'm 'll 'd", "'S 'RE it'sn't", "don't'", " 's",
    "'l", "'r e", "a  b", "a   \n\n  b  ", "\t\tx", "x\xa0 y", "\u3000\u3000a", "a\u2028b\u2029c\x85d",
    "\r\n\r\n", "<|endoftext|>", "a<|endoftext|>b  <|endoftext|>", "<|endoftext|", "<<|endoftext|>>",
    "  <|endoftext|>  ", "12345678901234567890", "\u0661\u0662\xbd\u2167", "1a2b3c",
    "e\u0301\u0301\u200d\U0001f469\u200d\U0001f680", "\ue000\uf8ff\U000f0000\u0378\U0002fffe\ufffe",
    "\x00\x01\x7f",
    "xxxxxxxxxxxxxxx xxxxxxxxxxxxxxxx xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy",
]  # fmt: skip


def encode_separately(encoder: FastEncoder | LibraryEncoder, texts: list[str]) -> list[list[int]]:
    ids, lengths = encoder.encode(texts)
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if texts else []


@pytest.fixture(scope="module")
def pairs(
    scaling_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[FastEncoder, LibraryEncoder]]:
    """Encoders of GPT-2 and of a small trained tokenizer, in which most words need merges."""
    folder = tmp_path_factory.mktemp("small")
    train_bpe(["some words, some more words and 12 numbers \u00e9\u4e2d"] * 50, 280, folder)
    encoders = []
    for name in (scaling_data / "gpt2_tokenizer", folder):
        tokenizer = load_hf_tokenizer(str(name))
        fast, reason = build_fast_bpe(tokenizer)
        assert fast is not None, reason
        encoders.append((FastEncoder(fast), LibraryEncoder(tokenizer)))
    return encoders


def test_odd_and_random_texts_give_the_ids_of_the_library(pairs: list) -> None:
    texts = [*ODD_TEXTS, *draw_pattern_texts(3000, seed=0), *draw_plane_texts(3000, seed=0)]
    for fast, library in pairs:
        assert encode_separately(fast, texts) == encode_separately(library, texts)


def test_very_long_words_give_the_ids_of_the_library_and_take_no_square_of_time(pairs: list) -> None:
    texts = ["a" * 5000, " " * 5000 + "x", "9" * 3000, "ab" * 4000, "\u4e2d" * 2000, "-=" * 3000, "\n" * 999]
    for fast, library in pairs:
        assert encode_separately(fast, texts) == encode_separately(library, texts)
    # quadratic time for 10 million characters would not end
    whole, _ = pairs[0][0].encode(["a" * 10_000_000])
    assert pairs[0][1].tokenizer.decode(whole[:50]) in "a" * 1000


def test_classes_are_those_of_the_installed_library() -> None:
    # a sample of code points and every boundary of a run; tools/derive_code_points.py checks all of them
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    classes = load_gpt2_classes()
    borders = np.flatnonzero(np.diff(classes.astype(int)))
    points = {*borders.tolist(), *(borders + 1).tolist(), *range(0, 0x110000, 97)}
    for point in sorted(p for p in points if not 0xD800 <= p < 0xE000):
        joins = [len(split.pre_tokenize_str(f"{c}{chr(point)}{c}")) == 1 for c in "!a1"]
        assert classes[point] == (joins.index(True) if any(joins) else 3), hex(point)


def test_tokenizers_of_another_kind_are_left_to_the_library_with_the_reason() -> None:
    def refusal_reason(tokenizer: Tokenizer) -> str:
        fast, why = compile_fast_bpe(tokenizer.to_str())
        assert fast is None
        return why

    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    assert "WordLevel" in refusal_reason(words)
    bpe = Tokenizer(models.BPE())
    assert "pre-tokenizer" in refusal_reason(bpe)
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert "lacks 243 of the bytes of UTF-8" in refusal_reason(bpe)  # 13 of 256 bytes never occur
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert "adds a blank" in refusal_reason(bpe)
    bpe.normalizer = normalizers.NFKC()
    assert "NFKC" in refusal_reason(bpe)


def test_wrong_arguments_are_refused(scaling_data: Path) -> None:
    fast, _ = build_fast_bpe(load_hf_tokenizer(str(scaling_data / "gpt2_tokenizer")))
    worker = fast.create_worker()
    text_bytes = np.frombuffer(b"abc", dtype=np.uint8)
    with pytest.raises(ValueError, match="ascending"):
        _csrc.encode_texts(worker, text_bytes, np.array([2, 1]), True, -1)
    with pytest.raises(ValueError, match="within texts"):
        _csrc.encode_texts(worker, text_bytes, np.array([4]), True, -1)
    with pytest.raises(ValueError, match="not UTF-8"):
        _csrc.encode_texts(worker, np.array([0xED, 0xA0, 0x80], dtype=np.uint8), np.array([3]), True, -1)
    with pytest.raises(TypeError):
        _csrc.encode_texts(worker, text_bytes, np.array([3], dtype=np.int32), True, -1)
    with pytest.raises(ValueError, match="counts has no element"):
        _csrc.count_ids(np.array([5], dtype=np.uint16), np.zeros(5, dtype=np.int64))


def test_a_missing_end_of_document_token_is_an_error_if_one_is_required() -> None:
    tokenizer = BpeTokenizer(Tokenizer(models.BPE(vocab={"a": 0}, merges=[])), "one letter")
    with pytest.raises(ValueError, match="one letter: got no end-of-document token"):
        _ = tokenizer.eod_id
