"""Chunk i of a mixture as a pure function of (domains, weights, seed, i).

A unit is a document or a window. No process hands out chunks, so no two
processes can disagree about them. Each chunk gives every domain its share of
the units, and the remainder is carried to the next one in a `Position`, which
is saved with the model.

Of the remainders of a chunk, those due first are rounded up (earliest deadline
first). After any number of chunks the units of a domain deviate from its share
by less than 1, as long as the weights stay. The largest remainders would give
the same counts after each period of the weights and differ by at most 1 in
between. Weights are integer multiples of 2^-40, so that every machine computes
the same order.

A chunk is computed from a position before it, so that chunks far behind the
last known position cannot be read.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron import _csrc
from megatron.mixture.weights import DomainWeights

DRY_POLICIES = ("stop", "repeat", "redistribute")
WHOLE = 1 << 40
NO_LIMIT = np.iinfo(np.int64).max
BATCH_UNITS = 1 << 15  # units per call of the native scheduler, for speed
MAX_WALK_CHUNKS = 1 << 16  # from a known position to a requested chunk; some seconds
MAX_POSITIONS = 256  # in memory


def quantize_weights(weights: np.ndarray) -> np.ndarray:
    """Return weights (float64 [K], not below 0) as multiples of 2^-40, int64 [K] of sum 2^40.

    Every positive weight becomes at least 1. Raises ValueError if no weight is
    positive, or if one is NaN or Inf.
    """
    weights = np.asarray(weights, dtype=np.float64)
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum() > 0:
        raise ValueError(f"weights: got {weights.tolist()}, expected finite numbers, one above 0.")
    # the sum and the quotient are rounded; multiplying by 2^40 and the floor
    # are exact in float64
    exact = weights / weights.sum() * WHOLE
    parts = np.maximum(np.floor(exact).astype(np.int64), weights > 0)
    # Remainder of the rounding, less than 1 for each domain. The largest part,
    # at least about 2^40 / K, absorbs it: a relative change below K^2 / 2^40.
    # Weights [1, 1, 1]: floors of 366503875925 sum to 2^40 - 1, so the first
    # part becomes ...926.
    parts[np.argmax(parts)] += WHOLE - parts.sum()
    return parts


@dataclass(frozen=True)
class Position:
    """State of a mixture before a chunk.

    chunk             number of the chunk, over all groups
    done  int64 [K]   units that each domain has supplied
    lag   int64 [K]   carried remainder: units that a domain is owed beyond
          `done`, in multiples of 2^-40
    """

    # invariants: the lags sum to 0, and `done` sums to chunk * size except
    # after a shorter last chunk
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

    def encode(self) -> bytes:
        """Return bytes that are different for any other position."""
        return self.chunk.to_bytes(8) + self.done.tobytes() + self.lag.tobytes()

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "Position":
        """Return the position that `as_dict` converted.

        Raises ValueError for anything else.
        """
        try:
            arrays = [np.array(state[name], dtype=np.int64) for name in ("done", "lag")]
            chunk = state["chunk"]
            if type(chunk) is not int or chunk < 0 or any(array.ndim != 1 for array in arrays):
                raise ValueError(f"got chunk {chunk!r}")
            return cls(state["chunk"], *arrays)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"position: {error}, expected chunk, done and lag. Use a saved position."
            ) from error


@dataclass(frozen=True)
class ChunkUnits:
    """Units of some chunks, in order.

    domain  int32 [n]
    number  int64 [n]  number of units that the domain supplied before this one
    """

    domain: np.ndarray
    number: np.ndarray


class UnitOrder:
    """Order of the units in each domain: each epoch of a domain is a separate permutation.

    The permutation is from megatron/data/permutation.py, with keys derived
    from (seed, domain name, epoch). It does not change when other domains are
    added or removed.
    """

    def __init__(self, n_units: np.ndarray, names: Sequence[str], seed: int, shuffle: bool = True) -> None:
        """n_units int64 [K], above 0. `shuffle` False: the registered order, in every epoch."""
        # the native function accepts int64
        # in C order only, without a conversion
        self.n_units, self.shuffle = np.ascontiguousarray(n_units, dtype=np.int64), shuffle
        self.seeds = np.array([_hash_seed(name, seed) for name in names], dtype=np.uint64)

    def lookup_units(self, units: ChunkUnits) -> np.ndarray:
        """Return the index of each unit in its domain, int64 [n]."""
        # a domain of 5 units: numbers 0 to 4
        # are epoch 0, numbers 5 to 9 epoch 1
        if not self.shuffle:
            return units.number % self.n_units[units.domain]
        return _csrc.domain_units(units.domain, units.number, self.n_units, self.seeds)


def _hash_seed(name: str, seed: int) -> int:
    # Independent of the number and order of domains: only the name and the seed
    # enter. Not hash(): Python's hash of a string differs between processes.
    payload = json.dumps([name, seed & (1 << 64) - 1]).encode()
    return int.from_bytes(hashlib.sha256(payload).digest()[:8], "little")


class Distributor:
    """The chunks of a mixture over domains that hold `n_units` units each.

    It is thread-safe.
    """

    def __init__(
        self, n_units: Sequence[int] | np.ndarray, names: Sequence[str], weights: DomainWeights,
        chunk_size: int, seed: int, dry: str = "repeat", shuffle: bool = True,
    ) -> None:  # fmt: skip
        """Create the distributor.

        dry   behavior when a domain has supplied all its units:
              stop           the data end before the first chunk that would need
                             a unit that its domain does not have
              repeat         the domain starts again
              redistribute   the other domains take its share until every unit
                             was supplied once

        The last chunk of `redistribute` may hold fewer units than the others.

        Raises ValueError for a domain with a weight and without units.
        """
        self.n_units, self.weights = np.asarray(n_units, dtype=np.int64), weights
        empty = (self.n_units < 1) & (weights.weights_at(0)[0] > 0)
        if empty.any():
            raise ValueError(f"domain '{names[int(np.argmax(empty))]}' has no units. Set its weight to 0.")
        self.chunk_size, self.seed, self.dry = chunk_size, seed, dry
        # 1 instead of 0 avoids a division by 0; an empty domain has weight 0
        # and is not used
        self.orders = UnitOrder(np.maximum(self.n_units, 1), names, seed, shuffle)
        # numbers of units continue over the epochs,
        # and no run reaches 2^63 - 1 of them
        self.limit = np.full(len(self.n_units), NO_LIMIT) if dry == "repeat" else self.n_units
        self.origin = Position.start(len(self.n_units))
        self._positions: dict[tuple[bytes, int], Position] = {}
        self._lock = threading.Lock()

    def restore(self, position: Position) -> None:
        """Resume from a saved position.

        Raises ValueError for the position of another mixture.
        """
        self.origin = self.check_position(position)

    def check_position(self, position: Position) -> Position:
        """Return the position.

        Raises ValueError if it is not one of this mixture.
        """
        if not len(position.done) == len(position.lag) == len(self.n_units):
            raise ValueError(
                f"position of {len(position.done)} domains: the mixture has {len(self.n_units)}. "
                "Resume with the mixture that was saved."
            )
        # Only the last chunk may be shorter: other counts come from another
        # chunk size. 3 chunks of 4 units have 9 to 12 units.
        n_done, n_full = int(position.done.sum()), position.chunk * self.chunk_size
        if not n_full - self.chunk_size < n_done <= n_full or position.done.min() < 0 or position.lag.sum():
            raise ValueError(
                f"position of {n_done:,} units in {position.chunk:,} chunks: expected chunks of "
                f"{self.chunk_size:,} units. Resume with the chunk size that was saved."
            )
        return position

    def find_position(self, chunk: int, origin: Position | None = None) -> Position:
        """Return the position before a chunk, or the last one if the mixture ends before.

        It is computed from the nearest known position of the chunks from
        `origin` on (default: the restored position, or the start). Raises
        ValueError for a chunk that is far behind it.
        """
        origin = self._choose_origin(chunk, origin)
        key = origin.encode()
        with self._lock:
            near = max((at for kind, at in self._positions if kind == key and at <= chunk), default=None)
            position = origin if near is None else self._positions[key, near]
        if chunk - position.chunk > MAX_WALK_CHUNKS:
            raise ValueError(
                f"chunk {chunk:,}: got the nearest known position at chunk {position.chunk:,}, expected one "
                f"at most {MAX_WALK_CHUNKS:,} before. Resume from the position in a saved state."
            )
        for _, after in self._walk_chunks(position, chunk - position.chunk):
            position = after
        self._store_position(key, position)
        return position

    def _choose_origin(self, chunk: int, origin: Position | None) -> Position:
        """Return `origin` (default: the restored position), or the start for a chunk before it."""
        origin = self.origin if origin is None else origin
        return Position.start(len(self.n_units)) if chunk < origin.chunk else origin

    def _store_position(self, key: bytes, position: Position) -> None:
        with self._lock:
            # readers in order continue from the latest position, which stays
            if len(self._positions) >= MAX_POSITIONS:
                self._positions.clear()
            self._positions[key, position.chunk] = position

    def schedule_chunks(self, begin: int, n: int, origin: Position | None = None) -> ChunkUnits:
        """Return the units of chunks begin, begin + 1, ...

        If the data end, there are fewer than `n`
        chunks and the last one may be shorter.
        """
        origin = self._choose_origin(begin, origin)
        start = position = self.find_position(begin, origin)
        # the empty arrays allow no chunk, and set the types
        domain, number = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        # an earlier position means that the mixture ends before `begin`
        for units, after in self._walk_chunks(start, n if start.chunk == begin else 0):
            domain.append(units.domain)
            number.append(units.number)
            position = after
        # the next call usually begins here
        self._store_position(origin.encode(), position)
        return ChunkUnits(np.concatenate(domain), np.concatenate(number))

    def get_units(self, numbers: np.ndarray) -> ChunkUnits:
        """Return the units at these indices (int64 [n]) of the stream of all chunks.

        Raises ValueError for an index behind the end.
        """
        first, last = int(numbers.min()) // self.chunk_size, int(numbers.max()) // self.chunk_size
        units = self.schedule_chunks(first, last - first + 1)
        offsets = numbers - first * self.chunk_size
        if int(offsets.max()) >= len(units.domain):
            raise ValueError(
                f"the mixture ends after {self.find_position(last + 1).done.sum():,} units, where a domain "
                "is exhausted. Shorten the run, or set dry to repeat or redistribute."
            )
        return ChunkUnits(units.domain[offsets], units.number[offsets])

    def _walk_chunks(self, position: Position, n: int) -> Iterator[tuple[ChunkUnits, Position]]:
        """Yield `n` chunks from a position on, several at a time; fewer if the data end."""
        end = position.chunk + n
        # only the last chunk is shorter, and nothing follows it
        while position.chunk < end and int(position.done.sum()) == position.chunk * self.chunk_size:
            # an `until` is above position.chunk, hence never 0: `until or end`
            # replaces None only
            weights, until = self.weights.weights_at(position.chunk)
            if self.dry == "redistribute":
                # The share of an exhausted domain is divided among the others.
                # The native call below ends after a chunk that exhausts a
                # domain, so that these weights are computed again.
                weights = np.where(position.done < self.n_units, weights, 0)
                if not weights.sum() > 0:
                    return
            # limits the memory of one native call
            n_chunks = min(end, until or end) - position.chunk
            n_chunks = min(n_chunks, max(1, BATCH_UNITS // self.chunk_size))
            units, after = self._schedule(
                position, quantize_weights(weights), self.limit, self.chunk_size, n_chunks
            )
            # not even one whole chunk fits the limits
            if after.chunk == position.chunk:
                if self.dry == "stop":
                    return
                units, after = self._schedule_dry_chunk(position, weights)
            position = after
            yield units, position

    def _schedule(
        self, position: Position, parts: np.ndarray, limit: np.ndarray, size: int, n_chunks: int
    ) -> tuple[ChunkUnits, Position]:
        """Return up to `n_chunks` chunks of `size` units, and the position after them.

        Fewer chunks are returned if the next one would exceed the `limit`,
        int64 [K], of a domain.
        """
        # size is at most 2^22, so that parts * size <= 2^62 fits in int64. `&`
        # binds last: seed mod 2^64, also for a negative seed.
        n_made, domain, number, done, lag = _csrc.mixture_turns(
            parts, position.done, position.lag, limit, size, position.chunk, n_chunks,
            self.seed & (1 << 64) - 1, self.dry == "redistribute",
        )  # fmt: skip
        # the native arrays have the size of all requested chunks
        n = n_made * size
        return ChunkUnits(domain[:n], number[:n]), Position(position.chunk + n_made, done, lag)

    def _schedule_dry_chunk(self, position: Position, weights: np.ndarray) -> tuple[ChunkUnits, Position]:
        """Return a chunk in which domains run dry.

        It has the remaining units of those domains. The other domains supply
        the rest by their weights.
        """
        done, lag = position.done.copy(), position.lag
        domains: list[np.ndarray] = []
        left = self.chunk_size
        # each round fills the chunk or exhausts
        # another domain: at most K rounds
        while left:
            weights = np.where(done < self.n_units, weights, 0)
            if not weights.sum() > 0:
                break
            # without limits, because the native call returns no chunk if a
            # domain has too few units
            rest, no_limit = Position(position.chunk, done, lag), np.full_like(done, NO_LIMIT)
            _, after = self._schedule(rest, quantize_weights(weights), no_limit, left, 1)
            # an exhausted domain supplies what it has; the loop divides the
            # rest among the others
            counts = np.minimum(after.done - done, self.n_units - done)
            done, lag = done + counts, after.lag
            domains.append(np.repeat(np.arange(len(done), dtype=np.int32), counts))
            left -= int(counts.sum())
        # units of this chunk are grouped by domain,
        # not interleaved as in other chunks
        domain = np.sort(np.concatenate(domains or [np.empty(0, np.int32)]))
        # First position of each domain in the sorted array, so that numbers of
        # a domain are consecutive. `domain` [0, 0, 2]: begins [0, 0, 2],
        # numbers done[domain] + [0, 1, 0].
        begins = np.searchsorted(domain, domain)
        number = position.done[domain] + np.arange(len(domain)) - begins
        lag = np.where(done < self.n_units, lag, 0)
        # cancels the debts of exhausted domains, so that lags sum to 0
        lag[int(np.argmax(weights))] -= lag.sum()
        return ChunkUnits(domain, number), Position(position.chunk + 1, done, lag)
