"""Subsets of a corpus, against counts of the `tokenizers` library."""

import gzip
import json
import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from tokenizers import ByteLevelBPETokenizer

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
from tests.datasets import read_documents, write_dataset, write_texts

# tests write the same output several times
subset_text = partial(module.subset_text, overwrite=True)
subset_dataset = partial(module.subset_dataset, overwrite=True)


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


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of 1,000 distinct documents; the first ten have 2 tokens in GPT-2's vocabulary."""
    return Path(write_texts(tmp_path / "in.jsonl", (f"document {i}" for i in range(1000))))


def read_lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def select(source: Path, counter: Callable[[Document], int] | None = None, **selection: Any) -> list[bytes]:
    """Return the selected lines of a file."""
    out = source.with_name("out.jsonl")
    subset_text([str(source)], out, DocumentSelection(**selection), counter)
    return read_lines(out)


@pytest.mark.parametrize("append_eod", [False, True])
def test_tokens_and_documents_select_first_documents_exactly(
    tmp_path: Path, c4: Path, lengths: list[int], counters: dict, append_eod: bool
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
    selection, part = DocumentSelection(tokens=50_000), tmp_path / "part.jsonl"
    subset_text([str(c4)], part, selection, counters[append_eod])
    for name, text, limit in (("a", part, None), ("b", c4, 50_000), ("all", c4, None)):
        options = PreprocessOptions(append_eod=append_eod, quiet=True, max_tokens=limit)
        preprocess([str(text)], tmp_path / name, str(scaling_data / "gpt2_tokenizer"), options)
    subset_dataset(tmp_path / "all_text_document", tmp_path / "c_text_document", selection)
    for suffix in ("bin", "idx"):
        assert len({(tmp_path / f"{name}_text_document.{suffix}").read_bytes() for name in "abc"}) == 1
    meta = json.loads((tmp_path / "c_text_document.json").read_text())
    assert (meta["tokenizer"]["eod_id"], meta["selection"]) == (50256, {"tokens": 50_000})
    assert meta["append_eod"] is append_eod
    assert list(find_faults(tmp_path / "c_text_document")) == []


def test_a_sample_keeps_the_order_and_follows_the_seed(source: Path) -> None:
    samples = [select(source, sample=Fraction(1, 10), seed=seed) for seed in (3, 3, 4)]
    assert samples[0] == samples[1] != samples[2]
    assert samples[0] == [line for line in read_lines(source) if line in set(samples[0])]
    assert abs(len(samples[0]) - 100) < 5 * math.sqrt(1000 * 0.1 * 0.9)


def test_a_sample_of_a_dataset_is_that_of_its_text(source: Path, tmp_path: Path) -> None:
    pair = Path(write_dataset(tmp_path / "pair", ([i] * (i % 3 + 1) for i in range(1000))))
    lines, before = read_lines(source), set[int]()
    for sample in (1, 10, Fraction(1, 5), Fraction(1, 2), 900, 1000):
        subset_dataset(pair, tmp_path / "out", DocumentSelection(sample=sample, seed=9))
        documents = read_documents(tmp_path / "out")
        chosen = [ids[0] for ids in documents]
        assert documents == [[i] * (i % 3 + 1) for i in chosen] and chosen == sorted(chosen)
        if isinstance(sample, int):
            assert len(chosen) == sample
        else:
            assert [lines[i] for i in chosen] == select(source, sample=sample, seed=9)
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


def test_a_bad_line_is_named_if_it_is_read(source: Path, tmp_path: Path, counters: dict) -> None:
    lines = read_lines(source)
    source.write_bytes(b"\n".join([*lines[:4], b'{"body": 1}', *lines[4:]]))
    assert len(select(source, counters[False], tokens=2 * 4)) == 4
    (tmp_path / "out.jsonl").unlink()
    for selection in ({"documents": 5}, {"tokens": 2 * 4 + 1}):
        with pytest.raises(ValueError, match=r"in.jsonl, line 5: no key 'text'; it has 'body'"):
            select(source, counters[False], **selection)
    write_texts(source, ["1 2 3"] * 200 + ["4 five"] + ["6"] * 5)
    null = LibraryEncoder(load_tokenizer(TokenizerSpec("NullTokenizer", vocab_size=10)))
    with pytest.raises(ValueError, match=r"in.jsonl, line 201: NullTokenizer: got 'five'"):
        select(source, make_counter(null, NO_EOD), documents=205)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_refused_selection_changes_no_file(tmp_path: Path, counters: dict) -> None:
    source = write_texts(tmp_path / "in.jsonl", (f"document {i}" for i in range(10)))
    pair = Path(write_dataset(tmp_path / "pair", [[0, 0]] * 10))
    (tmp_path / "older.jsonl").write_text("older")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    text, dataset = partial(subset_text, [source], count=counters[False]), partial(subset_dataset, pair)
    few_documents, few_tokens = "got 10 documents, expected 11. Request", "got 20 tokens, expected 21."
    for write, name, selection, sentence in (
        (text, "older.jsonl", {"documents": 11}, few_documents),
        (text, "older.jsonl", {"tokens": 21}, few_tokens),
        (text, "in.jsonl", {"documents": 1}, "is one of the inputs"),
        (partial(text, overwrite=False), "older.jsonl", {"documents": 1}, "older.jsonl: exists already"),
        (text, "out.txt", {"documents": 1}, "expected a name that ends in"),
        (text, "new.jsonl", {"sample": 1}, "got 1 documents of text, expected a share such as 0.1"),
        (partial(text, count=None), "new.jsonl", {"tokens": 1}, "Give --tokenizer-model"),
        (dataset, "new", {"documents": 11}, few_documents),
        (dataset, "new", {"tokens": 21}, few_tokens),
        (dataset, "out.jsonl", {"documents": 1}, "out.jsonl: got the name of a text file"),
    ):
        with pytest.raises(ValueError, match=sentence):
            write(tmp_path / name, DocumentSelection(**selection))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_finished_subset_of_a_dataset_is_not_written_again(tmp_path: Path) -> None:
    pair, part = Path(write_dataset(tmp_path / "pair", [[i] for i in range(5)])), tmp_path / "part"
    two, three = DocumentSelection(documents=2), DocumentSelection(documents=3)
    assert module.subset_dataset(pair, part, three).n_documents == 3
    before = (tmp_path / "part.bin").stat().st_ino
    assert module.subset_dataset(pair, part, three).n_tokens == 3
    assert (tmp_path / "part.bin").stat().st_ino == before
    with pytest.raises(ValueError, match="part.bin: exists already"):
        module.subset_dataset(pair, part, two)
    assert subset_dataset(pair, part, two).n_documents == 2


def test_a_second_process_with_the_same_output_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with atomic_path(out, exclusive=True) as partial_path:  # as another process that writes the subset
        partial_path.write_text("theirs")
        with pytest.raises(ValueError, match=r"out\.jsonl: in use by another process"):
            select(source, documents=3)
        assert partial_path.read_text() == "theirs"
    assert out.read_text() == "theirs"
    assert not list(tmp_path.glob("*.partial"))
