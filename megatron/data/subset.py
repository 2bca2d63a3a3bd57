"""A part of a corpus: the first documents, as many as hold some tokens, or a random sample.

Text stays text: the chosen lines are written as they are. A .bin/.idx pair gives a pair.
"""

import gzip
import heapq
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from tqdm import tqdm

from megatron.data.documents import (
    COLUMNS,
    Piece,
    checked_text,
    cut,
    find_inputs,
    lines_of,
    named,
    rows_of,
    text_of,
)
from megatron.data.encode_piece import find_damage
from megatron.data.indexed import IndexedTokens, prefix_of
from megatron.data.indexed_writer import PARTIAL, IndexedWriter
from megatron.data.merge import append, is_made_of, origin
from megatron.data.output_names import check_free, dataset_files
from megatron.log import get_logger
from megatron.tokenizer.encoder import Encoder, encode_or_blame

log = get_logger(__name__)
OUTPUTS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
BATCH_DOCUMENTS, BATCH_CHARACTERS = 128, 1 << 20
DRAWS = 4096  # priorities made at a time
CARRIED = ("tokenizer", "append_eod", "special_text", "json_key")  # of a pair's sidecar

Document = tuple["Place", bytes, str]  # where it stands, its line without an end, its text


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which documents; exactly one of the first three is set.

    documents   the first so many
    tokens      the fewest first ones that hold so many
    sample      so many at random, or a share in (0, 1): each document by itself with that chance
    seed        of the sample; a larger sample of the same seed holds a smaller one
    """

    documents: int | None = None
    tokens: int | None = None
    sample: int | Fraction | None = None
    seed: int = 0

    def told(self) -> dict[str, Any]:
        """For a sidecar."""
        if self.sample is not None:
            share = self.sample if isinstance(self.sample, int) else float(self.sample)
            return {"sample": share, "seed": self.seed}
        return {"documents": self.documents} if self.documents else {"tokens": self.tokens}


@dataclass(frozen=True)
class Subset:
    """What was written. `n_tokens` is None where no tokenizer counted."""

    n_documents: int
    n_tokens: int | None
    n_rejected: int = 0
    n_damaged: int = 0  # files that were passed over


@dataclass(frozen=True)
class Counter:
    """Counts tokens; `eod` is added to each document unless it is NO_EOD."""

    encoder: Encoder
    eod: int


@dataclass(frozen=True)
class Place:
    """A line (row) of a file, from 1."""

    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}, {'row' if self.path.name.endswith(COLUMNS) else 'line'} {self.line}"


def pair_of(word: str) -> Path | None:
    """The prefix of the .bin/.idx pair that a word names, with a suffix or without; None: it names none."""
    path = Path(prefix_of(word))
    return path if Path(f"{path}.idx").is_file() and (str(path) != word or not path.exists()) else None


def subset_text(
    inputs: Sequence[str], output: Path, selection: Selection, counter: Counter | None = None,
    key: str = "text", skip_bad_lines: bool = False, quiet: bool = False, overwrite: bool = False,
) -> Subset:  # fmt: skip
    """Write the chosen lines of `inputs` to `output` (compressed as its name says), in their order.

    Only the line end may change: it becomes a newline. Blank lines are no documents; rows of parquet and
    arrow files become {key: text}. Memory holds a batch of documents and, for a sample of K, some 200 bytes
    for each of K; such a sample spools up to K (1 + ln(n / K)) of n lines to disk beside the output.

    Raises FileNotFoundError; ValueError with file and line for a line that was looked at and is no document
    (unless those are skipped), and for fewer documents or tokens than wanted; OSError for a full disk. Then
    no output appears, and one that was there is as before.
    """
    paths = find_inputs(inputs)
    if not output.name.endswith(OUTPUTS):
        raise ValueError(f"{output}: wanted a name that ends in one of {', '.join(OUTPUTS)}")
    if output.resolve() in [path.resolve() for path in paths]:
        raise ValueError(f"{output}: is one of the inputs; choose another name")
    if not overwrite:
        check_free(output)
    if selection.tokens is not None and counter is None:
        raise ValueError("to count tokens, a tokenizer is wanted; give --tokenizer-model")
    source = _Source(paths, key, skip_bad_lines)
    n_documents = n_tokens = 0
    with (
        _bar(selection, quiet) as bar,
        _sink(output) as sink,
        closing(_chosen(source, selection, output)) as all_,
    ):
        for line, n in _counted(all_, counter):
            sink.write(line + b"\n")
            n_documents += 1
            n_tokens += n
            bar.update(n if selection.tokens else 1)
            if selection.tokens is not None and n_tokens >= selection.tokens:
                break
        _check_enough(selection, n_documents, n_tokens, named(inputs))
    return Subset(n_documents, n_tokens if counter else None, source.n_rejected, source.n_damaged)


def subset_pair(
    prefix: Path, output: Path, selection: Selection, quiet: bool = False, overwrite: bool = False
) -> Subset:
    """Write the chosen documents of a pair as a pair. A sample is that of the text the pair was made of.

    Memory: the pair's index, and 24 bytes a document for a sample. Raises what `subset_text` does.
    """
    pair = IndexedTokens(prefix)
    if output.resolve() == prefix.resolve():
        raise ValueError(f"{output}: is the input; choose another name")
    if output.name.endswith(OUTPUTS):
        raise ValueError(f"{output}: is a name of text, and part of a pair is a pair; give it a prefix")
    made_of = {"subset_of": origin(pair), "selection": selection.told()}
    if is_made_of(output, made_of):
        there = IndexedTokens(output)
        log.info("%s: is there already, the same part of the same pair", output)
        return Subset(there.n_documents, there.n_tokens)
    if not overwrite:
        check_free(*dataset_files(output))
    chosen = _chosen_of_pair(pair, selection)
    lengths = pair.document_tokens[chosen]
    n_tokens = int(lengths.sum())
    _check_enough(selection, len(chosen), n_tokens, str(prefix))
    told = pair.sidecar or {}
    about = {name: told[name] for name in CARRIED if name in told}
    about |= made_of
    about["empty_documents"] = int((lengths == int(told.get("append_eod", False))).sum())
    hidden = True if quiet else None
    with (
        tqdm(total=n_tokens, unit=" tokens", unit_scale=True, disable=hidden, desc="copying") as bar,
        IndexedWriter(output, pair.dtype, about) as writer,
    ):
        append(pair, chosen, writer, bar.update)
    return Subset(len(chosen), n_tokens)


class _Source:
    """All lines of the inputs, and what is a document among them."""

    def __init__(self, paths: Sequence[Path], key: str, skip: bool) -> None:
        self.pieces, self.key, self.skip = cut(paths, piece_bytes=1 << 62), key, skip
        self.n_rejected = self.n_damaged = 0

    def lines(self) -> Iterator[tuple[Place, Any]]:
        """Every line that is not blank, or the value of every row, not yet looked at."""
        for piece in self.pieces:
            if self.skip and (damage := find_damage(piece, [self.key])) is not None:
                self.n_damaged += 1
                log.warning("%s: passed over, its content is damaged (%s)", piece.path, damage)
                continue
            if piece.path.name.endswith(COLUMNS):
                values = (value for values in rows_of(piece.path, self.key) for value in values)
                yield from ((Place(piece.path, i), value) for i, value in enumerate(values, 1))
            else:
                yield from self._lines(piece)

    def _lines(self, piece: Piece) -> Iterator[tuple[Place, bytes]]:
        for i, line in lines_of(piece):
            if line.strip():
                yield Place(piece.path, i + 1), line

    def document(self, place: Place, found: Any) -> Document | None:
        """None for a bad line that is skipped."""
        try:
            if place.path.name.endswith(COLUMNS):
                text = checked_text(found, self.key)
                return place, json.dumps({self.key: text}, ensure_ascii=False).encode(), text
            return place, found, text_of(found, self.key)
        except ValueError as error:
            if not self.skip:
                raise ValueError(f"{place}: {error}") from error
            self.n_rejected += 1
            return None

    def documents(self) -> Iterator[Document]:
        """All, in order."""
        return (one for line in self.lines() if (one := self.document(*line)) is not None)


def _chosen(source: _Source, selection: Selection, output: Path) -> Iterator[Document]:
    """The documents in order; for `tokens` all of them, as only counting tells where they end."""
    if selection.sample is None:
        yield from islice(source.documents(), selection.documents)
    elif isinstance(selection.sample, Fraction):
        most = int(selection.sample * 2**64)
        for line, priority in zip(source.lines(), _priorities(selection.seed), strict=False):
            if priority < most and (one := source.document(*line)) is not None:
                yield one
    else:
        yield from _sampled(source, selection.sample, selection.seed, output)


def _priorities(seed: int) -> Iterator[int]:
    """A random 64-bit number for each document; numpy keeps this stream the same over its versions."""
    raw = np.random.PCG64(seed)
    while True:
        yield from raw.random_raw(DRAWS).tolist()


def _sampled(source: _Source, n: int, seed: int, output: Path) -> Iterator[Document]:
    """The n documents of least priority. Each that is among the least so far waits in a spool on disk."""
    spool_path = output.with_name(f"{output.name}.spool{PARTIAL}")
    best: list[tuple[int, int, int, int, Place]] = []  # a heap, the worst on top: -priority, -number, spooled
    try:
        with spool_path.open("w+b") as spool:
            keyed = zip(source.lines(), _priorities(seed), strict=False)
            for number, (line, priority) in enumerate(keyed):
                if len(best) == n and -priority < best[0][0]:
                    continue
                one = source.document(*line)
                if one is None:
                    continue
                place, raw, _ = one
                entry = (-priority, -number, spool.tell(), len(raw), place)
                spool.write(raw)
                heapq.heappush(best, entry) if len(best) < n else heapq.heappushpop(best, entry)
            for _, _, at, size, place in sorted(best, key=lambda entry: -entry[1]):
                spool.seek(at)
                raw = spool.read(size)
                yield place, raw, text_of(raw, source.key)
    finally:
        spool_path.unlink(missing_ok=True)


def _counted(documents: Iterator[Document], counter: Counter | None) -> Iterator[tuple[bytes, int]]:
    """Lines with their tokens, counted some documents at a time; 0 without a counter."""
    if counter is None:
        yield from ((line, 0) for _, line, _ in documents)
        return
    batch: list[Document] = []
    n_characters, failed = 0, None
    while failed is None:
        try:
            one = next(documents, None)
        except ValueError as error:  # the documents before it may be enough
            one, failed = None, error
        if one is not None:
            batch.append(one)
            n_characters += len(one[2])
        if one is None or len(batch) >= BATCH_DOCUMENTS or n_characters >= BATCH_CHARACTERS:
            if batch:
                places, texts = [str(place) for place, _, _ in batch], [text for _, _, text in batch]
                _, lengths = encode_or_blame(counter.encoder, texts, places, counter.eod)
                yield from zip((line for _, line, _ in batch), lengths.tolist(), strict=True)
            batch, n_characters = [], 0
        if one is None and failed is None:
            return
    raise failed


def _chosen_of_pair(pair: IndexedTokens, selection: Selection) -> np.ndarray:
    """Numbers of the documents, int64, rising."""
    n = pair.n_documents
    if selection.documents is not None:
        return np.arange(min(n, selection.documents))
    if selection.tokens is not None:
        reached = np.cumsum(pair.document_tokens)
        return np.arange(min(n, int(np.searchsorted(reached, selection.tokens)) + 1))
    assert selection.sample is not None, "one way to choose is set"
    priorities = np.random.PCG64(selection.seed).random_raw(n)
    if isinstance(selection.sample, Fraction):
        return np.flatnonzero(priorities < np.uint64(int(selection.sample * 2**64)))
    if selection.sample >= n:
        return np.arange(n)
    worst = np.partition(priorities, selection.sample - 1)[selection.sample - 1]
    below, equal = np.flatnonzero(priorities < worst), np.flatnonzero(priorities == worst)
    return np.sort(np.concatenate([below, equal[: selection.sample - len(below)]]))


def _check_enough(selection: Selection, n_documents: int, n_tokens: int, where: str) -> None:
    wanted = selection.sample if isinstance(selection.sample, int) else selection.documents
    if wanted is not None and n_documents < wanted:
        raise ValueError(f"{where}: holds {n_documents:,} documents, wanted {wanted:,}; ask for fewer")
    if selection.tokens is not None and n_tokens < selection.tokens:
        raise ValueError(f"{where}: holds {n_tokens:,} tokens, wanted {selection.tokens:,}; ask for fewer")


@contextmanager
def _sink(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name when the block ends in order, compressed as the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            with _compressed(path, file) as sink:
                yield sink
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _compressed(path: Path, file: IO[bytes]) -> Iterator[IO[bytes]]:
    if path.name.endswith(".gz"):
        with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed:
            yield packed  # type: ignore[misc]
    elif path.name.endswith(".zst"):
        import zstandard  # only this suffix wants it

        with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as packed:
            yield packed
    else:
        yield file


def _bar(selection: Selection, quiet: bool) -> tqdm:
    n_documents = selection.sample if isinstance(selection.sample, int) else selection.documents
    unit = " tokens" if selection.tokens else " documents"
    hidden = True if quiet else None  # None: hidden where nobody looks at a terminal
    return tqdm(
        total=selection.tokens or n_documents, unit=unit, unit_scale=True, disable=hidden, desc="subset"
    )
