"""Many small files of JSON lines at a time: a statement costs as much for one line as for a thousand."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron.data.documents import PLAIN
from megatron.mixture.libraries import duckdb, pyarrow
from megatron.mixture.records import Block, Records, Target, find_lines, find_not_blank, insert_block

SMALL_BYTES = 1 << 20
BATCH_BYTES = 16 << 20
BATCH_FILES = 1000


def batch_files(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Files in their order: neighbouring small ones of plain lines together, each other one alone."""
    batch: list[Path] = []
    n_bytes = 0
    for path in paths:
        size = path.stat().st_size
        is_small = path.name.endswith(PLAIN) and size <= SMALL_BYTES
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


def take_small_files(targets: Sequence[Target]) -> list[Records] | None:
    """Put the documents of small files of one corpus into the table.

    None, and nothing in the table, where a line of one of them is broken: `take_file` says which.
    """
    parts = [target.path.read_bytes() for target in targets]
    parts = [part if not part or part.endswith(b"\n") else part + b"\n" for part in parts]
    ends = np.cumsum([len(part) for part in parts])
    block = np.frombuffer(b"".join(parts), dtype=np.uint8)
    lines, begins, sizes = find_lines(block)
    wanted = find_not_blank(block, begins, sizes)
    lines, begins, sizes = lines.filter(pyarrow().array(wanted)), begins[wanted], sizes[wanted]
    of_file = np.searchsorted(ends, begins, side="right")
    counts = np.bincount(of_file, minlength=len(targets))
    rows = np.arange(len(begins)) - np.repeat(np.cumsum(counts) - counts, counts)
    ids = np.array([target.file for target in targets], dtype=np.int32)[of_file]
    found = Records()
    begins = begins - (ends - [len(part) for part in parts])[of_file]
    try:
        insert_block(Block(lines, begins, sizes, rows, files=ids), targets[0], found)
    except (duckdb().Error, pyarrow().ArrowException, ValueError):
        return None
    return [Records(n_documents=n) for n in counts.tolist()]
