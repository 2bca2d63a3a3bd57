"""Tests of tools/collect.py on logs of other programs, and of a law fitted to its table."""

import json
import subprocess
import sys
from pathlib import Path


def run_tool(root: Path, tool: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tools" / tool), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_published_runs_are_collected_and_fitted(root: Path, laws: Path, tmp_path: Path) -> None:
    table, law = tmp_path / "table.csv", tmp_path / "law.json"
    published = laws / "datablations" / "datablations_182.csv"
    done = run_tool(root, "collect.py", published, "--from", "csv", "--out", table, "--map", "loss=val_loss",
               "n_params=params", "train_tokens=tokens", "run=name")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "182 done" in done.stdout and table.with_suffix(".parquet").is_file()
    fitted = run_tool(root, "fit_law.py", table, "--form", "repeated_data", "--out", law, "--n-bootstrap", 0)
    assert fitted.returncode == 0, fitted.stderr
    recorded = json.loads((laws / "expected.json").read_text())["datablations"]
    objective = recorded["joint_forms_same_objective"]["D_eff_only_6p"][0]
    assert abs(json.loads(law.read_text())["objective"] - objective) < 5e-7


def test_invalid_arguments_are_refused(root: Path, tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("nothing\n")
    out = tmp_path / "t.csv"
    assert run_tool(root, "collect.py", log, "--set", "n_params=1").returncode == 2
    assert run_tool(root, "collect.py", log, "--from", "megatron").returncode == 2
    for words, sentence in (
        (["--set", "n_params"], "--set: got n_params, expected NAME=VALUE"),
        (["--set", "n_params=many"], "n_params: got 'many', expected a number"),
        ([], "got no loss, expected the output of megatron"),
    ):
        done = run_tool(root, "collect.py", log, "--from", "megatron", "--out", out, *words)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert sentence in done.stderr and not out.exists()
