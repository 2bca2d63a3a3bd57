"""Chunk i of a mixture as a pure function of (domains, weights, seed, i), evaluated by each process.

Chunk i belongs to data-parallel group i mod n. No process hands out chunks, so no two processes can disagree
about them. A saved state is a position: a few numbers for each domain, valid for any process that resumes.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from megatron.mixture.chunk import (
    NO_LIMIT,
    WHOLE,
    ChunkUnits,
    Position,
    UnitOrder,
    quantize_weights,
    schedule_units,
)
from megatron.mixture.seek import PositionCache

DRY_POLICIES = ("stop", "repeat", "redistribute")
BATCH_UNITS = 1 << 15  # units per call of the native scheduler, for speed


class DomainWeights(Protocol):
    """Weights of the domains over the chunks of a run.

    known_to  the first chunk whose weights are not computed yet; None: all are known
    """

    known_to: int | None

    def weights_at(self, chunk: int) -> tuple[np.ndarray, int | None]:
        """Return (weights float64 [K] of a chunk, the first later chunk that may have other weights).

        The second value is None if the weights do not change any more.
        """
        ...


class ConstantWeights:
    """The same weights for all chunks."""

    known_to: int | None = None

    def __init__(self, weights: Sequence[float] | np.ndarray) -> None:
        self.weights = np.asarray(weights, dtype=np.float64)

    def weights_at(self, chunk: int) -> tuple[np.ndarray, int | None]:
        """Return the weights, as in `DomainWeights`."""
        return self.weights, None


class Distributor:
    """The chunks of a mixture over domains that hold `n_units` units each."""

    def __init__(
        self, n_units: Sequence[int] | np.ndarray, names: Sequence[str], weights: DomainWeights,
        chunk_size: int, seed: int, dry: str = "repeat", shuffle: bool = True,
    ) -> None:  # fmt: skip
        """Create the distributor.

        dry   behavior when a domain has supplied all its units:
              stop           the data end before the first unit that its domain does not have
              repeat         the domain starts again
              redistribute   the other domains take its share until every unit was supplied once

        The last chunk of `stop` and `redistribute` may hold fewer units than the others.

        Raises ValueError for another value of `dry`, or for a domain with a weight and without units.
        """
        if dry not in DRY_POLICIES:
            raise ValueError(f"dry: got '{dry}', expected one of {', '.join(DRY_POLICIES)}.")
        self.n_units, self.weights = np.asarray(n_units, dtype=np.int64), weights
        empty = (self.n_units < 1) & (weights.weights_at(0)[0] > 0)
        if empty.any():
            raise ValueError(f"domain '{names[int(np.argmax(empty))]}' has no units. Set its weight to 0.")
        self.chunk_size, self.seed, self.dry = chunk_size, seed, dry
        # 1 instead of 0 avoids a division by 0; an empty domain has weight 0 and is not used
        self.orders = UnitOrder(np.maximum(self.n_units, 1), names, seed, shuffle)
        # numbers of units continue over the epochs, and no run reaches 2^63 - 1 of them
        self.limit = np.full(len(self.n_units), NO_LIMIT) if dry == "repeat" else self.n_units
        self.positions = PositionCache(
            weights, self.n_units, self.limit, chunk_size, dry, self._advance_finished_chunk
        )
        self._cached: tuple[int, int, ChunkUnits] | None = None  # the latest chunks: first, end, units

    def schedule_chunks(self, begin: int, n: int) -> ChunkUnits:
        """Return the units of chunks begin, begin + 1, ...

        If the data end, there are fewer than `n` chunks and the last one may be shorter.
        """
        start = self.find_position(begin)
        # an earlier position means that the mixture ends before `begin`
        return self.schedule_from(start, n if start.chunk == begin else 0)[0]

    def schedule_from(self, start: Position, n: int) -> tuple[ChunkUnits, Position]:
        """Return up to `n` chunks from a position on, fewer if the data end, and the position after them."""
        walked = list(self._walk_chunks(start, n))
        if walked:
            # a loader reads in order, so that the next call finds its position without a walk
            self.positions.store(walked[-1][1])
        pieces = [turns for turns, _ in walked] or [ChunkUnits(np.empty(0, np.int32), np.empty(0, np.int64))]
        after = walked[-1][1] if walked else start
        if len(pieces) == 1:
            return pieces[0], after
        return ChunkUnits(
            *(np.concatenate([getattr(t, of) for t in pieces]) for of in ("domain", "number"))
        ), after

    def get_units(self, numbers: np.ndarray) -> ChunkUnits:
        """Return the units at these indices (int64 [n]) of the stream of all chunks.

        Raises ValueError for an index behind the end.
        """
        first, last = int(numbers.min()) // self.chunk_size, int(numbers.max()) // self.chunk_size
        # read once: another thread may replace the range between the test and the use
        cached = self._cached
        # batches are read in order, so that one range of chunks serves many calls
        if cached is None or not cached[0] <= first <= last < cached[1]:
            turns = self._schedule_ahead(first, last)
            # rounded up, because the last chunk of the mixture may be shorter
            cached = self._cached = first, first + -(-len(turns.domain) // self.chunk_size), turns
        offsets = numbers - cached[0] * self.chunk_size
        if int(offsets.max()) >= len(cached[2].domain):
            end = int(self.find_position(last + 1).done.sum())
            raise ValueError(
                f"the mixture ends after {end:,} units, where a domain is exhausted. "
                "Shorten the run, or set dry to repeat or redistribute."
            )
        return ChunkUnits(cached[2].domain[offsets], cached[2].number[offsets])

    def count_units_before(self, chunk: int) -> int:
        """Return the number of units of all chunks before `chunk`.

        It is chunk * chunk_size, or less if the data end before.
        """
        return int(self.find_position(chunk).done.sum())

    def find_position(self, chunk: int, deadline: float | None = None) -> Position:
        """Return the position before a chunk, or the last one if the mixture ends before.

        While the weights stay, the time does not grow with the number of the chunk, see seek.py. Raises
        SeekDeadlineError past `deadline` (time.monotonic()).
        """
        return self.positions.find(chunk, deadline)

    def restore(self, position: Position) -> None:
        """Resume from a saved position. Positions of earlier chunks are computed from the first chunk."""
        if len(position.done) != len(self.n_units):
            raise ValueError(
                f"position of {len(position.done)} domains: the mixture has {len(self.n_units)}. "
                "Resume with the mixture that was saved."
            )
        # Only the last chunk may be shorter: other counts come from another chunk size.
        # 3 chunks of 4 units have 9 to 12 units.
        n_done, n_full = int(position.done.sum()), position.chunk * self.chunk_size
        if not n_full - self.chunk_size < n_done <= n_full:
            raise ValueError(
                f"position of {n_done:,} units in {position.chunk:,} chunks: expected chunks of "
                f"{self.chunk_size:,} units. Resume with the chunk size that was saved."
            )
        self.positions.reset(position)
        self._cached = None

    def _schedule_ahead(self, first: int, last: int) -> ChunkUnits:
        """Return chunks `first` to at least `last`, and more if their weights are known already."""
        # batches of 256 samples: 2^15 / 256 = 128 chunks are scheduled at once
        n = max(last - first + 1, BATCH_UNITS // self.chunk_size)
        # do not wait for weights that the caller does not need yet
        if self.weights.known_to is not None:
            n = max(last - first + 1, min(n, self.weights.known_to - first))
        return self.schedule_chunks(first, n)

    def _walk_chunks(self, position: Position, n: int) -> Iterator[tuple[ChunkUnits, Position]]:
        """Yield `n` chunks from a position on, several at a time; fewer if the data end."""
        end = position.chunk + n
        while position.chunk < end and not self.positions.is_over(position):
            # an `until` is above position.chunk, hence never 0: `until or end` replaces None only
            weights, until = self.weights.weights_at(position.chunk)
            if self.dry == "redistribute":
                # The share of an exhausted domain is divided among the others. The native call below ends
                # after a chunk that exhausts a domain, so that these weights are computed again.
                weights = np.where(position.done < self.n_units, weights, 0)
                if not weights.sum() > 0:
                    return
            n_chunks = min(end, until or end) - position.chunk
            # limits the memory of one native call
            n_chunks = min(n_chunks, max(1, BATCH_UNITS // self.chunk_size))
            turns, after = schedule_units(
                position, quantize_weights(weights), self.limit, self.chunk_size, n_chunks, self.seed,
                self.dry == "redistribute",
            )  # fmt: skip
            # not even one whole chunk fits the limits
            if after.chunk == position.chunk:
                turns, after = self._finish_chunk(position, weights)
                if not len(turns.domain):
                    return
            position = after
            yield turns, position

    def _finish_chunk(self, position: Position, weights: np.ndarray) -> tuple[ChunkUnits, Position]:
        """Return a chunk in which a domain has too few units, and the position after it.

        The last chunk is shorter than the others. Behind the end an empty chunk is returned.
        """
        if self.dry == "stop":
            return self._schedule_last_chunk(position, weights)
        return self._schedule_dry_chunk(position, weights)

    def _advance_finished_chunk(self, position: Position, weights: np.ndarray) -> Position | None:
        """Return the position after `_finish_chunk`; None if the data end before it."""
        turns, after = self._finish_chunk(position, weights)
        return after if len(turns.domain) else None

    def _schedule_last_chunk(self, position: Position, weights: np.ndarray) -> tuple[ChunkUnits, Position]:
        """Return the longest chunk in which no domain lacks units for its share.

        It may be empty, and it is shorter than a whole chunk.
        """
        # clipped to the chunk size (at most 2^22), so that (left + 2) * 2^40 fits in int64 for any limit
        parts, left = quantize_weights(weights), np.minimum(self.limit - position.done, self.chunk_size)
        # upper bound of the units of a domain: a share is rounded up by less than one
        sure = (left + 2) * WHOLE - position.lag
        most = min([self.chunk_size - 1, *(sure[parts > 0] // parts[parts > 0]).tolist()])
        # At most chunk_size - 1 calls, at the end of the data only. No bisection: a domain may have
        # one unit in a chunk of 10 units and none in a chunk of 11, because deadlines count from its end.
        for size in range(most, 0, -1):
            turns, after = schedule_units(position, parts, self.limit, size, 1, self.seed)
            if after.chunk > position.chunk:
                return turns, after
        return ChunkUnits(np.empty(0, np.int32), np.empty(0, np.int64)), position

    def _schedule_dry_chunk(self, position: Position, weights: np.ndarray) -> tuple[ChunkUnits, Position]:
        """Return a chunk in which domains run dry.

        It has the remaining units of those domains. The other domains supply the rest by their weights.
        """
        done, lag = position.done.copy(), position.lag
        domains: list[np.ndarray] = []
        left = self.chunk_size
        # each round fills the chunk or exhausts another domain: at most K rounds
        while left:
            weights = np.where(done < self.n_units, weights, 0)
            if not weights.sum() > 0:
                break
            parts = quantize_weights(weights)
            rest = Position(position.chunk, done, lag)
            # without limits, because the native call returns no chunk if a domain has too few units
            turns, after = schedule_units(rest, parts, np.full_like(done, NO_LIMIT), left, 1, self.seed)
            # an exhausted domain supplies what it has; the loop divides the rest among the others
            counts = np.minimum(after.done - done, self.n_units - done)
            done, lag = done + counts, after.lag
            domains.append(np.repeat(np.arange(len(done), dtype=np.int32), counts))
            left -= int(counts.sum())
        # units of this chunk are grouped by domain, not interleaved as in other chunks
        domain = np.sort(np.concatenate(domains or [np.empty(0, np.int32)]))
        # First position of each domain in the sorted array, so that numbers of a domain are consecutive.
        # `domain` [0, 0, 2]: begins [0, 0, 2], numbers done[domain] + [0, 1, 0].
        begins = np.searchsorted(domain, domain)
        number = position.done[domain] + np.arange(len(domain)) - begins
        lag = np.where(done < self.n_units, lag, 0)
        # cancels the debts of exhausted domains, so that lags sum to 0
        lag[int(np.argmax(weights))] -= lag.sum()
        return ChunkUnits(domain, number), Position(position.chunk + 1, done, lag)
