"""Chunks of a mixture: the domain and the index of each unit. A unit is a document or a window.

Shares are exact. After any number of chunks each domain has had its share of all units, rounded down or up,
as long as the weights stay. When they change, the debt of each domain is carried over. Among the shares that
have begun, those due first are served: earliest-deadline-first scheduling of unit jobs with windows.
Weights are integer multiples of 2^-40, so that every machine computes the same order.

A blend of corpora has another scheduler (megatron/plan/weighted_round_robin.py), because its promise is
stronger: exact fractions, at every slot. Weights of 1/3 are rounded here, so that after 3 * 2^40 units a
domain has 2 units too many. Inside a chunk the units of a domain are spread from a random offset, and a
prefix that ends inside a chunk may miss its share by more than one. Both would also change the order of
samples of existing runs. tests/mixture/test_two_schedulers.py holds these counterexamples.
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


def quantize_weights(weights: np.ndarray) -> np.ndarray:
    """Return weights (float64 [K], not below 0) as multiples of 2^-40, int64 [K] of sum 2^40.

    Every positive weight becomes at least 1. Raises ValueError if no weight is positive, or if one is NaN or
    Inf.
    """
    weights = np.asarray(weights, dtype=np.float64)
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum() > 0:
        raise ValueError(
            f"weights: got {weights.tolist()}, expected finite numbers of at least 0, and one above 0."
        )
    # the sum and the quotient are rounded; multiplying by 2^40 and the floor are exact in float64
    exact = weights / weights.sum() * WHOLE
    parts = np.maximum(np.floor(exact).astype(np.int64), weights > 0)
    # Remainder of the rounding, less than 1 for each domain.
    # The largest part, at least about 2^40 / K, absorbs it: a relative change below K^2 / 2^40.
    # Weights [1, 1, 1]: floors of 366503875925 sum to 2^40 - 1, so the first part becomes ...926.
    parts[np.argmax(parts)] += WHOLE - parts.sum()
    return parts


def quantize_weight_rows(weights: np.ndarray) -> np.ndarray:
    """Apply `quantize_weights` to each row, [n, K] to int64 [n, K]."""
    if not np.isfinite(weights).all() or (weights < 0).any() or not (weights.sum(axis=1) > 0).all():
        raise ValueError(
            "weights: got a row without a positive weight, expected finite numbers of at least 0."
        )
    # the same operations as in `quantize_weights`: a part that differed by 1 would make a seek (rows) and
    # a walk (chunk by chunk) assign different units
    exact = weights / weights.sum(axis=1)[:, None] * WHOLE
    parts = np.maximum(np.floor(exact).astype(np.int64), weights > 0)
    parts[np.arange(len(parts)), np.argmax(parts, axis=1)] += WHOLE - parts.sum(axis=1)
    return parts


@dataclass(frozen=True)
class Position:
    """State of a mixture before a chunk.

    done  int64 [K]  units that each domain has supplied
    lag   int64 [K]  units that a domain is owed beyond `done`, in multiples of 2^-40
    """

    # invariants: the lags sum to 0, and `done` sums to chunk * size except after a shorter last chunk
    chunk: int
    done: np.ndarray
    lag: np.ndarray

    @classmethod
    def start(cls, n_domains: int) -> "Position":
        """Return the position before the first chunk."""
        return cls(0, np.zeros(n_domains, dtype=np.int64), np.zeros(n_domains, dtype=np.int64))

    def as_dict(self) -> dict[str, Any]:
        """Return the position, ready for JSON."""
        return {"chunk": self.chunk, "done": self.done.tolist(), "lag": self.lag.tolist()}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "Position":
        """Return the position that `as_dict` converted."""
        return cls(state["chunk"], np.array(state["done"], np.int64), np.array(state["lag"], np.int64))


@dataclass(frozen=True)
class ChunkUnits:
    """Units of some chunks, in order.

    domain  int32 [n]
    number  int64 [n]  number of units that the domain supplied before this one
    """

    domain: np.ndarray
    number: np.ndarray


def schedule_units(
    position: Position, parts: np.ndarray, limit: np.ndarray, size: int, n_chunks: int, seed: int,
    until_empty: bool = False,
) -> tuple[ChunkUnits, Position]:  # fmt: skip
    """Return up to `n_chunks` chunks of `size` units from a position on, and the position after them.

    Fewer chunks are returned if the next one would exceed the `limit`, int64 [K], of a domain. With
    `until_empty` they also end after a chunk that reaches a limit.
    """
    # size is at most 2^22, so that parts * size <= 2^62 fits in int64. `&` binds last: seed mod 2^64, also
    # for a negative seed.
    n_made, domain, number, done, lag = _csrc.mixture_turns(
        parts, position.done, position.lag, limit, size, position.chunk, n_chunks, seed & (1 << 64) - 1,
        until_empty,
    )  # fmt: skip
    # the native arrays have the size of all requested chunks
    n = n_made * size
    return ChunkUnits(domain[:n], number[:n]), Position(position.chunk + n_made, done, lag)


class UnitOrder:
    """Order of the units in each domain: each epoch of a domain is a separate permutation.

    The permutation is that of megatron/data/permutation.py, with keys derived from (seed, domain name,
    epoch). It does not change when other domains are added or removed.
    """

    def __init__(self, n_units: np.ndarray, names: Sequence[str], seed: int, shuffle: bool = True) -> None:
        """n_units int64 [K], above 0. `shuffle` False: the registered order, in every epoch."""
        # the native function accepts int64 in C order only, without a conversion
        self.n_units, self.shuffle = np.ascontiguousarray(n_units, dtype=np.int64), shuffle
        self.seeds = np.array([_hash_seed(name, seed) for name in names], dtype=np.uint64)

    def lookup_units(self, units: ChunkUnits) -> np.ndarray:
        """Return the index of each unit in its domain, int64 [n]."""
        # a domain of 5 units: numbers 0 to 4 are epoch 0, numbers 5 to 9 epoch 1
        if not self.shuffle:
            return units.number % self.n_units[units.domain]
        return _csrc.domain_units(units.domain, units.number, self.n_units, self.seeds)


def _hash_seed(name: str, seed: int) -> int:
    # Independent of the number and order of domains: only the name and the seed enter.
    # Not hash(): Python's hash of a string differs between processes.
    payload = json.dumps([name, seed & (1 << 64) - 1]).encode()
    return int.from_bytes(hashlib.sha256(payload).digest()[:8], "little")
