"""Datasets at URLs: the samples of local files, bit for bit, from copies that all processes share."""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.data import open_dataset, remote
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.remote import RemoteError, RemoteMissingError, RemoteUnreachableError
from megatron.data.samples import Samples
from megatron.data.sidecar import count_tokens, read_sidecar
from megatron.plan.datapaths import read_data_paths
from megatron.plan.identity import run_identity
from megatron.plan.resolve import load_config
from megatron.text.inspect_dataset import find_faults
from megatron.text.merge import merge_datasets
from megatron.text.write_parts import write_parts_list
from tests.remote_servers import FaultyServer, serve_bucket

N_TOKENS = 60_000
FILES = (".bin", ".idx", ".json")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SCALING_CACHE", str(tmp_path / "cache"))
    remote.cache_dataset.cache_clear()
    yield tmp_path / "cache" / "remote"
    remote.cache_dataset.cache_clear()


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


def count_gets(web: FaultyServer, suffix: str = ".bin") -> int:
    return sum(method == "GET" and name.endswith(suffix) for method, name, _ in web.requests)


def test_plans_inspection_and_merge_read_a_url(
    url: str, local: Path, web: FaultyServer, tmp_path: Path
) -> None:
    assert read_sidecar(url) == read_sidecar(local) and count_tokens(url) == count_tokens(local)
    mix = tmp_path / "mix.txt"
    mix.write_text(f"0.7 {url}\n0.3 {local}.bin\n")
    assert [corpus.prefix for corpus in read_data_paths(mix)] == [url, str(local)]
    assert count_gets(web) == 0  # plans need no tokens
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


def sum_samples(url: str) -> int:
    return int(Samples(open_dataset(url), 128, 0).take(np.arange(300)).sum())


def test_the_processes_of_a_machine_download_once(url: str, web: FaultyServer, local: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        assert pool.map(sum_samples, [url] * 2, chunksize=1) == [sum_samples(str(local))] * 2
    assert count_gets(web) == count_gets(web, ".idx") == 1  # each is smaller than a block of 8 MiB
    web.requests.clear()
    assert len(open_dataset(url).tokens) >= N_TOKENS
    assert {method for method, _, _ in web.requests} == {"HEAD"}


def test_a_changed_object_is_another_dataset(url: str, web: FaultyServer, local: Path) -> None:
    before = open_dataset(url)
    name = f"t/{local.name}.bin"
    web.files[name] = web.files[name][::-1]
    with pytest.raises(RemoteError, match="The file was replaced meanwhile"):
        before.tokens[:1]
    web.faults[name] = [503] * 100
    with pytest.raises(RemoteUnreachableError, match=f"^{url}.bin: not readable"):
        before.tokens[:1]
    web.faults.clear()
    remote.cache_dataset.cache_clear()  # as another process
    after = open_dataset(url)
    assert after.files.index != before.files.index and after.files.version() != before.files.version()
    assert np.asarray(after.tokens[:50]).tobytes() == web.files[name][:100]


def test_bad_urls_are_sentences() -> None:
    for url in ("https://me:hidden@host/c4", "https://host/c4?token=hidden", "s3://me:hidden@bucket/c4"):
        with pytest.raises(ValueError, match="got a query or a password in the URL of a dataset") as error:
            open_dataset(url)
        assert "hidden" not in str(error.value)
    with pytest.raises(ValueError, match="unsupported kind of URL"):
        open_dataset("ftp://host/c4")


def test_a_dataset_in_an_s3_store_without_sidecar(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_bucket(monkeypatch):
        for end in FILES[:2]:
            remote.upload_file(Path(f"{local}{end}"), f"s3://bucket/tokens/c4{end}")
        tokens = open_dataset("s3://bucket/tokens/c4")
        assert tokens.sidecar is None
        np.testing.assert_array_equal(tokens.tokens[:], open_dataset(local).tokens[:])
