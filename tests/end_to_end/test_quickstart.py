"""Test of the complete quickstart, which takes minutes and runs only in make test-all."""

import csv
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from megatron.data import open_dataset
from megatron.report.study_data import read_study
from tests.conftest import run_process

QUICKSTART = "examples_scaling/quickstart/quickstart.sh"


def test_a_text_below_14_mb_ends_the_quickstart_before_any_work(root: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "tiny.jsonl", tmp_path / "q"
    text.write_text(json.dumps({"text": "x" * 32}) + "\n")
    # stands in for each program: prints its arguments, and lets only the real preparation of text run
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@"\ncase $1 in *prepare_corpus.py) exec {sys.executable} "$@";; esac\nexit 3\n'
    )
    python.chmod(0o755)
    done = run_process(
        ["bash", root / QUICKSTART, text], PATH=f"{tmp_path}:{os.environ['PATH']}", OUT=str(out)
    )
    assert (done.returncode, "train_tokenizer" in done.stdout) == (1, False) and list(out.iterdir()) == []
    assert "tiny.jsonl: got 32 bytes of text" in done.stderr and "at least 14.0 MB" in done.stderr


@pytest.mark.slow
def test_the_quickstart_predicts_and_measures_a_run(root: Path, scaling_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "quickstart"
    done = run_process(["bash", root / QUICKSTART], OUT=str(out), SCALING_DATA=str(scaling_data))
    assert done.returncode == 0, done.stderr
    *lines, report, next_line = done.stdout.strip().splitlines()
    assert next_line.startswith("next: ") and report == f"report: {out / 'report.html'}"
    assert any("one unseen run" in line for line in lines[-10:])
    assert sum(line.startswith("run  ") for line in lines) == 1  # the price table is printed once
    with (out / "table.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "done"]
    ladder, blind = ([row for row in rows if row["held_out"] == held_out] for held_out in "01")
    budgets = {round(float(row["train_flops"]), -9) for row in ladder}
    assert len(budgets) >= 5 and max(budgets) / min(budgets) >= 13
    assert len(blind) == 1 and float(blind[0]["train_flops"]) / max(budgets) == pytest.approx(4, rel=0.01)
    assert max(float(row["epochs"]) for row in rows) <= 1  # no text is read twice
    lowest = min(float(row["loss"]) for row in ladder)
    assert float(blind[0]["loss"]) < lowest
    (file,) = (out / "forecasts").glob("*.json")
    forecast = json.loads(file.read_text())
    low, high = forecast["intervals"][-1]
    assert low < forecast["predicted"] < high < lowest
    # the models read: tokens after a long context are easier, and the page shows it with a sample of text
    reading = read_study(out).reading
    near, *_, far = (loss for _, _, loss in reading["loss_by_context"][0])
    assert far < near - 0.5 and reading["sample"]["text"] and "forecast" in reading["run"]
    counts = np.bincount(open_dataset(out / "tokens" / "held_out_text_document").tokens)
    # in nats: the lowest loss of a model without context
    assert max(float(row["loss"]) for row in rows) < scipy.stats.entropy(counts)
