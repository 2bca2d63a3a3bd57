"""A dataset of parts equals the merged dataset, is checked on opening, and takes no open files."""

import json
import os
import pickle
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron.data import open_dataset
from megatron.data.megatron_order import MegatronSamples
from megatron.data.parts import ConcatenatedTokens
from megatron.data.samples import Samples
from megatron.data.sidecar import read_sidecar, strip_suffix
from megatron.plan.datapaths import count_corpus_tokens, read_corpora
from megatron.plan.identity import _read_checksums
from megatron.text.inspect_dataset import find_faults
from megatron.text.merge import merge_datasets
from megatron.text.write_parts import write_parts_list
from tests.datasets import read_documents, write_dataset

META = {"tokenizer": {"n_tokens": 500, "sha256": "same", "name": "null", "eod_id": 0}, "append_eod": True}
SIZES = (40, 0, 1, 300, 7)  # documents of the parts


def write_part(prefix: Path, n_documents: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 60, n_documents)
    meta = META | {"empty_documents": int((lengths == 1).sum())}
    return write_dataset(prefix, [np.append(rng.integers(1, 500, n - 1), 0) for n in lengths], meta)


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    return [write_part(tmp_path / "in" / f"part-{i}", n, i) for i, n in enumerate(SIZES)]


@pytest.fixture
def both(prefixes: list[str], tmp_path: Path) -> tuple[str, str]:
    """The parts as one dataset, and their physically merged dataset."""
    write_parts_list(prefixes, tmp_path / "parts")
    merge_datasets(prefixes, tmp_path / "merged")
    return str(tmp_path / "parts"), str(tmp_path / "merged")


def test_index_and_counts_are_those_of_the_merged_dataset(both: tuple[str, str]) -> None:
    parts, merged = both
    assert Path(f"{parts}.parts.idx").read_bytes() == Path(f"{merged}.idx").read_bytes()
    record, expected = read_sidecar(parts), read_sidecar(merged)
    assert record.pop("parts") and expected.pop("merged_from")
    assert record.pop("sha256")["idx"] == expected.pop("sha256")["idx"]
    assert record | {"format": "MMIDIDX"} == expected
    assert count_corpus_tokens(parts) == count_corpus_tokens(merged)


def test_every_window_document_and_order_is_that_of_the_merged_dataset(both: tuple[str, str]) -> None:
    ours, theirs = (open_dataset(prefix) for prefix in both)
    assert len(ours.parts) == len(SIZES) and not theirs.parts
    n = theirs.n_tokens
    assert len(ours.tokens) == n and (ours.tokens[:] == theirs.tokens[:]).all()
    rng = np.random.default_rng(0)
    for begin, end in rng.integers(0, n + 1, (300, 2)):
        assert (ours.tokens[begin:end] == theirs.tokens[begin:end]).all()
        assert (ours.read_copy(begin, 50) == theirs.read_copy(begin, 50)).all()
    places = rng.integers(0, n, (7, 90))
    assert (ours.tokens[places] == theirs.tokens[places]).all()
    assert read_documents(both[0]) == read_documents(both[1])
    assert (ours.document_tokens == theirs.document_tokens).all()
    assert (ours.sequence_tokens() == theirs.sequence_tokens()).all()
    numbers = np.arange(1500)
    for build in (Samples, lambda *settings: MegatronSamples(*settings, 1500)):
        assert (build(ours, 16, 3).take(numbers) == build(theirs, 16, 3).take(numbers)).all()
    assert (pickle.loads(pickle.dumps(ours)).tokens[:] == theirs.tokens[:]).all()


def test_the_identity_is_that_of_the_content_of_the_parts(prefixes: list[str], tmp_path: Path) -> None:
    write_parts_list(prefixes, tmp_path / "a")
    shutil.copytree(tmp_path / "in", tmp_path / "elsewhere" / "in")
    write_parts_list([str(tmp_path / "elsewhere" / "in" / Path(p).name) for p in prefixes], tmp_path / "b")
    write_parts_list(prefixes[::-1], tmp_path / "c")
    sums = [_read_checksums(str(tmp_path / name)) for name in "abc"]
    assert sums[0] == sums[1] != sums[2]
    for prefix in prefixes:
        Path(f"{prefix}.json").unlink()
    write_parts_list(prefixes, tmp_path / "plain", mixed_eod=True)
    assert _read_checksums(str(tmp_path / "plain")) == str(tmp_path / "plain")
    assert any("no sidecar" in fault for fault in find_faults(tmp_path / "plain"))


def test_a_moved_folder_opens_and_a_changed_part_does_not(prefixes: list[str], tmp_path: Path) -> None:
    write_parts_list(prefixes, tmp_path / "in" / "all")
    shutil.copytree(tmp_path / "in", tmp_path / "copy")  # times are kept
    for path in (tmp_path / "copy").iterdir():
        os.utime(path)  # and now they are not
    expected = open_dataset(tmp_path / "in" / "all").tokens[:]
    assert (open_dataset(tmp_path / "copy" / "all").tokens[:] == expected).all()
    data = tmp_path / "copy" / "part-3.bin"
    content = data.read_bytes()

    def replace_part() -> None:
        write_part(tmp_path / "copy" / "part-3", SIZES[3], 77)
        data.write_bytes(content)  # the size is as in the list, the sidecar differs

    for change, sentence in (
        (lambda: data.write_bytes(content[:-2]), r"got [\d,]+ bytes of .*, expected .* --parts --overwrite"),
        (replace_part, r"got [\d,]+ bytes of another dataset"),
        (data.unlink, "no such file, expected a part"),
    ):
        change()
        with pytest.raises((ValueError, FileNotFoundError), match=rf"part-3\.bin: {sentence}"):
            open_dataset(tmp_path / "copy" / "all")


def test_a_damaged_index_or_list_is_refused(both: tuple[str, str]) -> None:
    parts = both[0]
    index, listed = Path(f"{parts}.parts.idx"), Path(f"{parts}.parts.json")
    whole, record = index.read_bytes(), json.loads(listed.read_text())
    lengths = whole[:34] + bytes([whole[34] ^ 1]) + whole[35:]
    for content, message in ((whole[:-1], "as in its header"), (lengths, r"parts\.idx: got inconsistent")):
        index.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            open_dataset(parts)
    index.write_bytes(whole)
    first = record["parts"][0]
    for change in (
        {"documents": 1}, {"dtype": "int32"}, {"parts": []}, {"parts": record["parts"][1:]}, {"tokens": None},
        *({"parts": [first | entry]} for entry in ({"path": 5}, {"tokens": -1}, {"sha256": {"bin": 1}})),
    ):  # fmt: skip
        listed.write_text(json.dumps(record | change))
        with pytest.raises(ValueError, match=r"parts\.json: (parts\[0\]\..*: )?got"):
            open_dataset(parts)
    listed.write_text(json.dumps(record | {"tokens": None}))
    with pytest.raises(ValueError, match="tokens is missing"):
        count_corpus_tokens(parts)
    listed.write_text(json.dumps(record))
    index.unlink()
    with pytest.raises(FileNotFoundError, match=r"parts\.parts\.idx or .*: no such file"):
        open_dataset(parts)


def test_no_program_makes_a_pair_and_a_list_of_parts(both: tuple[str, str], tmp_path: Path) -> None:
    parts, merged = both
    for suffix in ("", ".parts.json", ".parts.idx"):
        assert strip_suffix(parts + suffix) == parts
    paths = tmp_path / "paths.txt"
    paths.write_text(f"0.3 {parts}\n0.7 {merged}.bin\n")
    assert [corpus.prefix for corpus in read_corpora(paths)] == [parts, merged]
    with pytest.raises(ValueError, match=r"parts\.parts\.json: exists already"):
        merge_datasets([merged], Path(parts))
    with pytest.raises(ValueError, match=r"merged\.bin: exists already"):
        write_parts_list([parts], tmp_path / "merged")


def test_more_parts_than_open_files(tmp_path: Path) -> None:
    prefixes = [write_part(tmp_path / f"p{i}", 1, i) for i in range(130)]
    expected = np.concatenate([np.fromfile(f"{prefix}.bin", "<u2") for prefix in prefixes])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    try:
        write_parts_list(prefixes, tmp_path / "all")
        dataset = open_dataset(tmp_path / "all")
        before = len(os.listdir("/proc/self/fd"))
        assert (dataset.tokens[:] == expected).all()
        assert isinstance(dataset.tokens, ConcatenatedTokens)
        assert len(os.listdir("/proc/self/fd")) == before
        assert list(find_faults(tmp_path / "all")) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_verification_names_the_parts_that_changed(prefixes: list[str], tmp_path: Path) -> None:
    write_parts_list(prefixes, tmp_path / "all")
    assert list(find_faults(tmp_path / "all")) == []
    for prefix in (prefixes[3], prefixes[0], prefixes[4]):
        data = Path(f"{prefix}.bin")
        status, content = data.stat(), bytearray(data.read_bytes())
        content[5] ^= 3  # an id of more than 499
        data.write_bytes(content)
        os.utime(data, ns=(status.st_atime_ns, status.st_mtime_ns))
    places = [fault.partition(":")[0].rpartition("/")[2] for fault in find_faults(tmp_path / "all")]
    assert places[::2] == [f"part-{i}.bin" for i in (0, 3, 4)]


def test_the_same_list_again_is_not_written(prefixes: list[str], tmp_path: Path) -> None:
    assert write_parts_list(prefixes, tmp_path / "all").is_new
    before = (tmp_path / "all.parts.json").stat().st_mtime_ns
    assert not write_parts_list(prefixes, tmp_path / "all").is_new
    assert (tmp_path / "all.parts.json").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="exists already"):
        write_parts_list(prefixes[1:], tmp_path / "all")
    assert write_parts_list(prefixes[1:], tmp_path / "all", overwrite=True).n_documents == sum(SIZES[1:])
    assert not list(tmp_path.glob("*.partial"))
