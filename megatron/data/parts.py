"""Dataset of parts: many .bin/.idx datasets that are one dataset, without a copy of their tokens.

`<prefix>.parts.json` is the sidecar of the whole, and lists the parts with paths relative to its folder.
`<prefix>.parts.idx` is the index that the merged dataset would have, byte for byte. So documents, windows and
every order of samples are those of the merged dataset; only the tokens are in several .bin files. The indices
of the parts are not read. `megatron/text/write_parts.py` writes both files.

Opening takes one `stat` per part: it compares the size of each .bin with the list. An index of up to 256 MB
is checked completely. If the time of a .bin differs (a copied folder, or a changed part), its sidecar must
have the recorded hash. `tools/inspect_data.py --verify` reads everything.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron import _csrc
from megatron.data.block_hash import hash_blocks
from megatron.data.sidecar import PARTS_SUFFIX, DatasetFiles, load_sidecar, locate_dataset, read_sidecar

REBUILD = "Restore it, or write the list again with tools/merge_datasets.py --parts --overwrite"


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
            return hash_blocks(Path(f"{self.prefix}{suffix}"), None).hexdigest() == expected
        except OSError:
            return False


def read_parts_list(files: DatasetFiles, sidecar: dict[str, Any]) -> list[DatasetPart]:
    """Return the parts of a dataset of parts. Raises ValueError for a list without parts."""
    entries = sidecar.get("parts")
    names = ("documents", "tokens", "mtime_ns")
    if not entries or any(entry.get(name) is None for entry in entries for name in ("path", *names)):
        raise ValueError(
            f"{files.sidecar}: got no list of parts with path, {', '.join(names)}. "
            "Write it with tools/merge_datasets.py --parts."
        )
    return [
        DatasetPart(
            os.path.join(files.sidecar.parent, entry["path"]), entry["documents"], entry["tokens"],
            entry["mtime_ns"], entry.get("sidecar_sha256"), entry.get("sha256") or {},
        )
        for entry in entries
    ]  # fmt: skip


def describe_part(files: DatasetFiles, n_documents: int, n_tokens: int, folder: Path) -> dict[str, Any]:
    """Return the entry of a dataset in the list of parts in `folder`; without a sidecar, with an index hash.

    Raises ValueError for a URL.
    """
    if files.cached is not None:
        raise ValueError(
            f"{files.uri}: got a URL, expected a part on this machine. Merge it, or download it."
        )
    sidecar, prefix = load_sidecar(files.uri), Path(files.uri)
    # without a sidecar, the hash of the index stands for the dataset
    sums = {"idx": hash_blocks(files.index, None).hexdigest()} if sidecar is None else sidecar.get("sha256")
    return {
        # real paths: a relative path through `..` is resolved from the real folder
        "path": os.path.relpath(prefix.parent.resolve() / prefix.name, folder.resolve()),
        "documents": n_documents,
        "tokens": n_tokens,
        "mtime_ns": files.data.stat().st_mtime_ns,
        "sidecar_sha256": None if sidecar is None else hash_blocks(files.sidecar, None).hexdigest(),
        "sha256": dict(sums or {}),
    }


def list_data_files(name: str) -> list[str]:
    """Return the .bin files of a dataset on this machine: of all its parts, or its own; else an empty list.

    name   prefix, or the path of a list of parts
    """
    files = locate_dataset(name.removesuffix(PARTS_SUFFIX))
    if files.has_parts:
        return [f"{part.prefix}.bin" for part in read_parts_list(files, read_sidecar(files.uri))]
    return [str(files.data)] if files.exists() else []


def check_parts(
    files: DatasetFiles, sidecar: dict[str, Any], parts: Sequence[DatasetPart], counts: tuple[int, int, int],
    dtype: np.dtype,
) -> None:  # fmt: skip
    """Compare the list with its index and with the files of the parts. Raises ValueError if one has changed.

    counts   (sequences, documents, tokens) of the index
    """
    n, n_tokens = sum(part.n_documents for part in parts), sum(part.n_tokens for part in parts)
    listed = [sidecar.get(name) for name in ("documents", "tokens", "dtype")]
    expected = [n, n_tokens, dtype.name]
    if listed != expected or counts != (n, n, n_tokens):
        raise ValueError(
            f"{files.sidecar}: got {listed} for documents, tokens and dtype, expected {expected} as in its "
            f"parts and in {files.index.name}. {REBUILD}."
        )
    for part in parts:
        path, size = Path(f"{part.prefix}.bin"), part.n_tokens * dtype.itemsize
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file, expected a part of {files.uri}. {REBUILD}.")
        status = path.stat()
        if status.st_size != size:
            raise ValueError(
                f"{path}: got {status.st_size:,} bytes, expected {size:,} as a part of {files.uri}. "
                f"{REBUILD}."
            )
        if status.st_mtime_ns != part.mtime_ns and not part.matches_record():
            raise ValueError(
                f"{path}: got another dataset than at the time when {files.sidecar} was written. {REBUILD}."
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
            self._get_map(number)[offset : offset + n] for number, offset, n in self._iter_pieces(begin, end)
        ]
        return np.concatenate([np.empty(0, self.dtype), *pieces])

    def _iter_pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (file, first token in it, number of tokens) of the tokens from begin to end - 1."""
        number = bisect_right(self._start_list, begin) - 1
        while begin < end:
            offset = begin - self._start_list[number]
            n = min(self.counts[number] - offset, end - begin)
            if n:
                yield number, offset, n
            begin, number = begin + n, number + 1

    def read_copy(self, begin: int, end: int) -> np.ndarray:
        """Return a copy of the tokens [begin, end), read without a memory map."""
        pieces = [
            np.fromfile(self.paths[number], self.dtype, n, offset=offset * self.dtype.itemsize)
            for number, offset, n in self._iter_pieces(begin, end)
        ]
        return np.concatenate([np.empty(0, self.dtype), *pieces])

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
