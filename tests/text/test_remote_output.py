"""Outputs of preprocessing in object storage: complete or invisible, restarts after a killed upload."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron import remote_requests
from megatron.command import load_tool
from megatron.data import remote
from megatron.data.indexed import IndexedTokens
from megatron.remote_files import RemotePath
from megatron.text import remote_output
from megatron.text.preprocess import PreprocessOptions, PreprocessResult, preprocess
from megatron.text.remote_output import preprocess_to_store
from megatron.tokenizer.kinds import TokenizerSpec
from tests.remote_servers import STORE_VARIABLES, serve_store

NULL = TokenizerSpec("NullTokenizer", vocab_size=1000)
URL = "s3://out/tokens/c4"
NAMES = [
    "out/tokens/c4_text_document.bin",
    "out/tokens/c4_text_document.idx",
    "out/tokens/c4_text_document.json",
]


@pytest.fixture(scope="module")
def store_url() -> Iterator[str]:
    with serve_store() as url:
        yield url


@pytest.fixture
def store(store_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    import s3fs

    for name, value in (STORE_VARIABLES | {"AWS_ENDPOINT_URL": store_url}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SCALING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote_requests, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(remote_requests, "ATTEMPTS", 3)
    s3fs.S3FileSystem.clear_instance_cache()
    remote.cache_dataset.cache_clear()
    store = s3fs.S3FileSystem(use_listings_cache=False)
    if store.exists("out"):
        store.rm("out", recursive=True)
    store.mkdir("out")
    return store


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i % 1000} {i % 7}"}) + "\n" for i in range(500)))
    return path


def run(text: Path, tmp_path: Path, **options: Any) -> PreprocessResult:
    return preprocess_to_store(
        [str(text)], RemotePath(URL), tmp_path / "work", NULL, PreprocessOptions(quiet=True, **options)
    )


def test_the_uploaded_dataset_equals_a_local_one(store: Any, text: Path, tmp_path: Path) -> None:
    result = run(text, tmp_path)
    assert [str(output.prefix) for output in result.outputs] == [f"{URL}_text_document"]
    preprocess([str(text)], tmp_path / "c4", NULL, PreprocessOptions(quiet=True))
    assert store.find("out") == NAMES
    for name in NAMES:
        assert store.cat_file(name) == (tmp_path / name.rpartition("/")[2]).read_bytes()
    assert not list((tmp_path / "work").iterdir())
    local = IndexedTokens(tmp_path / "c4_text_document")
    assert (IndexedTokens(f"{URL}_text_document").tokens[:] == local.tokens[:]).all()


def test_a_finished_command_does_nothing_and_another_is_refused(
    store: Any, text: Path, tmp_path: Path
) -> None:
    first = run(text, tmp_path)
    versions = [store.info(name)["LastModified"] for name in NAMES]
    again = run(text, tmp_path)
    assert [vars(output) for output in again.outputs] == [vars(output) for output in first.outputs]
    assert [store.info(name)["LastModified"] for name in NAMES] == versions
    before = store.cat_file(NAMES[0])
    with pytest.raises(ValueError, match=rf"^{URL}_text_document.json: exists already.*--overwrite"):
        run(text, tmp_path, max_tokens=10)
    assert store.cat_file(NAMES[0]) == before and not list((tmp_path / "work").iterdir())
    assert run(text, tmp_path, max_tokens=10, overwrite=True).outputs[0].n_tokens == 10
    assert len(store.cat_file(NAMES[0])) == 20


@pytest.mark.parametrize("n_uploaded", [0, 1, 2])
def test_a_killed_upload_is_invisible_and_resumes(
    store: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_uploaded: int
) -> None:
    run(text, tmp_path, max_tokens=10)  # an older dataset
    upload, uploaded = remote_output.upload_file, []

    def stop(path: Path, url: str, bar: Any) -> None:
        if len(uploaded) == n_uploaded:
            raise KeyboardInterrupt
        uploaded.append(path.suffix)
        upload(path, url, bar)

    monkeypatch.setattr(remote_output, "upload_file", stop)
    with pytest.raises(KeyboardInterrupt):
        run(text, tmp_path, overwrite=True)
    assert store.find("out") == NAMES[:n_uploaded]
    uploaded.clear()
    monkeypatch.setattr(
        remote_output, "upload_file", lambda *words: (uploaded.append(words[0].suffix), upload(*words))
    )
    assert run(text, tmp_path, overwrite=True).outputs[0].n_tokens == 1000
    assert uploaded == [".bin", ".idx", ".json"][n_uploaded:]
    assert store.find("out") == NAMES and not list((tmp_path / "work").iterdir())


def test_a_large_file_is_uploaded_in_parts_and_old_parts_are_deleted(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_output, "PART_BYTES", 5 << 20)  # the minimum of S3
    path = tmp_path / "large.bin"
    path.write_bytes(bytes(range(256)) * (12 << 12))
    for key in ("large.bin", "other.bin"):
        store.call_s3("create_multipart_upload", Bucket="out", Key=key)
    bar = remote_output.ProgressBar("", None, "B", quiet=True)
    remote_output.upload_file(path, "s3://out/large.bin", bar)
    assert store.cat_file("out/large.bin") == path.read_bytes()
    assert "-" in store.info("out/large.bin")["ETag"]  # of several parts
    assert [upload["Key"] for upload in store.list_multipart_uploads("out")] == ["other.bin"]


def test_rejects_are_uploaded_before_the_sidecar(store: Any, text: Path, tmp_path: Path) -> None:
    text.write_text(text.read_text() + "{\n")
    result = run(text, tmp_path, skip_bad_lines=True)
    assert str(result.rejects) == f"{URL}.rejects.jsonl"
    assert json.loads(store.cat_file("out/tokens/c4.rejects.jsonl"))["line"] == 501
    again = run(text, tmp_path, skip_bad_lines=True)
    assert again.n_rejected == 1 and str(again.rejects) == str(result.rejects)


@pytest.mark.parametrize("url", ["https://host/a", "hf://datasets/a", "s3://bucket"])
def test_a_place_that_cannot_be_written_is_a_sentence(text: Path, tmp_path: Path, url: str) -> None:
    with pytest.raises(ValueError, match=r"expected s3://BUCKET/NAME or gs://"):
        preprocess_to_store([str(text)], RemotePath(url), tmp_path / "w", NULL, PreprocessOptions())
    assert not (tmp_path / "w").exists()


def test_an_unwritable_bucket_is_a_sentence(store: Any, text: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"^s3://none/c4_text_document.bin: "):
        preprocess_to_store(
            [str(text)], RemotePath("s3://none/c4"), tmp_path / "w", NULL, PreprocessOptions(quiet=True)
        )


def test_the_command_uploads(
    store: Any, text: Path, tmp_path: Path, root: Path, capsys: Any, monkeypatch: Any
) -> None:
    tool = load_tool(root / "tools" / "preprocess_data_many_cores.py")
    monkeypatch.setattr(tool, "install_stop_handlers", lambda: None)
    words = ["--input", str(text), "--output-prefix", URL, "--work-dir", str(tmp_path / "work"), "--quiet"]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
    assert tool.main(words) == 0
    assert capsys.readouterr().out.startswith(
        f"{URL}_text_document.bin: 1,000 tokens per epoch, 500 documents"
    )
    assert store.find("out") == NAMES
