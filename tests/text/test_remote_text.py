"""Preprocessing from and to object stores: the bytes of local files, faults, and uploads that resume."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.data import remote
from megatron.data.remote import RemoteError
from megatron.data.sidecar import read_sidecar
from megatron.text import preprocess as module
from megatron.text import remote_output
from megatron.text.inputs import Part, find_inputs
from megatron.text.join import PreprocessResult
from megatron.text.preprocess import PreprocessOptions
from megatron.text.remote_output import preprocess_to_store
from megatron.tokenizer.kinds import TokenizerSpec
from tests.datasets import write_texts
from tests.remote_servers import fail_reads, serve_bucket
from tests.text.preprocessing import FILES, run

NULL = TokenizerSpec("NullTokenizer", vocab_size=1000)
SUFFIXES = (".bin", ".idx", ".json")
URL = "s3://out/tokens/c4"
NAMES = [f"out/tokens/c4_text_document{suffix}" for suffix in SUFFIXES]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An S3 file system with the bucket `corpus` of all kinds of files, and the empty bucket `out`."""
    monkeypatch.setattr(remote, "BLOCK_BYTES", 30_000)
    monkeypatch.setattr(module, "PIECE_BYTES", 30_000)
    with serve_bucket(monkeypatch, "corpus") as store:
        for name, content in FILES.items():
            store.pipe(f"corpus/c4/{name}", content)
        if store.exists("out"):
            store.rm("out", recursive=True)
        store.mkdir("out")
        yield store


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    write_texts(path, (f"{i % 1000} {i % 7}" for i in range(500)))
    return path


def read(words: list[str], prefix: Path, tokenizer: str, **options: Any) -> list[bytes]:
    result = run(words, prefix, tokenizer, **options)
    return [Path(f"{o.prefix}{suffix}").read_bytes() for o in result.outputs for suffix in SUFFIXES[:2]]


def test_remote_files_give_the_bytes_of_local_ones(store: Any, tmp_path: Path, tokenizer: str) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
        options = {"keys": ("text", "url"), "overwrite": True}
        local = read([str(tmp_path / name)], tmp_path / "local", tokenizer, **options)
        assert read([f"s3://corpus/c4/{name}"], tmp_path / "x", tokenizer, **options) == local
        (entry,) = read_sidecar(tmp_path / "x_text_document")["sources"]
        assert entry["path"] == f"s3://corpus/c4/{name}" and entry["version"] and entry["sha256"] is None


def test_parts_of_a_store_have_every_document_once(store: Any, tmp_path: Path, tokenizer: str) -> None:
    urls = [str(file) for file in find_inputs(["s3://corpus/c4"])]
    assert urls == [f"s3://corpus/c4/{name}" for name in sorted(FILES)]
    whole = read(["s3://corpus/c4"], tmp_path / "x", tokenizer)[0]
    parts = [read(["s3://corpus/c4"], tmp_path / "x", tokenizer, part=Part(i, 3))[0] for i in (1, 2, 3)]
    assert b"".join(parts) == whole


def test_a_file_that_cannot_be_read_is_never_skipped(
    store: Any, tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_reads(monkeypatch, OSError(5, "reset"))
    with pytest.raises(RemoteError, match="a.json.gz: not readable"):
        read(["s3://corpus/c4/a.json.gz"], tmp_path / "x", tokenizer, skip_bad_lines=True)


def upload(text: Path, **options: Any) -> PreprocessResult:
    settings = PreprocessOptions(quiet=True, **options)
    return preprocess_to_store([str(text)], URL, text.parent / "work", NULL, settings)


def test_the_uploaded_outputs_equal_local_ones_and_are_not_repeated(store: Any, text: Path) -> None:
    text.write_text(text.read_text() + "{\n")
    first = upload(text, skip_bad_lines=True)
    run(text, text.parent / "c4", NULL, skip_bad_lines=True)
    rejects = "out/tokens/c4.rejects.jsonl"
    assert store.find("out") == [rejects, *NAMES] and first.rejected.path == f"s3://{rejects}"
    for name in [rejects, *NAMES]:
        assert store.cat_file(name) == (text.parent / name.rpartition("/")[2]).read_bytes()
    versions = [store.info(name)["LastModified"] for name in NAMES]
    again = upload(text, skip_bad_lines=True)
    assert (again.outputs, again.rejected) == (first.outputs, first.rejected)
    assert [store.info(name)["LastModified"] for name in NAMES] == versions
    with pytest.raises(ValueError, match=rf"^{URL}_text_document.bin: exists already.*--overwrite"):
        upload(text, skip_bad_lines=True, max_tokens=10)
    assert not list((text.parent / "work").iterdir())
    assert upload(text, skip_bad_lines=True, max_tokens=10, overwrite=True).outputs[0].n_tokens == 10


@pytest.mark.parametrize("n_uploaded", [0, 1, 2])
def test_a_killed_upload_is_invisible_and_is_repeated(
    store: Any, text: Path, monkeypatch: pytest.MonkeyPatch, n_uploaded: int
) -> None:
    upload(text, max_tokens=10)  # an older dataset
    original, uploaded = remote_output.upload_file, list[str]()

    def stop(path: Path, url: str, advance: Any) -> Any:
        if len(uploaded) == limit:
            raise KeyboardInterrupt
        uploaded.append(path.suffix)
        return original(path, url, advance)

    limit = n_uploaded
    monkeypatch.setattr(remote_output, "upload_file", stop)
    with pytest.raises(KeyboardInterrupt):
        upload(text, overwrite=True)
    assert store.find("out") == NAMES[:n_uploaded]
    uploaded.clear()
    limit = 3
    assert upload(text, overwrite=True).outputs[0].n_tokens == 1000
    assert uploaded == [*SUFFIXES]
    assert store.find("out") == NAMES and not list((text.parent / "work").iterdir())


def test_a_place_that_cannot_be_written_is_a_sentence(text: Path) -> None:
    for url in ("hf://datasets/a", "s3://bucket", "s3://bucket/a/"):
        with pytest.raises(ValueError, match=f"^{url}: got a URL without a bucket and a name of a store"):
            preprocess_to_store([str(text)], url, text.parent, NULL, PreprocessOptions(quiet=True))
