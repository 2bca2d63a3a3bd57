"""Downstream scores that the runs of a study have on disk, beside their losses: scores.csv and columns."""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from megatron.config.yaml_file import is_one_line
from megatron.run_dir import DOWNSTREAM, DOWNSTREAM_RESULTS, RESULT, read_json, write_whole
from megatron.scaling.table import SCORE, Row, read_table

# what a task tells, the first of these that it has; all are shares of right answers
METRICS = ("acc_norm", "acc", "exact_match", "em", "f1")


@dataclass(frozen=True)
class Score:
    """One run on one task.

    task        its name, with what makes scores differ behind it: hellaswag-first200, copa-mc32
    kind        accuracy, for `downstream.fit_downstream`
    checkpoint  the run's last, whose loss the table has
    """

    run: str
    task: str
    score: float
    kind: str
    se: float | None
    metric: str
    checkpoint: str


COLUMNS = [one.name for one in fields(Score)]


def read_scores(study_dir: Path, rows: Sequence[Row]) -> list[Score]:
    """Scores of the finished runs among `rows`, as tools/evaluate_downstream.py left them in their folders.

    Only of checkpoints at a run's last step: on the way no loss goes with a score. ValueError for a file that
    is damaged.
    """
    found = []
    for row in rows:
        if row["status"] == "done" and row["path"]:
            run = study_dir / row["path"]
            end = (read_json(run / RESULT) or {}).get("step")
            for path in sorted(run.glob(f"{DOWNSTREAM}/*/*/{DOWNSTREAM_RESULTS}")):
                found += [Score(row["run"], *told, path.parts[-3]) for told in _told(path, end)]
    return list({(one.run, one.task): one for one in found}.values())


def _told(path: Path, end: Any) -> Iterator[tuple[str, float, str, float | None, str]]:
    """(task, score, kind, error, metric) of each task of a results.json of step `end`. ValueError for one of
    other types."""
    told = read_json(path) or {}
    tables = [told, *(told.get(name, {}) for name in ("config", "group_subtasks", "results"))]
    tables += [*told["results"].values()] if isinstance(told.get("results"), dict) else []
    subtasks = told["group_subtasks"].values() if isinstance(told.get("group_subtasks"), dict) else []
    if not all(isinstance(one, dict) and all(map(is_one_line, one)) for one in tables) or not all(
        isinstance(one, list) for one in subtasks
    ):
        raise ValueError(
            f"{path}: got other types or names of several lines, expected objects under config, "
            "group_subtasks and results. Evaluate the run again, or delete the file."
        )
    about = told.get("config", {})
    if about.get("step") is None or about["step"] != end:
        return
    label = path.parts[-2].split("-")
    if about.get("objective") == "autoregressive":  # which has one method only
        label = [word for word in label if word != "ar"]
    parts = {str(name) for of in subtasks for name in of}
    for task, metrics in told.get("results", {}).items():
        known = {key.partition(",")[0]: key for key in metrics}
        metric = next((name for name in METRICS if _is_number(metrics.get(known.get(name)))), None)
        if metric is None or task in parts:
            continue
        error = metrics.get(known.get(f"{metric}_stderr"))
        error = error if _is_number(error) else None
        yield "-".join([task, *label]), metrics[known[metric]], "accuracy", error, metric


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def beside(rows: Sequence[Row], scores: Sequence[Score]) -> list[Row]:
    """The rows with a column `score_<task>` for each of their scores."""
    columns: dict[str, dict[str, float]] = {}
    for one in scores:
        columns.setdefault(one.run, {})[SCORE + one.task] = one.score
    return [row | columns.get(row["run"], {}) for row in rows]


def write_scores(scores: Sequence[Score], path: Path) -> bool:
    """Write scores.csv whole, or not, where one is there that somebody else made: then False."""
    if path.is_file() and list(_header(path)) != COLUMNS:
        return False
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    table.writerows(["" if cell is None else cell for cell in astuple(one)] for one in scores)
    write_whole(path, text.getvalue())
    return True


def _header(path: Path) -> Mapping[str, Any]:
    try:
        return read_table(path)
    except ValueError:  # damaged, so not as this writes it
        return {}
