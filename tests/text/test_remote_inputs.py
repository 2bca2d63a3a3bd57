"""Preprocessing of remote files: the bytes of local files, restarts, faults and skipped archives."""

import bz2
import gzip
import hashlib
import json
import lzma
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from megatron.text.sources import Part

from megatron import remote_requests
from megatron.remote_files import RangeReader
from megatron.remote_requests import RemoteChangedError, RemoteMissingError, RemoteUnreachableError
from megatron.text.inputs import find_inputs
from megatron.text.preprocess import PreprocessOptions, preprocess
from megatron.text.subset import DocumentSelection, subset_text
from megatron.tokenizer.kinds import TokenizerSpec
from tests.remote_servers import STORE_VARIABLES, FaultyServer, serve_store

NULL = TokenizerSpec("NullTokenizer", vocab_size=1000)
TEXTS = [" ".join(str((i * j) % 1000) for j in range(i % 50)) for i in range(2000)]
LINES = [json.dumps({"text": text, "other": "7 8"}) + "\n" for text in TEXTS]
PLAIN = "".join(LINES).encode()


def pack_parquet() -> bytes:
    sink = pyarrow.BufferOutputStream()
    table = pyarrow.table({"text": TEXTS, "other": ["7 8"] * len(TEXTS)})
    pyarrow.parquet.write_table(table, sink, row_group_size=300)
    return sink.getvalue().to_pybytes()


HALF = len(PLAIN) // 2
KINDS = {
    "plain.jsonl": PLAIN,
    "a.jsonl.gz": gzip.compress(PLAIN),
    "b.json.zst": zstandard.compress(PLAIN),
    "c.jsonl.bz2": bz2.compress(PLAIN[:HALF]) + bz2.compress(PLAIN[HALF:]),
    "d.jsonl.xz": lzma.compress(PLAIN[:HALF]) + bytes(8) + lzma.compress(PLAIN[HALF:]) + bytes(4),
    "e.parquet": pack_parquet(),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_requests, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(RangeReader, "BLOCK_BYTES", 30_000)
    monkeypatch.setattr("megatron.remote_files.SPAN_BYTES", 60_000)
    monkeypatch.setattr("megatron.text.preprocess.PIECE_BYTES", 60_000)


@pytest.fixture(scope="module")
def store_url() -> Iterator[str]:
    with serve_store() as url:
        yield url


@pytest.fixture
def store(store_url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An S3 file system with the bucket `corpus` of all kinds."""
    import s3fs

    for name, value in STORE_VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", store_url)
    s3fs.S3FileSystem.clear_instance_cache()
    store = s3fs.S3FileSystem(use_listings_cache=False)
    if not store.exists("corpus"):
        store.mkdir("corpus")
        for name, content in KINDS.items():
            store.pipe(f"corpus/c4/{name}", content)
    return store


@pytest.fixture
def web() -> Iterator[FaultyServer]:
    with FaultyServer() as server:
        server.files.update(KINDS)
        yield server


def read_outputs(prefix: Path, key: str = "text") -> tuple[bytes, bytes]:
    return tuple(Path(f"{prefix}_{key}_document{suffix}").read_bytes() for suffix in (".bin", ".idx"))  # type: ignore[return-value]


def make_local(
    tmp_path: Path, names: list[str], tokenizer: TokenizerSpec | str = NULL, **options: Any
) -> Path:
    for name in names:
        (tmp_path / name).write_bytes(KINDS[name])
    prefix = tmp_path / "local"
    words = [str(tmp_path / name) for name in names]
    preprocess(words, prefix, tokenizer, PreprocessOptions(quiet=True, **options))
    return prefix


@pytest.mark.parametrize(
    ("name", "keys"),
    [(name, ("text",)) for name in KINDS]
    + [(name, ("text", "other")) for name in ("plain.jsonl", "e.parquet")],
)
def test_remote_files_give_the_bytes_of_local_ones(
    tmp_path: Path, store: Any, name: str, keys: tuple[str, ...]
) -> None:
    local = make_local(tmp_path, [name], "gpt2", keys=keys)
    options = PreprocessOptions(quiet=True, keys=keys, n_workers=2)
    preprocess([f"s3://corpus/c4/{name}"], tmp_path / "remote", "gpt2", options)
    for key in keys:
        assert read_outputs(tmp_path / "remote", key) == read_outputs(local, key)
    [source] = json.loads((tmp_path / "remote_text_document.json").read_text())["sources"]
    assert source["path"] == f"s3://corpus/c4/{name}" and source["bytes"] == len(KINDS[name])
    assert source["version"] == store.info(f"corpus/c4/{name}")["ETag"]
    expected = None if name in ("plain.jsonl", "e.parquet") else hashlib.sha256(KINDS[name]).hexdigest()
    assert source["sha256"] == expected
    assert ("pieces_sha256" in source) == (name == "plain.jsonl")


def test_patterns_and_folders_list_the_files_of_local_ones(tmp_path: Path, store: Any) -> None:
    names = ["a.jsonl", "b.json.zst", "sub/c.jsonl.xz"]
    for name in [*names, ".hidden.jsonl", "tok.json", "tok.idx", "x.rejects.jsonl", "notes.txt"]:
        store.pipe(f"corpus/list/{name}", b"")
    assert [str(p) for p in find_inputs(["s3://corpus/list"])] == [f"s3://corpus/list/{n}" for n in names]
    assert [path.name for path in find_inputs(["s3://corpus/list/*.json*"])] == [
        ".hidden.jsonl", "a.jsonl", "b.json.zst",
    ]  # fmt: skip
    with pytest.raises(FileNotFoundError, match="s3://corpus/none/"):
        find_inputs(["s3://corpus/none/*.jsonl"])
    with pytest.raises(RemoteMissingError, match="s3://corpus/none.jsonl: no such file"):
        find_inputs(["s3://corpus/none.jsonl"])
    with pytest.raises(ValueError, match="got this file twice"):
        store.pipe("corpus/a.jsonl", PLAIN)
        find_inputs(["s3://corpus/a.jsonl", "s3://corpus/a.jsonl"])


def test_a_job_of_a_flaky_server_equals_a_local_one(tmp_path: Path, web: FaultyServer) -> None:
    names = list(KINDS)
    local = make_local(tmp_path, names)
    web.faults = {name: ["reset", "truncate", 503] for name in names}
    urls = [f"{web.url}/{name}?token=hidden" for name in names]
    preprocess(urls, tmp_path / "remote", NULL, PreprocessOptions(quiet=True, n_workers=2))
    assert read_outputs(tmp_path / "remote") == read_outputs(local)
    assert not any(web.faults.values())
    assert all("hidden" not in path.read_text() for path in tmp_path.glob("remote*.json"))


def test_a_job_resumes_after_the_network_has_failed(
    tmp_path: Path, web: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_requests, "ATTEMPTS", 2)
    local = make_local(tmp_path, ["a.jsonl.gz", "plain.jsonl"])
    urls = [f"{web.url}/{name}" for name in ("a.jsonl.gz", "plain.jsonl")]
    options = PreprocessOptions(quiet=True)
    find_inputs(urls)
    n_good = sum(name == "plain.jsonl" for _, name, _ in web.requests)
    web.faults["plain.jsonl"] = ["pass"] * (n_good + 5) + [500] * 100  # "pass": an unknown fault is none
    with pytest.raises(RemoteUnreachableError, match="run the same command again"):
        preprocess(urls, tmp_path / "remote", NULL, options)
    assert not list(tmp_path.glob("remote*")) and list(tmp_path.glob(".remote.shards/*.done"))
    web.faults.clear()
    web.requests.clear()
    preprocess(urls, tmp_path / "remote", NULL, options)
    # the finished archive is not read again: only its version is requested
    assert {method for method, name, _ in web.requests if name == "a.jsonl.gz"} == {"HEAD"}
    n_bytes = sum(1 for method, name, _ in web.requests if (method, name) == ("GET", "plain.jsonl"))
    assert n_bytes
    assert read_outputs(tmp_path / "remote") == read_outputs(local)
    sources = json.loads((tmp_path / "remote_text_document.json").read_text())["sources"]
    assert sources[0]["sha256"] == hashlib.sha256(KINDS["a.jsonl.gz"]).hexdigest()


def test_a_restart_refuses_a_changed_file(
    tmp_path: Path, web: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_requests, "ATTEMPTS", 2)
    urls = [f"{web.url}/{name}" for name in ("a.jsonl.gz", "b.json.zst")]
    web.faults["b.json.zst"] = ["pass"] * 2 + [500] * 1000
    with pytest.raises(RemoteUnreachableError):
        preprocess(urls, tmp_path / "remote", NULL, PreprocessOptions(quiet=True))
    web.faults.clear()
    web.files["a.jsonl.gz"] = gzip.compress(PLAIN[:HALF] + LINES[0].encode())
    with pytest.raises(ValueError, match=r"a.jsonl.gz: got version .*interrupted job began.*--overwrite"):
        preprocess(urls, tmp_path / "remote", NULL, PreprocessOptions(quiet=True))
    preprocess(urls, tmp_path / "remote", NULL, PreprocessOptions(quiet=True, overwrite=True))


def test_a_file_that_changes_during_the_job_is_refused(
    tmp_path: Path, web: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = RangeReader._load

    def load(reader: RangeReader, number: int) -> None:
        original(reader, number)
        web.files["a.jsonl.gz"] = gzip.compress(PLAIN[:HALF])

    monkeypatch.setattr(RangeReader, "_load", load)
    with pytest.raises(RemoteChangedError, match="The file was replaced meanwhile"):
        preprocess([f"{web.url}/a.jsonl.gz"], tmp_path / "remote", NULL, PreprocessOptions(quiet=True))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("remote")]


DAMAGE = {
    "a.jsonl.gz": KINDS["a.jsonl.gz"][:-3000] + bytes(3000),
    "b.json.zst": KINDS["b.json.zst"][:-100],
    "c.jsonl.bz2": bz2.compress(PLAIN[:HALF]) + b"AZh" + bz2.compress(PLAIN[HALF:])[3:],
    "d.jsonl.xz": lzma.compress(PLAIN[:HALF]) + bytes(3) + lzma.compress(PLAIN[HALF:]),
    "e.parquet": KINDS["e.parquet"][: len(KINDS["e.parquet"]) // 2] + KINDS["e.parquet"][-2000:],
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("is_remote", [True, False])
def test_a_bad_archive_is_skipped_and_listed(
    tmp_path: Path, web: FaultyServer, name: str, is_remote: bool
) -> None:
    good, bad = f"{web.url}/plain.jsonl", f"{web.url}/{name}"
    web.files[name] = DAMAGE[name]
    if not is_remote:
        good, bad = str(tmp_path / "plain.jsonl"), str(tmp_path / name)
        Path(good).write_bytes(PLAIN)
        Path(bad).write_bytes(DAMAGE[name])
    with pytest.raises(ValueError, match=rf"{name}: got damaged content .*--on-error skip"):
        preprocess([bad, good], tmp_path / "out", NULL, PreprocessOptions(quiet=True))
    options = PreprocessOptions(quiet=True, skip_bad_lines=True)
    result = preprocess([bad, good], tmp_path / "out", NULL, options)
    assert result.rejected.n_files == 1 and result.outputs[0].n_documents == len(TEXTS)
    [record] = [json.loads(line) for line in (tmp_path / "out.rejects.jsonl").read_text().splitlines()]
    assert record["file"] == bad and record["line"] is None and record["reason"]
    assert 0 <= record["byte"] <= len(DAMAGE[name])
    sources = json.loads((tmp_path / "out_text_document.json").read_text())["sources"]
    assert sources[0]["damage"] == record["reason"] and sources[0]["documents_read"] == 0


def test_an_archive_that_cannot_be_reached_is_skipped_and_listed(
    tmp_path: Path, web: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_requests, "ATTEMPTS", 2)
    urls = [f"{web.url}/{name}" for name in ("a.jsonl.gz", "plain.jsonl")]
    web.faults["a.jsonl.gz"] = ["pass"] * 2 + [500] * 1000
    options = PreprocessOptions(quiet=True, skip_bad_lines=True)
    result = preprocess(urls, tmp_path / "out", NULL, options)
    assert result.rejected.n_files == 1 and result.outputs[0].n_documents == len(TEXTS)
    [record] = [json.loads(line) for line in (tmp_path / "out.rejects.jsonl").read_text().splitlines()]
    assert record["file"] == urls[0] and "not readable after 2 attempts" in record["reason"]
    # a part of a plain file must not be missing
    web.faults.clear()
    web.faults["plain.jsonl"] = ["pass"] * 5 + [500] * 1000
    with pytest.raises(RemoteUnreachableError):
        preprocess(urls, tmp_path / "other", NULL, options)


def test_bad_lines_and_a_subset_of_remote_text(tmp_path: Path, web: FaultyServer) -> None:
    web.files["plain.jsonl"] = PLAIN + b"{\n" + PLAIN
    with pytest.raises(ValueError, match=rf"plain.jsonl, line {len(LINES) + 1}: not JSON"):
        preprocess([f"{web.url}/plain.jsonl"], tmp_path / "out", NULL, PreprocessOptions(quiet=True))
    subset_text([f"{web.url}/d.jsonl.xz"], tmp_path / "s.jsonl", DocumentSelection(documents=7), quiet=True)
    assert (tmp_path / "s.jsonl").read_text() == "".join(LINES[:7])


def test_credentials_are_nowhere_in_the_outputs(tmp_path: Path, store: Any, capfd: Any) -> None:
    preprocess(["s3://corpus/c4/a.jsonl.gz"], tmp_path / "out", NULL, PreprocessOptions(quiet=True))
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "hidden"
    assert not [path for path in tmp_path.iterdir() if b"hidden" in path.read_bytes()]
    assert "hidden" not in "".join(capfd.readouterr())


def test_parts_of_remote_files_concatenate_to_one_job(tmp_path: Path, web: FaultyServer) -> None:
    names = ["a.jsonl.gz", "plain.jsonl", "c.jsonl.bz2"]
    local = make_local(tmp_path, names)
    urls = [f"{web.url}/{name}" for name in names]
    content = b""
    for number in (1, 2, 3):
        options = PreprocessOptions(quiet=True, part=Part(number, 3))
        result = preprocess(urls, tmp_path / "remote", NULL, options)
        content += Path(f"{result.outputs[0].prefix}.bin").read_bytes()
    assert content == read_outputs(local)[0]
