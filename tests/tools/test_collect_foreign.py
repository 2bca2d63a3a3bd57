"""Tests of tools/collect.py on logs of other programs, and of a law fitted to its table."""

import json
from pathlib import Path


def test_published_runs_are_collected_and_fitted(cli, laws: Path, tmp_path: Path) -> None:
    table, law = tmp_path / "table.csv", tmp_path / "law.json"
    published = laws / "datablations" / "datablations_182.csv"
    done = cli("collect.py", published, "--from", "csv", "--out", table, "--map", "loss=val_loss",
               "n_params=params", "train_tokens=tokens", "run=name")  # fmt: skip
    assert "182 done" in done.output and table.with_suffix(".parquet").is_file()
    cli("fit_law.py", table, "--form", "repeated_data", "--out", law, "--n-bootstrap", 0)
    recorded = json.loads((laws / "expected.json").read_text())["datablations"]
    objective = recorded["joint_forms_same_objective"]["D_eff_only_6p"][0]
    assert abs(json.loads(law.read_text())["objective"] - objective) < 5e-7


def test_invalid_arguments_are_refused(cli, tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("nothing\n")
    out = tmp_path / "t.csv"
    assert cli("collect.py", log, "--set", "n_params=1", status=None).status == 2
    assert cli("collect.py", log, "--from", "megatron", status=None).status == 2
    for words, sentence in (
        (["--set", "n_params"], "--set: got n_params, expected NAME=VALUE"),
        (["--set", "n_params=many"], "n_params: got 'many', expected a number"),
        ([], "got no loss, expected the output of megatron"),
    ):
        done = cli("collect.py", log, "--from", "megatron", "--out", out, *words, status=None)
        assert (done.status, done.error.count("\n")) == (1, 1)
        assert sentence in done.error and not out.exists()
