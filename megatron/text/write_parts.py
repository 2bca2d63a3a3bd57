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

from megatron.cli import ProgressBar
from megatron.data import open_dataset
from megatron.data.block_hash import BLOCK_BYTES, BlockHash, describe_sums
from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IdCounts, unigram_entropy, write_index
from megatron.data.parts import describe_part
from megatron.data.sidecar import PARTS_INDEX_SUFFIX, PARTS_SUFFIX
from megatron.io import fsync_path, open_partial_folder, publish_files, write_json
from megatron.text.arguments import check_not_exists
from megatron.text.merge import BLOCK_TOKENS, MergeResult, count_documents
from megatron.text.merge_inputs import open_inputs

FORMAT = "parts"
PARTS_VERSION = 1


def write_parts_list(
    prefixes: Sequence[str],
    output: Path,
    mixed_eod: bool = False,
    overwrite: bool = False,
    hash_tokens: bool = False,
) -> MergeResult:
    """Write `output`.parts.json and .parts.idx, which make the datasets one dataset.

    hash_tokens   read all tokens for the hash and the entropy of the merged dataset. Runs then have the
                  identity that they have with the merged dataset.

    Existing files for the same parts stay unchanged. Raises as `merge_datasets`.
    """
    datasets, meta = open_inputs(prefixes, output, mixed_eod)
    result = count_documents(datasets)
    if len({dataset.files.location for dataset in datasets}) < len(datasets):
        raise ValueError(
            f"{output}: got a dataset twice, expected each part once. Use weights to repeat text."
        )
    for suffix in (".bin", ".idx"):
        if Path(f"{output}{suffix}").exists():
            raise ValueError(
                f"{output}{suffix}: exists already. Choose another name for the dataset of parts."
            )
    parts = [
        describe_part(dataset.files, dataset.n_documents, dataset.n_tokens, output.parent)
        for dataset in datasets
    ]
    if _is_written(output, parts, hash_tokens):
        return replace(result, is_new=False)
    listing, index = (Path(f"{output}{suffix}") for suffix in (PARTS_SUFFIX, PARTS_INDEX_SUFFIX))
    if not overwrite:
        # an index without its list is what a killed call has left
        check_not_exists(listing)
    with open_partial_folder(listing, replace=True) as folder:
        partial_listing, partial_index = folder / listing.name, folder / index.name
        content, index_hash = _write_index(datasets, result, partial_index)
        content |= {name: value for name, value in meta.items() if name != "merged_from"}
        content |= _hash_parts(datasets, parts, index_hash, hash_tokens)
        write_json(partial_listing, content | {"parts": parts})
        fsync_path(partial_index)
        publish_files([(partial_index, index), (partial_listing, listing)])
    return result


def _is_written(output: Path, parts: list[dict[str, Any]], hash_tokens: bool) -> bool:
    """Return whether the list exists with the same parts, and an index that opens."""
    try:
        sidecar = open_dataset(output).sidecar or {}
    except (OSError, ValueError):
        return False
    if hash_tokens and "bin" not in (sidecar.get("sha256") or {}):
        return False
    same = ("path", "documents", "tokens", "sidecar_sha256")
    stored = [[part.get(name) for name in same] for part in sidecar.get("parts") or []]
    # without a sidecar nothing shows that the tokens are the same
    return stored == [[part[name] for name in same] for part in parts] and all(row[-1] for row in stored)


def _write_index(
    datasets: Sequence[IndexedTokens], counts: MergeResult, path: Path
) -> tuple[dict[str, Any], BlockHash]:
    """Write the index of all documents; return the entries of the sidecar that it gives, and its hash."""
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


def _hash_parts(
    datasets: Sequence[IndexedTokens], parts: list[dict[str, Any]], index_hash: BlockHash, hash_tokens: bool
) -> dict[str, Any]:
    """Return the entries of the hashes of the whole; an entry of a part without a hash is completed."""
    if hash_tokens:
        return _hash_tokens(datasets, parts, index_hash)
    if not all("bin" in part["sha256"] for part in parts):
        return {}  # the prefix is then the identity
    sums = json.dumps([[part["sha256"]["bin"], part["sha256"].get("block_bytes")] for part in parts])
    content = describe_sums(index_hash, index_hash)
    del content["bin"]
    return {"sha256": content | {"parts": hashlib.sha256(sums.encode()).hexdigest()}}


def _hash_tokens(
    datasets: Sequence[IndexedTokens], parts: list[dict[str, Any]], index_hash: BlockHash
) -> dict[str, Any]:
    """Read all tokens once; add the hash of each part without one, and return the entries of the whole."""
    digest, counts = BlockHash(BLOCK_BYTES), IdCounts()
    with ProgressBar("hashing", sum(part["tokens"] for part in parts), "tokens") as bar:
        for dataset, part in zip(datasets, parts, strict=True):
            part_digest = hashlib.sha256()
            is_listed = "bin" in part["sha256"]
            for begin in range(0, dataset.n_tokens, BLOCK_TOKENS):
                ids = dataset.read_copy(begin, BLOCK_TOKENS)
                counts.add(ids)
                digest.update(ids.data)
                if not is_listed:
                    part_digest.update(ids.data)
                bar.update(len(ids))
            part["sha256"].setdefault("bin", part_digest.hexdigest())
    entropy = unigram_entropy(counts.counts)
    return {"unigram_entropy_nats": entropy, "sha256": describe_sums(digest, index_hash)}
