"""Tests of tools/bench/kills.py: killed commands leave the files of undisturbed runs; faults are reported."""

import contextlib
import importlib
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

# accepts its half-written file as complete
CARELESS = """
import sys, time
from pathlib import Path
path = Path(sys.argv[1]) / "out.txt"
if not path.exists():
    with path.open("w") as file:
        for i in range(40):
            print(i, file=file, flush=True)
            time.sleep(0.02)
"""
# correct, except that it leaves a process behind when it is killed
WITH_CHILD = """
import subprocess, sys, time
from pathlib import Path
child = subprocess.Popen(["sleep", "60"])
time.sleep(0.5)
child.kill(), child.wait()
(Path(sys.argv[1]) / "out.txt").write_text("done")
"""


@pytest.fixture
def trials(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(root / "tools" / "bench"))
    return importlib.import_module("kill.trials")


def read_texts(work: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in work.iterdir()}


def test_a_half_written_file_is_reported(trials: ModuleType, tmp_path: Path) -> None:
    work = tmp_path / "work"
    words = [sys.executable, "-c", CARELESS, str(work)]
    job = trials.Job("careless", words, work, read_texts, ["out.txt"], writing=["out.txt"])
    tally = trials.Trials(job, random.Random(0), tmp_path).run(6)
    assert tally.n_hits == 6 and tally.n_equal < tally.n_trials
    assert any("different: out.txt" in fault for fault in tally.faults)


def test_a_leftover_process_is_reported_and_ended(
    trials: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "GONE_S", 1.0)
    work = tmp_path / "work"
    words = [sys.executable, "-c", WITH_CHILD, str(work)]
    job = trials.Job("with child", words, work, read_texts, ["out.txt"], targets=("parent",))
    runner = trials.Trials(job, random.Random(1), tmp_path)
    tally = runner.run(4)
    assert any("sleep 60" in leftover for leftover in tally.leftovers)
    assert tally.n_equal == tally.n_trials
    is_from_trials = (
        f"TMPDIR={tmp_path}".encode() in content.split(b"\0") for content in read_environments()
    )
    assert not any(is_from_trials), "a process of the trials still runs"


def read_environments() -> list[bytes]:
    """Return the environments of all running processes that may be read."""
    contents = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            contents.append(path.read_bytes())
    return contents


def run_kills(root: Path, folder: Path, n_kills: int, *names: str) -> None:
    command = [sys.executable, str(root / "tools" / "bench" / "kills.py"), "--kills", str(n_kills)]
    command += ["--folder", str(folder), "--only", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{n_kills} kills hit" in done.stdout
    assert list(folder.iterdir()) == []


def test_a_dataset_whose_writer_was_killed_equals_that_of_an_undisturbed_run(
    root: Path, tmp_path: Path
) -> None:
    run_kills(root, tmp_path, 3, "preprocess-2")


@pytest.mark.slow
@pytest.mark.ranks
def test_killed_runs_sweeps_and_servers_leave_the_same_files_as_undisturbed_ones(
    root: Path, tmp_path: Path
) -> None:
    run_kills(
        root, tmp_path, 6, "merge", "train-full", "train-2-ranks", "sweep", "mixture-server", "register"
    )
