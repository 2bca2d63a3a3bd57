"""Lines and words that are too long to buffer: the ids are those of the whole text.

The expected ids are from `encode_texts`, which other tests compare with the `tokenizers` library. The slow
test here compares with the library directly, for lines of several million bytes.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron import _csrc
from megatron.tokenizer.bpe import BpeTokenizer, load_hf_tokenizer
from megatron.tokenizer.encoder import FastEncoder, build_fast_bpe
from megatron.tokenizer.train_bpe import train_bpe

LINE = 4 << 20  # bytes above which a line is streamed, in windows of one MiB
PIECES = [
    *(
        "the",
        " house",
        " it's",
        "'ll",
        " 12",
        "\n\n  ",
        " <|endoftext|>",
        "<|endoftext|>'s",
        "  ",
        "!!!",
        "'",
        "\t",
    ),
    *("\u00e9", "\u4e2d\u6587", "\U0001f600", '"', "\\", "\u3000"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> BpeTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    text = (
        "the house it's here, they'll say 12 times: xxxxxxxxxxxx abababab ------ \u4e2d\u6587 \u00e9t\u00e9"
    )
    train_bpe([text] * 40, 290, folder)
    return load_hf_tokenizer(str(folder))


def encode_file(
    tokenizer: BpeTokenizer, path: Path, special: bool = True
) -> tuple[list[int], list[int], tuple]:
    """Return (ids, lengths, counts) of a file's lines, each document with its end token."""
    encoder = FastEncoder(build_fast_bpe(tokenizer)[0], special)
    ids, lengths = path.with_name("ids"), path.with_name("lengths")
    with path.open("rb") as file, ids.open("wb") as ids_out, lengths.open("wb") as lengths_out:
        counts = _csrc.encode_lines(
            encoder.worker, file.fileno(), 0, path.stat().st_size, "text", special, tokenizer.eod_id, False,
            ids_out.fileno(), lengths_out.fileno(),
        )  # fmt: skip
    return np.fromfile(ids, "<u2").tolist(), np.fromfile(lengths, "<i4").tolist(), counts


def make_text(name: str) -> str:
    rng = random.Random(0)
    some = int(1.1 * LINE)
    kinds: dict[str, Callable[[], str]] = {
        "mixed": lambda: "".join(rng.choice(PIECES) for _ in range(some // 4)),
        "no blanks": lambda: "\u4e2d\u6587\u3002" * (some // 9),
        "one letter": lambda: "x" * some,
        "two letters": lambda: "".join(rng.choice("ab") for _ in range(some)),
        "a run and a rest": lambda: "-" * (some // 2) + " " + "=" * (some // 2),
        "white space": lambda: "".join(rng.choice(" \n\t") for _ in range(some)),
        "digits": lambda: "".join(rng.choice("0123456789") for _ in range(some)),
        "letters of three bytes": lambda: "".join(rng.choice("\u4e2d\u6587\u5b57") for _ in range(some // 3)),
        "quotes": lambda: "".join(rng.choice("'-=") for _ in range(some)) + "'s",
    }
    return kinds[name]()


def encode_whole(tokenizer: BpeTokenizer, text: str, is_library: bool) -> list[int]:
    """Return the ids of a whole text, with its end token."""
    if is_library:
        return [*tokenizer.encode(text), tokenizer.eod_id]
    return FastEncoder(build_fast_bpe(tokenizer)[0]).encode([text], tokenizer.eod_id)[0].tolist()


FAST = ("mixed", "white space", "letters of three bytes")
SLOW = ("no blanks", "one letter", "two letters", "a run and a rest", "digits", "quotes")


@pytest.mark.parametrize("is_library", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_streamed_line_gives_the_ids_of_the_whole(
    tmp_path: Path, tokenizer: BpeTokenizer, name: str, is_library: bool
) -> None:
    text, path = make_text(name), tmp_path / "in.jsonl"
    lines = [{"text": "before"}, {"n": [1, {"a": "b"}], "text": text, "z": None}, {"text": "after"}]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    assert path.stat().st_size > LINE
    ids, lengths, counts = encode_file(tokenizer, path)
    expected = [encode_whole(tokenizer, line["text"], is_library) for line in lines]
    assert lengths == [len(ids_) for ids_ in expected]
    assert ids == [i for ids_ in expected for i in ids_]
    assert counts == (path.stat().st_size, 3, len(ids), 3, False)


def test_special_text_as_text_is_streamed_too(tmp_path: Path, tokenizer: BpeTokenizer) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"text": "a<|endoftext|>'s" * (LINE // 12)}))
    ids, _, _ = encode_file(tokenizer, path, special=False)
    assert tokenizer.eod_id not in ids[:-1]


@pytest.mark.parametrize("tail", [b'"', b'", "text": "again"}', b'"} x', b'\xff"}', b"\\x"])
def test_a_streamed_line_that_is_invalid_at_its_end_is_refused_and_leaves_no_ids(
    tmp_path: Path, tokenizer: BpeTokenizer, tail: bytes
) -> None:
    path = tmp_path / "in.jsonl"
    first = b'{"text": "before"}\n'
    path.write_bytes(first + b'{"text": "' + b"ab " * (LINE // 3) + b"abc " + tail + b"\n")
    ids, lengths, counts = encode_file(tokenizer, path)
    assert ids == [*tokenizer.encode("before"), tokenizer.eod_id]
    assert lengths == [len(ids)]
    assert counts == (len(first), 1, len(ids), 1, True)


def test_very_long_words_of_any_letters_give_the_ids_of_tokenizers(tokenizer: BpeTokenizer) -> None:
    rng = random.Random(1)
    encoder = FastEncoder(build_fast_bpe(tokenizer)[0])
    for n in (16383, 16384, 16385, 40_000, 100_001):
        for letters in ("x", "ab", "hse", "abcdefghijklmnopqrstuvwxyz"):
            word = "".join(rng.choice(letters) for _ in range(n))
            assert encoder.encode([word])[0].tolist() == tokenizer.encode(word), (n, letters)
