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
