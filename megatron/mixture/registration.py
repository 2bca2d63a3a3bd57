"""Registration of files: which files, in which commits, and their rows in a table."""

import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.cli import ProgressBar
from megatron.mixture.files import (
    INPUT_SUFFIXES,
    PARTS_SUFFIX,
    SourceFile,
    batch_files,
    hash_content,
    import_duckdb,
    import_pyarrow,
    properties_path,
    stat_file,
)
from megatron.mixture.records import RecordCounts, RecordReader, split_lines
from megatron.mixture.table import CorpusTable, complete_columns, iter_file_batches, make_schema
from megatron.text.inputs import PLAIN_SUFFIXES, find_files

BATCH_BYTES, BATCH_FILES = 16 << 20, 1000  # limits of adjacent files that share a commit


@dataclass
class RegistrationResult:
    """Counts of one registration.

    n_known   files that were registered before and have not changed
    absent    properties that no document has, usually because they are misspelt
    """

    n_files: int = 0
    n_known: int = 0
    n_documents: int = 0
    n_broken: int = 0
    absent: Sequence[str] = ()


def add_files(
    table: CorpusTable, before: Sequence[SourceFile], paths: Sequence[Path], reader: RecordReader,
    quiet: bool,
) -> RegistrationResult:  # fmt: skip
    """Commit the new and changed files of some paths to a table, batch by batch.

    before   the registered files
    """
    registered = {file.path: file.stamp for file in before}
    new = [path for path in paths if registered.get(str(path)) != stat_file(path)]
    sizes = {path: path.stat().st_size for path in new}
    result = RegistrationResult(n_known=len(paths) - len(new))
    with (
        ProgressBar("registering", sum(sizes.values()), "B", quiet=quiet) as bar,
        ThreadPoolExecutor(1, thread_name_prefix="hash") as hashing,
    ):
        # one commit per batch: a killed registration keeps its finished batches
        for batch in batch_files(new, lambda path: (sizes[path], ""), BATCH_BYTES, BATCH_FILES):
            counts = [RecordCounts() for _ in batch]
            table.append(iter_batches(batch, counts, reader, hashing))
            result.n_files += len(batch)
            result.n_documents += sum(count.n_documents for count in counts)
            result.n_broken += sum(count.n_broken for count in counts)
            bar.update(sum(sizes[path] for path in batch))
    return result


def find_input_files(inputs: Sequence[str]) -> list[Path]:
    """Return the files of paths, folders and patterns. A .bin, or its prefix, stands for its dataset.

    <prefix>.parquet and <prefix>.json beside an input are parts of it. Raises
    FileNotFoundError.
    """
    paths: dict[Path, None] = {}
    for word in inputs:
        datasets = [Path(f"{word}{suffix}") for suffix in (".bin", PARTS_SUFFIX)]
        matches = find_files(word, INPUT_SUFFIXES) or [path for path in datasets if path.is_file()]
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

    Raises ValueError for a file that changes
    meanwhile: its content may be of two versions.
    """
    corpus, schema = reader.corpus, make_schema(reader.corpus)
    # sizes and times are read before the content, and compared again at the end
    stamps = [stat_file(path) for path in paths]
    sums = [hashing.submit(hash_content, path) for path in paths]
    ids = [secrets.randbits(62) for _ in paths]
    for documents in _read_files(paths, ids, counts, reader):
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


def _read_files(
    paths: Sequence[Path], ids: Sequence[int], counts: Sequence[RecordCounts], reader: RecordReader
) -> Iterator[Any]:
    is_plain = all(
        path.name.endswith(PLAIN_SUFFIXES) and not properties_path(path).exists() for path in paths
    )
    if len(paths) > 1 and is_plain and reader.function is None:
        block, n_lines = join_small_files(paths, ids)
        try:
            yield reader.select_block(block)
        except (import_duckdb().Error, import_pyarrow().ArrowException, ValueError):
            pass  # one of the files has a broken line, which `read` locates
        else:
            for count, n in zip(counts, n_lines, strict=True):
                count.n_documents = n
            return
    for path, key, count in zip(paths, ids, counts, strict=True):
        yield from reader.read(path, key, count)


def join_small_files(paths: Sequence[Path], ids: Sequence[int]) -> tuple[Any, list[int]]:
    """Return the lines of small plain files as one block, and the number of each file."""
    contents = [path.read_bytes() for path in paths]
    # otherwise the last line of a file
    # and the first one of the next would be one line
    contents = [part + b"\n" * (part[-1:] not in (b"", b"\n")) for part in contents]
    sizes = np.array([len(part) for part in contents])
    ends = np.cumsum(sizes)
    _, block = split_lines(b"".join(contents))
    # A line belongs to the first file that ends after its begin. Files of 10, 0
    # and 5 bytes: ends = [10, 10, 15]. A line at byte 10 belongs to file 2:
    # `right` skips the empty file.
    begins = block.column("begin").to_numpy()
    of_file = np.searchsorted(ends, begins, side="right")
    counts = np.bincount(of_file, minlength=len(paths))
    # line number minus the number of the file's first line; counts [3, 2]: rows
    # 0 1 2 0 1
    rows = np.arange(len(of_file)) - np.repeat(np.cumsum(counts) - counts, counts)
    block = block.set_column(1, "begin", [begins - (ends - sizes)[of_file]])
    block = block.append_column("file", [np.array(ids, dtype=np.int64)[of_file]])
    return block.append_column("row", [rows]), counts.tolist()
