"""Contents of a study directory for the report: runs, laws, forecasts, scores and facts on the text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from megatron.config.yaml_file import is_finite, is_single_line
from megatron.io import read_json
from megatron.laws.compute_law import ComputeLaw
from megatron.laws.law import Law
from megatron.laws.measured_crossover import MeasuredCrossover
from megatron.study.downstream_scores import REFERENCE_COLUMNS, REFERENCES
from megatron.study.forecast import describe_calibration, read_forecasts, score_forecasts
from megatron.study.frontier import COMPUTE_LAW
from megatron.study.ladder import STUDY, read_study_plan
from megatron.study.measured import measure_study
from megatron.study.table import (
    COLUMNS,
    MAX_NUMBER,
    NOTE,
    read_runs,
    read_table,
    read_valid_metrics,
    select_finished,
)

TABLE = "table.csv"
SCORES = "scores.csv"  # downstream scores of the runs, in the study's directory
AUTOREGRESSIVE, MASKED_DIFFUSION = "autoregressive", "masked_diffusion"
# keys of corpus.json
CORPUS_NUMBERS = (
    "documents",
    "train_tokens",
    "held_out_tokens",
    "train_bytes",
    "held_out_bytes",
    "bytes_per_token",
    "added_documents",
    "added_bytes",
)
CORPUS_TEXTS = ("corpus", "added")
SCORE_COLUMNS = ["run", "task", "score", "kind", "se"]
# a forecast: what is predicted, and for which run or text; `is_late`: its
# run began before it was stored
FORECAST_COLUMNS = [
    "name",
    "quantity",
    "N",
    "D",
    "C",
    "U",
    "predicted",
    "low",
    "high",
    "observed",
    "is_late",
    "time",
    "sha256",
]
SAMPLE = "sample.json"  # in the folder of a run


@dataclass(frozen=True, kw_only=True)
class Study:
    """Contents of a study directory.

    runs       a row per run, columns of table.csv and `note`
    frontier   compute_law.json
    laws       by objective, from law.json and law_*.json
    forecasts  a row per forecast, columns FORECAST_COLUMNS;
               attrs["calibration"]: a sentence
    scores     downstream scores, columns SCORE_COLUMNS
    references scores of published models, columns REFERENCE_COLUMNS, C = 6 N D
    corpus     facts on the text, keys CORPUS_NUMBERS and CORPUS_TEXTS
    results    contents of result.json of the finished runs
    reading    of the largest run with such files: its name `run`, `loss_by_context` of validate.py, and
               `sample`, {prompt, text} of generate_text.py --out
    warnings   unreadable files, one sentence each
    """

    folder: Path
    runs: pd.DataFrame
    name: str = ""
    frontier: ComputeLaw | None = None
    laws: Mapping[str, Law] = field(default_factory=dict)
    forecasts: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=FORECAST_COLUMNS))
    scores: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=SCORE_COLUMNS))
    references: pd.DataFrame = field(default_factory=lambda: make_references(None))
    corpus: Mapping[str, Any] = field(default_factory=dict)
    results: Sequence[Mapping[str, Any]] = ()
    reading: Mapping[str, Any] = field(default_factory=dict)
    warnings: Sequence[str] = ()

    @property
    def title(self) -> str:
        """Name of the study, or else of its folder."""
        name = self.name or self.folder.resolve().name.replace("_", " ").replace("-", " ").strip()
        return (name or "Study")[0].upper() + (name or "Study")[1:]

    @property
    def finished(self) -> pd.DataFrame:
        """Finished runs, whose size, tokens and loss are known."""
        return select_finished(self.runs).dropna(subset=["n_params", "train_tokens"])

    @property
    def main_runs(self) -> pd.DataFrame:
        """Finished autoregressive runs, or all finished runs of a study without them."""
        finished = self.finished
        autoregressive = finished[finished["objective"] == AUTOREGRESSIVE]
        return autoregressive if len(autoregressive) else finished

    @property
    def scored(self) -> pd.DataFrame:
        """Forecasts that count: measured, and stored before the run began."""
        return self.forecasts[self.forecasts["observed"].notna() & ~self.forecasts["is_late"].astype(bool)]

    @property
    def law(self) -> Law | None:
        """Parametric law of the main runs."""
        return self.laws.get(AUTOREGRESSIVE, next(iter(self.laws.values()), None))

    @property
    def run_scores(self) -> pd.DataFrame:
        """Downstream scores with the columns of their finished runs, and C = 6 N D."""
        scores = self.scores.merge(self.finished, on="run")
        return scores.assign(C=6.0 * scores["n_params"] * scores["train_tokens"])

    @cached_property
    def crossings(self) -> list[MeasuredCrossover]:
        """Comparison of both objectives on each amount of unique text with tested runs of both."""
        try:
            return measure_study(self.runs)[0]
        except ValueError:
            return []

    @property
    def bits_per_byte(self) -> float | None:
        """Factor from nats per token to bits per byte.

        None if the bytes of a token are unknown.
        """
        # 3.5 nats per token at 4.2 bytes per token:
        # 3.5 / 0.693 / 4.2 = 1.20 bits per byte
        per_token = self.corpus.get("bytes_per_token")
        return 1 / np.log(2) / per_token if per_token else None


def read_study(study_dir: str | Path) -> Study:
    """Read a study directory. Damaged files become a warning or a run's note.

    Raises FileNotFoundError if there is no such study, and ValueError if a
    forecast was modified.
    """
    folder = Path(study_dir)
    # a published study may be its table alone
    has_table = not (folder / "runs").is_dir() and (folder / TABLE).is_file()
    runs = read_table(folder / TABLE) if has_table else read_runs(folder)
    warnings = list(runs.attrs["warnings"])
    # tables of other programs lack columns
    runs = runs.reindex(columns=list(dict.fromkeys([*COLUMNS, NOTE, *runs])))
    forecasts = _tabulate_forecasts(folder, runs)
    runs[NOTE] = runs[NOTE].astype(object).fillna("")
    done = runs[(runs["status"] == "done") & runs["path"].notna()]
    results = [_read_json(folder / path / "result.json", warnings) for path in done["path"]]
    planned = runs.loc[runs["path"].notna() & runs["identity"].notna(), "path"]
    plans = [_read_json(folder / path / "plan.json", warnings) for path in planned]
    frontier = _read_file(ComputeLaw.load, folder / COMPUTE_LAW, None, warnings)
    return Study(
        folder=folder,
        runs=runs,
        name=_read_name(folder / STUDY),
        frontier=frontier,
        laws=_read_laws(folder, warnings),
        forecasts=forecasts,
        scores=_read_file(load_scores, folder / SCORES, pd.DataFrame(columns=SCORE_COLUMNS), warnings),
        references=make_references(_read_file(load_references, folder / REFERENCES, None, warnings)),
        corpus=_read_corpus(folder, plans, results, warnings),
        results=results,
        reading=_read_reading(folder, done, warnings),
        warnings=warnings,
    )


def _is_by_context(score: Mapping[str, Any]) -> bool:
    """Return whether a score has rows [least, most, loss] of numbers; files may be from a stranger."""
    rows = score.get("loss_by_context")
    if not isinstance(rows, list) or not rows:
        return False
    return all(isinstance(row, list) and len(row) == 3 and all(map(is_finite, row)) for row in rows)


def _read_reading(folder: Path, done: pd.DataFrame, warnings: list[str]) -> dict[str, Any]:
    """Return what shows that a model uses its context, of the run of most compute that has it."""
    for _, run in done.sort_values("train_flops", ascending=False).iterrows():
        path = folder / run["path"]
        scores = [_read_json(file, warnings) for file in sorted(path.glob("validation/*/*.json"))]
        by_context = [score["loss_by_context"] for score in scores if _is_by_context(score)]
        sample = _read_json(path / SAMPLE, warnings) if (path / SAMPLE).is_file() else {}
        sample = sample if sample.keys() >= {"prompt", "text", "temperature"} else {}
        if by_context or sample:
            return {"run": run["run"], "loss_by_context": by_context[:1], "sample": sample}
    return {}


def read_curve(study: Study, path: str) -> dict[str, np.ndarray]:
    """Return the losses of one run by kind, "train" and "validation", each [n, 2]: tokens, nats per token."""
    points: dict[str, dict[float, float]] = {"train": {}, "validation": {}}
    for record in read_valid_metrics(study.folder / path):
        values = (record.get("tokens"), record.get("loss"))
        if record["kind"] in points and all(map(is_finite, values)) and record["tokens"] > 0:
            # a resumed run logs the steps after
            # its checkpoint again: the later record remains
            points[record["kind"]][record["tokens"]] = record["loss"]
    return {kind: np.array(sorted(at.items()), dtype=float).reshape(-1, 2) for kind, at in points.items()}


def read_weights(study: Study, path: str) -> pd.DataFrame:
    """Return the weights of a run's mixture: a row per record, indexed by tokens, a column per domain."""
    records = {}
    for record in read_valid_metrics(study.folder / path):
        weights, tokens = record.get("weights"), record.get("tokens")
        if record["kind"] != "train" or not isinstance(weights, dict) or not weights:
            continue
        if all(map(is_finite, (tokens, *weights.values()))):
            records[tokens] = weights
    return pd.DataFrame.from_dict(records, orient="index").sort_index().fillna(0.0)


def _tabulate_forecasts(folder: Path, runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each forecast of a study, columns FORECAST_COLUMNS."""
    flops = runs.dropna(subset=["identity"]).groupby("identity")["train_flops"].first()
    outcomes = score_forecasts(read_forecasts(folder), runs)
    renamed = {"low_0.95": "low", "high_0.95": "high", "measured": "observed"}
    table = outcomes.rename(columns=renamed).assign(
        C=outcomes["identity"].map(flops).astype(float),
        is_late=outcomes["order"] == "after",
        time=outcomes["time"].str.slice(0, 16).str.replace("T", " ") + " UTC",
    )[FORECAST_COLUMNS]
    table.attrs["calibration"] = describe_calibration(outcomes)
    return table


def load_references(path: Path) -> pd.DataFrame:
    """Read references.csv. Raises ValueError for other columns or values."""
    table = read_table(path)
    if list(table) != REFERENCE_COLUMNS or table["score"].dtype != float or table.attrs["warnings"]:
        expected = ", ".join(REFERENCE_COLUMNS)
        raise ValueError(f"{path}: got columns {', '.join(table)}, expected {expected}. Collect it again.")
    return table.fillna({"note": ""})


def _read_file(read: Callable[[Path], Any], path: Path, default: Any, warnings: list[str]) -> Any:
    """Return the content of a file.

    `default` without the file, or with a warning if it cannot be used.
    """
    if not path.is_file():
        return default
    try:
        return read(path)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        warnings.append(f"{path.name} cannot be used: {error}")
        return default


def _read_laws(folder: Path, warnings: list[str]) -> dict[str, Law]:
    """Return the laws by objective. law.json takes precedence over law_<objective>.json."""
    laws: dict[str, Law] = {}
    for path in (folder / "law.json", *sorted(folder.glob("law_*.json"))):
        law = _read_file(Law.load, path, None, warnings)
        if law is not None:
            laws.setdefault(str(law.filter.get("objective", AUTOREGRESSIVE)), law)
    return laws


def load_scores(path: Path) -> pd.DataFrame:
    """Read scores.csv: columns run, task, score; and kind, an accuracy by default, and se.

    Raises ValueError for other columns or values.
    """
    scores = pd.read_csv(path, dtype={"run": str, "task": str, "score": float, "kind": str, "se": float})
    scores = scores.reindex(columns=SCORE_COLUMNS)
    if scores[["run", "task", "score"]].isna().any(axis=None):
        raise ValueError("got empty cells or no column, expected run, task and score in each line")
    return scores.fillna({"kind": "accuracy"})


def make_references(scores: pd.DataFrame | None) -> pd.DataFrame:
    """Return scores of published models with C = 6 N D where both are known; None: no scores."""
    table = pd.DataFrame(columns=REFERENCE_COLUMNS) if scores is None else scores
    table = table.astype(dict.fromkeys(("score", "se", "n_params", "train_tokens"), float))
    return table.assign(C=6.0 * table["n_params"] * table["train_tokens"])


def _read_name(path: Path) -> str:
    try:
        return read_study_plan(path).name
    except (OSError, ValueError):
        return ""  # study.yaml is optional: a study can consist of runs alone


def _read_corpus(
    folder: Path,
    plans: Sequence[Mapping[str, Any]],
    results: Sequence[Mapping[str, Any]],
    warnings: list[str],
) -> dict[str, Any]:
    """Return the facts on the text: corpus.json of the study or its text, and counts from the runs."""
    corpus: dict[str, Any] = {}
    # corpus.json of the study overrides its text's
    for place in (folder / "text" / "corpus.json", folder / "corpus.json"):
        for name, value in _read_json(place, warnings).items():
            if name in CORPUS_NUMBERS and not (is_finite(value) and 0 < value < MAX_NUMBER):
                warnings.append(f"{place.name}: {name} is {str(value)[:40]!r}, expected a number above 0.")
            elif name in CORPUS_TEXTS and not (isinstance(value, str) and is_single_line(value)):
                warnings.append(f"{place.name}: {name} is {str(value)[:40]!r}, expected a line of text.")
            else:
                corpus[name] = value
    counted: dict[str, Any] = {}
    # tokens of an epoch; the largest, since runs can use subsets
    epochs = [plan["train_tokens"] / plan["epochs"] for plan in plans if plan.get("epochs")]
    if epochs:
        counted["train_tokens"] = round(max(epochs))
    scored = [result["n_tokens_scored"] for result in results if result.get("n_tokens_scored")]
    if scored:
        counted["held_out_tokens"] = scored[-1]
        if corpus.get("held_out_bytes"):
            counted["bytes_per_token"] = corpus["held_out_bytes"] / scored[-1]
    # values of corpus.json override those counted from the runs
    return counted | corpus


def _read_json(path: Path, warnings: list[str]) -> dict[str, Any]:
    content = _read_file(read_json, path, {}, warnings)
    return content if isinstance(content, dict) else {}


def select_fitted_runs(study: Study, law: ComputeLaw | Law | None) -> pd.DataFrame:
    """Return the runs that a law was fitted on, with columns N, D and C of the fit added.

    These are the runs that the law lists,
    or without a list all main runs that are not held
    out. C of a parametric law is 6 N D.
    """
    runs = study.main_runs
    if law is None:
        return runs.iloc[:0].assign(N=[], D=[], C=[])
    if law.runs:
        runs = runs[runs["run"].isin(law.runs) | runs["identity"].isin(law.runs)]
    else:
        runs = runs[runs["held_out"] != 1]
    if isinstance(law, ComputeLaw):
        N = runs[_nearest_column(runs, ("n_params", "n_non_embedding"), law.N)]
        C = runs[_nearest_column(runs, ("train_flops", "flops_6nd"), law.C)]
        # 1 %: runs have whole steps
        inside = C.between(law.C[0] / 1.01, law.C[1] * 1.01)
        return runs.assign(N=N, D=runs["train_tokens"], C=C)[inside & N.notna()]
    N, D = (runs[law.columns.get(x, name)] for x, name in (("N", "n_params"), ("D", "train_tokens")))
    return runs.assign(N=N, D=D, C=6.0 * N * D).dropna(subset=["N", "D"])


def _nearest_column(runs: pd.DataFrame, names: Sequence[str], ends: tuple[float, float]) -> str:
    """Return the column whose smallest and largest values are nearest to `ends`, by their ratio."""
    spans = {name: np.log([runs[name].min(), runs[name].max()]) for name in names}
    distances = {name: np.abs(span - np.log(ends)).sum() for name, span in spans.items()}
    finite = {name: distance for name, distance in distances.items() if np.isfinite(distance)}
    return min(finite, key=lambda name: finite[name]) if finite else names[0]
