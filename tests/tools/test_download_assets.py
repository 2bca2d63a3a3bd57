"""Tests of tools/download_assets.py with a local hub: text, tokenizers, weights, errors."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet
import pytest

from tests.data.fake_hub import COMMIT, FakeHub, serve_hub

TOKEN = "hf_aVerySecretWord"
C4 = "datasets/allenai/c4"
Run = Callable[..., subprocess.CompletedProcess[str]]


def make_documents(first: int, n: int) -> list[dict[str, str]]:
    return [
        {"text": f"document {i}: größe " + "x" * (i % 50), "url": f"u{i}"} for i in range(first, first + n)
    ]


def pack_documents(first: int, n: int) -> bytes:
    lines = "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in make_documents(first, n))
    return gzip.compress(lines.encode(), mtime=0)


@pytest.fixture
def run(root: Path, tmp_path: Path) -> Run:
    """Run the tool against a hub, with a token in the environment."""

    def run_download(hub: FakeHub, *words: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            tool_command(root, *words), env=hub_environment(root, hub, token), cwd=tmp_path,
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip

    return run_download


def tool_command(root: Path, *words: str) -> list[str]:
    return [sys.executable, str(root / "tools" / "download_assets.py"), *words]


def hub_environment(root: Path, hub: FakeHub, token: str = TOKEN) -> dict[str, str]:
    variables = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return variables | {"PYTHONPATH": str(root), "HF_ENDPOINT": hub.address, "HF_TOKEN": token}


@pytest.fixture
def c4() -> FakeHub:
    shards = {f"en/c4-train.{i:05d}-of-00003.json.gz": pack_documents(100 * i, 100) for i in range(3)}
    shards["en/c4-validation.00000-of-00001.json.gz"] = pack_documents(1000, 7)
    return FakeHub({C4: shards})


def read_lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_text_arrives_as_json_lines_up_to_a_number_of_documents(
    run: Run, c4: FakeHub, tmp_path: Path
) -> None:
    with serve_hub(c4) as hub:
        done = run(hub, "c4", "--documents", "150", "--out", "c4")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[1:] == [
            "c4/train-00000.jsonl: 100 documents",
            "c4/train-00001.jsonl: 50 documents",
        ]
        waiting = tmp_path / "c4" / ".fetched" / "c4-train.00002-of-00003.json.gz.partial"
        waiting.parent.mkdir()
        waiting.write_bytes(b"the partial file of a stopped download")
        assert run(hub, "c4", "--split", "validation", "--out", "c4").returncode == 0
        waiting.unlink()
        waiting.parent.rmdir()
        n_requests = len(hub.requests)
        again = run(hub, "c4", "--documents", "150", "--out", "c4")
        assert again.stdout.count("already there") == 2
        assert not [path for path, _, _ in hub.requests[n_requests:] if "/resolve/" in path]
        other = run(hub, "c4", "--documents", "151", "--out", "c4")
        assert other.returncode == 1 and "got train with other documents" in other.stderr
    assert read_lines(tmp_path / "c4" / "train-00000.jsonl") == make_documents(0, 100)
    assert read_lines(tmp_path / "c4" / "train-00001.jsonl") == make_documents(100, 50)
    assert read_lines(tmp_path / "c4" / "validation-00000.jsonl") == make_documents(1000, 7)
    assert {path.name for path in (tmp_path / "c4").iterdir()} == {
        "train-00000.jsonl", "train-00001.jsonl", "train.about", "validation-00000.jsonl", "validation.about",
    }  # fmt: skip


def test_max_bytes_is_not_exceeded_and_packed_shards_equal_those_of_the_hub(
    run: Run, c4: FakeHub, tmp_path: Path
) -> None:
    with serve_hub(c4) as hub:
        assert run(hub, "c4", "--max-bytes", "2000", "--out", "few").returncode == 0
        assert run(hub, "c4", "--shards", "2", "--format", "packed", "--out", "packed").returncode == 0
        assert run(hub, "c4", "--documents", "2", "--format", "packed", "--out", "none").returncode == 1
    sizes = [
        len(json.dumps(document, ensure_ascii=False).encode()) + 1 for document in make_documents(0, 100)
    ]
    fitting = max(n for n in range(100) if sum(sizes[:n]) <= 2000)
    assert read_lines(tmp_path / "few" / "train-00000.jsonl") == make_documents(0, fitting)
    names = sorted(path.name for path in (tmp_path / "packed").iterdir() if path.suffix == ".gz")
    assert names == ["train-00000.json.gz", "train-00001.json.gz"]
    assert (tmp_path / "packed" / names[1]).read_bytes() == pack_documents(100, 100)
    assert not (tmp_path / "none").exists()


def test_json_lines_become_parquet_and_parquet_becomes_json_lines(
    run: Run, c4: FakeHub, tmp_path: Path
) -> None:
    with serve_hub(c4) as hub:
        assert run(hub, "c4", "--shards", "1", "--format", "parquet", "--out", "a").returncode == 0
    table = pyarrow.parquet.read_table(tmp_path / "a" / "train-00000.parquet")
    assert table.to_pylist() == make_documents(0, 100)
    content = (tmp_path / "a" / "train-00000.parquet").read_bytes()
    slim = FakeHub({"datasets/DKYoon/SlimPajama-6B": {"data/train-00000-of-00001-ab.parquet": content}})
    with serve_hub(slim) as hub:
        assert run(hub, "slimpajama", "--out", "b").returncode == 0
    assert read_lines(tmp_path / "b" / "train-00000.jsonl") == make_documents(0, 100)


def test_a_lost_connection_is_resumed_at_the_byte_where_it_was_lost(run: Run, tmp_path: Path) -> None:
    content = os.urandom(50_000)
    hub = FakeHub(
        {"models/m": {"model.safetensors": content, "config.json": b"{}"}}, drop_after=20_000, drops=2
    )
    with serve_hub(hub):
        done = run(hub, "weights", "m", "--out", "w")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "w" / "model.safetensors").read_bytes() == content
    ranges = [given for path, given, _ in hub.requests if path.endswith("model.safetensors")]
    assert ranges == [None, "bytes=20000-", "bytes=40000-"]


def test_a_killed_download_leaves_no_final_name_and_resumes_when_rerun(
    run: Run, root: Path, tmp_path: Path
) -> None:
    content = os.urandom(300_000)
    # the hub sends 100,000 bytes and then nothing, at every request
    hub = FakeHub({"models/m": {"model.safetensors": content}}, drop_after=0, drops=10**6)
    with serve_hub(hub):
        hub.drop_after, hub.drops = 100_000, 1
        partial = tmp_path / "w" / "model.safetensors.partial"
        hub.send_content = lambda handler, content, give=hub.send_content: (
            give(handler, content) if not partial.stat().st_size else time.sleep(60)
        )
        process = subprocess.Popen(
            tool_command(root, "weights", "m", "--out", "w"), env=hub_environment(root, hub), cwd=tmp_path,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        end = time.monotonic() + 60
        while not (partial.is_file() and partial.stat().st_size == 100_000):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 75 and errors == "stopped; run the same command again\n"
        assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["model.safetensors.partial"]
        del hub.send_content
        hub.requests.clear()
        assert run(hub, "weights", "m", "--out", "w").returncode == 0
    assert (tmp_path / "w" / "model.safetensors").read_bytes() == content
    assert [given for path, given, _ in hub.requests if "resolve" in path] == ["bytes=100000-"]


def test_the_token_is_sent_to_the_hub_only_and_written_nowhere(run: Run, tmp_path: Path) -> None:
    content = os.urandom(5_000)
    files = {"models/m": {"model.safetensors": content, "config.json": b"{}"}}
    with serve_hub(FakeHub(files)) as store, serve_hub(FakeHub(files, token=TOKEN)) as hub:
        hub.elsewhere = store.address.replace("127.0.0.1", "localhost")
        done = run(hub, "weights", "m", "--out", "w")
        refused = run(hub, "weights", "m", "--out", "x", token="hf_another")
        nothing = run(hub, "weights", "m", "--out", "x", token="")
    assert done.returncode == 0, done.stderr
    assert {given for _, _, given in store.requests} == {None}
    assert f"Bearer {TOKEN}" in {given for _, _, given in hub.requests}
    for failed in (refused, nothing):
        assert failed.returncode == 1 and failed.stderr.count("\n") == 1
        assert "access to m refused (401)" in failed.stderr and "Set HF_TOKEN" in failed.stderr
    output = done.stdout + done.stderr + refused.stdout + refused.stderr
    assert TOKEN not in output and "hf_another" not in output
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()
    ]
    assert not (tmp_path / "x").exists()


def test_missing_unsafe_and_damaged_files_are_reported_in_one_line(run: Run, tmp_path: Path) -> None:
    pickled = {"models/p": {"pytorch_model.bin": b"pickle", "config.json": b"{}"}}
    with serve_hub(FakeHub(pickled)) as hub:
        absent, unsafe = (
            run(hub, "tokenizer", "nobody/none", "--out", "t"),
            run(hub, "weights", "p", "--out", "t"),
        )
        pattern = run(hub, "c4", "--repo", "p", "--out", "t")
    with serve_hub(FakeHub({"models/m": {"model.safetensors": bytes(2_000)}})) as hub:
        hub.send_content = lambda handler, content: FakeHub.send_content(hub, handler, b"\1" * len(content))
        other = run(hub, "weights", "m", "--out", "t")
    gone = run(FakeHub({}, address="http://127.0.0.1:9"), "tokenizer", "gpt2", "--out", "t")
    for failed, sentence in (
        (absent, "nobody/none does not exist (404)"), (pattern, "p does not exist (404)"),
        (unsafe, "expected *.safetensors, got only config.json, pytorch_model.bin"),
        (other, "got content with another hash than the hub lists"),
        (gone, "Connection refused. Run the same command"),
    ):  # fmt: skip
        assert failed.returncode == 1 and failed.stderr.count("\n") == 1, failed.stderr
        assert sentence in failed.stderr
    assert not list((tmp_path / "t").glob("*")) if (tmp_path / "t").exists() else True


def test_a_tokenizer_is_downloaded_as_its_files_and_the_commit_is_printed(run: Run, tmp_path: Path) -> None:
    files = {"vocab.json": b"{}", "merges.txt": b"#", "model.safetensors": b"big", "README.md": b"x"}
    with serve_hub(FakeHub({"models/gpt2": files})) as hub:
        done = run(hub, "tokenizer", "gpt2", "--out", "t")
    assert done.stdout.splitlines()[0] == f"gpt2 at {COMMIT[:12]}"
    assert {path.name for path in (tmp_path / "t").iterdir()} == {"vocab.json", "merges.txt"}
