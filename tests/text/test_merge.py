"""Merged datasets: documents in order, killed merges, patterns and lists, and what is refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron.data import open_dataset
from megatron.data.sidecar import read_sidecar
from megatron.plan.datapaths import compare_eods
from megatron.text.inspect_dataset import find_faults
from megatron.text.merge import MergeResult, merge_datasets
from megatron.text.merge_inputs import expand_prefixes, natural_key
from megatron.text.write_parts import write_parts_list
from tests.datasets import read_documents, write_dataset
from tests.text.preprocessing import META, write_parts

DOCUMENTS = {"a": [[1, 2, 3], [], [4]], "b": [[], [5, 6]], "c": [[7] * 9]}


write = partial(write_dataset, meta=META)


@pytest.mark.parametrize("block", [1, 3, 1 << 22])
def test_a_merged_dataset_has_all_documents_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr("megatron.data.indexed_writer.BLOCK", block)
    prefixes = [write(tmp_path / name, DOCUMENTS[name]) for name in "cab"]
    prefixes.append(write(tmp_path / "none", []))
    assert merge_datasets(prefixes, tmp_path / "all").is_new
    assert not merge_datasets(prefixes, tmp_path / "all").is_new
    assert read_documents(tmp_path / "all") == DOCUMENTS["c"] + DOCUMENTS["a"] + DOCUMENTS["b"]
    assert read_sidecar(tmp_path / "all")["tokenizer"]["sha256"] == "same"
    assert list(find_faults(tmp_path / "all")) == []


def test_entries_common_to_all_sidecars_are_kept(tmp_path: Path) -> None:
    meta = META | {"append_eod": True, "empty_documents": 1, "json_key": "text"}
    prefix = write_dataset(tmp_path / "x", [[1, 0], [0]], meta)
    other = write_dataset(tmp_path / "y", [[1, 0], [0]], meta | {"json_key": "title"})
    merge_datasets([prefix, other], tmp_path / "joined")
    record = read_sidecar(tmp_path / "joined")
    assert (record["append_eod"], record["empty_documents"], record["documents"]) == (True, 2, 4)
    assert record["tokenizer"]["eod_id"] == 0
    assert "json_key" not in record and list(find_faults(tmp_path / "joined")) == []


@pytest.mark.parametrize("merge", [merge_datasets, write_parts_list])
def test_inputs_with_empty_documents_only_become_one_dataset(tmp_path: Path, merge: Callable) -> None:
    prefixes = [write(tmp_path / name, [[]] * n) for name, n in (("a", 1), ("b", 3))]
    assert merge([*prefixes, write(tmp_path / "none", [])], tmp_path / "all") == MergeResult(4, 0)
    dataset = open_dataset(tmp_path / "all")
    assert dataset.document_tokens.tolist() == [0] * 4 and len(dataset.tokens[:]) == 0
    assert list(find_faults(tmp_path / "all")) == []


@pytest.fixture
def ends(tmp_path: Path) -> dict[str, str]:
    """Datasets of the same text with end id 2, 0 and none, and copies without sidecars."""
    prefixes = {}
    for name, end in (("two", [2]), ("zero", [0]), ("none", []), ("again", [2])):
        meta = {"tokenizer": META["tokenizer"] | {"eod_id": (end or [0])[0]}, "append_eod": bool(end)}
        for prefix in (name, f"foreign_{name}"):
            prefixes[prefix] = write_dataset(tmp_path / prefix, [[i, *end] for i in (1, 3, 1)], meta)
        Path(f"{prefixes[f'foreign_{name}']}.json").unlink()
    return prefixes


@pytest.mark.parametrize(("first", "second"), [("two", "zero"), ("two", "none"), ("none", "zero")])
def test_merging_different_ends_requires_mixed_eod(
    ends: dict[str, str], tmp_path: Path, first: str, second: str
) -> None:
    pair, out = [ends[first], ends[second]], tmp_path / "all"
    with pytest.raises(ValueError, match=f"{second}: got .*expected .*--mixed-eod"):
        merge_datasets(pair, out)
    assert not list(tmp_path.glob("all*"))
    merge_datasets(pair, out, mixed_eod=True)
    assert "append_eod" not in read_sidecar(out)
    assert ("eod_id" in read_sidecar(out)["tokenizer"]) == (first == "none")
    assert list(find_faults(out)) == []


def test_different_ends_are_refused_or_warned_about(ends: dict[str, str], tmp_path: Path) -> None:
    for other in ("zero", "none"):
        with pytest.raises(ValueError, match="dataset.mixed_eod=true"):
            compare_eods([ends["two"], ends[other]])
        (warning,) = compare_eods([ends["two"], ends[other]], allow_mixed=True)
        assert warning.startswith(f"{ends[other]}: got ")
    # an end without a record is unknown
    merge_datasets([ends["two"], ends["foreign_two"]], tmp_path / "more")
    assert "append_eod" not in read_sidecar(tmp_path / "more")
    (warning,) = compare_eods([ends["two"], ends["foreign_two"]])
    assert warning.startswith(f"{ends['foreign_two']}: no sidecar")
    assert compare_eods([ends["two"], ends["again"]]) == compare_eods([ends["foreign_two"]]) == ()


def test_incompatible_datasets_are_refused(tmp_path: Path) -> None:
    a, b = (write(tmp_path / name, DOCUMENTS[name]) for name in "ab")
    wide = write_dataset(tmp_path / "wide", [[1]], {}, np.int32)
    other = write_dataset(tmp_path / "other", [[1]], {"tokenizer": {"sha256": "other"}})
    assert merge_datasets([a], tmp_path / "all").is_new
    for prefixes, output, sentence in [
        ([a, wide], "new", "got int32, expected uint16"),
        ([a, other], "new", "another tokenizer"),
        ([a, b], "a", "is one of the inputs"),
        ([f"{a}.bin", b], "a", "is one of the inputs"),
        ([a], "b", "exists already"),
        ([b], "all", "exists already, from other files"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            merge_datasets(prefixes, tmp_path / output)
    assert merge_datasets([b], tmp_path / "all", overwrite=True).n_documents == 2


def test_a_missing_or_repeated_part_of_a_job_is_refused(tmp_path: Path) -> None:
    def write_part(name: str, number: object, of: object = 3, job: str = "a", key: str = "text") -> str:
        part = {"number": number, "of": of, "inputs_sha256": job}
        return write_dataset(tmp_path / name, [[1]], META | {"part": part, "json_key": key})

    first, second, third = (write_part(str(i), i) for i in (1, 2, 3))
    refused = [
        ([third, first], "got the parts 1, 3 of one job, expected each of its 3 parts once"),
        ([first, second, write_part("copy", 1), third], "got the parts 1, 1, 2, 3 of one job"),
        ([first, second, third, write_part("2b", 2, job="b")], "got the parts 2 of one job, expected each"),
        ([write_part("odd", 7, of=2**62)], "expected each of its"),
    ]
    for merge in (merge_datasets, write_parts_list):
        for prefixes, sentence in refused:
            with pytest.raises(ValueError, match=sentence):
                merge(prefixes, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))
    titles = [write_part(f"title{i}", i, key="title") for i in (1, 2, 3)]
    others = [*write_parts(tmp_path, 1), write_part("x", "1")]
    assert merge_datasets([first, third, second, *titles, *others], tmp_path / "out").is_new


def test_patterns_are_in_natural_order_and_words_in_theirs(tmp_path: Path) -> None:
    prefixes = write_parts(tmp_path / "d", 12)
    (tmp_path / "d" / "part-3_text_document.rejects.jsonl").touch()
    for ending in ("", ".bin", ".idx"):
        assert expand_prefixes([str(tmp_path / "d" / f"part-*{ending}")]) == prefixes
    words = [prefixes[5], str(tmp_path / "d" / "part-[12]_*")]
    assert expand_prefixes(words) == [prefixes[i] for i in (5, 1, 2)]
    write_parts_list(prefixes, tmp_path / "d" / "all")
    assert expand_prefixes([str(tmp_path / "d" / "a*")]) == [str(tmp_path / "d" / "all")]
    assert sorted(["b10", "b9", "a", "10", "9"], key=natural_key) == ["9", "10", "a", "b9", "b10"]


def test_repeated_and_missing_datasets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parts(tmp_path, 3)
    monkeypatch.chdir(tmp_path)
    for suffix in (".bin", ".idx"):
        Path(f"link{suffix}").symlink_to(f"part-0_text_document{suffix}")
    for names, sentence in (
        (["part-0_text_document", "part-*"], "twice, also as"),
        (["part-0_text_document", "link"], "twice, also as"),
        (["absent-*"], "absent-\\*: no dataset matches"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=sentence):
            expand_prefixes(names)
