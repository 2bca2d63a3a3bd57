"""Encoding of pieces by threads, with one progress bar.

C++ and the libraries of tokenizers release the GIL while they encode.
"""

import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
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


def encode_pieces(
    pieces: dict[int, InputPiece], units: UnitFolder, recipe: EncoderRecipe, n_workers: int, bar: ProgressBar
) -> Generator[UnitRecord, None, None]:
    """Encode pieces; yield their records in order. `bar` shows the bytes that were read.

    Raises the exception of the first piece that has one. Then, and when the generator is closed,
    workers are stopped.
    """
    lock, is_stopped = threading.Lock(), threading.Event()

    def encode(number: int) -> UnitRecord:
        piece, n_before = pieces[number], 0

        def show(n_bytes: int) -> None:
            nonlocal n_before
            if is_stopped.is_set():  # the only point at which a thread can be stopped within a piece
                raise StoppedError
            with lock:
                bar.update(n_bytes - n_before)
            n_before = n_bytes

        record = encode_piece(piece, units.path(number), units.settings, _worker.encoder, show)
        if piece.path != STDIN:
            show(piece.end - piece.begin)  # not each reader reports what it reads
        return record

    n_workers = min(n_workers, len(pieces))
    if n_workers < 2 or any(piece.path == STDIN for piece in pieces.values()):
        _start_worker(recipe)  # in the main thread: only there a signal interrupts a read of a pipe
        yield from map(encode, pieces)
        return
    with ThreadPoolExecutor(n_workers, "encode", _start_worker, (recipe,)) as pool:
        try:
            for future in [pool.submit(encode, number) for number in pieces]:
                yield future.result()
        finally:
            is_stopped.set()  # running threads raise StoppedError at their next progress report
            pool.shutdown(cancel_futures=True)
