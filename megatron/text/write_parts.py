"""Writer of a dataset of parts: the list of the parts, and the index of all their documents.

The tokens are not copied. megatron/data/parts.py reads the result.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.cli import ProgressBar
from megatron.data.block_hash import BLOCK_BYTES, BlockHash, describe_sums, hash_blocks
from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IdCounts, unigram_entropy
from megatron.data.parts import hash_file, open_dataset
from megatron.io import PARTIAL, fsync_path, open_exclusive, publish_files
from megatron.plan.sidecar import PARTS_INDEX_SUFFIX, PARTS_SUFFIX, read_sidecar
from megatron.text.arguments import check_not_exists
from megatron.text.merge import BLOCK_TOKENS, MergeResult
from megatron.text.merge_inputs import MergeInputs, open_inputs, resolve_dataset_path
from megatron.text.merged_index import MergedIndex

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
    inputs = open_inputs(prefixes, output, mixed_eod)
    paths = [resolve_dataset_path(dataset.prefix) for dataset in inputs.datasets]
    if len(set(paths)) < len(paths):
        raise ValueError(
            f"{output}: got a dataset twice, expected each part once. Use weights to repeat text."
        )
    for suffix in (".bin", ".idx"):
        if Path(f"{output}{suffix}").exists():
            raise ValueError(
                f"{output}{suffix}: exists already. Choose another name for the dataset of parts."
            )
    parts = [describe_part(dataset, output.parent) for dataset in inputs.datasets]
    path, index = (Path(f"{output}{suffix}") for suffix in (PARTS_SUFFIX, PARTS_INDEX_SUFFIX))
    result = MergeResult(inputs.n_documents, inputs.n_tokens, is_new=True)
    if _is_written(output, parts, hash_tokens):
        return MergeResult(result.n_documents, result.n_tokens, is_new=False)
    if not overwrite:
        check_not_exists(path, index)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial, partial_index = (target.with_name(target.name + PARTIAL) for target in (path, index))
    with open_exclusive(partial, output):
        try:
            content = _write_index(inputs, partial_index)
            content |= inputs.meta
            content.pop("merged_from")
            index_hash = hash_blocks(partial_index, BLOCK_BYTES)
            if hash_tokens:
                content |= _hash_tokens(inputs, parts, index_hash)
            elif all("bin" in part["sha256"] for part in parts):
                sums = json.dumps(
                    [[part["sha256"]["bin"], part["sha256"].get("block_bytes")] for part in parts]
                )
                content["sha256"] = describe_sums(index_hash, index_hash) | {
                    "parts": hashlib.sha256(sums.encode()).hexdigest()
                }
                del content["sha256"]["bin"]  # else unknown: the prefix is then the identity
            content["parts"] = parts
            partial.write_text(json.dumps(content, indent=1) + "\n")
            for file in (partial_index, partial):
                fsync_path(file)
            publish_files([(partial_index, index), (partial, path)])
        except BaseException:
            for file in (partial_index, partial):
                file.unlink(missing_ok=True)
            raise
    return result


def describe_part(dataset: IndexedTokens, folder: Path) -> dict[str, Any]:
    """Return the entry of a dataset in the list of parts, with its path relative to `folder`.

    A dataset without a sidecar gets the hash of its index.
    """
    prefix, sidecar = Path(dataset.prefix), Path(f"{dataset.prefix}.json")
    sums = dict((dataset.sidecar or {}).get("sha256") or {})
    if dataset.sidecar is None:
        sums["idx"] = hash_file(Path(f"{dataset.prefix}.idx"))
    # real paths: a relative path through `..` is resolved from the real folder
    relative = os.path.relpath(prefix.parent.resolve() / prefix.name, folder.resolve())
    return {
        "path": relative,
        "documents": dataset.n_documents,
        "tokens": dataset.n_tokens,
        "mtime_ns": Path(f"{prefix}.bin").stat().st_mtime_ns,
        "sidecar_sha256": None if dataset.sidecar is None else hash_file(sidecar),
        "sha256": sums,
    }


def _is_written(output: Path, parts: list[dict[str, Any]], hash_tokens: bool) -> bool:
    """Return whether the list exists with the same parts, and an index that opens."""
    try:
        open_dataset(output)
        sidecar = read_sidecar(output)
    except (OSError, ValueError):
        return False
    same = ("path", "documents", "tokens", "sidecar_sha256")
    stored = [[part.get(name) for name in same] for part in sidecar.get("parts") or []]
    has_hash = not hash_tokens or "bin" in (sidecar.get("sha256") or {})
    # without a sidecar nothing shows that the tokens are the same
    return (
        has_hash
        and stored == [[part[name] for name in same] for part in parts]
        and all(row[-1] for row in stored)
    )


def _write_index(inputs: MergeInputs, path: Path) -> dict[str, Any]:
    """Write the index of all documents; return the entries of the sidecar that it gives."""
    dtype = inputs.datasets[0].dtype
    n_documents = n_tokens = 0
    path.unlink(missing_ok=True)
    with (
        ProgressBar("indexing", inputs.n_documents, "documents") as bar,
        MergedIndex(path, dtype, inputs.n_documents) as index,
    ):
        for dataset in inputs.datasets:
            index.add(dataset, n_documents, n_tokens)
            dataset.unmap()
            n_documents, n_tokens = n_documents + dataset.n_documents, n_tokens + dataset.n_tokens
            bar.update(dataset.n_documents)
    return {
        "format": FORMAT,
        "version": PARTS_VERSION,
        "dtype": dtype.name,
        "documents": n_documents,
        "tokens": n_tokens,
        "empty_documents": index.n_empty,
        "longest_document": index.longest,
    }


def _hash_tokens(inputs: MergeInputs, parts: list[dict[str, Any]], index_hash: BlockHash) -> dict[str, Any]:
    """Read all tokens once; add the hash of each part without one, and return the entries of the whole."""
    digest, counts = BlockHash(BLOCK_BYTES), IdCounts()
    with ProgressBar("hashing", inputs.n_tokens, "tokens") as bar:
        for dataset, part in zip(inputs.datasets, parts, strict=True):
            part_digest = None if "bin" in part["sha256"] else hashlib.sha256()
            for begin in range(0, dataset.n_tokens, BLOCK_TOKENS):
                ids = dataset.read_copy(begin, BLOCK_TOKENS)
                counts.add(ids)
                digest.update(ids.data)
                if part_digest is not None:
                    part_digest.update(ids.data)
                bar.update(len(ids))
            if part_digest is not None:
                part["sha256"]["bin"] = part_digest.hexdigest()
    entropy = None if counts.counts is None else unigram_entropy(counts.counts)
    return {"unigram_entropy_nats": entropy, "sha256": describe_sums(digest, index_hash)}
