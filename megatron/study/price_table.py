"""Table of a study's runs and their cost, printed before anything is trained."""

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
HEAD = ("run", "N", "tokens", "epochs", "steps", "FLOPs", "GiB", "time", "status")


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
    lines += _align_columns(HEAD, [_format_row(run, speed, gpus_per_run) for run in runs])
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
    lines += [(tariff or Tariff()).describe(sum(seconds) * gpus_per_run), *_format_seeds(runs)]
    return [part for line in lines for part in textwrap.wrap(line, WIDTH)]


def _format_seeds(runs: Sequence[PlannedRun]) -> list[str]:
    """Return a line with the number of cells by number of seeds; empty if every cell has one seed."""
    # cell_identity is the hash without the seed
    n_seeds = Counter(cell for cell, _ in {(run.plan.cell_identity, run.plan.seed) for run in runs})
    if max(n_seeds.values(), default=1) == 1:
        return []
    numbers = sorted(Counter(n_seeds.values()).items())
    shown = [f"{n} of {len(n_seeds)} cells with {format_plural(k, 'seed')}" for k, n in numbers]
    return [f"seeds: {', '.join(shown)}"]


def _format_row(run: PlannedRun, speed: Speed, gpus_per_run: int) -> tuple[str, ...]:
    plan = run.plan
    done = is_done(run.folder, plan.identity)
    marks = ("H" if run.held_out else "") + ("B" if run.branch and not done else "")
    objective, dash, rest = run.config.name.partition("-")
    return (
        f"{SHORT_OBJECTIVES.get(objective, objective)}{dash}{rest}",
        f"{plan.n_params:,}",
        format_short(plan.train_tokens),
        f"{plan.epochs:.2f}",
        f"{plan.n_steps:,}",
        f"{plan.train_flops:.2e}",
        f"{estimate_memory(run.config, gpus_per_run) / 2**30:.1f}",
        format_duration(speed.seconds(run), estimate=True),
        f"{'done' if done else 'to run'} {marks}".strip(),
    )


def _align_columns(head: Sequence[str], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return lines of aligned columns. Names are shortened in the middle so that lines fit WIDTH."""
    # only the name column can shrink: numbers are never cut
    # every column but the first is preceded by two spaces
    used = sum(max(map(len, column)) + GAP for column in list(zip(head, *rows, strict=True))[1:])
    half = max(WIDTH - used, MIN_NAME_WIDTH) // 2 - 1
    # half = 5: "AR-s48-250ktok-seed0" becomes "AR-s4..seed0"
    names = [escape_controls(row[0]) for row in rows]
    names = [name if len(name) <= 2 * half + 2 else f"{name[:half]}..{name[-half:]}" for name in names]
    shortened = [(name, *row[1:]) for name, row in zip(names, rows, strict=True)]
    return format_table(head, shortened, ("run", "status"))


def _format_legend(runs: Sequence[PlannedRun]) -> list[str]:
    objectives = {run.plan.objective for run in runs}
    shorts = [(short, name) for name, short in SHORT_OBJECTIVES.items() if name in objectives]
    words = [f"{short}: {name.replace('_', ' ')}" for short, name in shorts]
    if any(run.held_out for run in runs):
        words.append("H: held out of the fit")
    if any(run.branch for run in runs):
        words.append("B: branches from a longer run, time of its own steps")
    return textwrap.wrap("; ".join(words), WIDTH)
