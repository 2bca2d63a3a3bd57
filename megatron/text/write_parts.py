"""Writer of a dataset of parts: the list of the parts, and the index of all their documents.

The tokens are not copied. megatron/data/parts.py reads the result.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.cli import ProgressBar
from megatron.data import open_dataset
from megatron.data.block_hash import BLOCK_BYTES, BlockHash, describe_sums
from megatron.data.indexed_writer import IdCounts, finish_publishing, unigram_entropy, write_index
from megatron.data.parts import describe_part
from megatron.data.sidecar import PARTS_INDEX_SUFFIX, PARTS_SUFFIX
from megatron.io import PARTIAL, fsync_path, open_exclusive, publish_files
from megatron.text.arguments import check_not_exists
from megatron.text.merge import BLOCK_TOKENS, MergeResult
from megatron.text.merge_inputs import MergeInputs, open_inputs

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
    if len({dataset.files.location for dataset in inputs.datasets}) < len(inputs.datasets):
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
        for dataset in inputs.datasets
    ]
    paths = [Path(f"{output}{suffix}") for suffix in (PARTS_INDEX_SUFFIX, PARTS_SUFFIX)]
    partial_index, partial = (path.with_name(path.name + PARTIAL) for path in paths)
    finish_publishing([(partial_index, paths[0]), (partial, paths[1])])
    if _is_written(output, parts, hash_tokens):
        return MergeResult(inputs.n_documents, inputs.n_tokens, is_new=False)
    if not overwrite:
        check_not_exists(*paths)
    output.parent.mkdir(parents=True, exist_ok=True)
    with open_exclusive(partial_index, output):
        try:
            content, index_hash = _write_index(inputs, partial_index)
            content |= {name: value for name, value in inputs.meta.items() if name != "merged_from"}
            content |= _hash_parts(inputs, parts, index_hash, hash_tokens)
            partial.write_text(json.dumps(content | {"parts": parts}, indent=1) + "\n")
            for file in (partial_index, partial):
                fsync_path(file)
            publish_files([(partial_index, paths[0]), (partial, paths[1])])
        except BaseException:
            for file in (partial_index, partial):
                file.unlink(missing_ok=True)
            raise
    return MergeResult(inputs.n_documents, inputs.n_tokens, is_new=True)


def _is_written(output: Path, parts: list[dict[str, Any]], hash_tokens: bool) -> bool:
    """Return whether the list exists with the same parts, and an index that opens."""
    try:
        sidecar = open_dataset(output).sidecar or {}
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


def _write_index(inputs: MergeInputs, path: Path) -> tuple[dict[str, Any], BlockHash]:
    """Write the index of all documents; return the entries of the sidecar that it gives, and its hash."""
    dtype, n_empty, longest = inputs.datasets[0].dtype, 0, 0

    def iter_lengths() -> Iterator[np.ndarray]:
        for dataset in inputs.datasets:
            yield from dataset.iter_document_lengths()
            dataset.unmap()

    digest = write_index(path, dtype, inputs.n_documents, iter_lengths, BLOCK_BYTES)
    for lengths in iter_lengths():
        n_empty += int((lengths == 0).sum())
        longest = max(longest, int(lengths.max(initial=0)))
    content = {
        "format": FORMAT,
        "version": PARTS_VERSION,
        "dtype": dtype.name,
        "documents": inputs.n_documents,
        "tokens": inputs.n_tokens,
        "empty_documents": n_empty,
        "longest_document": longest,
    }
    return content, digest


def _hash_parts(
    inputs: MergeInputs, parts: list[dict[str, Any]], index_hash: BlockHash, hash_tokens: bool
) -> dict[str, Any]:
    """Return the entries of the hashes of the whole; an entry of a part without a hash is completed."""
    if hash_tokens:
        return _hash_tokens(inputs, parts, index_hash)
    if not all("bin" in part["sha256"] for part in parts):
        return {}  # the prefix is then the identity
    sums = json.dumps([[part["sha256"]["bin"], part["sha256"].get("block_bytes")] for part in parts])
    content = describe_sums(index_hash, index_hash)
    del content["bin"]
    return {"sha256": content | {"parts": hashlib.sha256(sums.encode()).hexdigest()}}


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
    entropy = unigram_entropy(counts.counts)
    return {"unigram_entropy_nats": entropy, "sha256": describe_sums(digest, index_hash)}
