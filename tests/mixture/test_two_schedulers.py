"""Why blends and mixtures have a scheduler each: neither keeps the guarantees of the other."""

from fractions import Fraction

import numpy as np

from megatron.mixture.chunk import NO_LIMIT, Position, quantize_weights, schedule_units
from megatron.mixture.distributor import ConstantWeights, Distributor
from megatron.plan.weighted_round_robin import WeightedRoundRobin

NO_LIMITS = np.array([NO_LIMIT, NO_LIMIT])


def test_chunks_of_a_mixture_do_not_have_the_exact_shares_of_a_blend() -> None:
    n, size = 3 << 40, 1 << 22
    assert WeightedRoundRobin([Fraction(1)] * 3).prefix_counts(n) == [1 << 40] * 3
    names, weights = ["a", "b", "c"], ConstantWeights([1, 1, 1])
    done = Distributor([1] * 3, names, weights, size, seed=0).find_position(n // size).done
    # 2^40 / 3 is rounded down to 366503875925, and the first domain gets the remainder of 1
    assert done.tolist() == [3 * 366503875926, 3 * 366503875925, 3 * 366503875925]
    assert np.abs(done - (1 << 40)).max() == 2


def test_inside_a_chunk_of_a_mixture_a_prefix_may_miss_its_share_by_more_than_one() -> None:
    size, shares = 512, [0.7, 0.25, 0.05]
    units, _ = schedule_units(
        Position.start(3), quantize_weights(np.array(shares)), np.full(3, NO_LIMIT), size, 20, seed=0
    )
    n = np.arange(1, 20 * size + 1)
    errors = [np.abs(np.cumsum(units.domain == k) - share * n) for k, share in enumerate(shares)]
    at_ends = [error[size - 1 :: size] for error in errors]
    assert np.max(at_ends) < 1 < np.max(errors)
    blend = WeightedRoundRobin([Fraction(7, 10), Fraction(1, 4), Fraction(1, 20)])
    sources = np.array([blend.locate_slot(int(i))[0] for i in n - 1])
    for k, share in enumerate(shares):
        assert np.abs(np.cumsum(sources == k) - share * n).max() < 1


def test_a_blend_that_starts_again_with_each_change_of_weights_starves_a_source() -> None:
    by_step = [Fraction(51, 100), Fraction(52, 100)]
    counts, position = [0, 0], Position.start(2)
    for step in range(100):
        weight = by_step[step % 2]
        counts[WeightedRoundRobin([weight, 1 - weight]).locate_slot(0)[0]] += 1
        parts = quantize_weights(np.array([float(weight), float(1 - weight)]))
        _, position = schedule_units(position, parts, NO_LIMITS, 1, 1, seed=0)
    # 50 * 0.49 + 50 * 0.48 = 48.5 slots are due
    assert counts == [100, 0]
    assert abs(position.done[1] - 48.5) < 1


def test_a_blend_that_keeps_its_slot_number_repeats_units_after_a_change_of_weights() -> None:
    before, after = (WeightedRoundRobin([Fraction(w), 1 - Fraction(w)]) for w in ("0.5", "0.25"))
    assert before.prefix_counts(1000) == [500, 500]
    # the first unit of source 0 after the change was supplied 250 units ago
    numbers = [after.locate_slot(i) for i in range(1000, 1010)]
    assert min(number for source, number in numbers if source == 0) == 250
    parts = [quantize_weights(np.array([w, 1 - w])) for w in (0.5, 0.25)]
    _, position = schedule_units(Position.start(2), parts[0], NO_LIMITS, 10, 100, seed=0)
    units, _ = schedule_units(position, parts[1], NO_LIMITS, 10, 1, seed=0)
    assert units.number[units.domain == 0].min() == 500
