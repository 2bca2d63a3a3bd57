"""Remote files: retries, errors as sentences, identity, and no credentials in any message."""

import hashlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron import remote_requests
from megatron.remote_files import RangeReader, RemotePath, find_remote, split_remote_lines
from megatron.remote_requests import (
    RemoteChangedError,
    RemoteDeniedError,
    RemoteError,
    RemoteMissingError,
    RemoteUnreachableError,
    redact,
)
from tests.remote_servers import FaultyServer

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    pytest.importorskip("aiohttp", reason="requires aiohttp, which datasets installs")
    monkeypatch.setattr(remote_requests, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(remote_requests, "MAX_WAIT_S", 0.02)
    monkeypatch.setattr(RangeReader, "BLOCK_BYTES", 1000)
    with FaultyServer() as server:
        server.files["f.bin"] = CONTENT
        yield server


@pytest.mark.parametrize("fault", ["reset", "truncate", 503, 429, "whole"])
def test_a_failed_request_is_repeated(web: FaultyServer, fault: int | str) -> None:
    path = RemotePath(f"{web.url}/f.bin")
    assert path.info.size == len(CONTENT)
    web.faults["f.bin"] = [fault] * 3
    with path.open("rb") as file:
        assert file.read() == CONTENT
        assert file.raw.sha256() == hashlib.sha256(CONTENT).hexdigest()  # type: ignore[attr-defined]
    assert not web.faults["f.bin"]


@pytest.mark.parametrize("fault", ["reset", "truncate", 500, "whole"])
def test_repeated_failures_end_with_a_sentence(web: FaultyServer, fault: int | str) -> None:
    path = RemotePath(f"{web.url}/f.bin?token=hidden")
    size = path.info.size
    web.faults["f.bin"] = [fault] * 1000
    with pytest.raises(
        RemoteUnreachableError, match=r"^http://127.*/f.bin: not readable after 8 attempts"
    ) as e:
        path.read_range(0, size // 2)
    assert "hidden" not in str(e.value)
    # aiohttp itself repeats a request once if a connection that was open already is reset
    assert 8 <= 1000 - len(web.faults["f.bin"]) <= 16


@pytest.mark.parametrize(
    ("status", "expected"), [(403, RemoteDeniedError), (401, RemoteDeniedError), (404, RemoteMissingError)]
)
def test_a_permanent_error_is_not_repeated(
    web: FaultyServer, status: int, expected: type[RemoteError]
) -> None:
    path = RemotePath(f"{web.url}/f.bin?X-Amz-Signature=hidden")
    assert path.info
    n_before = len(web.requests)
    web.faults["f.bin"] = [status] * 1000
    with pytest.raises(expected) as error:
        path.read_range(0, 10)
    assert "hidden" not in str(error.value) and str(error.value).startswith(f"{web.url}/f.bin: ")
    assert len(web.requests) == n_before + 1
    with pytest.raises(expected):  # fsspec reports any failure of this request as a missing file
        RemotePath(path.url).info  # noqa: B018


def test_a_server_that_cannot_be_reached_is_a_sentence(web: FaultyServer) -> None:
    with pytest.raises(RemoteUnreachableError, match="Check the network"):
        find_remote("http://127.0.0.1:9/f.jsonl", (".jsonl",))


def test_a_file_that_changes_while_it_is_read_is_refused(web: FaultyServer) -> None:
    path = RemotePath(f"{web.url}/f.bin")
    with pytest.raises(RemoteChangedError, match="The file was replaced meanwhile"), path.open("rb") as file:
        file.read(10)
        web.files["f.bin"] = CONTENT[::-1]
    with pytest.raises(RemoteChangedError), path.open("rb"):
        pass


def test_the_reader_equals_a_local_file_for_all_seeks(web: FaultyServer, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(CONTENT)
    begin, end = 1500, 9001
    with (
        RemotePath(f"{web.url}/f.bin").open_range(begin, end) as remote,
        (tmp_path / "f").open("rb") as local,
    ):
        for position, n in [(0, 10), (999, 2), (5000, 3000), (10, 1), (7400, 500), (7501, 3), (20_000, 1)]:
            remote.seek(position)
            local.seek(begin + position)
            assert remote.read(n) == local.read(max(0, min(n, end - begin - position)))
        assert remote.seek(-5, os.SEEK_END) == end - begin - 5
        assert remote.raw.sha256() is None  # type: ignore[attr-defined]


def test_plain_files_are_split_at_line_ends(web: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.remote_files.SPAN_BYTES", 100)
    monkeypatch.setattr("megatron.remote_files.LINE_BYTES", 7)
    lines = [b"x" * n + b"\n" for n in [0, 99, 3, 450, 100, 98, 0, 0, 30]] + [b"no line end"]
    web.files["f.bin"] = content = b"".join(lines)
    spans = split_remote_lines(RemotePath(f"{web.url}/f.bin"), 1, 0, len(content))
    assert [span[0] for span in spans[1:]] == [span[1] for span in spans[:-1]]
    assert (spans[0][0], spans[-1][1]) == (0, len(content)) and len(spans) > 4
    assert all(content[end - 1 : end] == b"\n" for _, end in spans[:-1])
    web.files["empty"] = b""
    assert split_remote_lines(RemotePath(f"{web.url}/empty"), 1, 0, 0) == []


def test_a_remote_path_is_no_local_path() -> None:
    path = RemotePath("https://me:hidden@host/a%20b/c.json.gz?token=hidden#x")
    assert (str(path), path.name, path.suffix) == ("https://host/a%20b/c.json.gz", "c.json.gz", ".gz")
    assert "hidden" not in repr(path) and pickle.loads(pickle.dumps(path)) == path
    assert path != Path("https://host/a%20b/c.json.gz") and path in {path}
    for use in (open, os.stat):
        with pytest.raises(TypeError, match="is not a file on this machine"):
            use(path)  # type: ignore[operator]


def test_secrets_are_removed_from_any_text() -> None:
    text = "403, url='https://me:pw@h/x?X-Amz-Signature=abc' and s3://key:pw@bucket/a b"
    assert redact(text) == "403, url='https://h/x' and s3://bucket/a b"
    with pytest.raises(ValueError, match="s3://b/x: got credentials in a URL") as error:
        find_remote("s3://key:pw@b/x", ())
    assert "pw" not in str(error.value)
