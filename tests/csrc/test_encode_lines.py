"""The C++ parser of JSON lines against Python's json: accepted lines are correct, all others are refused."""

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
    b"plain words",
    b"[]",
    b"{}",
    b'{"text": 1}',
    b'{"text": null}',
    b'{"body": "x"}',
    b'{"text": "x"',
    b'{"text": "x"} x',
    b'{"text": "x",}',
    b'{"text": "half',
    b'{"text": "tab\there"}',
    b'{"text": "bad \\x escape"}',
    b'{"text": "\\u12g4"}',
    b'{"text": "a", "text": "b"}',
    b'{"te\\u0078t": "x"}',
    b'{"text": "x", "n": 01}',
    b'{"text": "x", "n": +1}',
    b'{"text": "x", "n": NaN}',
    b'{"text": "x", "n": .5}',
    b'{"text": "x", "n": 1.}',
    b'{"text": "x", "n": 1e}',
    b'{"text": "\xff"}',
    b'{"text": "\xc0\xaf"}',
    b'{"text": "\xed\xa0\x80"}',
    b'{"text": "\xf5\x80\x80\x80"}',
    b'{"text": "\xe4\xb8"}',
    b'\xef\xbb\xbf{"text": "bom"}',
    b'{"text": "x", "deep": ' + b"[" * 100 + b"]" * 100 + b"}",
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> FastEncoder:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["plain words of a small text, quote and slash"] * 20, 280, folder)
    return FastEncoder(build_fast_bpe(load_hf_tokenizer(str(folder)))[0])


class Range:
    """A file of lines, and the C++ encoding of a byte range of it."""

    def __init__(self, folder: Path, content: bytes) -> None:
        self.folder, self.path = folder, folder / "in.jsonl"
        self.path.write_bytes(content)

    def encode(self, encoder: FastEncoder, begin: int = 0, end: int | None = None, eod: int = -1) -> tuple:
        end = self.path.stat().st_size if end is None else end
        names = [self.folder / name for name in ("ids", "lengths")]
        with self.path.open("rb") as file, names[0].open("wb") as ids, names[1].open("wb") as lengths:
            counts = _csrc.encode_lines(encoder.worker, file.fileno(), begin, end, "text", True, eod, False,
                                      ids.fileno(), lengths.fileno())  # fmt: skip
        return (*counts, np.fromfile(names[0], "<u2"), np.fromfile(names[1], "<i4"))


@pytest.mark.parametrize("line", GOOD, ids=range(len(GOOD)))
def test_an_accepted_line_has_the_same_text_as_in_python(
    tmp_path: Path, encoder: FastEncoder, line: bytes
) -> None:
    for end in (b"\n", b""):
        content = line + end
        at, documents, tokens, lines, refused, ids, lengths = Range(tmp_path, content).encode(encoder)
        expected, _ = encoder.encode([parse_text(line, "text")])
        assert (at, documents, lines, refused) == (len(content), 1, 1, False)
        assert ids.tolist() == expected.tolist()
        assert lengths.tolist() == [tokens]


@pytest.mark.parametrize("line", REFUSED, ids=range(len(REFUSED)))
def test_a_doubtful_line_is_refused_and_earlier_lines_are_written(
    tmp_path: Path, encoder: FastEncoder, line: bytes
) -> None:
    content = GOOD[0] + b"\n\n" + line + b"\n" + GOOD[0] + b"\n"
    at, documents, _, lines, refused, ids, _ = Range(tmp_path, content).encode(encoder)
    assert (at, documents, lines, refused) == (len(GOOD[0]) + 2, 1, 2, True)
    assert ids.tolist() == encoder.encode(["plain"])[0].tolist()


def test_any_json_that_python_writes_is_accepted(tmp_path: Path, encoder: FastEncoder) -> None:
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
    _, documents, _, _, refused, ids, lengths = Range(tmp_path, b"\n".join(lines)).encode(encoder, eod=0)
    assert (documents, refused) == (800, False)
    expected, sizes = encoder.encode([record["text"] for record in records], eod=0)
    assert ids.tolist() == expected.tolist()
    assert lengths.tolist() == sizes.tolist()


def test_a_damaged_line_never_gives_another_text(tmp_path: Path, encoder: FastEncoder) -> None:
    rng = np.random.default_rng(1)
    pieces = [
        b"\\",
        b'"',
        b"{",
        b"}",
        b",",
        b":",
        b"\\u",
        b"d800",
        b"\x00",
        b"\xed\xa0",
        b"\xf4",
        b"\r",
        b"\t",
        b"1",
        b"t",
    ]
    n_accepted = n_refused = 0
    for _ in range(1500):
        line = GOOD[rng.integers(0, len(GOOD) - 1)]
        for _ in range(rng.integers(1, 4)):
            at, n = int(rng.integers(0, len(line) + 1)), int(rng.integers(0, 3))
            line = line[:at] + pieces[rng.integers(0, len(pieces))] * int(rng.integers(0, 2)) + line[at + n :]
        _, documents, _, _, refused, ids, _ = Range(tmp_path, line).encode(encoder)
        n_refused += refused
        if documents:  # then Python accepts it too, with the same text
            n_accepted += 1
            assert ids.tolist() == encoder.encode([parse_text(line, "text")])[0].tolist(), line
    assert n_accepted > 100
    assert n_refused > 100


def test_ranges_and_lines_longer_than_a_block_are_read_whole(tmp_path: Path, encoder: FastEncoder) -> None:
    texts = ["small text " * n for n in (1, 300_000, 2, 150_000, 3)]  # 3.3 MB and 1.6 MB; blocks have 1 MiB
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
    whole = Range(tmp_path, b"".join(lines))
    begin, end = len(lines[0]), sum(map(len, lines[:4]))
    at, documents, _, _, _, ids, _ = whole.encode(encoder, begin, end)
    assert (at, documents) == (end, 3)
    assert ids.tolist() == encoder.encode(texts[1:4])[0].tolist()


def test_an_input_that_becomes_shorter_is_one_sentence(tmp_path: Path, encoder: FastEncoder) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "a"}\n')
    with (tmp_path / "in.jsonl").open("rb") as lines, (tmp_path / "out").open("wb") as out:
        files = lines.fileno(), 0, 100, "text", True, -1, False, out.fileno(), out.fileno()
        with pytest.raises(ValueError, match="the input became shorter while it was read"):
            _csrc.encode_lines(encoder.worker, *files)


def test_a_full_disk_is_an_oserror(tmp_path: Path, encoder: FastEncoder) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    path = tmp_path / "in.jsonl"
    path.write_bytes(GOOD[0] + b"\n")
    with (
        path.open("rb") as file,
        open("/dev/full", "wb", buffering=0) as full,
        pytest.raises(OSError, match="No space"),
    ):
        _csrc.encode_lines(encoder.worker, file.fileno(), 0, path.stat().st_size, "text", True, -1, False,
                           full.fileno(), full.fileno())  # fmt: skip
