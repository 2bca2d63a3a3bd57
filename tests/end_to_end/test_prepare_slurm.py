"""Tests of prepare_slurm.sh on a real Slurm cluster of two nodes."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.text.inspect_dataset import find_faults
from megatron.tokenizer.train_bpe import train_bpe

SCRIPT = "examples_scaling/training/prepare_slurm.sh"
PARTS = 2


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Return a tokenizer that only its library encodes, slowly: a part then takes seconds."""
    train_bpe(["red fish blue fish"] * 5, 262, tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(content))
    return path


def submit(slurm: Callable[..., str], root: Path, tokenizer: Path, out: Path, source: object) -> str:
    """Submit the array; return its number."""
    variables = {"PARTS": str(PARTS), "INPUT": str(source), "OUT": str(out), "TOKENIZER": str(tokenizer)}
    variables["MERGE"] = "--output"
    header = [f"--array=1-{PARTS}", "--cpus-per-task=2", f"--output={out.parent}/log-%a.txt"]
    return slurm("sbatch", "--parsable", *header, SCRIPT, "--append-eod", cwd=root, **variables)


def read_logs(folder: Path) -> str:
    return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(folder.glob("log-*.txt")))


def wait_for(check: Callable[[], object], folder: Path, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, read_logs(folder)
        time.sleep(0.05)


def is_past_first_pieces(folder: Path) -> bool:
    """Return whether a task has finished pieces of its part and not all of them."""
    with contextlib.suppress(FileNotFoundError):
        return len(list(folder.glob("*.unit"))) >= 1
    return False


def list_processes(slurm_conf: str, node: str) -> Iterator[int]:
    """Yield the processes of a node of the test's cluster: daemon, step managers and tasks."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environ = (process / "environ").read_bytes().split(b"\0")
            if b"SLURM_CONF=" + slurm_conf.encode() not in environ:
                continue
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if re.search(rf"slurmd -D -N {node} ", words) or f"SLURMD_NODENAME={node}".encode() in environ:
                yield int(process.name)
                parent = re.search(r"PPid:\s+(\d+)", (process / "status").read_text())
                if parent and b"slurmstepd" in Path(f"/proc/{parent[1]}/cmdline").read_bytes():
                    yield int(parent[1])


@pytest.mark.slow
@pytest.mark.ranks
def test_a_node_that_is_killed_in_the_middle_changes_no_byte(slurm, root, tmp_path, tokenizer) -> None:
    source = tmp_path / "in.jsonl"
    with source.open("w") as file:
        for i in range(220_000):
            file.write(json.dumps({"text": f"document {i}: " + "Red fish blue fish " * (i % 23)}) + "\n")
    out = tmp_path / "tokens" / "c4"
    out.parent.mkdir()
    number = submit(slurm, root, tokenizer, out, source)
    node = f"{socket.gethostname().partition('.')[0]}-second"
    queue = ["squeue", "--noheader", "--array", "--states=RUNNING", f"--jobs={number}", "--format=%K %N"]
    part = ""

    def is_in_the_middle() -> bool:
        nonlocal part
        running = dict(line.split()[::-1] for line in slurm(*queue).splitlines() if len(line.split()) == 2)
        part = running.get(node, "")
        return bool(part) and is_past_first_pieces(out.parent / f".c4-part-{part:0>5}-of-{PARTS:05d}.shards")

    wait_for(is_in_the_middle, out.parent)
    for _ in range(3):  # a process may be started meanwhile
        for process in set(list_processes(slurm.variables["SLURM_CONF"], node)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    # as the controller decides after SlurmdTimeout
    slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=killed")
    states: dict[int, str] = {}

    def have_all_ended() -> bool:
        for task in range(1, PARTS + 1):
            states[task] = slurm.show_job(f"{number}_{task}")["JobState"]
        return not {"PENDING", "RUNNING", "COMPLETING"} & set(states.values())

    wait_for(have_all_ended, out.parent, 400)
    logs = read_logs(out.parent)
    assert set(states.values()) == {"COMPLETED"}, logs
    assert slurm.show_job(f"{number}_{part}")["Restarts"] == "1"
    resumed = re.search(r"resuming: (\d+) of (\d+) pieces", (out.parent / f"log-{part}.txt").read_text())
    assert resumed and 1 <= int(resumed[1]) < int(resumed[2]), logs
    whole = tmp_path / "one" / "c4"
    tool = [sys.executable, "tools/preprocess_data_many_cores.py", "--input", str(source), "--append-eod"]
    tool += ["--output-prefix", str(whole), "--tokenizer-model", str(tokenizer), "--workers", "2", "--quiet"]
    subprocess.run(tool, cwd=root, check=True, timeout=400)
    for suffix in ("bin", "idx"):
        ours, expected = (Path(f"{prefix}_text_document.{suffix}").read_bytes() for prefix in (out, whole))
        assert ours == expected
    assert list(find_faults(f"{out}_text_document")) == []


@pytest.mark.slow
@pytest.mark.ranks
def test_a_task_that_is_signalled_requeues_itself_and_a_bad_line_fails(
    slurm, root, tmp_path, tokenizer
) -> None:
    source = tmp_path / "in.jsonl"
    line = json.dumps({"text": "Red fish blue fish " * 20}) + "\n"
    source.write_text(line * 130_000 + "no JSON\n")  # in the last part
    out = tmp_path / "tokens" / "c4"
    out.parent.mkdir()
    number = submit(slurm, root, tokenizer, out, source)
    shards = out.parent / f".c4-part-00001-of-{PARTS:05d}.shards"
    wait_for(lambda: is_past_first_pieces(shards), out.parent)
    # as Slurm does two minutes before the time limit
    slurm("scancel", "--batch", "--signal=USR1", f"{number}_1")
    ended = ("COMPLETED", "FAILED")
    wait_for(
        lambda: all(slurm.show_job(f"{number}_{task}")["JobState"] in ended for task in range(1, PARTS + 1)),
        out.parent,
        400,
    )
    logs = read_logs(out.parent)
    states = [slurm.show_job(f"{number}_{task}")["JobState"] for task in range(1, PARTS + 1)]
    assert states == ["COMPLETED", "FAILED"], logs
    assert slurm.show_job(f"{number}_1")["Restarts"] == "1"
    assert "stopped; run the same command again" in (out.parent / "log-1.txt").read_text(), logs
    assert "in.jsonl, line 130001: not JSON" in (out.parent / "log-2.txt").read_text()
    assert "parts are finished" in logs and not Path(f"{out}_text_document.bin").exists()


def test_a_job_without_its_settings_fails_with_a_sentence(root: Path, tmp_path: Path) -> None:
    for variables, sentence in (
        ({}, "Submit this script with sbatch --array=1-PARTS"),
        ({"SLURM_ARRAY_TASK_ID": "1"}, "PARTS: Set it to the number of parts"),
        ({"SLURM_ARRAY_TASK_ID": "1", "PARTS": "2", "INPUT": "x"}, "OUT: Set it to the prefix"),
    ):
        done = subprocess.run(
            ["bash", str(root / SCRIPT)], env={"PATH": os.environ["PATH"], **variables},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode != 0 and sentence in done.stderr
