"""Tests of tools/make_report.py and tools/collect.py on a synthetic study."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.report.figures.plot_fit import residual_figure
from megatron.report.figures.plot_law import prediction_figure, select_law_points
from megatron.report.report import render_page
from megatron.report.study_data import read_study


def run_tool(root: Path, *words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def study(root, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    run_tool(root, "tests/report/synthetic_study.py", folder).check_returncode()
    return folder


def test_make_report_writes_the_page_and_prints_where(root, study):
    done = run_tool(root, "tools/make_report.py", study)
    law, report = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert law == "law: L = 1.9 + 120/N^0.33 + 900/D^0.42"
    assert report == f"report: {study / 'report.html'}"
    assert (study / "report.html").read_text().startswith("<!doctype html>")


def test_make_report_writes_to_out(root, study, tmp_path):
    done = run_tool(root, "tools/make_report.py", study, "--out", tmp_path / "deep" / "page.html")
    assert done.returncode == 0 and (tmp_path / "deep" / "page.html").is_file()


@pytest.mark.parametrize("tool", ["tools/make_report.py", "tools/collect.py"])
def test_a_missing_study_is_reported_in_one_line_with_status_1(root, tmp_path, tool):
    done = run_tool(root, tool, tmp_path / "nothing")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "nothing" in done.stderr
    assert not list(tmp_path.iterdir())


def test_collect_prints_aligned_rows_and_writes_the_table(root, study):
    done = run_tool(root, "tools/collect.py", study)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == f"{study / 'table.csv'}: 21 done"
    ends = {line.index("done") for line in lines[1:22]}
    assert len(ends) == 1
    assert len((study / "table.csv").read_text().splitlines()) == 22


def test_the_report_shows_exactly_the_runs_of_a_law_with_a_condition_and_a_held_out_run(
    root: Path, tmp_path: Path
) -> None:
    folder, table = tmp_path / "study", tmp_path / "study" / "table.csv"
    for words in (("tests/report/synthetic_study.py", folder), ("tools/collect.py", folder)):
        run_tool(root, *words).check_returncode()
    rows = list(csv.DictReader(table.open()))
    for row in rows:
        row["held_out"] = str(int(row["run"] == "ar-1M-1.6MT"))
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    options = ("--objective", "autoregressive", "--where", "n_params > 300000", "--n-bootstrap", 50)
    run_tool(root, "tools/fit_law.py", table, *options, "--out", folder / "law.json").check_returncode()
    # 5 sizes by 3 budgets, without the three runs of the smallest size and the run marked above
    expected = {f"ar-{size}-{budget}MT" for size in ("0.5M", "1M", "2M", "5M") for budget in (0.5, 1.6, 4.7)}
    expected -= {"ar-1M-1.6MT"}
    study = read_study(folder)
    assert set(study.law.runs) == {row.run for row in select_law_points(study)} == expected
    marks = [trace for trace in prediction_figure(study).data if trace["mode"] == "markers"]
    losses = {row.loss for row in study.rows if row.run in expected}
    assert {trace["y"][0] for trace in marks} == losses and len(marks) == len(expected)
    assert len(residual_figure(study).data) == 3 * len(expected)
    assert "are finished now" not in render_page(study)
    (folder / "runs" / "ar-2M-1.6MT" / "result.json").unlink()
    assert "The law was fitted on 11 runs, and 10 are finished now: fit it again." in render_page(
        read_study(folder)
    )
