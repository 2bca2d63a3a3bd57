"""When to save and stop: signals, the stop file, and the time that a run has."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from megatron.processes import replace_lost_terminal, stop_signals


class Stop:
    """Remembers that somebody asked the run to stop."""

    def __init__(self, stop_file: Path | None, max_hours: float | None = None) -> None:
        """The hours count from now."""
        self.stop_file = stop_file
        self.max_hours = max_hours
        self.started = time.monotonic()
        self.reason: str | None = None

    def asked(self) -> bool:
        """Whether to save and stop, as far as this process knows."""
        if self.reason is None and self.stop_file is not None and self.stop_file.exists():
            self.reason = f"stop file {self.stop_file}"
        hours = (time.monotonic() - self.started) / 3600
        if self.reason is None and self.max_hours is not None and hours >= self.max_hours:
            self.reason = f"misc.max_hours={self.max_hours:g}"
        return self.reason is not None


@contextmanager
def watch_for_stop(stop_file: str | None, max_hours: float | None = None) -> Iterator[Stop]:
    """Turn SIGTERM, SIGUSR1, SIGHUP and the first SIGINT into a wish to stop; the second SIGINT ends."""
    stop = Stop(None if stop_file is None else Path(stop_file), max_hours)

    def remember(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and stop.reason is not None:
            raise KeyboardInterrupt
        stop.reason = signal.Signals(number).name
        if number == signal.SIGHUP:
            replace_lost_terminal()

    before = {number: signal.signal(number, remember) for number in stop_signals(signal.SIGUSR1)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
