"""tools/make_report.py on a synthetic study: the answer on the terminal, and the page."""

import json
from pathlib import Path

import pytest

from tests.report.synthetic_study import write_study
from tests.tool_modules import load_tool

main = load_tool(Path(__file__).parents[2] / "tools" / "make_report.py").main


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return write_study(tmp_path / "study")


def test_the_command_prints_the_answer_and_writes_the_page(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(study)]) == 0
    verdict, check, report = capsys.readouterr().out.splitlines()
    page = (study / "report.html").read_text()
    assert verdict.startswith("At 5.7e14 FLOPs train ") and check == "Not checked by an unseen run."
    assert report == f"report: {study / 'report.html'}"
    assert page.startswith("<!doctype html>") and verdict.split("; ")[0].split("FLOPs ")[1] in page


def test_the_page_is_written_to_out_with_the_price(study: Path, tmp_path: Path) -> None:
    page = tmp_path / "deep" / "page.html"
    # 21 runs of 524k, 1.57M and 4.72M tokens at 17,000 a second: 7 * 6.8e6 / 17e3 s = 0.780 hours
    assert main([str(study), "--out", str(page), "--price-per-hour", "10"]) == 0
    text = page.read_text()
    assert "0.780 GPU-hours, 7.80 at 10 an hour" in text and not (study / "report.html").exists()


def test_a_missing_study_is_an_error_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing")]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and "nothing" in printed.err
    assert not printed.out and not list(tmp_path.iterdir())


def test_a_forecast_that_was_edited_is_refused(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (study / "forecasts").mkdir()
    (study / "forecasts" / "a.json").write_text(json.dumps({"name": "a"}))
    assert main([str(study)]) == 1
    assert "Restore the file" in capsys.readouterr().err and not (study / "report.html").exists()
