"""Downstream scores: of a study from run folders to the table and scores.csv, and of published models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from megatron.report.study_data import AUTOREGRESSIVE, SCORES, load_references
from megatron.study.downstream_scores import (
    REFERENCE_FACTS,
    add_score_columns,
    read_references,
    read_scores,
    write_scores,
)
from megatron.study.importers import read_facts
from megatron.study.table import read_runs, read_table, select_finished, write_table
from tests.report.synthetic_study import edit_json, write_study


def write_task_results(run: Path, step: int, label: str, results: dict[str, Any], **more: Any) -> None:
    """Write a results.json as tools/evaluate_downstream.py does."""
    folder = run / "downstream" / f"step.{step}" / label
    folder.mkdir(parents=True)
    config = {"objective": AUTOREGRESSIVE, "step": step}
    (folder / "results.json").write_text(json.dumps({"results": results, "config": config, **more}))


def true_accuracy(loss: float) -> float:
    """Return a sigmoid in the loss, from chance to 1."""
    return 0.25 + 0.75 / (1 + np.exp(3.0 * (loss - 3.2)))


def finished_runs(folder: Path) -> pd.DataFrame:
    finished = select_finished(read_runs(folder))
    return finished[finished["objective"] == AUTOREGRESSIVE]


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Return a study in which all finished autoregressive runs but one have scores, at two steps."""
    folder = write_study(tmp_path / "study")
    for row in finished_runs(folder).iloc[1:].itertuples():
        run = folder / row.path
        edit_json(run / "result.json", step=100)
        write_task_results(run, 50, "ar", {"quiz": {"acc,none": 0.99}})
        metrics = {"acc,none": 0.5, "acc_norm,none": true_accuracy(row.loss), "acc_norm_stderr,none": 0.01}
        metrics |= {"bits_per_byte,none": 1.5, "bits_per_byte_stderr,none": 0.02}
        metrics |= {"choice_probability,none": 0.3, "choice_probability_stderr,none": "N/A"}
        part = {"acc,none": 0.1}
        both = {"quiz": metrics, "some": {"acc,none": 0.1, "acc_stderr,none": "N/A"}, "part": part}
        write_task_results(run, 100, "ar", both, group_subtasks={"some": ["part"], "quiz": []})
        write_task_results(
            run, 100, "ar-first5", {"quiz": {"perplexity,none": 3.0, "acc,none": 1 / 5}, "odd": {}}
        )
    return folder


def test_scores_are_from_the_last_step_and_different_settings_are_separate_tasks(study: Path) -> None:
    rows = read_runs(study)
    n = len(finished_runs(study)) - 1
    scores = read_scores(study, rows)
    answers = {"quiz-bits_per_byte": (1.5, 0.02), "quiz-choice_probability": (0.3, None)}
    assert set(scores["task"]) == {"quiz", "some", "quiz-first5", *answers} and len(scores) == 5 * n
    losses = rows.set_index("run")["loss"]
    for score in scores.itertuples():
        expected = {"quiz": (true_accuracy(losses[score.run]), 0.01, "acc_norm"), "some": (0.1, None, "acc")}
        kind = score.task.removeprefix("quiz-") if score.task in answers else "accuracy"
        expected |= {task: (*pair, kind) for task, pair in answers.items()}
        assert (score.score, score.se, score.metric) == expected.get(score.task, (0.2, None, "acc"))
        assert (score.kind, score.checkpoint) == (kind, "step.100")


def test_the_table_has_the_scores_to_the_last_bit(study: Path) -> None:
    rows = read_runs(study)
    scores = read_scores(study, rows)
    write_table(add_score_columns(rows, scores), study / "table.csv")
    write_table(add_score_columns(rows, scores), study / "table.parquet")
    assert write_scores(scores, study / SCORES) and write_scores(scores, study / SCORES)
    table = read_table(study / "table.csv")
    pd.testing.assert_frame_equal(read_table(study / "table.parquet"), table)
    expected = scores[scores["task"] == "quiz"].set_index("run")["score"].to_dict()
    assert table.set_index("run")["score_quiz"].dropna().to_dict() == expected
    assert set(table["score_quiz-bits_per_byte"].dropna()) == {1.5}


def test_a_scores_file_from_another_program_is_not_overwritten(study: Path) -> None:
    text = "run,task,score,kind\na,quiz,0.5,error\n"
    (study / SCORES).write_text(text)
    assert not write_scores(read_scores(study, read_runs(study)), study / SCORES)
    assert (study / SCORES).read_text() == text


def test_a_damaged_file_or_one_of_other_types_is_refused_with_its_path(study: Path) -> None:
    rows = read_runs(study)
    path = sorted(study.glob("runs/*/downstream/*/*/results.json"))[0]
    content = json.loads(path.read_text())
    changes = [
        {"results": 5}, {"results": {"copa": []}}, {"group_subtasks": 5}, {"group_subtasks": {"a": None}},
        {"config": [1]},
    ]  # fmt: skip
    for change in changes:
        path.write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match=r"results\.json: got other types"):
            read_scores(study, rows)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"results\.json: got invalid JSON"):
        read_scores(study, rows)


def write_reference(path: Path, model: str, config: dict[str, Any] | None = None, **top: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    metrics = {"alias": "sciq", "acc,none": 0.5, "acc_norm,none": 0.625, "acc_norm_stderr,none": 0.1}
    content = {"results": {"sciq": metrics}, "config": {"model": model, "limit": 16, **(config or {})}, **top}
    path.write_text(json.dumps(content))


def test_results_of_both_programs_give_the_same_task(tmp_path: Path) -> None:
    ours = tmp_path / "a.scores" / "downstream" / "ar-first16" / "results.json"
    about = {"objective": "autoregressive", "model_num_parameters": 1000}
    write_reference(ours, "EleutherAI/pythia-14m@step1000", about)
    # the copy in lm-eval's form is not read twice
    write_reference(ours.parent / "a" / "results_2026-01-01T00-00-00.json", "copy")
    theirs = tmp_path / "b" / "results_2026-01-01T00-00-00.json"
    write_reference(theirs, "hf", model_name="acme/other")
    first, second = read_references([tmp_path / "a.scores", tmp_path / "b"]).itertuples(index=False)
    assert tuple(first)[:7] == (
        "EleutherAI/pythia-14m@step1000", "sciq-first16", 0.625, "accuracy", 0.1, "acc_norm", 1000
    )  # fmt: skip
    assert (second.model, second.task) == ("acme/other", "sciq-first16")
    assert pd.isna(first.train_tokens) and pd.isna(second.n_params)
    with pytest.raises(FileNotFoundError, match="expected scores of a model"):
        read_references([tmp_path / "c"])


def test_facts_replace_what_the_results_lack(tmp_path: Path) -> None:
    write_reference(tmp_path / "results_1.json", "hf", model_name="acme/other")
    table = tmp_path / "facts.csv"
    table.write_text("model,n_params,train_tokens,note\nacme/other,1e6,2e9,random weights\n")
    scores = read_references([tmp_path], read_facts(table, "model", REFERENCE_FACTS))
    (score,) = scores.itertuples()
    assert (score.n_params, score.train_tokens, score.note) == (1_000_000, 2_000_000_000, "random weights")
    assert write_scores(scores, tmp_path / "references.csv")
    assert (
        "acme/other,sciq-first16,0.625,accuracy,0.1,acc_norm,1000000,2000000000,random weights"
        in (tmp_path / "references.csv").read_text()
    )
    pd.testing.assert_frame_equal(load_references(tmp_path / "references.csv"), scores, check_dtype=False)
    table.write_text("model,colour\nacme/other,red\n")
    with pytest.raises(ValueError, match="got columns model, colour"):
        read_facts(table, "model", REFERENCE_FACTS)
    table.write_text("model,n_params\nacme/other,many\n")
    with pytest.raises(ValueError, match="n_params: got 'many'.* Expected numbers"):
        read_facts(table, "model", REFERENCE_FACTS)
