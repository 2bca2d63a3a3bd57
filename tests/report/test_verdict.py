"""A law that is not sound: the page's first line, grey lines, figures, and the runs to add."""

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.laws.fit import fit_law
from megatron.laws.law import Law
from megatron.report import report, verdict
from megatron.report.palette import MUTED
from megatron.report.study_data import Study, read_study
from megatron.study.proposal import SPENDING, TimedRun, parse_timed_runs, propose_runs, seconds_per_flop

synthetic = runpy.run_path(str(Path(__file__).with_name("synthetic_study.py")))
REASON = "E ranges from 0 to 4.28 in the bootstrap: it is not identified."
FAILED = {
    "statistic": 31.0,
    "p_value": 1e-4,
    "dof": (10, 4),
    "noise": 0.004,
    "misfit": 0.021,
    "passes": False,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return synthetic["write_study"](tmp_path / "study")


def with_law(folder: Path, **changes: object) -> Study:
    law = replace(Law.load(folder / "law.json"), **changes)
    law.save(folder / "law.json")
    return read_study(folder)


def test_the_page_begins_with_the_unidentified_constants_and_the_runs_to_add(folder: Path) -> None:
    study = with_law(folder, identified=False, not_identified={"E": REASON, "alpha": "alpha is at the edge."})
    text = report.render_page(study)
    first, second = re.findall(r"<p[^>]*>(.*?)</p>", text[text.index("</h1>") :])[:2]
    assert first.startswith(
        "Not identified: these runs do not determine E and alpha of the autoregressive law."
    )
    assert "0 to 4.28" in first and "at the edge" in first
    assert re.match(
        r"To identify it train three more runs: N&nbsp;=&nbsp;|To identify it train three more", second
    )
    assert "of training at the speed of the runs so far" in second
    box = re.search(r'<div class="law unsound">(.*?)</div>\s*<p', text, re.DOTALL)[0]
    assert "E + A/N" in box and "1.9" not in re.sub(r"\(.*?\)", "", box)
    assert box.count("<dd>not identified") == 2 and "do not quote it" in box
    assert "N ∝ C" not in text and "No compute-optimal N and D are given" in text


def test_a_law_that_is_not_sound_is_drawn_grey_and_dotted_and_named_in_titles(folder: Path) -> None:
    sound = {figure.key: figure for figure in report.make_figures(read_study(folder))}
    study = with_law(folder, identified=False, not_identified={"E": REASON})
    figures = {figure.key: figure for figure in report.make_figures(study)}
    assert set(figures) == set(sound) | {"intervals"}
    for key, meta in (("size", "budget:"), ("contours", "optimum"), ("optimum", "optimum")):
        lines = [
            trace["line"]
            for trace in figures[key].data
            if trace.get("mode") == "lines" and str(trace.get("meta", [""])[0]).startswith(meta)
            and not trace.get("fill")
        ]  # fmt: skip
        assert lines and all((line["color"], line["dash"]) == (MUTED, "dot") for line in lines), key
        assert "identify" in figures[key].title or "identif" in figures[key].title
    assert all("not identify" not in figure.title for figure in sound.values())
    assert figures["intervals"].title == "These runs identify 4 of the 5 constants of the law"


def test_a_form_that_fails_its_test_is_rejected_in_the_first_line_with_its_figure(folder: Path) -> None:
    study = with_law(folder, identified=True, lack_of_fit=FAILED)
    text = report.render_page(study)
    first = re.search(r"<p[^>]*>(.*?)</p>", text[text.index("</h1>") :])[1]
    assert first.startswith("Rejected: repeated runs differ by 0.40&nbsp;%, the form is off by another 2.10")
    assert "fails the lack-of-fit test" in first
    (figure,) = (figure for figure in report.make_figures(study) if figure.key == "misfit")
    bars = [trace for trace in figure.data if "error_y" in trace]
    assert len(bars) == 15  # one run per cell: two standard errors of a single run
    assert all(trace["error_y"]["array"][0] == pytest.approx(0.8) for trace in bars)
    rows = [row for row in study.finished_rows("autoregressive")]
    off = [100 * (row.loss / float(study.law.loss(row.n_params, row.train_tokens)) - 1) for row in rows]
    assert sorted(trace["y"][0] for trace in bars) == pytest.approx(sorted(off))
    assert f"The bars of {sum(abs(o) <= 0.8 for o in off)} of 15 cells reach zero" in figure.alt
    passed = with_law(folder, lack_of_fit=FAILED | {"passes": True, "p_value": 0.4})
    assert verdict.list_study_doubts(passed) == []
    assert any(figure.key == "misfit" for figure in report.make_figures(passed))


def test_the_runs_proposed_cost_no_more_than_half_and_are_timed_at_the_runs_own_speed() -> None:
    rng = np.random.default_rng(0)
    N, D = (v.ravel() for v in np.meshgrid([16e4, 4e5, 1.3e6], [25e4, 5e5, 1e6]))
    L = 3.3 + 25 / N**0.3 + 24 / D**0.12 + rng.normal(0, 0.01, 9)
    law = fit_law(N, D, L, n_bootstrap=50)
    assert law.identified is False
    rows = [TimedRun(n, d, wall_s=6 * n * d / 2e9) for n, d in zip(N, D, strict=True)]
    proposal = propose_runs(law, rows)
    spent = 6 * (N * D).sum()
    assert 1 <= len(proposal.runs.N) <= 3 and proposal.runs.flops.sum() <= SPENDING * spent
    assert proposal.seconds == pytest.approx(proposal.runs.flops.sum() / 2e9)
    assert proposal.describe().startswith("three more runs: N = ")
    # the runs extend the design: more informative than repeats
    wide = max(
        proposal.runs.D.max() / D.max(), N.min() / proposal.runs.N.min(), proposal.runs.N.max() / N.max()
    )
    assert wide > 1
    # the time of a branch covers only its own steps, so it gives no cost per FLOP
    branched = [replace(row, is_branch=True) for row in rows]
    assert np.isnan(seconds_per_flop(branched, N)).all()
    assert "of training" not in propose_runs(law, [replace(row, wall_s=None) for row in rows]).describe()
    assert propose_runs(law, []) is None


def test_runs_of_a_table_are_timed_by_its_columns_and_a_trunk_of_another_run_marks_a_branch() -> None:
    table = {
        "run": ["a", "b", "c", "d"], "trunk": ["a", "a", "", "d"], "size": ["1e5", "2e5", "3e5", "x"],
        "train_tokens": ["1e6", "2e6", "3e6", "4e6"], "wall_s": ["10", "20", "", "40"],
    }  # fmt: skip
    a, b, c = parse_timed_runs(table, {"N": "size"}, range(4))  # "d" has no N
    assert a == TimedRun(1e5, 1e6, wall_s=10.0)
    assert b == TimedRun(2e5, 2e6, wall_s=20.0, is_branch=True)
    assert c == TimedRun(3e5, 3e6)
    assert parse_timed_runs(table, {"N": "size"}, [1]) == [b]


def test_no_more_tokens_are_proposed_than_a_repeated_text_has() -> None:
    law = Law(form="chinchilla", params=synthetic["TRUTH"], objective=0.0, huber_delta=1e-3, n_runs=4)
    rows = [TimedRun(n, d, epochs=4.0) for n in (1e5, 1e6) for d in (1e6, 4e6)]
    assert propose_runs(law, rows).runs.D.max() <= 4e6 * (1 + 1e-9)
    short = [replace(row, epochs=row.D / 5e6) for row in rows]  # a text of 5M tokens
    assert 4e6 < propose_runs(law, short).runs.D.max() <= 5e6 * (1 + 1e-9)


def test_an_old_law_json_without_checks_counts_as_sound(folder: Path) -> None:
    law = json.loads((folder / "law.json").read_text())
    assert "identified" not in law
    assert verdict.is_sound(read_study(folder).law)
