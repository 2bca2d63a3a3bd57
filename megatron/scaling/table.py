"""The table of a study: one row a run directory, and the CSV file that the law is fitted on."""

import csv
import gzip
import io
import json
import math
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config.yaml_file import is_one_line
from megatron.log import get_logger
from megatron.run_dir import CHECKPOINTS, EXIT, METRICS, PLAN, RESULT, write_whole, write_whole_bytes
from megatron.scaling.blind_record import load_blind
from megatron.scaling.ladder import STUDY, PlannedRun, expand, read_study_plan

COLUMNS = [
    "run",
    "identity",
    "status",
    "objective",
    "size",
    "seed",
    "n_params",
    "n_non_embedding",
    "train_tokens",
    "unique_tokens",
    "epochs",
    "train_flops",
    "flops_6nd",
    "seq_len",
    "loss",
    "loss_se",
    "n_tokens_scored",
    "wall_s",
    "tps",
    "path",
    "annealed",
    "held_out",
    "trunk",
    "cell",
]
SCORE = "score_"  # begins further columns, a task's each, of studies that have downstream scores
FROM_PLAN = COLUMNS[3:14] + ["identity"]
OF_STUDY = ("held_out", "trunk", "cell")  # what the study's plan adds to a run's own
NUMBERS = frozenset(COLUMNS) - {"run", "identity", "status", "objective", "size", "path", "trunk", "cell"}
TEXTS = {
    "identity",
    "cell_identity",
    "name",
    "objective",
    "size",
    "hardware",
    "torch",
    "git",
    "flops_convention",
}
AMOUNTS = {"n_params", "train_tokens", "unique_tokens", "epochs", "train_flops"}
LARGEST = 1e300  # sums and products of what files hold stay finite
PLAN_NEEDS = ("identity", "n_params", "train_tokens")
# A run that has written nothing for so long, and has no result, is not running any more.
SILENT_AFTER_S = 900.0

Row = dict[str, Any]

STALE = {
    "status": "stale",
    "note": "Left by an earlier version of the study: not in its table of runs any more.",
}


def read_runs(study_dir: str | Path, now: float | None = None) -> list[Row]:
    """A row for every directory under `<study_dir>/runs` and every planned run, sorted by objective, N and D.

    Keys: COLUMNS, where None is "not known", and `note`, a sentence if something is amiss, else "".
    `train_tokens` and FLOPs are the planned ones until a run is done. `loss` is only ever a finished run's: a
    loss on the way is not annealed and has no place in a law. `held_out` is 1 or 0, as the study's grids say;
    `trunk` names the run whose first steps a run shares, itself where it shares none; `cell` is equal for
    runs that differ in their seed alone.
    `path` is relative to the study. A damaged run
    directory gives a row, never an exception. `now` (seconds since 1970) decides whether a silent run still
    counts as running.

    Raises FileNotFoundError if there is no such study, or no `runs` folder in it, and ValueError for a
    blind.json that was changed: which run it holds out is not known then.
    """
    study_dir = Path(study_dir)
    runs = study_dir / "runs"
    if not runs.is_dir():
        raise FileNotFoundError(
            f"{study_dir}: found no runs folder in it; give a study directory, or run tools/sweep.py"
        )
    now = time.time() if now is None else now
    rows = [read_run(path, study_dir, now) for path in sorted(runs.iterdir()) if path.is_dir()]
    planned = planned_runs(study_dir)
    if planned is not None:
        known = {row["identity"] for row in rows}
        rows = [row | _told(planned.get(row["identity"])) for row in rows]
        rows += [_missing(plan) for identity, plan in planned.items() if identity not in known]
    if (blind := load_blind(study_dir)) is not None:  # held out, even where the study cannot be expanded
        rows = [row | ({"held_out": 1} if row["identity"] == blind.identity else {}) for row in rows]
    return sorted(rows, key=_order)


def planned_runs(study_dir: Path) -> dict[str, Row] | None:
    """Plans of the runs that `<study_dir>/study.yaml` names, by identity.

    None without that file: then nothing is known to be missing or stale. None with a logged warning if it
    cannot be expanded (its tokens may lie elsewhere by now): what is on disk has to do.
    """
    path = study_dir / STUDY
    if not path.is_file():
        return None
    try:
        runs = expand(read_study_plan(path, [f"directory={study_dir}"]))
    except (OSError, ValueError) as error:
        get_logger(__name__).warning(f"{path}: runs that are missing cannot be listed: {error}")
        return None
    return {run.plan.identity: run.plan.as_dict() | _of_study(run) for run in runs}


def _of_study(run: PlannedRun) -> Row:
    """What only the study knows about a run."""
    trunk = run.folder if run.branch is None else run.branch.trunk
    return {"held_out": int(run.held_out), "trunk": trunk.name, "cell": run.plan.cell_identity}


def _told(planned: Row | None) -> Row:
    """What the study says of a run that is on disk: whether it asks for it, and whether it holds it out."""
    return STALE if planned is None else {name: planned[name] for name in OF_STUDY}


def _missing(plan: Row) -> Row:
    told = {"run": plan["name"], "status": "missing", "note": "Planned, not started."}
    told |= {name: plan[name] for name in OF_STUDY}
    return dict.fromkeys(COLUMNS) | {name: plan.get(name) for name in FROM_PLAN} | told


def read_run(run_dir: Path, study_dir: Path, now: float) -> Row:
    """The row of one run directory. See read_runs."""
    row: Row = dict.fromkeys(COLUMNS) | {
        "run": run_dir.name,
        "path": run_dir.relative_to(study_dir).as_posix(),
    }
    plan, plan_fault = _read_object(run_dir / PLAN, PLAN_NEEDS)
    row |= {name: plan.get(name) for name in FROM_PLAN} | {"cell": plan.get("cell_identity")}
    result, result_fault = _read_object(run_dir / RESULT, ("loss",))
    if plan_fault or result_fault:
        absent = not (run_dir / PLAN).exists() and not (run_dir / METRICS).exists()
        status = "missing" if absent and not result_fault else "failed"
        return row | {"status": status, "note": plan_fault or result_fault}
    if not result:
        status, note = _status_of_unfinished(run_dir, now)
        last = last_of_each_kind(run_dir).get("train", {})
        of_last = {"wall_s": last.get("elapsed_s"), "tps": last.get("tps")}
        of_last = {name: value if _is_sound_number(value) else None for name, value in of_last.items()}
        return row | {"status": status, "note": note} | of_last
    row["tps"] = result.get("tps_mean")
    row |= {name: result.get(name) for name in ("loss_se", "n_tokens_scored", "wall_s")}
    row |= {name: result[name] for name in ("train_tokens", "train_flops") if result.get(name) is not None}
    if result.get("identity", plan["identity"]) != plan["identity"]:
        note = (
            f"result.json is of run {result['identity']}, plan.json of {plan['identity']}: delete the result."
        )
        return row | {"status": "failed", "note": note}
    if not math.isfinite(result["loss"]):
        return row | {"status": "failed", "note": f"It diverged: its held-out loss is {result['loss']}."}
    return row | {"status": "done", "loss": result["loss"], "note": ""}


def _status_of_unfinished(run_dir: Path, now: float) -> tuple[str, str]:
    """(status, sentence) of a run that has a plan and no result."""
    ended, _ = _read_object(run_dir / EXIT, ())
    if ended:
        return "failed", f"Exit status {ended.get('status')}: {ended.get('last_words')}"
    metrics = run_dir / METRICS
    if not metrics.exists():
        return "missing", "Planned, not started."
    last = last_of_each_kind(run_dir).get("train", {})
    where = f"step {last['step']:,}" if isinstance(last.get("step"), int) else "before the first logged step"
    silent_s = now - metrics.stat().st_mtime
    if any((run_dir / CHECKPOINTS).glob("*.preempt")):
        return "preempted", f"Preempted at {where}; running the sweep again resumes it."
    if silent_s <= SILENT_AFTER_S:
        return "running", f"At {where}."
    return "failed", f"Stopped at {where}: no result, and nothing written for {silent_s / 60:,.0f} minutes."


def sound_metrics(run_dir: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of `metrics.jsonl` that can be read.

    Unlike run_dir.read_metrics it stops at none: a report is also for runs that ended badly, and a full disk
    leaves half a line anywhere.
    """
    try:
        text = (Path(run_dir) / METRICS).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            yield record


def last_of_each_kind(run_dir: str | Path) -> dict[str, dict[str, Any]]:
    """The last record of each kind."""
    return {record["kind"]: record for record in sound_metrics(run_dir)}


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """COLUMNS, and those of scores."""
    return COLUMNS + sorted({name for row in rows for name in row if name.startswith(SCORE)})


def _is_number(name: str) -> bool:
    return name in NUMBERS or name.startswith(SCORE)


def write_table(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Write rows as CSV under `path`, whole or not at all. Floats keep every digit; None is an empty cell."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    names = _columns(rows)
    table.writerow(names)
    for row in rows:
        table.writerow("" if row.get(name) is None else row[name] for name in names)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.getvalue())
    return path


def write_parquet(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """The same table as parquet: numbers are float64, None is null. Whole or not at all."""
    import pyarrow  # slow to import, and only this wants it
    import pyarrow.parquet

    columns = {
        name: pyarrow.array(
            [
                None if row.get(name) is None else (float if _is_number(name) else str)(row[name])
                for row in rows
            ],
            pyarrow.float64() if _is_number(name) else pyarrow.string(),
        )
        for name in _columns(rows)
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    held = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), held)
    write_whole_bytes(path, held.getvalue().to_pybytes())
    return path


def read_table(path: str | Path) -> dict[str, list[str]]:
    """A .csv or .csv.gz file as {column name: cells, as text}, in the file's order.

    Works on any CSV with a header.

    Raises FileNotFoundError if it is not there, ValueError if it is no CSV, or has no header, a repeated
    column or a ragged row.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such table; tools/collect.py STUDY_DIR writes one")
    try:
        return _read_columns(path)
    except (UnicodeDecodeError, csv.Error, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path}: not a CSV table ({error}); tools/collect.py STUDY_DIR writes one"
        ) from error


def read_rows(path: str | Path) -> list[Row]:
    """A table that write_table wrote, as rows: numbers are numbers, an empty cell is None.

    Raises what read_table raises, and ValueError for a table without the columns run and loss, or a cell of a
    column of numbers that is none.
    """
    columns = read_table(path)
    lacking = [name for name in ("run", "loss") if name not in columns]
    if lacking:
        raise ValueError(f"{path}: no column {lacking[0]!r}; tools/collect.py STUDY_DIR writes one")
    rows = []
    for i in range(len(columns["run"])):
        row: Row = dict.fromkeys(COLUMNS)
        for name, cells in columns.items():
            row[name] = (
                (_to_number(cells[i], name, i, path) if _is_number(name) else cells[i]) if cells[i] else None
            )
        rows.append(row)
    return rows


def _to_number(cell: str, name: str, i: int, path: str | Path) -> float:
    try:
        value = float(cell)
    except ValueError:
        raise ValueError(f"{path}, row {i + 1}: {name}: got {cell!r}, expected a number.") from None
    if not _is_sound_number(value) or math.isnan(value):
        raise ValueError(f"{path}, row {i + 1}: {name}: got {cell!r}, expected a finite number.")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def _read_columns(path: Path) -> dict[str, list[str]]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file)
        header = next(lines, None)
        if not header:
            raise ValueError(
                f"{path}: empty, wanted a line of column names; tools/collect.py STUDY_DIR writes one"
            )
        if len(set(header)) < len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise ValueError(f"{path}: column {twice!r} is there twice; rename one of them")
        columns: dict[str, list[str]] = {name: [] for name in header}
        for cells in lines:
            if not cells:
                continue
            if len(cells) != len(header):
                raise ValueError(
                    f"{path}, line {lines.line_num}: found {len(cells)} cells, wanted {len(header)}; mend or "
                    "remove the line"
                )
            for name, cell in zip(header, cells, strict=True):
                columns[name].append(cell)
    return columns


def _read_object(path: Path, needs: Sequence[str]) -> tuple[dict[str, Any], str]:
    """(contents, what is wrong with it in a sentence). A result.json that is not there is not wrong."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, "" if path.name == RESULT else f"It has no {path.name}."
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path.name} cannot be read: {error}."
    if not isinstance(held, dict):
        return {}, f"{path.name} holds {type(held).__name__}, wanted an object."
    if path.name == RESULT and "loss" in held and held["loss"] is None:
        return {}, "It ended, but was not scored: result.json has no loss."
    lacking = [name for name in needs if held.get(name) is None]
    if lacking:
        return {}, f"{path.name} lacks {', '.join(lacking)}."
    for name in (NUMBERS | {"tps_mean", "held_out_unigram_nats"}) & held.keys():
        if held[name] is not None and not _is_sound_number(held[name]):
            return {}, f"{path.name}: {name} is {str(held[name])[:40]!r}, wanted a number."
    for name in AMOUNTS & held.keys():
        if held[name] is not None and not 1 / LARGEST < held[name] < LARGEST:
            return {}, f"{path.name}: {name} is {held[name]!r}, wanted a number above 0."
    for name in TEXTS & held.keys():
        if held[name] is not None and not (isinstance(held[name], str) and is_one_line(held[name])):
            return {}, f"{path.name}: {name} is {str(held[name])[:40]!r}, wanted a word."
    return held, ""


def _is_sound_number(value: Any) -> bool:
    """Whether a value is a number that can be computed with; NaN and Inf are what a diverged run leaves."""
    return type(value) in (int, float) and not (LARGEST < abs(value) < math.inf)


def _order(row: Row) -> tuple:
    numbers = [
        row[name] if isinstance(row[name], int | float) else math.inf for name in ("n_params", "train_tokens")
    ]
    return (str(row["objective"] or "~"), *numbers, row["run"])
