"""Subsets of a corpus, against counts of the `tokenizers` library."""

import functools
import gzip
import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from tokenizers import ByteLevelBPETokenizer

from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter
from megatron.io import atomic_path
from megatron.text import subset as module
from megatron.text.inspect_dataset import find_faults
from megatron.text.preprocess import PreprocessOptions, preprocess
from megatron.text.subset import Document, DocumentSelection
from megatron.tokenizer.encoder import (
    NO_EOD,
    Encoder,
    FastEncoder,
    LibraryEncoder,
    build_fast_bpe,
    encode_with_location,
)
from megatron.tokenizer.kinds import TokenizerSpec, load_tokenizer

subset_text = functools.partial(
    module.subset_text, overwrite=True
)  # tests write the same output several times
subset_pair = functools.partial(module.subset_dataset, overwrite=True)


@pytest.fixture(scope="module")
def c4(scaling_data: Path) -> Path:
    return scaling_data / "c4" / "c4_en_shard00000_first1000.jsonl"


@pytest.fixture(scope="module")
def lengths(scaling_data: Path, c4: Path) -> list[int]:
    """Tokens of each document, counted by the library without our code."""
    gpt2 = scaling_data / "gpt2_tokenizer"
    reference = ByteLevelBPETokenizer(str(gpt2 / "vocab.json"), str(gpt2 / "merges.txt"))
    texts = [json.loads(line)["text"] for line in c4.read_bytes().splitlines()[:300]]
    return [len(encoding.ids) for encoding in reference.encode_batch(texts)]


def make_counter(encoder: Encoder, eod: int) -> Callable[[Document], int]:
    return lambda document: len(encode_with_location(encoder, [document.text], [document.location], eod)[0])


@pytest.fixture(scope="module")
def counters(scaling_data: Path) -> dict[bool, Callable[[Document], int]]:
    """Counters without and with the end-of-document token."""
    loaded = load_tokenizer(str(scaling_data / "gpt2_tokenizer"))
    fast, _ = build_fast_bpe(loaded)
    assert fast is not None
    return {eod: make_counter(FastEncoder(fast), loaded.eod_id if eod else NO_EOD) for eod in (False, True)}


def write_documents(path: Path, n: int) -> list[bytes]:
    """Write n distinct documents."""
    lines = [json.dumps({"text": f"document {i}"}).encode() for i in range(n)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return lines


def write_dataset(path: Path, documents: list[list[int]]) -> Path:
    with IndexedWriter(path, np.dtype(np.uint16)) as writer:
        for ids in documents:
            writer.add_document(ids)
    return path


def read_lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def select(source: Path, counter: Callable[[Document], int] | None = None, **selection: Any) -> list[bytes]:
    """Return the selected lines of a file."""
    out = source.with_name("out.jsonl")
    subset_text([str(source)], out, DocumentSelection(**selection), counter)
    return read_lines(out)


@pytest.mark.parametrize("append_eod", [False, True])
def test_tokens_and_documents_select_first_documents_exactly(
    tmp_path: Path, c4: Path, lengths: list, counters: dict, append_eod: bool
) -> None:
    out, counter = tmp_path / "out.jsonl", counters[append_eod]
    for n in (1, 127, 128, 129, 250):  # near the ends of encoding batches
        end = sum(lengths[:n]) + n * append_eod
        result = subset_text([str(c4)], out, DocumentSelection(documents=n), counter)
        assert (result.n_documents, result.n_tokens, read_lines(out)) == (n, end, read_lines(c4)[:n])
        for requested, expected in ((end - 1, n), (end, n), (end + 1, n + 1)):
            result = subset_text([str(c4)], out, DocumentSelection(tokens=requested), counter)
            assert (result.n_documents, len(read_lines(out))) == (expected, expected)
            assert result.n_tokens == sum(lengths[:expected]) + expected * append_eod


@pytest.mark.parametrize("append_eod", [False, True])
def test_a_tokenised_subset_equals_max_tokens_and_the_subset_of_the_dataset(
    tmp_path: Path, scaling_data: Path, c4: Path, counters: dict, append_eod: bool
) -> None:
    gpt2 = str(scaling_data / "gpt2_tokenizer")
    options = {"append_eod": append_eod, "quiet": True}
    subset_text([str(c4)], tmp_path / "part.jsonl", DocumentSelection(tokens=50_000), counters[append_eod])
    preprocess([str(tmp_path / "part.jsonl")], tmp_path / "a", gpt2, PreprocessOptions(**options))
    preprocess([str(c4)], tmp_path / "b", gpt2, PreprocessOptions(**options, max_tokens=50_000))
    preprocess([str(c4)], tmp_path / "all", gpt2, PreprocessOptions(**options))
    subset_pair(
        tmp_path / "all_text_document", tmp_path / "c_text_document", DocumentSelection(tokens=50_000)
    )
    for suffix in ("bin", "idx"):
        contents = {(tmp_path / f"{name}_text_document.{suffix}").read_bytes() for name in "abc"}
        assert len(contents) == 1
    meta = json.loads((tmp_path / "c_text_document.json").read_text())
    assert meta["tokenizer"]["eod_id"] == 50256
    assert meta["selection"] == {"tokens": 50_000}
    assert meta["append_eod"] is append_eod
    assert list(find_faults(tmp_path / "c_text_document")) == []


def test_a_sample_keeps_the_order_and_follows_the_seed(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = write_documents(source, 1000)
    samples = [select(source, sample=Fraction(1, 10), seed=seed) for seed in (3, 3, 4)]
    assert samples[0] == samples[1] != samples[2]
    assert samples[0] == [line for line in lines if line in set(samples[0])]
    assert abs(len(samples[0]) - 100) < 5 * math.sqrt(1000 * 0.1 * 0.9)


def test_a_sample_of_a_dataset_is_that_of_its_text_and_contains_smaller_ones(tmp_path: Path) -> None:
    lines = write_documents(tmp_path / "in.jsonl", 500)
    pair = write_dataset(tmp_path / "pair", [[i] * (i % 3 + 1) for i in range(500)])
    before: set[int] = set()
    for sample in (1, 10, Fraction(1, 5), Fraction(1, 2), 400, 500):
        subset_pair(pair, tmp_path / "out", DocumentSelection(sample=sample, seed=9))
        part = IndexedTokens(tmp_path / "out")
        documents = [part.get_document(k).tolist() for k in range(part.n_documents)]
        chosen = [ids[0] for ids in documents]
        assert documents == [[i] * (i % 3 + 1) for i in chosen] and chosen == sorted(chosen)
        if isinstance(sample, int):
            assert len(chosen) == sample
        else:
            text = select(tmp_path / "in.jsonl", sample=sample, seed=9)
            assert chosen == [lines.index(line) for line in text]
        assert before < set(chosen)
        before = set(chosen)


def test_each_kind_of_input_and_output_has_the_same_lines(tmp_path: Path, scaling_data: Path) -> None:
    unzstd = zstandard.ZstdDecompressor().decompressobj().decompress
    sources = sorted((scaling_data / "c4").glob("olmo_c4-sample.*.json.gz"))
    expected = [line for path in sources for line in gzip.decompress(path.read_bytes()).splitlines()][:15]
    for suffix, unpack in ((".jsonl", bytes), (".json.gz", gzip.decompress), (".jsonl.zst", unzstd)):
        out = tmp_path / f"out{suffix}"
        subset_text([str(path) for path in sources], out, DocumentSelection(documents=15))
        assert unpack(out.read_bytes()) == b"".join(line + b"\n" for line in expected)
        subset_text([str(out)], tmp_path / "again.jsonl", DocumentSelection(documents=15))
        assert read_lines(tmp_path / "again.jsonl") == expected
    texts = ["one", "tw\u00f6 \U0001f41f", "", "four\n"]
    rows, out = tmp_path / "rows.parquet", tmp_path / "rows.jsonl"
    pyarrow.parquet.write_table(pyarrow.table({"body": texts}), rows)
    subset_text([str(rows)], out, DocumentSelection(documents=3), key="body")
    assert [json.loads(line)["body"] for line in read_lines(out)] == texts[:3]


def test_a_line_keeps_its_bytes_and_blank_lines_are_not_documents(tmp_path: Path) -> None:
    odd = [b' { "text":"a\\u00e9\\ud800" , "n":1e3}\t', '{"text": "\u00e9"}'.encode(), b'{"text":""}']
    (tmp_path / "in.jsonl").write_bytes(b"\n" + odd[0] + b"\n  \n" + odd[1] + b"\r\n" + odd[2])
    select(tmp_path / "in.jsonl", documents=3)
    assert (tmp_path / "out.jsonl").read_bytes() == b"".join(line + b"\n" for line in odd)


def test_a_bad_line_is_named_and_lines_after_the_end_are_not_read(tmp_path: Path, counters: dict) -> None:
    lines = write_documents(tmp_path / "in.jsonl", 10)
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join([*lines[:4], b'{"body": 1}', *lines[4:]]))
    n_tokens = 2 * 4  # "document 0" is 2 tokens in GPT-2
    assert len(select(source, counters[False], tokens=n_tokens)) == 4
    out.unlink()
    for name, n in (("documents", 5), ("tokens", n_tokens + 1)):
        selection = DocumentSelection(**{name: n})
        with pytest.raises(ValueError, match=r"in.jsonl, line 5: no key 'text'; it has 'body'"):
            subset_text([str(source)], out, selection, counters[False])
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_too_little_input_is_an_error_and_an_older_output_stays(tmp_path: Path, counters: dict) -> None:
    write_documents(tmp_path / "in.jsonl", 10)
    write_dataset(tmp_path / "pair", [[0, 0]] * 10)
    out = tmp_path / "out.jsonl"
    out.write_text("older")
    before = sorted(tmp_path.iterdir())
    for selection, sentence in (
        (DocumentSelection(documents=11), "got 10 documents, expected 11. Request fewer"),
        (DocumentSelection(tokens=21), "got 20 tokens, expected 21. Request fewer"),
    ):
        with pytest.raises(ValueError, match=sentence):
            subset_text([str(tmp_path / "in.jsonl")], out, selection, counters[False])
        with pytest.raises(ValueError, match=sentence):
            subset_pair(tmp_path / "pair", tmp_path / "part", selection)
    assert out.read_text() == "older" and sorted(tmp_path.iterdir()) == before


def test_an_output_over_its_input_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_documents(tmp_path / "in.jsonl", 2)
    write_dataset(tmp_path / "pair", [[1]])
    first, tokens = DocumentSelection(documents=1), DocumentSelection(tokens=1)
    for name, selection, sentence in (
        ("in.jsonl", first, "is one of the inputs"),
        ("out.txt", first, "expected a name that ends in"),
        ("out.jsonl", tokens, "Give --tokenizer-model"),
        ("out.jsonl", DocumentSelection(sample=1), "got 1 documents of text, expected a share such as 0.1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            subset_text([str(tmp_path / "in.jsonl")], tmp_path / name, selection)
    with pytest.raises(ValueError, match="out.jsonl: got the name of a text file"):
        subset_pair(tmp_path / "pair", tmp_path / "out.jsonl", first)
    assert len(read_lines(tmp_path / "in.jsonl")) == 2


def test_a_document_that_its_tokenizer_cannot_encode_is_named(tmp_path: Path) -> None:
    texts = ["1 2 3"] * 200 + ["4 five"] + ["6"] * 5
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    counter = make_counter(
        LibraryEncoder(load_tokenizer(TokenizerSpec("NullTokenizer", vocab_size=10))), NO_EOD
    )
    with pytest.raises(ValueError, match=r"in.jsonl, line 201: NullTokenizer: got 'five'"):
        subset_text([str(source)], tmp_path / "out.jsonl", DocumentSelection(documents=205), counter)


def test_an_existing_output_is_not_replaced_without_overwrite(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"text": "a"}\n{"text": "b"}\n')
    out.write_text("hours of work")
    with pytest.raises(ValueError, match="out.jsonl: exists already"):
        module.subset_text([str(source)], out, DocumentSelection(documents=1))
    assert out.read_text() == "hours of work"
    write_dataset(tmp_path / "pair", [[i] for i in range(5)])
    three = DocumentSelection(documents=3)
    assert module.subset_dataset(tmp_path / "pair", tmp_path / "part", three).n_documents == 3
    before = (tmp_path / "part.bin").stat().st_ino
    assert module.subset_dataset(tmp_path / "pair", tmp_path / "part", three).n_tokens == 3
    assert (tmp_path / "part.bin").stat().st_ino == before  # same selection: nothing to do
    with pytest.raises(ValueError, match="part.bin: exists already"):
        module.subset_dataset(tmp_path / "pair", tmp_path / "part", DocumentSelection(documents=2))
    assert subset_pair(tmp_path / "pair", tmp_path / "part", DocumentSelection(documents=2)).n_documents == 2


def test_a_second_process_with_the_same_output_is_refused(tmp_path: Path) -> None:
    write_documents(tmp_path / "in.jsonl", 9)
    out = tmp_path / "out.jsonl"
    with atomic_path(out, exclusive=True) as partial:  # as another process that writes the subset
        partial.write_text("theirs")
        with pytest.raises(ValueError, match=r"out\.jsonl: in use by another process"):
            subset_text([str(tmp_path / "in.jsonl")], out, DocumentSelection(documents=3))
        assert partial.read_text() == "theirs"
    assert out.read_text() == "theirs"
    assert not list(tmp_path.glob("*.partial"))
