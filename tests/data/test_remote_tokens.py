"""Datasets in object storage: the samples of local files, bit for bit, through a bounded shared cache."""

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron import remote_cache, remote_requests
from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.megatron_order import MegatronSamples
from megatron.data.samples import Samples
from megatron.data.sidecar import read_sidecar
from megatron.plan.datapaths import count_corpus_tokens, read_data_paths
from megatron.plan.resolve import load_config
from megatron.remote_requests import (
    RemoteChangedError,
    RemoteDeniedError,
    RemoteMissingError,
    RemoteUnreachableError,
)
from megatron.text.inspect_dataset import find_faults
from megatron.text.merge import merge_datasets
from tests.remote_servers import STORE_VARIABLES, FaultyServer, serve_store

N_TOKENS = 60_000
FILES = (".bin", ".idx", ".json")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SCALING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SCALING_CACHE_GB", "1")
    monkeypatch.setattr(remote_requests, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(remote_requests, "ATTEMPTS", 3)
    monkeypatch.setattr(remote_cache, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(remote_cache, "SMALL_BLOCK_BYTES", 512)
    remote_cache.open_remote_dataset.cache_clear()
    yield tmp_path / "cache" / "remote"
    remote_cache.open_remote_dataset.cache_clear()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of documents of 0 to 400 tokens."""
    prefix = tmp_path_factory.mktemp("local") / "c4_text_document"
    rng = np.random.default_rng(0)
    meta = {"tokenizer": {"name": "t", "sha256": "0", "n_tokens": 50257}, "append_eod": False}
    with IndexedWriter(prefix, np.dtype("<u2"), meta) as writer:
        while writer.n_tokens < N_TOKENS:
            writer.add_document(rng.integers(0, 50257, rng.integers(0, 400)))
    return prefix


@pytest.fixture
def web(local: Path) -> Iterator[FaultyServer]:
    pytest.importorskip("aiohttp", reason="requires aiohttp, which datasets installs")
    with FaultyServer() as server:
        server.files = {f"t/{local.name}{end}": Path(f"{local}{end}").read_bytes() for end in FILES}
        yield server


@pytest.fixture
def url(web: FaultyServer, local: Path) -> str:
    return f"{web.url}/t/{local.name}"


def count_gets(web: FaultyServer) -> int:
    return sum(method == "GET" and name.endswith(".bin") for method, name, _ in web.requests)


def wait_for_download(url: str) -> None:
    dataset = remote_cache.open_remote_dataset(url)
    end = time.monotonic() + 30
    while not all(dataset._block_path(n).exists() for n in range(dataset.n_blocks)):
        assert time.monotonic() < end, "the background download has not finished"
        time.sleep(0.02)


@pytest.mark.parametrize("limit", ["1", "0.00004"])  # all blocks fit; a third fits
def test_samples_equal_those_of_local_files(
    url: str, local: Path, web: FaultyServer, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setenv("SCALING_CACHE_GB", limit)
    remote_tokens, local_tokens = IndexedTokens(url), IndexedTokens(local)
    for order in (Samples, MegatronSamples):
        more = (500,) if order is MegatronSamples else ()
        remote, expected = (order(tokens, 128, 7, *more) for tokens in (remote_tokens, local_tokens))  # type: ignore[arg-type]
        numbers = np.arange(100)
        np.testing.assert_array_equal(remote.take(numbers), expected.take(numbers))
        np.testing.assert_array_equal(remote[3], expected[3])
    for document in (0, 1, local_tokens.n_documents - 1):
        np.testing.assert_array_equal(
            remote_tokens.get_document(document), local_tokens.get_document(document)
        )
    places = np.array([[5, N_TOKENS - 1], [5, 17_000], [5, 6]])
    np.testing.assert_array_equal(remote_tokens.tokens[places], local_tokens.tokens[places])
    np.testing.assert_array_equal(remote_tokens.read_copy(100, 9999), local_tokens.read_copy(100, 9999))
    assert remote_tokens.sidecar == local_tokens.sidecar


def test_plans_inspection_and_merge_read_a_url(url: str, local: Path, tmp_path: Path) -> None:
    assert list(find_faults(url)) == []
    assert read_sidecar(url) == read_sidecar(local) and count_corpus_tokens(url) == count_corpus_tokens(local)
    merge_datasets([url, str(local)], tmp_path / "merged")
    merge_datasets([str(local), str(local)], tmp_path / "expected")
    for end in (".bin", ".idx"):
        assert Path(f"{tmp_path}/merged{end}").read_bytes() == Path(f"{tmp_path}/expected{end}").read_bytes()
    mix = tmp_path / "mix.txt"
    mix.write_text(f"0.7 {url}\n0.3 {local}.bin\n")
    assert [corpus.prefix for corpus in read_data_paths(mix)] == [url, str(local)]
    mix.write_text(f"1 {url}x\n")
    with pytest.raises(RemoteMissingError, match=r"documentx.bin: no such file"):
        read_data_paths(mix)


def test_a_training_run_takes_the_same_samples_and_has_the_same_identity(
    url: str, local: Path, tmp_path: Path
) -> None:
    from megatron.plan.identity import run_identity
    from megatron.train.build import open_held_out_samples, open_train_samples

    mix = tmp_path / "mix.txt"
    mix.write_text(f"1 {url}\n")
    configs = [
        load_config(
            "examples_scaling/training/small.yaml",
            [f"dataset.path_train={path}", f"dataset.path_eval={path}", "dataset.seq_len=64"],
        )
        for path in (url, mix, local)
    ]
    assert {config.model.n_tokens for config in configs} == {50257}
    assert len({run_identity(config) for config in configs}) == 1
    samples = [open_train_samples(config, 200).take(np.arange(200)) for config in configs]
    np.testing.assert_array_equal(samples[0], samples[2])
    np.testing.assert_array_equal(samples[1], samples[2])
    held_out = [open_held_out_samples(str(c.dataset.path_eval), c).take(np.arange(50)) for c in configs]
    np.testing.assert_array_equal(held_out[0], held_out[2])
    with pytest.raises(ValueError, match=f"dataset.path_train: {url}x.bin: no such file"):
        load_config("examples_scaling/training/small.yaml", [f"dataset.path_train={url}x"])


def test_a_dataset_that_fits_is_downloaded_once(url: str, web: FaultyServer, cache: Path) -> None:
    assert IndexedTokens(url).tokens[:3].shape == (3,)
    wait_for_download(url)
    n_blocks = remote_cache.open_remote_dataset(url).n_blocks
    assert count_gets(web) == n_blocks > 10
    remote_cache.open_remote_dataset.cache_clear()  # as another process
    web.requests.clear()
    assert len(np.asarray(IndexedTokens(url).tokens[:])) >= N_TOKENS
    assert count_gets(web) == 0 and {method for method, _, _ in web.requests} == {"HEAD"}


def read_all(url: str, seed: int, queue: Any) -> None:
    remote_cache.BLOCK_BYTES = 4096
    tokens = IndexedTokens(url)
    samples = Samples(tokens, 128, seed)
    queue.put(int(samples.take(np.arange(300)).sum()))


def test_the_processes_of_a_machine_share_the_blocks(url: str, web: FaultyServer, local: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=read_all, args=(url, 0, queue), daemon=True) for _ in range(3)]
    for process in processes:
        process.start()
    try:
        expected = int(Samples(IndexedTokens(local), 128, 0).take(np.arange(300)).sum())
        assert [queue.get(timeout=90) for _ in processes] == [expected] * 3
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    assert count_gets(web) <= -(-Path(f"{local}.bin").stat().st_size // 4096)


def test_the_least_recently_used_blocks_are_deleted(
    url: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALING_CACHE_GB", "0.00002")
    tokens = IndexedTokens(url)
    for begin in range(0, N_TOKENS, 200):
        assert len(tokens.tokens[begin : begin + 200]) == 200
    stored = sum(path.stat().st_size for path in cache.glob("*/blocks-512/*/*"))
    assert 0 < stored <= 20_000 + 20_000 // 8 + 9 * 512
    # an old block goes before newer ones
    blocks = sorted(cache.glob("*/blocks-512/*/*"))
    os.utime(blocks[-1], (1, 1))
    remote_cache.trim_cache(stored - 1)
    assert not blocks[-1].exists()


def test_a_damaged_block_is_downloaded_again(url: str, web: FaultyServer, local: Path, cache: Path) -> None:
    tokens = IndexedTokens(url)
    assert len(tokens.tokens[:10])
    wait_for_download(url)
    blocks = sorted(cache.glob("*/blocks-4096/*/*"))
    blocks[0].write_bytes(b"short")
    blocks[1].unlink()
    np.testing.assert_array_equal(tokens.tokens[:9000], IndexedTokens(local).tokens[:9000])


def test_a_changed_object_is_never_mixed_in(url: str, web: FaultyServer, local: Path, cache: Path) -> None:
    # a dataset larger than the limit is not downloaded in the background
    tokens = IndexedTokens(url)
    dataset = remote_cache.open_remote_dataset(url)
    before = dataset.read(0, 100)
    name = f"t/{local.name}.bin"
    web.files[name] = web.files[name][::-1]
    with pytest.raises(RemoteChangedError, match="The file was replaced meanwhile"):
        dataset.read(50_000, 50_100)
    assert dataset.read(0, 100) == before  # of the cache
    remote_cache.open_remote_dataset.cache_clear()
    changed = remote_cache.open_remote_dataset(url)
    assert changed.folder != dataset.folder
    assert changed.read(0, 100) == web.files[name][:100]
    assert tokens.n_tokens == IndexedTokens(url).n_tokens


@pytest.mark.parametrize(
    ("fault", "expected"),
    [(403, RemoteDeniedError), (404, RemoteMissingError), (503, RemoteUnreachableError)],
)
def test_errors_of_the_server_are_sentences(
    url: str, web: FaultyServer, local: Path, fault: int, expected: type[OSError]
) -> None:
    web.faults[f"t/{local.name}.bin"] = [fault] * 100
    with pytest.raises(expected, match=rf"^{web.url}/t/{local.name}.bin: "):
        IndexedTokens(url)
    web.faults.clear()
    tokens = IndexedTokens(url)
    web.faults[f"t/{local.name}.bin"] = [fault] * 100
    with pytest.raises(expected, match=rf"^{web.url}/t/{local.name}.bin: "):
        tokens.tokens[:100]


def test_bad_settings_and_urls_are_sentences(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("", "0"):
        monkeypatch.setenv("SCALING_CACHE_GB", word or "much")
        with pytest.raises(ValueError, match="SCALING_CACHE_GB: got '.*', expected a number of GB"):
            IndexedTokens(url)
    with pytest.raises(ValueError, match="got a query or a password in the URL of a dataset"):
        IndexedTokens("https://me:hidden@host/c4?token=hidden")
    with pytest.raises(ValueError, match="unsupported kind of URL"):
        IndexedTokens("ftp://host/c4")


def test_a_dataset_without_sidecar_and_an_empty_one(web: FaultyServer, url: str, tmp_path: Path) -> None:
    del web.files[f"t/{url.rpartition('/')[2]}.json"]
    assert IndexedTokens(url).sidecar is None
    with IndexedWriter(tmp_path / "empty", np.dtype("<u2")) as writer:
        writer.add_document([])
    for end in FILES:
        web.files[f"empty{end}"] = (tmp_path / f"empty{end}").read_bytes()
    assert len(IndexedTokens(f"{web.url}/empty").tokens) == 0


def test_a_dataset_in_an_s3_store(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_store() as endpoint:
        import s3fs

        for name, value in (STORE_VARIABLES | {"AWS_ENDPOINT_URL": endpoint}).items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        store = s3fs.S3FileSystem(use_listings_cache=False)
        store.mkdir("bucket")
        for end in FILES:
            store.put_file(f"{local}{end}", f"bucket/tokens/c4{end}")
        tokens = IndexedTokens("s3://bucket/tokens/c4")
        np.testing.assert_array_equal(tokens.tokens[:], IndexedTokens(local).tokens[:])
        record = json.loads(
            (remote_cache.open_remote_dataset(tokens.prefix).folder / "source.json").read_text()
        )
        assert record["url"] == "s3://bucket/tokens/c4" and "hidden" not in str(record)
        wait_for_download("s3://bucket/tokens/c4")
    s3fs.S3FileSystem.clear_instance_cache()


def test_threads_share_a_download(url: str, web: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALING_CACHE_GB", "0.00004")  # no background download
    dataset = remote_cache.open_remote_dataset(url)
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(dataset.read(0, 500))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(set(results)) == 1 and len(results) == 8
    ranges = [span for method, _, span in web.requests if method == "GET" and span]
    assert len(ranges) == len(set(ranges))
