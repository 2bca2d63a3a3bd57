"""Tests of the complete workflow at a small scale: text, tokens, ladder, law and report."""

import csv
from pathlib import Path

import pytest

from tests.tool_modules import Cli

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


@pytest.fixture(scope="module")
def study(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, tokenizer and tokens of Python's standard library, and a study on them."""
    out = tmp_path_factory.mktemp("walk")
    cli("corpus", "--corpus", "local", "--max-mb", 2, "--out", out / "text")
    cli("tokenizer", out / "text" / "train.jsonl", "--n-tokens", 500, "--out", out / "tokenizer")
    for split in ("train", "held_out"):
        words = ["--output-prefix", split, "--root", out / "tokens", "--tokenizer-model", out / "tokenizer"]
        cli("prepare", "--input", out / "text" / f"{split}.jsonl", *words, "--append-eod", "--workers", 2)
    (out / "study.in.yaml").write_text(STUDY.format(out=out))
    return out / "study.in.yaml"


@pytest.mark.slow
def test_the_walk_ends_in_a_law_and_a_page_and_finished_runs_are_not_repeated(study: Path, cli: Cli) -> None:
    out = study.parent
    output = cli("sweep", study).output
    assert "7 of 7 runs done" in output
    results = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")}
    assert len(results) == 7
    again = cli("sweep", study).output
    assert "nothing to do: 7 of 7 runs are done" in again
    assert {path: path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")} == results
    cli("collect", out)
    with (out / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["done"] * 7
    longest = [row for row in rows if row["train_tokens"] == "10240"]
    assert max(float(row["loss"]) for row in longest) < 6.0  # an untrained model has log 512 = 6.24
    words = ["--objective", "autoregressive", "--out", out / "law.json", "--n-bootstrap", 50]
    law = cli("fit", out / "table.csv", *words).output
    assert "(6 runs)" in law
    output = cli("report", out).output.splitlines()
    # six runs do not identify five constants, so there is no answer
    assert output[0].startswith("No answer yet: these runs do not identify the law. Lowest loss so far: ")
    assert any(line.startswith("To do: choose runs to add with ") for line in output)
    page = (out / "report.html").read_text()
    assert "Tiny study" in page
    assert "s library, torch " in page
    # a changed study keeps the runs that are still planned, and marks the others stale
    words = ["cells=[{size: [small], tokens: [2560, 20480]}]"]
    output = cli("sweep", study, *words).output
    assert "1 of 2 runs to do" in output
    cli("collect", out)
    with (out / "table.csv").open() as file:
        statuses = [row["status"] for row in csv.DictReader(file)]
    assert sorted(statuses) == ["done"] * 2 + ["stale"] * 6
