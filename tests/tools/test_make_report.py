"""tools/make_report.py on a synthetic study: the answer on the terminal, and the page."""

import json
from pathlib import Path

import pytest

from tests.report.synthetic_study import write_study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("report") / "study")


def test_the_command_prints_the_answer_and_writes_the_page(cli, study: Path, tmp_path: Path) -> None:
    verdict, check, report = cli("report", study).output.splitlines()
    page = (study / "report.html").read_text()
    assert verdict.startswith("At 5.7e14 FLOPs train ") and check == "Not checked by an unseen run."
    assert report == f"report: {study / 'report.html'}"
    assert page.startswith("<!doctype html>") and verdict.split("; ")[0].split("FLOPs ")[1] in page
    # 21 runs of 524k, 1.57M and 4.72M tokens at 17,000 a second: 7 * 6.8e6 / 17e3 s = 0.780 hours
    cli("report", study, "--out", tmp_path / "deep" / "page.html", "--price-per-hour", 10)
    assert "0.780 GPU-hours, 7.80 at 10 an hour" in (tmp_path / "deep" / "page.html").read_text()
    assert (study / "report.html").read_text() == page


def test_a_forecast_that_was_edited_is_refused(cli, tmp_path: Path) -> None:
    study = write_study(tmp_path / "study")
    (study / "forecasts").mkdir()
    (study / "forecasts" / "a.json").write_text(json.dumps({"name": "a"}))
    assert "Restore the file" in cli("report", study, status=1).error and not (study / "report.html").exists()
