"""Downstream scores of a study's runs (scores.csv, the table) and of published models (references.csv)."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd

from megatron.config.yaml_file import is_single_line
from megatron.io import read_json, write_atomic_bytes
from megatron.plan.run_dir import DOWNSTREAM, DOWNSTREAM_RESULTS, RESULT
from megatron.study.table import SCORE_PREFIX, read_table, select_finished

REFERENCES = "references.csv"  # in the study's directory
HARNESS_RESULTS = "results_*.json"  # files of lm-evaluation-harness
# the first of these that a task has is its score; all are shares of correct
# answers
METRICS = ("acc_norm", "acc", "exact_match", "em", "f1")


@dataclass(frozen=True)
class Score:
    """Score of one run on one task.

    task        name of the task, with the settings that change scores: hellaswag-first200, copa-mc32
    kind        accuracy, for `downstream_curve.fit_downstream`
    checkpoint  the run's last checkpoint, whose loss is in the table
    """

    run: str
    task: str
    score: float
    kind: str
    se: float | None
    metric: str
    checkpoint: str


@dataclass(frozen=True)
class ReferenceScore:
    """Score of a model outside the study on one task.

    task          as in scores.csv: the name with the settings that change scores, such as sciq-first200
    n_params, train_tokens   None: unknown
    note          a caveat for readers, for example that its weights are random
    """

    model: str
    task: str
    score: float
    kind: str
    se: float | None
    metric: str
    n_params: int | None
    train_tokens: int | None
    note: str = ""


FACTS = ("n_params", "train_tokens", "note")


def read_scores(study_dir: Path, table: pd.DataFrame) -> list[Score]:
    """Return the scores that tools/evaluate_downstream.py wrote for the finished runs of a table.

    Only checkpoints at a run's last step count, because the table has no loss
    for earlier ones. Raises ValueError for a damaged file.
    """
    scores = []
    finished = select_finished(table)
    for name, folder in zip(finished["run"], finished["path"], strict=True):
        run = study_dir / folder
        # the last step, from result.json; None matches no checkpoint
        end = (read_json(run / RESULT) or {}).get("step")
        for path in sorted(run.glob(f"{DOWNSTREAM}/*/*/{DOWNSTREAM_RESULTS}")):
            # path: <run>/downstream/<checkpoint>/<settings>/results.json, so
            # parts[-3] is the checkpoint
            results = list(read_task_scores(path))  # raises for a damaged file
            step = (read_json(path) or {}).get("config", {}).get("step")
            if step is not None and step == end:
                scores += [Score(name, *result, path.parts[-3]) for result in results]
    # of several results for one task the last path counts
    return list({(score.run, score.task): score for score in scores}.values())


def read_task_scores(path: Path) -> Iterator[tuple[str, float, str, float | None, str]]:
    """Yield (task, score, kind, error, metric) of each task of a results.json or a file of lm-eval.

    Raises ValueError for values of other types.
    """
    content = read_json(path) or {}
    # every table and its keys are checked, since a results.json can come from
    # another program
    tables = [content, *(content.get(name, {}) for name in ("config", "group_subtasks", "results"))]
    tables += [*content["results"].values()] if isinstance(content.get("results"), dict) else []
    subtasks = content["group_subtasks"].values() if isinstance(content.get("group_subtasks"), dict) else []
    if not all(isinstance(value, dict) and all(map(is_single_line, value)) for value in tables) or not all(
        isinstance(value, list) for value in subtasks
    ):
        raise ValueError(
            f"{path}: got other types or names of several lines, expected objects under config, "
            "group_subtasks and results. Evaluate the run again, or delete the file."
        )
    about = content.get("config", {})
    # label: the settings in the folder's name, such as ar-first200; files of
    # lm-eval have only the limit
    label = [] if about.get("limit") is None else [f"first{about['limit']:g}"]
    if path.name == DOWNSTREAM_RESULTS:
        label = path.parts[-2].split("-")
    if about.get("objective") == "autoregressive":  # has only one scoring method, so its name is omitted
        label = [word for word in label if word != "ar"]
    # subtasks of a group are already in the group's score
    parts = {str(name) for of in subtasks for name in of}
    for task, metrics in content.get("results", {}).items():
        # keys of lm-evaluation-harness are "metric,filter"
        # {"acc,none": 0.31, "acc_stderr,none": 0.01} -> {"acc": "acc,none",
        # "acc_stderr": "acc_stderr,none"}
        columns = {key.partition(",")[0]: key for key in metrics}
        # acc_norm before acc: its normalisation by length is the usual metric
        # where a task has both
        metric = next((name for name in METRICS if _is_number(metrics.get(columns.get(name)))), None)
        if metric is None or task in parts:
            continue
        error = metrics.get(columns.get(f"{metric}_stderr"))
        error = error if _is_number(error) else None
        yield "-".join([task, *label]), metrics[columns[metric]], "accuracy", error, metric


def _is_number(value: Any) -> bool:
    # lm-evaluation-harness writes "N/A" for an error that it does not
    # estimate
    return isinstance(value, float) and math.isfinite(value)


def add_score_columns(table: pd.DataFrame, scores: Sequence[Score]) -> pd.DataFrame:
    """Return the table with a column `score_<task>` for each task, NaN for runs without a score."""
    columns: dict[str, dict[str, float]] = {}
    for score in scores:
        columns.setdefault(SCORE_PREFIX + score.task, {})[score.run] = score.score
    added = {name: table["run"].map(columns[name]).astype(float) for name in sorted(columns)}
    return table.assign(**added)


def write_scores(scores: Sequence[Any], path: Path, kind: type[Any] = Score) -> bool:
    """Write scores of a dataclass `kind` as CSV, atomically. Return False for a file with other columns."""
    columns = [f.name for f in fields(kind)]
    try:
        if path.is_file() and list(read_table(path)) != columns:
            return False
    except ValueError:  # damaged: not written by this function
        return False
    buffer = io.BytesIO()
    rows = [[getattr(score, name) for name in columns] for score in scores]
    pd.DataFrame(rows, columns=columns, dtype=object).to_csv(buffer, index=False, lineterminator="\n")
    write_atomic_bytes(path, buffer.getvalue())
    return True


def read_references(
    paths: Sequence[Path], facts: Mapping[str, Mapping[str, Any]] | None = None
) -> list[ReferenceScore]:
    """Return the scores under the paths: folders or files of tools/evaluate_downstream.py or of lm-eval.

    facts   {model: {"n_params", "train_tokens", "note"}}, where the results lack them or are wrong

    Raises FileNotFoundError for a path without results, ValueError for other
    content.
    """
    scores: dict[tuple[str, str], ReferenceScore] = {}
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
            for score in _read_file(file, facts or {}):
                scores[score.model, score.task] = score
    return list(scores.values())


def _read_file(path: Path, facts: Mapping[str, Mapping[str, Any]]) -> list[ReferenceScore]:
    content = read_json(path) or {}
    config = content.get("config")
    config = config if isinstance(config, dict) else {}
    model = str(content.get("model_name") or config.get("model") or path.stem)
    about = {
        "n_params": config.get("model_num_parameters"),
        "train_tokens": None,
        "note": "",
        **facts.get(model, {}),
    }
    return [
        ReferenceScore(model, task, score, kind, se, metric, **about)
        for task, score, kind, se, metric in read_task_scores(path)
    ]


def read_reference_facts(path: Path) -> dict[str, dict[str, Any]]:
    """Read a CSV with columns model and any of n_params, train_tokens, note; empty cells are omitted.

    Raises ValueError for other columns or values.
    """
    table = read_table(path)
    if "model" not in table or not set(table) <= {"model", *FACTS}:
        raise ValueError(
            f"{path}: got columns {', '.join(table)}, expected model and n_params, train_tokens or note."
        )
    if table.attrs["warnings"]:
        raise ValueError(f"{path}: {table.attrs['warnings'][0]} Expected counts.")
    rows = table.set_index("model").to_dict("index")
    return {str(model): _select_known(row) for model, row in rows.items()}


def _select_known(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the values of a row that are not empty, counts as integers."""
    values = {str(name): value for name, value in row.items() if not pd.isna(value)}
    return values | {name: int(values[name]) for name in FACTS[:2] if name in values}


def write_references(scores: Sequence[ReferenceScore], path: Path) -> None:
    """Write references.csv atomically."""
    if not write_scores(scores, path, ReferenceScore):
        raise ValueError(f"{path}: got other columns, expected those of references. Move the file away.")


def load_references(path: Path) -> list[ReferenceScore]:
    """Read references.csv. Raises ValueError for other columns or values."""
    table, names = read_table(path), [f.name for f in fields(ReferenceScore)]
    if list(table) != names or table["score"].dtype != float or table.attrs["warnings"]:
        raise ValueError(
            f"{path}: got columns {', '.join(table)}, expected {', '.join(names)}. Collect it again."
        )
    empty: dict[str, Any] = dict.fromkeys(names) | {"note": ""}
    return [ReferenceScore(**empty | _select_known(row)) for row in table.to_dict("records")]
