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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from megatron.config.presets import suggest_nearest
from megatron.study.table import COLUMNS, NOTE, make_frame, read_table

KINDS = ("torchtitan", "megatron", "tensorboard", "wandb", "csv")
FINAL_SHARE = 0.02  # last share of the training losses, averaged if there is no held-out loss
MAX_ANNEALED_RATE = 0.3  # share of the peak learning rate; a run that ends above it was not annealed
# 3, .5, 1,234.5, 9.7E+00, nan, inf; commas group thousands
NUMBER = r"(?P<value>[-+]?[\d,]*\.?\d+(?:[eE][-+]?\d+)?|nan|inf)"
ANSI_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
FACTS = (
    "n_params",
    "tokens_per_step",
    "train_tokens",
    "unique_tokens",
    "seq_len",
    "objective",
    "size",
    "seed",
)
# of each program's log: losses by step, learning rates, the parameters of each
# model-parallel rank, and facts
PATTERNS = {
    "torchtitan": {
        # the lookbehind keeps "validate step: 100" out of the training losses
        "train": re.compile(rf"(?<!validate )step:\s*(?P<step>\d+)\s+loss:\s*{NUMBER}"),
        "held_out": re.compile(rf"validate step:\s*(?P<step>\d+)\s+loss:\s*{NUMBER}"),
        "n_params": re.compile(r"size:\s*(?P<value>[\d,]+) total parameters"),
        "seq_len": re.compile(r"sequence length\s+(?P<value>\d+)"),
        "batch": re.compile(r"global batch size\s+(?P<value>\d+)"),
        "n_steps": re.compile(r"total steps\s+(?P<value>\d+)"),
    },
    "megatron": {
        "train": re.compile(rf"iteration\s+(?P<step>\d+)/\s*\d+\s*\|.*?lm loss:\s*{NUMBER}"),
        "held_out": re.compile(rf"validation loss at iteration (?P<step>\d+).*?lm loss value:\s*{NUMBER}"),
        "rate": re.compile(rf"learning rate:\s*{NUMBER}"),
        # "number of parameters on (tensor, pipeline) model parallel rank (1,
        # 0): 1100"
        "share": re.compile(r"number of parameters on .*?rank \((?P<rank>\d+, ?\d+)\):\s*(?P<value>\d+)"),
        "seq_len": re.compile(r"^.*\bseq_length\s*\.+\s*(?P<value>\d+)"),
        "samples": re.compile(r"consumed samples:\s*(?P<value>\d+)"),
        "n_steps": re.compile(r"iteration\s+\d+/\s*(?P<value>\d+)\s*\|"),
    },
}
# tags of torchtitan first, then of Megatron, then common ones; the first that
# a run has is read
TRAIN_TAGS = ("loss_metrics/global_avg_loss", "lm-loss-training/lm loss", "lm loss", "train/loss", "loss")
HELD_OUT_TAGS = ("validation_metrics/loss", "lm loss validation", "validation/loss", "val/loss", "eval/loss")
RATE_TAGS = ("lr", "learning-rate/learning-rate", "learning-rate", "train/lr")


@dataclass
class RunLog:
    """Contents of one log. Losses in nats per token, by step."""

    run: str
    path: Path
    train: dict[int, float] = field(default_factory=dict)
    held_out: dict[int, float] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def read_external_logs(
    paths: Sequence[Path], kind: str, facts: Mapping[str, Mapping[str, Any]], columns: Mapping[str, str]
) -> pd.DataFrame:
    """Return a table with one row per run.

    facts    values by run name; those under "" apply to every run
    columns  our column name -> column of a csv, such as {"loss": "val_loss"}

    Raises FileNotFoundError for a missing file. Raises ValueError for an
    unknown kind, fact or column, or a file without a run.
    """
    if kind not in KINDS:
        raise ValueError(f"--from: got '{kind}', expected one of {', '.join(KINDS)}.")
    for run, run_facts in facts.items():
        for name in set(run_facts) - set(FACTS):
            raise ValueError(
                f"facts{f' of {run}' if run else ''}: '{name}'; {suggest_nearest(name, list(FACTS))}"
            )
    rows: list[dict[str, Any]] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file. Give the logs or exports of finished runs.")
        if kind == "csv":
            rows += _read_csv_rows(path, columns, facts)
            continue
        trails = [_read_log(path, kind)] if kind in PATTERNS else list(READERS[kind](path))
        if not any(trail.train or trail.held_out for trail in trails):
            raise ValueError(f"{path}: got no loss, expected the output of {kind}. Check --from.")
        rows += [make_row(trail, facts) for trail in trails if trail.train or trail.held_out]
    return make_frame(rows)


def make_row(trail: RunLog, facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the row of one log.

    The loss is the last held-out loss, or else the mean of the last training
    losses, as stated in `note`.
    """
    merged, values = _merge_facts(trail.facts, trail.run, facts)
    last = max([*trail.train, *trail.held_out])
    notes = []
    if trail.held_out:
        loss = trail.held_out[max(trail.held_out)]
    else:
        losses = [trail.train[step] for step in sorted(trail.train)]
        # Example: of 1,000 logged losses the mean of the last ceil(0.02 x
        # 1000) = 20. One training loss is of one batch and much noisier than
        # a held-out loss.
        loss = float(np.mean(losses[-max(1, math.ceil(FINAL_SHARE * len(losses))) :]))
        notes.append("Training loss: the log has no held-out loss.")
    if trail.rates:
        # Cosine to 10 % and decay to 0 count as annealed, a constant rate
        # does not.
        values["annealed"] = int(trail.rates[-1] <= MAX_ANNEALED_RATE * max(trail.rates))
    if values.get("train_tokens") is None:
        # Samples are preferred to steps: a batch size that grows during the
        # run is counted correctly.
        if merged.get("samples") and merged.get("seq_len"):
            values["train_tokens"] = merged["samples"] * merged["seq_len"]
        elif merged.get("tokens_per_step"):
            values["train_tokens"] = last * merged["tokens_per_step"]
        elif merged.get("batch") and merged.get("seq_len"):
            values["train_tokens"] = last * merged["batch"] * merged["seq_len"]
        else:
            notes.append("Number of tokens unknown: give --set tokens_per_step=N.")
    if values.get("n_params") is None:
        notes.append("N unknown: give --set n_params=N.")
    # a log that ends before its planned steps is not from a finished run
    if is_cut := last < (n_steps := merged.get("n_steps", 0)):
        notes.append(f"It ends at step {last:,} of {n_steps:,}.")
    if is_diverged := not math.isfinite(loss):
        notes.append("It diverged.")
    values |= {"run": trail.run, "path": str(trail.path), NOTE: " ".join(notes)}
    values["status"] = "failed" if is_cut or is_diverged else "done"
    return _fill_derived(values | {"loss": None if is_diverged else loss})


def _merge_facts(
    values: Mapping[str, Any], run: str, facts: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return values with the facts of a run, which override those of all runs; and the columns in them."""
    merged = {**values, **facts.get("", {}), **facts.get(run, {})}
    return merged, {name: value for name, value in merged.items() if name in COLUMNS}


def _fill_derived(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with its objective and the columns that follow from N, D and U."""
    row["objective"] = row.get("objective") or "autoregressive"
    N, D, U = (row.get(name) for name in ("n_params", "train_tokens", "unique_tokens"))
    if D and U:
        row["epochs"] = row.get("epochs") or D / U
    if N and D:
        # C = 6 N D is the fallback: the exact convention needs the model's
        # shape
        row |= {"flops_6nd": 6.0 * N * D, "train_flops": row.get("train_flops") or 6.0 * N * D}
    return row


def _read_log(path: Path, kind: str) -> RunLog:
    """Read one log by the PATTERNS of a program. A step that is logged again after a restart replaces it."""
    trail, shares = RunLog(path.stem, path), dict[str, int]()
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = (ANSI_COLOURS.sub("", line) for line in file)
        matches = ((name, p.search(line)) for line in lines for name, p in PATTERNS[kind].items())
        for name, match in ((name, match) for name, match in matches if match):
            value = float(match["value"].replace(",", ""))
            if name in ("train", "held_out"):
                getattr(trail, name)[int(match["step"])] = value
            elif name == "rate":
                trail.rates.append(value)
            # each (tensor, pipeline) rank logs its parameters once or several
            # times
            elif name == "share":
                shares[match["rank"]] = int(value)
            else:
                trail.facts[name] = int(value)
    if shares:
        # (0, 0): 1000 and (1, 0): 1100 are 2,100. Norms, which tensor-parallel
        # ranks replicate, are counted on each of them.
        trail.facts["n_params"] = sum(shares.values())
    return trail


def _read_tensorboard(path: Path) -> Iterator[RunLog]:
    """Read every folder of event files under `path`. This is the only use of TensorBoard's reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # a resumed run has several event files in one folder: they are read as
    # one run
    folders = sorted({file.parent for file in path.rglob("events.out.tfevents.*")})
    for folder in folders:
        # size_guidance 0 disables the reservoir sampling, which would drop
        # steps
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        # losses of training, held-out losses, and rates, by step
        series: list[dict[int, float]] = []
        for candidates in (TRAIN_TAGS, HELD_OUT_TAGS, RATE_TAGS):
            tags = [name for name in candidates if name in events.Tags()["scalars"]]
            series.append({event.step: event.value for tag in tags[:1] for event in events.Scalars(tag)})
        name = folder.parent.name if folder.name == "tensorboard" else folder.name
        train, held_out, rates = series
        # sorted by step: the last rate decides whether the run was annealed
        yield RunLog(name, folder, train, held_out, [rate for _, rate in sorted(rates.items())])


def _read_wandb(path: Path) -> Iterator[RunLog]:
    """Read a chart's CSV: Step, "run - metric", "run - metric__MIN", "run - metric__MAX", the next run."""
    table = read_table(path)
    step = next((name for name in ("Step", "_step", "trainer/global_step") if name in table), None)
    if step is None:
        raise ValueError(
            f"{path}: got no column 'Step', expected a chart exported as CSV from Weights & Biases."
        )
    trails: dict[str, RunLog] = {}
    for name in table.columns.drop(step):
        # the last " - " separates run and metric: names of runs can contain "
        # - " too
        run, _, metric = name.rpartition(" - ")
        if name.endswith(("__MIN", "__MAX")) or "loss" not in metric.lower():
            continue
        points = table[[step, name]]
        if len(points.select_dtypes("number").columns) < 2:
            raise ValueError(
                f"{path}: got text in {step} or {name}, expected numbers. Export the chart again."
            )
        trail = trails.setdefault(run or path.stem, RunLog(run or path.stem, path))
        is_held_out = any(word in metric.lower() for word in ("val", "eval", "held", "test"))
        # a CSV of several runs interleaves their steps, so empty cells are
        # normal
        points = points.dropna()
        losses = zip(points[step].astype(int), points[name], strict=True)
        (trail.held_out if is_held_out else trail.train).update(losses)
    yield from trails.values()


READERS = {"tensorboard": _read_tensorboard, "wandb": _read_wandb}


def _read_csv_rows(
    path: Path, columns: Mapping[str, str], facts: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return one row per line of a CSV, with columns named by `columns` or by our own names."""
    headers = list(read_table(path))
    for column, header in columns.items():
        if column not in COLUMNS:
            raise ValueError(f"--map {column}: {suggest_nearest(column, list(COLUMNS))}")
        if header not in headers:
            raise ValueError(f"{path}: no column '{header}'; {suggest_nearest(header, headers)}")
    # a column of ours that is mapped to another one is not read
    table = read_table(path, {**{f"their {name}": name for name in columns}, **columns})
    if "loss" not in table:
        raise ValueError(f"{path}: got no column of losses. Name it, for example with --map loss=val_loss.")
    rows = []
    for i, cells in enumerate(table[table.columns.intersection(list(COLUMNS))].to_dict("records"), 1):
        values: dict[str, Any] = {"run": f"{path.stem}-{i}", "path": str(path)}
        # a diverged run has nan in its table: it becomes a row without a loss
        values |= {str(name): cell for name, cell in cells.items() if not pd.isna(cell)}
        _, values = _merge_facts(values, values["run"], facts)
        has_loss = "loss" in values
        values["status"] = values.get("status") or ("done" if has_loss else "failed")
        rows.append(_fill_derived(values | {NOTE: "" if has_loss else "It has no loss."}))
    return rows


def read_facts(path: Path) -> dict[str, dict[str, Any]]:
    """Read a CSV with a column `run` and columns of facts. Return facts by run."""
    table = read_table(path)
    if "run" not in table:
        raise ValueError(f"{path}: no column 'run'; {suggest_nearest('run', list(table))}")
    facts: dict[str, dict[str, Any]] = {}
    for cells in table.to_dict("records"):
        present = {str(name): cell for name, cell in cells.items() if name != "run" and not pd.isna(cell)}
        facts[str(cells["run"])] = {name: parse_fact(name, str(cell)) for name, cell in present.items()}
    return facts


def parse_fact(name: str, text: str) -> Any:
    """Return a fact as a number or a word. Raises ValueError for text that is not a number."""
    if name in ("objective", "size"):
        return text
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name}: got '{text}', expected a number.") from None
    return int(value) if value.is_integer() else value
