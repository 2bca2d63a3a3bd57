"""Dataset of parts: many .bin/.idx datasets that are one dataset, without a copy of their tokens.

`<prefix>.parts.json` is the sidecar of the whole, with the paths of the parts
from its folder. `<prefix>.parts.idx` is the index of the merged dataset, byte
for byte, so documents and every order of samples are the same. The indices of
the parts are not read. `megatron/text/write_parts.py` writes both.

Opening takes one `stat` per part: it compares the size of each .bin
with the list. If the time of a .bin differs (a copied folder,
or a changed part), its sidecar must have the recorded hash.
`tools/inspect_data.py --verify` reads everything.
"""

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from megatron import _csrc
from megatron.data.block_hash import hash_file
from megatron.data.sidecar import DatasetFiles, count_token_bytes, load_sidecar

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
        """Return whether the sidecar, or the index without one, has the recorded hash."""
        suffix = ".idx" if self.sidecar_sha256 is None else ".json"
        file = Path(f"{self.prefix}{suffix}")
        return file.is_file() and hash_file(file) == (self.sidecar_sha256 or self.sha256.get("idx"))


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
    """Return the entry of a dataset in the list of parts in `folder`. Raises ValueError for a URL."""
    if files.remote is not None:
        raise ValueError(
            f"{files.uri}: got a URL, expected a part on this machine. Merge it, or download it."
        )
    sidecar, prefix = load_sidecar(files.uri), Path(files.uri)
    # without a sidecar, the hash of the index stands for the dataset
    sums = {"idx": hash_file(files.index)} if sidecar is None else sidecar.get("sha256")
    return {
        # real paths: a relative path through `..` is resolved from the real folder
        "path": os.path.relpath(prefix.parent.resolve() / prefix.name, folder.resolve()),
        "documents": n_documents,
        "tokens": n_tokens,
        "mtime_ns": files.data.stat().st_mtime_ns,
        "sidecar_sha256": None if sidecar is None else hash_file(files.sidecar),
        "sha256": dict(sums or {}),
    }


def check_parts(
    files: DatasetFiles, sidecar: dict[str, Any], parts: Sequence[DatasetPart], counts: tuple[int, int, int],
    dtype: str,
) -> None:  # fmt: skip
    """Compare the list with its index and the files of the parts. Raises ValueError.

    counts   (sequences, documents, tokens) of the index
    """
    n, n_tokens = sum(part.n_documents for part in parts), sum(part.n_tokens for part in parts)
    listed = [sidecar.get(name) for name in ("documents", "tokens", "dtype")]
    expected = [n, n_tokens, dtype]
    if listed != expected or counts != (n, n, n_tokens):
        raise ValueError(
            f"{files.sidecar}: got {listed} for documents, tokens and dtype, expected {expected} as in its "
            f"parts and in {files.index.name}. {REBUILD}."
        )
    for part in parts:
        path, size = Path(f"{part.prefix}.bin"), part.n_tokens * count_token_bytes(dtype)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file, expected a part of {files.uri}. {REBUILD}.")
        status = path.stat()
        if status.st_size != size or (status.st_mtime_ns != part.mtime_ns and not part.matches_record()):
            raise ValueError(
                f"{path}: got {status.st_size:,} bytes of another dataset, expected the part of "
                f"{size:,} bytes in {files.sidecar}. {REBUILD}."
            )


class ConcatenatedTokens:
    """Read-only tokens of all parts as one array [n]. A map takes no file descriptor."""

    def __init__(self, parts: Sequence[DatasetPart], dtype: np.dtype) -> None:
        # a part without tokens cannot be mapped
        self._parts, self.dtype = [part for part in parts if part.n_tokens], dtype
        self._edges = list(accumulate((part.n_tokens for part in self._parts), initial=0))
        self._maps: list[np.ndarray | None] = [None] * len(self._parts)

    def __len__(self) -> int:
        return self._edges[-1]

    def __getitem__(self, key: Any) -> Any:
        """Return a slice of step 1, or the tokens at indices of any shape."""
        if not isinstance(key, slice):
            return self._gather(np.asarray(key))
        begin, end, step = key.indices(len(self))
        assert step == 1, "other steps are not implemented"
        # part `number` has the tokens edges[number] to edges[number + 1] - 1
        number, pieces = bisect_right(self._edges, begin) - 1, []
        while begin < end:
            first, last = self._edges[number : number + 2]
            pieces.append(self._get_map(number)[begin - first : end - first])
            begin, number = last, number + 1
        # most windows are in one part
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, self.dtype), *pieces])

    def _gather(self, indices: np.ndarray) -> np.ndarray:
        numbers = np.searchsorted(self._edges, indices, side="right") - 1
        ids = np.empty(indices.shape, self.dtype)
        for number in np.unique(numbers).tolist():
            mask = numbers == number
            ids[mask] = self._get_map(number)[indices[mask] - self._edges[number]]
        return ids

    def _get_map(self, number: int) -> np.ndarray:
        tokens = self._maps[number]
        if tokens is None:
            part = self._parts[number]
            # two threads may both map a file: one of the maps is then dropped
            content = _csrc.map_file(f"{part.prefix}.bin", part.n_tokens * self.dtype.itemsize)
            tokens = self._maps[number] = content.view(self.dtype)
        return tokens
