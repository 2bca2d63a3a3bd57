"""Live table of a sweep on a terminal: running jobs, their progress and remaining time."""

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from megatron.study.format import format_duration
from megatron.study.launchers.launch import Job
from megatron.study.launchers.scheduler import SweepState

HEAD = ("running", "step", "of", "done", "loss", "tokens/s", "left")
MAX_ROWS = 20
REDRAW_INTERVAL_S = 0.5  # seconds between two redraws


class LiveTable:
    """Table that is redrawn in place. Without a terminal only `print_line` has output."""

    def __init__(self, out: TextIO = sys.stdout, clock: Callable[[], float] = time.monotonic) -> None:
        self.out, self.clock = out, clock
        self.is_live = out.isatty()
        self.n_lines = 0  # lines of the table on the screen
        self.last_draw_s = -REDRAW_INTERVAL_S

    def draw(self, state: SweepState) -> None:
        """Show the state, at most every REDRAW_INTERVAL_S."""
        if not self.is_live or self.clock() - self.last_draw_s < REDRAW_INTERVAL_S:
            return
        self.last_draw_s = self.clock()
        width = shutil.get_terminal_size().columns
        # A line of the full width or more would wrap onto two rows of the screen, and `clear` would move up
        # too few.
        lines = [line[: width - 1] for line in format_table_lines(state)]
        self.clear()
        self.out.write("".join(f"{line}\n" for line in lines))
        self.out.flush()
        self.n_lines = len(lines)

    def print_line(self, line: str) -> None:
        """Print a permanent line above the table."""
        self.clear()
        self.out.write(line + "\n")
        self.out.flush()

    def clear(self) -> None:
        """Erase the table from the screen."""
        if self.n_lines:
            # ANSI: move the cursor up n lines, then erase to the end of the screen
            self.out.write(f"\x1b[{self.n_lines}A\x1b[J")
            self.n_lines = 0


def format_table_lines(state: SweepState) -> list[str]:
    """Return one line per running job, and the counts of all runs."""
    rows = [HEAD, *(_format_row(job) for job in state.running[:MAX_ROWS])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    more = len(state.running) - MAX_ROWS
    lines += [f"and {more} more"] if more > 0 else []
    blocked = len(state.waiting) - len(state.find_ready())
    counts = f"{len(state.running)} running, {len(state.waiting)} waiting"
    counts += f" ({blocked} for their trunk)" if blocked else ""
    return [*lines, f"{counts}, {len(state.done)} done, {len(state.failed)} failed"]


def _format_row(job: Job) -> tuple[str, ...]:
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
