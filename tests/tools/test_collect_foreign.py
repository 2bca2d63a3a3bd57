"""Tests of tools/collect.py on logs of other programs, and of a law fitted to its table."""

import json
from pathlib import Path


def test_published_runs_are_collected_and_fitted(cli, laws: Path, tmp_path: Path) -> None:
    table, law = tmp_path / "table.csv", tmp_path / "law.json"
    published = laws / "datablations" / "datablations_182.csv"
    names = ("loss=val_loss", "n_params=params", "train_tokens=tokens", "run=name")
    done = cli("collect.py", published, "--from", "csv", "--out", table, "--map", *names)
    assert "182 done" in done.output and table.with_suffix(".parquet").is_file()
    cli("fit_law.py", table, "--form", "repeated_data", "--out", law, "--n-bootstrap", 0)
    recorded = json.loads((laws / "expected.json").read_text())["datablations"]
    objective = recorded["joint_forms_same_objective"]["D_eff_only_6p"][0]
    assert abs(json.loads(law.read_text())["objective"] - objective) < 5e-7
