"""Preprocessing: every kind of input gives the ids of the tokenizer's library, in the order of the input."""

import gzip
import io
import json
import sys
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest

from megatron.cli import format_si
from megatron.data.indexed import IndexedTokens
from megatron.data.sidecar import read_sidecar
from megatron.mixture.records import replace_lone_surrogates
from megatron.text import preprocess as module
from megatron.text.inputs import Part, find_inputs, parse_part, select_part
from megatron.text.preprocess import PreprocessOptions, estimate_job, preprocess
from megatron.text.split import split_dataset, split_documents
from megatron.text.text_readers import iter_lines, parse_text, split_into_pieces
from megatron.tokenizer.bpe import load_hf_tokenizer
from megatron.tokenizer.kinds import TokenizerSpec
from tests.datasets import read_documents, write_texts
from tests.text.preprocessing import FILES, LINES, PLAIN, RECORDS, RNG, WORDS, run
from tests.wrong_values import read_refusal

NULL = TokenizerSpec("NullTokenizer", vocab_size=70_000)  # has no C++ encoder: texts are numbers


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 20_000)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def read_output(prefix: Path, key: str = "text") -> list[list[int]]:
    return read_documents(f"{prefix}_{key}_document")


@cache
def encode_by_library(tokenizer: str, key: str = "text") -> list[list[int]]:
    encodings = load_hf_tokenizer(tokenizer).inner.encode_batch([record[key] for record in RECORDS])
    return [encoding.ids for encoding in encodings]


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_input_gives_the_ids_of_the_library(inputs: Path, tokenizer: str, name: str) -> None:
    for keys in (("text",), ("text", "url")):
        result = run(inputs / name, inputs / f"out{len(keys)}", tokenizer, keys=keys, n_workers=2)
        for key, output in zip(keys, result.outputs, strict=True):
            assert read_output(inputs / f"out{len(keys)}", key) == encode_by_library(tokenizer, key)
            assert output.n_empty == sum(not record[key] for record in RECORDS)
    assert not list(inputs.glob(".out*"))


def test_a_tokenizer_without_cpp_code_is_used_by_its_library(tmp_path: Path) -> None:
    texts = [" ".join(str((i * j) % 70_000) for j in range(i % 60)) for i in range(400)]
    source = write_texts(tmp_path / "n.jsonl", texts)
    for n_workers in (1, 2):
        run(source, tmp_path / f"x{n_workers}", NULL, n_workers=n_workers)
        assert read_output(tmp_path / f"x{n_workers}") == [list(map(int, text.split())) for text in texts]


def test_standard_input_and_long_lines_are_read(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "one fish two fish " * 60_000  # several blocks of a stream
    lines = (json.dumps({"text": text}) + '\n\n{"text": "end"}').encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    run([Path("-")], tmp_path / "x", tokenizer)
    encoded = load_hf_tokenizer(tokenizer).inner.encode_batch([text, "end"])
    assert read_output(tmp_path / "x") == [encoding.ids for encoding in encoded]
    sidecar = read_sidecar(tmp_path / "x_text_document")
    assert (sidecar["sources"], sidecar["job"]) == ([{"path": "-", "documents_read": 2}], None)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz", "a.parquet"])
def test_max_tokens_keeps_the_fewest_first_documents(inputs: Path, tokenizer: str, name: str) -> None:
    documents = encode_by_library(tokenizer)
    ends = np.cumsum([len(ids) for ids in documents])
    for first in (0, 360, 891):
        for max_tokens in (int(ends[first]), int(ends[first]) + 1):
            run(inputs / name, inputs / "x", tokenizer, max_tokens=max_tokens, n_workers=2, overwrite=True)
            n = int(np.searchsorted(ends, max_tokens)) + 1
            assert read_output(inputs / "x") == documents[:n]
            assert read_sidecar(inputs / "x_text_document")["sources"][0]["documents_read"] == n


@pytest.mark.parametrize(("packing", "n_workers"), [("", 1), ("", 3), (".gz", 3)])
def test_bad_lines_are_an_error_or_are_listed(
    tmp_path: Path, tokenizer: str, packing: str, n_workers: int
) -> None:
    lines = [*LINES]
    bad = {200: "not json", 350: '{"url": "fish"}', 351: '{"text": 3, "url": "a"}'}
    bad[800] = '{"text": "\xff", "url": ""}'
    for i, line in bad.items():
        lines[i] = line
    lines[400] = "  "  # not a document
    path = tmp_path / f"b.jsonl{packing}"
    encoded = [line.encode("latin-1" if i == 800 else "utf-8") for i, line in enumerate(lines)]
    content = b"".join(line + b"\n" for line in encoded)
    path.write_bytes(gzip.compress(content) if packing else content)
    job = partial(run, path, tokenizer=tokenizer, n_workers=n_workers)
    with pytest.raises(ValueError, match=r"b.jsonl\S*, line 201: not JSON "):
        job(prefix=tmp_path / "x")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    result = job(prefix=tmp_path / "x", skip_bad_lines=True, keys=("text", "url"))
    rejects = [json.loads(line) for line in (tmp_path / "x.rejects.jsonl").read_text().splitlines()]
    assert [reject["line"] for reject in rejects] == [i + 1 for i in bad]
    assert [reject["reason"].split(" (")[0] for reject in rejects] == [
        "not JSON", "no key 'text'; it has 'url'", "'text' is int, expected a string", "not UTF-8",
    ]  # fmt: skip
    assert (result.rejected.n_lines, result.rejected.n_files) == (4, 0)
    for key in ("url", "text"):  # a line without one of them is rejected for both
        expected = [ids for i, ids in enumerate(encode_by_library(tokenizer, key)) if i not in (*bad, 400)]
        assert read_output(tmp_path / "x", key) == expected
    # the error after the documents that are used is not raised
    job(prefix=tmp_path / "y", max_tokens=len(sum(expected[:150], [])))
    assert read_output(tmp_path / "y") == expected[:150]


@pytest.mark.parametrize("name", [name for name in FILES if name != "a.jsonl"])
def test_a_damaged_file_fails_or_is_skipped_as_a_whole(inputs: Path, tokenizer: str, name: str) -> None:
    content, path = FILES[name], inputs / f"damaged-{name}"
    for damaged in (content[: len(content) // 2], content[: len(content) // 2] + b"\x55" * 40, b""):
        path.write_bytes(damaged)
        sentence = rf"damaged-{name}: got damaged content .* with --on-error skip\."
        with pytest.raises(ValueError, match=sentence):
            run([path, inputs / "a.jsonl"], inputs / "y", tokenizer)
        result = run([path, inputs / "a.jsonl"], inputs / "x", tokenizer, skip_bad_lines=True, overwrite=True)
        assert (result.rejected.n_lines, result.rejected.n_files) == (0, 1)
        assert read_output(inputs / "x") == encode_by_library(tokenizer)
        (reject,) = map(json.loads, (inputs / "x.rejects.jsonl").read_text().splitlines())
        assert reject["file"] == str(path) and reject["line"] is None


def test_a_line_is_parsed_as_json_does_and_surrogates_are_replaced() -> None:
    for text in (*WORDS, "\ud83d\udc1f", "\ud83d", "a\udc1fb", "\\ud83d"):
        line = json.dumps({"text": text}).encode()
        units = json.loads(line)["text"].encode("utf-16-le", "surrogatepass")
        expected = units.decode("utf-16-le", "replace")
        assert parse_text(line, "text") == expected
        assert json.loads(replace_lone_surrogates(line))["text"] == expected


REFUSALS = [
    ({}, ["nothing.jsonl"], "nothing.jsonl: no such file, and no folder or pattern"),
    ({}, ["a.jsonl", "a.jsonl"], "a.jsonl: got this file twice"),
    ({}, ["x.zip"], "x.zip: got another format, expected one of .jsonl"),
    ({}, ["empty.jsonl"], "empty.jsonl: got no document"),
    ({}, ["splits"], "splits: got a folder with several splits"),
    ({"keys": ("text", "text")}, ["a.jsonl"], "json keys: got a key twice"),
    ({"keys": ("a/b",)}, ["a.jsonl"], "json keys: got 'a/b', expected a key without a slash"),
    ({"keys": ("none",)}, ["a.parquet"], "a.parquet: no column 'none'; it has text, url"),
    ({"keys": ("none",)}, ["a.jsonl"], "a.jsonl, line 1: no key 'none'; it has 'text', 'url'"),
    ({"n_workers": 0}, ["a.jsonl"], "workers: got 0, expected 1 or more"),
    ({"part": Part(1, 2)}, ["-"], "--part: got standard input"),
    ({"part": Part(1, 2), "max_tokens": 5}, ["a.jsonl"], "--max-tokens: got it with --part"),
    ({"overwrite": True}, ["z_text_document.json"], "z_text_document.json: is an input, and would be"),
]


@pytest.fixture
def odd_inputs(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of inputs, with others that are refused, as the current folder."""
    (inputs / "splits").mkdir()
    (inputs / "splits/dataset_dict.json").write_text('{"splits": ["train"]}')
    (inputs / "empty.jsonl").write_text("\n\n")
    (inputs / "x.zip").write_bytes(b"PK")
    (inputs / "z_text_document.json").write_text('{"text": "a"}\n')
    monkeypatch.chdir(inputs)
    return inputs


def test_a_wrong_job_is_refused_in_a_sentence_and_leaves_nothing(odd_inputs: Path, tokenizer: str) -> None:
    before = sorted(odd_inputs.rglob("*"))
    for options, words, sentence in REFUSALS:
        prefix = Path("z" if options.get("overwrite") else "x")
        job = partial(preprocess, words, prefix, tokenizer, PreprocessOptions(quiet=True, **options))
        assert str(read_refusal(job)).startswith(sentence)
        assert sorted(odd_inputs.rglob("*")) == before


def test_folders_and_patterns_skip_hidden_files_and_outputs(inputs: Path, tokenizer: str) -> None:
    run(inputs / "a.jsonl", inputs / "x", tokenizer)
    (inputs / ".hidden.jsonl").write_bytes(PLAIN)
    (inputs / "link").symlink_to(inputs)
    assert find_inputs([str(inputs)]) == sorted(inputs / name for name in FILES)
    assert find_inputs([str(inputs / "*.json*")]) == sorted(inputs / n for n in FILES if ".json" in n)
    saved = inputs / "saved"
    saved.mkdir()
    for name in ("data.arrow", "cache.arrow"):
        (saved / name).write_bytes(FILES["a.arrow"])
    (saved / "dataset_info.json").write_text("{}")
    (saved / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    assert find_inputs([str(saved)]) == [saved / "data.arrow"]


@pytest.mark.parametrize("n_parts", [1, 7, 30])
def test_the_parts_in_order_are_the_output_of_one_job(inputs: Path, tokenizer: str, n_parts: int) -> None:
    paths = [inputs / "a.jsonl", inputs / "a.json.gz", inputs / "a.parquet"]
    documents = []
    for number in range(1, n_parts + 1):
        part = Part(number, n_parts)
        run(paths, inputs / "p", tokenizer, part=part)
        documents += read_output(part.add_to(inputs / "p"))
    assert documents == encode_by_library(tokenizer) * 3


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000, 1 << 30])
def test_pieces_have_every_line_once(tmp_path: Path, piece_bytes: int) -> None:
    lines = [b"a" * RNG.randrange(20) for _ in range(100)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    pieces = split_into_pieces([tmp_path / "a.jsonl"], piece_bytes)
    read = [line for piece in pieces for _, line in iter_lines(piece)]
    assert read == (lines if lines[-1] else lines[:-1])
    selection = select_part([tmp_path / "a.jsonl"], Part(1, 1))
    assert (selection.paths, selection.ranges) == ([tmp_path / "a.jsonl"], {})


def test_a_part_outside_its_count_is_refused() -> None:
    for word in ("0/3", "4/3", "1", "a/b", "1/100000"):
        with pytest.raises(Exception, match=f"got '{word}', expected I/N"):
            parse_part(word)


def test_a_dry_run_estimates_the_tokens_and_writes_nothing(inputs: Path, tokenizer: str) -> None:
    before = sorted(inputs.rglob("*"))
    for name in ("a.jsonl", "a.json.gz", "a.parquet"):
        words = estimate_job([str(inputs / name)], inputs / "x", tokenizer, PreprocessOptions())
        n_tokens = sum(len(ids) for ids in encode_by_library(tokenizer)) / 1000
        assert f"1 files, {format_si(len(FILES[name]))}B to read; expected {n_tokens:.1f}k tokens" in words
    assert sorted(inputs.rglob("*")) == before


def test_a_split_has_the_shares_of_the_documents(inputs: Path, tokenizer: str) -> None:
    assert split_documents(2000, [949, 50, 1]) == [(0, 1898), (1898, 1998), (1998, 2000)]  # type: ignore[list-item]
    run(inputs / "a.jsonl", inputs / "x", tokenizer)
    split_dataset(inputs / "x_text_document", inputs / "y", [2, 0, 1], quiet=True)  # type: ignore[list-item]
    documents = encode_by_library(tokenizer)
    first, second = (IndexedTokens(inputs / f"y_{name}").document_tokens for name in ("train", "test"))
    assert [*first, *second] == [len(ids) for ids in documents] and len(first) == 600
