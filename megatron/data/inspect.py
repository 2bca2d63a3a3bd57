"""What is in a .bin/.idx pair, and whether it is whole."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.indexed import IndexedTokens

BLOCK_TOKENS = 1 << 20
BLOCK_DOCUMENTS = 1 << 18


@dataclass(frozen=True)
class Summary:
    """Counts of one pair. `histogram`: (least length, documents) for lengths of 2^k to 2^(k+1) - 1."""

    n_documents: int
    n_tokens: int
    dtype: str
    shortest: int
    longest: int
    mean: float
    median: float
    histogram: list[tuple[int, int]]


def summarise(pair: IndexedTokens) -> Summary:
    """Count a pair's documents by length; memory does not grow with their number."""
    lengths, counts = _lengths(pair)
    if not len(lengths):
        return Summary(0, 0, pair.dtype.name, 0, 0, 0.0, 0.0, [])
    n, upto = pair.n_documents, np.cumsum(counts)
    middle = [int(lengths[np.searchsorted(upto, rank, side="right")]) for rank in ((n - 1) // 2, n // 2)]
    bins = np.floor(np.log2(np.maximum(lengths, 1))).astype(int) + 1
    bins[lengths == 0] = 0
    histogram = [
        (0 if k == 0 else 2 ** (k - 1), int(counts[bins == k].sum())) for k in np.unique(bins).tolist()
    ]
    return Summary(
        n_documents=n,
        n_tokens=pair.n_tokens,
        dtype=pair.dtype.name,
        shortest=int(lengths[0]),
        longest=int(lengths[-1]),
        mean=pair.n_tokens / n,
        median=sum(middle) / 2,
        histogram=histogram,
    )


def _lengths(pair: IndexedTokens) -> tuple[np.ndarray, np.ndarray]:
    """The lengths that documents have, rising, and how many have each."""
    lengths = counts = np.zeros(0, dtype=np.int64)
    for _, part in _documents(pair):
        found, n_found = np.unique(part, return_counts=True)
        lengths, place = np.unique(np.concatenate([lengths, found]), return_inverse=True)
        counts = np.bincount(place, np.concatenate([counts, n_found])).astype(np.int64)
    return lengths, counts


def _documents(pair: IndexedTokens) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(where each begins in the tokens, its length) of some documents at a time."""
    for first in range(0, pair.n_documents, BLOCK_DOCUMENTS):
        numbers = np.arange(first, min(first + BLOCK_DOCUMENTS, pair.n_documents))
        yield pair.document_spans(numbers)


def faults(prefix: str | Path, advance: Callable[[int], object] = lambda n_bytes: None) -> Iterator[str]:
    """Every invariant that a pair breaks, a sentence each; none: it is whole.

    Opening checks the index against itself and against the size of the data; this reads both files through:
    sums and counts against the sidecar, every id against the tokenizer's vocabulary, the end of every
    document. `advance` hears of the bytes as they are read. Raises what opening raises.
    """
    pair = IndexedTokens(prefix)
    if pair.sidecar is None:
        yield f"{prefix}.json: no sidecar; sums and vocabulary cannot be checked"
    told = pair.sidecar or {}
    sums = told.get("sha256") or {}
    if pair.sidecar is not None and not {"bin", "idx"} <= set(sums):
        yield f"{prefix}.json: has no sums; what was changed since cannot be told"
    yield from _wrong_counts(pair, told)
    with Path(f"{prefix}.idx").open("rb") as file:
        if "idx" in sums and hashlib.file_digest(file, "sha256").hexdigest() != sums["idx"]:
            yield f"{prefix}.idx: its sum is not the sidecar's; the file has changed"
    yield from _wrong_tokens(pair, told, sums.get("bin"), advance)


def _wrong_counts(pair: IndexedTokens, told: dict[str, Any]) -> Iterator[str]:
    """What the sidecar says of documents and is not so."""
    lengths, counts = _lengths(pair)
    ends = bool(told.get("append_eod"))
    found = {
        "documents": pair.n_documents,
        "tokens": pair.n_tokens,
        "dtype": pair.dtype.name,
        "longest_document": int(lengths.max(initial=0)),
        "empty_documents": int(counts[lengths == int(ends)].sum()),
    }
    for name, value in found.items():
        if name in told and told[name] != value:
            yield f"{pair.prefix}.json: says {told[name]} {name}, the pair has {value}"


def _wrong_tokens(
    pair: IndexedTokens, told: dict[str, Any], wanted: str | None, advance: Callable[[int], object]
) -> Iterator[str]:
    """One walk through the data: its sum, and ids that no token has."""
    tokenizer = told.get("tokenizer") or {}
    n_known, eod = tokenizer.get("n_tokens"), tokenizer.get("eod_id") if told.get("append_eod") else None
    sum_, least, most = hashlib.sha256(), 0, -1
    ends, n_ended, odd = _Ends(pair), 0, None
    for begin in range(0, pair.n_tokens, BLOCK_TOKENS):
        ids = pair.copied(begin, BLOCK_TOKENS)
        sum_.update(ids.data)
        least, most = min(least, int(ids.min())), max(most, int(ids.max()))
        if eod is not None and odd is None:
            here = ends.upto(begin + len(ids))
            wrong = np.flatnonzero(ids[here - 1 - begin] != eod)
            odd = n_ended + int(wrong[0]) if len(wrong) else None
            n_ended += len(here)
        advance(ids.nbytes)
    if wanted is not None and sum_.hexdigest() != wanted:
        yield f"{pair.prefix}.bin: its sum is not the sidecar's; the file has changed"
    if n_known is not None and most >= n_known:
        yield f"{pair.prefix}.bin: id {most} is past the tokenizer's {n_known}"
    if least < 0:
        yield f"{pair.prefix}.bin: id {least} is negative"
    if odd is not None:
        yield f"{pair.prefix}.bin: document {odd} does not end with id {eod}, as the sidecar says of all"


class _Ends:
    """Where documents with tokens end, in order, without holding all of it."""

    def __init__(self, pair: IndexedTokens) -> None:
        self.more = (begins[n > 0] + n[n > 0] for begins, n in _documents(pair))
        self.held = np.zeros(0, dtype=np.int64)

    def upto(self, token: int) -> np.ndarray:
        """The next ones, up to `token`."""
        while not len(self.held) or self.held[-1] <= token:
            if (block := next(self.more, None)) is None:
                break
            self.held = np.concatenate([self.held, block])
        n = int(np.searchsorted(self.held, token, side="right"))
        found, self.held = self.held[:n], self.held[n:]
        return found
