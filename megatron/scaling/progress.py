"""A live table of a sweep on a terminal: what runs, how far, and how long it will take."""

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from megatron.scaling.follow import Progress
from megatron.scaling.launch import Job
from megatron.scaling.price import duration

HEAD = ("running", "step", "of", "done", "loss", "tokens/s", "left")
MOST_ROWS = 20
FADE_S = 0.5  # between two drawings


class LiveTable:
    """Redraws itself in place; on what is no terminal it draws nothing and lines are printed as they come."""

    def __init__(self, out: TextIO = sys.stdout, clock: Callable[[], float] = time.monotonic) -> None:
        self.out, self.clock = out, clock
        self.is_live = out.isatty()
        self.drawn = 0  # lines on the screen that are the table's
        self.last = -FADE_S

    def draw(self, state: Progress) -> None:
        """Show the state, twice a second at most."""
        if not self.is_live or self.clock() - self.last < FADE_S:
            return
        self.last = self.clock()
        width = shutil.get_terminal_size().columns
        lines = [line[: width - 1] for line in table_lines(state)]
        self.clear()
        self.out.write("".join(f"{line}\n" for line in lines))
        self.out.flush()
        self.drawn = len(lines)

    def say(self, line: str) -> None:
        """Print a line that stays, above the table."""
        self.clear()
        self.out.write(line + "\n")
        self.out.flush()

    def clear(self) -> None:
        """Take the table off the screen."""
        if self.drawn:
            self.out.write(f"\x1b[{self.drawn}A\x1b[J")
            self.drawn = 0


def table_lines(state: Progress) -> list[str]:
    """One line for each running job, and the counts of all."""
    rows = [HEAD, *(_row(job) for job in state.running[:MOST_ROWS])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    more = len(state.running) - MOST_ROWS
    lines += [f"and {more} more"] if more > 0 else []
    blocked = len(state.waiting) - len(state.ready())
    counts = f"{len(state.running)} running, {len(state.waiting)} waiting"
    counts += f" ({blocked} for their trunk)" if blocked else ""
    return [*lines, f"{counts}, {len(state.done)} done, {len(state.failed)} failed"]


def _row(job: Job) -> tuple[str, ...]:
    told, plan = job.progress(), job.run.plan
    step, loss, tps = told.get("step", 0), told.get("loss"), told.get("tps")
    left = duration((plan.n_steps - step) * plan.tokens_per_step / tps) if tps else "?"
    return (
        f"{job.run.config.name}{' (another process)' if job.elsewhere else ''}",
        f"{step:,}",
        f"{plan.n_steps:,}",
        f"{job.fraction():.0%}",
        f"{loss:.4f}" if isinstance(loss, float) else "",
        f"{tps:,.0f}" if tps else "",
        left,
    )
