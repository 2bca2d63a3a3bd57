"""Subsets of a corpus: the first documents, the first documents with a number of tokens, or a random sample.

Text stays text: the selected lines are copied unchanged. A subset of a .bin/.idx dataset is a dataset.
"""

import gzip
import heapq
import json
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron.cli import ProgressBar
from megatron.data import open_dataset
from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.sidecar import locate_dataset, strip_suffix
from megatron.io import atomic_path
from megatron.log import get_logger
from megatron.text.arguments import check_not_exists
from megatron.text.inputs import COLUMN_SUFFIXES, Source, describe_inputs, find_inputs, locate_source
from megatron.text.merge import copy_documents, is_finished
from megatron.text.merge_inputs import describe_origin
from megatron.text.text_readers import (
    DamagedFileError,
    InputPiece,
    check_text,
    iter_lines,
    iter_rows,
    parse_text,
    split_into_pieces,
)
from megatron.tokenizer.encoder import Encoder, encode_with_location

log = get_logger(__name__)
OUTPUT_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
BATCH_DOCUMENTS, BATCH_CHARACTERS = 128, 1 << 20
PRIORITY_BATCH = 4096  # priorities drawn at a time
# entries copied from the sidecar of a dataset
COPIED_META = ("tokenizer", "append_eod", "special_text", "json_key")

Document = tuple["LinePosition", bytes, str]  # position, line without its end, text


@dataclass(frozen=True, kw_only=True)
class DocumentSelection:
    """Selection of documents; exactly one of the first three fields is set.

    documents   number of first documents
    tokens      the smallest number of first documents with at least so many tokens
    sample      number of random documents, or a share in (0, 1): independent probability of each document
    seed        of the sample; a larger sample contains a smaller one of the same seed
    skip        of a dataset: `documents` are counted after this many
    """

    documents: int | None = None
    tokens: int | None = None
    sample: int | Fraction | None = None
    seed: int = 0
    skip: int = 0

    def to_meta(self) -> dict[str, Any]:
        """Return the selection as an entry of a sidecar."""
        if self.sample is not None:
            share = self.sample if isinstance(self.sample, int) else float(self.sample)
            return {"sample": share, "seed": self.seed}
        if self.skip:
            return {"documents": self.documents, "skip": self.skip}
        return {"documents": self.documents} if self.documents else {"tokens": self.tokens}


@dataclass(frozen=True)
class SubsetResult:
    """Counts of the output. `n_tokens` is None without a tokenizer."""

    n_documents: int
    n_tokens: int | None
    n_rejected: int = 0
    n_damaged: int = 0  # skipped files


@dataclass(frozen=True)
class CountingEncoder:
    """Encoder for counting tokens; `eod` is counted once per document unless it is NO_EOD."""

    encoder: Encoder
    eod: int


@dataclass(frozen=True)
class LinePosition:
    """A line, or row, of a file, counted from 1."""

    path: Source
    line: int

    def __str__(self) -> str:
        return f"{self.path}, {'row' if _is_columnar(self.path) else 'line'} {self.line}"


def find_dataset_prefix(word: str) -> Path | None:
    """Return the prefix of the dataset that a word names, with or without a suffix; None: no dataset."""
    path = Path(strip_suffix(word))
    is_dataset = locate_dataset(path).index.is_file()
    return path if is_dataset and (str(path) != word or not path.exists()) else None


def subset_text(
    inputs: Sequence[str], output: Path, selection: DocumentSelection, counter: CountingEncoder | None = None,
    key: str = "text", skip_bad_lines: bool = False, quiet: bool = False, overwrite: bool = False,
) -> SubsetResult:  # fmt: skip
    """Write the selected lines of `inputs` to `output` in their order; its suffix selects the compression.

    Lines stay unchanged except for the line end, which becomes a newline. Blank lines are not documents. Rows
    of parquet and arrow files become {key: text}. Memory: a batch of documents, and about 200 bytes for each
    document of a sample of fixed size K. Such a sample spools an expected K (1 + ln(n / K)) of n lines to
    disk beside the output.

    Raises FileNotFoundError. Raises ValueError with file and line for an invalid line that is read (unless
    bad lines are skipped), and for fewer documents or tokens than requested. Raises OSError for a full disk.
    After an error no new output exists, and an existing one is unchanged.
    """
    paths = find_inputs(inputs)
    if not output.name.endswith(OUTPUT_SUFFIXES):
        raise ValueError(f"{output}: expected a name that ends in one of {', '.join(OUTPUT_SUFFIXES)}")
    if str(output.resolve()) in [locate_source(path) for path in paths]:
        raise ValueError(f"{output}: is one of the inputs. Choose another name.")
    if not overwrite:
        check_not_exists(output)
    if selection.tokens is not None and counter is None:
        raise ValueError("tokens: got no tokenizer to count with. Give --tokenizer-model.")
    source = _InputLines(paths, key, skip_bad_lines)
    n_documents = n_tokens = 0
    with (
        _make_bar(selection, quiet) as bar,
        _open_output(output) as file,
        closing(_select_documents(source, selection, output)) as selected,
    ):
        for line, n in _count_tokens(selected, counter):
            file.write(line + b"\n")
            n_documents += 1
            n_tokens += n
            bar.update(n if selection.tokens else 1)
            if selection.tokens is not None and n_tokens >= selection.tokens:
                break
        _check_enough(selection, n_documents, n_tokens, describe_inputs(inputs))
    return SubsetResult(n_documents, n_tokens if counter else None, source.n_rejected, source.n_damaged)


def subset_dataset(
    prefix: Path, output: Path, selection: DocumentSelection, quiet: bool = False, overwrite: bool = False
) -> SubsetResult:
    """Write the selected documents of a dataset. A sample equals the sample of the text of the dataset.

    Memory: the index of the dataset, and 24 bytes per document for a sample. Raises as `subset_text`.
    """
    dataset = open_dataset(prefix)
    if output.resolve() == prefix.resolve():
        raise ValueError(f"{output}: is the input. Choose another name.")
    if output.name.endswith(OUTPUT_SUFFIXES):
        raise ValueError(
            f"{output}: got the name of a text file, expected a prefix: a subset of a dataset is a dataset"
        )
    provenance = {"subset_of": describe_origin(dataset), "selection": selection.to_meta()}
    if is_finished(output, provenance, overwrite):
        existing = open_dataset(output)
        log.info("%s: exists already, the same subset of the same dataset", output)
        return SubsetResult(existing.n_documents, existing.n_tokens)
    numbers = _select_dataset_documents(dataset, selection)
    lengths = dataset.document_tokens[numbers]
    n_tokens = int(lengths.sum())
    _check_enough(selection, len(numbers), n_tokens, str(prefix))
    sidecar = dataset.sidecar or {}
    meta = {name: sidecar[name] for name in COPIED_META if name in sidecar}
    meta |= provenance
    meta["empty_documents"] = int((lengths == int(bool(sidecar.get("append_eod")))).sum())
    with (
        ProgressBar("copying", n_tokens, "tokens", quiet=quiet) as bar,
        IndexedWriter(output, dataset.dtype, meta) as writer,
    ):
        copy_documents(dataset, numbers, writer, bar.update)
    return SubsetResult(len(numbers), n_tokens)


class _InputLines:
    """Lines of the inputs, and their conversion to documents."""

    def __init__(self, paths: Sequence[Source], key: str, skip: bool) -> None:
        self.pieces, self.key, self.skip = split_into_pieces(paths, piece_bytes=1 << 62), key, skip
        self.n_rejected = self.n_damaged = 0

    def iter_lines(self) -> Iterator[tuple[LinePosition, Any]]:
        """Yield every line that is not blank, or the value of every row, without validation."""
        for piece in self.pieces:
            values = _iter_rows(piece, self.key) if _is_columnar(piece.path) else _iter_text_lines(piece)
            try:
                for number, value in values:
                    yield LinePosition(piece.path, number), value
            except DamagedFileError as error:
                if not self.skip:
                    raise
                self.n_damaged += 1
                log.warning("%s: the rest is skipped, it is damaged (%s)", piece.path, error.reason)

    def parse_document(self, position: LinePosition, value: Any) -> Document | None:
        """Convert a line or value to a document; None for a bad line that is skipped."""
        try:
            if _is_columnar(position.path):
                text = check_text(value, self.key)
                return position, json.dumps({self.key: text}, ensure_ascii=False).encode(), text
            return position, value, parse_text(value, self.key)
        except ValueError as error:
            if not self.skip:
                raise ValueError(f"{position}: {error}") from error
            self.n_rejected += 1
            return None

    def iter_documents(self) -> Iterator[Document]:
        """Yield all documents in order."""
        return (
            document for line in self.iter_lines() if (document := self.parse_document(*line)) is not None
        )


def _is_columnar(path: Source) -> bool:
    return path.name.endswith(COLUMN_SUFFIXES)


def _iter_rows(piece: InputPiece, key: str) -> Iterator[tuple[int, Any]]:
    return enumerate((value for values in iter_rows(piece.path, key) for value in values), 1)


def _iter_text_lines(piece: InputPiece) -> Iterator[tuple[int, bytes]]:
    return ((i + 1, line) for i, line in iter_lines(piece) if line.strip())


def _select_documents(
    source: _InputLines, selection: DocumentSelection, output: Path
) -> Generator[Document, None, None]:
    """Yield the selected documents in order; for `tokens` all documents, as the caller counts."""
    if selection.sample is None:
        yield from islice(source.iter_documents(), selection.documents)
    elif isinstance(selection.sample, Fraction):
        # Bernoulli sampling: a priority, uniform on 0..2^64 - 1, is below the threshold with probability
        # `sample`. A larger share has a higher threshold, so its sample contains the smaller one.
        # exact: `sample` is a Fraction. A float has 53 bits and would move the threshold.
        most = int(selection.sample * 2**64)
        for line, priority in zip(source.iter_lines(), _iter_priorities(selection.seed), strict=False):
            if priority < most and (document := source.parse_document(*line)) is not None:
                yield document
    else:
        yield from _sample_documents(source, selection.sample, selection.seed, output)


def _iter_priorities(seed: int) -> Iterator[int]:
    """Yield a random 64-bit number per document. numpy guarantees this stream across versions."""
    # raw words of the bit generator: the methods of Generator may change between versions
    raw = np.random.PCG64(seed)
    while True:
        yield from raw.random_raw(PRIORITY_BATCH).tolist()


def _sample_documents(source: _InputLines, n: int, seed: int, output: Path) -> Iterator[Document]:
    """Yield the n documents of lowest priority, in order.

    Documents that are among the lowest n so far are spooled to disk; a heap holds their positions.
    """
    # Min-heap of (-priority, -number, offset in the spool, size, position). The root is the worst of the best
    # n: highest priority value, and among equal ones the latest document.
    best: list[tuple[int, int, int, int, LinePosition]] = []
    with tempfile.TemporaryFile(dir=output.parent) as spool:
        keyed = zip(source.iter_lines(), _iter_priorities(seed), strict=False)
        for number, (line, priority) in enumerate(keyed):
            # Reject by priority before parsing: most lines are not in the sample, and need no JSON
            # parser. Every line consumes one priority, whether it is selected, parsed or neither.
            if len(best) == n and -priority < best[0][0]:
                continue
            document = source.parse_document(*line)
            if document is None:
                continue
            position, raw, _ = document
            entry = (-priority, -number, spool.tell(), len(raw), position)
            spool.write(raw)
            # The replaced document stays in the spool: line i of n is among the lowest K so far with
            # probability K / i, which sums to the expected number of lines in the docstring of
            # `subset_text`.
            heapq.heappush(best, entry) if len(best) < n else heapq.heappushpop(best, entry)
        # entry[1] is -number: ascending document number
        for _, _, offset, size, position in sorted(best, key=lambda entry: -entry[1]):
            spool.seek(offset)
            raw = spool.read(size)
            yield position, raw, parse_text(raw, source.key)


def _count_tokens(
    documents: Iterator[Document], counter: CountingEncoder | None
) -> Iterator[tuple[bytes, int]]:
    """Yield (line, tokens), encoded in batches; 0 tokens without a counter."""
    if counter is None:
        yield from ((line, 0) for _, line, _ in documents)
        return
    batch: list[Document] = []
    n_characters, failed = 0, None
    while failed is None:
        try:
            document = next(documents, None)
        except ValueError as error:  # documents before the bad line may suffice: raise after they are used
            document, failed = None, error
        if document is not None:
            batch.append(document)
            n_characters += len(document[2])
        # the end of the documents and a bad line also end the last, smaller batch
        if document is None or len(batch) >= BATCH_DOCUMENTS or n_characters >= BATCH_CHARACTERS:
            if batch:
                positions, texts = [str(position) for position, _, _ in batch], [text for _, _, text in batch]
                _, lengths = encode_with_location(counter.encoder, texts, positions, counter.eod)
                yield from zip((line for _, line, _ in batch), lengths.tolist(), strict=True)
            batch, n_characters = [], 0
        if document is None and failed is None:
            return
    raise failed


def _select_dataset_documents(dataset: IndexedTokens, selection: DocumentSelection) -> np.ndarray:
    """Return the numbers of the selected documents, int64, ascending."""
    n = dataset.n_documents
    if selection.documents is not None:
        return np.arange(min(n, selection.skip), min(n, selection.skip + selection.documents))
    if selection.tokens is not None:
        # lengths [5, 3, 4], tokens 8: reached [5, 8, 12], searchsorted 1, so documents 0 and 1
        reached = np.cumsum(dataset.document_tokens)
        return np.arange(min(n, int(np.searchsorted(reached, selection.tokens)) + 1))
    assert selection.sample is not None, "exactly one criterion is set"
    # uint64 [n]: the same words as `_iter_priorities` yields in batches
    priorities = np.random.PCG64(selection.seed).random_raw(n)
    if isinstance(selection.sample, Fraction):
        return np.flatnonzero(priorities < np.uint64(int(selection.sample * 2**64)))
    if selection.sample >= n:
        return np.arange(n)
    # the n documents of lowest priority; ties go to earlier documents, as in _sample_documents
    # O(n): the K-th lowest priority without a full sort; sample - 1 is its index
    worst = np.partition(priorities, selection.sample - 1)[selection.sample - 1]
    below, equal = np.flatnonzero(priorities < worst), np.flatnonzero(priorities == worst)
    return np.sort(np.concatenate([below, equal[: selection.sample - len(below)]]))


def _check_enough(selection: DocumentSelection, n_documents: int, n_tokens: int, source: str) -> None:
    requested = selection.sample if isinstance(selection.sample, int) else selection.documents
    if requested is not None and n_documents < requested:
        raise ValueError(f"{source}: got {n_documents:,} documents, expected {requested:,}. Request fewer.")
    if selection.tokens is not None and n_tokens < selection.tokens:
        raise ValueError(f"{source}: got {n_tokens:,} tokens, expected {selection.tokens:,}. Request fewer.")


@contextmanager
def _open_output(path: Path) -> Iterator[IO[bytes]]:
    """Open an output that is renamed to its name at a normal exit; the suffix selects the compression."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        atomic_path(path, exclusive=True) as partial,
        partial.open("wb") as file,
        _open_compressor(path, file) as compressed,
    ):
        yield compressed


@contextmanager
def _open_compressor(path: Path, file: IO[bytes]) -> Iterator[IO[bytes]]:
    if path.name.endswith(".gz"):
        # no file name and mtime 0 in the header: equal subsets are equal files
        with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as packed:
            yield packed  # type: ignore[misc]  # typeshed: a GzipFile is no IO
    elif path.name.endswith(".zst"):
        import zstandard  # only this suffix requires it

        with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as packed:
            yield packed
    else:
        yield file


def _make_bar(selection: DocumentSelection, quiet: bool) -> ProgressBar:
    n_documents = selection.sample if isinstance(selection.sample, int) else selection.documents
    unit = "tokens" if selection.tokens else "documents"
    return ProgressBar("subset", selection.tokens or n_documents, unit, quiet=quiet)
