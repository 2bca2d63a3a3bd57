"""Data of a study for the report: rows, loss curves, corpus, laws, blind check."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.yaml_file import is_finite, is_single_line
from megatron.laws.compute_law import ComputeLaw
from megatron.laws.law import Law
from megatron.study.blind import BlindOutcome, check_blind
from megatron.study.forecast import ForecastOutcome
from megatron.study.format import format_count
from megatron.study.ladder import STUDY, read_study_plan
from megatron.study.measured import score_forecasts
from megatron.study.references import REFERENCES, ReferenceScore, load_references
from megatron.study.run_row import FinishedRow, RunRow, select_finished
from megatron.study.study_frontier import COMPUTE_LAW
from megatron.study.table import MAX_NUMBER, read_runs, read_table, read_valid_metrics

SCORES = "scores.csv"  # downstream scores of the runs, in the study's directory
AUTOREGRESSIVE, MASKED_DIFFUSION = "autoregressive", "masked_diffusion"
# keys of corpus.json
CORPUS_NUMBERS = ("documents", "train_tokens", "held_out_tokens", "train_bytes", "held_out_bytes",
                  "unigram_entropy_nats", "bytes_per_token", "added_documents", "added_bytes")  # fmt: skip
CORPUS_TEXTS = ("corpus", "why", "added")


@dataclass(frozen=True)
class LossCurve:
    """Losses of one run during training, in nats per token, over the tokens trained on so far."""

    tokens: np.ndarray  # float64 [training records]
    loss: np.ndarray
    held_out_tokens: np.ndarray  # float64 [validations]
    held_out_loss: np.ndarray


NO_CURVE = LossCurve(*(np.empty(0) for _ in range(4)))


@dataclass(frozen=True, kw_only=True)
class RunPoint(FinishedRow):
    """A finished run at N parameters, D tokens and C FLOPs, by the columns of a law or of a figure."""

    N: float
    D: float
    C: float


@dataclass(frozen=True, kw_only=True)
class RepeatedRow(FinishedRow):
    """A finished run whose text and number of passes over it are known."""

    unique_tokens: float = field()
    epochs: float = field()


@dataclass(frozen=True)
class Study:
    """Contents of a study directory. `rows` are from table.read_runs; `curves` are by run name."""

    folder: Path
    rows: list[RunRow]
    curves: dict[str, LossCurve]
    law: Law | None
    corpus: dict[str, Any]
    faults: list[str] = field(default_factory=list)  # unreadable files, one sentence each
    results: list[dict[str, Any]] = field(default_factory=list)  # result.json of the finished runs
    name: str = ""  # from study.yaml
    laws: dict[str, Law] = field(default_factory=dict)  # by objective, from law.json and law_*.json
    # rows of scores.csv: run, task, score, kind, se
    scores: list[dict[str, Any]] = field(default_factory=list)
    references: list[ReferenceScore] = field(default_factory=list)  # published models, references.csv
    compute_law: ComputeLaw | None = None  # compute_law.json: the frontier
    blind: BlindOutcome | None = None  # None if no run was predicted
    forecasts: list[ForecastOutcome] = field(default_factory=list)  # sealed forecasts

    def finished_rows(self, objective: str | None = None) -> list[FinishedRow]:
        """Return the finished runs, of one objective or of all."""
        return [row for row in select_finished(self.rows) if objective in (None, row.objective)]

    def objectives(self) -> list[str]:
        """Return the objectives of all runs, autoregressive first."""
        return sorted({row.objective for row in self.rows if row.objective})

    def sizes(self) -> list[float]:
        """Return the distinct N of all runs, in ascending order."""
        return sorted({row.n_params for row in self.rows if row.n_params})

    def budgets(self, rows: Sequence[RunRow]) -> list[float]:
        """Return the distinct D of `rows`, in ascending order."""
        return sorted({row.train_tokens for row in rows if row.train_tokens})

    def size_name(self, n_params: float | None) -> str:
        """Format a size as 2.3M, with one more digit if another size would have the same text."""
        alike = [other for other in self.sizes() if format_count(other) == format_count(n_params)]
        return format_count(n_params, 2 if len(alike) < 2 else 3)


def read_study(study_dir: str | Path) -> Study:
    """Read a study directory. Damaged files become a fault or a row's note.

    Raises FileNotFoundError if there is no such study, and ValueError if blind.json or a forecast was
    modified.
    """
    folder = Path(study_dir)
    rows = read_runs(folder)
    faults: list[str] = []
    law = None
    if (folder / "law.json").exists():
        try:
            law = Law.load(folder / "law.json")
        except (OSError, ValueError, KeyError, TypeError) as error:
            faults.append(f"law.json cannot be used: {error}")
    # law.json first: setdefault below keeps it
    laws = {} if law is None else {str(law.filter.get("objective", AUTOREGRESSIVE)): law}
    for path in sorted(folder.glob("law_*.json")):
        try:
            other = Law.load(path)
        except (OSError, ValueError) as error:
            faults.append(f"{path.name} cannot be used: {error}")
        else:
            # law.json takes precedence over law_<objective>.json of the same objective
            laws.setdefault(str(other.filter.get("objective")), other)
    compute_law = None
    if (folder / COMPUTE_LAW).exists():
        try:
            compute_law = ComputeLaw.load(folder / COMPUTE_LAW)
        except (OSError, ValueError) as error:
            faults.append(f"{COMPUTE_LAW} cannot be used: {error}")
    curves = {row.run: read_curve(folder / row.path) if row.path else NO_CURVE for row in rows}
    results = [
        _read_json(folder / row.path / "result.json", faults)
        for row in rows
        if row.path and row.status == "done"
    ]
    plans = [_read_json(folder / row.path / "plan.json", faults) for row in rows if row.path and row.identity]
    corpus = _read_corpus(folder, plans, results, faults)
    return Study(
        folder,
        rows,
        curves,
        law,
        corpus,
        faults,
        results,
        _read_name(folder / STUDY),
        laws,
        _read_scores(folder / SCORES, faults),
        _read_references(folder / REFERENCES, faults),
        compute_law,
        check_blind(folder, rows),
        score_forecasts(folder, rows),
    )


def _read_scores(path: Path, faults: list[str]) -> list[dict[str, Any]]:
    """Read scores.csv: columns run, task, score; optional: kind (error, or accuracy by default) and se."""
    if not path.is_file():
        return []
    try:
        table = read_table(path)
        return [
            {
                "run": run,
                "task": table["task"][i],
                "score": float(table["score"][i]),
                "kind": table.get("kind", ["accuracy"] * len(table["run"]))[i],
                "se": float(table.get("se", [""] * len(table["run"]))[i] or "nan"),
            }
            for i, run in enumerate(table["run"])
        ]
    except (OSError, ValueError, KeyError) as error:
        faults.append(f"{path.name} cannot be used ({error!r}): expected columns run, task, score, kind")
        return []


def _read_references(path: Path, faults: list[str]) -> list[ReferenceScore]:
    try:
        return load_references(path) if path.is_file() else []
    except (OSError, ValueError) as error:
        faults.append(f"{path.name} cannot be used: {error}")
        return []


def _read_name(path: Path) -> str:
    try:
        return read_study_plan(path).name
    except (OSError, ValueError):
        return ""  # study.yaml is optional: a study can consist of runs alone


def _read_corpus(
    folder: Path, plans: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]], faults: list[str]
) -> dict[str, Any]:
    """Return the facts on the text: corpus.json of the study or its text, and counts from the runs."""
    corpus: dict[str, Any] = {}
    # the order of both places matters: corpus.json of the study overrides that of its text
    for place in (folder / "text" / "corpus.json", folder / "corpus.json"):
        for name, value in _read_json(place, faults).items():
            if name in CORPUS_NUMBERS and not (is_finite(value) and 0 < value < MAX_NUMBER):
                faults.append(f"{place.name}: {name} is {str(value)[:40]!r}, expected a number above 0.")
            elif name in CORPUS_TEXTS and not (isinstance(value, str) and is_single_line(value)):
                faults.append(f"{place.name}: {name} is {str(value)[:40]!r}, expected a line of text.")
            else:
                corpus[name] = value
    counted: dict[str, Any] = {}
    for plan in plans:
        if plan.get("held_out_unigram_nats"):
            counted["unigram_entropy_nats"] = plan["held_out_unigram_nats"]
        if plan.get("epochs"):
            # tokens of an epoch: D / epochs; the largest, since runs can use subsets
            train_tokens = round(plan["train_tokens"] / plan["epochs"])
            counted["train_tokens"] = max(train_tokens, counted.get("train_tokens", 0))
    for result in results:
        if result.get("n_tokens_scored"):
            counted["held_out_tokens"] = result["n_tokens_scored"]
            if corpus.get("held_out_bytes"):
                counted["bytes_per_token"] = corpus["held_out_bytes"] / result["n_tokens_scored"]
    # values of corpus.json override those counted from the runs
    return counted | corpus


def read_curve(run_dir: Path) -> LossCurve:
    """Return the curve of one run, empty if it has logged nothing. Losses that are NaN or Inf are omitted."""
    points: dict[str, list[tuple[float, float]]] = {"train": [], "validation": []}
    for record in read_valid_metrics(run_dir):
        values = (record.get("tokens"), record.get("loss"))
        if record["kind"] in points and all(isinstance(x, int | float) and np.isfinite(x) for x in values):
            points[record["kind"]].append((record["tokens"], record["loss"]))
    # a resumed run logs the steps after its checkpoint again: dict() keeps the later record of equal tokens
    # points of one kind: [(tokens, loss), ...] -> [n, 2]; reshape gives [0, 2] for a run without records
    train, held_out = (
        np.array(sorted(dict(p).items()), dtype=np.float64).reshape(-1, 2) for p in points.values()
    )
    return LossCurve(train[:, 0], train[:, 1], held_out[:, 0], held_out[:, 1])


def _read_json(path: Path, faults: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        faults.append(f"{path.name} cannot be read: {error}")
        return {}
    return content if isinstance(content, dict) else {}
