"""Tests of megatron/bench_history.py: appending by several processes, damaged lines, commits."""

import argparse
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from history import add_history_options, append_record, read_history, record_result

from megatron import bench_history

RECORD = {"bench": "train", "cell": "a", "value": 1.0, "unit": "s", "better": "lower", "commit": "c0ffee"}


@pytest.fixture
def commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "c0ffee+")
    bench_history.read_commit.cache_clear()


def test_a_record_has_value_spread_commit_machine_and_versions(tmp_path: Path, commit: None) -> None:
    path = tmp_path / "new" / "history.jsonl"
    record_result(
        path,
        "train",
        "float32",
        20.0,
        "tokens/s",
        better="higher",
        repeats=[18, 20, 23],
        details={"mfu": 0.5},
    )
    (record,) = read_history(path)
    assert (record["value"], record["unit"], record["better"]) == (20.0, "tokens/s", "higher")
    assert record["repeats"] == [18.0, 20.0, 23.0] and record["spread"] == 0.25  # (23 - 18) / 20
    assert (record["commit"], record["dirty"], record["details"]) == ("c0ffee", True, {"mfu": 0.5})
    assert record["machine"]["cores"] == len(os.sched_getaffinity(0)) and record["machine"]["cpu"]
    assert record["versions"]["python"] == sys.version.split()[0] and "torch" in record["versions"]
    assert path.stat().st_mtime == pytest.approx(record["time"], abs=60)


def test_without_a_history_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record_result(None, "train", "float32", 1.0, "s", better="lower")
    assert not list(tmp_path.iterdir())


def test_options_choose_the_file(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    def parse(*words: str) -> Path | None:
        parser = argparse.ArgumentParser()
        add_history_options(parser)
        return parser.parse_args(words).history

    monkeypatch.delenv("BENCH_HISTORY", raising=False)
    assert parse() == root / "bench_history.jsonl"
    assert parse("--history", "other.jsonl") == Path("other.jsonl") and parse("--no-history") is None
    monkeypatch.setenv("BENCH_HISTORY", "named.jsonl")
    assert parse() == Path("named.jsonl")
    monkeypatch.setenv("BENCH_HISTORY", "")
    assert parse() is None


def test_lines_of_processes_that_append_at_once_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    # lines of 40 KB: longer than a pipe's or a buffer's atomic write
    code = (
        "import sys; from pathlib import Path; from history import append_record\n"
        f"record = {RECORD!r}\n"
        "for i in range(20):\n"
        "    append_record(Path(sys.argv[1]), record | {'cell': sys.argv[2] * 40_000, 'value': i})\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(path), letter], env=os.environ) for letter in "abc"
    ]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == 60
    for letter in "abc":
        written = [record["value"] for record in records if record["cell"] == letter * 40_000]
        assert written == list(range(20))


def test_half_a_line_of_a_killed_process_loses_only_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "history.jsonl"
    append_record(path, RECORD)
    with path.open("a") as file:
        file.write('{"bench": "train", "ce')
    with caplog.at_level(logging.WARNING):
        assert [record["value"] for record in read_history(path)] == [1.0]
    assert "history.jsonl:2" in caplog.text
    append_record(path, RECORD | {"value": 2.0})
    assert [record["value"] for record in read_history(path)] == [1.0, 2.0]


@pytest.mark.parametrize(
    "line",
    ["[1, 2]", '{"cell": "a"}', "\x00\x00", '{"bench": ' * 5000, json.dumps(RECORD | {"value": None})],
)
def test_a_line_that_is_not_a_result_is_skipped(tmp_path: Path, line: str) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(f"{line}\n{json.dumps(RECORD)}\n")
    assert list(read_history(path)) == [RECORD]


def test_a_figure_that_is_not_finite_is_refused_and_not_written(tmp_path: Path, commit: None) -> None:
    path = tmp_path / "history.jsonl"
    with pytest.raises(ValueError, match="train float32: got NaN or Inf"):
        record_result(path, "train", "float32", float("nan"), "s", better="lower")
    assert not path.exists()


def test_the_commit_is_that_of_the_checkout_or_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    monkeypatch.setattr(bench_history, "ROOT", tmp_path)
    # git would look for a checkout above the folder
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    bench_history.read_commit.cache_clear()
    assert bench_history.read_commit() == {"commit": None, "dirty": None}
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "Begin"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True, timeout=30)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], cwd=tmp_path, check=True, timeout=30)
    bench_history.read_commit.cache_clear()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True)
    assert bench_history.read_commit() == {"commit": head.stdout.strip(), "dirty": True}
    bench_history.read_commit.cache_clear()
