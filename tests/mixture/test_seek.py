"""Positions of far chunks: those of a walk through every chunk, in a time that does not grow with their
number."""

import time
from fractions import Fraction

import numpy as np
import pytest

from megatron.mixture import seek
from megatron.mixture.adaptive import Log
from megatron.mixture.chunk import NO_LIMIT, WHOLE, Position, parts_of, parts_of_rows, take_turns
from megatron.mixture.distributor import Constant, Distributor
from megatron.mixture.seek import SeekDeadlineError, jump
from megatron.mixture.weights import Schedule


def mixture(
    weights: object, n_units: list[int] | None = None, size: int = 16, dry: str = "repeat"
) -> Distributor:
    n = len(weights.at(0)[0])
    return Distributor(n_units or [1000] * n, [f"d{k}" for k in range(n)], weights, size, 1, dry)


def walk(source: Distributor, chunk: int) -> Position:
    """The twin: every chunk before `chunk`, unit by unit."""
    start = Position.start(len(source.n_units))
    return [start, *(after for _, after in source._walk(start, chunk))][-1]


def same(a: Position, b: Position) -> bool:
    return a.chunk == b.chunk and np.array_equal(a.done, b.done) and np.array_equal(a.lag, b.lag)


def random_weights(rng: np.random.Generator) -> np.ndarray:
    n = int(rng.integers(1, 12))
    kind = rng.integers(4)
    if kind == 0:  # ties of many kinds
        return rng.integers(1, 5, n).astype(float)
    if kind == 1:
        return np.maximum(rng.dirichlet(np.full(n, 0.5)), 1e-3)
    if kind == 2:
        return np.maximum(rng.dirichlet(np.full(n, 5.0)) * (rng.random(n) < 0.7), 0) + np.eye(n)[0] * 1e-2
    return rng.choice([1.0, 0.5, 1 / 3, 1 / 7, 0.01], n)


@pytest.mark.parametrize("seed", range(40))
def test_positions_are_those_of_the_walk_for_any_static_weights(seed) -> None:
    rng = np.random.default_rng(seed)
    weights, size = Constant(random_weights(rng)), int(rng.choice([1, 7, 64, 512]))
    far = int(rng.integers(500, 6000))
    twin = walk(mixture(weights, size=size), far)
    assert same(mixture(weights, size=size).position(far), twin)
    source = mixture(weights, size=size)
    for chunk in rng.integers(0, far, 5).tolist():
        assert same(source.position(chunk), walk(mixture(weights, size=size), chunk))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("linear", [False, True])
def test_positions_are_those_of_the_walk_for_any_schedule(seed, linear) -> None:
    rng = np.random.default_rng(1000 + seed)
    n, size = int(rng.integers(1, 9)), int(rng.choice([3, 64, 512]))
    points = [0, *np.sort(rng.choice(np.arange(1, 3000), int(rng.integers(1, 5)), replace=False)).tolist()]
    weights = [np.maximum(rng.dirichlet(np.full(n, 0.6)), 2e-3) for _ in points]
    if n > 1:
        weights[-1][int(rng.integers(n))] = 0.0  # what it owes or is owed stays
    made = Schedule(points, weights, linear)
    far = 5000
    assert same(mixture(made, size=size).position(far), walk(mixture(made, size=size), far))


def test_weights_of_a_single_chunk_are_not_those_of_a_ramp() -> None:
    weights = [np.array([5.0, 3, 2]), np.array([1.0, 8, 1]), np.array([2.0, 2, 6])]
    made = Schedule([0, 1, 2], weights)
    assert same(mixture(made).position(50), walk(mixture(made), 50))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("dry", ["stop", "redistribute", "repeat"])
def test_positions_are_those_of_the_walk_where_domains_run_dry(seed, dry) -> None:
    rng = np.random.default_rng(2000 + seed)
    n, size = int(rng.integers(1, 8)), int(rng.choice([5, 64]))
    n_units = rng.integers(1, 30_000, n).tolist()
    weights = Constant(np.maximum(rng.dirichlet(np.full(n, 0.7)), 1e-3))
    if seed % 2:
        first = weights.weights
        weights = Schedule([0, 200, 500], [first, first[::-1].copy(), first], linear=bool(seed % 4 == 1))
    for chunk in (*rng.integers(0, 2000, 4).tolist(), 10**6):
        if chunk == 10**6 and dry == "repeat":
            continue  # it never ends
        twin = walk(mixture(weights, n_units, size, dry), chunk)
        assert same(mixture(weights, n_units, size, dry).position(chunk), twin)


def test_a_mixture_that_redistributes_is_the_same_wherever_one_begins_to_read() -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        n_units = (rng.integers(1, 40, 6) * 8).tolist()
        weights = Constant(rng.choice([1.0, 1.0, 0.5, 0.001], 6))
        whole = mixture(weights, n_units, 8, "redistribute").chunks(0, 10**4)
        n = len(whole.domain) // 8
        for first in range(n):
            one = mixture(weights, n_units, 8, "redistribute").chunks(first, 1)
            assert np.array_equal(one.domain, whole.domain[first * 8 : first * 8 + 8])
            assert np.array_equal(one.number, whole.number[first * 8 : first * 8 + 8])


@pytest.mark.parametrize("seed", range(20))
def test_a_jump_from_any_walked_position_reaches_the_walk(seed) -> None:
    """Also from positions that a change of weights left out of balance."""
    rng = np.random.default_rng(3000 + seed)
    n, size = 6, 32
    position = Position.start(n)
    for _ in range(8):
        parts = parts_of(
            np.maximum(rng.dirichlet(np.full(n, 0.4)), 3e-3) * (rng.random(n) < 0.8) + 1e-9 * np.eye(n)[0]
        )
        _, position = take_turns(position, parts, np.full(n, NO_LIMIT), size, int(rng.integers(1, 6)), 0)
    parts = parts_of(np.maximum(rng.dirichlet(np.full(n, 0.6)), 3e-3))
    _, twin = take_turns(position, parts, np.full(n, NO_LIMIT), size, 3000, 0)
    near = jump(position, parts, size, position.chunk + 3000)
    assert near is not None
    assert near.chunk > position.chunk + 2000
    n_left = position.chunk + 3000 - near.chunk
    assert same(seek.walk_counts(near, parts, np.full(n, NO_LIMIT), size, n_left, False), twin)


def test_shares_far_out_are_exact() -> None:
    weights = np.array([0.7, 0.25, 0.049, 0.001])
    shares = [Fraction(int(part), WHOLE) for part in parts_of(weights)]
    for chunk in (10**6, 10**9, 1 << 40):
        begin = time.process_time()
        position = mixture(Constant(weights), size=512).position(chunk)
        assert time.process_time() - begin < 1
        assert sum(position.done.tolist()) == chunk * 512
        for done, lag, share in zip(position.done.tolist(), position.lag.tolist(), shares, strict=True):
            assert abs(done - share * chunk * 512) < 1
            assert share * chunk * 512 - done == Fraction(lag, WHOLE)


def test_steps_to_a_far_chunk_do_not_grow_with_its_number(monkeypatch) -> None:
    steps: list[int] = []
    counted = seek.walk_counts
    monkeypatch.setattr(
        seek, "walk_counts", lambda *words: steps.append(words[4]) or counted(*words)
    )  # chunks walked through
    sums = []
    for chunk in (10**3, 10**5, 10**9, 1 << 40):
        steps.clear()
        ramp = Schedule(
            [0, 100, 300], [np.array([5.0, 3, 2]), np.array([1.0, 8, 1]), np.array([2.0, 2, 6])], True
        )
        mixture(ramp, size=512).position(chunk)
        sums.append(sum(steps))
    assert max(sums) == min(sums) <= 310


def test_a_weight_of_next_to_nothing_ends_at_the_deadline_and_goes_on_from_there() -> None:
    tiny = Constant([1.0, 1e-7])
    twin = mixture(tiny, size=16).position(1_500_000)
    source, asked = mixture(tiny, size=16), 0
    monotonic = time.monotonic
    while True:
        asked += 1
        try:
            found = source.position(1_500_000, monotonic() - 1 if asked < 4 else None)
            break
        except SeekDeadlineError as error:
            assert "Request it again" in str(error)
    assert asked == 4
    assert same(found, twin)
    never = mixture(Constant([1.0, 1e-300]), size=16)
    begin = monotonic()
    for _ in range(2):
        with pytest.raises(SeekDeadlineError):
            never.position(1 << 40, monotonic() + 0.3)
    assert monotonic() - begin < 20
    reached = max(never.positions._marks, default=0)
    assert reached > 0 or never.positions._unsettled is not None  # the next call continues there


def test_rows_of_weights_are_the_parts_of_each() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 3, 8, 9, 129, 760):
        first, last = rng.dirichlet(np.full(n, 0.3)), rng.dirichlet(np.full(n, 0.3))
        ramp = Schedule([0, 40, 50], [first, last, first], linear=True)
        rows = ramp.block(3, 1000)
        assert len(rows) == 37
        for i, row in enumerate(rows):
            assert np.array_equal(row, ramp.at(3 + i)[0])
        expected = [parts_of(row) for row in rows]
        assert np.array_equal(parts_of_rows(rows), expected)
    with pytest.raises(ValueError, match="weights"):
        parts_of_rows(np.array([[1.0, 0.0], [0.0, 0.0]]))


def test_a_mixture_log_is_bounded_by_what_is_journaled() -> None:
    log = Log(np.array([0.5, 0.5]), 8)
    log.append(8, np.array([0.9, 0.1]), 4000)
    source = mixture(log)
    assert same(source.position(3999), walk(mixture(log), 3999))
    with pytest.raises(ValueError, match="only those before 4000"):
        source.position(1 << 40)
