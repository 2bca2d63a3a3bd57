"""The page of a study with a frontier: first the blind check, then the answer, then parametric laws."""

import re
from dataclasses import replace

import numpy as np
import pytest

from megatron.laws.compute_law import ComputeLaw
from megatron.laws.law import Law
from megatron.report import blind_text, frontier_text, report
from megatron.report.figures import plot_frontier
from megatron.study.run_row import RunRow
from tests.report.frontier_study import (
    ANSWER,
    AR,
    BUDGETS,
    FLOPS,
    REJECTED,
    fit_rows,
    is_near,
    loss_at,
    make_blind,
    make_rows,
    make_study,
    size_at,
    strip_markup,
)


@pytest.fixture(scope="module")
def rows() -> list[RunRow]:
    return make_rows(np.random.default_rng(1), n_seeds=3)


@pytest.fixture(scope="module")
def law(rows: list[RunRow]) -> ComputeLaw:
    return fit_rows(rows)


# --------------------------------------------------------------------------------------- the blind check


@pytest.mark.parametrize(
    ("times", "first", "warns"),
    [
        (1.001, "Inside: predicted", False),
        (1.5, "Outside: predicted", True),
        (None, "Predicted, not yet measured:", False),
    ],
)
def test_the_page_begins_with_predicted_against_measured(
    rows: list[RunRow], law: ComputeLaw, times: float | None, first: str, warns: bool
) -> None:
    blind = make_blind(law)
    blind = replace(blind, measured=None if times is None else times * blind.predicted)
    text = report.render_page(make_study(rows, law, blind))
    body = text[text.index("</h1>") : text.index('id="figures"')]
    assert strip_markup(body).startswith(f"Blind check {first}")
    box = re.search(r'<div class="law answer(.*?)">(.*?)</div>', body, re.DOTALL)
    assert (box[1] == " warning") == warns
    assert "95 % predictive interval" in strip_markup(
        box[2]
    ) and f"predicted {blind.predicted:.3f}" in strip_markup(box[2])
    assert "4 times the largest fitted budget" in strip_markup(box[2])
    assert "2026-11-22 11:40:03 UTC, sha256 0a1b2c3d4e5f." in strip_markup(box[2])
    if times is not None:
        assert f"error {100 * (times - 1):+.2f} %" in strip_markup(box[2])
    places = [body.index(f'id="figure-{key}"') for key in ("blind", "isoflop", "frontier", "compute")]
    assert places == sorted(places) and body.count('id="figure-blind"') == 1
    assert box.end() < places[0] < body.index("What to train next") < places[1]
    assert ("the intervals below may be too narrow" in body) == warns


def test_a_prediction_stored_after_the_run_is_not_called_blind(rows: list[RunRow], law: ComputeLaw) -> None:
    blind = make_blind(law, in_time=False)
    blind = replace(blind, measured=blind.predicted)
    assert blind_text.format_blind_lead(blind).startswith("Not a blind check:") and blind_text.is_warning(
        blind
    )
    assert "Inside" not in blind_text.format_blind_lead(blind)
    assert blind_text.format_blind_title(blind).startswith("Run that was not blind")


def test_a_loss_that_reads_like_the_end_of_its_interval_gets_more_digits(law: ComputeLaw) -> None:
    blind = make_blind(law, predicted=3.0, interval=(2.9, 3.10004), measured=3.10014)
    assert blind_text.format_blind_lead(blind).startswith("Outside: predicted 3.0000")
    assert "2.9000 to 3.1000), measured 3.1001;" in blind_text.format_blind_lead(blind)


def test_the_blind_figure_draws_the_interval_the_measurement_and_the_runs_to_the_left(
    rows: list[RunRow], law: ComputeLaw
) -> None:
    blind = make_blind(law, measured=2.75)
    figure = plot_frontier.blind_figure(make_study(rows, law, blind))
    upright, lying = [trace for trace in figure.data if "error_y" in trace or "error_x" in trace]
    for trace, error, at in ((upright, "error_y", "y"), (lying, "error_x", "x")):
        value = trace[at][0]
        ends = (value - trace[error]["arrayminus"][0], value + trace[error]["array"][0])
        assert ends == pytest.approx(blind.interval)
    assert [t["y"] for t in figure.data if t.get("marker", {}).get("symbol") == "diamond"] == [[2.75], [0]]
    runs = next(trace for trace in figure.data if trace["meta"] == ["runs"])
    assert sorted(runs["y"]) == sorted(row.loss for row in rows) and max(runs["x"]) < blind.C
    line = next(trace for trace in figure.data if trace["meta"] == ["optimum"] and "fill" not in trace)
    assert max(line["x"]) == pytest.approx(blind.C) and line["y"][-1] == pytest.approx(
        loss_at(law, blind.C)[0]
    )


def test_a_refit_after_the_prediction_is_reported(rows: list[RunRow], law: ComputeLaw) -> None:
    study = make_study(rows, law, make_blind(law))
    assert "refitted" not in blind_text.describe_record(study)
    later = replace(study, blind=replace(study.blind, predicted=study.blind.predicted * 1.01))
    assert "The law has been refitted since." in blind_text.describe_record(later)


# ------------------------------------------------------------------------------------------- the answer


def test_the_answers_are_for_one_four_and_ten_times_the_largest_budget(
    rows: list[RunRow], law: ComputeLaw
) -> None:
    text = report.render_summary(make_study(rows, law))
    table = re.search(r'<table class="answers">.*?<tbody>(.*?)</tbody>', text, re.DOTALL)[1]
    lines = [strip_markup(line) for line in table.split("</tr>")[:-1]]
    assert len(lines) == 3
    for line, times in zip(lines, (1, 4, 10), strict=True):
        C = times * BUDGETS[-1]
        values = re.findall(r"([\d.]+[kM]?) \(([\d.]+[kM]?) to ([\d.]+[kM]?)\)", line)
        expected = (size_at(law, C), [C / (FLOPS * N) for N in size_at(law, C)], loss_at(law, C))
        for written, truth in zip(values, expected, strict=True):
            assert is_near(written[0], truth[0])
            assert all(map(is_near, written[1:], sorted(truth[1:])))


def test_crosses_are_at_the_lowest_point_of_their_slice(rows: list[RunRow], law: ComputeLaw) -> None:
    figure = plot_frontier.slices_figure(make_study(rows, law))
    crosses = [trace for trace in figure.data if trace.get("marker", {}).get("symbol") == "x"]
    assert len(crosses) == len(BUDGETS)
    for cross, C in zip(crosses, BUDGETS, strict=True):
        N = np.geomspace(1e3, 1e7, 200_001)
        L = law.loss(N, C)
        assert cross["x"][0] == pytest.approx(N[L.argmin()], rel=1e-3)
        assert cross["y"][0] == pytest.approx(L.min(), rel=1e-9)


def test_a_rejected_form_is_reported_with_the_answer(rows: list[RunRow], law: ComputeLaw) -> None:
    text = strip_markup(report.render_summary(make_study(rows, replace(law, lack_of_fit=REJECTED))))
    assert "The form of the frontier fails its lack-of-fit test (F = 31, p = 0.0001)" in text
    assert "scatter by 0.40 %, the form is off by another 2.10 %" in text and re.search(ANSWER, text)


def make_unsound_law(**changes: object) -> Law:
    params = {"E": 1.9, "A": 120.0, "B": 900.0, "alpha": 0.33, "beta": 0.42}
    return Law(
        form="chinchilla", params=params, objective=0.0, huber_delta=1e-3, n_runs=27,
        filter={"objective": AR}, ranges={"N": [1e4, 1e6], "D": [1e5, 1e7], "L": [2.9, 4.5]},
        derived={"a_exponent": 0.56}, **changes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"identified": False, "not_identified": {"E": "E is open."}}, "Not identified: these runs do not"),
        ({"identified": True, "lack_of_fit": REJECTED}, "Rejected: repeated runs differ by 0.40 %"),
    ],
)  # fmt: skip
def test_an_unsound_parametric_law_comes_after_the_frontier_and_gives_no_number(
    rows: list[RunRow], law: ComputeLaw, changes: dict, words: str
) -> None:
    form = make_unsound_law(**changes)
    study = make_study(rows, law)
    study = replace(study, law=form, laws={AR: form})
    text = strip_markup(report.render_summary(study))
    order = [text.index(part) for part in ("What to train next", "Parametric forms", words)]
    assert order == sorted(order)
    assert "N ∝ C 0.56" not in text and "no law" not in text.lower().split(". ")[0]
    assert re.search(rf"N ∝ C {law.params['size_exponent']:.2f} ", text)
    assert "No compute-optimal N and D" not in text
    keys = [figure.key for figure in report.make_figures(study)]
    assert "optimum" not in keys and keys[:2] == ["isoflop", "frontier"]
    assert ("misfit" in keys) == ("lack_of_fit" in changes)
    alone = strip_markup(report.render_summary(replace(study, compute_law=None)))
    assert alone.startswith(words)  # without a frontier it is the first line, followed by the runs to add
    assert ("To identify it train" in alone) == ("not_identified" in changes)
    assert ("fit the compute-optimal frontier" in alone) == ("lack_of_fit" in changes)


def test_a_study_without_any_law_first_reports_that_and_the_runs_to_train(rows: list[RunRow]) -> None:
    text = strip_markup(report.render_summary(make_study(rows, None)))
    assert text.startswith("No law is shown") and "Towards a law train" in text
    assert text.index("Towards a law train") < text.index("were trained on")


# ------------------------------------------------------------------------------------- not identified


def test_sizes_that_miss_the_best_n_are_answered_with_runs_on_the_missing_side() -> None:
    for shift, side in ((20.0, "smaller"), (0.05, "larger")):
        rows = make_rows(np.random.default_rng(2), shift=shift)
        law = replace(fit_rows(rows), not_identified={"log_size": "The best N is outside."})
        study = make_study(rows, law)
        runs = frontier_text.choose_runs_to_add(law, frontier_text.select_frontier_points(study))
        for (N, _), C in zip(runs, (BUDGETS[-1], BUDGETS[0]), strict=True):
            sizes = [row.n_params for row in rows if row.train_flops == C]
            assert (min(sizes) / 2 if side == "smaller" else 2 * max(sizes)) == N
        assert "To identify it train two more runs: N = " in frontier_text.suggest_frontier_runs(study)


def test_runs_of_a_law_without_a_list_are_selected_by_its_budgets(
    rows: list[RunRow], law: ComputeLaw
) -> None:
    blind = make_blind(law, measured=2.7)
    extra = replace(
        rows[0], run="blind", identity="b", n_params=blind.N, train_tokens=blind.D, loss=2.7,
        train_flops=blind.C,
    )  # fmt: skip
    study = make_study([*rows, extra], replace(law, runs=[]), blind)
    points = frontier_text.select_frontier_points(study)
    assert [row.run for row in points] == [row.run for row in rows]
    assert blind_text.is_blind_run(study, extra) and not blind_text.is_blind_run(study, rows[0])
    by_6nd = replace(law, C=tuple(f * 6 / FLOPS for f in law.C), runs=[])
    assert all(
        row.flops_6nd == row.C for row in frontier_text.select_frontier_points(make_study(rows, by_6nd))
    )
