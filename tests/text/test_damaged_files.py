"""Damaged inputs of preprocessing: an error that names the file, without outputs; or a skipped file."""

import bz2
import gzip
import json
import lzma
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megatron.data.indexed import IndexedTokens
from megatron.text import preprocess as module
from megatron.text.preprocess import PreprocessOptions, preprocess
from megatron.text.subset import DocumentSelection, subset_text
from megatron.text.text_readers import DamagedFileError, parse_text
from megatron.tokenizer.kinds import TokenizerSpec

RNG = random.Random(0)
TEXTS = [" ".join(str(RNG.randrange(1000)) for _ in range(RNG.randrange(40))) for _ in range(3000)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
GOOD = "".join(json.dumps({"text": str(i)}) + "\n" for i in range(50))
NULL = TokenizerSpec("NullTokenizer", vocab_size=1000)


def write_parquet(path: Path) -> None:
    pyarrow.parquet.write_table(
        pyarrow.table({"text": TEXTS}), path, row_group_size=500, write_page_checksum=True
    )


def write_arrow(path: Path) -> None:
    table = pyarrow.table({"text": TEXTS})
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=500)


WRITERS: dict[str, Callable[[Path], object]] = {
    "jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "jsonl.zst": lambda path: path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(LINES)),
    "jsonl.bz2": lambda path: path.write_bytes(bz2.compress(LINES)),
    "jsonl.xz": lambda path: path.write_bytes(lzma.compress(LINES)),
    "parquet": write_parquet,
    "arrow": write_arrow,
}


def flip_bytes(content: bytes, at: int) -> bytes:
    return content[:at] + bytes(byte ^ 0xFF for byte in content[at : at + 64]) + content[at + 64 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut after a byte": lambda content: content[:1],
    "cut in half": lambda content: content[: len(content) // 2],
    "cut before the last byte": lambda content: content[:-1],
    "empty": lambda content: b"",
    "other magic": lambda content: b"PK\x03\x04" + content[4:],
    "other kind": lambda content: LINES,
    "flipped early": lambda content: flip_bytes(content, 200),
    "flipped in the middle": lambda content: flip_bytes(content, len(content) // 2),
    "flipped at the end": lambda content: flip_bytes(content, len(content) - 64),
}
# Arrow streams have no checksum, so changed values are not detected. Readers accept a missing end marker.
UNSEEN = {
    ("arrow", name) for name in ("cut before the last byte", "flipped at the end", "flipped in the middle")
}


@pytest.fixture(params=WRITERS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_in_one_sentence_or_skipped(tmp_path: Path, kind: str, damage: str) -> None:
    bad, good = tmp_path / f"bad.{kind}", tmp_path / "good.jsonl"
    WRITERS[kind](bad)
    bad.write_bytes(DAMAGE[damage](bad.read_bytes()))
    good.write_text(GOOD)
    out = tmp_path / "out"
    out.mkdir()
    if (kind, damage) in UNSEEN:
        pytest.skip("the format does not show this damage")
    for inputs in ([str(bad)], [str(good), str(bad)]):
        with pytest.raises(ValueError) as caught:
            preprocess(inputs, out / "x", NULL, PreprocessOptions())
        assert str(caught.value).startswith(f"{bad}: ") or str(caught.value).startswith(f"{bad}, ")
        assert "\n" not in str(caught.value)
        assert list(out.iterdir()) == []
    totals = preprocess([str(bad), str(good)], out / "x", NULL, PreprocessOptions(skip_bad_lines=True))
    assert totals.outputs[0].n_documents == 50
    assert totals.rejected.n_files == 1 and totals.rejects is not None
    rejects = [json.loads(line) for line in totals.rejects.read_text().splitlines()]
    assert [(record["file"], record["line"]) for record in rejects] == [(str(bad), None)]
    sidecar = json.loads((out / "x_text_document.json").read_text())
    assert (sidecar["rejected_lines"], sidecar["rejected_files"]) == (0, 1)
    assert sidecar["sources"][0]["documents_read"] == 0
    assert sidecar["sources"][0]["damage"] == rejects[0]["reason"]
    tokens = IndexedTokens(out / "x_text_document")
    assert tokens.tokens.tolist() == list(range(50))


def test_flips_anywhere_end_in_a_sentence(tmp_path: Path, kind: str) -> None:
    whole = tmp_path / f"whole.{kind}"
    WRITERS[kind](whole)
    content, rng = whole.read_bytes(), random.Random(kind)
    bad, n_refused = tmp_path / f"bad.{kind}", 0
    out = tmp_path / "out"
    for trial in range(60):
        changed = bytearray(content)
        # half of the trials near the start or the end, where formats store their metadata
        at = rng.randrange(len(changed)) if trial % 2 else rng.choice([1, -1]) * rng.randrange(1, 400)
        changed[at] ^= 1 << rng.randrange(8)
        bad.write_bytes(changed)
        try:
            preprocess([str(bad)], out / "x", NULL, PreprocessOptions(overwrite=True))
        except ValueError as error:
            assert str(bad) in str(error)
            assert list(out.iterdir()) == [] or not any(p.name.startswith(".") for p in out.iterdir())
            n_refused += 1
    assert n_refused > 5


@pytest.mark.parametrize("n_workers", [1, 2])
def test_the_same_files_are_skipped_for_any_workers_and_encoder(
    tmp_path: Path, kind: str, n_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    files = []
    for i in range(3):
        path = tmp_path / f"{i}.{kind}"
        WRITERS[kind](path)
        if i == 1:
            path.write_bytes(DAMAGE["cut in half"](path.read_bytes()))
        files.append(str(path))
    spec = NULL if n_workers == 1 else "gpt2"  # the library in processes, and C++ in threads
    for words in (files, [files[0], files[2]]):
        options = PreprocessOptions(n_workers=n_workers, skip_bad_lines=True, quiet=True)
        preprocess(words, tmp_path / f"{len(words)}", spec, options)
    three, two = (IndexedTokens(tmp_path / f"{n}_text_document") for n in (3, 2))
    assert np.array_equal(three.tokens, two.tokens)
    assert three.n_documents == 2 * len(TEXTS)


def test_a_restart_skips_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(4):
        path = tmp_path / f"{i}.jsonl.gz"
        content = gzip.compress(LINES)
        path.write_bytes(content if i % 2 else flip_bytes(content, len(content) // 2))
    words, options = [str(tmp_path / "*.gz")], PreprocessOptions(skip_bad_lines=True)
    preprocess(words, tmp_path / "whole", NULL, options)
    take, calls = module.ShardJoiner.join_ready, []

    def stop(joining: module.ShardJoiner) -> None:
        take(joining)
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module.ShardJoiner, "join_ready", stop)
        with pytest.raises(KeyboardInterrupt):
            preprocess(words, tmp_path / "out", NULL, options)
    preprocess(words, tmp_path / "out", NULL, options)
    for suffix in ("bin", "idx"):
        resumed, other = (tmp_path / f"{name}_text_document.{suffix}" for name in ("out", "whole"))
        assert resumed.read_bytes() == other.read_bytes()
    lists = [(tmp_path / f"{name}.rejects.jsonl").read_text() for name in ("out", "whole")]
    assert lists[0] == lists[1] and len(lists[0].splitlines()) == 2


def test_a_subset_skips_damaged_files_too(tmp_path: Path, kind: str) -> None:
    for name in ("a", "b"):
        WRITERS[kind](tmp_path / f"{name}.{kind}")
    bad = tmp_path / f"a.{kind}"
    bad.write_bytes(DAMAGE["cut in half"](bad.read_bytes()))
    words, selection = [str(tmp_path / f"*.{kind}")], DocumentSelection(documents=10)
    if kind in ("jsonl.gz", "jsonl.zst", "parquet"):
        with pytest.raises(DamagedFileError, match=str(bad)):
            subset_text(words, tmp_path / "out.jsonl", DocumentSelection(documents=5000))
        assert not (tmp_path / "out.jsonl").exists()
    subset = subset_text(words, tmp_path / "out.jsonl", selection, skip_bad_lines=True)
    assert (subset.n_documents, subset.n_damaged) == (10, 1)
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == TEXTS[:10]


def test_the_command_ends_with_1_and_a_sentence(root: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl.gz"
    content = gzip.compress(LINES)
    bad.write_bytes(flip_bytes(content, len(content) // 2))
    tool = str(root / "tools" / "preprocess_data_many_cores.py")
    words = ["--input", bad, "--output-prefix", "x", "--root", tmp_path / "out", "--tokenizer-model", "gpt2"]
    done = subprocess.run(
        [sys.executable, tool, *map(str, words)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {bad}: got damaged content (")
    assert len(done.stderr.splitlines()) == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_only_strict_utf8_is_accepted_in_cpp_and_in_python(tmp_path: Path) -> None:
    rng = random.Random(1)
    odd = [
        b"\xed\xa0\xbd\xed\xb8\x80",
        b"\xed\xa0\x80",
        b"\xed\xbf\xbf",
        b"\xc0\x80",
        b"\xf4\x90\x80\x80",
        b"\xff",
    ]
    odd += ["é€😀\ue000\ud7ff\uffff".encode(), b"\xed\x9f\xbf", b"\xee\x80\x80", b"\xe2\x82", b"\x80"]
    bodies = [
        b"".join(rng.choices([*odd, b"a", b" b", b"\\ud83d\\ude00"], k=rng.randrange(1, 5)))
        for _ in range(2000)
    ]
    bodies += [bytes(rng.choices(range(0x80, 0x100), k=3)) for _ in range(2000)]
    expected = []
    for number, body in enumerate(bodies, 1):
        try:
            body.decode()
        except UnicodeDecodeError:
            expected.append(number)
    assert 500 < len(expected) < len(bodies) - 100
    lines = [b'{"text": "' + body + b'"}' for body in bodies]
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join(lines))
    totals = preprocess([str(source)], tmp_path / "fast", "gpt2", PreprocessOptions(skip_bad_lines=True))
    assert totals.rejects is not None
    rejects = [json.loads(line) for line in totals.rejects.read_text().splitlines()]
    assert [record["line"] for record in rejects] == expected
    assert all("not UTF-8" in record["reason"] for record in rejects)
    for number, line in enumerate(lines, 1):  # the parser in Python
        if number in set(expected):
            with pytest.raises(ValueError, match="not UTF-8"):
                parse_text(line, "text")
        else:
            parse_text(line, "text")


@pytest.mark.parametrize("spec", ["gpt2", NULL])
def test_a_row_that_is_not_utf8_is_named(tmp_path: Path, spec: str | TokenizerSpec) -> None:
    values = pyarrow.array([b"1", b"2", b"\xed\xa0\x80", b"4"], pyarrow.binary())
    column = pyarrow.Array.from_buffers(pyarrow.string(), 4, values.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "in.parquet")
    source = str(tmp_path / "in.parquet")
    with pytest.raises(ValueError, match="in.parquet, row 3: .*not UTF-8"):
        preprocess([source], tmp_path / "x", spec, PreprocessOptions())
    totals = preprocess([source], tmp_path / "x", spec, PreprocessOptions(skip_bad_lines=True))
    assert (totals.outputs[0].n_documents, totals.n_rejected, totals.rejected.n_files) == (3, 1, 0)
