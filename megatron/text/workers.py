"""Encoding of pieces by threads or processes, with one progress bar.

C++ encodes in threads: it releases the GIL while it reads, encodes and writes. A tokenizer's library encodes
in processes. A killed process is an error, and no process is left behind after its parent.
"""

import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Self

from megatron.cli import ProgressBar
from megatron.log import get_logger
from megatron.text.encode import encode_piece, ignore_progress
from megatron.text.inputs import STDIN
from megatron.text.text_readers import InputPiece
from megatron.text.units import UnitFolder, UnitRecord
from megatron.tokenizer.encoder import Encoder, FastEncoder, LibraryEncoder
from megatron.tokenizer.fast_bpe import FastBpe
from megatron.tokenizer.kinds import TokenizerSpec, load_tokenizer

log = get_logger(__name__)


class StoppedError(Exception):
    """Raised in a worker thread after the job has failed: its result is not needed."""


class PieceProgress:
    """Progress bar of a job. Worker threads report the progress of their pieces by `update`."""

    def __init__(self, title: str, sizes: Sequence[int], records: dict[int, UnitRecord], quiet: bool) -> None:
        """`sizes`: stored bytes of all pieces; all 0: unknown. `records`: pieces finished earlier."""
        self.bar = ProgressBar(title, sum(sizes) or None, "B", sum(sizes[i] for i in records), quiet)
        self._pieces = {i: (sizes[i], r.n_documents, sum(r.n_tokens)) for i, r in records.items()}
        self._n_documents = sum(n for _, n, _ in self._pieces.values())
        self._n_tokens = sum(n for _, _, n in self._pieces.values())
        self._lock = threading.Lock()
        self.is_stopped = False
        self.begin_s = time.monotonic()

    def __enter__(self) -> Self:
        self.bar.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.bar.__exit__(kind, error, trace)
        if kind is None and not self.bar.is_live and not self.bar.quiet:  # short jobs have no other line
            log.info("%s: %s in %.1f s", self.bar.title, self.bar.note, time.monotonic() - self.begin_s)

    def update(self, piece: int, n_bytes: int, n_documents: int, n_tokens: int) -> None:
        """Set the progress of a piece: totals since its start. Raises StoppedError after a failure."""
        with self._lock:
            if self.is_stopped:
                # the progress report is the only point at which a thread can be stopped within a piece
                raise StoppedError
            # callers report totals of a piece; the bar needs differences
            before, self._pieces[piece] = self._pieces.get(piece, (0, 0, 0)), (n_bytes, n_documents, n_tokens)
            self._n_documents += n_documents - before[1]
            self._n_tokens += n_tokens - before[2]
            self.bar.note = f"{self._n_documents:,} documents, {self._n_tokens:,} tokens"
            self.bar.update(n_bytes - before[0])


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


def _start_thread(recipe: EncoderRecipe) -> None:
    _worker.encoder = recipe.build()


def _start_process(recipe: EncoderRecipe) -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the parent receives them too, and kills its workers
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a worker"

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per worker
    _start_thread(recipe)


def _encode_number(
    number: int, piece: InputPiece, units: UnitFolder, progress: PieceProgress | None
) -> tuple[int, UnitRecord]:
    """Encode a piece in a worker."""
    on_progress = ignore_progress if progress is None else functools.partial(progress.update, number)
    return number, encode_piece(piece, units.path(number), units.settings, _worker.encoder, on_progress)


def encode_pieces(
    pieces: dict[int, InputPiece], units: UnitFolder, recipe: EncoderRecipe, n_workers: int,
    progress: PieceProgress,
) -> Generator[tuple[int, UnitRecord], None, None]:  # fmt: skip
    """Encode pieces; yield number and record in the order of completion.

    Raises the exception of a piece, or ChildProcessError if a process was killed. Then, and when the
    generator is closed, workers are stopped.
    """
    n_workers = min(n_workers, len(pieces))
    if n_workers < 2 or any(piece.path == STDIN for piece in pieces.values()):
        _start_thread(recipe)  # in the main thread: only there a signal interrupts a read of a pipe
        for number, piece in pieces.items():
            yield _encode_number(number, piece, units, progress)
        return
    pool: Executor
    others = set(multiprocessing.active_children())
    if recipe.fast is None:
        # spawn: a fork would copy locks that other threads of the parent may hold
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(n_workers, context, _start_process, (recipe,))
    else:
        pool = ThreadPoolExecutor(n_workers, "encode", _start_thread, (recipe,))
    reported = None if recipe.fast is None else progress  # it has a lock, which processes cannot share
    try:
        futures = [
            pool.submit(_encode_number, number, piece, units, reported) for number, piece in pieces.items()
        ]
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a worker ended before it finished, perhaps out of memory. Run the same command again, with "
            "fewer workers, to resume."
        ) from error
    finally:
        progress.is_stopped = True  # running threads raise StoppedError at their next progress report
        if recipe.fast is None:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.kill()  # the unit that it writes is written again
        pool.shutdown(wait=True, cancel_futures=True)
