"""Progress bar over all pieces of a job, and a way to stop threads within a piece."""

import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from tqdm import tqdm


class StoppedError(Exception):
    """Raised in a worker thread after `stop`: its result is not needed."""


class ProgressBar:
    """Context manager with a progress bar. Worker threads report the progress of their pieces by `update`."""

    def __init__(self, title: str, n_bytes: int | None, n_begun: int, quiet: bool) -> None:
        """`n_bytes`: bytes of all pieces, None if unknown. `n_begun`: bytes of pieces finished earlier."""
        self.title, self.n_bytes, self.n_begun = title, n_bytes, n_begun
        self.is_shown = not quiet and sys.stderr.isatty()
        self.bar: tqdm | None = None
        self._pieces: dict[int, tuple[int, int, int]] = {}
        self.n_documents = self.n_tokens = 0
        self._lock = threading.Lock()
        self._is_stopped = False

    def __enter__(self) -> Self:
        if self.is_shown:
            from tqdm import tqdm  # slow to import, and not needed without a terminal

            self.bar = tqdm(
                total=self.n_bytes, initial=self.n_begun, unit="B", unit_scale=True, desc=self.title
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.close()

    def update(self, piece: int, n_bytes: int, n_documents: int, n_tokens: int) -> None:
        """Set the progress of a piece: totals since its start. Raises StoppedError after `stop`."""
        with self._lock:
            if self._is_stopped:
                # the progress report is the only point at which a thread can be stopped within a piece
                raise StoppedError
            # callers report totals of a piece; the bar needs differences
            before, now = self._pieces.get(piece, (0, 0, 0)), (n_bytes, n_documents, n_tokens)
            self._pieces[piece] = now
            self.n_documents += n_documents - before[1]
            self.n_tokens += n_tokens - before[2]
            if self.bar is not None:
                text = f"{self.n_documents:,} documents, {self.n_tokens:,} tokens"
                self.bar.set_postfix_str(text, refresh=False)
                self.bar.update(n_bytes - before[0])

    def stop(self) -> None:
        """Make the next `update` of every thread raise StoppedError."""
        # without the lock: `update` may wait for a slow terminal inside it, and a single assignment is atomic
        self._is_stopped = True
