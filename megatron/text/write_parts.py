"""Writer of a dataset of parts: the list of the parts, and the index of all their documents.

The tokens are not copied. megatron/data/parts.py reads the result.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data import open_dataset
from megatron.data.block_hash import BLOCK_BYTES, describe_sums
from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import write_index
from megatron.data.parts import describe_part
from megatron.data.sidecar import PARTS_INDEX_SUFFIX, PARTS_SUFFIX
from megatron.io import fsync_path, open_partial_folder, publish_files, write_json
from megatron.text.arguments import check_not_exists
from megatron.text.merge import MergeResult, count_documents
from megatron.text.merge_inputs import open_inputs

FORMAT = "parts"
PARTS_VERSION = 1


def write_parts_list(
    prefixes: Sequence[str], output: Path, mixed_eod: bool = False, overwrite: bool = False
) -> MergeResult:
    """Write `output`.parts.json and .parts.idx, which make the datasets one dataset.

    Existing files for the same parts stay unchanged. Raises as `merge_datasets`.
    """
    datasets, meta = open_inputs(prefixes, output, mixed_eod)
    result = count_documents(datasets)
    check_not_exists(Path(f"{output}.bin"), Path(f"{output}.idx"))
    parts = [
        describe_part(dataset.files, dataset.n_documents, dataset.n_tokens, output.parent)
        for dataset in datasets
    ]
    if _is_written(output, parts):
        return replace(result, is_new=False)
    listing, index = (Path(f"{output}{suffix}") for suffix in (PARTS_SUFFIX, PARTS_INDEX_SUFFIX))
    if not overwrite:
        # an index without its list is what a killed call has left
        check_not_exists(listing)
    with open_partial_folder(listing, replace=True) as folder:
        partial_listing, partial_index = folder / listing.name, folder / index.name
        content, index_digests = _write_index(datasets, result, partial_index)
        content |= {name: value for name, value in meta.items() if name != "merged_from"}
        content |= _hash_parts(parts, index_digests)
        write_json(partial_listing, content | {"parts": parts})
        fsync_path(partial_index)
        publish_files([(partial_index, index), (partial_listing, listing)])
    return result


def _is_written(output: Path, parts: list[dict[str, Any]]) -> bool:
    """Return whether the list exists with the same parts, and an index that opens."""
    try:
        sidecar = open_dataset(output).sidecar or {}
    except (OSError, ValueError):
        return False
    same = ("path", "documents", "tokens", "sidecar_sha256")
    stored = [[part.get(name) for name in same] for part in sidecar.get("parts") or []]
    # without a sidecar nothing shows that the tokens are the same
    return stored == [[part[name] for name in same] for part in parts] and all(row[-1] for row in stored)


def _write_index(
    datasets: Sequence[IndexedTokens], counts: MergeResult, path: Path
) -> tuple[dict[str, Any], list[str]]:
    """Write the index of all documents; return the entries of the sidecar that it gives, and its digests."""
    dtype, n_empty, longest = datasets[0].dtype, 0, 0

    def iter_lengths() -> Iterator[np.ndarray]:
        for dataset in datasets:
            yield from dataset.iter_document_lengths()
            dataset.unmap()

    digest = write_index(path, dtype, counts.n_documents, iter_lengths, BLOCK_BYTES)
    for lengths in iter_lengths():
        n_empty += int((lengths == 0).sum())
        longest = max(longest, int(lengths.max(initial=0)))
    content = {
        "format": FORMAT,
        "version": PARTS_VERSION,
        "dtype": dtype.name,
        "documents": counts.n_documents,
        "tokens": counts.n_tokens,
        "empty_documents": n_empty,
        "longest_document": longest,
    }
    return content, digest


def _hash_parts(parts: list[dict[str, Any]], index_digests: list[str]) -> dict[str, Any]:
    """Return the entries of the hashes of the whole, which identify it by the hashes of its parts."""
    if not all("bin" in part["sha256"] for part in parts):
        return {}  # the prefix is then the identity
    sums = json.dumps([[part["sha256"]["bin"], part["sha256"].get("block_bytes")] for part in parts])
    content = describe_sums(index_digests, index_digests, BLOCK_BYTES)
    del content["bin"]
    return {"sha256": content | {"parts": hashlib.sha256(sums.encode()).hexdigest()}}
