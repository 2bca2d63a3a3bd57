"""Reader of a dataset of parts: many .bin/.idx datasets that are one dataset, without a copy of their tokens.

`<prefix>.parts.json` is the sidecar of the whole, and lists the parts with paths relative to its folder.
`<prefix>.parts.idx` is the index that the merged dataset would have, byte for byte. So documents, windows and
every order of samples are those of the merged dataset; only the tokens are in several .bin files. The indices
of the parts are not read. `megatron/text/write_parts.py` writes both files.

Opening takes one `stat` and one read of 8 bytes per part: it compares the size of each .bin with the list,
and the start of each part in the index. Only an index of up to CHECKED_BYTES is checked completely. If the
time of a .bin differs (a copied folder, or a changed part), its sidecar must have the recorded hash.
`tools/inspect_data.py --verify` reads everything.
"""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron import _csrc
from megatron.data.indexed import IndexedTokens, check_index, read_index_header
from megatron.data.remote_tokens import TokenArray
from megatron.plan.idx_header import HEADER
from megatron.plan.sidecar import PARTS_INDEX_SUFFIX, PARTS_SUFFIX, is_dataset_of_parts, read_sidecar

CHECKED_BYTES = 1 << 28  # an index up to this size (13 M documents, 0.1 s) is checked completely on opening
REBUILD = "Restore it, or write the list again with tools/merge_datasets.py --parts --overwrite"


def open_dataset(prefix: str | Path) -> IndexedTokens:
    """Open the dataset that a prefix names: .bin/.idx, or a list of parts. All readers open datasets here.

    Raises FileNotFoundError, or ValueError if its files are inconsistent.
    """
    return PartsTokens(prefix) if is_dataset_of_parts(prefix) else IndexedTokens(prefix)


@dataclass(frozen=True)
class DatasetPart:
    """A part as the list records it.

    mtime_ns         time of its .bin
    sidecar_sha256   hash of its sidecar; None: it has none
    sha256           hashes of its .bin and .idx, as far as they are recorded
    """

    prefix: str
    n_documents: int
    n_tokens: int
    mtime_ns: int
    sidecar_sha256: str | None
    sha256: dict[str, str]

    def matches_record(self) -> bool:
        """Return whether the sidecar of the part, or its index if it has none, has the recorded hash."""
        suffix, expected = (".json", self.sidecar_sha256)
        if expected is None:
            suffix, expected = ".idx", self.sha256.get("idx")
        try:
            return hash_file(Path(f"{self.prefix}{suffix}")) == expected
        except OSError:
            return False


def read_parts_list(prefix: str | Path, sidecar: dict[str, Any] | None = None) -> list[DatasetPart]:
    """Return the parts of a dataset of parts. Raises ValueError for a list without parts."""
    entries = (read_sidecar(prefix) if sidecar is None else sidecar).get("parts")
    path = Path(f"{prefix}{PARTS_SUFFIX}")
    names = ("path", "documents", "tokens", "mtime_ns")
    if not entries or not all(name in entry for entry in entries for name in names):
        raise ValueError(
            f"{path}: got no list of parts with {', '.join(names)}. "
            "Write it with tools/merge_datasets.py --parts."
        )
    return [
        DatasetPart(
            prefix=os.path.join(path.parent, entry["path"]),
            n_documents=entry["documents"],
            n_tokens=entry["tokens"],
            mtime_ns=entry["mtime_ns"],
            sidecar_sha256=entry.get("sidecar_sha256"),
            sha256=entry.get("sha256") or {},
        )
        for entry in entries
    ]


class PartsTokens(IndexedTokens):
    """Documents of a dataset of parts, with the interface of `IndexedTokens`.

    parts   the parts, in the order of their documents
    """

    def __init__(self, prefix: str | Path) -> None:
        """Open and check the sizes. Raises FileNotFoundError, or ValueError if a part has changed."""
        self.prefix, self._is_remote = str(prefix), False
        self._index = Path(f"{prefix}{PARTS_INDEX_SUFFIX}")
        self.n_ids: int | None = None
        sidecar = self.sidecar = read_sidecar(prefix)
        self.parts = read_parts_list(prefix, sidecar)
        if not self._index.is_file():
            raise FileNotFoundError(
                f"{self._index}: no such file, expected the index of the parts. {REBUILD}."
            )
        self.dtype, self.n_sequences, self.n_documents = read_index_header(self._index)
        self.n_tokens = sum(part.n_tokens for part in self.parts)
        self._longest = sidecar.get("longest_document", 1 << 31)
        counts = [sum(part.n_documents for part in self.parts), self.n_tokens, self.dtype.name]
        listed = [sidecar.get(name) for name in ("documents", "tokens", "dtype")]
        if listed != counts or self.n_sequences != self.n_documents or self.n_documents != counts[0]:
            raise ValueError(
                f"{prefix}{PARTS_SUFFIX}: got {listed} for documents, tokens and dtype, expected {counts} "
                f"as in its parts and in {self._index.name}. {REBUILD}."
            )
        if self._index.stat().st_size <= CHECKED_BYTES:
            n_tokens, _, in_order = check_index(self._index, self.n_sequences, self.n_documents, self.dtype)
            if n_tokens != self.n_tokens or not in_order:
                raise ValueError(f"{self._index}: got lengths or positions of other tokens. {REBUILD}.")
        self._check_index_starts()
        for part in self.parts:
            self._check_part(part)

    def __reduce__(self) -> tuple[type["PartsTokens"], tuple[str]]:
        """Pickle the prefix only."""
        return PartsTokens, (self.prefix,)

    @cached_property
    def tokens(self) -> TokenArray:
        """All documents of all parts concatenated, [n_tokens]. Each .bin is mapped on its first access."""
        counts = [part.n_tokens for part in self.parts]
        return ConcatenatedTokens([f"{part.prefix}.bin" for part in self.parts], counts, self.dtype)

    @cached_property
    def document_tokens(self) -> np.ndarray:
        """Tokens of each document, int64 [n_documents]; a document is a sequence of this index."""
        return self.sequence_tokens().astype(np.int64)

    def sequence_tokens(self) -> np.ndarray:
        """Read the tokens of each document from the index. Raises ValueError if their sum is wrong."""
        lengths = super().sequence_tokens()
        # opening does not read the lengths; csrc/sample_starts.cpp checks the order, not their sum
        if int(lengths.sum(dtype=np.int64)) != self.n_tokens:
            raise ValueError(
                f"{self._index}: got lengths that do not add up to {self.n_tokens:,}. {REBUILD}."
            )
        return lengths

    def read_copy(self, begin: int, n: int) -> np.ndarray:
        """Return a copy of tokens[begin : begin + n], read without a memory map."""
        tokens = self.tokens
        assert isinstance(tokens, ConcatenatedTokens), "tokens of parts"
        pieces = [
            np.fromfile(tokens.paths[number], self.dtype, count, offset=offset * self.dtype.itemsize)
            for number, offset, count in tokens.iter_pieces(begin, min(begin + n, self.n_tokens))
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, self.dtype), *pieces])

    def _check_index_starts(self) -> None:
        """Check the position of the first document of each part, and the last boundary of the index."""
        n, begin, document = self.n_documents, 0, 0
        positions = HEADER.size + 4 * n  # header, int32 lengths, int64 positions, int64 boundaries
        checks: list[tuple[int, int, str]] = []  # (byte in the index, number at it, what it is)
        for part in self.parts:
            if part.n_documents:
                place = positions + 8 * document
                checks.append((place, begin * self.dtype.itemsize, f"first token of {part.prefix}"))
            begin, document = begin + part.n_tokens, document + part.n_documents
        checks.append((positions + 16 * n, n, "last boundary"))
        with self._index.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                # from a disk: all pages are requested at once, and no others
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                for place, *_ in checks:
                    os.posix_fadvise(file.fileno(), place, 8, os.POSIX_FADV_WILLNEED)
            for place, expected, name in checks:
                stored = int.from_bytes(os.pread(file.fileno(), 8, place), "little", signed=True)
                if stored != expected:
                    raise ValueError(
                        f"{self._index}: got {stored:,} as {name}, expected {expected:,} as in the list. "
                        f"{REBUILD}."
                    )

    def _check_part(self, part: DatasetPart) -> None:
        path, expected = f"{part.prefix}.bin", part.n_tokens * self.dtype.itemsize
        try:
            status = os.stat(path)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path}: no such file, expected a part of {self.prefix}. {REBUILD}."
            ) from None
        if status.st_size != expected:
            raise ValueError(
                f"{path}: got {status.st_size:,} bytes, expected {expected:,} as a part of {self.prefix}. "
                f"{REBUILD}."
            )
        if status.st_mtime_ns != part.mtime_ns and not part.matches_record():
            raise ValueError(
                f"{path}: got another dataset than at the time when {self.prefix}{PARTS_SUFFIX} was written. "
                f"{REBUILD}."
            )


class ConcatenatedTokens:
    """Read-only tokens of several files as one array [n]. No file stays open: a map takes no descriptor."""

    def __init__(self, paths: Sequence[str], counts: Sequence[int], dtype: np.dtype) -> None:
        """`counts`: tokens of each file."""
        self.paths, self.counts, self.dtype = paths, counts, dtype
        ends = np.cumsum([0, *counts], dtype=np.int64)
        self._starts, self._n_tokens = ends[:-1], int(ends[-1])
        self._start_list = self._starts.tolist()  # bisect on a list is faster than searchsorted of one number
        self._maps: list[np.ndarray | None] = [None] * len(paths)

    def __len__(self) -> int:
        return self._n_tokens

    @property
    def n_mapped(self) -> int:
        """Number of files that are mapped."""
        return sum(tokens is not None for tokens in self._maps)

    def __getitem__(self, key: Any) -> Any:
        """Return a slice of step 1, a view if it is in one file, or the tokens at indices of any shape."""
        if not isinstance(key, slice):
            return self._gather(np.asarray(key))
        begin, end, step = key.indices(self._n_tokens)
        assert step == 1, "other steps are not implemented"
        # files without tokens begin at the same number as the next one: the last of them is the one to read
        number = bisect_right(self._start_list, begin) - 1
        offset = begin - self._start_list[number]
        if begin < end <= begin - offset + self.counts[number]:  # as most windows: in one file
            return self._get_map(number)[offset : offset + end - begin]
        pieces = [
            self._get_map(number)[offset : offset + n] for number, offset, n in self.iter_pieces(begin, end)
        ]
        return np.concatenate([np.empty(0, self.dtype), *pieces])

    def iter_pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (file, first token in it, number of tokens) of the tokens from begin to end - 1."""
        number = bisect_right(self._start_list, begin) - 1
        while begin < end:
            offset = begin - self._start_list[number]
            n = min(self.counts[number] - offset, end - begin)
            if n:
                yield number, offset, n
            begin, number = begin + n, number + 1

    def _gather(self, indices: np.ndarray) -> np.ndarray:
        if indices.size and not -self._n_tokens <= indices.min() <= indices.max() < self._n_tokens:
            raise IndexError(f"got token {indices.min()} to {indices.max()}, expected below {self._n_tokens}")
        places = np.where(indices < 0, indices + self._n_tokens, indices)
        numbers = np.searchsorted(self._starts, places, side="right") - 1
        ids = np.empty(places.shape, self.dtype)
        for number in np.unique(numbers).tolist():
            mask = numbers == number
            ids[mask] = self._get_map(number)[places[mask] - self._start_list[number]]
        return ids

    def _get_map(self, number: int) -> np.ndarray:
        tokens = self._maps[number]
        if tokens is None:
            # two threads may both map a file: one of the maps is then dropped
            n_bytes = self.counts[number] * self.dtype.itemsize
            tokens = self._maps[number] = _csrc.map_file(self.paths[number], n_bytes).view(self.dtype)
        return tokens


def hash_file(path: Path) -> str:
    """Return the sha256 of a file as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
