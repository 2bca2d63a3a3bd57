import errno
import json
import re
import runpy
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron.report import report
from megatron.report.study_data import read_study

synthetic = runpy.run_path(str(Path(__file__).with_name("synthetic_study.py")))
LOADING = {"src", "href", "srcset", "data", "poster", "action", "background"}


class Page(HTMLParser):
    """Parser of a page: the resources it loads, its tags, labels and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.labels: list[str] = []
        self.words = ""
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside.append(tag)
        self.loads += [value for name, value in attrs if name in LOADING and value]
        self.labels += [value for name, value in attrs if name == "aria-label" and value]

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._inside):
            self.words += " " + data.replace("\xa0", " ")


@pytest.fixture
def study(tmp_path) -> Path:
    return synthetic["write_study"](tmp_path / "a_study")


def read_page(study: Path) -> Page:
    return Page(report.render_page(read_study(study)))


def parse_figures(text: str) -> dict:
    return json.loads(re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_loads_nothing(study):
    text = report.write_report(study).read_text()
    page = Page(text)
    assert set(page.loads) == {"data:,"}  # an empty icon, so that a browser does not request one
    assert not re.search(r"url\(|@import", text[: text.index("<body>")])
    assert "default-src 'none'" in text
    assert text.count("Plotly.react(") == 1 and 4e6 < len(text) < 7e6  # plotly.js is in it, once


def test_every_figure_has_a_claim_axes_with_units_and_a_text_alternative(study):
    figures = report.make_figures(read_study(study))
    assert [figure.key for figure in figures] == [
        "curves",
        "compute",
        "prediction",
        "residuals",
        "size",
        "contours",
        "optimum",
        "pairs",
        "epochs",
        "objectives",
    ]
    for figure in figures:
        assert re.search(r"\d", figure.title), figure.key
        assert len(figure.alt) >= len(figure.title) and figure.caption
        axes = [axis for name, axis in figure.layout.items() if re.match("[xy]axis", name)]
        assert len(axes) >= 2 and all(
            re.search("tokens|nats|FLOPs|parameters", a["title"]["text"]) for a in axes
        )
        assert any("hovertemplate" in trace for trace in figure.data)
    labels = Page(report.render_page(read_study(study))).labels
    assert all(figure.alt in labels for figure in figures)


def test_the_page_describes_the_runs_and_the_text(study):
    words = read_page(study).words
    assert "21 transformers from 210k to 5.0M parameters" in words
    assert "15 autoregressive (5 sizes by 3 token budgets) and 6 masked diffusion" in words
    assert "2,000 documents of C4 (English web pages): the sample was found beside the checkout." in words
    assert "21 of 21" in words


def test_the_page_gives_the_optimum_of_the_law_with_its_interval_and_a_caution(study):
    words = read_page(study).words
    truth, C = synthetic["TRUTH"], 6 * 5_046_528 * 4_718_592
    alpha, beta = truth["alpha"], truth["beta"]
    for compute in (C, 10 * C):
        G = (alpha * truth["A"] / (beta * truth["B"])) ** (1 / (alpha + beta))
        N = G * (compute / 6) ** (beta / (alpha + beta))
        assert re.search(rf"N = {N / 1e6:.1f}M \([\d.]+M to [\d.]+M\)", words)
    assert "extrapolation" in words


def test_the_laws_warnings_are_on_the_page(study):
    assert "15 runs are few: the intervals of A and B are wide." in read_page(study).words


def test_without_a_law_the_page_reports_that_and_shows_the_runs(study):
    (study / "law.json").unlink()
    page = read_page(study)
    assert "No law is shown" in page.words and "15 autoregressive runs are finished" in page.words
    assert page.tags.count("figure") == 4


def test_a_broken_law_is_reported_and_is_not_fatal(study):
    (study / "law.json").write_text('{"form": "chinch')
    page = read_page(study)
    assert "law.json cannot be used" in page.words and "No law is shown" in page.words


def test_runs_that_are_missing_are_counted_and_shown(study):
    for name in ("ar-5M-4.7MT", "md-2M-4.7MT"):
        (study / "runs" / name / "result.json").unlink()
    (study / "runs" / "ar-0.2M-0.5MT" / "plan.json").write_text("{")
    words = read_page(study).words
    assert "18 of 21" in words and "3 of 21 runs are not finished" in words
    assert "plan.json cannot be read" in words
    assert "The law was fitted on 15 runs, and 13 are finished now: fit it again." in words


@pytest.mark.parametrize("left", [0, 1])
def test_a_study_of_no_or_one_run_has_a_page(study, left):
    for run in sorted((study / "runs").iterdir())[left:]:
        for path in run.iterdir():
            path.unlink()
        run.rmdir()
    (study / "law.json").unlink()
    (study / "corpus.json").unlink()
    assert f"{left} of {left}" in read_page(study).words


def test_losses_that_are_not_numbers_do_not_break_the_figures(study):
    with (study / "runs" / "ar-1M-0.5MT" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 999, "tokens": 9e6, "loss": NaN}\n')
    text = report.render_page(read_study(study))
    assert len(parse_figures(text)["figures"]) == 10


def test_text_from_files_cannot_become_markup(study):
    corpus = json.loads((study / "corpus.json").read_text())
    (study / "corpus.json").write_text(json.dumps(corpus | {"corpus": "</script><img src=http://x/>"}))
    page = read_page(study)
    assert "img" not in page.tags and "</script><img src=http://x/>" in page.words


def test_names_of_runs_sizes_and_methods_cannot_become_markup(study):
    hostile = "</script><img src=x onerror=alert(1)>"
    run = study / "runs" / "ar-1M-0.5MT"
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps(plan | {"size": hostile, "flops_convention": hostile}))
    run.rename(run.with_name("<img src=x onerror=alert(2)>"))
    other = study / "runs" / "ar-2M-0.5MT"
    (other / "result.json").unlink()
    (other / "exit.json").write_text(json.dumps({"status": 1, "last_words": hostile}))
    law = json.loads((study / "law.json").read_text())
    law["interval"]["method"] = law["warnings"][0] = hostile
    (study / "law.json").write_text(json.dumps(law))
    text = report.render_page(read_study(study))
    page = Page(text)
    assert "img" not in page.tags and page.tags.count("script") == 3
    # the size, the method, the warning and the last words of the failed run
    assert page.words.count(hostile) == 4 and "<img src=x onerror=alert(2)>" in page.words
    assert len(parse_figures(text)["figures"]) == 10  # the JSON is still one script element


def test_text_that_was_added_to_a_corpus_is_reported_with_its_share(study):
    path = study / "corpus.json"
    corpus = json.loads(path.read_text())
    assert "Other text was added" not in read_page(study).words
    added = {"added": "the sources of numpy 2.4.6", "added_documents": 1606, "added_bytes": 18_000_000}
    path.write_text(json.dumps(corpus | added | {"train_bytes": 22_000_000, "held_out_bytes": 2_000_000}))
    amount = "in 1,606 documents, 18M bytes or 75 % of all text"
    assert f"Other text was added to it {amount}: the sources of numpy 2.4.6." in read_page(study).words
    path.write_text(json.dumps(corpus | {"added": "the sources of numpy 2.4.6"}))
    assert "Other text was added to it: the sources of numpy 2.4.6." in read_page(study).words


def test_a_failed_write_keeps_the_old_page(study, monkeypatch):
    (study / "report.html").write_text("old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "disk full")))
    with pytest.raises(OSError, match="disk full"):
        report.write_report(study)
    assert (study / "report.html").read_text() == "old"
    assert {path.name for path in study.iterdir()} == {"runs", "corpus.json", "law.json", "report.html"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("unigram_entropy_nats", "x"),
        ("train_tokens", []),
        ("held_out_tokens", 1e309),
        ("corpus", 5),
        ("why", {}),
        ("added", ["x"]),
        ("added_bytes", "many"),
    ],
)
def test_a_corpus_of_other_types_is_reported_and_is_not_fatal(study, key, value):
    path = study / "corpus.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert f"corpus.json: {key} is" in Page(report.render_page(read_study(study))).words
