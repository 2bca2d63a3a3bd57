"""Downstream scores of a study's runs (scores.csv, the table) and of published models (references.csv).

Both are data frames with a row for each task:

run, model      run of the study, or a model outside it
task            name of the task, with the settings that change
                scores: hellaswag-first200, copa-mc32; bits per byte and probability
                of the right answer are further rows: hellaswag-bits_per_byte
score, se       share of correct answers, or such a score, and its standard error,
                None if it is unknown
kind            for `downstream_curve.fit_downstream`: accuracy, or one of its ANSWER_KINDS
metric          the metric of lm-evaluation-harness
checkpoint      the run's last checkpoint, whose loss is in the table
n_params, train_tokens   of a model; None: unknown
note            a caveat for readers, for example that the weights of a model are random
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from megatron.config.yaml_file import is_finite
from megatron.io import read_json, write_atomic
from megatron.laws.downstream_curve import ANSWER_KINDS
from megatron.plan.run_dir import DOWNSTREAM, DOWNSTREAM_RESULTS, RESULT
from megatron.study.table import SCORE_PREFIX, read_table, select_finished

REFERENCES = "references.csv"  # in the study's directory
HARNESS_RESULTS = "results_*.json"  # files of lm-evaluation-harness
# the first of these that a task has is its score;
# all are shares of correct answers
METRICS = ("acc_norm", "acc", "exact_match", "em", "f1")


REFERENCE_FACTS = ("n_params", "train_tokens", "note")
SCORE_COLUMNS = ["run", "task", "score", "kind", "se", "metric", "checkpoint"]
REFERENCE_COLUMNS = ["model", *SCORE_COLUMNS[1:6], *REFERENCE_FACTS]


def read_scores(study_dir: Path, table: pd.DataFrame) -> pd.DataFrame:
    """Return the scores that tools/evaluate_downstream.py wrote for the finished runs of a table.

    Only checkpoints at a run's last step count,
    because the table has no loss for earlier ones.
    Raises ValueError for a damaged file.
    """
    rows = []
    finished = select_finished(table)
    for name, folder in zip(finished["run"], finished["path"], strict=True):
        run = study_dir / folder
        # the last step, from result.json; None matches no checkpoint
        end = (read_json(run / RESULT) or {}).get("step")
        for path in sorted(run.glob(f"{DOWNSTREAM}/*/*/{DOWNSTREAM_RESULTS}")):
            results = read_task_scores(path)  # raises for a damaged file
            step = (read_json(path) or {}).get("config", {}).get("step")
            if step is not None and step == end:
                # path: <run>/downstream/<checkpoint>/<settings>/results.json
                rows += [result | {"run": name, "checkpoint": path.parts[-3]} for result in results]
    return _make_scores(rows, SCORE_COLUMNS)


def _make_scores(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    """Return rows as a data frame. Of several results for one task the last counts."""
    last = {(row[columns[0]], row["task"]): row for row in rows}
    return pd.DataFrame(list(last.values()), columns=list(columns), dtype=object)


def read_task_scores(path: Path) -> list[dict[str, Any]]:
    """Return task, score, kind, se and metric of each score in a results.json or a file of lm-eval.

    Raises ValueError for values of other types.
    """
    content = read_json(path) or {}
    try:
        config = dict(content.get("config", {}))
        # subtasks of a group are already in the group's score
        parts = {name for names in content.get("group_subtasks", {}).values() for name in names}
        results = content.get("results", {}).items()
        whole = {task: metrics for task, metrics in results if task not in parts}
        rows = [score | {"task": task} for task, metrics in whole.items() for score in _find_scores(metrics)]
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: got other types ({error}), expected objects under config, group_subtasks and results. "
            "Evaluate the run again, or delete the file."
        ) from error
    # label: the settings in the folder's name, such as ar-first200; files of
    # lm-eval have only the limit
    label = [] if config.get("limit") is None else [f"first{config['limit']:g}"]
    if path.name == DOWNSTREAM_RESULTS:
        label = path.parts[-2].split("-")
    if config.get("objective") == "autoregressive":  # has only one scoring method, so its name is omitted
        label = [word for word in label if word != "ar"]
    for row in rows:
        end = [row["kind"]] if row["kind"] in ANSWER_KINDS else []
        row["task"] = "-".join([row["task"], *label, *end])
    return rows


def _find_scores(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return score, kind, se and metric of each score that a task has."""
    # keys of lm-evaluation-harness are "metric,filter":
    # {"acc,none": 0.31, "acc_stderr,none": 0.01}.
    # It writes "N/A" for an error that it does not estimate.
    values = {key.partition(",")[0]: v for key, v in metrics.items() if isinstance(v, float) and is_finite(v)}
    # acc_norm before acc: its normalisation by length is the usual metric
    # where a task has both
    kinds = dict.fromkeys([name for name in METRICS if name in values][:1], "accuracy")
    kinds |= {name: name for name in ANSWER_KINDS if name in values}
    return [
        {"score": values[name], "kind": kind, "se": values.get(f"{name}_stderr"), "metric": name}
        for name, kind in kinds.items()
    ]


def add_score_columns(table: pd.DataFrame, scores: pd.DataFrame) -> pd.DataFrame:
    """Return the table with a column `score_<task>` for each task, NaN for runs without a score."""
    columns = {task: group.set_index("run")["score"] for task, group in scores.groupby("task")}
    added = {f"{SCORE_PREFIX}{task}": table["run"].map(columns[task]).astype(float) for task in columns}
    return table.assign(**added)


def write_scores(scores: pd.DataFrame, path: Path) -> bool:
    """Write scores as CSV, atomically. Return False for an existing file with other columns."""
    if path.is_file() and list(read_table(path)) != list(scores):
        return False
    write_atomic(path, scores.to_csv(index=False, lineterminator="\n"))
    return True


def read_references(
    paths: Sequence[Path], facts: Mapping[str, Mapping[str, Any]] | None = None
) -> pd.DataFrame:
    """Return the scores under the paths: folders or files of tools/evaluate_downstream.py or of lm-eval.

    facts   {model: {"n_params", "train_tokens", "note"}}, where the results lack them
            or are wrong

    Raises FileNotFoundError for a path without results,
    ValueError for other content.
    """
    rows: list[dict[str, Any]] = []
    for path in paths:
        files = [path] if path.is_file() else sorted(path.rglob(DOWNSTREAM_RESULTS))
        # lm-eval's files are a copy of results.json where both exist
        files = files or sorted(path.rglob(HARNESS_RESULTS))
        if not files:
            raise FileNotFoundError(
                f"{path}: got no {DOWNSTREAM_RESULTS} or {HARNESS_RESULTS}, expected scores of a model. "
                "Run tools/evaluate_downstream.py first."
            )
        for file in files:
            content = read_json(file) or {}
            config = content["config"] if isinstance(content.get("config"), dict) else {}
            model = str(content.get("model_name") or config.get("model") or file.stem)
            about = {"model": model, "n_params": config.get("model_num_parameters"), "note": ""}
            about |= (facts or {}).get(model, {})
            rows += [about | score for score in read_task_scores(file)]
    return _make_scores(rows, REFERENCE_COLUMNS)
