"""Join .bin/.idx pairs into one, in order, without holding more than a block of them in memory."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron.config.sidecar import EodUse, eod_use
from megatron.data.indexed import IndexedTokens, prefix_of
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.output_names import check_free, dataset_files
from megatron.log import get_logger

log = get_logger(__name__)
BLOCK_TOKENS = 1 << 20
BLOCK_DOCUMENTS = 1 << 18
DOCUMENTS_AHEAD = 1 << 12  # as many of them as may be a block
SEEN_DOCUMENTS = 1000


@dataclass(frozen=True)
class Merged:
    """What is in the output. `is_new`: whether it was written now."""

    n_documents: int
    n_tokens: int
    is_new: bool


def merge(prefixes: Sequence[str], output: Path, mixed_eod: bool = False, overwrite: bool = False) -> Merged:
    """Write the documents of all pairs, one pair after another, as one.

    mixed_eod   join pairs although their documents end differently; the sidecar then tells no end for all

    An output that is there, made of the same pairs, is left as it is.

    Raises FileNotFoundError or ValueError for a pair that cannot be read, and ValueError where two were
    made by different tokenizers or in different dtypes or end their documents differently, where the output
    is one of the inputs, or is there and not to be overwritten.
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
    use = _common_eod(pairs, mixed_eod)
    origins = [origin(pair) for pair in pairs]
    if is_made_of(output, {"merged_from": origins}):
        there = IndexedTokens(output)
        return Merged(there.n_documents, there.n_tokens, is_new=False)
    if not overwrite:
        check_free(*dataset_files(output))
    about: dict[str, Any] = {"merged_from": origins}
    if known := next((_tokenizer(pair) for pair in pairs if _tokenizer(pair)), None):
        ends = [_tokenizer(pair).get("eod_id") for pair in pairs if _tokenizer(pair)]
        if use is None and len(set(ends)) > 1:  # then none of them is that of all
            known = {name: value for name, value in known.items() if not name.startswith("eod_")}
        about["tokenizer"] = known
    told = [pair.sidecar or {} for pair in pairs]
    for name in ("append_eod", "special_text", "json_key"):  # what is so of all
        if name == "append_eod" and use is None and len({str(eod_use(one)) for one in told}) > 1:
            continue  # they end differently
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
    return Merged(writer.n_documents, writer.n_tokens, is_new=True)


def is_made_of(output: Path, about: dict[str, Any]) -> bool:
    """Whether a whole dataset is there whose sidecar says what `about` does, with the sums of its origins."""
    try:
        sidecar = IndexedTokens(output).sidecar or {}
    except (OSError, ValueError):
        return False
    content = json.loads(json.dumps(about))
    origins = content.get("merged_from") or [content.get("subset_of")]
    return all(one and one["sha256"] for one in origins) and content.items() <= sidecar.items()


def _common_eod(pairs: Sequence[IndexedTokens], mixed_eod: bool) -> EodUse | None:
    """How the documents of all pairs end; None where they differ, as `mixed_eod` allows, or nothing shows it.

    ValueError where they differ and may not.
    """
    uses = [eod_use(pair.sidecar) for pair in pairs]
    known = next((i for i, use in enumerate(uses) if use is not None), None)
    named = next((i for i, pair in enumerate(pairs) if _tokenizer(pair).get("eod_id") is not None), None)
    likely = None if named is None else _tokenizer(pairs[named])["eod_id"]
    for i, pair in enumerate(pairs):
        if uses[i] is None:
            uses[i] = observed_eod(pair, likely)
    first = next((i for i, use in enumerate(uses) if use is not None), None) if known is None else known
    if first is None:
        return None
    for pair, use in zip(pairs, uses, strict=True):
        if use is None:
            log.warning(
                "%s: nothing shows how its documents end; see that it is as in the others", pair.prefix
            )
        elif use != uses[first]:
            words = f"{pair.prefix}: got {use}, expected {uses[first]} as in {pairs[first].prefix}."
            if not mixed_eod:
                raise ValueError(
                    f"{words} Tokenise both with the same --append-eod and --eod-token, or give --mixed-eod."
                )
            log.warning("%s", words)
    same = all(use == uses[first] for use in uses)
    return uses[first] if same else None


def observed_eod(pair: IndexedTokens, likely: int | None) -> EodUse | None:
    """How the documents of a pair without a sidecar end, by the last tokens of up to SEEN_DOCUMENTS of them.

    likely   the id that should end them. Without it the id that ends all of several documents.
    """
    n = pair.n_documents
    begins, lengths = pair.document_spans(np.unique(np.linspace(0, n - 1, SEEN_DOCUMENTS).astype(np.int64)))
    last = pair.tokens[(begins + lengths - 1)[lengths > 0]] if n else np.empty(0)
    if not len(last):
        return None
    if likely is not None:
        return EodUse(likely if bool((last == likely).all()) else None)
    return EodUse(int(last[0])) if len(last) > 1 and bool((last == last[0]).all()) else None


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
