"""Encoding of pieces by threads, with one progress bar.

C++ and the libraries of tokenizers release the GIL while they encode.
"""

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

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


def encoder_builder(
    tokenizer: TokenizerSpec | str, fast: FastBpe | None, special_text: bool
) -> Callable[[], Encoder]:
    """Return a function that builds the encoder of a thread, which has a cache and buffers.

    fast   the C++ encoder of the tokenizer; None: use its library
    """
    if fast is not None:
        return partial(FastEncoder, fast, special_text)
    return lambda: LibraryEncoder(load_tokenizer(tokenizer), special_text)


_worker = threading.local()  # its encoder


def _start_worker(build: Callable[[], Encoder]) -> None:
    _worker.encoder = build()


def encode_pieces(
    pieces: dict[int, InputPiece], units: UnitFolder, build: Callable[[], Encoder], n_workers: int,
    bar: ProgressBar,
) -> Generator[UnitRecord, None, None]:  # fmt: skip
    """Encode pieces; yield their records in order. `bar` shows the bytes that were read.

    Raises the exception of the first piece that has one.
    Then, and when the generator is closed, workers are stopped.
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
        _start_worker(build)  # in the main thread: only there a signal interrupts a read of a pipe
        yield from map(encode, pieces)
        return
    with ThreadPoolExecutor(n_workers, "encode", _start_worker, (build,)) as pool:
        try:
            for future in [pool.submit(encode, number) for number in pieces]:
                yield future.result()
        finally:
            is_stopped.set()  # running threads raise StoppedError at their next progress report
            pool.shutdown(cancel_futures=True)
