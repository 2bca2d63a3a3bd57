"""The page of a study as HTML: complete, without a network, safe against hostile files, and accessible."""

import errno
import itertools
import json
import os
import re
import struct
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron.io import write_json
from megatron.report import report, tables
from megatron.report.plot_runs import context_figure, residual_figure, size_figure
from megatron.report.study_data import Study, read_study
from tests.report.frontier_study import LAW, RUNS, make_forecast, make_study
from tests.report.synthetic_study import edit_json, write_study

LOADING = {"src", "href", "srcset", "data", "poster", "action", "background"}
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Parser of all elements: name, attributes and text; words outside scripts; what the page loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[dict] = []
        self.open: list[dict] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        element = {"tag": tag, "attributes": dict(attrs), "text": ""}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1]["tag"] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element["text"] += data
        if not {"script", "style"} & {element["tag"] for element in self.open}:
            self.words += " " + data.replace("\xa0", " ")

    def select(self, *tags: str) -> list[dict]:
        return [element for element in self.elements if element["tag"] in tags]


@pytest.fixture(scope="module")
def text(study: Study) -> str:
    return report.render_page(study)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def read_page(folder: Path) -> Page:
    return Page(report.render_page(read_study(folder)))


def test_the_page_loads_nothing_and_is_below_2_5_mb(text: str, page: Page) -> None:
    loads = [value for e in page.elements for name, value in e["attributes"].items() if name in LOADING]
    assert set(loads) == {"data:,"}  # an empty icon, so that a browser does not request one
    assert not re.search(r"url\(|@import", text[: text.index("<body>")])
    assert "default-src 'none'" in text and 1e6 < len(text) < 2.5e6


def test_a_failed_write_keeps_the_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = report.write_report(folder).read_text()
    before = sorted(path.name for path in folder.iterdir())
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "disk full")))
    with pytest.raises(OSError, match="disk full"):
        report.write_report(folder)
    assert (folder / "report.html").read_text() == text
    assert sorted(path.name for path in folder.iterdir()) == before


def test_figures_are_in_sight_and_diagnostics_are_folded(page: Page) -> None:
    order = [e["attributes"]["id"] for e in page.select("figure")]
    assert order == [f"figure-{key}" for key in ("frontier", "epochs", "curves", "size", "residuals")]
    warning = "x.json cannot be used"
    forecast = make_forecast(LAW)
    text = report.render_page(make_study(RUNS, frontier=LAW, forecasts=forecast, warnings=[warning]))
    in_sight, folded = text.split("<h2>Diagnostics</h2>")
    assert [in_sight.count("<figure"), folded.count("<figure")] == [2, 0]
    assert warning in Page(text).words


def test_the_tables_have_the_values_of_the_study(folder: Path) -> None:
    edit_json(folder / "runs" / "ar-1M-0.5MT" / "result.json", loss=5.4321)
    study = read_study(folder)
    table = tables.tabulate_runs(study)
    row = next(row for row in table.rows if row[0] == "ar-1M-0.5MT")
    assert row[1:] == ["1.10M", "524k", "0.53", "3.9e12", "5.432 ± 0.012", "31 s", "done"]
    assert table.title == "All runs (21)" and len(table.rows) == 21
    forecast = make_forecast(LAW, observed=2.5, predicted=2.4, low=2.3, high=2.6)
    (row,) = tables.tabulate_forecasts(make_study(RUNS, forecasts=forecast)).rows
    assert row[:5] == ["best-4x", "2.400 (2.300 to 2.600)", "2.500", "+4.2 %", "inside"]
    late = forecast.assign(is_late=True)
    assert "not counted" in tables.tabulate_forecasts(make_study(RUNS, forecasts=late)).rows[0][4]
    laws = {table.title: table for table in tables.list_laws(replace(study, frontier=LAW))}
    assert laws["Frontier"].rows[4][0] == "size_exponent"
    assert laws["Law chinchilla, autoregressive"].notes[1] == "L = 1.9 + 120/N^0.33 + 900/D^0.42"


def test_runs_that_are_missing_are_counted_and_shown(folder: Path) -> None:
    for name in ("ar-5M-4.7MT", "md-2M-4.7MT"):
        (folder / "runs" / name / "result.json").unlink()
    (folder / "runs" / "ar-0.2M-0.5MT" / "plan.json").write_text("{")
    words = read_page(folder).words
    assert "18 of 21 runs finished" in words and "plan.json cannot be read" in words


@pytest.mark.parametrize("left", [0, 1])
def test_a_study_of_no_or_one_run_has_a_page(folder: Path, left: int) -> None:
    for run in sorted((folder / "runs").iterdir())[left:]:
        for path in run.iterdir():
            path.unlink()
        run.rmdir()
    (folder / "law.json").unlink()
    (folder / "corpus.json").unlink()
    assert f"All runs ({left})" in read_page(folder).words


def test_a_table_alone_is_a_study(crossing: Study) -> None:
    page = Page(report.render_page(crossing))
    assert "All runs (260)" in page.words and len(page.select("figure")) >= 3


def test_damaged_files_are_reported_and_are_not_fatal(folder: Path) -> None:
    for name, content, sentence in (
        ("law.json", '{"form": "chinch', "law.json cannot be used"),
        ("compute_law.json", "{}", "compute_law.json cannot be used"),
        ("scores.csv", "run,score\na,b\n", "scores.csv cannot be used"),
        ("references.csv", "x\n1\n", "references.csv cannot be used"),
        ("corpus.json", '{"bytes_per_token": "x"}', "corpus.json: bytes_per_token is"),
        ("corpus.json", '{"train_tokens": []}', "corpus.json: train_tokens is"),
        ("corpus.json", '{"held_out_tokens": 1e309}', "corpus.json: held_out_tokens is"),
        ("corpus.json", '{"corpus": 5}', "corpus.json: corpus is"),
        ("corpus.json", '{"added": ["x"]}', "corpus.json: added is"),
    ):
        (folder / name).write_text(content)
        assert any(sentence in warning for warning in read_study(folder).warnings)


def test_text_from_files_cannot_become_markup(folder: Path) -> None:
    hostile = "</script><img src=x onerror=alert(1)>"
    run = folder / "runs" / "ar-1M-0.5MT"
    edit_json(run / "plan.json", size=hostile, flops_convention=hostile)
    run.rename(run.with_name("<img src=x onerror=alert(2)>"))
    other = folder / "runs" / "ar-2M-0.5MT"
    (other / "result.json").unlink()
    (other / "exit.json").write_text(json.dumps({"status": 1, "last_words": hostile}))
    edit_json(folder / "law.json", warnings=[hostile])
    edit_json(folder / "corpus.json", corpus=hostile)
    text = report.render_page(read_study(folder))
    page = Page(text)
    assert not page.select("img") and len(page.select("script")) == 3
    # the warning, the corpus and the last words of the failed run
    assert page.words.count(hostile) == 3 and "<img src=x onerror=alert(2)>" in page.words
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)[1])
    assert len(figures["figures"]) == 5  # the JSON is still one script element


def test_facts_name_the_text_and_the_share_that_was_added(folder: Path) -> None:
    bytes_of = {"train_bytes": 22_000_000, "held_out_bytes": 2_000_000, "added_bytes": 18_000_000}
    edit_json(folder / "corpus.json", added="the sources of numpy", **bytes_of)
    facts = dict(tables.list_facts(read_study(folder)))
    assert facts["text"].startswith("2,000 documents of C4 (English web pages)")
    assert facts["added to it"] == "the sources of numpy, 75 % of all text"
    assert facts["hardware"] == "2 CPU cores" and facts["seeds"] == "0"


def test_the_page_is_accessible(page: Page) -> None:
    """The numbers are of the rules of WCAG."""
    assert not page.open  # 4.1.1: every element is closed
    assert page.select("html")[0]["attributes"]["lang"] == "en"  # 3.1.1
    assert page.select("title")[0]["text"].strip()  # 2.4.2
    levels = [int(heading["tag"][1]) for heading in page.select("h1", "h2", "h3", "h4")]
    assert levels[0] == 1 and levels.count(1) == len(page.select("main")) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))  # 1.3.1
    named = [e["attributes"] for e in page.elements if e["attributes"].get("role") in ("region", "img")]
    assert all(attributes.get("aria-label") for attributes in named)
    # 1.1.1: each figure has a text description
    assert sum(attributes["role"] == "img" for attributes in named) == len(page.select("figure"))


@pytest.mark.slow
def test_figures_are_exported_as_png_pdf_svg_and_data(study: Study, tmp_path: Path) -> None:
    pytest.importorskip("kaleido")
    figure = size_figure(study)
    try:
        written = report.export_figures([figure], tmp_path / "figures", "the command")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    png, pdf, svg, data = (path.read_bytes() for path in written)
    assert [path.name for path in written] == ["size.png", "size.pdf", "size.svg", "size.json"]
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", png[16:24]) == (1280, 2 * 380)
    assert len(png) > 20_000  # an empty sheet has a few kB
    assert pdf.startswith(b"%PDF") and b"/Subtype /Image" not in pdf and b"<image" not in svg  # vectors
    content = json.loads(data)
    assert content["command"] == "the command" and len(content["traces"]) == len(figure.chart.data)


def test_without_kaleido_or_a_browser_the_error_names_the_fix(study: Study, tmp_path, monkeypatch) -> None:
    chromium = pytest.importorskip("choreographer.browsers.chromium")
    # browsers are also looked for in fixed folders, so an empty PATH is not enough
    monkeypatch.setattr(chromium.Chromium, "find_browser", classmethod(lambda *_, **__: None))
    figure = residual_figure(study)
    for fix in ("Install chromium, or omit --figures", "pip install kaleido"):
        with pytest.raises(FileNotFoundError, match=fix):
            report.export_figures([figure], tmp_path / "figures", "")
        monkeypatch.setitem(sys.modules, "kaleido", None)
    assert not (tmp_path / "figures").exists()


def test_the_page_shows_loss_by_position_and_text_of_the_largest_run(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "study")
    runs = read_study(folder).finished.sort_values("train_flops")
    for run in (runs.iloc[0], runs.iloc[-1]):
        path = folder / run["path"]
        scores = path / "validation" / "last"
        scores.mkdir(parents=True)
        losses = {"loss_by_context": [[1, 1, 4.0], [2, 3, 3.5]]}
        write_json(scores / "text.json", losses)
        write_json(path / "sample.json", {"prompt": "<b>", "text": f" by {run['run']}", "temperature": 0.8})
    # files of a stranger
    for content in ([[1, 1]], [[1, 1, "x"]], "x", [None]):
        write_json(scores / "a.json", {"loss_by_context": content})
        assert read_study(folder).reading["loss_by_context"] == [losses["loss_by_context"]]
    study = read_study(folder)
    assert study.reading["run"] == runs.iloc[-1]["run"]
    (line,) = context_figure(study).chart.data
    assert list(line.y) == [4.0, 3.5] and line.x[1] == pytest.approx(6**0.5)
    text = report.render_page(study)
    assert f"&lt;b&gt;</b> by {runs.iloc[-1]['run']}" in text
