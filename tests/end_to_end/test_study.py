"""Tests of the complete workflow at a small scale: text, tokens, ladder, law and report."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.plan.run_dir import read_metrics

STUDY = """
name: tiny study
directory: {out}
run:
  dist: {{dtype: float32, cpu_only: true}}
  dataset:
    path_train: ${{directory}}/tokens/train_text_document
    path_eval: ${{directory}}/tokens/held_out_text_document
    seq_len: 32
    batch_size: 8
  optim: {{lr: 1.0e-2}}
  lr_scheduler: {{warmup_iterations: 2}}
  logging: {{tensorboard: false}}
  evaluation: {{max_samples: 64, num_mc: 2}}
  misc: {{n_threads: 1}}
sizes:
  small: {{d_model: 16, n_heads: 2, n_layers: 1}}
  large: {{d_model: 32, n_heads: 2, n_layers: 1}}
cells:
  - {{size: [small, large], tokens: [2_560, 5_120, 10_240]}}
  - {{objective: [masked_diffusion], size: [small], tokens: [5_120]}}
"""


class Walk:
    """A folder, and the tools run in it from the command line."""

    def __init__(self, root: Path, out: Path) -> None:
        self.root, self.out, self.study = root, out, out / "study.in.yaml"

    def command(self, tool: str, *words: object) -> list[str]:
        return [sys.executable, str(self.root / "tools" / f"{tool}.py"), *map(str, words)]

    def run(self, tool: str, *words: object) -> str:
        done = subprocess.run(
            self.command(tool, *words), capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def walk(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """Text, tokenizer and tokens of Python's standard library, and a study on them."""
    walk = Walk(root, tmp_path_factory.mktemp("walk"))
    out = walk.out
    walk.run("prepare_corpus", "--corpus", "local", "--max-mb", 2, "--out", out / "text")
    walk.run("train_tokenizer", out / "text" / "train.jsonl", "--n-tokens", 500, "--out", out / "tokenizer")
    for split in ("train", "held_out"):
        words = [
            "--input",
            out / "text" / f"{split}.jsonl",
            "--output-prefix",
            split,
            "--root",
            out / "tokens",
        ]
        words += ["--tokenizer-model", out / "tokenizer", "--append-eod", "--workers", 2]
        walk.run("preprocess_data_many_cores", *words)
    walk.study.write_text(STUDY.format(out=out))
    return walk


def test_the_dry_run_prices_every_run_and_trains_nothing(walk: Walk) -> None:
    output = walk.run("sweep", walk.study, "--dry-run")
    assert output.count(" to run\n") == 7
    assert max(map(len, output.splitlines())) <= 100
    # 16 wide, 1 layer, 501 ids padded to 512: 512*16 + 4*256 + 3*16*64 + 3*16
    assert "12,336" in output
    assert "7 of 7 runs to do, 41k tokens" in output.splitlines()[0]
    assert "steps of small and large timed on this machine" in output.replace("\n", " ")
    assert not (walk.out / "runs").exists()


def test_the_walk_ends_in_a_law_and_a_page_and_a_second_sweep_trains_nothing(walk: Walk) -> None:
    output = walk.run("sweep", walk.study)
    assert "7 of 7 runs done" in output
    results = {path: path.stat().st_mtime_ns for path in walk.out.glob("runs/*/result.json")}
    assert len(results) == 7
    again = walk.run("sweep", walk.study)
    assert "nothing to do: 7 of 7 runs are done" in again
    assert {path: path.stat().st_mtime_ns for path in walk.out.glob("runs/*/result.json")} == results
    walk.run("collect", walk.out)
    with (walk.out / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["done"] * 7
    longest = [row for row in rows if row["train_tokens"] == "10240"]
    assert max(float(row["loss"]) for row in longest) < 6.0  # an untrained model has log 512 = 6.24
    words = ["--objective", "autoregressive", "--out", walk.out / "law.json", "--n-bootstrap", 50]
    law = walk.run("fit_law", walk.out / "table.csv", *words)
    assert "(6 runs)" in law
    output = walk.run("make_report", walk.out).splitlines()
    # six runs do not identify five constants, so there is no answer
    assert output[0].startswith("No answer yet: these runs do not identify the law. Lowest loss so far: ")
    assert any(line.startswith("To do: choose runs to add with ") for line in output)
    page = (walk.out / "report.html").read_text()
    assert "Tiny study" in page
    assert "s library, torch " in page


def test_a_changed_study_keeps_runs_that_are_still_planned_and_marks_the_others_stale(walk: Walk) -> None:
    words = ["cells=[{size: [small], tokens: [2560, 20480]}]"]
    output = walk.run("sweep", walk.study, *words)
    assert "1 of 2 runs to do" in output
    walk.run("collect", walk.out)
    with (walk.out / "table.csv").open() as file:
        statuses = [row["status"] for row in csv.DictReader(file)]
    assert sorted(statuses) == ["done"] * 2 + ["stale"] * 6


def test_a_failed_run_is_reported_and_the_others_are_run(walk: Walk) -> None:
    words = [f"directory={walk.out / 'failing'}", "run.dataset.path_eval=/nowhere/text",
             "cells=[{size: [small], tokens: [2560]}]",
             f"run.dataset.path_train={walk.out / 'tokens' / 'train_text_document'}"]  # fmt: skip
    done = subprocess.run(
        walk.command("sweep", walk.study, *words), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "/nowhere/text" in done.stderr


def test_an_interrupted_sweep_saves_its_runs_and_can_resume(walk: Walk) -> None:
    out = walk.out / "interrupted"
    words = [f"directory={out}", "cells=[{size: [small], tokens: [25_600_000]}]",
             f"run.dataset.path_train={walk.out / 'tokens' / 'train_text_document'}",
             f"run.dataset.path_eval={walk.out / 'tokens' / 'held_out_text_document'}"]  # fmt: skip
    command = walk.command("sweep", walk.study, *words)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as sweep:
        deadline = time.monotonic() + 240
        while not any(list(read_metrics(run)) for run in out.glob("runs/*")):
            assert time.monotonic() < deadline and sweep.poll() is None
            time.sleep(0.1)
        os.kill(sweep.pid, signal.SIGINT)
        _, errors = sweep.communicate(timeout=240)
    assert sweep.returncode == 75, errors
    assert "run the same command again" in errors
    assert len(list(out.glob("runs/*/checkpoints/*.preempt"))) == 1
