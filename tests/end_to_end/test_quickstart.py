"""The quickstart as it is, whole: minutes, and so only in make test-all."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_quickstart_learns_fits_and_reports(root: Path, scaling_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "quickstart"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(root / "examples_scaling" / "quickstart" / "quickstart.sh")],
        env={**os.environ, "PATH": path, "OUT": str(out), "SCALING_DATA": str(scaling_data)},
        capture_output=True, text=True, timeout=3600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *lines, report = done.stdout.strip().splitlines()
    assert any(line.startswith(("law: L = ", "law: Not identified: ")) for line in lines)
    assert report == f"report: {out / 'report.html'}"
    with (out / "table.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["objective"] == "autoregressive"]
    assert len({row["size"] for row in rows}) == 5
    budgets = {int(row["train_tokens"]) for row in rows}
    assert len(budgets) == 3
    longest = sorted(
        (row for row in rows if int(row["train_tokens"]) == max(budgets)), key=lambda r: int(r["n_params"])
    )
    losses = [float(row["loss"]) for row in longest]
    assert losses[-1] < losses[0]
    entropy = json.loads((out / "tokens" / "held_out_text_document.json").read_text())["unigram_entropy_nats"]
    assert max(losses) < entropy
