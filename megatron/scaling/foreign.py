"""Runs of other programs, from what they leave: log lines, TensorBoard, exports of Weights & Biases, CSV.

torchtitan    "step:  100  loss:  6.42770 ...", with or without colours; validation lines where there are any
megatron      " iteration 100/ 5000 | consumed samples: ... | lm loss: 9.7E+00 | ...", and its validation's
tensorboard   a folder with events.out.tfevents files
wandb         a CSV that a chart was exported to: Step, then "run - metric" columns
csv           a run a row, its columns renamed by a map

A log rarely says N or how many tokens a step has. What it says is taken; the rest comes as `facts`.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.presets import nearest
from megatron.scaling.table import COLUMNS, NUMBERS, Row, read_table

KINDS = ("torchtitan", "megatron", "tensorboard", "wandb", "csv")
LAST_SHARE = 0.02  # of the training losses, averaged where nothing was held out
ANNEALED_BELOW = 0.3  # of the peak learning rate: a run that ends above it was not annealed
NUMBER = r"([-+]?[\d,]*\.?\d+(?:[eE][-+]?\d+)?|nan|inf)"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
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
TITAN = {
    "train": re.compile(rf"(?<!validate )step:\s*(\d+)\s+loss:\s*{NUMBER}"),
    "validation": re.compile(rf"validate step:\s*(\d+)\s+loss:\s*{NUMBER}"),
    "n_params": re.compile(r"size:\s*([\d,]+) total parameters"),
    "seq_len": re.compile(r"sequence length\s+(\d+)"),
    "batch": re.compile(r"global batch size\s+(\d+)"),
    "n_steps": re.compile(r"total steps\s+(\d+)"),
}
MEGATRON = {
    "train": re.compile(rf"iteration\s+(\d+)/\s*(\d+)\s*\|.*?lm loss:\s*{NUMBER}"),
    "validation": re.compile(rf"validation loss at iteration (\d+).*?lm loss value:\s*{NUMBER}"),
    "samples": re.compile(r"consumed samples:\s*(\d+)"),
    "rate": re.compile(rf"learning rate:\s*{NUMBER}"),
    "n_params": re.compile(r"number of parameters on .*?rank \((\d+), ?(\d+)\):\s*(\d+)"),
    "seq_len": re.compile(r"^.*\bseq_length\s*\.+\s*(\d+)"),
}
TRAIN_TAGS = ("loss_metrics/global_avg_loss", "lm-loss-training/lm loss", "lm loss", "train/loss", "loss")
HELD_OUT_TAGS = ("validation_metrics/loss", "lm loss validation", "validation/loss", "val/loss", "eval/loss")
RATE_TAGS = ("lr", "learning-rate/learning-rate", "learning-rate", "train/lr")


@dataclass
class Trail:
    """What one log says. Losses by step, nats a token."""

    run: str
    path: Path
    train: dict[int, float] = field(default_factory=dict)
    held_out: dict[int, float] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    n_steps: int | None = None
    samples: int | None = None


def number(text: str) -> float:
    """1,234.5 or 9.7E+00 as a number."""
    return float(text.replace(",", ""))


def read_foreign(
    paths: Sequence[Path], kind: str, facts: Mapping[str, Mapping[str, Any]], renamed: Mapping[str, str]
) -> list[Row]:
    """A row for each run, with the keys of table.COLUMNS and `note`.

    `facts` are by run, those of "" for every run; `renamed` says which column of a csv holds what
    ({"loss": "val_loss"}).

    Raises FileNotFoundError, and ValueError for another kind, a fact or a column that is unknown, or a file
    with no run in it.
    """
    if kind not in KINDS:
        raise ValueError(f"--from: '{kind}' is not one of {', '.join(KINDS)}")
    for run, told in facts.items():
        for name in set(told) - set(FACTS):
            raise ValueError(f"facts{f' of {run}' if run else ''}: '{name}'; {nearest(name, list(FACTS))}")
    rows: list[Row] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file; give the logs or exports of finished runs")
        if kind == "csv":
            rows += _rows_of_csv(path, renamed, facts)
            continue
        trails = list(READERS[kind](path))
        if not any(trail.train or trail.held_out for trail in trails):
            raise ValueError(f"{path}: found no loss, wanted what {kind} writes; is --from right?")
        rows += [row_of(trail, facts) for trail in trails if trail.train or trail.held_out]
    return rows


def row_of(trail: Trail, facts: Mapping[str, Mapping[str, Any]]) -> Row:
    """The row of one log: the last held-out loss, or the mean of the last training losses, said in `note`."""
    told = trail.facts | dict(facts.get("", {})) | dict(facts.get(trail.run, {}))
    row: Row = dict.fromkeys(COLUMNS) | {"run": trail.run, "path": str(trail.path)}
    row |= {name: told[name] for name in FACTS if name in told and name in COLUMNS}
    row["objective"] = row["objective"] or "autoregressive"
    last = max([*trail.train, *trail.held_out])
    notes = []
    if trail.held_out:
        row["loss"] = trail.held_out[max(trail.held_out)]
    else:
        losses = [trail.train[step] for step in sorted(trail.train)]
        row["loss"] = float(np.mean(losses[-max(1, math.ceil(LAST_SHARE * len(losses))) :]))
        notes.append("Training loss: nothing was held out.")
    if trail.rates:
        row["annealed"] = int(trail.rates[-1] <= ANNEALED_BELOW * max(trail.rates))
    if row["train_tokens"] is None:
        if trail.samples and told.get("seq_len"):
            row["train_tokens"] = trail.samples * told["seq_len"]
        elif told.get("tokens_per_step"):
            row["train_tokens"] = last * told["tokens_per_step"]
        else:
            notes.append("Tokens are not known: say --set tokens_per_step=N.")
    if row["n_params"] is None:
        notes.append("N is not known: say --set n_params=N.")
    row["status"] = "done"
    if trail.n_steps and last < trail.n_steps:
        row["status"] = "failed"
        notes.append(f"It ends at step {last:,} of {trail.n_steps:,}.")
    if not math.isfinite(row["loss"]):
        row["status"], row["loss"] = "failed", None
        notes.append("It diverged.")
    _complete(row)
    return row | {"note": " ".join(notes)}


def _complete(row: Row) -> None:
    """What follows from N, D and U, where they are known."""
    N, D, U = (row[name] for name in ("n_params", "train_tokens", "unique_tokens"))
    if D and U:
        row["epochs"] = row["epochs"] or D / U
    if N and D:
        row["flops_6nd"] = 6.0 * N * D
        row["train_flops"] = row["train_flops"] or row["flops_6nd"]


def _name(path: Path) -> str:
    return path.stem if path.is_file() else path.name


def _titan(path: Path) -> Iterator[Trail]:
    """One torchtitan log."""
    trail, batch = Trail(_name(path), path), None
    for line in _lines(path):
        line = COLOURS.sub("", line)
        for kind, kept in (("train", trail.train), ("validation", trail.held_out)):
            if found := TITAN[kind].search(line):
                kept[int(found[1])] = number(found[2])
        if found := TITAN["n_params"].search(line):
            trail.facts["n_params"] = int(number(found[1]))
        if found := TITAN["seq_len"].search(line):
            trail.facts["seq_len"] = int(found[1])
        if found := TITAN["batch"].search(line):
            batch = int(found[1])
        if found := TITAN["n_steps"].search(line):
            trail.n_steps = int(found[1])
    if batch and "seq_len" in trail.facts:
        trail.facts["tokens_per_step"] = batch * trail.facts["seq_len"]
    yield trail


def _megatron(path: Path) -> Iterator[Trail]:
    """One log of Megatron-LM or Megatron-DeepSpeed. N is summed over the ranks of the model it lists."""
    trail = Trail(_name(path), path)
    parts: dict[tuple[str, str], int] = {}
    for line in _lines(path):
        if found := MEGATRON["train"].search(line):
            trail.train[int(found[1])] = number(found[3])
            trail.n_steps = int(found[2])
            if samples := MEGATRON["samples"].search(line):
                trail.samples = int(samples[1])
            if rate := MEGATRON["rate"].search(line):
                trail.rates.append(number(rate[1]))
        elif found := MEGATRON["validation"].search(line):
            trail.held_out[int(found[1])] = number(found[2])
        elif found := MEGATRON["n_params"].search(line):
            parts[found[1], found[2]] = int(found[3])
        elif found := MEGATRON["seq_len"].search(line):
            trail.facts["seq_len"] = int(found[1])
    if parts:
        trail.facts["n_params"] = sum(parts.values())
    yield trail


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from file


def _tensorboard(path: Path) -> Iterator[Trail]:
    """Every folder of event files under `path`. The only use of TensorBoard's reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folders = sorted({file.parent for file in path.rglob("events.out.tfevents.*")})
    for folder in folders:
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        tags = events.Tags()["scalars"]

        def series(
            wanted: Sequence[str], events: Any = events, tags: Sequence[str] = tags
        ) -> dict[int, float]:
            tag = next((one for one in wanted if one in tags), None)
            return {} if tag is None else {event.step: event.value for event in events.Scalars(tag)}

        name = folder.parent.name if folder.name == "tensorboard" else folder.name
        trail = Trail(name, folder, series(TRAIN_TAGS), series(HELD_OUT_TAGS))
        trail.rates = [value for _, value in sorted(series(RATE_TAGS).items())]
        yield trail


def _wandb(path: Path) -> Iterator[Trail]:
    """One chart's CSV: Step, "run - metric", "run - metric__MIN", "run - metric__MAX", the next run."""
    table = read_table(path)
    step = next((name for name in ("Step", "_step", "trainer/global_step") if name in table), None)
    if step is None:
        raise ValueError(f"{path}: no column 'Step'; wanted a chart exported as CSV from Weights & Biases")
    trails: dict[str, Trail] = {}
    for name, cells in table.items():
        if name == step or name.endswith(("__MIN", "__MAX")):
            continue
        run, _, metric = name.rpartition(" - ")
        if "loss" not in metric.lower():
            continue
        trail = trails.setdefault(run or path.stem, Trail(run or path.stem, path))
        held_out = any(word in metric.lower() for word in ("val", "eval", "held", "test"))
        kept = trail.held_out if held_out else trail.train
        for i, (at, cell) in enumerate(zip(table[step], cells, strict=True), 1):
            if cell.strip():
                try:
                    kept[int(float(at))] = float(cell)
                except (ValueError, OverflowError):
                    raise ValueError(
                        f"{path}, row {i}: got step '{at[:20]}' and {name} '{cell[:20]}', expected numbers. "
                        "Export the chart again."
                    ) from None
    yield from trails.values()


READERS = {"torchtitan": _titan, "megatron": _megatron, "tensorboard": _tensorboard, "wandb": _wandb}


def _rows_of_csv(path: Path, renamed: Mapping[str, str], facts: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """A row for each line of a CSV, its columns by `renamed` ({ours: theirs}) or by our own names."""
    table = read_table(path)
    for ours, theirs in renamed.items():
        if ours not in COLUMNS:
            raise ValueError(f"--map {ours}: {nearest(ours, COLUMNS)}")
        if theirs not in table:
            raise ValueError(f"{path}: no column '{theirs}'; {nearest(theirs, list(table))}")
    names = {name: renamed.get(name, name) for name in COLUMNS if renamed.get(name, name) in table}
    if "loss" not in names:
        raise ValueError(f"{path}: no column of losses; say which one is, as --map loss=val_loss")
    rows = []
    for i in range(len(next(iter(table.values()), []))):
        row: Row = dict.fromkeys(COLUMNS) | {"run": f"{path.stem}-{i + 1}", "path": str(path)}
        for ours, theirs in names.items():
            row[ours] = _cell(table[theirs][i], ours, f"{path}, row {i + 1}, {theirs}")
        told = dict(facts.get("", {})) | dict(facts.get(str(row["run"]), {}))
        row |= {name: told[name] for name in FACTS if name in told and name in COLUMNS}
        row["objective"] = row["objective"] or "autoregressive"
        row["status"] = row["status"] or ("done" if row["loss"] is not None else "failed")
        _complete(row)
        rows.append(row | {"note": "" if row["loss"] is not None else "It has no loss."})
    return rows


def _cell(text: str, name: str, where: str) -> Any:
    """A cell as what the column holds; None where it is empty."""
    if not text.strip():
        return None
    if name not in NUMBERS:
        return text
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{where}: found '{text}', wanted a number; mend it") from None
    return value if math.isfinite(value) else None


def read_facts(path: Path) -> dict[str, dict[str, Any]]:
    """A CSV with a column `run` and columns of facts, by run."""
    table = read_table(path)
    if "run" not in table:
        raise ValueError(f"{path}: no column 'run'; {nearest('run', list(table))}")
    found: dict[str, dict[str, Any]] = {}
    for i, run in enumerate(table["run"]):
        cells = {name: table[name][i] for name in table if name != "run" and table[name][i].strip()}
        found[run] = {name: fact(name, cell) for name, cell in cells.items()}
    return found


def fact(name: str, text: str) -> Any:
    """A fact as number or word. ValueError for a number that is none."""
    if name in ("objective", "size"):
        return text
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name}: found '{text}', wanted a number") from None
    return int(value) if value.is_integer() else value
