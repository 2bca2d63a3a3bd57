"""Datasets at URLs: the samples of local files, bit for bit, from copies that all processes share."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import open_dataset, remote
from megatron.data.remote import RemoteError, RemoteFile, RemoteMissingError
from megatron.data.samples import Samples
from megatron.data.sidecar import count_tokens, read_sidecar
from megatron.plan.datapaths import read_data_paths
from megatron.plan.identity import run_identity
from megatron.plan.resolve import load_config
from megatron.text.inspect_dataset import find_faults
from megatron.text.merge import merge_datasets
from megatron.text.write_parts import write_parts_list
from tests.datasets import write_dataset
from tests.remote_servers import serve_bucket

N_TOKENS = 60_000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SCALING_CACHE", str(tmp_path / "cache"))
    remote.locate_remote.cache_clear()
    yield tmp_path / "cache" / "remote"
    remote.locate_remote.cache_clear()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of documents of 0 to 400 tokens."""
    rng = np.random.default_rng(0)
    ids = np.split(rng.integers(0, 50257, N_TOKENS), np.cumsum(rng.integers(0, 400, 250)))
    meta = {"tokenizer": {"name": "t", "sha256": "0", "n_tokens": 50257}, "append_eod": False}
    return Path(write_dataset(tmp_path_factory.mktemp("local") / "c4_text_document", ids, meta))


@pytest.fixture
def store(local: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with serve_bucket(monkeypatch) as store:
        for end in (".bin", ".idx", ".json"):
            store.put_file(f"{local}{end}", f"bucket/t/{local.name}{end}")
        yield store


@pytest.fixture
def url(store: Any, local: Path) -> str:
    return f"s3://bucket/t/{local.name}"


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Suffixes of the files that were downloaded."""
    names: list[str] = []
    original = remote._download_file

    def download(file: RemoteFile, target: Path) -> None:
        names.append(file.name[file.name.rindex(".") :])
        original(file, target)

    monkeypatch.setattr(remote, "_download_file", download)
    return names


def test_plans_and_merge_read_a_url(url: str, local: Path, downloads: list[str], tmp_path: Path) -> None:
    assert read_sidecar(url) == read_sidecar(local) and count_tokens(url) == count_tokens(local)
    mix = tmp_path / "mix.txt"
    mix.write_text(f"0.7 {url}\n0.3 {local}.bin\n")
    assert [corpus.prefix for corpus in read_data_paths(mix)] == [url, str(local)]
    assert ".bin" not in downloads  # plans need no tokens
    assert list(find_faults(url)) == []
    merge_datasets([url, str(local)], tmp_path / "merged")
    merge_datasets([str(local), str(local)], tmp_path / "expected")
    for end in (".bin", ".idx"):
        assert Path(f"{tmp_path}/merged{end}").read_bytes() == Path(f"{tmp_path}/expected{end}").read_bytes()
    mix.write_text(f"1 {url}x\n")
    with pytest.raises(RemoteMissingError, match=r"documentx.bin: no such file"):
        read_data_paths(mix)
    with pytest.raises(ValueError, match="got a URL, expected a part on this machine"):
        write_parts_list([url], tmp_path / "parts")


def test_a_run_has_the_identity_of_local_files(url: str, local: Path, tmp_path: Path) -> None:
    (tmp_path / "mix.txt").write_text(f"1 {url}\n")
    yaml = "examples_scaling/training/small.yaml"
    configs = [
        load_config(yaml, [f"dataset.path_train={path}", f"dataset.path_eval={path}", "dataset.seq_len=64"])
        for path in (local, url, tmp_path / "mix.txt")
    ]
    assert {config.model.n_tokens for config in configs} == {50257}
    assert len({run_identity(config) for config in configs}) == 1
    with pytest.raises(ValueError, match=f"dataset.path_train: {url}x.bin: no such file"):
        load_config(yaml, [f"dataset.path_train={url}x"])


def test_the_workers_of_a_machine_download_once(url: str, local: Path, downloads: list[str]) -> None:
    def sum_samples(prefix: str) -> int:
        return int(Samples(open_dataset(prefix), 128, 0).take(np.arange(300)).sum())

    with ThreadPoolExecutor(3) as pool:  # the lock is of an open file, so threads exclude each other
        assert list(pool.map(sum_samples, [url] * 3)) == [sum_samples(str(local))] * 3
    assert sorted(downloads) == [".bin", ".idx", ".json"]
    remote.locate_remote.cache_clear()  # as another process
    assert len(open_dataset(url).tokens) >= N_TOKENS and len(downloads) == 3


def test_a_changed_object_is_another_dataset(url: str, store: Any, local: Path) -> None:
    before = open_dataset(url)
    content = Path(f"{local}.bin").read_bytes()[::-1]
    store.pipe(f"bucket/t/{local.name}.bin", content)
    with pytest.raises(RemoteError, match="The file was replaced meanwhile"):
        before.tokens[:1]
    remote.locate_remote.cache_clear()  # as another process
    after = open_dataset(url)
    assert after.files.data != before.files.remote and after.files.version() != before.files.version()
    assert np.asarray(after.tokens[:50]).tobytes() == content[:100]


def test_a_dataset_without_sidecar(url: str, store: Any, local: Path) -> None:
    store.rm(f"bucket/t/{local.name}.json")
    tokens = open_dataset(url)
    assert tokens.sidecar is None
    np.testing.assert_array_equal(tokens.tokens[:], open_dataset(local).tokens[:])
