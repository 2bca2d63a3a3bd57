"""Join .bin/.idx pairs into one, in order, without holding more than a block of them in memory."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.indexed import IndexedTokens, prefix_of
from megatron.data.indexed_writer import IndexedWriter

BLOCK_TOKENS = 1 << 22


def merge(prefixes: Sequence[str], output: Path) -> IndexedWriter:
    """Write the documents of all pairs, one pair after another, as one.

    Raises FileNotFoundError or ValueError for a pair that cannot be read, and ValueError where two were
    made by different tokenizers or in different dtypes, or the output is one of the inputs.
    """
    pairs = [IndexedTokens(prefix_of(prefix)) for prefix in prefixes]
    if any(Path(pair.prefix).resolve() == output.resolve() for pair in pairs):
        raise ValueError(f"{output}: is one of the inputs; choose another name")
    for pair in pairs[1:]:
        if pair.dtype != pairs[0].dtype:
            raise ValueError(
                f"{pair.prefix}: holds {pair.dtype}, {pairs[0].prefix} {pairs[0].dtype}; tokenise them alike"
            )
        sums = [_tokenizer(one).get("sha256") for one in (pairs[0], pair)]
        if all(sums) and sums[0] != sums[1]:
            raise ValueError(
                f"{pair.prefix}: made by another tokenizer than {pairs[0].prefix}; tokenise them alike"
            )
    about: dict[str, Any] = {"merged_from": [origin(pair) for pair in pairs]}
    if known := next((_tokenizer(pair) for pair in pairs if _tokenizer(pair)), None):
        about["tokenizer"] = known
    with IndexedWriter(output, pairs[0].dtype, about) as writer:
        for pair in pairs:
            append(pair, np.arange(pair.n_documents), writer)
    return writer


def append(
    pair: IndexedTokens,
    chosen: np.ndarray,
    writer: IndexedWriter,
    advance: Callable[[int], object] = lambda n_tokens: None,
) -> None:
    """Write documents of a pair, `chosen` int64 rising; `advance` hears of the tokens of each block."""
    begin = 0
    while begin < len(chosen):
        sizes = np.cumsum(pair.document_tokens[chosen[begin : begin + BLOCK_TOKENS]])
        n = max(1, int(np.searchsorted(sizes, BLOCK_TOKENS, side="right")))
        part, total = chosen[begin : begin + n], int(sizes[n - 1])
        if not total:
            ids = np.empty(0, pair.dtype)
        elif part[-1] - part[0] == n - 1:  # one after another: no need to gather
            ids = np.asarray(pair.read(int(part[0]), 0, total))
        else:
            ids = np.concatenate([pair.document(i) for i in part.tolist()])
        writer.add_documents(ids, pair.document_tokens[part])
        advance(total)
        begin += n


def _tokenizer(pair: IndexedTokens) -> dict[str, Any]:
    return (pair.sidecar or {}).get("tokenizer") or {}


def origin(pair: IndexedTokens) -> dict[str, Any]:
    """What a sidecar says of a pair that another was made from."""
    told = {"path": Path(pair.prefix).name, "documents": pair.n_documents, "tokens": pair.n_tokens}
    return told | {"sha256": (pair.sidecar or {}).get("sha256")}
