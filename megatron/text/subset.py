"""Subsets of a corpus: the first documents, those with a number of tokens, or a random sample.

Text stays text: the selected lines are copied
unchanged. A subset of a dataset is a dataset.
"""

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.random import PCG64  # numpy imports it on demand: then a signal would end the process

from megatron.cli import ProgressBar
from megatron.data import open_dataset
from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.sidecar import locate_dataset, strip_suffix
from megatron.io import atomic_path
from megatron.log import get_logger
from megatron.text.arguments import check_not_exists
from megatron.text.inputs import COLUMN_SUFFIXES, Source, describe_inputs, find_inputs, locate_source
from megatron.text.merge import is_finished
from megatron.text.merge_inputs import describe_origin
from megatron.text.text_readers import (
    InputPiece,
    check_text,
    iter_columns,
    iter_lines,
    parse_text,
    split_into_pieces,
)

log = get_logger(__name__)
OUTPUT_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
BLOCK_DOCUMENTS = 256  # copied at a time
PRIORITY_BATCH = 4096  # priorities drawn at a time
# entries copied from the sidecar of a dataset
COPIED_META = ("tokenizer", "append_eod", "special_text", "json_key")


class Document(NamedTuple):
    """A document of text: "file, line 3", the line without its end, and the text in it."""

    location: str
    line: bytes
    text: str


@dataclass(frozen=True, kw_only=True)
class DocumentSelection:
    """Selection of documents; exactly one of the first three fields is set.

    documents   number of first documents
    tokens      the smallest number of first documents with at least so many tokens
    sample      probability of each document, in (0, 1);
                of a dataset also a number of random documents
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


def find_dataset_prefix(word: str) -> Path | None:
    """Return the prefix of the dataset that a word names, with or without a suffix; None: no dataset."""
    path = Path(strip_suffix(word))
    is_dataset = locate_dataset(path).index.is_file()
    return path if is_dataset and (str(path) != word or not path.exists()) else None


def subset_text(
    inputs: Sequence[str], output: Path, selection: DocumentSelection,
    count: Callable[[Document], int] | None = None,
    key: str = "text", quiet: bool = False, overwrite: bool = False,
) -> SubsetResult:  # fmt: skip
    """Write the selected lines of `inputs` to `output` in their order.

    The suffix of the output selects its compression. Lines stay unchanged except
    for the line end, which becomes a newline. Blank lines are not documents. Rows
    of parquet and arrow files become {key: text}. Memory: a document. `count` returns the
    tokens of a document.

    Raises FileNotFoundError. Raises ValueError with file and line for an invalid
    line that is read, and for fewer documents or tokens than requested. Raises
    OSError for a full disk. After an error no new output exists, and an existing
    one is unchanged.
    """
    paths = find_inputs(inputs)
    if not output.name.endswith(OUTPUT_SUFFIXES):
        raise ValueError(f"{output}: expected a name that ends in one of {', '.join(OUTPUT_SUFFIXES)}")
    if str(output.resolve()) in [locate_source(path) for path in paths]:
        raise ValueError(f"{output}: is one of the inputs. Choose another name.")
    if not overwrite:
        check_not_exists(output)
    if isinstance(selection.sample, int):
        raise ValueError(
            f"sample: got {selection.sample} documents of text, expected a share such as 0.1. Tokenize the "
            "text first: a dataset has samples of a number of documents."
        )
    if selection.tokens is not None and count is None:
        raise ValueError("tokens: got no tokenizer to count with. Give --tokenizer-model.")
    n_documents = n_tokens = 0
    n_expected, unit = selection.tokens or selection.documents, "tokens" if selection.tokens else "documents"
    with (
        ProgressBar("subset", n_expected, unit, quiet=quiet) as bar,
        _open_output(output) as file,
        closing(_select_documents(iter_documents(paths, key), selection)) as selected,
    ):
        for document in selected:
            n = 0 if count is None else count(document)
            file.write(document.line + b"\n")
            n_documents += 1
            n_tokens += n
            bar.update(n if selection.tokens else 1)
            if selection.tokens is not None and n_tokens >= selection.tokens:
                break
        _check_enough(selection, n_documents, n_tokens, describe_inputs(inputs))
    return SubsetResult(n_documents, n_tokens if count else None)


def subset_dataset(
    prefix: Path, output: Path, selection: DocumentSelection, quiet: bool = False, overwrite: bool = False
) -> SubsetResult:
    """Write the selected documents of a dataset. A sample equals the sample of the text of the dataset.

    Memory: the index of the dataset, and 24 bytes per document for a sample. Raises
    as `subset_text`.
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
        for first in range(0, len(numbers), BLOCK_DOCUMENTS):
            begins, sizes = dataset.document_spans(numbers[first : first + BLOCK_DOCUMENTS])
            spans = zip(begins.tolist(), sizes.tolist(), strict=True)
            parts = [dataset.tokens[begin : begin + size] for begin, size in spans]
            writer.add_documents(np.concatenate(parts), sizes)
            bar.update(int(sizes.sum()))
    return SubsetResult(len(numbers), n_tokens)


def iter_documents(paths: Sequence[Source], key: str) -> Iterator[Document]:
    """Yield the documents of files. Raises ValueError with file and line for a bad one."""
    for piece in split_into_pieces(paths, piece_bytes=1 << 62):
        is_columnar = piece.path.name.endswith(COLUMN_SUFFIXES)
        for number, value in _iter_values(piece, key):
            location = f"{piece.path}, {'row' if is_columnar else 'line'} {number}"
            try:
                text = check_text(value, key) if is_columnar else parse_text(value, key)
            except ValueError as error:
                raise ValueError(f"{location}: {error}") from error
            line = json.dumps({key: text}, ensure_ascii=False).encode() if is_columnar else value
            yield Document(location, line, text)


def _iter_values(piece: InputPiece, key: str) -> Iterator[tuple[int, Any]]:
    """Yield (number from 1, line that is not blank) of a text file, or (number, value) of a column."""
    if piece.path.name.endswith(COLUMN_SUFFIXES):
        columns = iter_columns(piece.path, [key])
        yield from enumerate(chain.from_iterable(column.to_pylist() for (column,) in columns), 1)
    else:
        yield from ((i + 1, line) for i, line in iter_lines(piece) if line.strip())


def _select_documents(
    documents: Iterator[Document], selection: DocumentSelection
) -> Generator[Document, None, None]:
    """Yield the selected documents in order; for `tokens` all documents, as the caller counts."""
    if isinstance(selection.sample, Fraction):
        most = _threshold(selection.sample)
        keyed = zip(documents, _iter_priorities(selection.seed), strict=False)
        documents = (document for document, priority in keyed if priority < most)
    yield from islice(documents, selection.documents)


def _threshold(share: Fraction) -> int:
    """Return the limit of the priorities, uniform on 0..2^64 - 1, of a share of the documents.

    A larger share has a higher limit, so its sample contains the smaller one.
    """
    # exact: a float has 53 bits and would move the limit
    return int(share * 2**64)


def _iter_priorities(seed: int) -> Iterator[int]:
    """Yield a random 64-bit number per document. numpy guarantees this stream across versions."""
    # raw words of the bit generator: the methods
    # of Generator may change between versions
    raw = PCG64(seed)
    while True:
        yield from raw.random_raw(PRIORITY_BATCH).tolist()


def _select_dataset_documents(dataset: IndexedTokens, selection: DocumentSelection) -> np.ndarray:
    """Return the numbers of the selected documents, int64, ascending."""
    n = dataset.n_documents
    if selection.documents is not None:
        return np.arange(min(n, selection.skip), min(n, selection.skip + selection.documents))
    if selection.tokens is not None:
        # lengths [5, 3, 4], tokens 8: reached [5, 8,
        # 12], searchsorted 1, so documents 0 and 1
        reached = np.cumsum(dataset.document_tokens)
        return np.arange(min(n, int(np.searchsorted(reached, selection.tokens)) + 1))
    assert selection.sample is not None, "exactly one criterion is set"
    # uint64 [n]: the same words as `_iter_priorities` yields in batches
    priorities = PCG64(selection.seed).random_raw(n)
    if isinstance(selection.sample, Fraction):
        return np.flatnonzero(priorities < np.uint64(_threshold(selection.sample)))
    # the documents of lowest priority; stable: ties go to earlier documents
    return np.sort(np.argsort(priorities, kind="stable")[: selection.sample])


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
    packing = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    with atomic_path(path, exclusive=True) as partial, partial.open("wb") as file:
        if packing is None:
            yield file
            return
        import pyarrow  # slow to import

        with pyarrow.CompressedOutputStream(pyarrow.PythonFile(file, mode="w"), packing) as packed:
            yield packed
