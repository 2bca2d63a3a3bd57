"""Merge .bin/.idx datasets into one, in order, with one block in memory at a time.

The output appears when it is complete. A killed merge
leaves partial files, which the same call replaces.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.cli import ProgressBar
from megatron.data import open_dataset
from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.sidecar import load_sidecar, locate_dataset
from megatron.text.arguments import check_not_exists, dataset_files
from megatron.text.merge_inputs import open_inputs


@dataclass(frozen=True)
class MergeResult:
    """Counts of the output. `is_new`: whether this call has written it."""

    n_documents: int
    n_tokens: int
    is_new: bool = True


def merge_datasets(
    prefixes: Sequence[str], output: Path, mixed_eod: bool = False, overwrite: bool = False
) -> MergeResult:
    """Write the documents of all datasets, one dataset after another, as one dataset.

    mixed_eod   allow datasets whose documents end differently;
                the sidecar then has no end token for all

    An existing output from the same datasets stays unchanged.

    Raises FileNotFoundError or ValueError for a dataset that cannot be read.
    Raises ValueError if tokenizers, dtypes or ends of documents differ,
    if the output is one of the inputs, or if it exists and `overwrite` is false.
    """
    datasets, meta = open_inputs(prefixes, output, mixed_eod)
    result = count_documents(datasets)
    if is_finished(output, {"merged_from": meta["merged_from"]}, overwrite):
        return replace(result, is_new=False)
    with (
        ProgressBar("merging", result.n_tokens, "tokens") as bar,
        IndexedWriter(output, datasets[0].dtype, meta) as writer,
    ):
        for dataset in datasets:
            writer.add_dataset(dataset, bar.update)
            dataset.unmap()
    return result


def count_documents(datasets: Sequence[IndexedTokens]) -> MergeResult:
    """Return the counts of all datasets together."""
    n_documents = sum(dataset.n_documents for dataset in datasets)
    return MergeResult(n_documents, sum(dataset.n_tokens for dataset in datasets))


def is_finished(output: Path, meta: dict[str, Any], overwrite: bool) -> bool:
    """Return whether a complete dataset exists whose sidecar has the entries `meta` with hashes.

    Raises ValueError for another dataset unless `overwrite`.
    """
    content = json.loads(json.dumps(meta))  # as it would be read back: tuples become lists
    origins = content.get("merged_from") or [content.get("subset_of")]
    # Names and counts alone would also match another dataset of the
    # same size. Without hashes the output counts as another dataset.
    if all(origin and origin["sha256"] for origin in origins):
        with suppress(OSError, ValueError):
            if content.items() <= (load_sidecar(output) or {}).items():
                # the tokens appear last: without them the writer was killed, and merges again
                if not locate_dataset(output).exists():
                    return False
                open_dataset(output)  # raises ValueError for files that do not fit
                return True
    if not overwrite:
        check_not_exists(*dataset_files(output))
    return False
