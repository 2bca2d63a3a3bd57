"""Table of a study: a data frame with one row per run, as table.csv and as parquet.

Columns (COLUMNS, in the file's order; more columns `score_<task>` follow):

run, identity, status     name; hash of all settings; "done", "failed",
                          "missing", "preempted", "running" or "stale".
                          Runs of tables without a status count as done
objective, size, seed     as in the study
n_params ... seq_len      N, D (train_tokens), unique tokens, epochs and FLOPs, as
                          planned until it is done
loss, loss_se             held-out loss in nats per token and its standard error
n_tokens_scored, wall_s, tps   tokens of the held-out text,
                               seconds of training, tokens a second
path                      folder of the run, relative to the study
annealed                  0 for a run whose learning rate did not decay
held_out                  1 for a run that no law is fitted on
trunk                     the run whose first steps this run shares; the run itself if
                          it shares none
cell                      equal for runs that differ only in their seed
test_loss, test_loss_se   the same for dataset.path_test, which was not used to select runs
loss_ema                  held-out loss of the moving average of the weights

Numbers are float64 with NaN for unknown ones, text is None where it is unknown.
`df.attrs["warnings"]` lists problems of the table. `read_runs` adds the column
`note`, a sentence on each run, which no file has, and `df.attrs["seals"]`, the
hashes of the forecasts before each run, for `forecast.score_forecasts`.
"""

import contextlib
import io
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from megatron.io import read_json, write_atomic_bytes
from megatron.plan.run_dir import CHECKPOINTS, EXIT, METRICS, PLAN, RESULT
from megatron.study.forecast import read_seals
from megatron.study.ladder import STUDY, PlannedRun, expand_study, read_study_plan

COLUMNS = {
    "run": str, "identity": str, "status": str, "objective": str, "size": str, "seed": int,
    "n_params": int, "n_non_embedding": int, "train_tokens": int, "unique_tokens": int,
    "epochs": float, "train_flops": float, "flops_6nd": float, "seq_len": int,
    "loss": float, "loss_se": float, "n_tokens_scored": int, "wall_s": float, "tps": float,
    "path": str, "annealed": int, "held_out": int, "trunk": str, "cell": str,
    "test_loss": float, "test_loss_se": float, "loss_ema": float,
}  # fmt: skip
SCORE_PREFIX = "score_"  # additional columns, one per downstream task
# columns of blends: share and epochs of each training corpus, loss of each held-out one
WEIGHT, EPOCHS, LOSS_OF = "weight_", "epochs_", "loss_of_"
PREFIXES = (SCORE_PREFIX, WEIGHT, EPOCHS, LOSS_OF)
NAME_ENDS = "_text_document"  # of datasets that tools/preprocess_data_many_cores.py writes
NOTE = "note"
PLAN_COLUMNS = ["identity", *list(COLUMNS)[3:14]]  # plan.json has their values
SORTED_BY = ["objective", "n_params", "train_tokens", "run"]  # unknown values are last
STUDY_COLUMNS = ["held_out", "trunk", "cell"]  # from the study's plan
RESULT_COLUMNS = (
    "loss_se", "n_tokens_scored", "wall_s", "train_tokens", "train_flops", "test_loss", "test_loss_se",
    "loss_ema",
)  # fmt: skip
MAX_NUMBER = 1e300  # limit for numbers in files, so that their sums and products stay finite
# A run without a result that has written nothing for this long has stopped.
MAX_SILENCE_S = 900.0
STALE_NOTE = "From an earlier version of the study: no longer one of its runs."
WRITE_HINT = "Write a table with tools/collect.py STUDY_DIR."


def make_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as a table: COLUMNS, then scores by name, then `note`; absent values are unknown.

    So are values that are not of the type of their column.
    """
    # without a run of two corpora the table is of no mixtures
    is_blended = any(sum(name.startswith(WEIGHT) for name in row) > 1 for row in rows)
    names = {name for row in rows for name in row if is_blended or not name.startswith((WEIGHT, EPOCHS))}
    columns = [*COLUMNS, *sorted(name for name in names if name.startswith(PREFIXES)), NOTE]
    cells = pd.DataFrame(rows, columns=columns, dtype=object)
    frame = pd.DataFrame({name: _convert_column(cells[name], []) for name in cells})
    frame[NOTE] = frame[NOTE].fillna("")
    # a corpus that a blend does not have has no weight in it
    weights = [name for name in frame if name.startswith(WEIGHT)]
    frame.loc[frame[weights].notna().any(axis=1), weights] = frame[weights].fillna(0.0)
    frame.attrs["warnings"] = []
    return frame


def select_finished(table: pd.DataFrame) -> pd.DataFrame:
    """Return the runs with a loss above 0 that are done, or that have no status."""
    done = table["loss"] > 0
    if "status" in table:
        done &= table["status"].isna() | (table["status"] == "done")
    return table[done]


def read_runs(study_dir: str | Path, now: float | None = None) -> pd.DataFrame:
    """Return the table of every directory under `<study_dir>/runs` and every planned run.

    Rows are sorted by objective, N and D. Only finished runs have a loss:
    one during training is not annealed and unfit for a law.
    A damaged run directory gives a row, not an exception.
    `now` (seconds since 1970) decides whether a run
    that has stopped writing still counts as running.

    Raises FileNotFoundError if there
    is no such study, or no `runs` folder in it.
    """
    study_dir = Path(study_dir)
    runs = study_dir / "runs"
    if not runs.is_dir():
        raise FileNotFoundError(
            f"{study_dir}: got no runs folder, expected a study directory. Run tools/sweep.py first."
        )
    now = time.time() if now is None else now
    rows = [_read_run(path, study_dir, now) for path in sorted(runs.iterdir()) if path.is_dir()]
    planned, is_complete, warnings = _read_planned_runs(study_dir)
    for row in rows:
        planned_row = planned.get(str(row.get("identity")))
        if planned_row is not None:
            row |= {name: planned_row[name] for name in STUDY_COLUMNS}
        elif is_complete:
            row |= {"status": "stale", NOTE: STALE_NOTE}
    if is_complete:
        identities = {row.get("identity") for row in rows}
        rows += [row for identity, row in planned.items() if identity not in identities]
    table = make_frame(rows).sort_values(SORTED_BY, ignore_index=True)
    table.attrs["warnings"] = warnings
    table.attrs["seals"] = {path.name: read_seals(path) for path in runs.iterdir() if path.is_dir()}
    return table


def _read_planned_runs(study_dir: Path) -> tuple[dict[str, dict[str, Any]], bool, list[str]]:
    """Return rows of the runs of `<study_dir>/study.yaml` by identity, whether these are all, and warnings.

    Missing and stale runs are unknown without that file, or if
    the study cannot be expanded, for example because its corpus
    was moved or it has the keys of an earlier version. Then
    STUDY_COLUMNS come from an earlier table.csv.
    """
    path, warnings = study_dir / STUDY, []
    if path.is_file():
        try:
            runs = expand_study(read_study_plan(path, [f"directory={study_dir}"]))
            return {run.plan.identity: _planned_row(run) for run in runs}, True, []
        except (OSError, ValueError) as error:
            warnings = [f"{path}: missing runs cannot be listed: {error}"]
    try:
        table = read_table(study_dir / "table.csv").drop_duplicates("identity").set_index("identity")
        return table[STUDY_COLUMNS].to_dict("index"), False, warnings
    except (OSError, ValueError, KeyError):  # without a table, or without these columns
        return {}, False, warnings


def _planned_row(run: PlannedRun) -> dict[str, Any]:
    plan = run.plan.as_dict()
    return _select_values(plan, PLAN_COLUMNS) | {
        "run": plan["name"],
        "status": "missing",
        NOTE: "Planned, not started.",
        "held_out": int(run.held_out),
        "trunk": (run.folder if run.branch is None else run.branch.trunk).name,
        "cell": run.plan.cell_identity,
    }


def _read_run(run_dir: Path, study_dir: Path, now: float) -> dict[str, Any]:
    """Return the row of one run directory. See read_runs."""
    row: dict[str, Any] = {"run": run_dir.name, "path": run_dir.relative_to(study_dir).as_posix()}
    # a folder without these files belongs to a run that has not started
    if not any((run_dir / name).exists() for name in (PLAN, METRICS, RESULT)):
        return row | {"status": "missing", NOTE: f"It has no {PLAN}."}
    try:
        plan = _read_object(run_dir / PLAN, ("identity", "n_params", "train_tokens"))
        row |= _select_values(plan, PLAN_COLUMNS) | {"cell": plan.get("cell_identity")}
        row |= _read_blend(plan)
        if not (run_dir / RESULT).exists():
            return row | _read_progress(run_dir, now)
        result = _read_object(run_dir / RESULT, ("loss",))
        # result.json of an earlier plan in the same folder must not be combined
        # with the new plan
        if result.get("identity", plan["identity"]) != plan["identity"]:
            other = f"{RESULT} is of run {result['identity']}, {PLAN} of {plan['identity']}"
            raise ValueError(f"{other}: delete the result.")
        row |= _select_values(result, RESULT_COLUMNS) | {"tps": result.get("tps_mean")}
        losses = result.get("loss_by_corpus") or {}
        row |= {f"{LOSS_OF}{name.removesuffix(NAME_ENDS)}": loss for name, loss in losses.items()}
        if not math.isfinite(result["loss"]):
            raise ValueError(f"It diverged: its held-out loss is {result['loss']}.")
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        return row | {"status": "failed", NOTE: str(error)}
    return row | {"status": "done", "loss": result["loss"]}


def _read_blend(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return share and epochs of each corpus."""
    uses = {str(use["name"]).removesuffix(NAME_ENDS): use for use in plan.get("corpora") or ()}
    shares = {f"{WEIGHT}{name}": use["share"] for name, use in uses.items()}
    return shares | {f"{EPOCHS}{name}": use["epochs"] for name, use in uses.items()}


def _select_values(content: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the values of a plan or a result that are present and not null."""
    return {name: content[name] for name in names if content.get(name) is not None}


def _read_progress(run_dir: Path, now: float) -> dict[str, Any]:
    """Return the columns of a run that has a plan and no result."""
    last = {record["kind"]: record for record in read_valid_metrics(run_dir)}.get("train", {})
    status, note = _describe_progress(run_dir, last.get("step"), now)
    return {"wall_s": last.get("elapsed_s"), "tps": last.get("tps"), "status": status, NOTE: note}


def _describe_progress(run_dir: Path, step: Any, now: float) -> tuple[str, str]:
    """Return (status, note) of a run without result."""
    if ended := read_json(run_dir / EXIT):
        return "failed", f"Exit status {ended.get('status')}: {ended.get('last_words')}"
    if not (run_dir / METRICS).exists():
        return "missing", "Planned, not started."
    silent_s = now - (run_dir / METRICS).stat().st_mtime
    where = f"step {step:,}" if isinstance(step, int) else "before the first logged step"
    # a run that was preempted leaves this checkpoint until it resumes
    if any((run_dir / CHECKPOINTS).glob("*.preempt")):
        return "preempted", f"Preempted at {where}; running the sweep again resumes it."
    if silent_s <= MAX_SILENCE_S:
        return "running", f"At {where}."
    return "failed", f"Stopped at {where}: no result, and nothing written for {silent_s / 60:,.0f} minutes."


def read_valid_metrics(run_dir: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the valid lines of `metrics.jsonl`; none if it is missing."""
    path = Path(run_dir) / METRICS
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return parse_metrics(text.splitlines())


def parse_metrics(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the valid lines of metrics.

    Unlike run_dir.read_metrics it skips damaged lines anywhere
    in the file, because reports include failed runs and a full
    disk leaves partial lines.
    """
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("kind"), str):
                yield record


def _read_object(path: Path, needs: Sequence[str]) -> dict[str, Any]:
    """Return the contents of plan.json or result.json. Raises ValueError with a sentence on what is wrong."""
    try:
        content = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    if content is None:
        raise ValueError(f"It has no {path.name}.")
    if "loss" in content and content["loss"] is None:
        raise ValueError(f"It ended, but was not scored: {path.name} has no loss.")
    lacking = [name for name in needs if content.get(name) is None]
    if lacking:
        raise ValueError(f"{path.name} lacks {', '.join(lacking)}.")
    return content


def write_table(table: pd.DataFrame, path: str | Path) -> Path:
    """Write a table as .parquet, or else as CSV, to `path`, atomically; the column `note` is omitted.

    Floats keep all digits, unknown values are empty or null.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = table.drop(columns=NOTE, errors="ignore")
    table.attrs = {}  # parquet would store them
    buffer = io.BytesIO()
    if path.suffix == ".parquet":
        table.to_parquet(buffer, index=False)
    else:
        for name, kind in COLUMNS.items():
            # 10, not 10.0; a column with fractions keeps them
            if kind is int and name in table and (table[name].dropna() % 1 == 0).all():
                table[name] = table[name].astype("Int64")
        table.to_csv(buffer, index=False, lineterminator="\n")
    write_atomic_bytes(path, buffer.getvalue())
    return path


def read_table(path: str | Path, columns: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Read a .csv, .csv.gz or .parquet table with a header, of this project or any other program.

    columns   new name -> name in the file, of columns to rename before they are typed

    Columns are typed as above. Of columns with other
    names, those with numbers only are float64.
    A cell of a column of numbers that is not a finite number
    becomes NaN, with a warning in `attrs["warnings"]`.
    Raises FileNotFoundError for a missing file,
    and ValueError for a file that is not a table,
    has no header, a repeated column or a row of another length.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such table. {WRITE_HINT}")
    import pyarrow as pa  # slow import

    try:
        cells = pd.read_parquet(path) if path.suffix == ".parquet" else _read_cells(path)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path}: not a CSV or parquet table ({error}). {WRITE_HINT}") from error
    cells = cells.rename(columns={header: name for name, header in (columns or {}).items()})
    warnings: list[str] = []
    table = pd.DataFrame({name: _convert_column(cells[name], warnings) for name in cells})
    table.attrs["warnings"] = warnings
    return table


def _read_cells(path: Path) -> pd.DataFrame:
    """Return the cells of a CSV as text. Raises ValueError for a wrong shape, and errors of pyarrow."""
    from pyarrow import csv, string  # slow import

    if not path.stat().st_size:
        raise ValueError(f"{path}: got an empty file, expected a line of column names. {WRITE_HINT}")
    # pyarrow decompresses .gz, and refuses lines of another length with their
    # number. The header is read as the first row, so that all columns are text.
    options = csv.ReadOptions(autogenerate_column_names=True, use_threads=False)
    rows = csv.read_csv(path, options, csv.ParseOptions(newlines_in_values=True))
    header, *cells = zip(*(column.cast(string()).to_pylist() for column in rows.columns), strict=True)
    names = [str(name) for name in header]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{path}: got the column {name!r} twice, expected unique names. Rename one.")
    return pd.DataFrame(cells, columns=names, dtype=object)


def _convert_column(cells: pd.Series, warnings: list[str]) -> pd.Series:
    """Return a column with its type; append a warning on cells that are not finite numbers."""
    name = str(cells.name)
    # a cell that is not equal to itself is NaN
    text = cells.map(lambda cell: None if cell is None or cell != cell else str(cell).strip() or None)
    is_number = COLUMNS.get(name, str) is not str or name.startswith(PREFIXES)
    # pandas writes True for a held_out of 1
    readable = text.replace({"True": "1", "False": "0"}) if name == "held_out" else text
    numbers = pd.to_numeric(readable, errors="coerce").astype(float).where(lambda at: at.abs() <= MAX_NUMBER)
    unreadable = numbers.isna() & text.notna()
    if not is_number and (name in COLUMNS or unreadable.any() or numbers.isna().all()):
        return text.astype(object).where(text.notna(), None)
    if unreadable.any():
        row = int(unreadable.to_numpy().argmax())
        warnings.append(
            f"row {row + 1}, {name}: got {text.iloc[row]!r}, expected a finite number; "
            f"{int(unreadable.sum())} such cells count as unknown."
        )
    return numbers.astype(np.float64)
