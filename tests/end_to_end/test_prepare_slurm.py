"""Tests of prepare_slurm.sh on a real Slurm cluster of two nodes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.tokenizer.train_bpe import train_bpe
from tests.conftest import run_process, wait_until

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


@pytest.mark.slow
@pytest.mark.ranks
def test_a_signalled_task_requeues_itself_and_a_bad_line_fails(slurm, root, tmp_path, tokenizer) -> None:
    source = tmp_path / "in.jsonl"
    line = json.dumps({"text": "Red fish blue fish " * 20}) + "\n"
    source.write_text(line * 130_000 + "no JSON\n")  # in the last part
    out = tmp_path / "tokens" / "c4"
    out.parent.mkdir()
    number = submit(slurm, root, tokenizer, out, source)
    shards = out.parent / f".c4-part-00001-of-{PARTS:05d}.shards"
    wait_until(lambda: list(shards.glob("*.unit")), lambda: read_logs(out.parent))  # some pieces, not all
    # as Slurm does two minutes before the time limit
    slurm("scancel", "--batch", "--signal=USR1", f"{number}_1")

    def list_states() -> list[str]:
        return [slurm.show_job(f"{number}_{task}")["JobState"] for task in range(1, PARTS + 1)]

    wait_until(lambda: set(list_states()) <= {"COMPLETED", "FAILED"}, lambda: read_logs(out.parent), 400)
    logs = read_logs(out.parent)
    assert list_states() == ["COMPLETED", "FAILED"], logs
    assert slurm.show_job(f"{number}_1")["Restarts"] == "1"
    assert "stopped; run the same command again" in (out.parent / "log-1.txt").read_text(), logs
    assert "in.jsonl, line 130001: not JSON" in (out.parent / "log-2.txt").read_text()
    assert "parts are finished" in logs and not Path(f"{out}_text_document.bin").exists()


def test_a_job_without_its_settings_fails_with_a_sentence(root: Path) -> None:
    for variables, sentence in (
        ({}, "Submit this script with sbatch --array=1-PARTS"),
        ({"SLURM_ARRAY_TASK_ID": "1"}, "PARTS: Set it to the number of parts"),
        ({"SLURM_ARRAY_TASK_ID": "1", "PARTS": "2", "INPUT": "x"}, "OUT: Set it to the prefix"),
    ):
        done = run_process(["bash", SCRIPT], root, {}, **variables)
        assert done.returncode != 0 and sentence in done.stderr
