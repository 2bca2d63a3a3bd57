"""Table of a study: one row per run, and the CSV file that the law is fitted on."""

import csv
import gzip
import io
import json
import math
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.config.yaml_file import is_single_line
from megatron.io import write_atomic, write_atomic_bytes
from megatron.log import get_logger
from megatron.plan.run_dir import CHECKPOINTS, EXIT, METRICS, PLAN, RESULT
from megatron.study.blind_record import load_blind
from megatron.study.ladder import STUDY, PlannedRun, expand_study, read_study_plan
from megatron.study.run_row import (
    COLUMNS,
    NUMBERS,
    PLAN_COLUMNS,
    SCORE_PREFIX,
    RunRow,
    is_number_column,
)

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
MAX_NUMBER = 1e300  # limit for numbers in files, so that their sums and products stay finite
REQUIRED_PLAN_KEYS = ("identity", "n_params", "train_tokens")
# A run without a result that has written nothing for this long has stopped.
MAX_SILENCE_S = 900.0

STALE_NOTE = "From an earlier version of the study: no longer one of its runs."


def read_runs(study_dir: str | Path, now: float | None = None) -> list[RunRow]:
    """Return a row for every directory under `<study_dir>/runs` and every planned run.

    Rows are sorted by objective, N and D. Only finished runs have a loss: one during training is not annealed
    and unfit for a law. A damaged run directory gives a row, not an exception. `now` (seconds since 1970)
    decides whether a run that has stopped writing still counts as running.

    Raises FileNotFoundError if there is no such study, or no `runs` folder in it. Raises ValueError if
    blind.json was modified, because the held-out run is then unknown.
    """
    study_dir = Path(study_dir)
    runs = study_dir / "runs"
    if not runs.is_dir():
        raise FileNotFoundError(
            f"{study_dir}: got no runs folder, expected a study directory. Run tools/sweep.py first."
        )
    now = time.time() if now is None else now
    rows = [read_run(path, study_dir, now) for path in sorted(runs.iterdir()) if path.is_dir()]
    planned = read_planned_runs(study_dir)
    if planned is not None:
        identities = {row.identity for row in rows}
        rows = [_add_study_columns(row, planned.get(str(row.identity))) for row in rows]
        rows += [run for identity, run in planned.items() if identity not in identities]
    if (blind := load_blind(study_dir)) is not None:  # held out, even if the study cannot be expanded
        rows = [replace(row, held_out=1) if row.identity == blind.identity else row for row in rows]
    return sorted(rows, key=_sort_key)


def read_planned_runs(study_dir: Path) -> dict[str, RunRow] | None:
    """Return the runs of `<study_dir>/study.yaml` as rows of runs that have not started, by identity.

    None without that file: missing and stale runs are then unknown. Also None, with a logged warning, if the
    study cannot be expanded, for example because its corpus was moved.
    """
    path = study_dir / STUDY
    if not path.is_file():
        return None
    try:
        runs = expand_study(read_study_plan(path, [f"directory={study_dir}"]))
    except (OSError, ValueError) as error:
        get_logger(__name__).warning(f"{path}: missing runs cannot be listed: {error}")
        return None
    return {run.plan.identity: _planned_row(run) for run in runs}


def _planned_row(run: PlannedRun) -> RunRow:
    plan = run.plan.as_dict()
    return RunRow(
        run=plan["name"],
        status="missing",
        note="Planned, not started.",
        held_out=int(run.held_out),
        trunk=(run.folder if run.branch is None else run.branch.trunk).name,
        cell=run.plan.cell_identity,
        **_select_values(plan, PLAN_COLUMNS),
    )


def _add_study_columns(row: RunRow, planned: RunRow | None) -> RunRow:
    """Return the row of a run on disk with the columns from the study's plan; stale if it is not planned."""
    if planned is None:
        return replace(row, status="stale", note=STALE_NOTE)
    return replace(row, held_out=planned.held_out, trunk=planned.trunk, cell=planned.cell)


def read_run(run_dir: Path, study_dir: Path, now: float) -> RunRow:
    """Return the row of one run directory. See read_runs."""
    plan, plan_fault = _read_object(run_dir / PLAN, REQUIRED_PLAN_KEYS)
    row = RunRow(
        run=run_dir.name,
        path=run_dir.relative_to(study_dir).as_posix(),
        cell=plan.get("cell_identity"),
        **_select_values(plan, PLAN_COLUMNS),
    )
    result, result_fault = _read_object(run_dir / RESULT, ("loss",))
    if plan_fault or result_fault:
        # a folder without plan and metrics belongs to a run that has not started
        absent = not (run_dir / PLAN).exists() and not (run_dir / METRICS).exists()
        status = "missing" if absent and not result_fault else "failed"
        return replace(row, status=status, note=plan_fault or result_fault)
    if not result:
        status, note = _unfinished_status(run_dir, now)
        last = last_records(run_dir).get("train", {})
        # metrics can contain text or huge values after a crash: those are dropped
        wall_s, tps = (last[k] if _is_computable(last.get(k)) else None for k in ("elapsed_s", "tps"))
        return replace(row, status=status, note=note, wall_s=wall_s, tps=tps)
    names = (
        "loss_se",
        "n_tokens_scored",
        "wall_s",
        "train_tokens",
        "train_flops",
        "test_loss",
        "test_loss_se",
    )
    measured = _select_values(result, names)
    row = replace(row, tps=result.get("tps_mean"), **measured)
    # result.json of an earlier plan in the same folder must not be combined with the new plan
    if result.get("identity", plan["identity"]) != plan["identity"]:
        note = (
            f"result.json is of run {result['identity']}, plan.json of {plan['identity']}: delete the result."
        )
        return replace(row, status="failed", note=note)
    if not math.isfinite(result["loss"]):
        note = f"It diverged: its held-out loss is {result['loss']}."
        return replace(row, status="failed", note=note)
    return replace(row, status="done", loss=result["loss"])


def _select_values(content: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the values of a plan or a result that are present and not null."""
    return {name: content[name] for name in names if content.get(name) is not None}


def _unfinished_status(run_dir: Path, now: float) -> tuple[str, str]:
    """Return (status, note) of a run that has a plan and no result."""
    ended, _ = _read_object(run_dir / EXIT, ())
    if ended:
        return "failed", f"Exit status {ended.get('status')}: {ended.get('last_words')}"
    metrics = run_dir / METRICS
    if not metrics.exists():
        return "missing", "Planned, not started."
    last = last_records(run_dir).get("train", {})
    where = f"step {last['step']:,}" if isinstance(last.get("step"), int) else "before the first logged step"
    # the file's modification time shows whether the run still writes
    silent_s = now - metrics.stat().st_mtime
    # a run that was preempted leaves this checkpoint until it resumes
    if any((run_dir / CHECKPOINTS).glob("*.preempt")):
        return "preempted", f"Preempted at {where}; running the sweep again resumes it."
    if silent_s <= MAX_SILENCE_S:
        return "running", f"At {where}."
    return "failed", f"Stopped at {where}: no result, and nothing written for {silent_s / 60:,.0f} minutes."


def read_valid_metrics(run_dir: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the valid lines of `metrics.jsonl`.

    Unlike run_dir.read_metrics it skips damaged lines anywhere in the file, because reports include failed
    runs and a full disk leaves partial lines.
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


def last_records(run_dir: str | Path) -> dict[str, dict[str, Any]]:
    """Return the last record of each kind."""
    return {record["kind"]: record for record in read_valid_metrics(run_dir)}


def _column_names(rows: Sequence[RunRow]) -> list[str]:
    """Return COLUMNS and the score columns of `rows`."""
    return COLUMNS + sorted({SCORE_PREFIX + task for row in rows for task in row.scores})


def write_table(rows: Sequence[RunRow], path: str | Path) -> Path:
    """Write rows as CSV to `path`, atomically. Floats keep all digits; None is an empty cell."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    names = _column_names(rows)
    table.writerow(names)
    for row in rows:
        cells = [row.value(name) for name in names]
        table.writerow("" if cell is None else cell for cell in cells)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.getvalue())
    return path


def write_table_parquet(rows: Sequence[RunRow], path: str | Path) -> Path:
    """Write rows as parquet to `path`, atomically. Numbers are float64; None is null."""
    import pyarrow  # slow import, used only in this function
    import pyarrow.parquet

    columns = {}
    for name in _column_names(rows):
        kind, dtype = (float, pyarrow.float64()) if is_number_column(name) else (str, pyarrow.string())
        cells = [row.value(name) for row in rows]
        columns[name] = pyarrow.array([None if cell is None else kind(cell) for cell in cells], dtype)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    write_atomic_bytes(path, buffer.getvalue().to_pybytes())
    return path


def read_table(path: str | Path) -> dict[str, list[str]]:
    """Read a .csv or .csv.gz file as {column name: cells as text}, in the file's order.

    Accepts any CSV with a header. Raises FileNotFoundError for a missing file, and ValueError for a file that
    is not CSV or has no header, a repeated column or a row of another length.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such table. Write one with tools/collect.py STUDY_DIR.")
    try:
        return _read_columns(path)
    except (UnicodeDecodeError, csv.Error, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path}: not a CSV table ({error}). Write one with tools/collect.py STUDY_DIR."
        ) from error


def read_rows(path: str | Path) -> list[RunRow]:
    """Read a table of write_table as rows, with numbers as int or float and None for empty cells.

    Columns of other names are skipped. Raises the errors of read_table, and ValueError for a table without
    the columns run and loss, or with text in a column of numbers.
    """
    columns = read_table(path)
    lacking = [name for name in ("run", "loss") if name not in columns]
    if lacking:
        raise ValueError(
            f"{path}: got no column {lacking[0]!r}. Write the table with tools/collect.py STUDY_DIR."
        )
    return [_parse_row(columns, i, path) for i in range(len(columns["run"]))]


def _parse_row(columns: Mapping[str, Sequence[str]], i: int, path: str | Path) -> RunRow:
    """Return row i of a table; a row without a name has the name ""."""
    values: dict[str, Any] = {}
    scores: dict[str, float] = {}
    for name, cells in columns.items():
        if name.startswith(SCORE_PREFIX):
            if cells[i]:
                scores[name.removeprefix(SCORE_PREFIX)] = _to_number(cells[i], name, i, path)
        elif name in COLUMNS:
            is_number = cells[i] and is_number_column(name)
            values[name] = _to_number(cells[i], name, i, path) if is_number else cells[i] or None
    return RunRow(**values | {"run": columns["run"][i]}, scores=scores)


def _to_number(cell: str, name: str, i: int, path: str | Path) -> float:
    try:
        value = float(cell)
    except ValueError:
        raise ValueError(f"{path}, row {i + 1}: {name}: got {cell!r}, expected a number.") from None
    if not math.isfinite(value) or abs(value) > MAX_NUMBER:
        raise ValueError(f"{path}, row {i + 1}: {name}: got {cell!r}, expected a finite number.")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def _read_columns(path: Path) -> dict[str, list[str]]:
    opened = gzip.open if path.suffix == ".gz" else open
    # utf-8-sig removes a byte order mark, which spreadsheets write
    with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file)
        header = next(lines, None)
        if not header:
            raise ValueError(
                f"{path}: got an empty file, expected a line of column names. Write a table with "
                "tools/collect.py STUDY_DIR."
            )
        if len(set(header)) < len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise ValueError(
                f"{path}: got the column {twice!r} twice, expected unique names. Rename one of them."
            )
        columns: dict[str, list[str]] = {name: [] for name in header}
        for cells in lines:
            # csv.reader returns [] for an empty line
            if not cells:
                continue
            if len(cells) != len(header):
                raise ValueError(
                    f"{path}, line {lines.line_num}: got {len(cells)} cells, expected {len(header)}. "
                    "Correct or remove the line."
                )
            for name, cell in zip(header, cells, strict=True):
                columns[name].append(cell)
    return columns


def _read_object(path: Path, needs: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return (contents, a sentence on what is wrong). A missing result.json is not an error."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, "" if path.name == RESULT else f"It has no {path.name}."
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path.name} cannot be read: {error}."
    if not isinstance(content, dict):
        return {}, f"{path.name} contains {type(content).__name__}, expected an object."
    if path.name == RESULT and "loss" in content and content["loss"] is None:
        return {}, "It ended, but was not scored: result.json has no loss."
    lacking = [name for name in needs if content.get(name) is None]
    if lacking:
        return {}, f"{path.name} lacks {', '.join(lacking)}."
    for name in (NUMBERS | {"tps_mean", "held_out_unigram_nats"}) & content.keys():
        if content[name] is not None and not _is_computable(content[name]):
            return {}, f"{path.name}: {name} is {str(content[name])[:40]!r}, expected a number."
    for name in AMOUNTS & content.keys():
        if content[name] is not None and not 1 / MAX_NUMBER < content[name] < MAX_NUMBER:
            return {}, f"{path.name}: {name} is {content[name]!r}, expected a number above 0."
    for name in TEXTS & content.keys():
        if content[name] is not None and not (
            isinstance(content[name], str) and is_single_line(content[name])
        ):
            return {}, f"{path.name}: {name} is {str(content[name])[:40]!r}, expected a line of text."
    return content, ""


def _is_computable(value: Any) -> bool:
    """Return whether a value is a number up to MAX_NUMBER, or NaN or Inf, which diverged runs log."""
    # type(), so that true and false are no numbers. For NaN the comparison is false: it counts as computable.
    return type(value) in (int, float) and not (MAX_NUMBER < abs(value) < math.inf)


def _sort_key(row: RunRow) -> tuple[str | float, ...]:
    numbers = [math.inf if number is None else number for number in (row.n_params, row.train_tokens)]
    # "~" sorts after all letters: rows without an objective come last
    return (row.objective or "~", *numbers, row.run)
