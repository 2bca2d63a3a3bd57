"""Tests of scores over compute, their noise, and published models on the page."""

import math
from pathlib import Path

import numpy as np
import pytest

from megatron.report.figures.plot_downstream import (
    collect_task_scores,
    describe_noise,
    describe_separation,
    score_compute_figure,
)
from megatron.report.reference_text import collect_references
from megatron.report.report import render_page
from megatron.report.study_data import Study, read_study
from megatron.study.format import NOT_KNOWN
from megatron.study.references import ReferenceScore, write_references
from tests.report.synthetic_study import write_study

N_QUESTIONS = 400


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A study whose score on one task rises with compute, and on another is noise around chance."""
    write_study(tmp_path)
    rng = np.random.default_rng(0)
    lines = ["run,task,score,kind,se,metric,checkpoint"]
    for row in read_study(tmp_path).finished_rows("autoregressive"):
        rising = 0.25 + 0.1 * math.log10(row.flops_6nd / 1e11)
        for task, truth in (("sciq-first400", rising), ("copa-first400", 0.5)):
            se = math.sqrt(truth * (1 - truth) / N_QUESTIONS)
            score = rng.binomial(N_QUESTIONS, truth) / N_QUESTIONS
            lines.append(f"{row.run},{task},{score},accuracy,{se},acc,step")
    (tmp_path / "scores.csv").write_text("\n".join(lines) + "\n")
    task = "sciq-first400"
    write_references(
        [
            ReferenceScore("acme/b", task, 0.9, "accuracy", 0.015, "acc", 10**9, 10**11, "random weights"),
            ReferenceScore("acme/a", task, 0.7, "accuracy", None, "acc", 10**8, 10**11),
            ReferenceScore("acme/unplaced", task, 0.8, "accuracy", 0.02, "acc", None, None),
        ],
        tmp_path / "references.csv",
    )  # fmt: skip
    return tmp_path


@pytest.fixture
def study(folder: Path) -> Study:
    return read_study(folder)


def test_the_title_says_which_scores_differ_by_more_than_their_noise(study: Study) -> None:
    copa, sciq = collect_task_scores(study)
    assert describe_noise(copa).startswith("copa-first400: 15 runs within")
    assert "do not differ by more than their noise (standard error 2.5 points)" in describe_noise(copa)
    assert " differ by more than their noise" in describe_noise(sciq)
    assert describe_separation([copa, sciq]) == (
        "On sciq-first400 the runs differ by more than the noise of their scores, on the others they do not"
    )
    assert describe_separation([copa]).startswith("On none of the tasks")


def test_noise_is_mistaken_for_a_difference_in_five_of_a_hundred_cases(study: Study) -> None:
    """The size of the test on scores of equal truth, 400 times: 5 % +- 1.1 %."""
    copa, _ = collect_task_scores(study)
    rng = np.random.default_rng(1)
    rows = [row for row, _, _ in copa.runs]
    n_differ = 0
    for _ in range(400):
        scores = rng.binomial(N_QUESTIONS, 0.5, len(rows)) / N_QUESTIONS
        errors = np.sqrt(scores * (1 - scores) / N_QUESTIONS)
        runs = list(zip(rows, scores.tolist(), errors.tolist(), strict=True))
        words = describe_noise(type(copa)("copa", runs, []))
        n_differ += "do not differ" not in words
    assert 0.01 < n_differ / 400 < 0.09


def test_points_have_their_compute_and_two_standard_errors(study: Study) -> None:
    figure = score_compute_figure(study)
    assert figure is not None
    traces = {
        (trace["meta"][0], trace["marker"].get("symbol")): trace for trace in figure.data if "marker" in trace
    }
    runs = traces["task:sciq-first400", "square"]
    row = study.finished_rows("autoregressive")[0]
    assert runs["x"][0] == row.flops_6nd == 6 * row.n_params * row.train_tokens
    references = traces["task:sciq-first400", "square-open"]
    assert list(references["x"]) == [6e20, 6e19]
    assert list(references["error_y"]["array"]) == [0.03, 0.0]
    assert "acme/b: random weights." in figure.caption
    low, high = figure.layout["yaxis"]["range"]
    assert low < min(runs["y"]) - max(runs["error_y"]["array"]) < 0.93 < high  # 0.9 with its bar


def test_the_page_has_a_table_of_published_models_with_their_caveats(study: Study) -> None:
    table = collect_references(study)
    names = [row[0] for row in table["rows"]]
    assert names[0].startswith("this study: ar-5M-4.7MT") and names[1:] == [
        "acme/a",
        "acme/b",
        "acme/unplaced",
    ]
    assert table["rows"][2][1:] == ("1.00B", "100B", "6.0e20", "0.900 ± 0.015")
    assert table["rows"][3][1:4] == (NOT_KNOWN, NOT_KNOWN, NOT_KNOWN)
    page = render_page(study)
    assert "Published models beside this study" in page and "acme/b: random weights." in page
    assert 'id="figure-score-compute"' in page


def test_a_study_without_published_models_has_no_table(folder: Path) -> None:
    (folder / "references.csv").unlink()
    assert collect_references(read_study(folder)) == {}
    assert "Published models" not in render_page(read_study(folder))


def test_damaged_references_are_a_fault_of_the_page_not_an_error(folder: Path) -> None:
    (folder / "references.csv").write_text("model,score\nx,1\n")
    study = read_study(folder)
    assert study.references == [] and any("references.csv cannot be used" in fault for fault in study.faults)
