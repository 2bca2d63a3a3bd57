"""Small files of tests: .bin/.idx datasets of given ids, JSON lines, and tables of cases."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter


def write_dataset(
    prefix: Path, documents: Iterable[Sequence[int] | np.ndarray], meta: dict[str, Any] | None = None,
    dtype: Any = np.uint16,
) -> str:  # fmt: skip
    """Write documents of ids, and return the prefix."""
    with IndexedWriter(prefix, np.dtype(dtype), meta) as writer:
        for ids in documents:
            writer.add_document(ids)
    return str(prefix)


def read_documents(prefix: str | Path) -> list[list[int]]:
    """Return the ids of every document of a dataset."""
    tokens = IndexedTokens(Path(prefix))
    return [tokens.get_document(i).tolist() for i in range(tokens.n_documents)]


def write_texts(path: Path, texts: Iterable[str]) -> str:
    """Write one JSON line for each text, and return the path."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def read_rows(path: Path) -> list[list[str]]:
    """Return the cells of a table with tabs. Lines that begin with # are comments."""
    return [line.split("\t") for line in path.read_text().splitlines() if not line.startswith("#")]
