"""Weighted round robin with random access: slots of an endless stream, shared exactly by fixed weights.

Of the first n slots, source k has floor(w_k n) or ceil(w_k n), for every n and k. This is a
fair schedule in the sense of Baruah et al. ("Proportionate progress", 1996) and of Tijdeman's
chairman assignment (1980). Their algorithms start at the first slot. Here the stream
is divided into blocks, and the counts at a block boundary depend only on the number of the
block, so that any slot is found without the slots before its block. All arithmetic is exact.

A mixture has another scheduler (megatron/mixture/distributor.py), because its weights may change.
Counts here follow from the slot number alone, so there is no debt to carry
over a change. A schedule that starts again with each change gives all of 100
slots to a source of weight 0.51 and 0.52 in turn. A schedule of the new weights
that keeps the slot number repeats units: after 1,000 slots of weights (1/2, 1/2),
slot 1,000 of (1/4, 3/4) expects unit 250 of source 0, which has supplied 500.
"""

from array import array
from collections.abc import Iterable, Sequence
from fractions import Fraction
from heapq import heappop, heappush
from math import ceil, lcm

MIN_BLOCK_SLOTS = 1 << 10  # slots scheduled at once, about a microsecond each
MAX_BLOCK_SLOTS = 1 << 20
CACHED_BLOCKS = 3  # concurrent readers use neighbouring blocks


class WeightedRoundRobin:
    """Schedule of the slots 0, 1, 2, ... for K sources with positive weights of any sum."""

    def __init__(self, weights: Sequence[Fraction]) -> None:
        """Raises ValueError if a weight is less than about a millionth (2^-20) of the sum."""
        assert weights and all(weight > 0 for weight in weights), "expected at least one weight, all above 0"
        total = sum(weights)
        self.weights = [Fraction(weight) / total for weight in weights]
        # every source has a slot in every block, so the
        # next boundary never undoes a count rounded up
        longest_period = ceil(1 / min(self.weights))
        if longest_period > MAX_BLOCK_SLOTS:
            raise ValueError(
                f"weights: {float(min(weights)):g} of {float(total):g} is one sample in {longest_period:,}; "
                f"remove sources with less than one in {MAX_BLOCK_SLOTS:,}"
            )
        # a power of two of at least the longest period
        self.block_slots = max(MIN_BLOCK_SLOTS, 1 << (longest_period - 1).bit_length())
        # Integers over one denominator: w_k n is a product and a floor division. In
        # floating point it would be off by one for some n: floor(0.29 * 100) is 28.
        self._denominator = lcm(*(weight.denominator for weight in self.weights))
        # weight = numerator / denominator
        self._numerators = [int(weight * self._denominator) for weight in self.weights]
        self._cache: dict[int, tuple[array[int], array[int]]] = {}

    def locate_slot(self, i: int) -> tuple[int, int]:
        """Return (source, number of its earlier slots) of slot i."""
        # Example, weights 1/2, 1/3, 1/6: slots 0 to 7 are of the
        # sources 0 1 0 1 0 2 0 1, and slot 7 has number 2 of source 1.
        sources, numbers = self.get_block(i // self.block_slots)
        return sources[i % self.block_slots], numbers[i % self.block_slots]

    def prefix_counts(self, n: int) -> list[int]:
        """Return how many of the first n slots each source has."""
        block_number, rest = divmod(n, self.block_slots)
        counts = self._counts_at_boundary(block_number)
        # at most one block is scheduled, whatever n is
        if rest:
            sources = self.get_block(block_number)[0][:rest]
            counts = [count + sources.count(k) for k, count in enumerate(counts)]
        return counts

    def get_block(self, number: int) -> "tuple[array[int], array[int]]":
        """Return (source, number of its earlier slots) of each slot of a block: two int64 arrays."""
        block = self._cache.get(number)
        if block is None:
            block = self._schedule_block(number)
            if len(self._cache) >= CACHED_BLOCKS:
                self._cache = {}  # a new dict, because another thread may be reading the old one
            self._cache[number] = block
        return block

    def _schedule_block(self, number: int) -> "tuple[array[int], array[int]]":
        """Schedule a block by earliest deadline first, from the counts at its start to the counts at its end.

        Slot j of source k is released at position floor(j / w_k),
        and its deadline is ceil((j + 1) / w_k). Earliest deadline first meets
        all deadlines of unit jobs with integer windows if any schedule does.
        """
        whole, parts, begin = self._denominator, self._numerators, number * self.block_slots
        done, last = self._counts_at_boundary(number), self._counts_at_boundary(number + 1)
        released: list[list[int]] = [[] for _ in range(self.block_slots)]

        def release(k: int, earliest: int) -> None:
            if done[k] < last[k]:
                # floor(j / w_k) = floor(j * denominator /
                # numerator), relative to the begin of the block
                released[max(earliest, done[k] * whole // parts[k] - begin)].append(k)

        for k in range(len(parts)):
            release(k, 0)
        # A heap of at most K sources, each with its next slot: O(log K) per
        # slot. Ties go to the lower k, so the schedule is deterministic.
        waiting: list[tuple[int, int]] = []
        sources, numbers = array("q"), array("q")
        for now in range(self.block_slots):
            for k in released[now]:
                # ceil((j + 1) / w_k) by floor division of the
                # negated number; at most the end of the block
                deadline = min(-(-(done[k] + 1) * whole // parts[k]) - begin, self.block_slots)
                heappush(waiting, (deadline, k))
            deadline, k = heappop(waiting)
            assert now < deadline, "the counts at both boundaries guarantee that all deadlines are met"
            sources.append(k)
            numbers.append(done[k])
            done[k] += 1
            # A source has one slot in the heap at a time;
            # its next one cannot be before now + 1.
            release(k, now + 1)
        return sources, numbers

    def _counts_at_boundary(self, number: int) -> list[int]:
        """Return the counts of each source before a block, w_k n rounded so that a schedule exists.

        Let f_k be the fraction removed by rounding down.

        Forward: let U be the sources whose next deadline is within h slots. All deadlines can be met if at
        least floor(sum of f over U) of the sources in U are rounded up, for every h.

        Backward: let V be the sources whose next slot was released within the last h slots. No slot precedes
        its release if at most ceil(sum of f over V) of the sources in V are rounded up, for every h.

        The sets U are nested in h, and so are the sets V.
        Each family is therefore the prefixes of an order.
        """
        # w_k n * denominator; n is the first slot of the block
        exact = [number * self.block_slots * part for part in self._numerators]
        counts = [n // self._denominator for n in exact]
        # f_k * denominator, of the sources whose count is not a whole number
        remainders = {k: n % self._denominator for k, n in enumerate(exact) if n % self._denominator}
        parts, whole = self._numerators, self._denominator
        # time to the next deadline (1 - f_k) / w_k,
        # and time since the release f_k / w_k, in slots.
        # The keys are exact, and k breaks ties,
        # so every process computes the same order
        by_deadline = sorted(remainders, key=lambda k: (Fraction(whole - remainders[k], parts[k]), k))
        by_release = sorted(remainders, key=lambda k: (Fraction(remainders[k], parts[k]), k))
        for k in round_in_two_orders(remainders, whole, by_deadline, by_release):
            counts[k] += 1
        return counts


def round_in_two_orders(
    remainders: dict[int, int], denominator: int, first: Sequence[int], second: Sequence[int]
) -> Iterable[int]:
    """Return which of the fractions remainder / denominator to round up, so that prefix sums are preserved.

    The sum of all fractions is a whole number and stays the same. For every prefix of either
    order, the number of fractions rounded up is the sum of the prefix rounded down or up.

    Place the fractions end to end on a line and cut it into unit intervals, once
    in each order. Every unit must select one of the fractions that overlap it, in both orders
    at the same time. The fractions themselves are a fractional flow with this property,
    so an integer flow exists, and augmenting paths find it (Ford and Fulkerson).

    The graph: source -> units of the first order -> in(k) -> out(k) -> units of the second
    order -> sink, all arcs of capacity 1. An arc is reversed when a path uses it.
    """
    # Example: fractions 4/6, 5/6 and 3/6 have the sum 2, the units [0, 6)
    # and [6, 12). In this order fraction 0 overlaps unit 0, fraction 1 both
    # units, fraction 2 unit 1: exactly one fraction is selected per unit.
    n_units = sum(remainders.values()) // denominator
    arcs: dict[tuple[str, int], dict[tuple[str, int], None]] = {("source", 0): {}, ("sink", 0): {}}
    for unit in range(n_units):
        arcs["source", 0]["first", unit] = None
        arcs["first", unit], arcs["second", unit] = {}, {("sink", 0): None}
    for k in remainders:
        arcs["in", k], arcs["out", k] = {("out", k): None}, {}
    for k, unit in _find_touched_units(remainders, denominator, first):
        arcs["first", unit]["in", k] = None
    for k, unit in _find_touched_units(remainders, denominator, second):
        arcs["out", k]["second", unit] = None
    # each pass finds one augmenting path by
    # breadth-first search; there are n_units of them
    for _ in range(n_units):
        came_from: dict[tuple[str, int], tuple[str, int]] = {}
        queue = [("source", 0)]
        for node in queue:
            for to in arcs[node]:
                if to not in came_from and to != ("source", 0):
                    came_from[to] = node
                    queue.append(to)
        node = ("sink", 0)
        # Reverse the path from the sink. A later path may
        # use a reversed arc, which undoes an earlier choice.
        while node != ("source", 0):
            before = came_from[node]
            del arcs[before][node]
            arcs[node][before] = None
            node = before
    # k is selected if the flow uses (that is, has reversed) its arc in(k) -> out(k)
    return [k for k in remainders if ("out", k) not in arcs["in", k]]


def _find_touched_units(
    remainders: dict[int, int], denominator: int, order: Sequence[int]
) -> Iterable[tuple[int, int]]:
    """Yield (k, unit) for each unit interval that fraction k overlaps: one or two units."""
    end = 0
    for k in order:
        begin, end = end, end + remainders[k]
        # the half-open interval [begin, end) in units of 1 / denominator
        for unit in range(begin // denominator, (end - 1) // denominator + 1):
            yield k, unit
