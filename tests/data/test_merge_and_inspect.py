"""Merged datasets, and the inspection of datasets."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.sidecar import resolve_prefix
from megatron.text import merge as merge_module
from megatron.text.inspect_dataset import find_faults, summarize_lengths
from megatron.text.merge import merge_datasets
from megatron.text.preprocess import PreprocessOptions, preprocess
from megatron.tokenizer.kinds import TokenizerSpec

DOCUMENTS = {"a": [[1, 2, 3], [], [4]], "b": [[], [5, 6]], "c": [[7] * 9]}


@pytest.fixture
def pairs(tmp_path: Path) -> dict[str, str]:
    for name, documents in DOCUMENTS.items():
        about = {"tokenizer": {"n_tokens": 8, "sha256": "same", "name": "null"}}
        with IndexedWriter(tmp_path / name, np.dtype(np.uint16), about) as writer:
            for ids in documents:
                writer.add_document(ids)
    return {name: str(tmp_path / name) for name in DOCUMENTS}


@pytest.mark.parametrize("block", [1, 3, 1 << 22])
def test_a_merged_dataset_has_the_documents_of_its_parts_in_order(
    pairs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(merge_module, "BLOCK_TOKENS", block)
    merge_datasets([pairs[name] for name in "cab"], tmp_path / "all")
    joined = IndexedTokens(tmp_path / "all")
    documents = [joined.get_document(i).tolist() for i in range(joined.n_documents)]
    assert documents == DOCUMENTS["c"] + DOCUMENTS["a"] + DOCUMENTS["b"]
    assert joined.sidecar["tokenizer"]["sha256"] == "same"
    assert list(find_faults(tmp_path / "all")) == []


def test_incompatible_datasets_are_refused(pairs: dict[str, str], tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "wide", np.dtype(np.int32)) as writer:
        writer.add_document([1])
    with pytest.raises(ValueError, match="got int32, expected uint16"):
        merge_datasets([pairs["a"], str(tmp_path / "wide")], tmp_path / "all")
    with IndexedWriter(tmp_path / "other", np.dtype(np.uint16), {"tokenizer": {"sha256": "other"}}) as writer:
        writer.add_document([1])
    with pytest.raises(ValueError, match="another tokenizer"):
        merge_datasets([pairs["a"], str(tmp_path / "other")], tmp_path / "all")
    with pytest.raises(ValueError, match="is one of the inputs"):
        merge_datasets([pairs["a"], pairs["b"]], Path(pairs["a"]))
    assert not list(tmp_path.glob("all*"))


def test_a_dataset_is_named_by_its_prefix_or_by_either_file(pairs: dict[str, str]) -> None:
    for suffix in ("", ".bin", ".idx"):
        assert resolve_prefix(pairs["a"] + suffix) == pairs["a"]
    with pytest.raises(ValueError, match="is one of the inputs"):
        merge_datasets([f"{pairs['a']}.bin", pairs["b"]], Path(pairs["a"]))
    assert resolve_prefix("absent.bin") == "absent.bin"


def test_a_summary_counts_by_arithmetic(pairs: dict[str, str]) -> None:
    summary = summarize_lengths(IndexedTokens(pairs["a"]))
    assert (summary.n_documents, summary.n_tokens, summary.shortest, summary.longest) == (3, 4, 0, 3)
    assert (summary.mean, summary.median) == (4 / 3, 1.0)
    assert summary.histogram == [(0, 1), (1, 1), (2, 1)]


def test_verifying_finds_a_flipped_bit_a_wrong_count_and_an_id_past_the_vocabulary(
    pairs: dict[str, str],
) -> None:
    assert list(find_faults(pairs["a"])) == []
    data = Path(f"{pairs['a']}.bin")
    data.write_bytes(data.read_bytes()[:-1] + b"\x01")  # the last id becomes 260
    sidecar = Path(f"{pairs['a']}.json")
    meta = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps(meta | {"documents": 4}))
    reported = " ".join(find_faults(pairs["a"]))
    assert "got 4 for documents, expected 3" in reported
    assert ".bin: its hash differs" in reported
    assert "got id 260, expected ids below the tokenizer's 8" in reported


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A dataset written by preprocessing: numbers, each document with its end token, the last one empty."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("1 2 3", "4", "5 6 7 8", "")))
    spec = TokenizerSpec("NullTokenizer", vocab_size=9)
    preprocess([str(source)], tmp_path / "x", spec, PreprocessOptions(append_eod=True))
    return tmp_path / "x_text_document"


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_verifying_finds_a_flip_of_any_bit(real: Path, suffix: str) -> None:
    assert list(find_faults(real)) == []
    path = Path(f"{real}.{suffix}")
    whole = path.read_bytes()
    for at in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[at // 8] ^= 1 << at % 8
        path.write_bytes(flipped)
        try:
            assert list(find_faults(real)), at
        except ValueError as error:
            assert str(real) in str(error)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_verifying_finds_a_file_that_is_cut_or_longer(real: Path, suffix: str) -> None:
    path = Path(f"{real}.{suffix}")
    whole = path.read_bytes()
    for content in [whole[:n] for n in range(len(whole))] + [whole + b"\0", whole * 2]:
        path.write_bytes(content)
        try:
            assert list(find_faults(real)), len(content)
        except ValueError as error:
            assert str(real) in str(error)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"documents": 5}, "got 5 for documents, expected 4"),
        ({"tokens": 1}, "got 1 for tokens, expected 12"),
        ({"dtype": "int32"}, "got int32 for dtype, expected uint16"),
        ({"longest_document": 4}, "got 4 for longest_document, expected 5"),
        ({"empty_documents": 0}, "got 0 for empty_documents, expected 1"),
        ({"sha256": {"bin": "0", "idx": "0"}}, "its hash differs"),
        ({"sha256": {}}, "no hashes"),
        ({"tokenizer": {"eod_id": 8, "n_tokens": 10}}, "document 0 does not end with id 8"),
        ({"tokenizer": {"eod_id": 9, "n_tokens": 9}}, "got id 9, expected ids below the tokenizer's 9"),
    ],
)
def test_verifying_compares_every_entry_of_the_sidecar(real: Path, change: dict, sentence: str) -> None:
    sidecar = Path(f"{real}.json")
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | change))
    assert sentence in " ".join(find_faults(real))


def test_length_counts_do_not_depend_on_the_block_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.data.indexed.BLOCK_DOCUMENTS", 7)
    lengths = np.random.default_rng(0).integers(0, 40, 100)
    with IndexedWriter(tmp_path / "many", np.dtype(np.uint16)) as writer:
        writer.add_documents(np.zeros(lengths.sum(), np.uint16), lengths)
    summary = summarize_lengths(IndexedTokens(tmp_path / "many"))
    assert (summary.shortest, summary.longest, summary.median) == (
        lengths.min(),
        lengths.max(),
        np.median(lengths),
    )
    assert summary.mean == lengths.mean()
    assert [n for _, n in summary.histogram] == [
        int(((lengths >= least) & (lengths < most)).sum())
        for least, most in [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64)]
    ]


def test_entries_common_to_all_sidecars_are_kept_by_a_merge(real: Path, tmp_path: Path) -> None:
    merge_datasets([str(real), str(real)], tmp_path / "joined")
    meta = json.loads((tmp_path / "joined.json").read_text())
    assert (meta["append_eod"], meta["empty_documents"], meta["documents"]) == (True, 2, 8)
    assert list(find_faults(tmp_path / "joined")) == []


def test_the_tools_print_counts_and_documents(
    root: Path, scaling_data: Path, pairs: dict, tmp_path: Path
) -> None:
    def run(tool: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(root / "tools" / f"{tool}.py"), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    joined = str(tmp_path / "joined")
    assert "6 documents, 15 tokens" in run("merge_datasets", *pairs.values(), "--output", joined).stdout
    assert "complete and consistent" in run("inspect_data", f"{joined}.idx", "--verify").stdout
    openwebtext = str(scaling_data / "megatron_openwebtext" / "meg-gpt2-openwebtext_text_document")
    counts = run("inspect_data", openwebtext).stdout
    assert "1,000 documents, 1,361,845 tokens (uint16)" in counts
    assert counts.count("#") > 40
    outside = run("inspect_data", openwebtext, "--document", "1000")
    assert (outside.returncode, outside.stderr) == (1, "error: --document: got 1000, expected 0 to 999\n")
    unnamed = run("inspect_data", openwebtext, "--document", "0")
    assert "Give --tokenizer-model" in unnamed.stderr
    gpt2 = scaling_data / "gpt2_tokenizer"
    meta = {"tokenizer": {"name": "theirs", "sha256": "of theirs"}}
    for suffix in (".bin", ".idx"):
        (tmp_path / f"pair{suffix}").symlink_to(f"{openwebtext}{suffix}")
    (tmp_path / "pair.json").write_text(json.dumps(meta))
    other = run("inspect_data", str(tmp_path / "pair"), "--document", "0", "--tokenizer-model", str(gpt2))
    assert "not the tokenizer theirs of the dataset" in other.stderr


def test_verifying_counts_all_documents_in_the_number_of_one_without_its_end(tmp_path: Path) -> None:
    with IndexedWriter(
        tmp_path / "x", np.dtype("uint16"), {"tokenizer": {"n_tokens": 9, "eod_id": 0}, "append_eod": True}
    ) as writer:
        for document in ([], [1, 0], [], [2, 0], [1, 2], [3]):
            writer.add_document(np.array(document))
    assert [fault for fault in find_faults(tmp_path / "x") if "end with" in fault] == [
        f"{tmp_path / 'x'}.bin: document 4 does not end with id 0 as in the sidecar"
    ]


def test_a_dataset_without_documents_and_sidecar_is_merged(pairs: dict[str, str], tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "none", np.dtype("uint16"), {}) as writer:
        del writer
    (tmp_path / "none.json").unlink()
    merge_datasets([str(tmp_path / "none"), pairs["a"]], tmp_path / "out", mixed_eod=True)
    assert IndexedTokens(tmp_path / "out").n_documents == 3
