"""tools/download_assets.py against a hub on the loopback: text, tokenizers, weights, and what goes wrong."""

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

from tests.data.fake_hub import COMMIT, FakeHub, serving

TOKEN = "hf_aVerySecretWord"
C4 = "datasets/allenai/c4"
Run = Callable[..., subprocess.CompletedProcess[str]]


def documents(first: int, n: int) -> list[dict[str, str]]:
    return [
        {"text": f"document {i}: größe " + "x" * (i % 50), "url": f"u{i}"} for i in range(first, first + n)
    ]


def packed(first: int, n: int) -> bytes:
    lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in documents(first, n))
    return gzip.compress(lines.encode(), mtime=0)


@pytest.fixture
def run(root: Path, tmp_path: Path) -> Run:
    """Run the tool against a hub, with a token in the environment."""

    def start(hub: FakeHub, *words: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(root, *words), env=environment(root, hub, token), cwd=tmp_path,
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip

    return start


def command(root: Path, *words: str) -> list[str]:
    return [sys.executable, str(root / "tools" / "download_assets.py"), *words]


def environment(root: Path, hub: FakeHub, token: str = TOKEN) -> dict[str, str]:
    held = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return held | {"PYTHONPATH": str(root), "HF_ENDPOINT": hub.address, "HF_TOKEN": token}


@pytest.fixture
def c4() -> FakeHub:
    shards = {f"en/c4-train.{i:05d}-of-00003.json.gz": packed(100 * i, 100) for i in range(3)}
    shards["en/c4-validation.00000-of-00001.json.gz"] = packed(1000, 7)
    return FakeHub({C4: shards})


def lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_text_arrives_as_json_lines_up_to_a_number_of_documents(
    run: Run, c4: FakeHub, tmp_path: Path
) -> None:
    with serving(c4) as hub:
        done = run(hub, "c4", "--documents", "150", "--out", "c4")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[1:] == [
            "c4/train-00000.jsonl: 100 documents",
            "c4/train-00001.jsonl: 50 documents",
        ]
        waiting = tmp_path / "c4" / ".fetched" / "c4-train.00002-of-00003.json.gz.partial"
        waiting.parent.mkdir()
        waiting.write_bytes(b"what a download that was stopped has left")
        assert run(hub, "c4", "--split", "validation", "--out", "c4").returncode == 0
        waiting.unlink()
        waiting.parent.rmdir()
        asked = len(hub.asked)
        again = run(hub, "c4", "--documents", "150", "--out", "c4")
        assert again.stdout.count("already there") == 2
        assert not [path for path, _, _ in hub.asked[asked:] if "/resolve/" in path]
        other = run(hub, "c4", "--documents", "151", "--out", "c4")
        assert other.returncode == 1 and "holds train with other documents" in other.stderr
    assert lines(tmp_path / "c4" / "train-00000.jsonl") == documents(0, 100)
    assert lines(tmp_path / "c4" / "train-00001.jsonl") == documents(100, 50)
    assert lines(tmp_path / "c4" / "validation-00000.jsonl") == documents(1000, 7)
    assert {path.name for path in (tmp_path / "c4").iterdir()} == {
        "train-00000.jsonl", "train-00001.jsonl", "train.about", "validation-00000.jsonl", "validation.about",
    }  # fmt: skip


def test_a_number_of_bytes_is_not_passed_and_packed_shards_are_the_hubs_own(
    run: Run, c4: FakeHub, tmp_path: Path
) -> None:
    with serving(c4) as hub:
        assert run(hub, "c4", "--max-bytes", "2000", "--out", "few").returncode == 0
        assert run(hub, "c4", "--shards", "2", "--format", "packed", "--out", "packed").returncode == 0
        assert run(hub, "c4", "--documents", "2", "--format", "packed", "--out", "none").returncode == 1
    sizes = [len(json.dumps(one, ensure_ascii=False).encode()) + 1 for one in documents(0, 100)]
    fitting = max(n for n in range(100) if sum(sizes[:n]) <= 2000)
    assert lines(tmp_path / "few" / "train-00000.jsonl") == documents(0, fitting)
    names = sorted(path.name for path in (tmp_path / "packed").iterdir() if path.suffix == ".gz")
    assert names == ["train-00000.json.gz", "train-00001.json.gz"]
    assert (tmp_path / "packed" / names[1]).read_bytes() == packed(100, 100)
    assert not (tmp_path / "none").exists()


def test_json_lines_become_parquet_and_parquet_becomes_json_lines(
    run: Run, c4: FakeHub, tmp_path: Path
) -> None:
    with serving(c4) as hub:
        assert run(hub, "c4", "--shards", "1", "--format", "parquet", "--out", "a").returncode == 0
    table = pyarrow.parquet.read_table(tmp_path / "a" / "train-00000.parquet")
    assert table.to_pylist() == documents(0, 100)
    content = (tmp_path / "a" / "train-00000.parquet").read_bytes()
    slim = FakeHub({"datasets/DKYoon/SlimPajama-6B": {"data/train-00000-of-00001-ab.parquet": content}})
    with serving(slim) as hub:
        assert run(hub, "slimpajama", "--out", "b").returncode == 0
    assert lines(tmp_path / "b" / "train-00000.jsonl") == documents(0, 100)


def test_a_lost_connection_is_gone_on_with_from_the_byte_it_was_lost_at(run: Run, tmp_path: Path) -> None:
    content = os.urandom(50_000)
    hub = FakeHub(
        {"models/m": {"model.safetensors": content, "config.json": b"{}"}}, drop_after=20_000, drops=2
    )
    with serving(hub):
        done = run(hub, "weights", "m", "--out", "w")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "w" / "model.safetensors").read_bytes() == content
    ranges = [given for path, given, _ in hub.asked if path.endswith("model.safetensors")]
    assert ranges == [None, "bytes=20000-", "bytes=40000-"]


def test_a_killed_download_leaves_no_final_name_and_goes_on_when_run_again(
    run: Run, root: Path, tmp_path: Path
) -> None:
    content = os.urandom(300_000)
    # gives 100,000 bytes and then nothing, however often it is asked
    hub = FakeHub({"models/m": {"model.safetensors": content}}, drop_after=0, drops=10**6)
    with serving(hub):
        hub.drop_after, hub.drops = 100_000, 1
        hub_holds = tmp_path / "w" / "model.safetensors.partial"
        hub.give = lambda handler, content, give=hub.give: (
            give(handler, content) if not hub_holds.exists() else time.sleep(60)
        )
        process = subprocess.Popen(
            command(root, "weights", "m", "--out", "w"), env=environment(root, hub), cwd=tmp_path,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        end = time.monotonic() + 60
        while not (hub_holds.is_file() and hub_holds.stat().st_size == 100_000):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=240)
        assert process.returncode == 75 and told == "stopped; run the same command again\n"
        assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["model.safetensors.partial"]
        del hub.give
        hub.asked.clear()
        assert run(hub, "weights", "m", "--out", "w").returncode == 0
    assert (tmp_path / "w" / "model.safetensors").read_bytes() == content
    assert [given for path, given, _ in hub.asked if "resolve" in path] == ["bytes=100000-"]


def test_the_token_reaches_the_hub_alone_and_is_written_nowhere(run: Run, tmp_path: Path) -> None:
    content = os.urandom(5_000)
    files = {"models/m": {"model.safetensors": content, "config.json": b"{}"}}
    with serving(FakeHub(files)) as store, serving(FakeHub(files, token=TOKEN)) as hub:
        hub.elsewhere = store.address.replace("127.0.0.1", "localhost")
        done = run(hub, "weights", "m", "--out", "w")
        refused = run(hub, "weights", "m", "--out", "x", token="hf_another")
        nothing = run(hub, "weights", "m", "--out", "x", token="")
    assert done.returncode == 0, done.stderr
    assert {given for _, _, given in store.asked} == {None}
    assert f"Bearer {TOKEN}" in {given for _, _, given in hub.asked}
    for failed in (refused, nothing):
        assert failed.returncode == 1 and failed.stderr.count("\n") == 1
        assert "does not give m (401)" in failed.stderr and "set HF_TOKEN" in failed.stderr
    said = done.stdout + done.stderr + refused.stdout + refused.stderr
    assert TOKEN not in said and "hf_another" not in said
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()
    ]
    assert not (tmp_path / "x").exists()


def test_what_is_not_there_not_safe_or_not_whole_is_one_sentence(run: Run, tmp_path: Path) -> None:
    pickled = {"models/p": {"pytorch_model.bin": b"pickle", "config.json": b"{}"}}
    with serving(FakeHub(pickled)) as hub:
        absent, unsafe = (
            run(hub, "tokenizer", "nobody/none", "--out", "t"),
            run(hub, "weights", "p", "--out", "t"),
        )
        pattern = run(hub, "c4", "--repo", "p", "--out", "t")
    with serving(FakeHub({"models/m": {"model.safetensors": bytes(2_000)}})) as hub:
        hub.give = lambda handler, content: FakeHub.give(hub, handler, b"\1" * len(content))
        other = run(hub, "weights", "m", "--out", "t")
    gone = run(FakeHub({}, address="http://127.0.0.1:9"), "tokenizer", "gpt2", "--out", "t")
    for failed, sentence in (
        (absent, "has no nobody/none (404)"), (pattern, "has no p (404)"),
        (unsafe, "has no *.safetensors, only config.json, pytorch_model.bin"),
        (other, "what came has another hash than the hub lists"),
        (gone, "Connection refused; run the same command"),
    ):  # fmt: skip
        assert failed.returncode == 1 and failed.stderr.count("\n") == 1, failed.stderr
        assert sentence in failed.stderr
    assert not list((tmp_path / "t").glob("*")) if (tmp_path / "t").exists() else True


def test_a_tokenizer_is_its_files_and_the_commit_is_told(run: Run, tmp_path: Path) -> None:
    files = {"vocab.json": b"{}", "merges.txt": b"#", "model.safetensors": b"big", "README.md": b"x"}
    with serving(FakeHub({"models/gpt2": files})) as hub:
        done = run(hub, "tokenizer", "gpt2", "--out", "t")
    assert done.stdout.splitlines()[0] == f"gpt2 at {COMMIT[:12]}"
    assert {path.name for path in (tmp_path / "t").iterdir()} == {"vocab.json", "merges.txt"}
