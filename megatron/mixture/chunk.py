"""Chunks of a mixture: whose turn it is, and which unit of its domain. A unit is a document or a window.

Shares are exact. After any number of chunks each domain has had its share of all units, rounded down or up
(as long as the weights stay; when they change, what a domain is owed is carried over): of the shares begun
those due first are served, which is how unit jobs with windows are scheduled (earliest deadline first).
Weights are whole parts of 2^40, so that every machine finds the same.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron import _csrc

BITS = 40
WHOLE = 1 << BITS
NO_LIMIT = np.iinfo(np.int64).max


def parts_of(weights: np.ndarray) -> np.ndarray:
    """Weights (float64 [K], not below 0) as parts of 2^40, int64 [K]; one above 0 has a part at least.

    ValueError where none is above 0 or one is no number.
    """
    weights = np.asarray(weights, dtype=np.float64)
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum() > 0:
        raise ValueError(f"weights: found {weights.tolist()}, wanted numbers from 0, one of them above")
    exact = weights / weights.sum() * WHOLE
    parts = np.maximum(np.floor(exact).astype(np.int64), weights > 0)
    parts[np.argmax(parts)] += WHOLE - parts.sum()  # less than one in 2^40 for each domain
    return parts


def parts_of_rows(weights: np.ndarray) -> np.ndarray:
    """`parts_of` of each row, [n, K] to int64 [n, K]."""
    if not np.isfinite(weights).all() or (weights < 0).any() or not (weights.sum(axis=1) > 0).all():
        raise ValueError("weights: got a row without a positive weight, expected finite numbers from 0")
    exact = weights / weights.sum(axis=1)[:, None] * WHOLE
    parts = np.maximum(np.floor(exact).astype(np.int64), weights > 0)
    parts[np.arange(len(parts)), np.argmax(parts, axis=1)] += WHOLE - parts.sum(axis=1)
    return parts


@dataclass(frozen=True)
class Position:
    """Where a mixture stands before a chunk.

    done  int64 [K]  units each domain has given
    lag   int64 [K]  what it is owed beyond that, in 2^-40 units
    """

    chunk: int
    done: np.ndarray
    lag: np.ndarray

    @classmethod
    def start(cls, n_domains: int) -> "Position":
        """Before the first chunk."""
        return cls(0, np.zeros(n_domains, dtype=np.int64), np.zeros(n_domains, dtype=np.int64))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"chunk": self.chunk, "done": self.done.tolist(), "lag": self.lag.tolist()}

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> "Position":
        """Undo `as_dict`."""
        return cls(told["chunk"], np.array(told["done"], np.int64), np.array(told["lag"], np.int64))


@dataclass(frozen=True)
class Turns:
    """Units of some chunks, in order. domain int32 [n]; number int64 [n]: how many its domain gave before."""

    domain: np.ndarray
    number: np.ndarray


def take_turns(
    position: Position, parts: np.ndarray, limit: np.ndarray, size: int, n_chunks: int, seed: int,
    until_empty: bool = False,
) -> tuple[Turns, Position]:  # fmt: skip
    """Up to `n_chunks` chunks of `size` units from a position on, and where the mixture stands then.

    Fewer come where the next would take more of a domain than its `limit`, int64 [K], and with `until_empty`
    after a chunk that uses up a limit.
    """
    made, domain, number, done, lag = _csrc.mixture_turns(
        parts, position.done, position.lag, limit, size, position.chunk, n_chunks, seed & (1 << 64) - 1,
        until_empty,
    )  # fmt: skip
    n = made * size
    return Turns(domain[:n], number[:n]), Position(position.chunk + made, done, lag)


class Orders:
    """Which unit of its domain the number-th one is: each epoch of a domain is a permutation of its own.

    The permutation is that of megatron/data/permutation.py under keys made of (seed, domain's name, epoch):
    it does not change when other domains come or go.
    """

    def __init__(self, n_units: np.ndarray, names: Sequence[str], seed: int, shuffle: bool = True) -> None:
        """n_units int64 [K], above 0. `shuffle` False: as they are registered, in every epoch."""
        self.n_units, self.shuffle = np.ascontiguousarray(n_units, dtype=np.int64), shuffle
        self.seeds = np.array([_seed_of(name, seed) for name in names], dtype=np.uint64)

    def units(self, turns: Turns) -> np.ndarray:
        """The unit of each turn inside its domain, int64 [n]."""
        if not self.shuffle:
            return turns.number % self.n_units[turns.domain]
        return _csrc.domain_units(turns.domain, turns.number, self.n_units, self.seeds)


def _seed_of(name: str, seed: int) -> int:
    told = json.dumps([name, seed & (1 << 64) - 1]).encode()
    return int.from_bytes(hashlib.sha256(told).digest()[:8], "little")
