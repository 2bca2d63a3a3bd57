"""Join .bin/.idx pairs into one, in order, without holding more than a block of them in memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter

BLOCK_TOKENS = 1 << 22


def merge(prefixes: Sequence[str], output: Path) -> IndexedWriter:
    """Write the documents of all pairs, one pair after another, as one.

    Raises FileNotFoundError or ValueError for a pair that cannot be read, and ValueError where two were
    made by different tokenizers or in different dtypes, or the output is one of the inputs.
    """
    pairs = [IndexedTokens(prefix) for prefix in prefixes]
    if any(Path(prefix).resolve() == output.resolve() for prefix in prefixes):
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
    about: dict[str, Any] = {"merged_from": [_origin(pair) for pair in pairs]}
    if known := next((_tokenizer(pair) for pair in pairs if _tokenizer(pair)), None):
        about["tokenizer"] = known
    with IndexedWriter(output, pairs[0].dtype, about) as writer:
        for pair in pairs:
            _append(pair, writer)
    return writer


def _append(pair: IndexedTokens, writer: IndexedWriter) -> None:
    begin = 0
    while begin < pair.n_documents:
        sizes = np.cumsum(pair.document_tokens[begin : begin + BLOCK_TOKENS])
        n = max(1, int(np.searchsorted(sizes, BLOCK_TOKENS, side="right")))
        lengths = pair.document_tokens[begin : begin + n]
        total = int(lengths.sum())
        writer.add_documents(
            np.asarray(pair.read(begin, 0, total)) if total else np.empty(0, pair.dtype), lengths
        )
        begin += n


def _tokenizer(pair: IndexedTokens) -> dict[str, Any]:
    return (pair.sidecar or {}).get("tokenizer") or {}


def _origin(pair: IndexedTokens) -> dict[str, Any]:
    told = {"path": Path(pair.prefix).name, "documents": pair.n_documents, "tokens": pair.n_tokens}
    return told | {"sha256": (pair.sidecar or {}).get("sha256")}
