"""Chunk i of a mixture as a function of (domains, weights, seed, i), for everybody to evaluate alone.

Chunk i goes to data-parallel group i mod n. Nothing is handed out, so nothing can be handed out differently:
what is saved is a position, a few numbers for each domain, whoever goes on from it.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from megatron.mixture.chunk import NO_LIMIT, WHOLE, Orders, Position, Turns, parts_of, take_turns
from megatron.mixture.seek import Positions

DRY = ("stop", "repeat", "redistribute")
AT_ONCE_UNITS = 1 << 15  # made in one go, for the sake of speed


class DomainWeights(Protocol):
    """Weights of the domains over the chunks of a run.

    known_to  the first chunk whose weights are still to be found; None: all are known
    """

    known_to: int | None

    def at(self, chunk: int) -> tuple[np.ndarray, int | None]:
        """(weights float64 [K] of a chunk, the first later chunk that may have others; None: no such)."""
        ...


class Constant:
    """The same weights for ever."""

    known_to = None

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = np.asarray(weights, dtype=np.float64)

    def at(self, chunk: int) -> tuple[np.ndarray, int | None]:
        """As in `DomainWeights`."""
        return self.weights, None


class Distributor:
    """The chunks of a mixture over domains that hold `n_units` units each."""

    def __init__(
        self, n_units: Sequence[int], names: Sequence[str], weights: DomainWeights,
        chunk_size: int, seed: int, dry: str = "repeat", shuffle: bool = True,
    ) -> None:  # fmt: skip
        """`dry`: what happens when a domain has given all its units. `stop`: the data end with the last unit
        before one that its domain does not have; `repeat`: the domain begins anew; `redistribute`: the others
        take its share until every unit was given once. The last chunk of `stop` and `redistribute` may hold
        fewer units than the others.

        ValueError for another word, or a domain with a weight and without a unit.
        """
        if dry not in DRY:
            raise ValueError(f"dry: found '{dry}', wanted one of {', '.join(DRY)}")
        self.n_units, self.weights = np.asarray(n_units, dtype=np.int64), weights
        empty = (self.n_units < 1) & (weights.at(0)[0] > 0)
        if empty.any():
            raise ValueError(f"domain '{names[int(np.argmax(empty))]}' holds nothing; give it no weight")
        self.chunk_size, self.seed, self.dry = chunk_size, seed, dry
        self.orders = Orders(np.maximum(self.n_units, 1), names, seed, shuffle)
        self.limit = np.full(len(self.n_units), NO_LIMIT) if dry == "repeat" else self.n_units
        self.positions = Positions(
            weights, self.n_units, self.limit, chunk_size, dry, self._after_finished_chunk
        )
        self._made: tuple[int, int, Turns] | None = None  # the chunks made last: from, to, units

    def chunks(self, begin: int, n: int) -> Turns:
        """Chunks begin, begin + 1, ... : fewer than `n`, the last of them shorter, where the data end."""
        start = self.position(begin)
        return self.chunks_from(start, n if start.chunk == begin else 0)[0]

    def chunks_from(self, start: Position, n: int) -> tuple[Turns, Position]:
        """`n` chunks from a position on, fewer where the data end, and the position after them."""
        walked = list(self._walk(start, n))
        if walked:
            self.positions.remember(walked[-1][1])
        made = [turns for turns, _ in walked] or [Turns(np.empty(0, np.int32), np.empty(0, np.int64))]
        after = walked[-1][1] if walked else start
        if len(made) == 1:
            return made[0], after
        return Turns(*(np.concatenate([getattr(t, of) for t in made]) for of in ("domain", "number"))), after

    def take(self, numbers: np.ndarray) -> Turns:
        """The units of these places (int64 [n]) in the stream of all chunks. ValueError behind its end."""
        first, last = int(numbers.min()) // self.chunk_size, int(numbers.max()) // self.chunk_size
        held = self._made
        if held is None or not held[0] <= first <= last < held[1]:
            turns = self._ahead(first, last)
            held = self._made = first, first + -(-len(turns.domain) // self.chunk_size), turns
        places = numbers - held[0] * self.chunk_size
        if int(places.max()) >= len(held[2].domain):
            end = int(self.position(last + 1).done.sum())
            raise ValueError(
                f"the mixture ends after {end:,} units, where a domain is dry; "
                "shorten the run, or let dry be repeat or redistribute"
            )
        return Turns(held[2].domain[places], held[2].number[places])

    def n_units_before(self, chunk: int) -> int:
        """Units of all chunks before `chunk`: chunk * chunk_size, or fewer where the data end before."""
        return int(self.position(chunk).done.sum())

    def position(self, chunk: int, deadline: float | None = None) -> Position:
        """Where the mixture stands before a chunk, or where it ends. The time does not grow with the number
        of the chunk while the weights stay, see seek.py; SeekDeadlineError past `deadline`
        (time.monotonic())."""
        return self.positions.find(chunk, deadline)

    def restore(self, position: Position) -> None:
        """Go on from a saved position; chunks before it are found from the first."""
        if len(position.done) != len(self.n_units):
            raise ValueError(
                f"position of {len(position.done)} domains: the mixture has {len(self.n_units)}; "
                "go on with the mixture that was saved"
            )
        n_done, n_full = int(position.done.sum()), position.chunk * self.chunk_size
        if not n_full - self.chunk_size < n_done <= n_full:
            raise ValueError(
                f"position of {n_done:,} units in {position.chunk:,} chunks: expected chunks of "
                f"{self.chunk_size:,} units; go on with the chunk size that was saved"
            )
        self.positions.forget(position)
        self._made = None

    def _ahead(self, first: int, last: int) -> Turns:
        """From chunk `first` at least to `last`, further where the weights are known already."""
        n = max(last - first + 1, AT_ONCE_UNITS // self.chunk_size)
        if self.weights.known_to is not None:
            n = max(last - first + 1, min(n, self.weights.known_to - first))
        return self.chunks(first, n)

    def _walk(self, position: Position, n: int) -> Iterator[tuple[Turns, Position]]:
        """`n` chunks from a position on, a piece at a time; fewer where the data end."""
        end = position.chunk + n
        while position.chunk < end and not self.positions.is_over(position):
            weights, until = self.weights.at(position.chunk)
            if self.dry == "redistribute":
                weights = np.where(position.done < self.n_units, weights, 0)
                if not weights.sum() > 0:
                    return
            n_here = min(end, until or end) - position.chunk
            n_here = min(n_here, max(1, AT_ONCE_UNITS // self.chunk_size))
            turns, after = take_turns(
                position, parts_of(weights), self.limit, self.chunk_size, n_here, self.seed,
                self.dry == "redistribute",
            )  # fmt: skip
            if after.chunk == position.chunk:
                turns, after = self._finish_chunk(position, weights)
                if not len(turns.domain):
                    return
            position = after
            yield turns, position

    def _finish_chunk(self, position: Position, weights: np.ndarray) -> tuple[Turns, Position]:
        """The chunk that a domain has too few units for; the last one is shorter, and empty behind it."""
        if self.dry == "stop":
            return self._last_chunk(position, weights)
        return self._last_of_some(position, weights)

    def _after_finished_chunk(self, position: Position, weights: np.ndarray) -> Position | None:
        """The position after `_finish_chunk`; None where the data end before it."""
        turns, after = self._finish_chunk(position, weights)
        return after if len(turns.domain) else None

    def _last_chunk(self, position: Position, weights: np.ndarray) -> tuple[Turns, Position]:
        """The longest chunk whose shares no domain lacks the units for: empty, or less than a whole one."""
        parts, left = parts_of(weights), np.minimum(self.limit - position.done, self.chunk_size)
        sure = (left + 2) * WHOLE - position.lag  # of these parts, a share is rounded up by less than one
        most = min([self.chunk_size - 1, *(sure[parts > 0] // parts[parts > 0]).tolist()])
        for size in range(most, 0, -1):
            turns, after = take_turns(position, parts, self.limit, size, 1, self.seed)
            if after.chunk > position.chunk:
                return turns, after
        return Turns(np.empty(0, np.int32), np.empty(0, np.int64)), position

    def _last_of_some(self, position: Position, weights: np.ndarray) -> tuple[Turns, Position]:
        """A chunk in which domains run dry: what they have, and the rest from the others by their weights."""
        done, lag = position.done.copy(), position.lag
        domains: list[np.ndarray] = []
        left = self.chunk_size
        while left:
            weights = np.where(done < self.n_units, weights, 0)
            if not weights.sum() > 0:
                break
            parts = parts_of(weights)
            rest = Position(position.chunk, done, lag)
            turns, after = take_turns(rest, parts, np.full_like(done, NO_LIMIT), left, 1, self.seed)
            counts = np.minimum(after.done - done, self.n_units - done)
            done, lag = done + counts, after.lag
            domains.append(np.repeat(np.arange(len(done), dtype=np.int32), counts))
            left -= int(counts.sum())
        domain = np.sort(np.concatenate(domains or [np.empty(0, np.int32)]))
        begins = np.searchsorted(domain, domain)
        number = position.done[domain] + np.arange(len(domain)) - begins
        lag = np.where(done < self.n_units, lag, 0)
        lag[int(np.argmax(weights))] -= lag.sum()  # what the dry ones were owed or owe, is settled
        return Turns(domain, number), Position(position.chunk + 1, done, lag)
