"""Chunks: exact shares, true epochs, and the same result in every process."""

from fractions import Fraction

import numpy as np
import pytest

from megatron.data.permutation import Permutation
from megatron.mixture.chunk import (
    BITS,
    NO_LIMIT,
    WHOLE,
    ChunkUnits,
    Position,
    UnitOrder,
    quantize_weights,
    schedule_units,
)
from megatron.mixture.distributor import ConstantWeights, Distributor

WORD = (1 << 64) - 1


def make_names(n: int) -> list[str]:
    return [f"domain {k}" for k in range(n)]


def slow_counts(parts: np.ndarray, size: int, n_chunks: int) -> list[list[int]]:
    """Slow twin: for each chunk first the units due by its end, then begun shares by their deadlines."""
    done, result = [0] * len(parts), []
    shares = [Fraction(int(part), WHOLE) for part in parts]
    for chunk in range(n_chunks):
        end = (chunk + 1) * size
        counts = [max(0, int(share * end) - d) for share, d in zip(shares, done, strict=True)]
        begun = [
            ((int(share * end) + 1 - share * end) / share, k)
            for k, share in enumerate(shares)
            if share and share * end > int(share * end) and done[k] <= int(share * end)
        ]
        for _, k in sorted(begun)[: size - sum(counts)]:
            counts[k] += 1
        done = [d + c for d, c in zip(done, counts, strict=True)]
        result.append(counts)
    return result


def count_units(turns: ChunkUnits, size: int, n_domains: int) -> np.ndarray:
    return np.array([np.bincount(part, minlength=n_domains) for part in turns.domain.reshape(-1, size)])


@pytest.mark.parametrize("size", [1, 7, 64])
def test_counts_equal_the_slow_twin(size) -> None:
    rng = np.random.default_rng(size)
    for n in (1, 2, 9, 40):
        parts = quantize_weights(rng.dirichlet(np.full(n, 0.3)))
        turns, _ = schedule_units(Position.start(n), parts, np.full(n, NO_LIMIT), size, 50, seed=0)
        assert count_units(turns, size, n).tolist() == slow_counts(parts, size, 50)


def test_every_prefix_of_chunks_has_the_exact_shares_to_within_one_unit() -> None:
    weights = np.random.default_rng(0).dirichlet(np.full(760, 0.2))
    size, n = 512, 400
    turns = Distributor(
        [10**6] * 760, make_names(760), ConstantWeights(weights), size, seed=1
    ).schedule_chunks(0, n)
    cumulated = np.cumsum(count_units(turns, size, 760), axis=0)
    assert np.abs(cumulated - weights * size * np.arange(1, n + 1)[:, None]).max() < 1 + 1e-6


def test_twenty_chunks_anywhere_have_the_shares_to_within_a_percent() -> None:
    weights = np.array([0.7, 0.25, 0.049, 0.001])
    counts = count_units(
        Distributor([99] * 4, make_names(4), ConstantWeights(weights), 512, seed=1).schedule_chunks(0, 300),
        512,
        4,
    )
    sums = np.cumsum(np.vstack([np.zeros(4), counts]), axis=0)
    windows = (sums[20:] - sums[:-20]) / (20 * 512)
    assert np.abs(windows - weights).max() < 0.01


def test_a_weight_of_one_in_a_million_is_served_after_a_million_units() -> None:
    weights = np.array([1 - 1e-6, 1e-6])
    mixture = Distributor([100, 100], make_names(2), ConstantWeights(weights), 1000, seed=0)
    assert mixture.find_position(4000).done[1] in (3, 4)


def test_weights_that_change_at_every_chunk_carry_over_the_debt() -> None:
    class Wavering:
        known_to = None

        def weights_at(self, chunk: int) -> tuple[np.ndarray, int]:
            tiny = 0.001 * (1 + chunk % 3)  # 0.002 on average
            return np.array([0.6, 0.4 - tiny, tiny]), chunk + 1

    mixture = Distributor([10**6] * 3, make_names(3), Wavering(), 10, seed=0)
    assert np.abs(mixture.find_position(3000).done - 30_000 * np.array([0.6, 0.398, 0.002])).max() <= 2


def test_quantized_weights_are_exact_and_invalid_weights_are_refused() -> None:
    assert quantize_weights(np.array([3.0, 1.0])).tolist() == [3 << BITS - 2, 1 << BITS - 2]
    assert quantize_weights(np.array([1.0, 1e-30, 0.0]))[1:].tolist() == [1, 0]
    for wrong in ([0.0, 0.0], [1.0, -1.0], [np.nan, 1.0]):
        with pytest.raises(ValueError, match="weights"):
            quantize_weights(np.array(wrong))


def round_keys(seed: int, epoch: int) -> list[int]:
    """Twin of the keys in csrc/mixture.cpp."""

    def mixed(x: int) -> int:
        x &= WORD
        x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & WORD
        x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & WORD
        return x ^ x >> 33

    base = mixed(seed + mixed(epoch))
    return [mixed(base + i) for i in range(1, 7)]


def test_each_epoch_of_a_domain_is_another_keyed_permutation() -> None:
    n_units = np.array([1, 10, 1000])
    orders = UnitOrder(n_units, make_names(3), seed=5)
    domain = np.repeat(np.arange(3, dtype=np.int32), 2500)
    number = np.tile(np.arange(2500), 3)
    units = orders.lookup_units(ChunkUnits(domain, number)).reshape(3, 2500)
    again = np.concatenate(
        [orders.lookup_units(ChunkUnits(domain[i : i + 7], number[i : i + 7])) for i in range(0, 7500, 7)]
    )
    assert np.array_equal(units.ravel(), again)
    for k, n in enumerate(n_units.tolist()):
        for epoch in range(2500 // n if n > 1 else 3):
            assert sorted(units[k, epoch * n : (epoch + 1) * n]) == list(range(n))

    for epoch in (0, 1):
        twin = Permutation(1000, [0])
        twin._keys = np.array(round_keys(int(orders.seeds[2]), epoch), dtype=np.uint64)
        assert np.array_equal(units[2, epoch * 1000 : (epoch + 1) * 1000], twin(np.arange(1000)))
    assert not np.array_equal(units[2, :1000], units[2, 1000:2000])
    plain = UnitOrder(n_units, make_names(3), seed=5, shuffle=False)
    assert plain.lookup_units(ChunkUnits(domain, number)).reshape(3, 2500)[1, :12].tolist() == [
        *range(10),
        0,
        1,
    ]


def test_chunks_are_the_same_from_any_start_for_any_number_of_groups() -> None:
    def fresh() -> Distributor:
        return Distributor([50, 70, 300], make_names(3), ConstantWeights([5, 3, 2]), 16, seed=3)

    whole = fresh().schedule_chunks(0, 60)
    for n_groups in (1, 2, 4):
        for group in range(n_groups):
            mixture = fresh()  # another process, with another order of requests
            for i in [*range(group, 60, n_groups)][::-1]:
                part = mixture.schedule_chunks(i, 1)
                assert np.array_equal(part.domain, whole.domain[i * 16 : i * 16 + 16])
                assert np.array_equal(part.number, whole.number[i * 16 : i * 16 + 16])
    numbers = np.random.default_rng(0).permutation(960)
    units = fresh().get_units(numbers)
    assert np.array_equal(units.domain, whole.domain[numbers])
    assert np.array_equal(units.number, whole.number[numbers])


def test_a_saved_position_resumes_without_earlier_chunks() -> None:
    mixture = Distributor([50, 70], make_names(2), ConstantWeights([5, 3]), 16, seed=3)
    state = mixture.find_position(41).as_dict()
    again = Distributor([50, 70], make_names(2), ConstantWeights([5, 3]), 16, seed=3)
    again.restore(Position.from_dict(state))
    assert np.array_equal(again.schedule_chunks(41, 9).number, mixture.schedule_chunks(41, 9).number)
    with pytest.raises(ValueError, match="position of 2 domains"):
        Distributor([1] * 3, make_names(3), ConstantWeights([1] * 3), 1, seed=0).restore(
            Position.from_dict(state)
        )


def test_exhausted_domains_stop_repeat_or_pass_their_share_to_the_others() -> None:
    def mixture(dry: str) -> Distributor:
        return Distributor([20, 1000], make_names(2), ConstantWeights([1, 1]), 8, seed=0, dry=dry)

    stopped = mixture("stop").schedule_chunks(0, 100)
    assert len(stopped.domain) == 40  # the sixth chunk would need more than the 20
    with pytest.raises(ValueError, match="ends after 40 units"):
        mixture("stop").get_units(np.array([40]))
    assert mixture("repeat").find_position(100).done.tolist() == [400, 400]
    spread = mixture("redistribute").schedule_chunks(0, 200)
    counts = count_units(ChunkUnits(spread.domain[:1016], spread.number[:1016]), 8, 2)
    assert counts[:5].tolist() == [[4, 4]] * 5
    assert counts[5:].tolist() == [[0, 8]] * (len(counts) - 5)
    for k, n in ((0, 20), (1, 1000)):
        assert spread.number[spread.domain == k].tolist() == list(range(n))


def test_redistributing_over_uneven_domains_gives_every_unit_once() -> None:
    n_units = np.random.default_rng(1).integers(1, 400, size=30)
    turns = Distributor(
        n_units, make_names(30), ConstantWeights(np.arange(1, 31)), 32, seed=0, dry="redistribute"
    ).schedule_chunks(0, 10**6)
    for k, n in enumerate(n_units.tolist()):
        assert turns.number[turns.domain == k].tolist() == list(range(n))


def ended_by_enumeration(n_units: list[int], weights: list[float], size: int) -> list[int]:
    """Twin of `stop`: units of each domain, found by trying every length of the last chunk."""
    parts = quantize_weights(np.array(weights))
    position = Position.start(len(n_units))
    while True:
        trials = [
            schedule_units(position, parts, np.array(n_units), n, 1, seed=3) for n in range(1, size + 1)
        ]
        fitting = [after for _, after in trials if after.chunk > position.chunk]
        if not fitting:
            return position.done.tolist()
        if trials[-1][1].chunk == position.chunk:
            return fitting[-1].done.tolist()
        position = trials[-1][1]


@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_mixture_that_stops_gives_every_unit_that_the_shares_allow(size) -> None:
    rng = np.random.default_rng(size)
    for n_domains in (1, 2, 5, 12):
        n_units = rng.integers(1, 90, n_domains).tolist()
        weights = rng.dirichlet(np.ones(n_domains)).tolist()
        mixture = Distributor(
            n_units, make_names(n_domains), ConstantWeights(weights), size, seed=3, dry="stop"
        )
        turns = mixture.schedule_chunks(0, 10**4)
        done = np.bincount(turns.domain, minlength=n_domains)
        assert done.tolist() == ended_by_enumeration(n_units, weights, size)
        for k in range(n_domains):
            assert turns.number[turns.domain == k].tolist() == list(range(done[k]))
        assert np.abs(done - np.array(weights) * done.sum()).max() < 1 + 1e-6
        as_they_are = Distributor(
            n_units, make_names(n_domains), ConstantWeights(n_units), size, seed=3, dry="stop"
        )
        assert as_they_are.find_position(10**4).done.tolist() == n_units


@pytest.mark.parametrize("dry", ["stop", "redistribute"])
def test_the_shorter_last_chunk_is_the_same_from_any_start(dry) -> None:
    def fresh() -> Distributor:
        return Distributor([20, 37], make_names(2), ConstantWeights([20, 37]), 8, seed=0, dry=dry)

    whole = fresh().schedule_chunks(0, 100)
    assert len(whole.domain) == 57
    for begin in range(12):
        part = fresh().schedule_chunks(begin, 3)
        assert part.domain.tolist() == whole.domain[begin * 8 : begin * 8 + 24].tolist()
        assert part.number.tolist() == whole.number[begin * 8 : begin * 8 + 24].tolist()
    again = fresh()
    again.restore(Position.from_dict(fresh().find_position(8).as_dict()))
    assert len(again.schedule_chunks(8, 5).domain) == 0
    assert fresh().count_units_before(7) == 56
    assert fresh().count_units_before(8) == fresh().count_units_before(9) == 57
    assert fresh().get_units(np.array([56])).number.tolist() == whole.number[56:].tolist()
    with pytest.raises(ValueError, match="ends after 57 units"):
        fresh().get_units(np.array([56, 57]))
    with pytest.raises(ValueError, match="expected chunks of 16 units"):
        other = Distributor([20, 37], make_names(2), ConstantWeights([1, 1]), 16, seed=0, dry=dry)
        other.restore(fresh().find_position(3))


def test_an_empty_domain_must_have_no_weight() -> None:
    with pytest.raises(ValueError, match="'domain 1' has no units"):
        Distributor([3, 0], make_names(2), ConstantWeights([1, 1]), 1, seed=0)
    turns = Distributor([3, 0], make_names(2), ConstantWeights([1, 0]), 4, seed=0).schedule_chunks(0, 5)
    assert not turns.domain.any()
