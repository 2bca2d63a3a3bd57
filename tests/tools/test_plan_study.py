"""Tests of scaling plan from the command line."""

import csv
from pathlib import Path

from megatron.laws.law import Law


def test_a_plan_is_shown_beside_simple_designs_and_written(cli, tmp_path: Path) -> None:
    out = tmp_path / "runs.csv"
    done = cli("plan", "--budget", 1e18, "--runs", 8, "--target", 1e20, "--out", out)
    rows = list(csv.DictReader(out.open()))
    assert len(rows) == 8
    assert sum(6 * float(r["n_params"]) * float(r["train_tokens"]) for r in rows) <= 1.001e18
    for name in ("proposed (c)", "ladder, D/N 20", "D/N 5, 20, 80", "isoFLOP slices"):
        assert name in done.output


def test_after_some_runs_the_next_ones_are_proposed(cli, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    rows = [f"{n},{20 * n},{1.8 + 480 / n**0.35 + 2000 / (20 * n) ** 0.366!r}" for n in (1e6, 3e6, 1e7)]
    table.write_text("\n".join(["n_params,train_tokens,loss", *rows]) + "\n")
    done = cli("plan", "--budget", 1e17, "--runs", 2, "--target", 1e19, "--done", table)
    assert "done so far" in done.output


def test_invalid_options_are_reported_in_one_line(cli) -> None:
    error = cli("plan", "--budget", 1e18, "--law", "none.json", status=1).error
    assert error.count("\n") == 1 and "none.json: got no such file, expected a law" in error
    for words, sentence in (
        (("--budget", 0), "--budget: got '0', expected a number above 0"),
        (("--budget", 1e10, "--sizes", 1e9, 2e9), "--sizes: removed. Choose from candidates"),
        (("--budget", 1e10, "--largest-share", 0.5), "--largest-share: removed. "),
    ):
        done = cli("plan", *words, status=None)
        assert (done.status, done.error.count("\n")) == (2, 1)
        assert sentence in done.error
    assert cli("plan", status=None).status == 2


def test_a_law_that_its_runs_do_not_identify_is_refused(cli, tmp_path: Path) -> None:
    params = {"E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658}
    reasons = {"alpha": "alpha ranges from 0.02 to 2 in the bootstrap"}
    law = Law(form="chinchilla", params=params, objective=0.0, huber_delta=1e-3, n_runs=9, identified=False,
              not_identified=reasons)  # fmt: skip
    law.save(tmp_path / "law.json")
    words = ("--budget", "1e18", "--runs", "8", "--law", str(tmp_path / "law.json"))
    refused = cli("plan", *words, status=None)
    assert refused.status == 1 and "do not identify alpha" in refused.error
