"""Published models beside a study: their scores, sizes and training tokens, in references.csv."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd

from megatron.io import read_json
from megatron.plan.run_dir import DOWNSTREAM_RESULTS
from megatron.study.downstream_scores import read_task_scores, write_scores
from megatron.study.table import read_table

REFERENCES = "references.csv"  # in the study's directory
HARNESS_RESULTS = "results_*.json"  # files of lm-evaluation-harness
# Suites whose models all read equally many tokens: (name, tokens per step,
# last step). Pythia: 2,097,152 tokens per step, 143,000 steps (Biderman et
# al. 2023, arXiv 2304.01373), revisions stepN.
SUITES = ((re.compile(r"EleutherAI/pythia-[\w.-]+?(?:@step(\d+))?", re.ASCII), 2_097_152, 143_000),)


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


COLUMNS = [f.name for f in fields(ReferenceScore)]
FACTS = ("n_params", "train_tokens", "note")


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
        "train_tokens": count_suite_tokens(model),
        "note": "",
        **facts.get(model, {}),
    }
    return [
        ReferenceScore(model, task, score, kind, se, metric, **about)
        for task, score, kind, se, metric in read_task_scores(path)
    ]


def count_suite_tokens(model: str) -> int | None:
    """Return the training tokens of NAME or NAME@stepN of a suite in SUITES, else None."""
    for pattern, tokens_per_step, last_step in SUITES:
        if match := pattern.fullmatch(model):
            return tokens_per_step * int(match[1] or last_step)
    return None


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
    return {
        str(model): {
            name: cells[name] if name == "note" else int(cells[name])
            for name in FACTS
            if name in table and pd.notna(cells[name])
        }
        for model, cells in table.set_index("model", drop=False).iterrows()
    }


def write_references(scores: Sequence[ReferenceScore], path: Path) -> None:
    """Write references.csv atomically."""
    if not write_scores(scores, path, ReferenceScore):
        raise ValueError(f"{path}: got other columns, expected {', '.join(COLUMNS)}. Move the file away.")


def load_references(path: Path) -> list[ReferenceScore]:
    """Read references.csv. Raises ValueError for other columns or values."""
    table = read_table(path)
    if list(table) != COLUMNS or table["score"].dtype != float or table.attrs["warnings"]:
        raise ValueError(
            f"{path}: got columns {', '.join(table)}, expected {', '.join(COLUMNS)}. Collect it again."
        )
    scores = []
    for row in table.to_dict("records"):
        values: dict[str, Any] = {name: None if pd.isna(row[name]) else row[name] for name in COLUMNS}
        values |= {name: values[name] and int(values[name]) for name in FACTS[:2]}
        scores.append(ReferenceScore(**values | {"note": values["note"] or ""}))
    return scores
