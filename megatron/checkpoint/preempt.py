"""Stop requests: signals, the stop file, and the time limit of a run."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from megatron.cli import replace_lost_terminal, stop_signals


class StopMonitor:
    """Records whether a stop was requested, and why.

    reason   signal name, stop file or time limit; None if no stop was requested
    """

    def __init__(self, stop_file: Path | None, max_hours: float | None = None) -> None:
        """Start counting `max_hours` now."""
        self.stop_file = stop_file
        self.max_hours = max_hours
        # not time.time(): a correction of the wall
        # clock must not end or extend the run
        self.started = time.monotonic()
        self.reason: str | None = None

    def should_stop(self) -> bool:
        """Return True if this rank has received a request to save and stop."""
        # the file may be on a network file system; after
        # the first request it is not looked up again
        if self.reason is None and self.stop_file is not None and self.stop_file.exists():
            self.reason = f"stop file {self.stop_file}"
        hours = (time.monotonic() - self.started) / 3600
        if self.reason is None and self.max_hours is not None and hours >= self.max_hours:
            self.reason = f"misc.max_hours={self.max_hours:g}"
        return self.reason is not None


@contextmanager
def watch_for_stop(stop_file: str | None, max_hours: float | None = None) -> Iterator[StopMonitor]:
    """Turn SIGTERM, SIGUSR1, SIGHUP and the first SIGINT into stop requests; a second SIGINT interrupts."""
    stop = StopMonitor(None if stop_file is None else Path(stop_file), max_hours)

    # The handler only sets a flag, because a signal can interrupt any statement.
    # The training loop polls it between steps, where the state can be saved.
    def record_signal(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and stop.reason is not None:
            raise KeyboardInterrupt
        stop.reason = signal.Signals(number).name
        # The terminal is gone: writing to it would raise an error.
        if number == signal.SIGHUP:
            replace_lost_terminal()

    # Batch systems can send SIGUSR1 before
    # the time limit (sbatch --signal=USR1@120),
    # and send SIGTERM shortly before SIGKILL.
    # signal.signal is allowed in the main thread only.
    previous_handlers = {
        number: signal.signal(number, record_signal) for number in stop_signals(signal.SIGUSR1)
    }
    try:
        yield stop
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
