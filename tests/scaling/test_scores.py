"""Downstream scores from run folders to the table, scores.csv and the report."""

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.scaling.plot_repeat import downstream_figure
from megatron.scaling.scores import beside, read_scores, write_scores
from megatron.scaling.selection import Columns, known_of, select_runs
from megatron.scaling.study import AUTOREGRESSIVE, SCORES, read_study
from megatron.scaling.table import Row, read_runs, read_table, write_parquet, write_table

synthetic = runpy.run_path(str(Path(__file__).with_name("synthetic_study.py")))


def leave(run: Path, step: int, label: str, results: dict[str, Any], **more: Any) -> None:
    """A results.json as tools/evaluate_downstream.py leaves it."""
    folder = run / "downstream" / f"step.{step}" / label
    folder.mkdir(parents=True)
    config = {"objective": AUTOREGRESSIVE, "step": step}
    (folder / "results.json").write_text(json.dumps({"results": results, "config": config, **more}))


def accuracy(row: Row) -> float:
    """A sigmoid between chance and all right."""
    return 0.25 + 0.75 / (1 + np.exp(3.0 * (row["loss"] - 3.2)))


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Every finished autoregressive run but one scored, at its last step and before."""
    folder = synthetic["write_study"](tmp_path / "study")
    for row in read_study(folder).done(AUTOREGRESSIVE)[1:]:
        run = folder / row["path"]
        end = json.loads((run / "result.json").read_text())
        end["step"] = 100
        (run / "result.json").write_text(json.dumps(end))
        leave(run, 50, "ar", {"quiz": {"acc,none": 0.99}})
        told = {"acc,none": 0.5, "acc_norm,none": accuracy(row), "acc_norm_stderr,none": 0.01}
        part = {"acc,none": 0.1}
        both = {"quiz": told, "some": {"acc,none": 0.1, "acc_stderr,none": "N/A"}, "part": part}
        leave(run, 100, "ar", both, group_subtasks={"some": ["part"], "quiz": []})
        leave(run, 100, "ar-first5", {"quiz": {"perplexity,none": 3.0, "acc,none": 1 / 5}, "odd": {}})
    return folder


def test_scores_are_those_of_the_last_step_and_what_differs_stands_apart(study: Path) -> None:
    rows = read_runs(study)
    n = sum(row["status"] == "done" and row["objective"] == AUTOREGRESSIVE for row in rows) - 1
    scores = read_scores(study, rows)
    assert {one.task for one in scores} == {"quiz", "some", "quiz-first5"} and len(scores) == 3 * n
    by_run = {row["run"]: row for row in rows}
    for one in scores:
        told = {"quiz": (accuracy(by_run[one.run]), 0.01, "acc_norm"), "some": (0.1, None, "acc")}
        assert (one.score, one.se, one.metric) == told.get(one.task, (0.2, None, "acc"))
        assert (one.kind, one.checkpoint) == ("accuracy", "step.100")


def test_the_table_and_the_report_have_them_and_a_fit_gives_back_the_curve(study: Path) -> None:
    rows = read_runs(study)
    scores = read_scores(study, rows)
    write_table(beside(rows, scores), study / "table.csv")
    write_parquet(beside(rows, scores), study / "table.parquet")
    assert write_scores(scores, study / SCORES) and write_scores(scores, study / SCORES)
    runs = select_runs(study / "table.csv", Columns(), AUTOREGRESSIVE)
    found = known_of(study / "table.csv", runs, "score_quiz")
    assert np.isnan(found).sum() == 1  # the run that nobody scored
    figure = downstream_figure(read_study(study))
    assert "quiz follows the loss" in figure.title
    assert "off its curve by 0.0 points at most" in figure.title
    assert sorted(figure.data[0]["y"]) == pytest.approx(sorted(found[np.isfinite(found)]))
    pyarrow = pytest.importorskip("pyarrow.parquet")
    told = pyarrow.read_table(study / "table.parquet")["score_quiz"].to_pylist()
    assert told == [float(cell) if cell else None for cell in read_table(study / "table.csv")["score_quiz"]]


def test_scores_that_somebody_else_wrote_are_left_alone(study: Path) -> None:
    mine = "run,task,score,kind\na,quiz,0.5,error\n"
    (study / SCORES).write_text(mine)
    assert not write_scores(read_scores(study, read_runs(study)), study / SCORES)
    assert (study / SCORES).read_text() == mine


def test_a_damaged_file_is_named(study: Path) -> None:
    path = next((study / "runs").glob("*/downstream/step.100/ar/results.json"))
    path.write_text("{")
    with pytest.raises(ValueError, match=r"results\.json: not JSON"):
        read_scores(study, read_runs(study))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("results", 5),
        ("results", {"copa": []}),
        ("results", {"\ud800": {"acc,none": 0.5}}),
        ("group_subtasks", 5),
        ("group_subtasks", {"a": None}),
        ("config", [1]),
    ],
)
def test_scores_of_other_types_are_refused_with_their_path(study: Path, key: str, value: Any) -> None:
    rows = read_runs(study)
    path = sorted(study.glob("runs/*/downstream/*/*/results.json"))[0]
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=r"results\.json: got other types"):
        read_scores(study, rows)
