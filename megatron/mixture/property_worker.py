"""Computation of one part of a property, in a process that imports the user's function.

`compute_property.py` starts these processes. They read documents, call the function, check its values, and
write a file for each part.
"""

import importlib
import inspect
import math
import multiprocessing
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np

from megatron.io import atomic_path
from megatron.mixture.catalog.computed import VALUES, make_value_type
from megatron.mixture.catalog.query import SourceFile
from megatron.mixture.document_chunks import open_documents
from megatron.mixture.lazy_imports import import_pyarrow

PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "category": (str,), "integer": (int,), "float": (int, float),
    "boolean": (bool,), "date": (date,), "list": (list,),
}  # fmt: skip
PIECE_BYTES = 1 << 22  # of documents in memory at a time

_compute: Any = None
_settings: tuple[str, str, int] = ("", "", 0)


@dataclass(frozen=True)
class DocumentRange:
    """Documents begin to end - 1 of a file, whose values go to `path`.

    spans   (begin, size) of the documents in the file, as locate_files returns them
    """

    file: SourceFile
    spans: tuple[np.ndarray, np.ndarray]
    begin: int
    end: int
    path: Path


def write_values(path: Path, kind: str, chunks: Sequence[Any]) -> None:
    arrow = import_pyarrow()
    table = arrow.table({VALUES: arrow.chunked_array(chunks, make_value_type(kind))})
    with (
        atomic_path(path) as partial,
        arrow.OSFile(str(partial), "wb") as sink,
        arrow.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)


def start_process(function: str, kind: str, batch: int) -> None:
    """Import the function. A class is created once in each process."""
    global _settings, _compute
    _settings, _compute = (function, kind, batch), None
    # an earlier computation of this process may have imported another version of the source
    sys.modules.pop(function.partition(":")[0], None)
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        # a main process that was killed cannot end its processes, which would wait for work forever
        assert parent is not None, "only the processes of an executor have this thread"
        parent.join()
        os._exit(1)

    if parent is not None:
        threading.Thread(target=end_with_parent, daemon=True).start()


def _load_function() -> Any:
    global _compute
    if _compute is None:
        function = _settings[0]
        module, _, name = function.partition(":")
        try:
            target = getattr(importlib.import_module(module), name)
            _compute = target() if inspect.isclass(target) else target
        except Exception as error:  # code of the user may raise anything
            raise ValueError(
                f"function {function}: cannot be loaded ({type(error).__name__}: {error}). Correct it."
            ) from None
    return _compute


def compute_part(part: DocumentRange, folder: Path) -> int:
    """Compute the values of one part, write them, and return the number of documents."""
    _, kind, batch = _settings
    compute, values = _load_function(), list[Any]()
    # several batches per read, of about PIECE_BYTES by the mean size of a document: a read has a fixed cost
    mean = max(1, part.file.n_bytes // max(1, part.file.n_documents))
    at_once = max(1, PIECE_BYTES // mean // batch) * batch
    with open_documents(part.file, part.spans, folder) as read:
        for begin in range(part.begin, part.end, at_once):
            end = min(begin + at_once, part.end)
            documents = read(np.arange(begin - part.begin, end - part.begin))
            for i in range(0, len(documents), batch):
                values += _compute_batch(compute, documents[i : i + batch], begin + i, part.file.path)
    write_values(part.path, kind, [import_pyarrow().array(values, make_value_type(kind))])
    return part.end - part.begin


def _compute_batch(compute: Any, documents: list[Any], begin: int, path: str) -> list[Any]:
    """Return the checked values of documents, of which the first has the number `begin` in its file."""
    function, kind, _ = _settings
    place = f"{path}, documents {begin + 1:,} to {begin + len(documents):,}"
    try:
        answer = compute(documents)
    except Exception as error:  # code of the user may raise anything
        raise ValueError(
            f"{place}: {function} raised {type(error).__name__} ({error}). "
            "Correct it, and run the command again with --replace."
        ) from None
    answer = answer.tolist() if isinstance(answer, np.ndarray) else answer
    if not isinstance(answer, list | tuple) or len(answer) != len(documents):
        n = len(answer) if isinstance(answer, list | tuple) else type(answer).__name__
        raise ValueError(f"{place}: {function} returned {n}, expected a list of {len(documents)} values.")
    return [
        check_value(value, kind, f"{path}, document {begin + i + 1:,}: {function}")
        for i, value in enumerate(answer)
    ]


def check_value(value: Any, kind: str, place: str) -> Any:
    """Return a value of a kind of TYPES for Arrow. Raises ValueError for None, NaN, Inf and other types."""
    if isinstance(value, np.generic):
        value = value.item()
    if kind == "date" and isinstance(value, str):
        try:
            value = date.fromisoformat(value)
        except ValueError:
            raise ValueError(f"{place}: got {value!r}, expected a date such as 2024-02-29.") from None
    # bool is a subclass of int, and datetime of date
    is_right = isinstance(value, PYTHON_TYPES[kind]) and isinstance(value, bool) == (kind == "boolean")
    if kind == "list" and is_right:
        is_right = all(isinstance(element, str) for element in value)
    if not is_right or isinstance(value, datetime):
        raise ValueError(f"{place}: got {value!r:.80}, expected a value of type {kind}.")
    if kind == "integer" and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{place}: got {value}, expected an integer of 64 bits.")
    if kind == "float" and not math.isfinite(value):
        raise ValueError(f"{place}: got {value}, expected a finite number.")
    for text in value if kind == "list" else [value] if isinstance(value, str) else []:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{place}: got {text!r:.80}, expected text that is UTF-8.") from None
    return float(value) if kind == "float" else value
