"""Progress of a job: bytes, files, documents, tokens and time left, from the reports of its workers."""

import threading
from types import TracebackType
from typing import Self

from megatron.cli import ProgressBar


class StoppedError(Exception):
    """Raised in a worker thread after `stop`: its result is not needed."""


class PieceProgress:
    """Context manager with a progress bar. Worker threads report the progress of their pieces by `update`."""

    def __init__(
        self, title: str, n_bytes: int | None, n_begun: int, quiet: bool, n_files: int = 1, n_read: int = 0
    ) -> None:
        """`n_bytes`: bytes of all pieces, None if unknown. `n_begun`: bytes of pieces finished earlier.

        Bytes are those on disk, of a packed file those of the file. `n_read`: files finished earlier.
        """
        self.n_files, self.n_read = n_files, n_read
        self.bar = ProgressBar(title, n_bytes, "B", n_begun, quiet)
        self._pieces: dict[int, tuple[int, int, int]] = {}
        self.n_documents = self.n_tokens = 0
        self._lock = threading.Lock()
        self._is_stopped = False

    def __enter__(self) -> Self:
        self.bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.__exit__(kind, error, trace)

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
            files = f"{self.n_read:,}/{self.n_files:,} files, " if self.n_files > 1 else ""
            self.bar.note = f"{files}{self.n_documents:,} documents, {self.n_tokens:,} tokens"
            self.bar.update(n_bytes - before[0])

    def stop(self) -> None:
        """Make the next `update` of every thread raise StoppedError."""
        # without the lock: `update` may wait for a slow terminal inside it, and a single assignment is atomic
        self._is_stopped = True
