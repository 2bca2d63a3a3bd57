"""Inspection and verification of datasets."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.data import open_dataset
from megatron.text.inspect_dataset import find_faults, summarize_lengths
from tests.datasets import write_dataset
from tests.tool_modules import Cli


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """Numbers, each document with its end token, the last one empty."""
    meta = {"tokenizer": {"n_tokens": 10, "eod_id": 9}, "append_eod": True, "empty_documents": 1}
    return Path(write_dataset(tmp_path / "x", ([1, 2, 3, 9], [4, 9], [5, 6, 7, 8, 9], [9]), meta))


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_verifying_finds_a_change_of_any_byte_and_a_wrong_size(real: Path, suffix: str) -> None:
    assert list(find_faults(real)) == []
    path = Path(f"{real}.{suffix}")
    whole = path.read_bytes()
    flips = [bytearray(whole) for _ in whole]
    for at, content in enumerate(flips):
        content[at] ^= 1 << at * 3 % 8  # each byte, and each bit in several bytes
    for content in (*flips, *(whole[:n] for n in range(len(whole))), whole + b"\0", whole * 2):
        path.write_bytes(content)
        try:
            assert list(find_faults(real)), content
        except ValueError as error:
            assert str(real) in str(error)


def test_verifying_compares_every_entry_of_the_sidecar(real: Path) -> None:
    sidecar = Path(f"{real}.json")
    valid = json.loads(sidecar.read_text())
    for change, sentence in (
        ({"documents": 5}, "got 5 for documents, expected 4"),
        ({"tokens": 1}, "got 1 for tokens, expected 12"),
        ({"dtype": "int32"}, "got int32 for dtype, expected uint16"),
        ({"longest_document": 4}, "got 4 for longest_document, expected 5"),
        ({"empty_documents": 0}, "got 0 for empty_documents, expected 1"),
        ({"sha256": {"bin": "0", "idx": "0"}}, "its hash differs"),
        ({"sha256": {}}, "no hashes"),
        ({"tokenizer": {"eod_id": 8, "n_tokens": 10}}, "document 0 does not end with id 8"),
        ({"tokenizer": {"eod_id": 9, "n_tokens": 9}}, "got id 9, expected ids below the tokenizer's 9"),
    ):
        sidecar.write_text(json.dumps(valid | change))
        assert sentence in " ".join(find_faults(real))


def test_lengths_are_counted_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.data.indexed.BLOCK_DOCUMENTS", 7)
    lengths = np.random.default_rng(0).integers(0, 40, 100)
    write_dataset(tmp_path / "many", map(np.zeros, lengths))
    summary = summarize_lengths(open_dataset(tmp_path / "many"))
    assert (summary.shortest, summary.longest) == (lengths.min(), lengths.max())
    assert (summary.median, summary.mean) == (np.median(lengths), lengths.mean())
    edges = np.array([0, 1, 2, 4, 8, 16, 32, 64])
    assert [n for _, n in summary.histogram] == np.histogram(lengths, edges)[0].tolist()


def test_verifying_counts_all_documents_in_the_number_of_one_without_its_end(tmp_path: Path) -> None:
    meta = {"tokenizer": {"n_tokens": 9, "eod_id": 0}, "append_eod": True}
    prefix = write_dataset(tmp_path / "x", ([], [1, 0], [], [2, 0], [1, 2], [3]), meta)
    assert [fault for fault in find_faults(prefix) if "end with" in fault] == [
        f"{prefix}.bin: document 4 does not end with id 0 as in the sidecar"
    ]


def test_the_tool_prints_counts(cli: Cli, scaling_data: Path, real: Path, tmp_path: Path) -> None:
    openwebtext = str(scaling_data / "megatron_openwebtext" / "meg-gpt2-openwebtext_text_document")
    for suffix in (".bin", ".idx"):
        (tmp_path / f"pair{suffix}").symlink_to(f"{openwebtext}{suffix}")
    (tmp_path / "pair.json").write_text(json.dumps({"tokenizer": {"name": "theirs", "sha256": "of theirs"}}))
    tokenizer = ["--tokenizer-model", str(scaling_data / "gpt2_tokenizer")]
    for words, status, text in [
        ([f"{real}.idx", "--verify"], 0, f"{real}: complete and consistent"),
        ([openwebtext], 0, "1,000 documents, 1,361,845 tokens (uint16)"),
        ([openwebtext, "--document", "1000"], 1, "error: --document: got 1000, expected 0 to 999\n"),
        ([openwebtext, "--document", "0"], 1, "Give --tokenizer-model"),
        ([str(tmp_path / "pair"), "--document", "0", *tokenizer], 1, "not the tokenizer theirs"),
        ([str(tmp_path / "absent")], 1, "absent.bin: no such file"),
    ]:
        done = cli("inspect", *words, status=status)
        assert text in done.output + done.error
