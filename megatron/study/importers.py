"""Importers for the results of other programs: logs, TensorBoard, Weights & Biases exports, CSV.

torchtitan    "step:  100  loss:  6.42770 ...", with or without ANSI colours, and
              validation lines if present
megatron      " iteration 100/ 5000 | consumed samples: ... | lm loss: 9.7E+00 | ...",
              and validation lines
tensorboard   a folder with events.out.tfevents files
wandb         a chart exported as CSV: Step, then "run - metric" columns
csv           one run per row, with columns renamed by a map

A log rarely contains N or the tokens per step. Values that a log lacks are
given as `facts`.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from megatron.config.presets import suggest_nearest
from megatron.study.selection import require_column
from megatron.study.table import COLUMNS, NOTE, PREFIXES, make_frame, read_table

KINDS = ("torchtitan", "megatron", "tensorboard", "wandb", "csv")
FINAL_SHARE = 0.02  # last share of the training losses, averaged if there is no held-out loss
MAX_ANNEALED_RATE = 0.3  # share of the peak learning rate; a run that ends above it was not annealed
# 3, .5, 1,234.5, 9.7E+00, nan, inf; commas group thousands
NUMBER = r"(?P<value>[-+]?[\d,]*\.?\d+(?:[eE][-+]?\d+)?|nan|inf)"
ANSI_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
WORDS = ("objective", "size")  # facts that are not numbers
FACTS = ("n_params", "tokens_per_step", "train_tokens", "unique_tokens", "seq_len", "seed", *WORDS)
# for each program's log: losses by step, learning rates, and facts
PATTERNS = {
    "torchtitan": {
        # the lookbehind keeps "validate step: 100" out of the training losses
        "train": rf"(?<!validate )step:\s*(?P<step>\d+)\s+loss:\s*{NUMBER}",
        "held_out": rf"validate step:\s*(?P<step>\d+)\s+loss:\s*{NUMBER}",
        "n_params": r"size:\s*(?P<value>[\d,]+) total parameters",
        "seq_len": r"sequence length\s+(?P<value>\d+)",
        "batch": r"global batch size\s+(?P<value>\d+)",
        "n_steps": r"total steps\s+(?P<value>\d+)",
    },
    "megatron": {
        "train": rf"iteration\s+(?P<step>\d+)/\s*\d+\s*\|.*?lm loss:\s*{NUMBER}",
        "held_out": rf"validation loss at iteration (?P<step>\d+).*?lm loss value:\s*{NUMBER}",
        "rate": rf"learning rate:\s*{NUMBER}",
        "seq_len": r"^.*\bseq_length\s*\.+\s*(?P<value>\d+)",
        "samples": r"consumed samples:\s*(?P<value>\d+)",
        "n_steps": r"iteration\s+\d+/\s*(?P<value>\d+)\s*\|",
    },
}
# tags of torchtitan first, then of Megatron, then common ones; the first that
# a run has is read
TAGS = {
    "train": ("loss_metrics/global_avg_loss", "lm-loss-training/lm loss", "lm loss", "train/loss", "loss"),
    "held_out": (
        "validation_metrics/loss", "lm loss validation", "validation/loss", "val/loss", "eval/loss"
    ),
    "rates": ("lr", "learning-rate/learning-rate", "learning-rate", "train/lr"),
}  # fmt: skip


@dataclass
class RunLog:
    """Contents of one log, by step: losses in nats per token, and learning rates."""

    run: str
    path: Path
    train: dict[int, float] = field(default_factory=dict)
    held_out: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def read_external_logs(
    paths: Sequence[Path], kind: str, facts: Mapping[str, Mapping[str, Any]], columns: Mapping[str, str]
) -> pd.DataFrame:
    """Return a table with one row per run.

    facts    values by run name; those under "" apply to every run
    columns  our column name -> column of a csv, such as {"loss": "val_loss"}

    Raises FileNotFoundError for a missing file. Raises
    ValueError for an unknown kind, fact or column, or a file
    without a run.
    """
    if kind not in KINDS:
        raise ValueError(f"--from: got '{kind}', expected one of {', '.join(KINDS)}.")
    for name in {name for run_facts in facts.values() for name in run_facts} - set(FACTS):
        raise ValueError(f"facts: '{name}'; {suggest_nearest(name, list(FACTS))}")
    rows: list[dict[str, Any]] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file. Give the logs or exports of finished runs.")
        if kind == "csv":
            rows += _read_csv_rows(path, columns, facts)
            continue
        read = {"tensorboard": _read_tensorboard, "wandb": _read_wandb}.get(kind)
        logs = read(path) if read else [_read_log(path, PATTERNS[kind])]
        new_rows = [make_row(log, facts) for log in logs if log.train or log.held_out]
        if not new_rows:
            raise ValueError(f"{path}: got no loss, expected the output of {kind}. Check --from.")
        rows += new_rows
    return make_frame(rows)


def make_row(log: RunLog, facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the row of one log.

    The loss is the last held-out loss, or else the mean of the last training
    losses, as stated in `note`.
    """
    merged = {**log.facts, **facts.get("", {}), **facts.get(log.run, {})}
    last = max([*log.train, *log.held_out])
    # a log that ends before its planned steps is not from a finished run
    is_cut = last < (n_steps := merged.get("n_steps", 0))
    notes = [f"It ends at step {last:,} of {n_steps:,}."] if is_cut else []
    if log.held_out:
        loss = log.held_out[max(log.held_out)]
    else:
        losses = [log.train[step] for step in sorted(log.train)]
        # Example: of 1,000 logged losses the mean of the last ceil(0.02 x
        # 1000) = 20. One training loss is of one batch and much noisier than
        # a held-out loss.
        loss = float(np.mean(losses[-max(1, math.ceil(FINAL_SHARE * len(losses))) :]))
        notes.append("Training loss: the log has no held-out loss.")
    if log.rates:
        # Cosine to 10 % and decay to 0 count
        # as annealed, a constant rate does not.
        merged["annealed"] = int(log.rates[max(log.rates)] <= MAX_ANNEALED_RATE * max(log.rates.values()))
    # Samples are preferred to steps: a batch size
    # that grows during the run is counted correctly.
    n_samples = merged.get("samples") or last * merged.get("batch", 0)
    n_tokens = n_samples * merged.get("seq_len", 0) or last * merged.get("tokens_per_step", 0)
    merged["train_tokens"] = merged.get("train_tokens") or n_tokens or None
    for name, option in (("train_tokens", "tokens_per_step"), ("n_params", "n_params")):
        if not merged.get(name):
            notes.append(f"{name} unknown: give --set {option}=N.")
    if not math.isfinite(loss):
        notes.append("It diverged.")
    status = "failed" if is_cut or not math.isfinite(loss) else "done"
    about = {"run": log.run, "path": str(log.path), "status": status, "loss": loss, NOTE: " ".join(notes)}
    return _fill_derived(merged | about)


def _fill_derived(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with its objective and the columns that follow from N, D and U."""
    row["objective"] = row.get("objective") or "autoregressive"
    N, D, U = (row.get(name) for name in ("n_params", "train_tokens", "unique_tokens"))
    if D and U:
        row["epochs"] = row.get("epochs") or D / U
    if N and D:
        # C = 6 N D is the fallback: the exact
        # convention needs the model's shape
        row |= {"flops_6nd": 6.0 * N * D, "train_flops": row.get("train_flops") or 6.0 * N * D}
    return row


def _read_log(path: Path, patterns: Mapping[str, str]) -> RunLog:
    """Read one log by the patterns of a program. A step that is logged again after a restart replaces it."""
    log, step = RunLog(path.stem, path), 0
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = (ANSI_COLOURS.sub("", line) for line in file)
        matches = ((name, re.search(p, line)) for line in lines for name, p in patterns.items())
        for name, match in ((name, match) for name, match in matches if match):
            value = float(match["value"].replace(",", ""))
            if name in ("train", "held_out"):
                step = int(match["step"])
                getattr(log, name)[step] = value
            elif name == "rate":
                log.rates[step] = value
            else:
                log.facts[name] = int(value)
    return log


def _read_tensorboard(path: Path) -> Iterator[RunLog]:
    """Read every folder of event files under `path`. This is the only use of TensorBoard's reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # a resumed run has several event files
    # in one folder: they are read as one run
    for folder in sorted({file.parent for file in path.rglob("events.out.tfevents.*")}):
        # size_guidance 0 disables the reservoir
        # sampling, which would drop steps
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        log = RunLog(folder.parent.name if folder.name == "tensorboard" else folder.name, folder)
        for series, candidates in TAGS.items():
            tag = next((name for name in candidates if name in events.Tags()["scalars"]), None)
            points = events.Scalars(tag) if tag else []
            getattr(log, series).update({event.step: event.value for event in points})
        yield log


def _read_wandb(path: Path) -> Iterable[RunLog]:
    """Read a chart's CSV: Step, "run - metric", "run - metric__MIN", "run - metric__MAX", the next run."""
    table = read_table(path)
    steps = [name for name in ("Step", "_step", "trainer/global_step") if name in table]
    logs: dict[str, RunLog] = {}
    for name in table.columns.drop(steps):
        # the last " - " separates run and metric: names of runs can contain "
        # - " too
        run, _, metric = name.rpartition(" - ")
        if name.endswith(("__MIN", "__MAX")) or "loss" not in metric.lower():
            continue
        # a CSV of several runs interleaves
        # their steps, so empty cells are normal
        points = table[[*steps[:1], name]].dropna()
        if len(points.select_dtypes("number").columns) < 2:
            raise ValueError(
                f"{path}: got no numbers in Step and {name}, expected a chart exported as CSV from "
                "Weights & Biases. Export it again."
            )
        log = logs.setdefault(run, RunLog(run or path.stem, path))
        is_held_out = any(word in metric.lower() for word in ("val", "eval", "held", "test"))
        losses = dict(points.to_numpy().tolist())
        (log.held_out if is_held_out else log.train).update({int(step): losses[step] for step in losses})
    return logs.values()


def _read_csv_rows(
    path: Path, columns: Mapping[str, str], facts: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return one row per line of a CSV, with columns named by `columns` or by our own names."""
    for column, header in columns.items():
        if column not in COLUMNS:
            raise ValueError(f"--map {column}: {suggest_nearest(column, list(COLUMNS))}")
        require_column(path, read_table(path), header)
    # a column of ours that is mapped to another one is not read
    table = read_table(path, {**{f"their {name}": name for name in columns}, **columns})
    require_column(path, table, "loss", "--map loss=val_loss")
    rows = []
    names = [name for name in table if name in COLUMNS or str(name).startswith(PREFIXES)]
    for i, values in enumerate(_list_cells(table[names]), 1):
        # a diverged run has nan in its table: it becomes a row without a loss
        status, note = ("done", "") if "loss" in values else ("failed", "It has no loss.")
        row = {"run": f"{path.stem}-{i}", "path": str(path), "status": status} | values
        merged = {**row, **facts.get("", {}), **facts.get(row["run"], {}), NOTE: note}
        rows.append(_fill_derived(merged))
    return rows


def _list_cells(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the cells of each row that are not empty, by column; columns of whole numbers are int."""
    rows = table.convert_dtypes().to_dict("records")
    return [{str(name): cell for name, cell in row.items() if not pd.isna(cell)} for row in rows]


def read_facts(path: Path, key: str = "run", names: Sequence[str] = FACTS) -> dict[str, dict[str, Any]]:
    """Read a CSV with the columns `key` and any of `names`. Return the cells of each row, by its `key`.

    Raises ValueError for other columns or values.
    """
    table = read_table(path)
    if key not in table or not set(table) <= {key, *names}:
        expected = f"{key} and any of {', '.join(names)}"
        raise ValueError(f"{path}: got columns {', '.join(table)}, expected {expected}.")
    if table.attrs["warnings"]:
        raise ValueError(f"{path}: {table.attrs['warnings'][0]} Expected numbers.")
    return {str(row.pop(key)): row for row in _list_cells(table)}


def parse_fact(name: str, text: str) -> Any:
    """Return a fact as a number or a word. Raises ValueError for text that is not a number."""
    if name in WORDS:
        return text
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name}: got '{text}', expected a number.") from None
    return int(value) if value.is_integer() else value
