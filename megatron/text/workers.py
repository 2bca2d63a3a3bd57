"""Encoding of pieces by threads, with one progress bar.

C++ and the libraries of tokenizers release the GIL while they encode.
"""

import functools
import threading
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from megatron.cli import ProgressBar
from megatron.text.encode import encode_piece
from megatron.text.inputs import STDIN
from megatron.text.text_readers import InputPiece
from megatron.text.units import UnitFolder, UnitRecord
from megatron.tokenizer.encoder import Encoder, FastEncoder, LibraryEncoder
from megatron.tokenizer.fast_bpe import FastBpe
from megatron.tokenizer.kinds import TokenizerSpec, load_tokenizer


class StoppedError(Exception):
    """Raised in a worker thread after the job has failed: its result is not needed."""


class PieceProgress:
    """Progress of a job. Worker threads report the bytes read of their pieces by `update`."""

    def __init__(self, bar: ProgressBar) -> None:
        self.bar, self.is_stopped = bar, False
        self._n_bytes, self._lock = Counter[int](), threading.Lock()

    def update(self, piece: int, n_bytes: int) -> None:
        """Set the bytes read of a piece. Raises StoppedError after a failure."""
        with self._lock:
            if self.is_stopped:
                # the progress report is the only point at
                # which a thread can be stopped within a piece
                raise StoppedError
            # callers report totals of a piece; the bar needs differences
            self.bar.update(n_bytes - self._n_bytes[piece])
            self._n_bytes[piece] = n_bytes


@dataclass(frozen=True)
class EncoderRecipe:
    """Source of the encoder of a worker. `fast` None: the library of the tokenizer."""

    tokenizer: TokenizerSpec | str
    fast: FastBpe | None
    special_text: bool

    def build(self) -> Encoder:
        """Return an encoder for one thread: it has a cache and buffers."""
        if self.fast is not None:
            return FastEncoder(self.fast, self.special_text)
        return LibraryEncoder(load_tokenizer(self.tokenizer), self.special_text)


_worker = threading.local()  # its encoder


def _start_worker(recipe: EncoderRecipe) -> None:
    _worker.encoder = recipe.build()


def _encode_number(
    number: int, piece: InputPiece, units: UnitFolder, progress: PieceProgress
) -> tuple[int, UnitRecord]:
    """Encode a piece in a worker."""
    on_read = functools.partial(progress.update, number)
    return number, encode_piece(piece, units.path(number), units.settings, _worker.encoder, on_read)


def encode_pieces(
    pieces: dict[int, InputPiece], units: UnitFolder, recipe: EncoderRecipe, n_workers: int,
    progress: PieceProgress,
) -> Generator[tuple[int, UnitRecord], None, None]:  # fmt: skip
    """Encode pieces; yield number and record in the order of completion.

    Raises the exception of a piece. Then, and when the generator is closed, workers are stopped.
    """
    n_workers = min(n_workers, len(pieces))
    if n_workers < 2 or any(piece.path == STDIN for piece in pieces.values()):
        _start_worker(recipe)  # in the main thread: only there a signal interrupts a read of a pipe
        for number, piece in pieces.items():
            yield _encode_number(number, piece, units, progress)
        return
    with ThreadPoolExecutor(n_workers, "encode", _start_worker, (recipe,)) as pool:
        try:
            futures = [
                pool.submit(_encode_number, number, piece, units, progress)
                for number, piece in pieces.items()
            ]
            for future in as_completed(futures):
                yield future.result()
        finally:
            progress.is_stopped = True  # running threads raise StoppedError at their next progress report
            pool.shutdown(cancel_futures=True)
