"""Remote files: errors as sentences, pinned versions, and no credentials in any message."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.data import remote
from megatron.data.remote import RemoteError, RemoteMissingError, find_file, find_remote, open_remote, redact
from megatron.data.remote import _download_file as download_file
from tests.remote_servers import fail_reads, serve_bucket

CONTENT = bytes(range(256)) * 40
URL = "s3://bucket/f.bin"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 1000)
    with serve_bucket(monkeypatch) as store:
        store.pipe("bucket/f.bin", CONTENT)
        yield store


def test_a_failed_request_is_a_sentence(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = find_file(URL)
    reset = OSError(5, "connection to http://me:hidden@host reset")
    for error, sentence in (
        (reset, r"not readable \(OSError: .*//host reset"),
        (OSError("slow"), r"not readable \(OSError: slow"),
        (PermissionError("403"), r"access denied \(PermissionError: 403"),
        (FileNotFoundError("404"), "no such file"),
    ):
        fail_reads(monkeypatch, error)
        for use in (lambda: open_remote(file).read(1), lambda: download_file(file, tmp_path / "f")):
            with pytest.raises(RemoteError, match=rf"^{URL}: {sentence}") as caught:
                use()
            assert "hidden" not in str(caught.value)
            assert isinstance(caught.value, RemoteMissingError) == isinstance(error, FileNotFoundError)

    async def read_less(*arguments: Any, **options: Any) -> bytes:
        return b"x"

    monkeypatch.setattr(type(store), "_cat_file", read_less)
    store.clear_instance_cache()  # an instance has bound its methods
    with pytest.raises(RemoteError, match="not readable .* got 1 bytes, expected 1,000"):
        open_remote(file).read(1)


def test_a_missing_package_and_another_kind_of_url_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for url, sentence in [
        ("gs://bucket/f.jsonl", "package gcsfs is missing .* pip install gcsfs"),
        ("s3://key:pw@b/x", "s3://b/x: got credentials in a URL"),
        ("https://me:pw@h/x", "https://h/x: got an unsupported kind of URL.* with curl"),
    ]:
        with pytest.raises(ValueError, match=sentence) as error:
            find_remote(url, ())
        assert "pw" not in str(error.value)
    assert redact("403, url='https://me:pw@h/x' and s3://key:pw@bucket/a b") == (
        "403, url='https://h/x' and s3://bucket/a b"
    )


def test_a_file_that_changes_while_it_is_read_is_refused(store: Any, tmp_path: Path) -> None:
    file = find_file(URL)
    with pytest.raises(RemoteError, match="The file was replaced meanwhile"), open_remote(file) as content:
        content.read(10)
        store.pipe("bucket/f.bin", CONTENT[::-1])
    for use in (lambda: open_remote(file), lambda: download_file(file, tmp_path / "f")):
        with pytest.raises(RemoteError, match="The file was replaced meanwhile"):
            use()
    assert not list(tmp_path.iterdir())


def test_files_of_a_store_are_listed_uploaded_and_removed(store: Any, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(CONTENT)
    names = ["a.jsonl", "b.json", "b.idx", "b.bin", "c.rejects.jsonl", ".hidden/d.jsonl", "sub/e.jsonl"]
    n_bytes: list[int] = []
    for name in names:
        remote.upload_file(tmp_path / "f", f"s3://bucket/in/{name}", n_bytes.append)
    assert sum(n_bytes) == len(names) * len(CONTENT)
    listed = {"": ["a.jsonl", "sub/e.jsonl"], "/*.json*": ["a.jsonl"], "/b.json": ["b.json"]}
    for word, expected in listed.items():
        files = find_remote(f"s3://bucket/in{word}", (".jsonl", ".json"))
        assert [file.url for file in files] == [f"s3://bucket/in/{name}" for name in expected]
    with open_remote(find_file("s3://bucket/in/a.jsonl")) as content:
        assert content.read() == CONTENT
    for _ in range(2):  # the second time there is nothing to remove
        remote.remove_file("s3://bucket/in/a.jsonl")
    with pytest.raises(RemoteMissingError, match=r"a.jsonl: no such file"):
        find_file("s3://bucket/in/a.jsonl")
