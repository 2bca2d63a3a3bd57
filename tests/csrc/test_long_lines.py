"""Lines and words that are too long to buffer: the ids are the whole text's.

The expected ids are from `encode_texts`, which other tests compare with the `tokenizers` library. The slow
test here compares with the library directly, for lines of several million bytes.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.tokenizer.bpe import BpeTokenizer, load_hf_tokenizer
from megatron.tokenizer.encoder import FastEncoder, build_fast_bpe
from megatron.tokenizer.train_bpe import train_bpe
from tests.tokenizer.encoder_pair import encode_range

LINE = 4 << 20  # bytes above which a line is streamed, in windows of one MiB
PIECES = [
    "the", " house", " it's", "'ll", " 12", "\n\n  ", " <|endoftext|>", "<|endoftext|>'s", "  ", "!!!", "'",
    "\t", "\u00e9", "\u4e2d\u6587", "\U0001f600", '"', "\\", "\u3000",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> BpeTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    text = (
        "the house it's here, they'll say 12 times: xxxxxxxxxxxx abababab ------ \u4e2d\u6587 \u00e9t\u00e9"
    )
    train_bpe([text] * 40, 290, folder)
    return load_hf_tokenizer(str(folder))


def make_text(name: str) -> str:
    some, rng = int(1.1 * LINE), random.Random(0)
    kinds: dict[str, Callable[[], str]] = {
        "mixed": lambda: "".join(rng.choices(PIECES, k=some // 4)),
        "no blanks": lambda: "\u4e2d\u6587\u3002" * (some // 9),
        "one letter": lambda: "x" * some,
        "two letters": lambda: "".join(rng.choices("ab", k=some)),
        "a run and a rest": lambda: "-" * (some // 2) + " " + "=" * (some // 2),
        "white space": lambda: "".join(rng.choices(" \n\t", k=some)),
        "digits": lambda: "".join(rng.choices("0123456789", k=some)),
        "letters of three bytes": lambda: "".join(rng.choices("\u4e2d\u6587\u5b57", k=some // 3)),
        "quotes": lambda: "".join(rng.choices("'-=", k=some)) + "'s",
    }
    return kinds[name]()


def encode_whole(tokenizer: BpeTokenizer, text: str, is_library: bool) -> np.ndarray:
    """Return the ids of a whole text, with its end token."""
    if is_library:
        return np.array([*tokenizer.encode(text), tokenizer.eod_id])
    return FastEncoder(build_fast_bpe(tokenizer)[0]).encode([text], tokenizer.eod_id)[0]


FAST = ("mixed", "letters of three bytes")
SLOW = ("white space", "no blanks", "one letter", "two letters", "a run and a rest", "digits", "quotes")


@pytest.mark.parametrize("is_library", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_streamed_line_gives_the_ids_of_the_whole(
    tmp_path: Path, tokenizer: BpeTokenizer, name: str, is_library: bool
) -> None:
    text, path = make_text(name), tmp_path / "in.jsonl"
    lines = [{"text": "before"}, {"n": [1, {"a": "b"}], "text": text, "z": None}, {"text": "after"}]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    assert path.stat().st_size > LINE
    encoder = FastEncoder(build_fast_bpe(tokenizer)[0])
    counts, ids, lengths = encode_range(encoder, path, eod=tokenizer.eod_id)
    expected = [encode_whole(tokenizer, str(line["text"]), is_library) for line in lines]
    assert lengths.tolist() == [len(ids_) for ids_ in expected]
    assert np.array_equal(ids, np.concatenate(expected))
    assert counts == (path.stat().st_size, 3, len(ids), 3, False)


def test_special_text_as_text_is_streamed_too(tmp_path: Path, tokenizer: BpeTokenizer) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"text": "a<|endoftext|>'s" * (LINE // 12)}))
    encoder = FastEncoder(build_fast_bpe(tokenizer)[0], special=False)
    _, ids, _ = encode_range(encoder, path, eod=tokenizer.eod_id, special=False)
    assert len(ids) > LINE // 12 and tokenizer.eod_id not in ids[:-1]


def test_a_streamed_line_with_an_invalid_end_leaves_no_ids(tmp_path: Path, tokenizer: BpeTokenizer) -> None:
    path, first = tmp_path / "in.jsonl", b'{"text": "before"}\n'
    encoder = FastEncoder(build_fast_bpe(tokenizer)[0])
    for tail in (b'"', b'", "text": "again"}', b'"} x', b'\xff"}', b"\\x"):
        path.write_bytes(first + b'{"text": "' + b"ab " * (LINE // 3) + b"abc " + tail + b"\n")
        counts, ids, lengths = encode_range(encoder, path, eod=tokenizer.eod_id)
        assert ids.tolist() == [*tokenizer.encode("before"), tokenizer.eod_id]
        assert lengths.tolist() == [len(ids)]
        assert counts == (len(first), 1, len(ids), 1, True)


def test_very_long_words_of_any_letters_give_the_ids_of_tokenizers(tokenizer: BpeTokenizer) -> None:
    rng = random.Random(1)
    encoder = FastEncoder(build_fast_bpe(tokenizer)[0])
    for n in (16383, 16384, 16385, 100_001):
        for letters in ("x", "ab", "hse", "abcdefghijklmnopqrstuvwxyz"):
            word = "".join(rng.choices(letters, k=n))
            assert encoder.encode([word])[0].tolist() == tokenizer.encode(word), (n, letters)
