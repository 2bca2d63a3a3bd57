"""Registered files that change while they are read: an error for the reader, never SIGBUS."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_writer import IndexedWriter
from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.document_chunks import DocumentChunks
from megatron.mixture.serve.remote import Connection, RemoteChunks
from megatron.mixture.spans import SpanFiles


def test_spans_are_the_bytes_of_the_file(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(50_000)
    (tmp_path / "f").write_bytes(content)
    rng = np.random.default_rng(1)
    begins = rng.integers(0, 49_000, 300)
    sizes = rng.integers(0, 1000, 300)
    files = SpanFiles()
    files.add(tmp_path / "f")
    binary = files.read_binary(tmp_path / "f", begins, sizes)
    assert binary.to_pylist() == [content[b : b + n] for b, n in zip(begins, sizes, strict=True)]
    assert files.read_binary(tmp_path / "f", begins[:0], sizes[:0]).to_pylist() == []


def test_a_span_past_the_end_is_an_error_even_if_size_and_time_were_checked(
    tmp_path: Path, monkeypatch
) -> None:
    """The race between the check and the read: the file is truncated in between."""
    (tmp_path / "f").write_bytes(b"x" * 10_000)
    path, files = tmp_path / "f", SpanFiles()
    files.add(path)

    def read(begins: list[int], sizes: list[int]) -> bytes:
        return bytes(files.read(path, np.array(begins), np.array(sizes)))

    os.truncate(path, 5_000)
    with pytest.raises(ValueError, match=r"f: got another size or modification time than when it was opened"):
        read([0], [10])
    monkeypatch.setattr(files, "_check_state", lambda *_: 10_000)  # as if checked before the cut
    with pytest.raises(ValueError, match=r"f: got its end before byte 6,000"):
        read([0, 4_000], [10, 2_000])
    with pytest.raises(ValueError, match="got its end"):
        read([9_000], [10])
    assert read([4_999], [1]) == b"x"


def write_corpus(folder: Path, kind: str) -> Path:
    """Write a mixture of 2,000 documents in one file of several MB, and return its path."""
    if kind == "lines":
        text = "".join(json.dumps({"text": f"document {i} " + "w" * 2000}) + "\n" for i in range(2000))
        (folder / "data.jsonl").write_text(text)
        source = file = folder / "data.jsonl"
    elif kind == "tar":
        for i in range(2000):
            (folder / f"{i:05}.txt").write_text(f"document {i} " + "w" * 2000)
        names = [f"{i:05}.txt" for i in range(2000)]
        subprocess.run(["tar", "-cf", "data.tar", *names], cwd=folder, check=True, timeout=120)
        source = file = folder / "data.tar"
    else:
        with IndexedWriter(folder / "data", np.dtype(np.uint16), {}) as writer:
            for i in range(2000):
                writer.add_document(np.full(1000, i))
        source, file = folder / "data", folder / "data.bin"
    with Catalog(folder / "c", n_threads=1) as catalog:
        catalog.register("data", [str(source)], (), quiet=True)
    (folder / "m.yaml").write_text("catalog: c\ncount: documents\n")
    return file


@pytest.mark.parametrize("kind", ["lines", "tar", "pair"])
def test_a_file_truncated_under_a_server_is_an_error_of_that_request(
    tmp_path: Path, start, kind: str
) -> None:
    file = write_corpus(tmp_path, kind)
    (tmp_path / "other").mkdir()
    write_corpus(tmp_path / "other", "lines")
    (tmp_path / "other" / "m.yaml").rename(tmp_path / "other" / "other.yaml")
    server, location = start(tmp_path / "m.yaml", tmp_path / "other" / "other.yaml", "--port", 0)
    connection = Connection(location, patience_s=60)
    remote, other = RemoteChunks(connection, "m"), RemoteChunks(connection, "other")
    before, content, state = remote.read(0, 1), file.read_bytes(), file.stat()
    os.truncate(file, 4096)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{file.name}: got another size or modification time"):
            remote.read(1, 1)
    assert server.poll() is None
    assert len(other.read(1, 1)) == 512  # the other mixture is not affected
    with file.open("r+b") as sink:  # restore the file: it is served again without a restart
        sink.write(content)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert remote.read(0, 1).equals(before)
    assert connection.request("status")["errors"] == 2


def test_a_file_overwritten_in_place_with_as_many_bytes_is_refused(tmp_path: Path) -> None:
    file = write_corpus(tmp_path, "lines")
    with DocumentChunks(tmp_path / "m.yaml") as source:
        source.read(0, 1)
        content = file.read_bytes()
        with file.open("r+b") as sink:
            sink.write(content[7:] + b"1234567")
        os.utime(file)
        with pytest.raises(ValueError, match="Restore the file, or register it again"):
            source.read(1, 1)


def test_a_truncated_file_does_not_kill_its_reader(tmp_path: Path) -> None:
    """Run it in a separate process, because a reader that maps the file would end by SIGBUS."""
    write_corpus(tmp_path, "lines")
    code = (
        "import os, sys\n"
        "from megatron.mixture.document_chunks import DocumentChunks\n"
        "source = DocumentChunks('m.yaml'); source.read(0, 1)\n"
        "os.truncate('data.jsonl', 100)\n"
        "try: source.read(1, 3)\n"
        "except ValueError as error: print('refused', error)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.startswith("refused ")
