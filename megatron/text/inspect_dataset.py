"""Statistics and verification of a .bin/.idx dataset."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data import open_dataset
from megatron.data.block_hash import BlockHash, hash_file
from megatron.data.indexed import IndexedTokens
from megatron.data.parts import DatasetPart

BLOCK_TOKENS = 1 << 20
BLOCK_DOCUMENTS = 1 << 18


@dataclass(frozen=True)
class LengthSummary:
    """Document lengths of a dataset. `histogram`: (minimum, documents) for lengths 2^k to 2^(k+1) - 1."""

    n_documents: int
    n_tokens: int
    dtype: str
    shortest: int
    longest: int
    mean: float
    median: float
    histogram: list[tuple[int, int]]


def summarize_lengths(dataset: IndexedTokens) -> LengthSummary:
    """Summarize the document lengths of a dataset. Memory does not grow with the number of documents."""
    lengths, counts = _count_lengths(dataset)
    if not len(lengths):
        return LengthSummary(0, 0, dataset.dtype.name, 0, 0, 0.0, 0.0, [])
    # median from the counts: the documents of ranks (n - 1) / 2 and n / 2
    # in ascending order of length Lengths [2, 5], counts [3, 1], n = 4:
    # upto = [3, 4], ranks 1 and 2 are both below 3, so the median is 2.
    n, upto = dataset.n_documents, np.cumsum(counts)
    middle = [int(lengths[np.searchsorted(upto, rank, side="right")]) for rank in ((n - 1) // 2, n // 2)]
    # bin 0: empty documents; bin k > 0: lengths 2^(k - 1) to 2^k - 1
    # float64 is exact enough: log2(2^k - 1) rounds up to k only from k = 49 on
    bins = np.floor(np.log2(np.maximum(lengths, 1))).astype(int) + 1
    bins[lengths == 0] = 0
    histogram = [
        (0 if k == 0 else 2 ** (k - 1), int(counts[bins == k].sum())) for k in np.unique(bins).tolist()
    ]
    return LengthSummary(
        n_documents=n,
        n_tokens=dataset.n_tokens,
        dtype=dataset.dtype.name,
        shortest=int(lengths[0]),
        longest=int(lengths[-1]),
        mean=dataset.n_tokens / n,
        median=sum(middle) / 2,
        histogram=histogram,
    )


def _count_lengths(dataset: IndexedTokens) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct document lengths, ascending, and the number of documents of each."""
    lengths = counts = np.zeros(0, dtype=np.int64)
    for part in dataset.iter_document_lengths():
        part_lengths, part_counts = np.unique(part, return_counts=True)
        # merge the block into the sorted distinct lengths;
        # their number is bounded by the longest document
        lengths, index = np.unique(np.concatenate([lengths, part_lengths]), return_inverse=True)
        # bincount sums weights in float64, exactly below 2^53 documents
        counts = np.bincount(index, np.concatenate([counts, part_counts])).astype(np.int64)
    return lengths, counts


def find_faults(prefix: str | Path, advance: Callable[[int], object] = lambda n_bytes: None) -> Iterator[str]:
    """Yield a message for every violated invariant; none for an intact dataset.

    Opening checks the index and the size of the data. This function reads
    both files completely. It checks hashes and counts against the sidecar,
    every id against the tokenizer's vocabulary, and the last token of every
    document. `advance` is called with the number of bytes read.

    An error of opening a part of a dataset of parts is a message. Raises the errors of
    `open_dataset` for the whole.
    """
    dataset = open_dataset(prefix)
    if not dataset.parts:
        yield from _find_own_faults(dataset, advance)
        return
    for part in dataset.parts:
        yield from _verify_part(part, dataset, advance)
    sidecar = dataset.sidecar or {}
    yield from _find_wrong_index(dataset, sidecar, ["idx"])
    yield from find_wrong_counts(dataset, sidecar)


def _verify_part(part: DatasetPart, whole: IndexedTokens, advance: Callable[[int], object]) -> Iterator[str]:
    """Yield the messages for one part; it is read completely."""
    if not part.matches_record():
        yield f"{part.prefix}: got another sidecar or index than in {whole.files.sidecar}"
    try:
        yield from _find_own_faults(open_dataset(part.prefix), advance)
    except (OSError, ValueError) as error:
        yield str(error)


def _find_own_faults(dataset: IndexedTokens, advance: Callable[[int], object]) -> Iterator[str]:
    """Yield the messages for a dataset without parts."""
    sidecar = dataset.sidecar
    if sidecar is None:
        yield f"{dataset.prefix}.json: no sidecar; hashes and vocabulary cannot be checked"
    else:
        yield from _find_wrong_index(dataset, sidecar, ["bin", "idx"])
        yield from find_wrong_counts(dataset, sidecar)
    yield from _find_wrong_tokens(dataset, sidecar or {}, advance)


def _find_wrong_index(
    dataset: IndexedTokens, sidecar: dict[str, Any], required: Sequence[str]
) -> Iterator[str]:
    """Check the hash of the index. `required`: names of the hashes that the sidecar must have."""
    sums = sidecar.get("sha256") or {}
    if not set(required) <= set(sums):
        yield f"{dataset.files.sidecar}: no hashes; later changes cannot be detected"
    if "idx" not in sums:
        return
    if hash_file(dataset.files.index, sums.get("block_bytes")) != sums["idx"]:
        yield f"{dataset.files.index}: its hash differs from the sidecar's; the file has changed"


def find_wrong_counts(dataset: IndexedTokens, sidecar: dict[str, Any]) -> Iterator[str]:
    """Yield a message for every count of the sidecar that the files contradict."""
    lengths, counts = _count_lengths(dataset)
    ends = bool(sidecar.get("append_eod"))
    actual = {
        "documents": dataset.n_documents,
        "tokens": dataset.n_tokens,
        "dtype": dataset.dtype.name,
        "longest_document": int(lengths.max(initial=0)),
        "empty_documents": int(counts[lengths == int(ends)].sum()),
    }
    for name, value in actual.items():
        if name in sidecar and sidecar[name] != value:
            yield f"{dataset.prefix}.json: got {sidecar[name]} for {name}, expected {value} as in the files"


def _find_wrong_tokens(
    dataset: IndexedTokens, sidecar: dict[str, Any], advance: Callable[[int], object]
) -> Iterator[str]:
    """Read the data once; check its hash, the range of ids and the last token of each document."""
    tokenizer, sums = sidecar.get("tokenizer") or {}, sidecar.get("sha256") or {}
    vocab_size = tokenizer.get("n_tokens")
    eod = tokenizer.get("eod_id") if sidecar.get("append_eod") else None
    # start values that no check below reports, also for a dataset without tokens
    data_hash, least, most, odd = BlockHash(sums.get("block_bytes")), 0, -1, None
    for first in range(0, dataset.n_documents, BLOCK_DOCUMENTS):
        numbers = np.arange(first, min(first + BLOCK_DOCUMENTS, dataset.n_documents))
        begins, lengths = dataset.document_spans(numbers)
        ends = begins + lengths
        for begin in range(int(begins[0]), int(ends[-1]), BLOCK_TOKENS):
            # one read serves all three checks: hash, range of ids, last tokens
            ids = dataset.read_copy(begin, min(BLOCK_TOKENS, int(ends[-1]) - begin))
            data_hash.update(ids.data)
            least, most = min(least, int(ids.min())), max(most, int(ids.max()))
            if eod is not None and odd is None:
                # the last token of a document that ends in
                # this block is in this block, at end - 1
                low, high = np.searchsorted(ends, (begin, begin + len(ids)), side="right")
                ending = low + np.flatnonzero(lengths[low:high])
                wrong = ending[ids[ends[ending] - 1 - begin] != eod]
                odd = first + int(wrong[0]) if len(wrong) else None
            advance(ids.nbytes)
    if "bin" in sums and data_hash.hexdigest() != sums["bin"]:
        yield f"{dataset.prefix}.bin: its hash differs from the sidecar's; the file has changed"
    if vocab_size is not None and most >= vocab_size:
        yield f"{dataset.prefix}.bin: got id {most}, expected ids below the tokenizer's {vocab_size}"
    if least < 0:
        yield f"{dataset.prefix}.bin: got negative id {least}"
    if odd is not None:
        yield f"{dataset.prefix}.bin: document {odd} does not end with id {eod} as in the sidecar"
