"""Positions of distant chunks equal those of a walk through every chunk.

Their time does not grow with the number of the chunk.
"""

import time
from fractions import Fraction

import numpy as np
import pytest

from megatron.mixture import seek
from megatron.mixture.adaptive import WeightLog
from megatron.mixture.chunk import (
    NO_LIMIT,
    WHOLE,
    Position,
    quantize_weight_rows,
    quantize_weights,
    schedule_units,
)
from megatron.mixture.distributor import ConstantWeights, Distributor
from megatron.mixture.seek import SeekDeadlineError, jump_position
from megatron.mixture.weights import WeightSchedule


def make_mixture(
    weights: object, n_units: list[int] | None = None, size: int = 16, dry: str = "repeat"
) -> Distributor:
    n = len(weights.weights_at(0)[0])
    return Distributor(n_units or [1000] * n, [f"d{k}" for k in range(n)], weights, size, 1, dry)


def walk_to(source: Distributor, chunk: int) -> Position:
    """Twin: walk through every chunk before `chunk`, unit by unit."""
    start = Position.start(len(source.n_units))
    return [start, *(after for _, after in source._walk_chunks(start, chunk))][-1]


def is_equal(a: Position, b: Position) -> bool:
    return a.chunk == b.chunk and np.array_equal(a.done, b.done) and np.array_equal(a.lag, b.lag)


def draw_weights(rng: np.random.Generator) -> np.ndarray:
    n = int(rng.integers(1, 12))
    kind = rng.integers(4)
    if kind == 0:  # many ties
        return rng.integers(1, 5, n).astype(float)
    if kind == 1:
        return np.maximum(rng.dirichlet(np.full(n, 0.5)), 1e-3)
    if kind == 2:
        return np.maximum(rng.dirichlet(np.full(n, 5.0)) * (rng.random(n) < 0.7), 0) + np.eye(n)[0] * 1e-2
    return rng.choice([1.0, 0.5, 1 / 3, 1 / 7, 0.01], n)


@pytest.mark.parametrize("seed", range(40))
def test_positions_equal_the_walk_for_any_static_weights(seed) -> None:
    rng = np.random.default_rng(seed)
    weights, size = ConstantWeights(draw_weights(rng)), int(rng.choice([1, 7, 64, 512]))
    far = int(rng.integers(500, 6000))
    twin = walk_to(make_mixture(weights, size=size), far)
    assert is_equal(make_mixture(weights, size=size).find_position(far), twin)
    source = make_mixture(weights, size=size)
    for chunk in rng.integers(0, far, 5).tolist():
        assert is_equal(source.find_position(chunk), walk_to(make_mixture(weights, size=size), chunk))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("linear", [False, True])
def test_positions_equal_the_walk_for_any_schedule(seed, linear) -> None:
    rng = np.random.default_rng(1000 + seed)
    n, size = int(rng.integers(1, 9)), int(rng.choice([3, 64, 512]))
    points = [0, *np.sort(rng.choice(np.arange(1, 3000), int(rng.integers(1, 5)), replace=False)).tolist()]
    weights = [np.maximum(rng.dirichlet(np.full(n, 0.6)), 2e-3) for _ in points]
    if n > 1:
        weights[-1][int(rng.integers(n))] = 0.0  # its debt stays
    schedule = WeightSchedule(points, weights, linear)
    far = 5000
    assert is_equal(
        make_mixture(schedule, size=size).find_position(far), walk_to(make_mixture(schedule, size=size), far)
    )


def test_a_schedule_point_of_a_single_chunk_is_not_interpolated() -> None:
    weights = [np.array([5.0, 3, 2]), np.array([1.0, 8, 1]), np.array([2.0, 2, 6])]
    schedule = WeightSchedule([0, 1, 2], weights)
    assert is_equal(make_mixture(schedule).find_position(50), walk_to(make_mixture(schedule), 50))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("dry", ["stop", "redistribute", "repeat"])
def test_positions_equal_the_walk_when_domains_run_dry(seed, dry) -> None:
    rng = np.random.default_rng(2000 + seed)
    n, size = int(rng.integers(1, 8)), int(rng.choice([5, 64]))
    n_units = rng.integers(1, 30_000, n).tolist()
    weights = ConstantWeights(np.maximum(rng.dirichlet(np.full(n, 0.7)), 1e-3))
    if seed % 2:
        first = weights.weights
        weights = WeightSchedule(
            [0, 200, 500], [first, first[::-1].copy(), first], linear=bool(seed % 4 == 1)
        )
    for chunk in (*rng.integers(0, 2000, 4).tolist(), 10**6):
        if chunk == 10**6 and dry == "repeat":
            continue  # a repeated mixture never ends
        twin = walk_to(make_mixture(weights, n_units, size, dry), chunk)
        assert is_equal(make_mixture(weights, n_units, size, dry).find_position(chunk), twin)


def test_a_mixture_that_redistributes_is_the_same_from_any_start() -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        n_units = (rng.integers(1, 40, 6) * 8).tolist()
        weights = ConstantWeights(rng.choice([1.0, 1.0, 0.5, 0.001], 6))
        whole = make_mixture(weights, n_units, 8, "redistribute").schedule_chunks(0, 10**4)
        n = len(whole.domain) // 8
        for first in range(n):
            chunk = make_mixture(weights, n_units, 8, "redistribute").schedule_chunks(first, 1)
            assert np.array_equal(chunk.domain, whole.domain[first * 8 : first * 8 + 8])
            assert np.array_equal(chunk.number, whole.number[first * 8 : first * 8 + 8])


@pytest.mark.parametrize("seed", range(20))
def test_a_jump_from_any_walked_position_reaches_the_walk(seed) -> None:
    """Include positions that a change of weights put out of balance."""
    rng = np.random.default_rng(3000 + seed)
    n, size = 6, 32
    position = Position.start(n)
    for _ in range(8):
        parts = quantize_weights(
            np.maximum(rng.dirichlet(np.full(n, 0.4)), 3e-3) * (rng.random(n) < 0.8) + 1e-9 * np.eye(n)[0]
        )
        _, position = schedule_units(position, parts, np.full(n, NO_LIMIT), size, int(rng.integers(1, 6)), 0)
    parts = quantize_weights(np.maximum(rng.dirichlet(np.full(n, 0.6)), 3e-3))
    _, twin = schedule_units(position, parts, np.full(n, NO_LIMIT), size, 3000, 0)
    near = jump_position(position, parts, size, position.chunk + 3000)
    assert near is not None
    assert near.chunk > position.chunk + 2000
    n_left = position.chunk + 3000 - near.chunk
    assert is_equal(seek.walk_counts(near, parts, np.full(n, NO_LIMIT), size, n_left, False), twin)


def test_shares_at_distant_chunks_are_exact() -> None:
    weights = np.array([0.7, 0.25, 0.049, 0.001])
    shares = [Fraction(int(part), WHOLE) for part in quantize_weights(weights)]
    for chunk in (10**6, 10**9, 1 << 40):
        begin = time.process_time()
        position = make_mixture(ConstantWeights(weights), size=512).find_position(chunk)
        assert time.process_time() - begin < 1
        assert sum(position.done.tolist()) == chunk * 512
        for done, lag, share in zip(position.done.tolist(), position.lag.tolist(), shares, strict=True):
            assert abs(done - share * chunk * 512) < 1
            assert share * chunk * 512 - done == Fraction(lag, WHOLE)


def test_steps_to_a_distant_chunk_do_not_grow_with_its_number(monkeypatch) -> None:
    steps: list[int] = []
    counted = seek.walk_counts
    # number of walked chunks
    monkeypatch.setattr(seek, "walk_counts", lambda *words: steps.append(words[4]) or counted(*words))
    sums = []
    for chunk in (10**3, 10**5, 10**9, 1 << 40):
        steps.clear()
        ramp = WeightSchedule(
            [0, 100, 300], [np.array([5.0, 3, 2]), np.array([1.0, 8, 1]), np.array([2.0, 2, 6])], True
        )
        make_mixture(ramp, size=512).find_position(chunk)
        sums.append(sum(steps))
    assert max(sums) == min(sums) <= 310


def test_a_tiny_weight_ends_at_the_deadline_and_the_next_call_continues() -> None:
    tiny = ConstantWeights([1.0, 1e-7])
    twin = make_mixture(tiny, size=16).find_position(1_500_000)
    source, n_calls = make_mixture(tiny, size=16), 0
    monotonic = time.monotonic
    while True:
        n_calls += 1
        try:
            position = source.find_position(1_500_000, monotonic() - 1 if n_calls < 4 else None)
            break
        except SeekDeadlineError as error:
            assert "Request it again" in str(error)
    assert n_calls == 4
    assert is_equal(position, twin)
    never = make_mixture(ConstantWeights([1.0, 1e-300]), size=16)
    begin = monotonic()
    for _ in range(2):
        with pytest.raises(SeekDeadlineError):
            never.find_position(1 << 40, monotonic() + 0.3)
    assert monotonic() - begin < 20
    reached = max(never.positions._marks, default=0)
    assert reached > 0 or never.positions._unsettled is not None  # the next call continues there


def test_weight_rows_are_quantized_like_single_weights() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 3, 8, 9, 129, 760):
        first, last = rng.dirichlet(np.full(n, 0.3)), rng.dirichlet(np.full(n, 0.3))
        ramp = WeightSchedule([0, 40, 50], [first, last, first], linear=True)
        rows = ramp.weights_block(3, 1000)
        assert len(rows) == 37
        for i, row in enumerate(rows):
            assert np.array_equal(row, ramp.weights_at(3 + i)[0])
        expected = [quantize_weights(row) for row in rows]
        assert np.array_equal(quantize_weight_rows(rows), expected)
    with pytest.raises(ValueError, match="weights"):
        quantize_weight_rows(np.array([[1.0, 0.0], [0.0, 0.0]]))


def test_positions_of_a_mixture_log_end_with_its_known_weights() -> None:
    log = WeightLog(np.array([0.5, 0.5]), 8)
    log.append(8, np.array([0.9, 0.1]), 4000)
    source = make_mixture(log)
    assert is_equal(source.find_position(3999), walk_to(make_mixture(log), 3999))
    with pytest.raises(ValueError, match="only those before 4000"):
        source.find_position(1 << 40)
