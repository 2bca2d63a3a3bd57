"""Positions of far chunks without walking through the chunks before them.

While the weights stay, the position at a late chunk does not depend on where a walk to it began: from *any*
valid position at chunk `a` (each domain has its share rounded down or up) the walk reaches the true position
of every chunk from `a` + 1 / (smallest share * chunk size) on. So `a` is chosen that near, a valid position
is written down there, and the rest is walked.

Why. Let x_k(t) be the share of domain k after t units, d a time from which on units fall due later than those
that interest us, and A(t) the units of all domains that are begun before t and due by d. Units are served in
the order of their due times, so by time e min(e, min over a < t <= e of A(t) + e - t, S(a) + e - a) of them
are served, where S(a) are those served by a. All units served by a valid position are begun by a, hence due
before a + 1 / share <= d: S(a) = a whatever the position. The number served is thus the same for each d, and
with it the position. This needs x_k(a) >= 0, and domains that lost their weight to owe or be owed less than
one unit together; else the walk goes on from where it is. tests/mixture/test_seek.py compares with the walk.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from megatron import _csrc
from megatron.mixture.adaptive import NotYetError
from megatron.mixture.chunk import BITS, WHOLE, Position, parts_of, parts_of_rows

PIECE_OPERATIONS = 1 << 23  # chunks times domains between two looks at the clock: some 0.05 s
MARK_CHUNKS, MOST_MARKS = 1 << 12, 256  # kept for good: their distance grows with the walk
MOST_RECENT = 16  # for those who read side by side


class SeekDeadlineError(NotYetError):
    """The position of a chunk takes longer than the caller may wait. What was walked is kept: ask again."""


def check_deadline(deadline: float | None, reached: int, chunk: int) -> None:
    """Raise SeekDeadlineError where time.monotonic() is past `deadline` (None: never)."""
    if deadline is not None and time.monotonic() > deadline:
        raise SeekDeadlineError(
            f"chunk {chunk}: its position is computed as far as chunk {reached}, because a domain has a very "
            "small weight or weights change at every chunk. Request it again to continue."
        )


def jump(position: Position, parts: np.ndarray, size: int, end: int) -> Position | None:
    """Return a valid position of a chunk from which a walk reaches the true position at chunk `end`.

    parts [K] int64   of 2^40, the same for chunks position.chunk to end
    None where it is nearer to walk from `position`, or where the argument above does not hold.
    """
    live = [k for k, part in enumerate(parts.tolist()) if part]
    smallest = min(int(parts[k]) for k in live)
    settle_chunks = -(-WHOLE // (smallest * size)) + 1
    n_chunks = end - settle_chunks - position.chunk
    if n_chunks <= settle_chunks:
        return None
    lag = position.lag.tolist()
    owed = -sum(lag[k] for k, part in enumerate(parts.tolist()) if not part)
    if abs(owed) >= WHOLE or sum(lag) != 0:
        return None
    shares = {k: lag[k] + int(parts[k]) * size * n_chunks for k in live}  # of 2^40; beyond 64 bits
    if min(shares.values()) < 0:
        return None
    served = {k: share >> BITS for k, share in shares.items()}
    begun = [k for k in live if shares[k] & WHOLE - 1]
    more = size * n_chunks - sum(served.values())
    if not 0 <= more <= len(begun):
        return None
    for k in begun[:more]:
        served[k] += 1
    done, lag_there = position.done.copy(), position.lag.copy()
    for k in live:
        done[k] += served[k]
        lag_there[k] = shares[k] - (served[k] << BITS)
    return Position(position.chunk + n_chunks, done, lag_there)


def last_safe_chunk(position: Position, parts: np.ndarray, limit: np.ndarray, size: int, end: int) -> int:
    """The last chunk up to `end` before which no domain can have used up its `limit`, int64 [K]."""
    for k in np.flatnonzero(parts).tolist():
        room = (int(limit[k]) - int(position.done[k]) - 1 << BITS) - int(position.lag[k])
        end = min(end, position.chunk + max(0, room // (int(parts[k]) * size)))
    return end


def walk_counts(
    position: Position, parts: np.ndarray, limit: np.ndarray, size: int, n_chunks: int, until_empty: bool
) -> Position:
    """Return the position after up to `n_chunks` chunks, as chunk.take_turns, without making the units.

    parts [K] or [n_chunks, K]   of 2^40. `until_empty`: stop after a chunk that empties a domain.
    """
    n, done, lag = _csrc.mixture_counts(
        parts, position.done, position.lag, limit, size, n_chunks, until_empty
    )
    return Position(position.chunk + n, done, lag)


def seek_constant(
    position: Position, parts: np.ndarray, limit: np.ndarray, size: int, end: int, until_empty: bool,
    resume: Position | None = None,
) -> Iterator[tuple[Position, bool]]:  # fmt: skip
    """Walk to chunk `end` under the same parts [K], as far as `limit` allows, by jumping where that is
    nearer.

    Yields (position, whether it is the true one) after each piece. `resume`: a position that an earlier call
    with the same `position` and `end` yielded.
    """
    safe = last_safe_chunk(position, parts, limit, size, end)
    begin = jump(position, parts, size, safe)
    true_from = position.chunk if begin is None else safe
    begin = position if begin is None else begin if resume is None else resume
    piece = max(1, PIECE_OPERATIONS // len(parts))
    while begin.chunk < end:
        n = min(piece, (safe if begin.chunk < safe else end) - begin.chunk)
        after = walk_counts(begin, parts, limit, size, n, until_empty)
        if after.chunk == begin.chunk:
            return
        begin = after
        yield begin, begin.chunk >= true_from
        if until_empty and (begin.done >= limit)[parts > 0].any():
            return


class Positions:
    """Positions of the chunks of a mixture, computed from the nearest one that is known.

    For several threads: what is known is replaced, never changed.
    """

    def __init__(
        self, weights: Any, n_units: np.ndarray, limit: np.ndarray, size: int, dry: str,
        finish_chunk: Callable[[Position, np.ndarray], Position | None],
    ) -> None:  # fmt: skip
        """`finish_chunk`: the position after a chunk in which domains run dry, None where it has no unit."""
        self.weights, self.n_units, self.limit, self.size, self.dry = weights, n_units, limit, size, dry
        self.finish_chunk = finish_chunk
        self.forget()

    def forget(self, start: Position | None = None) -> None:
        """Know the first position alone, and `start`."""
        self._first = Position.start(len(self.n_units))
        self._recent: dict[int, Position] = {} if start is None else {start.chunk: start}
        self._marks: dict[int, Position] = {}
        self._unsettled: tuple[int, int, Position] | None = None

    def is_over(self, position: Position) -> bool:
        """Whether a position is behind the last chunk: only that one may be shorter than the others."""
        return int(position.done.sum()) < position.chunk * self.size

    def remember(self, position: Position) -> None:
        """Know a position too."""
        recent = self._recent
        if len(recent) >= MOST_RECENT:
            recent = dict(list(recent.items())[MOST_RECENT // 2 :])
        self._recent = recent | {position.chunk: position}

    def find(self, chunk: int, deadline: float | None = None) -> Position:
        """Return the position of a chunk, or where the mixture ends before it.

        deadline   by time.monotonic(); SeekDeadlineError past it, and what was walked is kept
        """
        position = self._first
        for known in (self._recent, self._marks):
            nearest = max((at for at in known if at <= chunk), default=0)
            if nearest > position.chunk:
                position = known[nearest]
        while position.chunk < chunk and not self.is_over(position):
            check_deadline(deadline, position.chunk, chunk)
            after = self._advance(position, chunk, deadline)
            if after is None:
                break
            position = after
        self.remember(position)
        return position

    def _advance(self, position: Position, chunk: int, deadline: float | None) -> Position | None:
        """A later position on the way to a chunk; None where the data end."""
        weights, until = self._block(position.chunk, chunk)
        if self.dry == "redistribute":
            weights = np.where(position.done < self.n_units, weights, 0)
            if not (weights.sum(axis=-1) > 0).all():
                # of several chunks the first may have units left, to whom the later ones give no weight
                weights = weights if weights.ndim == 1 else weights[0]
                until = position.chunk + 1
                if not weights.sum() > 0:
                    return None
        before, until_empty = position, self.dry == "redistribute"
        if weights.ndim == 2:
            n = len(weights)
            position = walk_counts(before, parts_of_rows(weights), self.limit, self.size, n, until_empty)
            self._mark(position)
        else:
            position = self._advance_constant(before, parts_of(weights), min(chunk, until or chunk), deadline)
        if position.chunk > before.chunk:
            return position
        return self.finish_chunk(before, weights if weights.ndim == 1 else weights[0])

    def _advance_constant(
        self, before: Position, parts: np.ndarray, end: int, deadline: float | None
    ) -> Position:
        unsettled, resume, position = self._unsettled, None, before
        if unsettled is not None and unsettled[:2] == (before.chunk, end):
            resume = unsettled[2]
        until_empty = self.dry == "redistribute"
        steps = seek_constant(before, parts, self.limit, self.size, end, until_empty, resume)
        for reached, is_true in steps:
            if is_true:
                position = reached
                self._mark(position)
            else:
                self._unsettled = before.chunk, end, reached
            if reached.chunk < end:
                check_deadline(deadline, reached.chunk, end)
        return position

    def _block(self, chunk: int, end: int) -> tuple[np.ndarray, int | None]:
        """Weights [K] and the first later chunk with others, or weights [n, K] of n chunks that all
        differ."""
        weights, until = self.weights.at(chunk)
        if until == chunk + 1 < end and hasattr(self.weights, "block"):
            n = min(end - chunk, max(1, PIECE_OPERATIONS // (16 * len(weights))))
            return self.weights.block(chunk, n), None
        return weights, until

    def _mark(self, position: Position) -> None:
        """Keep a position that took time to reach."""
        last = max(self._marks, default=0)
        if position.chunk - last < MARK_CHUNKS:
            return
        marks = self._marks
        if len(marks) >= MOST_MARKS:
            marks = dict(sorted(marks.items())[1::2])
        self._marks = marks | {position.chunk: position}
