"""Tokens of a dataset in object storage, read through the local cache like an array."""

from typing import Protocol

import numpy as np

from megatron.remote_cache import RemoteDataset


class TokenArray(Protocol):
    """Array interface of the tokens of a dataset: a numpy array, or RemoteTokens."""

    def __getitem__(self, key: slice | np.ndarray, /) -> np.ndarray:
        """Return tokens [n]."""
        ...

    def __len__(self) -> int:
        """Return the number of tokens."""
        ...


class RemoteTokens:
    """Tokens of a remote .bin, [n_tokens]: slices of step 1, and selections by an array of places."""

    def __init__(self, dataset: RemoteDataset, dtype: np.dtype) -> None:
        self.dataset, self.dtype = dataset, dtype
        self.n_tokens = dataset.size // dtype.itemsize

    def __len__(self) -> int:
        return self.n_tokens

    def __getitem__(self, key: slice | np.ndarray, /) -> np.ndarray:
        """Return a read-only copy of tokens. Raises RemoteError, and IndexError for places out of range."""
        if isinstance(key, slice):
            assert key.step in (None, 1)
            begin, end, _ = key.indices(self.n_tokens)
            return self._read(begin, max(begin, end))
        return self._read_places(np.asarray(key))

    def prefetch(self, begins: np.ndarray, n: int) -> None:
        """Begin to download tokens[b : b + n] for each of `begins`, int64 [k]."""
        width = self.dtype.itemsize
        self.dataset.prefetch((begin * width, (begin + n) * width) for begin in begins.tolist())

    def _read(self, begin: int, end: int) -> np.ndarray:
        width = self.dtype.itemsize
        return np.frombuffer(self.dataset.read(begin * width, end * width), self.dtype)

    def _read_places(self, places: np.ndarray) -> np.ndarray:
        if places.dtype == bool:
            places = np.flatnonzero(places)
        order, inverse = np.unique(places, return_inverse=True)
        if len(order) and not -self.n_tokens <= order[0] <= order[-1] < self.n_tokens:
            raise IndexError(f"{self.dataset.prefix}: got places out of range for {self.n_tokens:,} tokens")
        if len(order) and order[0] < 0:
            return self._read_places(places % self.n_tokens)
        # consecutive places are read together
        runs = np.split(order, np.flatnonzero(np.diff(order) > 1) + 1) if len(order) else []
        width = self.dtype.itemsize
        self.dataset.prefetch((int(run[0]) * width, (int(run[-1]) + 1) * width) for run in runs)
        parts = [self._read(int(run[0]), int(run[-1]) + 1) for run in runs]
        tokens = np.concatenate(parts) if parts else np.empty(0, self.dtype)
        return tokens[inverse.reshape(places.shape)]
