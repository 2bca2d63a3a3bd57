"""Text to tokens on disk, on many cores, in the order of the input, from where it stopped.

The input is cut into pieces. Each becomes a shard in a folder beside the output, by a thread where the C++
encoder is exact for the tokenizer, else by a process; the shards are joined in order. No ids travel between
processes.
"""

import functools
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import local
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.data.damage import DamagedFileError
from megatron.data.documents import STDIN, Piece, cut, find_inputs, named
from megatron.data.encode_piece import Hear, encode_piece, ignore
from megatron.data.indexed_writer import dtype_for, publish
from megatron.data.join import (
    Joining,
    Output,
    Rejected,
    finished,
    is_of_job,
    may_go_on,
    pair_prefix,
    rejects_of,
)
from megatron.data.output_names import check_free, dataset_files
from megatron.data.progress import Progress
from megatron.data.shards import Done, Shards, job_of
from megatron.data.sink import Settings
from megatron.log import get_logger
from megatron.run_dir import FULL
from megatron.tokenizer.encoder import NO_EOD, Encoder, FastEncoder, LibraryEncoder, fast_of
from megatron.tokenizer.eod import Eod
from megatron.tokenizer.fast_bpe import FastBpe
from megatron.tokenizer.kinds import Tokenizer, TokenizerSpec, load

if TYPE_CHECKING:
    pass

PIECE_BYTES = 8 << 20
INDEX_BYTES = 24  # of a document: 20 in the index, 4 in the spool of lengths

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to make of the input. `special_text`: a special token's text becomes its id, as in tokenizers.

    overwrite   replace outputs that another job has made
    """

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    special_text: bool = True
    skip_bad_lines: bool = False
    max_tokens: int | None = None
    n_workers: int = 1
    quiet: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class Totals:
    """What came out, an output for each key."""

    outputs: list[Output]
    rejected: Rejected
    cpu_s: dict[str, float]  # CPU seconds of this process by stage

    @property
    def n_rejected(self) -> int:
        """Lines that were passed over."""
        return self.rejected.n_lines

    @property
    def rejects(self) -> Path | None:
        """The file that lists what was passed over, if anything was."""
        return self.rejected.path


def preprocess(
    inputs: Sequence[str], prefix: Path, tokenizer: TokenizerSpec | str, options: Options
) -> Totals:
    """Tokenise the documents of `inputs` into `<prefix>_<key>_document.bin/.idx/.json`, one triple a key.

    Killed at any moment, the same call goes on from the last finished piece, and the outputs are byte for
    byte those of an undisturbed one. `max_tokens` keeps the fewest first documents that reach so many (of
    the first key). A blank line is no document. An empty text is one, without tokens or with the
    end-of-document token alone, and the sidecar counts those.

    Raises FileNotFoundError, and ValueError with file, line and reason for a line that is not JSON, has no
    such key or no string under it, unless those are skipped, or where there is no document at all; OSError
    for a full disk. Then no output exists that was not there, and none that was has changed.
    """
    clock = _Clock()
    paths = find_inputs(inputs)
    _check(options, prefix, paths)
    known = load(tokenizer)
    settings = _settings(known, options)
    made_by = [known.sha256, settings.eod, settings.dtype, options.special_text, options.skip_bad_lines]
    if known.eod is not None and known.eod.source.startswith("--"):
        made_by.append(known.eod.id)  # the sidecar tells it, whether documents end with it or not
    job = job_of(paths, [*made_by, options.max_tokens, *options.keys])
    shards = Shards(prefix.with_name(f".{prefix.name}.shards"), options.keys)
    with shards.take(prefix):
        if shards.is_prepared(job):  # killed while the outputs got their names
            for key in options.keys:
                publish(pair_prefix(prefix, key), shards.folder)
        if found := finished(prefix, options.keys, job):
            shards.remove()
            log.info("%s: is there already, made of the same files in the same way", prefix)
            return Totals(*found, clock.cpu_s)
        if not options.overwrite:
            _refuse_to_replace(prefix, options.keys, job, shards)
        if options.append_eod and known.eod is not None:
            log.info("documents end with id %d (%s)", known.eod_id, _words_of(known.eod))
        fast = _fast_of(known)
        clock.lap("tokenizer")
        pieces = cut(paths, PIECE_BYTES)
        about = {"append_eod": options.append_eod, "special_text": options.special_text} | _about(known)
        done = shards.open_folder(pieces, job)
        try:
            joining = Joining(
                pieces, shards, prefix, np.dtype(settings.dtype), about, options.max_tokens, done
            )
            with joining:
                _Work(pieces, shards, settings, options, tokenizer, fast, done, joining).run()
                _check_any(inputs, pieces, done)
                rejected = joining.finish(paths, job)
                clock.lap("encoding, joining and sums")
        except Exception as error:
            if isinstance(error, OSError) and error.errno in FULL:
                error.n_bytes = _bytes_needed(pieces, done)  # type: ignore[attr-defined]  # for room_in
            if not may_go_on(error):
                shards.remove()
            raise
        shards.remove()
    clock.lap("names")
    if options.max_tokens is not None and not joining.has_enough:
        wanted = f"{options.max_tokens:,}"
        log.warning("%s: holds less than the %s tokens asked for; all is kept", named(inputs), wanted)
    return Totals(joining.outputs(), rejected, clock.cpu_s)


def _refuse_to_replace(prefix: Path, keys: Sequence[str], job: str | None, shards: Shards) -> None:
    """ValueError where an output of another job is there; no new folder is left then.

    What is left of an output of the same job, of which a file was changed or deleted, is made again.
    """
    try:
        for key in keys:
            if not is_of_job(pair_prefix(prefix, key), job):
                check_free(*dataset_files(pair_prefix(prefix, key)))
    except ValueError:
        if not shards.has_begun():
            shards.remove()
        raise


def _bytes_needed(pieces: Sequence[Piece], done: dict[int, Done]) -> int | None:
    """Bytes of output that are still to come, in the proportion of what is done; None where nothing is."""
    sizes = [piece.end - piece.begin for piece in pieces]
    n_read = sum(sizes[number] for number in done)
    if not n_read:
        return None
    n_written = sum(one.n_bytes + INDEX_BYTES * one.n_documents for one in done.values())
    return n_written * (sum(sizes) - n_read) // n_read


def _words_of(end: Eod) -> str:
    return end.source if end.token is None else f"{end.token}, {end.source}"


def _fast_of(known: Tokenizer) -> FastBpe | None:
    """The C++ encoder; None, with a warning, where only the tokenizer's library is exact."""
    fast, reason = fast_of(known)
    if fast is None:
        log.warning(
            "%s: encoded by its own library, which took some 60 times the CPU time of C++ where it was "
            "measured, as %s", known.name, reason,
        )  # fmt: skip
    return fast


def _check_any(inputs: Sequence[str], pieces: Sequence[Piece], done: dict[int, Done]) -> None:
    """ValueError where the inputs have neither a document nor a line that was rejected."""
    if any(one.n_documents or one.n_rejected for one in done.values()):
        return
    damaged = [(pieces[i].path, one.damage) for i, one in sorted(done.items()) if one.damage is not None]
    if damaged:
        raise DamagedFileError(*damaged[0])
    raise ValueError(f"{named(inputs)}: no document there; what made it may have failed")


def _settings(known: Tokenizer, options: Options) -> Settings:
    """What every piece is encoded with."""
    return Settings(
        eod=known.eod_id if options.append_eod else NO_EOD,
        dtype=dtype_for(known.n_tokens).str,
        skip_bad_lines=options.skip_bad_lines,
        enough=options.max_tokens,
    )


def _check(options: Options, prefix: Path, paths: Sequence[Path]) -> None:
    """ValueError for options that make no sense together, and for an output that is an input."""
    if options.n_workers < 1:
        raise ValueError(f"workers: found {options.n_workers}, wanted 1 or more")
    if len(set(options.keys)) < len(options.keys):
        raise ValueError(f"json keys: {', '.join(options.keys)} has one twice; an output is made for each")
    for key in options.keys:
        if "/" in key:
            raise ValueError(
                f"json keys: '{key}' has a slash, which no file may have in its name; rename the key"
            )
    outputs = {Path(f"{pair_prefix(prefix, key)}.json").resolve() for key in options.keys}
    for path in paths:
        if path.resolve() in outputs | {rejects_of(prefix).resolve()}:
            raise ValueError(
                f"{path}: is an input, and would be written over; choose another --output-prefix"
            )


def _about(tokenizer: Tokenizer) -> dict[str, Any]:
    end = tokenizer.eod
    told = {
        "name": tokenizer.name,
        "sha256": tokenizer.sha256,
        "n_tokens": tokenizer.n_tokens,
        "eod_id": None if end is None else end.id,
        "eod_token": None if end is None else end.token,
        "eod_from": None if end is None else end.source,
    }
    return {"tokenizer": told}


class _Clock:
    """CPU seconds by stage; the start of the program is the first."""

    def __init__(self) -> None:
        self.last = time.process_time()
        self.cpu_s = {"start": self.last}

    def lap(self, stage: str) -> None:
        """Ends a stage."""
        now = time.process_time()
        self.cpu_s[stage] = now - self.last
        self.last = now


class _Work:
    """The pieces that are still to be encoded, and how."""

    def __init__(
        self, pieces: Sequence[Piece], shards: Shards, settings: Settings, options: Options,
        tokenizer: TokenizerSpec | str, fast: FastBpe | None, done: dict[int, Done], joining: Joining,
    ) -> None:  # fmt: skip
        self.pieces, self.shards, self.settings, self.options = pieces, shards, settings, options
        self.tokenizer, self.fast, self.done, self.joining = tokenizer, fast, done, joining

    def run(self) -> None:
        """Encode what is not done, add it to `done`, join what is, and show how far it is."""
        waiting = [i for i in range(len(self.pieces)) if i not in self.done]
        if self.done:
            log.info("going on: %d of %d pieces are done already", len(self.done), len(self.pieces))
        sizes = [piece.end - piece.begin for piece in self.pieces]
        total = None if any(piece.path == STDIN for piece in self.pieces) else sum(sizes)
        begun = sum(sizes[number] for number in self.done)
        with Progress("tokenising", total, begun, self.options.quiet) as progress:
            progress.n_documents = sum(one.n_documents for one in self.done.values())
            progress.n_tokens = sum(one.n_tokens for one in self.done.values())
            self.joining.take()
            for number, one in self._encoded(waiting, progress):
                self.done[number] = one
                self.joining.take()
                if self.pieces[number].path != STDIN:
                    progress.hear(number, sizes[number], one.n_documents, one.n_tokens)

    def _encoded(self, waiting: Sequence[int], progress: Progress) -> Iterator[tuple[int, Done]]:
        """Encode pieces, and give them as they are finished; none is begun once max_tokens are there."""
        fast = self.fast
        if fast is None:
            yield from self._by_processes(waiting, progress)
            return
        own = local()

        def encode(number: int) -> tuple[int, Done]:
            if self.joining.has_enough:
                return number, Done(0, 0, 0, 0, 0)
            if not hasattr(own, "encoder"):
                own.encoder = FastEncoder(fast, self.options.special_text)
            hear = functools.partial(progress.hear, number)
            piece = self.pieces[number]
            return number, encode_piece(piece, number, self.shards, self.settings, own.encoder, hear)

        if any(piece.path == STDIN for piece in self.pieces):
            yield from map(encode, waiting)  # a signal ends the wait for a pipe in the main thread only
            return
        with ThreadPoolExecutor(self.options.n_workers) as pool:
            futures: list[Future[tuple[int, Done]]] = [pool.submit(encode, number) for number in waiting]
            try:
                for future in as_completed(futures):
                    yield future.result()
            except BaseException:
                progress.end()
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _by_processes(self, waiting: Sequence[int], progress: Progress) -> Iterator[tuple[int, Done]]:
        from megatron.data.workers import as_finished  # threads need no processes, nor their slow import

        begin = functools.partial(
            _LibraryWork, self.tokenizer, self.options.special_text, self.shards, self.settings
        )
        jobs = ((number, self.pieces[number]) for number in waiting if not self.joining.has_enough)
        n_workers = min(self.options.n_workers, len(waiting))
        if n_workers < 2 or any(piece.path == STDIN for piece in self.pieces):
            work = begin()
            yield from (work(job, functools.partial(progress.hear, job[0])) for job in jobs)
        else:
            yield from as_finished(begin, jobs, n_workers)


class _LibraryWork:
    """What a process does with each piece: encode it with the tokenizers library."""

    def __init__(
        self, tokenizer: TokenizerSpec | str, special_text: bool, shards: Shards, settings: Settings
    ) -> None:
        import multiprocessing  # as above

        if multiprocessing.parent_process() is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker keeps to one core
        self.encoder: Encoder = LibraryEncoder(load(tokenizer), special_text)
        self.shards, self.settings = shards, settings

    def __call__(self, job: tuple[int, Piece], hear: Hear = ignore) -> tuple[int, Done]:
        number, piece = job
        return number, encode_piece(piece, number, self.shards, self.settings, self.encoder, hear)
