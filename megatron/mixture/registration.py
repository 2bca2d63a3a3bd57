"""Registration of files: which files, in which commits, and their rows in a table."""

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path
from typing import Any

from megatron.mixture.files import (
    INPUT_SUFFIXES,
    PARTS_SUFFIX,
    SourceFile,
    hash_content,
    properties_path,
    stat_file,
)
from megatron.mixture.records import RecordCounts, RecordReader
from megatron.mixture.table import complete_columns, iter_file_batches, make_schema

# of adjacent files that share a commit
SMALL_BYTES, BATCH_BYTES, BATCH_FILES = 1 << 20, 16 << 20, 1000


def batch_files(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield files in order: adjacent small files of plain lines in one batch, every other file alone."""
    batch: list[Path] = []
    n_bytes = 0
    for path in paths:
        size = path.stat().st_size
        is_small = (
            path.suffix in (".jsonl", ".json") and size <= SMALL_BYTES and not properties_path(path).exists()
        )
        if batch and (not is_small or n_bytes + size > BATCH_BYTES or len(batch) == BATCH_FILES):
            yield batch
            batch, n_bytes = [], 0
        if is_small:
            batch.append(path)
            n_bytes += size
        else:
            yield [path]
    if batch:
        yield batch


def find_input_files(inputs: Sequence[str]) -> list[Path]:
    """Return the files of paths, folders and patterns. A .bin, or its prefix, stands for its dataset.

    <prefix>.parquet and <prefix>.json beside an input are parts of it. Raises
    FileNotFoundError.
    """
    paths: dict[Path, None] = {}
    for word in inputs:
        path = Path(word)
        if path.is_dir():
            walked = os.walk(path, followlinks=True)
            matches = sorted(
                Path(folder) / name for folder, _, names in walked for name in names if name[0] != "."
            )
        elif path.is_file():
            matches = [path]
        else:
            datasets = [Path(f"{word}{suffix}") for suffix in (".bin", PARTS_SUFFIX)]
            matches = [path for path in datasets if path.is_file()] or [
                Path(name) for name in sorted(glob(word, recursive=True))
            ]
        names = set(matches)
        chosen = [
            path for path in matches if path.name.endswith(INPUT_SUFFIXES) and not _is_part(path, names)
        ]
        if not chosen:
            raise FileNotFoundError(
                f"{word}: no such file, and no folder or pattern of {', '.join(INPUT_SUFFIXES)}."
            )
        paths |= dict.fromkeys(chosen)
    return list(paths)


def _is_part(path: Path, names: set[Path]) -> bool:
    """Return whether a file belongs to another input: properties, a sidecar, or an index."""
    if path.name.endswith((PARTS_SUFFIX, ".bin")):
        return False
    prefix = path.with_suffix("")
    if path.suffix == ".json":
        return any(prefix.with_name(prefix.name + suffix).is_file() for suffix in (".bin", PARTS_SUFFIX))
    others = [prefix.with_name(prefix.name + suffix) for suffix in INPUT_SUFFIXES if suffix != ".parquet"]
    return path.suffix == ".parquet" and any(
        other in names or other.suffix == ".bin" and other.is_file() for other in others
    )


def iter_batches(
    paths: Sequence[Path], counts: Sequence[RecordCounts], reader: RecordReader,
    hashing: ThreadPoolExecutor,
) -> Iterator[Any]:  # fmt: skip
    """Yield the documents of some files, and last the entries of the files.

    counts   receives the counts of each file

    Raises ValueError for a file that changes meanwhile: its content may be of two
    versions.
    """
    corpus, schema = reader.corpus, make_schema(reader.corpus)
    # sizes and times are read before the content, and compared again at the end
    stamps = [stat_file(path) for path in paths]
    sums = [hashing.submit(hash_content, path) for path in paths]
    ids = [secrets.randbits(62) for _ in paths]
    for documents in reader.read_files(paths, ids, counts):
        yield from complete_columns(documents, "documents", schema).to_batches()
    files = []
    for key, path, stamp, count, content in zip(ids, paths, stamps, counts, sums, strict=True):
        if stat_file(path) != stamp:
            raise ValueError(f"{path}: changed while it was registered. Register it again.")
        broken = count.n_broken, tuple(count.broken)
        files.append(
            SourceFile(
                key, str(path), *stamp, count.n_documents, content.result(), corpus.name,
                corpus.text_key, *broken, time.time_ns(),
            )
        )  # fmt: skip
    yield from iter_file_batches(files, schema)
