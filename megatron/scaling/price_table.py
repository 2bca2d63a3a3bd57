"""What the runs of a study are and cost, in a table for people, before anything is spent."""

import math
import textwrap
from collections import Counter
from collections.abc import Sequence

from megatron.run_dir import is_done
from megatron.scaling.conventions import training_flops_per_token
from megatron.scaling.ladder import PlannedRun, short_number
from megatron.scaling.memory import bytes_of
from megatron.scaling.price import Speed, duration, makespan
from megatron.scaling.wording import plural

WIDTH = 100  # columns of a terminal
SHORTEST_NAME = 12
SHORT = {"autoregressive": "AR", "masked_diffusion": "MD"}  # at the start of a run's name
OTHERS = {"6nd": "6ND", "kaplan": "Kaplan", "palm": "PaLM", "megatron": "Megatron",
          "chinchilla": "Chinchilla"}  # fmt: skip
HEAD = ("run", "N", "tokens", "epochs", "steps", "FLOPs", "GiB")
DETAILS = ("run", "unique", "batch", "lr", *OTHERS.values())
UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def price_table(
    runs: Sequence[PlannedRun], speed: Speed, jobs: int, gpus_per_run: int = 1, details: bool = False
) -> str:
    """The total first, then a line a run, at most WIDTH columns wide; `details` adds a second table.

    FLOPs are of the whole training, counted exactly; `details` has other conventions, batch and rate. Time
    and totals are of what is trained: a run that branches from a trunk trains its end alone.
    """
    waiting = [run for run in runs if not is_done(run.folder, run.plan.identity)]
    lines = [*_total(runs, waiting, speed, jobs, gpus_per_run), ""]
    longest = max((speed.seconds(run) for run in runs), default=0.0)
    scale, unit = next(((size, name) for size, name in UNITS if longest >= 2 * size), UNITS[-1])
    head = (*HEAD, f"time ({unit})", "status")
    lines += _aligned([head, *(_row(run, speed, gpus_per_run, scale) for run in runs)], len(head) - 1)
    lines += _legend(runs)
    if details:
        lines += ["", *_aligned([DETAILS, *map(_details, runs)])]
    return "\n".join(lines)


def _total(
    runs: Sequence[PlannedRun], waiting: Sequence[PlannedRun], speed: Speed, jobs: int, gpus_per_run: int
) -> list[str]:
    """Time, runs, tokens and FLOPs of what is left, what the time rests on, and what trunks save."""
    seconds = [speed.seconds(run) for run in waiting]
    tokens = sum(run.plan.tokens_per_step * run.own_steps for run in waiting)
    flops = sum(run.own_flops for run in waiting)
    together = f"about {duration(makespan(seconds, jobs)) if seconds else '0 s'} with {jobs} at a time"
    together += f" on {gpus_per_run} GPUs each" if gpus_per_run > 1 else ""
    lines = [
        f"{together}: {len(waiting)} of {len(runs)} runs to do, {short_number(tokens)} tokens, "
        f"{flops:.2e} FLOPs",
        f"({duration(sum(seconds))} one after another; expected from {speed.basis})",
    ]
    saved = sum(run.plan.train_flops for run in waiting) - flops
    if saved:
        lines.append(f"{saved:.2e} FLOPs more without shared trunks (share_trunks: false)")
    lines += _seeds(runs)
    return [part for line in lines for part in textwrap.wrap(line, WIDTH)]


def _seeds(runs: Sequence[PlannedRun]) -> list[str]:
    """How many cells have several seeds; nothing where none has."""
    seeds: dict[str, set[int]] = {}
    for run in runs:
        seeds.setdefault(run.plan.cell_identity, set()).add(run.plan.seed)
    numbers = Counter(len(each) for each in seeds.values())
    if set(numbers) <= {1}:
        return []
    shown = [f"{n} of {len(seeds)} cells with {plural(k, 'seed')}" for k, n in sorted(numbers.items())]
    return [f"seeds: {', '.join(shown)}"]


def _row(run: PlannedRun, speed: Speed, gpus_per_run: int, scale: float) -> tuple[str, ...]:
    plan = run.plan
    seconds = speed.seconds(run)
    done = is_done(run.folder, plan.identity)
    marks = ("H" if run.held_out else "") + ("B" if run.branch and not done else "")
    return (
        _name(run),
        f"{plan.n_params:,}",
        short_number(plan.train_tokens),
        f"{plan.epochs:.2f}",
        f"{plan.n_steps:,}",
        f"{plan.train_flops:.2e}",
        f"{bytes_of(run.config, gpus_per_run) / 2**30:.1f}",
        f"{seconds / scale:{'.1f' if seconds < 1e5 * scale else '.3g'}}" if math.isfinite(seconds) else "?",
        f"{'done' if done else 'to run'} {marks}".strip(),
    )


def _details(run: PlannedRun) -> tuple[str, ...]:
    plan = run.plan
    flops = training_flops_per_token(run.config.model, plan.seq_len)
    return (
        _name(run),
        short_number(plan.unique_tokens),
        f"{run.config.dataset.batch_size}",
        f"{run.config.optim.lr:.3g}",
        *(f"{flops[name] * plan.train_tokens:.2e}" for name in OTHERS),
    )


def _name(run: PlannedRun) -> str:
    objective, dash, rest = run.config.name.partition("-")
    return f"{SHORT.get(objective, objective)}{dash}{rest}"


def _aligned(rows: Sequence[tuple[str, ...]], left_from: int | None = None) -> list[str]:
    """Lines of cells in columns, names and the last column flush left; names are cut in the middle to fit."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    room = WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1)
    widths[0] = max(min(widths[0], room), SHORTEST_NAME)
    lines = []
    for row in rows:
        cells = [_cut(row[0], widths[0]).ljust(widths[0])]
        for i, (cell, width) in enumerate(zip(row[1:], widths[1:], strict=True), start=1):
            cells.append(cell if left_from is not None and i >= left_from else cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


def _cut(name: str, width: int) -> str:
    """At most `width` letters: the beginning and the end, with .. for the middle."""
    if len(name) <= width:
        return name
    head = (width - 2) // 2
    return f"{name[:head]}..{name[len(name) - (width - 2 - head) :]}"


def _legend(runs: Sequence[PlannedRun]) -> list[str]:
    words = []
    names = [run.config.name for run in runs]
    words += [
        f"{short}: {long.replace('_', ' ')}"
        for long, short in SHORT.items()
        if any(name.startswith(f"{long}-") for name in names)
    ]
    if any(run.held_out for run in runs):
        words.append("H: held out of the fit")
    if any(run.branch for run in runs):
        words.append("B: branches from a longer run, time of its own steps")
    return textwrap.wrap("; ".join(words), WIDTH)
