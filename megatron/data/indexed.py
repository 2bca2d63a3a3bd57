"""Read a .bin/.idx pair: Megatron's MMIDIDX version 1.

The index is 9 bytes of magic, u64 version, u8 dtype code, u64 sequences, u64 documents + 1, then int32
lengths, int64 byte positions and int64 document boundaries (in sequences), all little endian.
"""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
REMEDY = "delete the pair and run tools/preprocess_data_many_cores.py again"


class IndexedTokens:
    """The documents of one pair, memory-mapped.

    document_tokens  int64 [n_documents]  tokens of each document
    sidecar          dict|None            <prefix>.json
    """

    def __init__(self, prefix: str | Path) -> None:
        """Open and check. FileNotFoundError, or ValueError where index and data do not fit each other."""
        self.prefix = str(prefix)
        index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for path in (index, data):
            if not path.is_file():
                raise FileNotFoundError(f"{path}: no such file; wanted the prefix of a .bin/.idx pair")
        self.dtype, lengths, positions, boundaries = _read_index(index)
        self.n_tokens = int(lengths.sum())
        held = data.stat().st_size
        wanted = self.n_tokens * self.dtype.itemsize
        if held != wanted:
            raise ValueError(f"{data}: holds {held:,} bytes, its index lists {wanted:,}; {REMEDY}")
        ends = np.concatenate([[0], np.cumsum(lengths)])
        if not np.array_equal(positions, ends[:-1] * self.dtype.itemsize):
            raise ValueError(f"{index}: sequences do not lie one after another; {REMEDY}")
        self._starts = ends[boundaries]  # token at which each document begins, and the end
        self.document_tokens = np.diff(self._starts)
        self.n_documents = len(self.document_tokens)
        # an empty file cannot be mapped
        self._tokens = np.memmap(data, self.dtype, mode="r") if held else np.empty(0, self.dtype)
        self.sidecar = _read_sidecar(Path(f"{prefix}.json"))

    def read(self, document: int, offset: int, n: int) -> np.ndarray:
        """`n` tokens from `offset` in a document on, across ends of documents: [n], a view of the file."""
        begin = int(self._starts[document]) + offset
        if begin < 0 or begin + n > self.n_tokens:
            raise ValueError(
                f"{self.prefix}: no {n} tokens from {begin:,} on, the file holds {self.n_tokens:,}"
            )
        return self._tokens[begin : begin + n]

    def document(self, i: int) -> np.ndarray:
        """The tokens of document i, a view of the file."""
        if not 0 <= i < self.n_documents:
            raise IndexError(f"{self.prefix}: no document {i}, the file holds {self.n_documents:,}")
        return self._tokens[self._starts[i] : self._starts[i + 1]]


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """(dtype, lengths int64, byte positions, document boundaries in sequences), checked."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size:
        raise ValueError(f"{path}: {size} bytes are no index; {REMEDY}")
    magic, version, code, n, m = HEADER.unpack(head)
    if magic != MAGIC:
        raise ValueError(f"{path}: begins with {magic!r}, an index begins with {MAGIC!r}")
    if version != VERSION or code not in DTYPES:
        raise ValueError(
            f"{path}: version {version} with dtype code {code}, wanted version 1 with integer tokens"
        )
    wanted = HEADER.size + 12 * n + 8 * m
    if size < wanted or m < 1:
        raise ValueError(f"{path}: {size:,} bytes, its header promises {wanted:,}; {REMEDY}")
    body = np.memmap(path, np.uint8, mode="r", offset=HEADER.size)
    lengths = body[: 4 * n].view("<i4").astype(np.int64)
    positions = body[4 * n : 12 * n].view("<i8")
    boundaries = np.array(body[12 * n : 12 * n + 8 * m].view("<i8"))
    if (
        (n and lengths.min() < 0)
        or boundaries[0] != 0
        or boundaries[-1] != n
        or (np.diff(boundaries) < 0).any()
    ):
        raise ValueError(f"{path}: lengths or document boundaries make no sense; {REMEDY}")
    return DTYPES[code], lengths, positions, boundaries


def _read_sidecar(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error}); {REMEDY}") from error
