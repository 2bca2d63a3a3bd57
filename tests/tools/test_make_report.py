"""Tests of tools/make_report.py and tools/collect.py on a synthetic study."""

import subprocess
import sys
from pathlib import Path

import pytest


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
