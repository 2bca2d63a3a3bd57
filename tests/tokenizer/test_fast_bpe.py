"""What the C++ encoder refuses, and its classes of code points."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from megatron import _csrc
from megatron.tokenizer.bpe import BpeTokenizer, load_hf_tokenizer
from megatron.tokenizer.code_points import load_gpt2_classes
from megatron.tokenizer.encoder import build_fast_bpe
from megatron.tokenizer.fast_bpe import compile_fast_bpe


def test_classes_are_those_of_the_installed_library() -> None:
    # a sample of code points and every boundary of a run; csrc/derive_code_points.py checks all of them
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    classes = load_gpt2_classes()
    borders = np.flatnonzero(np.diff(classes.astype(int)))
    points = {*borders.tolist(), *(borders + 1).tolist(), *range(0, 0x110000, 97)}
    for point in sorted(p for p in points if not 0xD800 <= p < 0xE000):
        joins = [len(split.pre_tokenize_str(f"{c}{chr(point)}{c}")) == 1 for c in "!a1"]
        assert classes[point] == (joins.index(True) if any(joins) else 3), hex(point)


def test_tokenizers_of_another_kind_are_left_to_the_library_with_the_reason() -> None:
    def build(normalizer: normalizers.Normalizer | None, *pre_tokenizer: bool) -> Tokenizer:
        bpe = Tokenizer(models.BPE())
        bpe.normalizer = normalizer
        for add_prefix_space in pre_tokenizer:
            bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
        return bpe

    for tokenizer, reason in (
        (Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), "WordLevel"),
        (build(None), "pre-tokenizer"),
        (build(None, False), "lacks 243 of the bytes of UTF-8"),  # 13 of 256 bytes never occur
        (build(None, True), "adds a blank"),
        (build(normalizers.NFKC(), True), "NFKC"),
    ):
        fast, why = compile_fast_bpe(tokenizer.to_str())
        assert fast is None and reason in why


def test_wrong_arguments_are_refused(scaling_data: Path) -> None:
    fast, _ = build_fast_bpe(load_hf_tokenizer(str(scaling_data / "gpt2_tokenizer")))
    worker = fast.create_worker()
    text_bytes = np.frombuffer(b"abc", dtype=np.uint8)
    surrogate = np.array([0xED, 0xA0, 0x80], dtype=np.uint8)
    for texts, ends, message in (
        (text_bytes, [2, 1], "ascending"), (text_bytes, [4], "within texts"), (surrogate, [3], "not UTF-8")
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            _csrc.encode_texts(worker, texts, np.array(ends), True, -1)
    with pytest.raises(TypeError):
        _csrc.encode_texts(worker, text_bytes, np.array([3], dtype=np.int32), True, -1)


def test_a_missing_end_of_document_token_is_an_error_if_one_is_required() -> None:
    tokenizer = BpeTokenizer(Tokenizer(models.BPE(vocab={"a": 0}, merges=[])), "one letter")
    with pytest.raises(ValueError, match="one letter: got no end-of-document token"):
        _ = tokenizer.eod_id
