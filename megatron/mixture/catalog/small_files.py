"""Batches of small files of JSON lines: a statement takes as long for one line as for a thousand."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron.mixture.catalog.line_blocks import LineBlock, mask_nonblank, split_lines
from megatron.mixture.catalog.records import FileTarget, RecordCounts, insert_block
from megatron.mixture.lazy_imports import import_duckdb, import_pyarrow
from megatron.text.inputs import PLAIN_SUFFIXES

SMALL_BYTES = 1 << 20
BATCH_BYTES = 16 << 20
BATCH_FILES = 1000


def batch_files(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield files in order: adjacent small files of plain lines in one batch, every other file alone."""
    batch: list[Path] = []
    n_bytes = 0
    for path in paths:
        size = path.stat().st_size
        is_small = path.name.endswith(PLAIN_SUFFIXES) and size <= SMALL_BYTES
        if batch and (not is_small or n_bytes + size > BATCH_BYTES or len(batch) == BATCH_FILES):
            yield batch
            batch, n_bytes = [], 0
        if not is_small:
            yield [path]
            continue
        batch.append(path)
        n_bytes += size
    if batch:
        yield batch


def register_small_files(targets: Sequence[FileTarget]) -> list[RecordCounts] | None:
    """Write the documents of small files of one corpus to the part.

    Returns None, and writes nothing, if a line of one of them is broken: `register_file` locates it.
    """
    parts = [target.path.read_bytes() for target in targets]
    # otherwise the last line of a file and the first one of the next would be one line
    parts = [part if not part or part.endswith(b"\n") else part + b"\n" for part in parts]
    ends = np.cumsum([len(part) for part in parts])
    block = np.frombuffer(b"".join(parts), dtype=np.uint8)
    lines, begins, sizes = split_lines(block)
    mask = mask_nonblank(block, begins, sizes)
    lines, begins, sizes = lines.filter(import_pyarrow().array(mask)), begins[mask], sizes[mask]
    # The files are concatenated: a line belongs to the first file that ends after its begin.
    # Files of 10, 0 and 5 bytes: ends = [10, 10, 15]. A line at byte 10 belongs to file 2: `right` skips the
    # empty file, whose end is that of the file before it.
    of_file = np.searchsorted(ends, begins, side="right")
    counts = np.bincount(of_file, minlength=len(targets))
    # Line number minus the number of the first line of its file.
    # Counts [3, 2]: [0, 1, 2, 3, 4] - [0, 0, 0, 3, 3] = [0, 1, 2, 0, 1].
    rows = np.arange(len(begins)) - np.repeat(np.cumsum(counts) - counts, counts)
    ids = np.array([target.file for target in targets], dtype=np.int64)[of_file]
    total = RecordCounts()
    # offset in the concatenation minus the begin of the file
    begins = begins - (ends - [len(part) for part in parts])[of_file]
    try:
        insert_block(LineBlock(lines, begins, sizes, rows, files=ids), targets[0], total)
    except (import_duckdb().Error, import_pyarrow().ArrowException, ValueError):
        # insert_block writes all lines or none, so that each file can be registered alone now
        return None
    return [RecordCounts(n_documents=n) for n in counts.tolist()]
