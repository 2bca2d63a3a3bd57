"""What is in a .bin/.idx pair, and whether it is whole."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.indexed import IndexedTokens

BLOCK_TOKENS = 1 << 22


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
    """Count a pair's documents by length."""
    lengths = pair.document_tokens
    if not len(lengths):
        return Summary(0, 0, pair.dtype.name, 0, 0, 0.0, 0.0, [])
    bins = np.floor(np.log2(np.maximum(lengths, 1))).astype(int) + 1
    bins[lengths == 0] = 0
    counts = np.bincount(bins)
    return Summary(
        n_documents=pair.n_documents,
        n_tokens=pair.n_tokens,
        dtype=pair.dtype.name,
        shortest=int(lengths.min()),
        longest=int(lengths.max()),
        mean=float(lengths.mean()),
        median=float(np.median(lengths)),
        histogram=[(0 if k == 0 else 2 ** (k - 1), int(n)) for k, n in enumerate(counts) if n],
    )


def faults(prefix: str | Path) -> Iterator[str]:
    """Every invariant that a pair breaks, a sentence each; none: it is whole.

    Opening checks the index against itself and against the size of the data; this reads both files through:
    sums and counts against the sidecar, every id against the tokenizer's vocabulary. Raises what opening
    raises.
    """
    pair = IndexedTokens(prefix)
    told = pair.sidecar
    n_known = None
    if told is None:
        yield f"{prefix}.json: no sidecar; sums and vocabulary cannot be checked"
        told = {}
    else:
        n_known = (told.get("tokenizer") or {}).get("n_tokens")
        found = {"documents": pair.n_documents, "tokens": pair.n_tokens, "dtype": pair.dtype.name}
        for name, value in found.items():
            if name in told and told[name] != value:
                yield f"{prefix}.json: says {told[name]} {name}, the pair has {value}"
    for suffix in ("bin", "idx"):
        wanted = (told.get("sha256") or {}).get(suffix)
        if wanted is None:
            continue
        with Path(f"{prefix}.{suffix}").open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != wanted:
                yield f"{prefix}.{suffix}: its sum is not the sidecar's; the file has changed"
    for begin in range(0, pair.n_tokens, BLOCK_TOKENS):
        ids = pair.read(0, begin, min(BLOCK_TOKENS, pair.n_tokens - begin))
        if n_known is not None and len(ids) and int(ids.max()) >= n_known:
            yield f"{prefix}.bin: id {int(ids.max())} is past the tokenizer's {n_known}"
            return
        if len(ids) and int(ids.min()) < 0:
            yield f"{prefix}.bin: id {int(ids.min())} is negative"
            return
