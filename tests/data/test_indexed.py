"""The .bin/.idx format: Megatron's own files, broken files, and sidecars with a field of a wrong type."""

import gzip
import json
import math
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import open_dataset
from megatron.data.indexed import DTYPES, IndexedTokens
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.sidecar import DTYPE_NAMES, FIELDS, HEADER, MAGIC, count_token_bytes, read_sidecar
from megatron.plan.datapaths import read_data_paths
from megatron.text.inspect_dataset import find_faults
from megatron.text.merge import merge_datasets
from megatron.tokenizer.bpe import BpeTokenizer, build_gpt2_tokenizer
from tests.datasets import read_documents, write_dataset
from tests.wrong_values import read_refusal

OPENWEBTEXT = "megatron_openwebtext/meg-gpt2-openwebtext_text_document"


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Three documents of 3, 0 and 4 tokens."""
    return Path(write_dataset(tmp_path / "pair", [[5, 6, 7], [], [1, 2, 3, 65535]]))


def test_megatrons_dataset_reads_back_to_its_documents(scaling_data: Path) -> None:
    folder = scaling_data / "megatron_openwebtext"
    inner = build_gpt2_tokenizer(folder / "gpt2-tiny-vocab.json", folder / "gpt2-tiny-merges.txt")
    tokenizer = BpeTokenizer(inner, "tiny")
    with gzip.open(folder / "openwebtext-1000.decoded.jsonl.gz", "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    tokens = IndexedTokens(scaling_data / OPENWEBTEXT)
    assert (tokens.n_documents, tokens.n_tokens, len(texts)) == (1000, 1_361_845, 1000)
    for i, text in enumerate(texts):
        ids = tokens.get_document(i)
        assert ids[-1] == tokenizer.eod_id == 4999
        assert tokenizer.decode(ids[:-1]) == text


def test_writing_megatrons_tokens_again_gives_the_same_bytes(scaling_data: Path, tmp_path: Path) -> None:
    for name in (OPENWEBTEXT, "megatron_openwebtext/ag_news_prompt_inputs_document"):
        source = scaling_data / name
        tokens = IndexedTokens(source)
        with IndexedWriter(tmp_path / "again", tokens.dtype) as writer:
            writer.add_dataset(tokens, lambda n_tokens: None)
        for suffix in (".bin", ".idx"):
            assert (tmp_path / f"again{suffix}").read_bytes() == Path(f"{source}{suffix}").read_bytes()


def test_written_tokens_are_read_across_documents(pair: Path) -> None:
    tokens = IndexedTokens(pair)
    assert tokens.document_tokens.tolist() == [3, 0, 4]
    assert tokens.tokens[1:5].tolist() == tokens.read_copy(1, 4).tolist() == [6, 7, 1, 2]
    assert tokens.sidecar is not None
    assert (tokens.sidecar["tokens"], tokens.sidecar["empty_documents"]) == (7, 1)
    with pytest.raises(IndexError, match="no document 3, the file has 3"):
        tokens.get_document(3)
    sent = pickle.dumps(tokens)  # its prefix
    assert len(sent) < 300
    assert pickle.loads(sent).get_document(2).tolist() == [1, 2, 3, 65535]


def test_documents_of_several_sequences_are_read_whole(tmp_path: Path) -> None:
    lengths, boundaries = [2, 1, 0, 3, 1], [0, 2, 2, 3, 5, 5]
    starts = [2 * sum(lengths[:i]) for i in range(5)]
    index = HEADER.pack(MAGIC, 1, 8, 5, 6) + np.array(lengths, "<i4").tobytes()
    index += np.array(starts, "<i8").tobytes() + np.array(boundaries, "<i8").tobytes()
    (tmp_path / "pair.idx").write_bytes(index)
    (tmp_path / "pair.bin").write_bytes(np.arange(7, dtype="<u2").tobytes())
    tokens = IndexedTokens(tmp_path / "pair")
    assert read_documents(tmp_path / "pair") == [[0, 1, 2], [], [], [3, 4, 5, 6], []]
    assert tokens.document_tokens.tolist() == [3, 0, 0, 4, 0]
    assert tokens.sequence_tokens().tolist() == lengths
    assert [part.tolist() for part in tokens.sequence_spans(np.array([4, 1]))] == [[6, 2], [1, 1]]


@pytest.mark.parametrize(("longest", "dtype"), [(65535, np.uint16), (65536, np.int32)])
def test_lengths_take_two_bytes_where_they_fit(tmp_path: Path, longest: int, dtype: type) -> None:
    lengths = np.array([3, longest, 0])
    with IndexedWriter(tmp_path / "pair", np.dtype(np.uint8)) as writer:
        writer.add_documents(np.zeros(lengths.sum(), np.uint8), lengths)
    result = IndexedTokens(tmp_path / "pair").sequence_tokens()
    assert result.dtype == dtype and result.tolist() == lengths.tolist()


def test_every_dtype_has_the_size_of_its_name() -> None:
    for code, name in DTYPE_NAMES.items():
        assert count_token_bytes(name) == np.dtype(name).itemsize == DTYPES[code].itemsize


def test_an_exception_changes_no_file(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for ids in ([65536], np.array([-1, 7])):  # and an id is not wrapped
        with pytest.raises(ValueError, match=rf"got id {ids[0]}, which uint16 cannot"):
            write_dataset(pair, [ids])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    def stop(path: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(KeyboardInterrupt):
        write_dataset(pair, [[9] * 7])  # as many tokens as before: sizes alone would not reveal an old index
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("suffix", "damage", "sentence"),
    [
        ("idx", lambda idx: idx[:20], "got 20 bytes, expected 70 as in its header"),
        ("idx", lambda idx: b"TNTIDX" + idx[6:], r"got b'TNTIDXX\x00\x00', version 1"),
        ("idx", lambda idx: idx[:-8], "as in its header"),
        ("idx", lambda idx: idx[:9] + struct.pack("<Q", 2) + idx[17:], "version 2 with dtype code 8"),
        ("idx", lambda idx: idx[:17] + b"\x07" + idx[18:], "version 1 with dtype code 7"),
        ("idx", lambda idx: idx[:34] + struct.pack("<i", -3) + idx[38:], "inconsistent lengths"),
        ("idx", lambda idx: idx[:46] + struct.pack("<q", 2) + idx[54:], "inconsistent lengths, positions"),
        ("bin", lambda data: data[:-2], "got 12 bytes, expected 14 as in its index"),
    ],
)
def test_a_damaged_or_missing_file_is_one_sentence(
    pair: Path, suffix: str, damage: Callable[[bytes], bytes], sentence: str
) -> None:
    path = pair.with_suffix(f".{suffix}")
    path.write_bytes(damage(path.read_bytes()))
    assert sentence in str(read_refusal(lambda: IndexedTokens(pair)))
    path.unlink()
    assert "no such file, expected the prefix" in str(read_refusal(lambda: IndexedTokens(pair)))


WRONG_VALUES: dict[type, list[Any]] = {
    int: [True, -1, 1.0, 1 << 63, 10**30, "5", [], {}],
    float: [True, math.nan, math.inf, "0.5", []],
    bool: [0, "yes", {}],
    str: [5, False, [], {}],
    dict: [5, True, "x", [{}]],
    list: [5, "x", {}, [5], [{}, None]],
}


def test_a_field_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    fields = [(section, kind, name) for section, kinds in FIELDS.items() for kind, names in kinds.items()
              for name in names.split()]  # fmt: skip
    assert len(fields) > 20
    for section, kind, name in fields:
        place = {"": "", "parts": r"parts\[0\]\."}.get(section, rf"{section}\.")
        for value in (*WRONG_VALUES[kind], None):  # None: a missing value
            entry = {name: value}
            content = {section: [entry] if section == "parts" else entry} if section else entry
            path.write_text(json.dumps(content))
            message = read_refusal(lambda: read_sidecar(tmp_path / "a"))
            expected = rf"{path}: {place}{name}: got '.*', expected [^\n]*"
            assert message is None if value is None else re.fullmatch(expected, str(message)), content


@pytest.mark.parametrize("text", ['{"tokens": "x"}', '{"tokens": 5', "[]", "[" * 100_000, "9" * 5000, "\0"])
def test_every_reader_refuses_a_damaged_sidecar(tmp_path: Path, text: str) -> None:
    prefix = write_dataset(tmp_path / "a", [[1, 2, 3]])
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "paths.txt").write_text(f"1 {prefix}\n")
    for read in (
        lambda: read_data_paths(tmp_path / "paths.txt"),
        lambda: open_dataset(prefix),
        lambda: list(find_faults(prefix)),
        lambda: merge_datasets([prefix], tmp_path / "merged"),
    ):
        assert "a.json: " in str(read_refusal(read))
