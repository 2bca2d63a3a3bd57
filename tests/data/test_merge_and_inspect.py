"""Joined pairs, and pairs that are looked into."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data import merge as merge_module
from megatron.data.indexed import IndexedTokens, prefix_of
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.inspect import faults, summarise
from megatron.data.merge import merge
from megatron.data.preprocess import Options, preprocess
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
def test_joined_pairs_are_their_documents_one_after_another(
    pairs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(merge_module, "BLOCK_TOKENS", block)
    merge([pairs[name] for name in "cab"], tmp_path / "all")
    joined = IndexedTokens(tmp_path / "all")
    found = [joined.document(i).tolist() for i in range(joined.n_documents)]
    assert found == DOCUMENTS["c"] + DOCUMENTS["a"] + DOCUMENTS["b"]
    assert joined.sidecar["tokenizer"]["sha256"] == "same"
    assert list(faults(tmp_path / "all")) == []


def test_pairs_that_do_not_belong_together_are_refused(pairs: dict[str, str], tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "wide", np.dtype(np.int32)) as writer:
        writer.add_document([1])
    with pytest.raises(ValueError, match="holds int32"):
        merge([pairs["a"], str(tmp_path / "wide")], tmp_path / "all")
    with IndexedWriter(tmp_path / "other", np.dtype(np.uint16), {"tokenizer": {"sha256": "other"}}) as writer:
        writer.add_document([1])
    with pytest.raises(ValueError, match="another tokenizer"):
        merge([pairs["a"], str(tmp_path / "other")], tmp_path / "all")
    with pytest.raises(ValueError, match="is one of the inputs"):
        merge([pairs["a"], pairs["b"]], Path(pairs["a"]))
    assert not list(tmp_path.glob("all*"))


def test_a_pair_is_found_by_its_prefix_and_by_the_name_of_either_file(pairs: dict[str, str]) -> None:
    for suffix in ("", ".bin", ".idx"):
        assert prefix_of(pairs["a"] + suffix) == pairs["a"]
    with pytest.raises(ValueError, match="is one of the inputs"):
        merge([f"{pairs['a']}.bin", pairs["b"]], Path(pairs["a"]))
    assert prefix_of("absent.bin") == "absent.bin"


def test_a_summary_counts_by_arithmetic(pairs: dict[str, str]) -> None:
    told = summarise(IndexedTokens(pairs["a"]))
    assert (told.n_documents, told.n_tokens, told.shortest, told.longest) == (3, 4, 0, 3)
    assert (told.mean, told.median) == (4 / 3, 1.0)
    assert told.histogram == [(0, 1), (1, 1), (2, 1)]


def test_verifying_finds_a_flipped_bit_a_wrong_count_and_an_id_past_the_vocabulary(
    pairs: dict[str, str],
) -> None:
    assert list(faults(pairs["a"])) == []
    data = Path(f"{pairs['a']}.bin")
    data.write_bytes(data.read_bytes()[:-1] + b"\x01")  # the last id becomes 260
    sidecar = Path(f"{pairs['a']}.json")
    told = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps(told | {"documents": 4}))
    found = " ".join(faults(pairs["a"]))
    assert "says 4 documents, the pair has 3" in found
    assert ".bin: its sum is not the sidecar's" in found
    assert "id 260 is past the tokenizer's 8" in found


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A pair as preprocessing makes it: numbers, each document with its end, the last of them empty."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("1 2 3", "4", "5 6 7 8", "")))
    spec = TokenizerSpec("NullTokenizer", vocab_size=9)
    preprocess([str(source)], tmp_path / "x", spec, Options(append_eod=True))
    return tmp_path / "x_text_document"


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_verifying_finds_a_flip_of_any_bit(real: Path, suffix: str) -> None:
    assert list(faults(real)) == []
    path = Path(f"{real}.{suffix}")
    whole = path.read_bytes()
    for at in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[at // 8] ^= 1 << at % 8
        path.write_bytes(flipped)
        try:
            assert list(faults(real)), at
        except ValueError as error:
            assert str(real) in str(error)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_verifying_finds_a_file_that_is_cut_or_longer(real: Path, suffix: str) -> None:
    path = Path(f"{real}.{suffix}")
    whole = path.read_bytes()
    for content in [whole[:n] for n in range(len(whole))] + [whole + b"\0", whole * 2]:
        path.write_bytes(content)
        try:
            assert list(faults(real)), len(content)
        except ValueError as error:
            assert str(real) in str(error)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"documents": 5}, "says 5 documents, the pair has 4"),
        ({"tokens": 1}, "says 1 tokens, the pair has 12"),
        ({"dtype": "int32"}, "says int32 dtype, the pair has uint16"),
        ({"longest_document": 4}, "says 4 longest_document, the pair has 5"),
        ({"empty_documents": 0}, "says 0 empty_documents, the pair has 1"),
        ({"sha256": {"bin": "0", "idx": "0"}}, "its sum is not the sidecar's"),
        ({"sha256": {}}, "has no sums"),
        ({"tokenizer": {"eod_id": 8, "n_tokens": 10}}, "document 0 does not end with id 8"),
        ({"tokenizer": {"eod_id": 9, "n_tokens": 9}}, "id 9 is past the tokenizer's 9"),
    ],
)
def test_verifying_compares_all_that_the_sidecar_says(real: Path, change: dict, sentence: str) -> None:
    sidecar = Path(f"{real}.json")
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | change))
    assert sentence in " ".join(faults(real))


def test_counts_are_those_of_all_lengths_however_many_documents_are_looked_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.data.inspect.BLOCK_DOCUMENTS", 7)
    lengths = np.random.default_rng(0).integers(0, 40, 100)
    with IndexedWriter(tmp_path / "many", np.dtype(np.uint16)) as writer:
        writer.add_documents(np.zeros(lengths.sum(), np.uint16), lengths)
    told = summarise(IndexedTokens(tmp_path / "many"))
    assert (told.shortest, told.longest, told.median) == (lengths.min(), lengths.max(), np.median(lengths))
    assert told.mean == lengths.mean()
    assert [n for _, n in told.histogram] == [
        int(((lengths >= least) & (lengths < most)).sum())
        for least, most in [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64)]
    ]


def test_what_is_so_of_all_pairs_is_so_of_the_joined_one(real: Path, tmp_path: Path) -> None:
    merge([str(real), str(real)], tmp_path / "joined")
    told = json.loads((tmp_path / "joined.json").read_text())
    assert (told["append_eod"], told["empty_documents"], told["documents"]) == (True, 2, 8)
    assert list(faults(tmp_path / "joined")) == []


def test_the_tools_print_what_a_person_asks_for(
    root: Path, scaling_data: Path, pairs: dict, tmp_path: Path
) -> None:
    def run(tool: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(root / "tools" / f"{tool}.py"), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    joined = str(tmp_path / "joined")
    assert "6 documents, 15 tokens" in run("merge_datasets", *pairs.values(), "--output", joined).stdout
    assert "whole" in run("inspect_data", f"{joined}.idx", "--verify").stdout
    openwebtext = str(scaling_data / "megatron_openwebtext" / "meg-gpt2-openwebtext_text_document")
    counts = run("inspect_data", openwebtext).stdout
    assert "1,000 documents, 1,361,845 tokens (uint16)" in counts
    assert counts.count("#") > 40
    outside = run("inspect_data", openwebtext, "--document", "1000")
    assert (outside.returncode, outside.stderr) == (1, "error: --document: found 1000, wanted 0 to 999\n")
    unnamed = run("inspect_data", openwebtext, "--document", "0")
    assert "give --tokenizer-model" in unnamed.stderr
    gpt2 = scaling_data / "gpt2_tokenizer"
    told = {"tokenizer": {"name": "theirs", "sha256": "of theirs"}}
    for suffix in (".bin", ".idx"):
        (tmp_path / f"pair{suffix}").symlink_to(f"{openwebtext}{suffix}")
    (tmp_path / "pair.json").write_text(json.dumps(told))
    other = run("inspect_data", str(tmp_path / "pair"), "--document", "0", "--tokenizer-model", str(gpt2))
    assert "not the tokenizer theirs that the pair was made with" in other.stderr
