"""Merge .bin/.idx datasets into one, in order, with one block in memory at a time."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.indexed import IndexedTokens, resolve_prefix
from megatron.data.indexed_writer import IndexedWriter
from megatron.log import get_logger
from megatron.plan.sidecar import EodUse, parse_eod_use
from megatron.terminal import ProgressBar
from megatron.text.arguments import check_not_exists, dataset_files

log = get_logger(__name__)
BLOCK_TOKENS = 1 << 20
BLOCK_DOCUMENTS = 1 << 18
LOOKAHEAD_DOCUMENTS = 1 << 12  # maximum documents per block
SAMPLED_DOCUMENTS = 1000  # whose last tokens `detect_eod` compares


@dataclass(frozen=True)
class MergeResult:
    """Counts of the output. `is_new`: whether this call has written it."""

    n_documents: int
    n_tokens: int
    is_new: bool


def merge_datasets(
    prefixes: Sequence[str], output: Path, mixed_eod: bool = False, overwrite: bool = False
) -> MergeResult:
    """Write the documents of all datasets, one dataset after another, as one dataset.

    mixed_eod   allow datasets whose documents end differently; the sidecar then has no end token for all

    An existing output from the same datasets stays unchanged.

    Raises FileNotFoundError or ValueError for a dataset that cannot be read. Raises ValueError if tokenizers,
    dtypes or ends of documents differ, if the output is one of the inputs, or if it exists and `overwrite` is
    false.
    """
    datasets = [IndexedTokens(resolve_prefix(prefix)) for prefix in prefixes]
    if any(Path(dataset.prefix).resolve() == output.resolve() for dataset in datasets):
        raise ValueError(f"{output}: is one of the inputs. Choose another name.")
    for dataset in datasets[1:]:
        if dataset.dtype != datasets[0].dtype:
            raise ValueError(
                f"{dataset.prefix}: got {dataset.dtype}, expected {datasets[0].dtype} as in "
                f"{datasets[0].prefix}. Tokenise them with the same settings."
            )
        sums = [_tokenizer_meta(other).get("sha256") for other in (datasets[0], dataset)]
        if not all(sums):
            unknown = dataset if sums[0] else datasets[0]
            log.warning(
                "%s: its tokenizer is unknown, no sidecar names it; make sure that it is that of the others",
                unknown.prefix,
            )
        elif sums[0] != sums[1]:
            raise ValueError(
                f"{dataset.prefix}: got another tokenizer than {datasets[0].prefix}. "
                "Tokenise them with the same tokenizer."
            )
    use = _find_common_eod(datasets, mixed_eod)
    origins = [describe_origin(dataset) for dataset in datasets]
    if is_built_from(output, {"merged_from": origins}):
        existing = IndexedTokens(output)
        return MergeResult(existing.n_documents, existing.n_tokens, is_new=False)
    if not overwrite:
        check_not_exists(*dataset_files(output))
    meta: dict[str, Any] = {"merged_from": origins}
    if tokenizer := next(
        (_tokenizer_meta(dataset) for dataset in datasets if _tokenizer_meta(dataset)), None
    ):
        ends = [_tokenizer_meta(dataset).get("eod_id") for dataset in datasets if _tokenizer_meta(dataset)]
        if use is None and len(set(ends)) > 1:  # no end token is valid for all documents
            tokenizer = {name: value for name, value in tokenizer.items() if not name.startswith("eod_")}
        meta["tokenizer"] = tokenizer
    sidecars = [dataset.sidecar or {} for dataset in datasets]
    for name in ("append_eod", "special_text", "json_key"):  # keep entries that all sidecars share
        if (
            name == "append_eod"
            and use is None
            and len({str(parse_eod_use(sidecar)) for sidecar in sidecars}) > 1
        ):
            continue  # they end differently
        if name in sidecars[0] and all(sidecar.get(name) == sidecars[0][name] for sidecar in sidecars):
            meta[name] = sidecars[0][name]
    if "append_eod" in meta and all("empty_documents" in sidecar for sidecar in sidecars):
        meta["empty_documents"] = sum(sidecar["empty_documents"] for sidecar in sidecars)
    total = sum(dataset.n_tokens for dataset in datasets)
    with (
        ProgressBar("merging", total, "tokens") as bar,
        IndexedWriter(output, datasets[0].dtype, meta) as writer,
    ):
        for dataset in datasets:
            for first in range(0, dataset.n_documents, BLOCK_DOCUMENTS):
                numbers = np.arange(first, min(first + BLOCK_DOCUMENTS, dataset.n_documents))
                copy_documents(dataset, numbers, writer, bar.update)
    return MergeResult(writer.n_documents, writer.n_tokens, is_new=True)


def is_built_from(output: Path, meta: dict[str, Any]) -> bool:
    """Return whether a complete dataset exists whose sidecar has the entries `meta` with hashes."""
    try:
        sidecar = IndexedTokens(output).sidecar or {}
    except (OSError, ValueError):
        return False
    content = json.loads(json.dumps(meta))  # as it would be read back: tuples become lists
    origins = content.get("merged_from") or [content.get("subset_of")]
    # Names and counts alone would also match another dataset of the same size. Without hashes the output
    # counts as another dataset.
    return all(origin and origin["sha256"] for origin in origins) and content.items() <= sidecar.items()


def _find_common_eod(datasets: Sequence[IndexedTokens], mixed_eod: bool) -> EodUse | None:
    """Return how the documents of all datasets end; None if it differs (with `mixed_eod`) or is unknown.

    Raises ValueError if it differs without `mixed_eod`.
    """
    # 1. what the sidecars state; 2. for datasets without one, what the last tokens show
    uses = [parse_eod_use(dataset.sidecar) for dataset in datasets]
    first_known = next((i for i, use in enumerate(uses) if use is not None), None)
    named = next(
        (i for i, dataset in enumerate(datasets) if _tokenizer_meta(dataset).get("eod_id") is not None), None
    )
    likely = None if named is None else _tokenizer_meta(datasets[named])["eod_id"]
    for i, dataset in enumerate(datasets):
        if uses[i] is None:
            uses[i] = detect_eod(dataset, likely)
    first = (
        next((i for i, use in enumerate(uses) if use is not None), None)
        if first_known is None
        else first_known
    )
    if first is None:
        return None
    for dataset, use in zip(datasets, uses, strict=True):
        if use is None:
            log.warning(
                "%s: the end of its documents is unknown; make sure that it is as in the others",
                dataset.prefix,
            )
        elif use != uses[first]:
            words = f"{dataset.prefix}: got {use}, expected {uses[first]} as in {datasets[first].prefix}."
            if not mixed_eod:
                raise ValueError(
                    f"{words} Tokenise both with the same --append-eod and --eod-token, or give --mixed-eod."
                )
            log.warning("%s", words)
    same = all(use == uses[first] for use in uses)
    return uses[first] if same else None


def detect_eod(dataset: IndexedTokens, likely: int | None) -> EodUse | None:
    """Detect how documents end without a sidecar, from the last tokens of up to SAMPLED_DOCUMENTS documents.

    likely   the expected end id. None: the id that ends all of several documents, if there is one.
    """
    n = dataset.n_documents
    if not n:
        return None
    begins, lengths = dataset.document_spans(
        np.unique(np.linspace(0, n - 1, SAMPLED_DOCUMENTS).astype(np.int64))
    )
    # an empty document has no last token: begin - 1 is the last token of the document before it
    last = dataset.tokens[(begins + lengths - 1)[lengths > 0]]
    if not len(last):
        return None
    if likely is not None:
        return EodUse(likely if bool((last == likely).all()) else None)
    # a single document proves nothing: any last token ends all of one document
    return EodUse(int(last[0])) if len(last) > 1 and bool((last == last[0]).all()) else None


def copy_documents(
    dataset: IndexedTokens,
    documents: np.ndarray,
    writer: IndexedWriter,
    advance: Callable[[int], object] = lambda n_tokens: None,
) -> None:
    """Copy documents, int64 ascending, of a dataset; call `advance` with the tokens of each block."""
    begin = 0
    while begin < len(documents):
        # At most LOOKAHEAD_DOCUMENTS, not all that remain: the cumulative sum over the rest, repeated for
        # each block, would be quadratic.
        begins, lengths = dataset.document_spans(documents[begin : begin + LOOKAHEAD_DOCUMENTS])
        sizes = np.cumsum(lengths)
        # as many documents as fit into BLOCK_TOKENS, and at least one
        n = max(1, int(np.searchsorted(sizes, BLOCK_TOKENS, side="right")))
        part, total = documents[begin : begin + n], int(sizes[n - 1])
        if not total:
            ids = np.empty(0, dataset.dtype)
        elif part[-1] - part[0] == n - 1:  # consecutive: a single read, no gather
            ids = dataset.read_copy(int(begins[0]), total)
        else:
            # scattered documents, as of a sample: through the memory map, one copy per document
            ids = np.concatenate([dataset.get_document(i) for i in part.tolist()])
        writer.add_documents(ids, lengths[:n])
        advance(total)
        begin += n


def _tokenizer_meta(dataset: IndexedTokens) -> dict[str, Any]:
    return (dataset.sidecar or {}).get("tokenizer") or {}


def describe_origin(dataset: IndexedTokens) -> dict[str, Any]:
    """Return the entry for a source dataset in the sidecar of a derived dataset."""
    entry = {"path": Path(dataset.prefix).name, "documents": dataset.n_documents, "tokens": dataset.n_tokens}
    return entry | {"sha256": (dataset.sidecar or {}).get("sha256")}
