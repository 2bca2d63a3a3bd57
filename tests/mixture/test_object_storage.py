"""A catalog in an object store: registration, queries and chunks as from a folder, by several writers."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.properties import read_properties
from megatron.mixture.catalog.query import Query
from megatron.mixture.document_chunks import DocumentChunks
from tests.mixture.conftest import PROPERTIES, write_lines


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Start an S3 server, and return the URL of a bucket."""
    program = shutil.which("moto_server")
    if program is None:
        pytest.skip("moto_server is not installed (pip install 'moto[server]')")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [program, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    before = {name: os.environ.get(name) for name in keys}
    os.environ.update(keys)
    try:
        for _ in range(300):
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            if server.poll() is not None:
                pytest.skip("moto_server does not start here")
            time.sleep(0.1)
        import pyarrow.fs

        filesystem = pyarrow.fs.S3FileSystem(
            endpoint_override=f"127.0.0.1:{port}", scheme="http", allow_bucket_creation=True
        )
        filesystem.create_dir("bucket")
        yield f"s3://bucket/{{}}?endpoint_override=127.0.0.1:{port}&scheme=http"
    finally:
        server.kill()
        server.wait(timeout=60)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def register(catalog: Path | str, files: list[Path]) -> object:
    with Catalog(catalog, n_threads=1) as opened:
        words = [str(path) for path in files]
        return opened.register("a b/c", words, read_properties(PROPERTIES), quiet=True)


def test_a_catalog_in_s3_gives_the_documents_of_a_folder(s3, tmp_path) -> None:
    url, files = s3.format("shared/catalog"), [tmp_path / f"{i}.jsonl" for i in range(6)]
    for i, path in enumerate(files):
        write_lines(path, 60, first=60 * i)
    with ThreadPoolExecutor(3) as writers:  # at the same time
        done = list(writers.map(lambda k: register(url, files[k::3]), range(3)))
    assert [result.n_documents for result in done] == [120] * 3
    register(tmp_path / "catalog", files)
    spec, chunks, conditions = tmp_path / "m.yaml", [], ("language <> 'Go' AND stars > 100",)
    for location in (url, "catalog"):
        spec.write_text(f'catalog: {location}\nby: [language]\nwhere: "{conditions[0]}"\ncount: documents\n')
        with DocumentChunks(spec, chunk_size=50) as source:
            chunks.append((source.identity, source.names, source.read(0, 3).column("text").to_pylist()))
    assert chunks[0] == chunks[1]
    with Catalog(url) as remote, Catalog(tmp_path / "catalog") as local:
        assert remote.snapshot.id == local.snapshot.id
        assert remote.describe_corpus("a b/c") == local.describe_corpus("a b/c")
        assert list(remote.list_snapshots()) == [remote.snapshot.id]
        query = Query(conditions=conditions)
        assert query.run(remote).compute_identity() == query.run(local).compute_identity()
        remote.remove("a b/c")
        assert remote.list_corpora() == []
        assert remote.prune()[0] >= 8
        assert remote.storage.list_files("").keys() == {"catalog.json"}


def test_a_tool_names_what_is_missing(s3, root, tmp_path) -> None:
    tool = [sys.executable, str(root / "tools" / "register_corpus.py")]
    for location, reason in (
        (s3.format("nothing"), "no such catalog"),
        ("file:///x", "Use the path"),
        ("nosuch://x/y", "cannot be opened"),
    ):
        done = subprocess.run([*tool, location, "list"], capture_output=True, text=True, timeout=240)
        assert done.returncode == 1
        assert reason in done.stderr
        assert "Traceback" not in done.stderr


def test_an_fsspec_url_is_a_catalog_too(tmp_path) -> None:
    write_lines(tmp_path / "a.jsonl", 20)
    url = "memory://shared/catalog"  # stands in for a store that only fsspec reads
    assert register(url, [tmp_path / "a.jsonl"]).n_documents == 20
    register(tmp_path / "catalog", [tmp_path / "a.jsonl"])
    with Catalog(url, read_only=True) as remote, Catalog(tmp_path / "catalog", read_only=True) as local:
        assert remote.snapshot.id == local.snapshot.id
        assert Query().run(remote).compute_identity() == Query().run(local).compute_identity()
