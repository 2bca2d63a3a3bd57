"""Arrow arrays of text: their values, their bytes, and whether they are sound."""

from typing import Any

import numpy as np


def check_structure(column: Any) -> None:
    """Raise pyarrow.ArrowInvalid where offsets point out of the text, as those of a damaged file may."""
    as_bytes = {"string": "binary", "large_string": "large_binary"}
    if str(column.type) in as_bytes:  # that a text is not UTF-8 is a fault of its row alone
        column = column.view(as_bytes[str(column.type)])
    column.validate(full=True)


def values_of(column: Any) -> list[Any]:
    """The values of an arrow array; of a string that is not UTF-8 its bytes."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_value_of(cell) for cell in column]


def _value_of(cell: Any) -> Any:
    try:
        return cell.as_py()
    except UnicodeDecodeError:
        return cell.as_buffer().to_pybytes()


def joined_text(column: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """(UTF-8 bytes, int64 end of each text in them) of an arrow array of strings.

    None for an array of another kind, with nulls, or with a string that is not UTF-8.
    """
    offset = {"string": np.int32, "large_string": np.int64}.get(str(column.type))
    if offset is None or column.null_count or not len(column):
        return None
    try:
        column.validate(full=True)
    except ValueError:  # pyarrow.ArrowInvalid
        return None
    _, offsets, text = column.buffers()
    bounds = np.frombuffer(offsets, dtype=offset)[column.offset : column.offset + len(column) + 1]
    held = np.frombuffer(text, dtype=np.uint8) if text is not None else np.zeros(0, dtype=np.uint8)
    return held[bounds[0] : bounds[-1]], (bounds[1:] - bounds[0]).astype(np.int64)
