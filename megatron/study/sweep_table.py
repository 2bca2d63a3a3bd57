"""Live table of a sweep on a terminal: running jobs, their progress and remaining time."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from megatron.study.format import format_duration
from megatron.study.launchers.launch import Job
from megatron.study.launchers.scheduler import SweepState
from megatron.terminal import LiveView

HEAD = ("running", "step", "of", "done", "loss", "tokens/s", "left")
MAX_ROWS = 20
REDRAW_INTERVAL_S = 0.5  # seconds between two redraws


class LiveTable:
    """Table that is redrawn in place. Without a terminal only `print_line` has output."""

    def __init__(self, out: TextIO = sys.stdout, clock: Callable[[], float] = time.monotonic) -> None:
        self.view, self.clock = LiveView(out), clock
        self.last_draw_s = -REDRAW_INTERVAL_S

    def draw(self, state: SweepState) -> None:
        """Show the state, at most every REDRAW_INTERVAL_S."""
        if not self.view.is_live or self.clock() - self.last_draw_s < REDRAW_INTERVAL_S:
            return
        self.last_draw_s = self.clock()
        rows = [format_job_row(job) for job in state.running[:MAX_ROWS]]
        self.view.show(HEAD, rows, ("running",), format_counts(state))

    def print_line(self, line: str) -> None:
        """Print a permanent line above the table."""
        self.view.print_line(line)

    def clear(self) -> None:
        """Erase the table from the screen."""
        self.view.close()


def format_counts(state: SweepState) -> list[str]:
    """Return the lines below the table: running jobs that it does not show, and the counts of all runs."""
    more = len(state.running) - MAX_ROWS
    lines = [f"and {more} more"] if more > 0 else []
    blocked = len(state.waiting) - len(state.find_ready())
    counts = f"{len(state.running)} running, {len(state.waiting)} waiting"
    counts += f" ({blocked} for their trunk)" if blocked else ""
    return [*lines, f"{counts}, {len(state.done)} done, {len(state.failed)} failed"]


def format_job_row(job: Job) -> tuple[str, ...]:
    """Return the cells of a running job, in the order of HEAD."""
    record, plan = job.last_record(), job.run.plan
    step, loss, tps = record.get("step", 0), record.get("loss"), record.get("tps")
    left = format_duration((plan.n_steps - step) * plan.tokens_per_step / tps, estimate=True) if tps else "?"
    return (
        f"{job.run.config.name}{' (another process)' if job.is_external else ''}",
        f"{step:,}",
        f"{plan.n_steps:,}",
        f"{job.fraction_done():.0%}",
        f"{loss:.4f}" if isinstance(loss, float) else "",
        f"{tps:,.0f}" if tps else "",
        left,
    )
