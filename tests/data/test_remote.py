"""Remote files: errors as sentences, pinned versions, and no credentials in any message."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.data import remote
from megatron.data.remote import RemoteError, RemoteMissingError, find_file, find_remote, open_remote, redact
from megatron.data.remote import _download_file as download_file
from tests.remote_servers import FaultyServer, serve_bucket

CONTENT = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 1000)


@pytest.fixture
def web() -> Iterator[FaultyServer]:
    pytest.importorskip("aiohttp", reason="requires aiohttp, which datasets installs")
    with FaultyServer() as server:
        server.files["f.bin"] = CONTENT
        yield server


@pytest.mark.parametrize("fault", ["reset", "truncate", 503, "whole"])
def test_a_failed_request_is_a_sentence(web: FaultyServer, tmp_path: Path, fault: int | str) -> None:
    file = find_file(f"{web.url}/f.bin?token=hidden")
    uses = [lambda: open_remote(file).read(1), lambda: download_file(file, tmp_path / "f")]
    for use in uses[: 1 if fault == "whole" else 2]:  # a download needs no ranges
        web.faults["f.bin"] = [fault] * 9
        with pytest.raises(RemoteError, match=r"^http://127.*/f.bin: not readable \(") as error:
            use()
        assert "hidden" not in str(error.value) and error.value.is_temporary


@pytest.mark.parametrize(
    ("status", "sentence"),
    [(403, r"access denied \(.*403"), (404, "no such file"), (418, r"not readable \(.*418")],
)
def test_the_status_of_a_server_is_a_sentence(web: FaultyServer, status: int, sentence: str) -> None:
    web.faults["f.bin"] = [status, status]  # the second is of the GET of a server without HEAD
    with pytest.raises(RemoteError, match=sentence) as error:
        find_file(f"{web.url}/f.bin?X-Amz-Signature=hidden")
    assert str(error.value).startswith(f"{web.url}/f.bin: ") and "hidden" not in str(error.value)
    assert isinstance(error.value, RemoteMissingError) == (status == 404)
    assert error.value.is_temporary == (status == 418)


def test_a_missing_package_and_an_unreachable_server_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RemoteError, match="Check the network"):
        find_remote("http://127.0.0.1:9/f.jsonl", (".jsonl",))
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(ValueError, match="package aiohttp is missing .* pip install aiohttp"):
        find_file("http://127.0.0.1:9/f.jsonl")


def test_a_file_that_changes_while_it_is_read_is_refused(web: FaultyServer, tmp_path: Path) -> None:
    file = find_file(f"{web.url}/f.bin")
    with pytest.raises(RemoteError, match="The file was replaced meanwhile"), open_remote(file) as content:
        content.read(10)
        web.files["f.bin"] = CONTENT[::-1]
    for use in (lambda: open_remote(file), lambda: download_file(file, tmp_path / "f")):
        with pytest.raises(RemoteError, match="The file was replaced meanwhile"):
            use()
    assert not list(tmp_path.iterdir())


def test_the_reader_equals_a_local_file_for_all_seeks(web: FaultyServer) -> None:
    local = io.BytesIO(CONTENT)
    with open_remote(find_file(f"{web.url}/f.bin")) as content:
        for position, n in [(0, 10), (999, 2), (5000, 3000), (10, 1), (7400, 500), (7501, 3), (20_000, 1)]:
            assert content.seek(position) == local.seek(position)
            assert content.read(n) == local.read(n)
        assert content.seek(-5, io.SEEK_END) == len(CONTENT) - 5


def test_names_and_messages_have_no_secrets() -> None:
    file = remote.RemoteFile("https://me:hidden@host/a%20b/c%20d.json.gz?token=hidden#x", 1, None)
    assert (str(file), file.name) == ("https://host/a%20b/c%20d.json.gz", "c d.json.gz")
    assert remote.RemoteFile("s3://bucket/a/what?.json", 1, None).name == "what?.json"
    text = "403, url='https://me:pw@h/x?X-Amz-Signature=abc' and s3://key:pw@bucket/a b"
    assert redact(text) == "403, url='https://h/x' and s3://bucket/a b"
    for url, sentence in [
        ("s3://key:pw@b/x", "s3://b/x: got credentials in a URL"),
        ("ftp://h/x", "ftp://h/x: got an unsupported kind of URL"),
    ]:
        with pytest.raises(ValueError, match=sentence) as error:
            find_remote(url, ())
        assert "pw" not in str(error.value)


def test_files_of_a_store_are_listed_uploaded_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_bucket(monkeypatch):
        (tmp_path / "f").write_bytes(CONTENT)
        names = ["a.jsonl", "b.json", "b.idx", "b.bin", "c.rejects.jsonl", ".hidden/d.jsonl", "sub/e.jsonl"]
        n_bytes: list[int] = []
        for name in names:
            remote.upload_file(tmp_path / "f", f"s3://bucket/in/{name}", n_bytes.append)
        assert sum(n_bytes) == len(names) * len(CONTENT)

        for word, expected in (
            ("", ["a.jsonl", "sub/e.jsonl"]),
            ("/*.json*", ["a.jsonl"]),
            ("/b.json", ["b.json"]),
        ):
            files = find_remote(f"s3://bucket/in{word}", (".jsonl", ".json"))
            assert [file.url for file in files] == [f"s3://bucket/in/{name}" for name in expected]
        with open_remote(find_file("s3://bucket/in/a.jsonl")) as content:
            assert content.read() == CONTENT
        for _ in range(2):  # the second time there is nothing to remove
            remote.remove_file("s3://bucket/in/a.jsonl")
        with pytest.raises(RemoteMissingError, match=r"a.jsonl: no such file"):
            find_file("s3://bucket/in/a.jsonl")
