"""Table of a study's runs and their cost, printed before anything is trained."""

import math
import textwrap
from collections import Counter
from collections.abc import Sequence

from megatron.cli import GAP, escape_controls, format_table
from megatron.plan.memory import estimate_memory
from megatron.plan.run_dir import is_done
from megatron.study.format import format_duration, format_plural
from megatron.study.ladder import PlannedRun, format_short
from megatron.study.price import Speed, makespan
from megatron.study.tariff import Tariff

WIDTH = 100  # columns of a terminal
MIN_NAME_WIDTH = 12
SHORT_OBJECTIVES = {"autoregressive": "AR", "masked_diffusion": "MD"}  # prefixes of run names
HEAD = ("run", "N", "tokens", "epochs", "steps", "FLOPs", "GiB")
UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def format_price_table(
    runs: Sequence[PlannedRun],
    speed: Speed,
    jobs: int,
    gpus_per_run: int = 1,
    tariff: Tariff | None = None,
) -> str:
    """Return the totals and one line per run, at most WIDTH columns wide.

    With a tariff, the totals include the time, money and energy of all devices.

    FLOPs are exact and for the whole training. Time and totals count only the
    steps that are trained: a branch trains only the steps after its branch
    point.
    """
    waiting = [run for run in runs if not is_done(run.folder, run.plan.identity)]
    lines = [*format_total(runs, waiting, speed, jobs, gpus_per_run, tariff), ""]
    longest = max((speed.seconds(run) for run in runs), default=0.0)
    # the largest unit in which the longest run takes at least 2
    # 1.5 h is shown as 90.0 min, 2 h as 2.0 h; one unit for the whole column,
    # so that rows are comparable
    scale, unit = next(((size, name) for size, name in UNITS if longest >= 2 * size), UNITS[-1])
    head = (*HEAD, f"time ({unit})", "status")
    lines += _align_columns(head, [_format_row(run, speed, gpus_per_run, scale) for run in runs])
    lines += _format_legend(runs)
    return "\n".join(lines)


def format_total(
    runs: Sequence[PlannedRun],
    waiting: Sequence[PlannedRun],
    speed: Speed,
    jobs: int,
    gpus_per_run: int,
    tariff: Tariff | None = None,
) -> list[str]:
    """Return time, runs, tokens and FLOPs of the remaining runs, the time's basis, and savings by trunks."""
    seconds = [speed.seconds(run) for run in waiting]
    tokens = sum(run.plan.tokens_per_step * run.trained_steps for run in waiting)
    flops = sum(run.trained_flops for run in waiting)
    wall_time = format_duration(makespan(seconds, jobs), estimate=True) if seconds else "0 s"
    together = f"about {wall_time} with {jobs} at a time"
    together += f" on {gpus_per_run} GPUs each" if gpus_per_run > 1 else ""
    lines = [
        f"{together}: {len(waiting)} of {len(runs)} runs to do, {format_short(tokens)} tokens, "
        f"{flops:.2e} FLOPs",
        f"({format_duration(sum(seconds), estimate=True)} one after another; expected from {speed.basis})",
    ]
    if tariff is not None and tariff.is_known and (cost := tariff.describe(sum(seconds) * gpus_per_run)):
        lines.append(cost)
    lines += _format_seeds(runs)
    return [part for line in lines for part in textwrap.wrap(line, WIDTH)]


def _format_seeds(runs: Sequence[PlannedRun]) -> list[str]:
    """Return a line with the number of cells by number of seeds; empty if every cell has one seed."""
    seeds: dict[str, set[int]] = {}
    for run in runs:
        # cell_identity is the hash without the seed
        seeds.setdefault(run.plan.cell_identity, set()).add(run.plan.seed)
    numbers = Counter(len(cell_seeds) for cell_seeds in seeds.values())
    if set(numbers) <= {1}:
        return []
    shown = [f"{n} of {len(seeds)} cells with {format_plural(k, 'seed')}" for k, n in sorted(numbers.items())]
    return [f"seeds: {', '.join(shown)}"]


def _format_row(run: PlannedRun, speed: Speed, gpus_per_run: int, scale: float) -> tuple[str, ...]:
    plan = run.plan
    seconds = speed.seconds(run)
    done = is_done(run.folder, plan.identity)
    marks = ("H" if run.held_out else "") + ("B" if run.branch and not done else "")
    return (
        _short_name(run),
        f"{plan.n_params:,}",
        format_short(plan.train_tokens),
        f"{plan.epochs:.2f}",
        f"{plan.n_steps:,}",
        f"{plan.train_flops:.2e}",
        f"{estimate_memory(run.config, gpus_per_run) / 2**30:.1f}",
        f"{seconds / scale:{'.1f' if seconds < 1e5 * scale else '.3g'}}" if math.isfinite(seconds) else "?",
        f"{'done' if done else 'to run'} {marks}".strip(),
    )


def _short_name(run: PlannedRun) -> str:
    objective, dash, rest = run.config.name.partition("-")
    return f"{SHORT_OBJECTIVES.get(objective, objective)}{dash}{rest}"


def _align_columns(head: Sequence[str], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return lines of aligned columns. Names are shortened in the middle so that lines fit WIDTH."""
    # only the name column can shrink: numbers are never cut
    # every column but the first is preceded by two spaces
    used = sum(max(map(len, column)) + GAP for column in list(zip(head, *rows, strict=True))[1:])
    room = max(WIDTH - used, MIN_NAME_WIDTH)
    shortened = [(_shorten_name(escape_controls(row[0]), room), *row[1:]) for row in rows]
    return format_table(head, shortened, ("run", "status"))


def _shorten_name(name: str, width: int) -> str:
    """Shorten a name to `width` characters: its beginning and end, with .. in the middle."""
    # width 12: 5 letters, "..", 5 letters: "AR-s48-250ktok-seed0" becomes
    # "AR-s4..seed0"
    head = (width - 2) // 2
    return name if len(name) <= width else f"{name[:head]}..{name[len(name) - (width - 2 - head) :]}"


def _format_legend(runs: Sequence[PlannedRun]) -> list[str]:
    words = []
    names = [run.config.name for run in runs]
    words += [
        f"{short}: {long.replace('_', ' ')}"
        for long, short in SHORT_OBJECTIVES.items()
        if any(name.startswith(f"{long}-") for name in names)
    ]
    if any(run.held_out for run in runs):
        words.append("H: held out of the fit")
    if any(run.branch for run in runs):
        words.append("B: branches from a longer run, time of its own steps")
    return textwrap.wrap("; ".join(words), WIDTH)
