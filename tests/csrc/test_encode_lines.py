"""The C++ parser of JSON lines against Python's json: accepted lines are correct, all others are refused.

tests/test_fuzz.py changes lines at random: whatever is accepted has the text that Python reads.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron import _csrc
from megatron.text.text_readers import parse_text
from megatron.tokenizer.bpe import load_hf_tokenizer
from megatron.tokenizer.encoder import FastEncoder, build_fast_bpe
from megatron.tokenizer.train_bpe import train_bpe
from tests.tokenizer.encoder_pair import encode_range

GOOD = [
    b'{"text": "plain"}',
    b'  {"text":"spaces" , "n" : -1.5e+10, "a": [1, [], {"text": "in"}], "t": true} \r',
    b'{"f": false, "z": null, "text": "literals"}',
    b'{"meta": {"text": "not this", "x": ["\\"", "}"]}, "text": "nested"}',
    b'{"text": "quote \\" back \\\\ slash \\/ \\b\\f\\n\\r\\t"}',
    b'{"text": "\\u00e9 \\u4e2d \\ud83d\\ude00 \\u0000"}',
    '{"text": "\u00e9 \u4e2d \U0001f600", "\u00fc": "\u00fc"}'.encode(),
    b'{"text": "lone \\ud800 and \\udc00 and \\ud800\\u0041 \\ud800\\ud800\\udc00"}',
    b'{"text": ""}',
    b'{"texts": "longer", "tex": "shorter", "text": "right"}',
    b'{"text": "' + b"x" * 5000 + b'"}',
]
REFUSED = [
    b"plain words", b"[]", b"{}", b'{"text": 1}', b'{"text": null}', b'{"body": "x"}', b'{"text": "x"',
    b'{"text": "x"} x', b'{"text": "x",}', b'{"text": "half', b'{"text": "tab\there"}',
    b'{"text": "bad \\x escape"}', b'{"text": "\\u12g4"}', b'{"text": "a", "text": "b"}',
    b'{"te\\u0078t": "x"}', b'\xef\xbb\xbf{"text": "bom"}',
    *(b'{"text": "x", "n": ' + number + b"}" for number in (b"01", b"+1", b"NaN", b".5", b"1.", b"1e")),
    *(b'{"text": "' + text + b'"}' for text in
      (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xe4\xb8")),
    b'{"text": "x", "deep": ' + b"[" * 100 + b"]" * 100 + b"}",
]  # fmt: skip


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> FastEncoder:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["plain words of a small text, quote and slash"] * 20, 280, folder)
    return FastEncoder(build_fast_bpe(load_hf_tokenizer(str(folder)))[0])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path of the lines."""
    return tmp_path / "in.jsonl"


def test_an_accepted_line_has_the_same_text_as_in_python(path: Path, encoder: FastEncoder) -> None:
    for content in (line + end for line in GOOD for end in (b"\n", b"")):
        path.write_bytes(content)
        (at, documents, tokens, lines, is_refused), ids, lengths = encode_range(encoder, path)
        expected, _ = encoder.encode([parse_text(content.rstrip(b"\n"), "text")])
        assert (at, documents, lines, is_refused) == (len(content), 1, 1, False)
        assert ids.tolist() == expected.tolist()
        assert lengths.tolist() == [tokens]


def test_a_doubtful_line_is_refused_and_earlier_lines_are_written(path: Path, encoder: FastEncoder) -> None:
    for line in REFUSED:
        path.write_bytes(GOOD[0] + b"\n\n" + line + b"\n" + GOOD[0] + b"\n")
        (at, documents, _, lines, is_refused), ids, _ = encode_range(encoder, path)
        assert (at, documents, lines, is_refused) == (len(GOOD[0]) + 2, 1, 2, True), line
        assert ids.tolist() == encoder.encode(["plain"])[0].tolist()


def test_any_json_that_python_writes_is_accepted(path: Path, encoder: FastEncoder) -> None:
    rng = np.random.default_rng(0)

    def value(depth: int) -> object:
        kind = rng.integers(0, 8 if depth < 4 else 5)
        if kind >= 6:
            return [value(depth + 1) for _ in range(rng.integers(0, 4))]
        if kind == 5:
            return {f"k{i}": value(depth + 1) for i in range(rng.integers(0, 4))}
        return (None, True, int(rng.integers(-(10**6), 10**6)), float(rng.normal() * 1e-9), text())[kind]

    def text() -> str:
        points = rng.integers(0, (0x80, 0x3000, 0x110000)[rng.integers(0, 3)], rng.integers(0, 60))
        return "".join(map(chr, points[(points < 0xD800) | (points >= 0xE000)]))

    records = [{"a": value(0), "text": text(), "z": value(0)} for _ in range(800)]
    lines = [json.dumps(record, ensure_ascii=bool(i % 2)).encode() for i, record in enumerate(records)]
    path.write_bytes(b"\n".join(lines))
    (_, documents, _, _, is_refused), ids, lengths = encode_range(encoder, path, eod=0)
    assert (documents, is_refused) == (800, False)
    expected, sizes = encoder.encode([record["text"] for record in records], eod=0)
    assert ids.tolist() == expected.tolist()
    assert lengths.tolist() == sizes.tolist()


def test_ranges_and_lines_longer_than_a_block_are_read_whole(path: Path, encoder: FastEncoder) -> None:
    texts = ["small text " * n for n in (1, 300_000, 2, 150_000, 3)]  # 3.3 MB and 1.6 MB; blocks have 1 MiB
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
    path.write_bytes(b"".join(lines))
    begin, end = len(lines[0]), sum(map(len, lines[:4]))
    (at, documents, *_), ids, _ = encode_range(encoder, path, begin, end)
    assert (at, documents) == (end, 3)
    assert np.array_equal(ids, encoder.encode(texts[1:4])[0])


def test_an_input_that_becomes_shorter_is_one_sentence(path: Path, encoder: FastEncoder) -> None:
    path.write_bytes(b'{"text": "a"}\n')
    with pytest.raises(ValueError, match="the input became shorter while it was read"):
        encode_range(encoder, path, 0, 100)


def test_a_full_disk_is_an_oserror(path: Path, encoder: FastEncoder) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    path.write_bytes(GOOD[0] + b"\n")
    with path.open("rb") as file, open("/dev/full", "wb", buffering=0) as full:
        words = (file.fileno(), 0, path.stat().st_size, "text", True, -1, False, full.fileno(), full.fileno())
        with pytest.raises(OSError, match="No space"):
            _csrc.encode_lines(encoder.worker, *words)
