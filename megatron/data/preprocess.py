"""Text to tokens on disk, on many cores, in the order of the input.

The input is cut into pieces at line ends. Each worker turns a piece into a shard of ids and a list of
lengths in a folder beside the output; the parent joins the shards in order. No ids travel between
processes.
"""

import contextlib
import hashlib
import multiprocessing
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from megatron.data.documents import Piece, cut, find_inputs, line_number, lines_of, text_of
from megatron.data.indexed_writer import IndexedWriter, dtype_for
from megatron.tokenizer.bpe import BpeTokenizer, load_tokenizer

PIECE_BYTES = 4 << 20
BATCH_DOCUMENTS = 256


@dataclass(frozen=True)
class Job:
    """What every worker needs to know."""

    tokenizer: str
    keys: tuple[str, ...]
    append_eod: bool
    shards: Path


@dataclass(frozen=True)
class Done:
    """What became of one piece."""

    piece: int
    n_documents: int
    n_tokens: int
    n_bytes: int


@dataclass(frozen=True)
class Totals:
    """What became of the whole, over all keys."""

    n_documents: int
    n_tokens: int
    prefixes: list[Path]


# A worker's tokenizer, loaded once a process: the pool's initialiser has nowhere else to put it.
_WORKER: dict[str, tuple[BpeTokenizer, Job]] = {}


def preprocess(
    inputs: Sequence[str],
    prefix: Path,
    tokenizer: str,
    *,
    keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    n_workers: int = 1,
    quiet: bool = False,
) -> Totals:
    """Tokenise the documents of `inputs` into `<prefix>_<key>_document.bin/.idx/.json`, one triple a key.

    Raises FileNotFoundError, and ValueError with file, line and reason for a line that is not JSON, has no
    such key or no string under it. Then no output exists and none that existed before has changed. An empty
    text without `append_eod` is an empty document and is counted in the sidecar.
    """
    if n_workers < 1:
        raise ValueError(f"workers: found {n_workers}, wanted 1 or more")
    paths = find_inputs(inputs)
    about = load_tokenizer(tokenizer)
    pieces = cut(paths, PIECE_BYTES)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    shards = prefix.with_name(f".{prefix.name}.shards")
    shutil.rmtree(shards, ignore_errors=True)
    shards.mkdir()
    job = Job(tokenizer, tuple(keys), append_eod, shards)
    try:
        done: list[Done] = []
        with _progress(pieces, quiet) as bar:
            for one in _encode_all(job, pieces, n_workers):
                done.append(one)
                bar.update(one.n_bytes)
                n_documents, n_tokens = sum(d.n_documents for d in done), sum(d.n_tokens for d in done)
                bar.set_postfix_str(f"{n_documents:,} documents, {n_tokens:,} tokens", refresh=False)
        sources = _sources(paths, pieces, done)
        outputs = [_join(job, key, prefix, about, len(pieces), sources) for key in keys]
    finally:
        shutil.rmtree(shards, ignore_errors=True)
    return Totals(sum(d.n_documents for d in done), sum(d.n_tokens for d in done), outputs)


def _encode_all(job: Job, pieces: Sequence[Piece], n_workers: int) -> Iterator[Done]:
    """Encode every piece; results come as they are finished."""
    if n_workers == 1 or len(pieces) < 2:
        _start_worker(job)
        yield from map(_encode_piece, enumerate(pieces))
        return
    # spawn: a fork would copy the locks of whatever threads the parent runs
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(n_workers, len(pieces)), _start_worker, (job, True)) as pool:
        yield from pool.imap_unordered(_encode_piece, enumerate(pieces))


def _start_worker(job: Job, in_pool: bool = False) -> None:
    if in_pool:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends the pool
    _WORKER["now"] = load_tokenizer(job.tokenizer), job


def _encode_piece(numbered: tuple[int, Piece]) -> Done:
    """One piece to one shard a key. ValueError with file and line for a bad line."""
    number, piece = numbered
    tokenizer, job = _WORKER["now"]
    n_tokens = n_lines = 0
    with contextlib.ExitStack() as stack:
        writers = {key: stack.enter_context(_Shard(job, key, number, tokenizer)) for key in job.keys}
        for i, line in lines_of(piece):
            if not line.strip():
                continue
            n_lines += 1
            for key, writer in writers.items():
                try:
                    writer.add(text_of(line, key))
                except ValueError as error:
                    raise ValueError(f"{piece.path}, line {line_number(piece, i)}: {error}") from error
        for writer in writers.values():
            writer.flush()
            n_tokens += writer.n_tokens
    return Done(number, n_lines, n_tokens, piece.end - piece.begin)


class _Shard:
    """The ids of one key of one piece, encoded a batch of documents at a time."""

    def __init__(self, job: Job, key: str, number: int, tokenizer: BpeTokenizer) -> None:
        self.tokenizer = tokenizer
        self.tail = [tokenizer.eod_id] if job.append_eod else []
        self.dtype = dtype_for(tokenizer.n_tokens)
        self.ids, self.lengths = (path.open("wb") for path in shard_paths(job, key, number))
        self.texts: list[str] = []
        self.n_tokens = 0

    def __enter__(self) -> "_Shard":
        return self

    def __exit__(self, *error: object) -> None:
        self.ids.close()
        self.lengths.close()

    def add(self, text: str) -> None:
        """Take one document."""
        self.texts.append(text)
        if len(self.texts) >= BATCH_DOCUMENTS:
            self.flush()

    def flush(self) -> None:
        """Encode and write what was taken."""
        encoded = [ids + self.tail for ids in self.tokenizer.encode_batch(self.texts)]
        self.texts = []
        flat = np.array([i for ids in encoded for i in ids], dtype=self.dtype)
        flat.tofile(self.ids)
        np.array([len(ids) for ids in encoded], dtype="<i4").tofile(self.lengths)
        self.n_tokens += len(flat)


def shard_paths(job: Job, key: str, number: int) -> tuple[Path, Path]:
    """Ids and lengths of one piece."""
    stem = f"{job.keys.index(key)}-{number:08d}"
    return job.shards / f"{stem}.ids", job.shards / f"{stem}.lengths"


def _join(
    job: Job, key: str, prefix: Path, tokenizer: BpeTokenizer, n_pieces: int, sources: list[dict[str, object]]
) -> Path:
    """Lay the shards of one key end to end, in order."""
    dtype = dtype_for(tokenizer.n_tokens)
    about = {
        "append_eod": job.append_eod,
        "tokenizer": {
            "name": tokenizer.name,
            "sha256": tokenizer.sha256,
            "n_tokens": tokenizer.n_tokens,
            "eod_id": tokenizer.eod_id,
        },
        "json_key": key,
        "sources": sources,
    }
    output = prefix.with_name(f"{prefix.name}_{key}_document")
    with IndexedWriter(output, dtype, about) as writer:
        for number in range(n_pieces):
            ids, lengths = shard_paths(job, key, number)
            writer.add_documents(np.fromfile(ids, dtype=dtype), np.fromfile(lengths, dtype="<i4"))
    return output


def _sources(paths: Sequence[Path], pieces: Sequence[Piece], done: Sequence[Done]) -> list[dict[str, object]]:
    n_documents = dict.fromkeys(paths, 0)
    for one in done:
        n_documents[pieces[one.piece].path] += one.n_documents
    told: list[dict[str, object]] = []
    for path in paths:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        size = path.stat().st_size
        told.append({"path": path.name, "sha256": sha256, "bytes": size, "documents": n_documents[path]})
    return told


def _progress(pieces: Sequence[Piece], quiet: bool) -> tqdm:
    total = sum(piece.end - piece.begin for piece in pieces)
    return tqdm(total=total, unit="B", unit_scale=True, disable=True if quiet else None, desc="tokenising")
