"""Resumable parallel tokenisation of text to datasets on disk, in the order of the input.

The input is split into pieces. Each piece is encoded to a shard in a folder beside the output: in a thread if
the C++ encoder is exact for the tokenizer, else in a process. The shards are joined in order. Ids are never
sent between processes.
"""

import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import local
from typing import Any

import numpy as np

from megatron.data.indexed_writer import dtype_for, publish_dataset
from megatron.io import DISK_FULL_ERRNOS
from megatron.log import get_logger
from megatron.text.encode_piece import ProgressCallback, encode_piece, ignore_progress
from megatron.text.inputs import STDIN, describe_inputs, find_inputs
from megatron.text.job_checks import check_not_empty, check_replaceable, estimate_bytes_left
from megatron.text.join import (
    OutputDataset,
    RejectSummary,
    ShardJoiner,
    dataset_prefix,
    find_finished,
    is_resumable,
    rejects_path,
)
from megatron.text.piece_progress import PieceProgress
from megatron.text.shard_writer import EncodeSettings
from megatron.text.shards import PieceResult, ShardFolder, hash_job
from megatron.text.sources import Part, Sources, select_part
from megatron.text.text_readers import InputPiece, split_into_pieces
from megatron.tokenizer.encoder import (
    NO_EOD,
    FastEncoder,
    LibraryEncoder,
    build_fast_bpe,
    log_library_speed,
)  # fmt: skip
from megatron.tokenizer.eod import Eod
from megatron.tokenizer.fast_bpe import FastBpe
from megatron.tokenizer.kinds import Tokenizer, TokenizerSpec, load_tokenizer

PIECE_BYTES = 8 << 20

log = get_logger(__name__)
# (prefix, keys, job) -> the outputs and rejects if they are complete and from this job; else None
FindOutputs = Callable[[Path, Sequence[str], str | None], tuple[list[OutputDataset], RejectSummary] | None]


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """Options of a job. `special_text`: the text of a special token becomes its id, as in `tokenizers`.

    overwrite   replace outputs of another job
    part        the job reads this part of the bytes of the input, and its number is added to the prefix
    """

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    special_text: bool = True
    skip_bad_lines: bool = False
    max_tokens: int | None = None
    n_workers: int = 1
    quiet: bool = False
    overwrite: bool = False
    part: Part | None = None


@dataclass(frozen=True)
class PreprocessResult:
    """Result of a job: an output per key."""

    outputs: list[OutputDataset]
    rejected: RejectSummary
    cpu_s: dict[str, float]  # CPU seconds of this process by stage

    @property
    def n_rejected(self) -> int:
        """Number of skipped lines."""
        return self.rejected.n_lines

    @property
    def rejects(self) -> Path | None:
        """The file that lists skipped lines and files, or None."""
        return self.rejected.path


def preprocess(
    inputs: Sequence[str], prefix: Path, tokenizer: TokenizerSpec | str, options: PreprocessOptions,
    find_published: FindOutputs | None = None,
) -> PreprocessResult:  # fmt: skip
    """Tokenise the documents of `inputs` to `<prefix>_<key>_document.bin/.idx/.json`, a dataset per key.

    After a kill at any moment, the same call resumes from the last finished piece, and the outputs are byte
    for byte those of an uninterrupted call. `max_tokens` uses the smallest number of first documents with at
    least so many tokens of the first key. A blank line is not a document. An empty text is a document without
    tokens, or with the end-of-document token only; the sidecar counts these.

    `find_published` returns outputs of this job that exist in another place: nothing is done then.

    Raises FileNotFoundError. Raises ValueError with file, line and reason for a line that is not JSON, lacks
    the key or has no string under it, unless bad lines are skipped; also if there is no document, or if a
    file changes while it is read. Raises OSError for a full disk. After an error no new output exists, and
    existing outputs are unchanged.
    """
    clock = _StageTimer()
    paths = find_inputs(inputs)
    _check_options(options, prefix, paths)
    sources = select_part(paths, options.part)
    if options.part is not None:
        prefix = options.part.add_to(prefix)
    loaded = load_tokenizer(tokenizer)
    settings = make_settings(loaded, options)
    # Only what changes the bytes of an output: not the number of workers, and not --quiet. A call with other
    # workers may resume this one.
    job_settings = [loaded.sha256, settings.eod, settings.dtype, options.special_text, options.skip_bad_lines]
    if loaded.eod is not None and loaded.eod.source.startswith("--"):
        job_settings.append(loaded.eod.id)  # the sidecar contains it, whether documents end with it or not
    # `job` identifies the outputs: equal inputs and settings may resume or reuse earlier work
    job_settings += [options.max_tokens, *options.keys, *_describe_part(options.part, sources)]
    job = hash_job(sources.paths, job_settings)
    shards = ShardFolder(prefix.with_name(f".{prefix.name}.shards"), options.keys)
    with shards.lock(prefix):
        if shards.is_prepared(job):  # an earlier call was killed during the final renames
            for key in options.keys:
                publish_dataset(dataset_prefix(prefix, key), shards.folder)
        # under the lock, so that no other process replaces the outputs after this check
        if finished := _find_outputs(prefix, options.keys, job, shards, find_published):
            shards.remove()
            log.info("%s: exists already, from the same files and settings", prefix)
            return PreprocessResult(*finished, clock.cpu_s)
        if not options.overwrite:
            check_replaceable(prefix, options.keys, job, shards)
            shards.check_remote_unchanged(sources.paths)
        if options.append_eod and loaded.eod is not None:
            log.info("documents end with id %d (%s)", loaded.eod_id, _describe_eod(loaded.eod))
        fast = load_fast_bpe(loaded)
        clock.end_stage("tokenizer")
        pieces = split_into_pieces(sources.paths, PIECE_BYTES, sources.ranges)
        meta = {"append_eod": options.append_eod, "special_text": options.special_text} | describe_tokenizer(
            loaded
        )
        if options.part is not None:
            number, count = options.part.number, options.part.count
            meta["part"] = {"number": number, "of": count, "inputs_sha256": sources.inputs_sha256}
        results = shards.resume_or_clear(pieces, job)
        shards.write_remote_versions(sources.paths)
        try:
            # before the encoding: it clears `results` if the partial outputs are missing
            joiner = ShardJoiner(
                pieces, shards, prefix, np.dtype(settings.dtype), meta, options.max_tokens, results,
                options.n_workers,
            )  # fmt: skip
            with joiner:
                _EncodeJob(pieces, shards, settings, options, tokenizer, fast, results, joiner).run()
                check_not_empty(inputs, pieces, results, options.part)
                if hash_job(sources.paths, job_settings) != job:
                    raise ValueError(
                        f"{describe_inputs(inputs)}: got another size or time of a file than at the start. "
                        "It changed while it was read: start again when it is complete."
                    )
                rejected = joiner.finish(sources.paths, job)
                clock.end_stage("encoding, joining and sums")
        except Exception as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
                error.n_bytes = estimate_bytes_left(pieces, results)  # type: ignore[attr-defined]  # for explain_disk_full
            # a resumable error keeps shards and partial outputs; the same call then continues with them
            if not is_resumable(error):
                shards.remove()
            raise
        shards.remove()
    clock.end_stage("names")
    if options.max_tokens is not None and not joiner.has_enough:
        requested = f"{options.max_tokens:,}"
        log.warning(
            "%s: got fewer than the requested %s tokens; all are used", describe_inputs(inputs), requested
        )
    return PreprocessResult(joiner.list_outputs(), rejected, clock.cpu_s)


def _find_outputs(
    prefix: Path,
    keys: Sequence[str],
    job: str | None,
    shards: ShardFolder,
    find_published: FindOutputs | None,
) -> tuple[list[OutputDataset], RejectSummary] | None:
    """Return the outputs of this job if they exist; after an error a new shard folder is removed."""
    try:
        finished = find_finished(prefix, keys, job)
        return finished or (None if find_published is None else find_published(prefix, keys, job))
    except (OSError, ValueError):
        if not shards.has_work():
            shards.remove()
        raise


def _describe_eod(end: Eod) -> str:
    return end.source if end.token is None else f"{end.token}, {end.source}"


def load_fast_bpe(loaded: Tokenizer) -> FastBpe | None:
    """Return the C++ encoder, or None with a warning if only the tokenizer's library is exact."""
    fast, reason = build_fast_bpe(loaded)
    if fast is None:
        log.warning(
            "%s: using its own library, which is slower than C++ (its speed is measured below); reason: %s",
            loaded.name, reason,
        )  # fmt: skip
    return fast


def make_settings(loaded: Tokenizer, options: PreprocessOptions) -> EncodeSettings:
    """Return the settings that every piece is encoded with."""
    return EncodeSettings(
        eod=loaded.eod_id if options.append_eod else NO_EOD,
        dtype=dtype_for(loaded.n_tokens).str,
        skip_bad_lines=options.skip_bad_lines,
        max_tokens=options.max_tokens,
    )


def _check_options(options: PreprocessOptions, prefix: Path, paths: Sequence[Path]) -> None:
    """Raise ValueError for inconsistent options, and for an output that is an input."""
    if options.n_workers < 1:
        raise ValueError(f"workers: got {options.n_workers}, expected 1 or more")
    if len(set(options.keys)) < len(options.keys):
        raise ValueError(f"json keys: got a key twice in {', '.join(options.keys)}, expected distinct keys")
    if options.part is not None and options.max_tokens is not None:
        raise ValueError(
            "--max-tokens: got it with --part, expected one of them. Join the parts, and select their first "
            "tokens with tools/subset_corpus.py."
        )
    for key in options.keys:
        if "/" in key:
            raise ValueError(
                f"json keys: got '{key}', expected a key without a slash, as it is part of a file name. "
                "Rename the key."
            )
    if options.part is not None:
        prefix = options.part.add_to(prefix)
    outputs = {Path(f"{dataset_prefix(prefix, key)}.json").resolve() for key in options.keys}
    for path in paths:
        if path.resolve() in outputs | {rejects_path(prefix).resolve()}:
            raise ValueError(
                f"{path}: is an input, and would be overwritten. Choose another --output-prefix."
            )


def _describe_part(part: Part | None, sources: Sources) -> list[Any]:
    """Return what distinguishes the job of a part from others of the same files."""
    if part is None:
        return []
    ranges = [[str(path), *sources.ranges[path]] for path in sources.paths if path in sources.ranges]
    return [{"part": [part.number, part.count], "inputs_sha256": sources.inputs_sha256, "ranges": ranges}]


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the entry of a sidecar that describes a tokenizer and its end-of-document token."""
    end = tokenizer.eod
    meta = {
        "name": tokenizer.name,
        "sha256": tokenizer.sha256,
        "n_tokens": tokenizer.n_tokens,
        "eod_id": None if end is None else end.id,
        "eod_token": None if end is None else end.token,
        "eod_from": None if end is None else end.source,
    }
    return {"tokenizer": meta}


class _StageTimer:
    """CPU seconds by stage; the first stage is the start of the program."""

    def __init__(self) -> None:
        self.last = time.process_time()
        self.cpu_s = {"start": self.last}

    def end_stage(self, stage: str) -> None:
        """End the current stage."""
        now = time.process_time()
        self.cpu_s[stage] = now - self.last
        self.last = now


class _EncodeJob:
    """Encoding of the remaining pieces of a job."""

    def __init__(
        self, pieces: Sequence[InputPiece], shards: ShardFolder, settings: EncodeSettings,
        options: PreprocessOptions, tokenizer: TokenizerSpec | str, fast: FastBpe | None,
        results: dict[int, PieceResult], joiner: ShardJoiner,
    ) -> None:  # fmt: skip
        self.pieces, self.shards, self.settings, self.options = pieces, shards, settings, options
        self.tokenizer, self.fast, self.results, self.joiner = tokenizer, fast, results, joiner

    def run(self) -> None:
        """Encode the remaining pieces, store their results, join finished shards and show progress."""
        remaining = [i for i in range(len(self.pieces)) if i not in self.results]
        if self.results:
            log.info("resuming: %d of %d pieces are done already", len(self.results), len(self.pieces))
        sizes = [piece.end - piece.begin for piece in self.pieces]
        # the size of standard input is unknown: then the bar has no total
        total = None if any(piece.path == STDIN for piece in self.pieces) else sum(sizes)
        begun = sum(sizes[number] for number in self.results)
        # pieces that are left of each file: a file is read when it has none
        left = Counter(self.pieces[number].path for number in remaining)
        n_files = len({piece.path for piece in self.pieces})
        title = "tokenising" if self.options.part is None else f"tokenising part {self.options.part}"
        with PieceProgress(title, total, begun, self.options.quiet, n_files, n_files - len(left)) as progress:
            progress.n_documents = sum(result.n_documents for result in self.results.values())
            progress.n_tokens = sum(result.n_tokens for result in self.results.values())
            self.joiner.join_ready()
            # This thread alone joins and stores results. Workers only write shards, so the outputs need no
            # lock. Pieces finish in any order, and join_ready joins the longest finished prefix.
            for number, result in self._encode_pieces(remaining, progress):
                self.results[number] = result
                self.joiner.join_ready()
                left[self.pieces[number].path] -= 1
                progress.n_read += not left[self.pieces[number].path]
                if self.pieces[number].path != STDIN:
                    progress.update(number, sizes[number], result.n_documents, result.n_tokens)

    def _encode_pieces(
        self, remaining: Sequence[int], progress: PieceProgress
    ) -> Iterator[tuple[int, PieceResult]]:
        """Encode pieces; yield results in the order of completion. Start no piece after max_tokens."""
        fast = self.fast
        if fast is None:
            yield from self._encode_in_processes(remaining, progress)
            return
        # threads scale although this is Python: C++ releases the GIL while it reads, encodes and writes
        thread_state = local()

        def encode_number(number: int) -> tuple[int, PieceResult]:
            if self.joiner.has_enough:  # read without a lock: a stale value only costs one more piece
                return number, PieceResult(0, 0, 0, 0, 0)
            if not hasattr(thread_state, "encoder"):  # one encoder per thread: it has a cache and buffers
                thread_state.encoder = FastEncoder(fast, self.options.special_text)
            on_progress = functools.partial(progress.update, number)
            piece = self.pieces[number]
            return number, encode_piece(
                piece, number, self.shards, self.settings, thread_state.encoder, on_progress
            )

        if any(piece.path == STDIN for piece in self.pieces):
            # in the main thread: only there a signal interrupts a read of a pipe
            yield from map(encode_number, remaining)
            return
        with ThreadPoolExecutor(self.options.n_workers) as pool:
            futures: list[Future[tuple[int, PieceResult]]] = [
                pool.submit(encode_number, number) for number in remaining
            ]
            try:
                # `result` raises the exception of a piece, and the pieces that have not started are cancelled
                # below
                for future in as_completed(futures):
                    yield future.result()
            except BaseException:
                progress.stop()  # running threads raise StoppedError at their next progress report
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _encode_in_processes(
        self, remaining: Sequence[int], progress: PieceProgress
    ) -> Iterator[tuple[int, PieceResult]]:
        from megatron.text.workers import map_unordered  # slow to import, and not needed for threads

        make_worker = functools.partial(
            _LibraryWorker, self.tokenizer, self.options.special_text, self.shards, self.settings,
            remaining[:1],
        )  # fmt: skip
        # a generator, evaluated when a process is free: it ends once max_tokens are joined
        jobs = ((number, self.pieces[number]) for number in remaining if not self.joiner.has_enough)
        n_workers = min(self.options.n_workers, len(remaining))
        if n_workers < 2 or any(piece.path == STDIN for piece in self.pieces):
            worker = make_worker()
            yield from (worker(job, functools.partial(progress.update, job[0])) for job in jobs)
        else:
            yield from map_unordered(make_worker, jobs, n_workers)


class _LibraryWorker:
    """Worker of a process: encode pieces with the tokenizers library.

    measured  the piece whose first texts measure the library's speed, which is then logged
    """

    def __init__(
        self,
        tokenizer: TokenizerSpec | str,
        special_text: bool,
        shards: ShardFolder,
        settings: EncodeSettings,
        measured: Sequence[int],
    ) -> None:
        import multiprocessing  # slow to import

        if multiprocessing.parent_process() is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per worker
        self.encoder = LibraryEncoder(load_tokenizer(tokenizer), special_text)
        self.shards, self.settings, self.measured = shards, settings, measured

    def __call__(
        self, job: tuple[int, InputPiece], on_progress: ProgressCallback = ignore_progress
    ) -> tuple[int, PieceResult]:
        number, piece = job
        self.encoder.on_speed = log_library_speed if number in self.measured else None
        return number, encode_piece(piece, number, self.shards, self.settings, self.encoder, on_progress)
