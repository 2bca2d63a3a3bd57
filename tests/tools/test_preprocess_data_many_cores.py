"""Tests of tools/preprocess_data_many_cores.py: stopped and killed processes, and its output."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LIMIT_S = 240  # for work that takes seconds on an idle machine
TEXT = "One fish, two fish, red fish, blue fish. "


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a normalizer, so that the work is done by worker processes."""
    inner = Tokenizer(models.BPE())
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        [TEXT], trainers.BpeTrainer(special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    inner.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """25 MB in four pieces: seconds of work."""
    path = tmp_path_factory.mktemp("source") / "in.jsonl"
    path.write_text((json.dumps({"text": TEXT * 250}) + "\n") * 2500)
    return path


def start_tool(root: Path, tokenizer: Path, source: Path, out: Path, *words: object) -> subprocess.Popen[str]:
    tool = root / "tools" / "preprocess_data_many_cores.py"
    named = ["--input", source, "--output-prefix", "x", "--tokenizer-model", tokenizer, "--root", out]
    command = [sys.executable, str(tool), *map(str, named), *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_workers(process: subprocess.Popen[str], out: Path, n: int) -> list[int]:
    """Wait until n workers have begun a piece, and return their ids."""
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not listed.exists():
        pytest.skip("this system does not list the children of a process")
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if len(list(out.glob(".x.shards/*.ids"))) >= n:
            pids = [int(pid) for pid in listed.read_text().split()]
            return [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError(f"no workers within {LIMIT_S} s")


def wait_for_end(pids: list[int]) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return
        time.sleep(0.05)
    raise AssertionError(f"processes {pids} were left behind")


def test_a_killed_worker_is_reported_in_one_line_and_the_same_command_finishes(
    root: Path, tmp_path: Path, tokenizer: Path, source: Path
) -> None:
    process = start_tool(root, tokenizer, source, tmp_path / "out", "--workers", 2)
    workers = wait_for_workers(process, tmp_path / "out", 2)
    os.kill(workers[0], signal.SIGKILL)
    _, words = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "error: a worker ended with exit code -9 before it finished" in words
    assert "Traceback" not in words
    wait_for_end(workers)
    assert list((tmp_path / "out").glob("x*")) == []
    assert start_tool(root, tokenizer, source, tmp_path / "out", "--workers", 2).wait(timeout=240) == 0
    assert start_tool(root, tokenizer, source, tmp_path / "undisturbed").wait(timeout=240) == 0
    for suffix in ("bin", "idx", "json"):
        resumed, undisturbed = (
            tmp_path / name / f"x_text_document.{suffix}" for name in ("out", "undisturbed")
        )
        assert resumed.read_bytes() == undisturbed.read_bytes()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"x_text_document.{suffix}" for suffix in ("bin", "idx", "json")
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_the_command(
    root: Path, tmp_path: Path, tokenizer: Path, source: Path, number: signal.Signals
) -> None:
    process = start_tool(root, tokenizer, source, tmp_path / "out", "--workers", 2)
    workers = wait_for_workers(process, tmp_path / "out", 2)
    assert len(workers) == 2
    process.send_signal(number)
    _, words = process.communicate(timeout=240)
    assert process.returncode == (-9 if number == signal.SIGKILL else 75)
    assert "Traceback" not in words
    wait_for_end(workers)
    assert list((tmp_path / "out").glob("x*")) == []


def test_a_full_disk_is_reported_with_the_folder_of_the_output(root, tokenizer, source, tmp_path) -> None:
    out = tmp_path / "out" / "c4"
    program = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
        "sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", program]
    command += [str(root / "tools" / "preprocess_data_many_cores.py"), "--input", str(source), "--quiet"]
    command += ["--output-prefix", str(out), "--tokenizer-model", str(tokenizer)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode == 1
    assert f"error: {out.parent}: " in done.stderr and "make room" in done.stderr, done.stderr
    assert not list(out.parent.glob("c4*.bin"))


@pytest.mark.parametrize("n_workers", [1, 2, 3])
def test_the_output_equals_the_files_that_megatron_wrote_of_the_same_text(
    root: Path, tmp_path: Path, scaling_data: Path, n_workers: int
) -> None:
    folder = scaling_data / "megatron_openwebtext"
    (tmp_path / "tiny").mkdir()
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(folder / f"gpt2-tiny-{name}", tmp_path / "tiny" / name)
    source = folder / "openwebtext-1000.decoded.jsonl.gz"
    process = start_tool(root, tmp_path / "tiny", source, tmp_path, "--append-eod", "--workers", n_workers)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert "1,361,845 tokens per epoch, 1,000 documents (0 empty)" in output
    for suffix in (".bin", ".idx"):
        theirs = folder / f"meg-gpt2-openwebtext_text_document{suffix}"
        assert (tmp_path / f"x_text_document{suffix}").read_bytes() == theirs.read_bytes()


def test_empty_documents_are_counted_with_and_without_their_end(
    root: Path, tmp_path: Path, tokenizer: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(
        '{"text": ""}\n\n{"text": "\\u0000"}\n{"text": ""}\n'
    )  # the second line is not a document
    for words, n_tokens in (((), 1), (("--append-eod", "--overwrite"), 4)):
        process = start_tool(root, tokenizer, source, tmp_path, *words)
        output, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        assert f"{n_tokens} tokens per epoch, 3 documents (2 empty)" in output
        sidecar = json.loads((tmp_path / "x_text_document.json").read_text())
        assert (sidecar["documents"], sidecar["empty_documents"], sidecar["tokens"]) == (3, 2, n_tokens)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--json-keys", "text", "text"], "json keys: got a key twice in text, text"),
        (["--input", "in.jsonl", "in.jsonl"], "in.jsonl: got this file twice"),
    ],
)
def test_what_is_named_twice_is_refused(
    root: Path, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, words: list, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"text": "x"}\n')
    process = start_tool(root, tokenizer, Path("in.jsonl"), tmp_path / "out", *words)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 1
    assert errors.startswith("error: ") and sentence in errors and errors.count("\n") == 1
    assert not (tmp_path / "out").exists()
