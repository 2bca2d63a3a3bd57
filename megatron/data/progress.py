"""How far work on pieces is, as one bar on a terminal, and a way to end it within a piece."""

import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from tqdm import tqdm


class EndedError(Exception):
    """Raised in a thread whose piece nobody waits for any more."""


class Progress:
    """A context manager around the work. Threads tell it how far their pieces are."""

    def __init__(self, title: str, n_bytes: int | None, n_begun: int, quiet: bool) -> None:
        """Bytes of all pieces, None where that is not known, and of those done before."""
        self.title, self.n_bytes, self.n_begun = title, n_bytes, n_begun
        self.is_shown = not quiet and sys.stderr.isatty()
        self.bar: tqdm | None = None
        self._pieces: dict[int, tuple[int, int, int]] = {}
        self.n_documents = self.n_tokens = 0
        self._lock = threading.Lock()
        self._is_ended = False

    def __enter__(self) -> Self:
        if self.is_shown:
            from tqdm import tqdm  # slow to import, and a log wants no bar

            self.bar = tqdm(
                total=self.n_bytes, initial=self.n_begun, unit="B", unit_scale=True, desc=self.title
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.close()

    def hear(self, piece: int, n_bytes: int, n_documents: int, n_tokens: int) -> None:
        """Take note of how much of a piece is done. EndedError once `end` was called."""
        with self._lock:
            if self._is_ended:
                raise EndedError
            before, now = self._pieces.get(piece, (0, 0, 0)), (n_bytes, n_documents, n_tokens)
            self._pieces[piece] = now
            self.n_documents += n_documents - before[1]
            self.n_tokens += n_tokens - before[2]
            if self.bar is not None:
                told = f"{self.n_documents:,} documents, {self.n_tokens:,} tokens"
                self.bar.set_postfix_str(told, refresh=False)
                self.bar.update(n_bytes - before[0])

    def end(self) -> None:
        """Let every thread end at its next `hear`."""
        self._is_ended = True
