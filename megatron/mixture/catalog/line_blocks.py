"""Lines of a file in blocks of memory, as Arrow strings without a copy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.mixture.lazy_imports import import_pyarrow
from megatron.text.inputs import PLAIN_SUFFIXES
from megatron.text.text_readers import iter_blocks, replace_lone_surrogates

BLOCK_BYTES = 32 << 20
LINE_END = 10


def read_line_blocks(path: Path) -> Iterator[np.ndarray]:
    """Yield the bytes of a file, uint8, in blocks that end at the end of a line.

    A newline is added to the last line if it has none.
    """
    parts: list[bytes] = []
    n_bytes = 0
    for piece in _read_pieces(path):
        # small pieces are collected until a block is full, then cut after the last complete line
        cut = piece.rfind(b"\n") + 1 if n_bytes + len(piece) >= BLOCK_BYTES else 0
        if not cut:
            parts.append(piece)
            n_bytes += len(piece)
            continue
        yield np.frombuffer(b"".join([*parts, piece[:cut]]), dtype=np.uint8)
        parts, n_bytes = [piece[cut:]], len(piece) - cut
    rest = b"".join(parts)
    if rest:
        yield np.frombuffer(rest if rest.endswith(b"\n") else rest + b"\n", dtype=np.uint8)


def _read_pieces(path: Path) -> Iterator[bytes]:
    if not path.name.endswith(PLAIN_SUFFIXES):
        yield from iter_blocks(path)
        return
    with path.open("rb", buffering=0) as file:
        while piece := file.read(BLOCK_BYTES):
            yield piece


def split_lines(block: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return (lines with their newlines, as Arrow strings without a copy; where each begins; its bytes)."""
    ends = np.flatnonzero(block == LINE_END) + 1
    bounds = np.concatenate([np.zeros(1, dtype=np.int64), ends])
    arrow = import_pyarrow()
    # offsets and block become Arrow buffers without a copy: line i is block[bounds[i]:bounds[i + 1]]
    lines = arrow.LargeStringArray.from_buffers(len(ends), arrow.py_buffer(bounds), arrow.py_buffer(block))
    return lines, bounds[:-1], np.diff(bounds)


def mask_nonblank(block: np.ndarray, begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return a mask, bool [n], of the lines that have other characters than white space."""
    mask = np.ones(len(sizes), dtype=bool)
    for i in np.flatnonzero((block[begins] <= 32) | (sizes < 2)):  # the others begin with a visible character
        mask[i] = bool(block[begins[i] : begins[i] + sizes[i]].tobytes().strip())
    return mask


@dataclass(frozen=True)
class LineBlock:
    """Lines as Arrow strings, and for each its first byte, its size, and its number in the file from 0.

    names   names of samples, for messages about broken ones; empty for lines
    files   file number of each line, for lines of several files; `numbers` are rows then
    """

    lines: Any
    begins: np.ndarray
    sizes: np.ndarray
    numbers: np.ndarray
    names: Sequence[str] = ()
    files: np.ndarray | None = None

    def replace_lone_surrogates(self) -> "LineBlock":
        """Return the block with lone surrogates replaced by U+FFFD, as the tokenizer's reader does.

        DuckDB rejects them as invalid JSON.
        """
        arrow = import_pyarrow()
        _, bounds, text = self.lines.buffers()
        mended = arrow.py_buffer(replace_lone_surrogates(text.to_pybytes()))
        return replace(self, lines=arrow.LargeStringArray.from_buffers(len(self.lines), bounds, mended))

    def select(self, mask: np.ndarray) -> "LineBlock":
        """Return the lines where `mask` is True."""
        return LineBlock(
            self.lines.filter(import_pyarrow().array(mask)),
            self.begins[mask], self.sizes[mask], self.numbers[mask],
        )  # fmt: skip
