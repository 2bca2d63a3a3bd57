"""Position of a distant chunk, without a walk through the chunks before it.

While the weights stay, the position at a late chunk does not depend on where a walk to it began: from *any*
valid position at chunk `a` (each domain has its share rounded down or up) the walk reaches the true position
of every chunk from `a` + 1 / (smallest share * chunk size) on. So `a` is chosen that close to the chunk, a
valid position is constructed there, and the rest is walked.

Proof. Let x_k(t) be the share of domain k after t units. Let d be a time such that units due later than d do
not matter. Let A(t) be the units of all domains that begin before t and are due by d. Units are served in
the order of their due times, so by time e min(e, min over a < t <= e of A(t) + e - t, S(a) + e - a) of them
are served, where S(a) are those served by a. All units served by a valid position have begun by a, hence are
due before a + 1 / share <= d: S(a) = a whatever the position. The number served is thus the same for each d,
and with it the position. This requires x_k(a) >= 0, and that domains without a weight owe or are owed less
than one unit together. Otherwise the walk continues from the current position. tests/mixture/test_seek.py
compares with the walk.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from megatron import _csrc
from megatron.mixture.adaptive import NotReadyError
from megatron.mixture.chunk import BITS, WHOLE, Position, quantize_weight_rows, quantize_weights

PIECE_OPERATIONS = 1 << 23  # chunks times domains between two checks of the deadline, about 0.05 s
MARK_CHUNKS, MAX_MARKS = 1 << 12, 256  # never evicted, but thinned out: their distance grows with the walk
MAX_RECENT = 16  # for concurrent readers


class SeekDeadlineError(NotReadyError):
    """The position of a chunk takes longer than the deadline. The next call continues the computation."""


def check_deadline(deadline: float | None, reached: int, chunk: int) -> None:
    """Raise SeekDeadlineError if time.monotonic() is past `deadline` (None: never)."""
    if deadline is not None and time.monotonic() > deadline:
        raise SeekDeadlineError(
            f"chunk {chunk}: its position is computed as far as chunk {reached}, because a domain has a very "
            "small weight or weights change at every chunk. Request it again to continue."
        )


def jump_position(position: Position, parts: np.ndarray, size: int, end: int) -> Position | None:
    """Return a valid position of a chunk from which a walk reaches the true position at chunk `end`.

    parts [K] int64   multiples of 2^-40, the same for chunks position.chunk to end

    Returns None if the jump would not save more chunks than it leaves to walk, or if a condition of the proof
    above does not hold.
    """
    active = [k for k, part in enumerate(parts.tolist()) if part]
    smallest = min(int(parts[k]) for k in active)
    # 1 / (smallest share * chunk size) chunks, rounded up, plus one.
    # A smallest share of 1/1000 and chunks of 256 units: ceil(1000 / 256) + 1 = 5 chunks.
    settle_chunks = -(-WHOLE // (smallest * size)) + 1
    n_chunks = end - settle_chunks - position.chunk
    # a jump skips n_chunks chunks and leaves settle_chunks to walk: it must save more than it leaves
    if n_chunks <= settle_chunks:
        return None
    lag = position.lag.tolist()
    # each whole chunk adds size * 2^40 to the lags in all and subtracts as much: their sum stays 0, and the
    # lags of the active domains sum to `owed`
    owed = -sum(lag[k] for k, part in enumerate(parts.tolist()) if not part)
    # conditions of the proof in the module docstring
    if abs(owed) >= WHOLE or sum(lag) != 0:
        return None
    # Multiples of 2^-40; Python integers, because they exceed 64 bits.
    # Example: 2^39 parts * 2^9 units * 2^20 chunks = 2^68.
    shares = {k: lag[k] + int(parts[k]) * size * n_chunks for k in active}
    if min(shares.values()) < 0:
        return None
    served = {k: share >> BITS for k, share in shares.items()}
    unfinished = [k for k in active if shares[k] & WHOLE - 1]
    # shares rounded down leave this many units; give them to any domains with a begun share
    n_more = size * n_chunks - sum(served.values())
    if not 0 <= n_more <= len(unfinished):
        return None
    # the proof holds for any valid position, so that the choice among `unfinished` does not matter
    for k in unfinished[:n_more]:
        served[k] += 1
    done, lag_after = position.done.copy(), position.lag.copy()
    for k in active:
        done[k] += served[k]
        # in (-2^40, 2^40): not below 0 if the share was rounded down, below 0 if it was rounded up
        lag_after[k] = shares[k] - (served[k] << BITS)
    return Position(position.chunk + n_chunks, done, lag_after)


def find_last_safe_chunk(
    position: Position, parts: np.ndarray, limit: np.ndarray, size: int, end: int
) -> int:
    """Return the last chunk up to `end` before which no domain can reach its `limit`, int64 [K]."""
    for k in np.flatnonzero(parts).tolist():
        # A share may be rounded up by one unit, hence the - 1.
        # Parts that the domain may still be assigned. In Python `a - 1 << b` is (a - 1) << b; int() because
        # NO_LIMIT << 40 exceeds 64 bits.
        room = (int(limit[k]) - int(position.done[k]) - 1 << BITS) - int(position.lag[k])
        end = min(end, position.chunk + max(0, room // (int(parts[k]) * size)))
    return end


def walk_counts(
    position: Position, parts: np.ndarray, limit: np.ndarray, size: int, n_chunks: int, until_empty: bool
) -> Position:
    """Return the position after up to `n_chunks` chunks, as chunk.schedule_units, without making the units.

    parts [K] or [n_chunks, K]   multiples of 2^-40
    until_empty                  stop after a chunk that empties a domain
    """
    n, done, lag = _csrc.mixture_counts(
        parts, position.done, position.lag, limit, size, n_chunks, until_empty
    )
    return Position(position.chunk + n, done, lag)


def seek_constant(
    position: Position, parts: np.ndarray, limit: np.ndarray, size: int, end: int, until_empty: bool,
    resume: Position | None = None,
) -> Iterator[tuple[Position, bool]]:  # fmt: skip
    """Walk to chunk `end` under the same parts [K], as far as `limit` allows, with a jump if that is shorter.

    Yields (position, whether it is the true one) after each piece.

    resume   a position that an earlier call with the same `position` and `end` yielded
    """
    safe = find_last_safe_chunk(position, parts, limit, size, end)
    # towards `safe`, not `end`: the proof does not cover a domain that reaches its limit
    begin = jump_position(position, parts, size, safe)
    true_from = position.chunk if begin is None else safe
    # `resume` is between the jump and `safe`; a walk without a jump has no such position
    begin = position if begin is None else begin if resume is None else resume
    piece = max(1, PIECE_OPERATIONS // len(parts))
    while begin.chunk < end:
        # a piece that passes `safe` is cut there, so that the first true position is yielded
        n = min(piece, (safe if begin.chunk < safe else end) - begin.chunk)
        after = walk_counts(begin, parts, limit, size, n, until_empty)
        # not even one chunk fits the limits: the caller computes it with `finish_chunk`
        if after.chunk == begin.chunk:
            return
        begin = after
        yield begin, begin.chunk >= true_from
        # a domain is empty: the others share its weight from the next chunk on, and `parts` are outdated
        if until_empty and (begin.done >= limit)[parts > 0].any():
            return


class PositionCache:
    """Positions of the chunks of a mixture, computed from the nearest known one.

    Safe to use from several threads: its dictionaries are replaced, never changed.
    """

    def __init__(
        self, weights: Any, n_units: np.ndarray, limit: np.ndarray, size: int, dry: str,
        finish_chunk: Callable[[Position, np.ndarray], Position | None],
    ) -> None:  # fmt: skip
        """`finish_chunk` returns the position after a chunk in which domains run dry; None if it is empty."""
        self.weights, self.n_units, self.limit, self.size, self.dry = weights, n_units, limit, size, dry
        self.finish_chunk = finish_chunk
        self.reset()

    def reset(self, start: Position | None = None) -> None:
        """Keep only the first position and `start`."""
        self._first = Position.start(len(self.n_units))
        self._recent: dict[int, Position] = {} if start is None else {start.chunk: start}
        self._marks: dict[int, Position] = {}
        # (first chunk and end of an interrupted walk after a jump, position reached). The position is not the
        # true one yet, so that it must not be used for another end.
        self._unsettled: tuple[int, int, Position] | None = None

    def is_over(self, position: Position) -> bool:
        """Return whether a position is behind the last chunk. Only that chunk may be shorter."""
        return int(position.done.sum()) < position.chunk * self.size

    def store(self, position: Position) -> None:
        """Add a position."""
        # two threads may replace the dictionary at once: one position is then lost, which costs only time
        recent = self._recent
        if len(recent) >= MAX_RECENT:
            # the older half is dropped: a dictionary keeps the order of insertion
            recent = dict(list(recent.items())[MAX_RECENT // 2 :])
        self._recent = recent | {position.chunk: position}

    def find(self, chunk: int, deadline: float | None = None) -> Position:
        """Return the position of a chunk, or the end of the mixture if that is before.

        deadline   of time.monotonic(); past it SeekDeadlineError is raised, and the progress is kept
        """
        position = self._first
        # at most 16 + 256 keys. Each dictionary is read once, as another thread may replace it meanwhile.
        for positions in (self._recent, self._marks):
            nearest = max((at for at in positions if at <= chunk), default=0)
            if nearest > position.chunk:
                position = positions[nearest]
        # a mixture that ends with a whole chunk is never `is_over`; there `_advance` returns None
        while position.chunk < chunk and not self.is_over(position):
            check_deadline(deadline, position.chunk, chunk)
            after = self._advance(position, chunk, deadline)
            if after is None:
                break
            position = after
        self.store(position)
        return position

    def _advance(self, position: Position, chunk: int, deadline: float | None) -> Position | None:
        """Return a later position on the way to a chunk; None if the data end."""
        weights, until = self._load_weights(position.chunk, chunk)
        if self.dry == "redistribute":
            # weights [K] or [n, K]; the mask [K] applies to every row
            weights = np.where(position.done < self.n_units, weights, 0)
            if not (weights.sum(axis=-1) > 0).all():
                # in a block of several chunks, domains with units left may have weight in the first one only
                weights = weights if weights.ndim == 1 else weights[0]
                until = position.chunk + 1
                if not weights.sum() > 0:
                    return None
        before, until_empty = position, self.dry == "redistribute"
        if weights.ndim == 2:
            n = len(weights)
            position = walk_counts(
                before, quantize_weight_rows(weights), self.limit, self.size, n, until_empty
            )
            # no jump is possible where weights change at every chunk: marks shorten the next walk
            self._store_mark(position)
        else:
            position = self._advance_constant(
                before, quantize_weights(weights), min(chunk, until or chunk), deadline
            )
        if position.chunk > before.chunk:
            return position
        return self.finish_chunk(before, weights if weights.ndim == 1 else weights[0])

    def _advance_constant(
        self, before: Position, parts: np.ndarray, end: int, deadline: float | None
    ) -> Position:
        unsettled, resume, position = self._unsettled, None, before
        # continue the walk that an earlier deadline interrupted
        if unsettled is not None and unsettled[:2] == (before.chunk, end):
            resume = unsettled[2]
        until_empty = self.dry == "redistribute"
        steps = seek_constant(before, parts, self.limit, self.size, end, until_empty, resume)
        for reached, is_true in steps:
            if is_true:
                position = reached
                self._store_mark(position)
            else:
                self._unsettled = before.chunk, end, reached
            if reached.chunk < end:
                check_deadline(deadline, reached.chunk, end)
        return position

    def _load_weights(self, chunk: int, end: int) -> tuple[np.ndarray, int | None]:
        """Return weights [K] and the first later chunk with others, or weights [n, K] of n chunks."""
        weights, until = self.weights.weights_at(chunk)
        # the weights change at every chunk, as in a linear schedule: one native call for many chunks
        if until == chunk + 1 < end and hasattr(self.weights, "weights_block"):
            # 2^23 / 16 = 2^19 numbers: 4 MiB of weights, and as much of parts
            n = min(end - chunk, max(1, PIECE_OPERATIONS // (16 * len(weights))))
            return self.weights.weights_block(chunk, n), None
        return weights, until

    def _store_mark(self, position: Position) -> None:
        """Keep a position that took time to reach."""
        # only positions behind the last mark are added: seeks among the marks are short already
        last = max(self._marks, default=0)
        if position.chunk - last < MARK_CHUNKS:
            return
        marks = self._marks
        if len(marks) >= MAX_MARKS:
            # Drop every second mark.
            # [1::2] of 256 marks keeps the last one, from which the next distance is measured.
            marks = dict(sorted(marks.items())[1::2])
        self._marks = marks | {position.chunk: position}
