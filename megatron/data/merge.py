"""Join .bin/.idx pairs into one, in order, without holding more than a block of them in memory."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron.data.indexed import IndexedTokens, prefix_of
from megatron.data.indexed_writer import IndexedWriter
from megatron.log import get_logger

log = get_logger(__name__)
BLOCK_TOKENS = 1 << 20
BLOCK_DOCUMENTS = 1 << 18
DOCUMENTS_AHEAD = 1 << 12  # as many of them as may be a block


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
        if not all(sums):
            unknown = pair if sums[0] else pairs[0]
            log.warning(
                "%s: no sidecar names its tokenizer; see that it is that of the others", unknown.prefix
            )
        elif sums[0] != sums[1]:
            raise ValueError(
                f"{pair.prefix}: made by another tokenizer than {pairs[0].prefix}; tokenise them alike"
            )
    about: dict[str, Any] = {"merged_from": [origin(pair) for pair in pairs]}
    if known := next((_tokenizer(pair) for pair in pairs if _tokenizer(pair)), None):
        about["tokenizer"] = known
    told = [pair.sidecar or {} for pair in pairs]
    for name in ("append_eod", "special_text", "json_key"):  # what is so of all
        if name in told[0] and all(one.get(name) == told[0][name] for one in told):
            about[name] = told[0][name]
    if "append_eod" in about and all("empty_documents" in one for one in told):
        about["empty_documents"] = sum(one["empty_documents"] for one in told)
    total = sum(pair.n_tokens for pair in pairs)
    with (
        tqdm(total=total, unit=" tokens", unit_scale=True, disable=None, desc="joining") as bar,
        IndexedWriter(output, pairs[0].dtype, about) as writer,
    ):
        for pair in pairs:
            for first in range(0, pair.n_documents, BLOCK_DOCUMENTS):
                chosen = np.arange(first, min(first + BLOCK_DOCUMENTS, pair.n_documents))
                append(pair, chosen, writer, bar.update)
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
        begins, lengths = pair.document_spans(chosen[begin : begin + DOCUMENTS_AHEAD])
        sizes = np.cumsum(lengths)
        n = max(1, int(np.searchsorted(sizes, BLOCK_TOKENS, side="right")))
        part, total = chosen[begin : begin + n], int(sizes[n - 1])
        if not total:
            ids = np.empty(0, pair.dtype)
        elif part[-1] - part[0] == n - 1:  # one after another: no need to gather
            ids = pair.copied(int(begins[0]), total)
        else:
            ids = np.concatenate([pair.document(i) for i in part.tolist()])
        writer.add_documents(ids, lengths[:n])
        advance(total)
        begin += n


def _tokenizer(pair: IndexedTokens) -> dict[str, Any]:
    return (pair.sidecar or {}).get("tokenizer") or {}


def origin(pair: IndexedTokens) -> dict[str, Any]:
    """What a sidecar says of a pair that another was made from."""
    told = {"path": Path(pair.prefix).name, "documents": pair.n_documents, "tokens": pair.n_tokens}
    return told | {"sha256": (pair.sidecar or {}).get("sha256")}
