"""Arrow arrays of text as bytes and offsets."""

from collections.abc import Iterator
from typing import Any

import numpy as np


def concat_texts(column: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (UTF-8 bytes, int64 end offset of each text) of an arrow array of strings, without a copy.

    Returns None for an array of another type or with nulls. Raises pyarrow.ArrowInvalid
    for offsets outside the text, as in a damaged file, and for a string that is not UTF-8.
    """
    offset = {"string": np.int32, "large_string": np.int64}.get(str(column.type))
    if offset is None or column.null_count or not len(column):
        return None
    column.validate(full=True)
    # Layout: offsets [n + 1], text i is bytes offsets[i] to offsets[i + 1].
    # A slice shares the buffers of its parent and begins at element
    # column.offset. Offsets are valid only because of the validation above.
    _, offsets, text = column.buffers()
    bounds = np.frombuffer(offsets, dtype=offset)[column.offset : column.offset + len(column) + 1]
    # arrow has no text buffer if all texts are empty
    data = np.frombuffer(text, dtype=np.uint8) if text is not None else np.zeros(0, dtype=np.uint8)
    # a slice does not begin at byte 0: ["ab", "cd", "e"]
    # without its first text has bounds [2, 4, 5], ends [2, 3]
    return data[bounds[0] : bounds[-1]], (bounds[1:] - bounds[0]).astype(np.int64)


def iter_slices(column: Any, n_bytes: int) -> Iterator[tuple[int, Any]]:
    """Yield (number of the first text, slice of an arrow array) with about `n_bytes` per slice."""
    joined = concat_texts(column)
    # unknown sizes: assume 1 KiB per text
    ends = np.arange(1, len(column) + 1) * 1024 if joined is None else joined[1]
    begin = 0
    while begin < len(ends):
        base = ends[begin - 1] if begin else 0
        # ends [3, 7, 9], base 3, limit 5: 8 is between 7 and 9,
        # so one text. A text above the limit is its own slice.
        end = max(begin + 1, int(np.searchsorted(ends, base + n_bytes, side="right")))
        yield begin, column.slice(begin, end - begin)
        begin = end
