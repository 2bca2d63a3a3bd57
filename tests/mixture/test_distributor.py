"""Chunks: exact shares, true epochs, and the same for everybody who asks."""

from fractions import Fraction

import numpy as np
import pytest

from megatron.data.permutation import Permutation
from megatron.mixture.chunk import BITS, NO_LIMIT, WHOLE, Orders, Position, Turns, parts_of, take_turns
from megatron.mixture.distributor import Constant, Distributor

WORD = (1 << 64) - 1


def names(n: int) -> list[str]:
    return [f"domain {k}" for k in range(n)]


def slow_counts(parts: np.ndarray, size: int, n_chunks: int) -> list[list[int]]:
    """The twin: of each chunk, what is due by its end first, then shares begun by their deadlines."""
    done, told = [0] * len(parts), []
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
        told.append(counts)
    return told


def counts_of(turns: Turns, size: int, n_domains: int) -> np.ndarray:
    return np.array([np.bincount(part, minlength=n_domains) for part in turns.domain.reshape(-1, size)])


@pytest.mark.parametrize("size", [1, 7, 64])
def test_counts_are_those_of_the_slow_twin(size) -> None:
    rng = np.random.default_rng(size)
    for n in (1, 2, 9, 40):
        parts = parts_of(rng.dirichlet(np.full(n, 0.3)))
        turns, _ = take_turns(Position.start(n), parts, np.full(n, NO_LIMIT), size, 50, seed=0)
        assert counts_of(turns, size, n).tolist() == slow_counts(parts, size, 50)


def test_every_prefix_of_chunks_has_the_shares_to_within_one_unit() -> None:
    weights = np.random.default_rng(0).dirichlet(np.full(760, 0.2))
    size, n = 512, 400
    turns = Distributor([10**6] * 760, names(760), Constant(weights), size, seed=1).chunks(0, n)
    cumulated = np.cumsum(counts_of(turns, size, 760), axis=0)
    assert np.abs(cumulated - weights * size * np.arange(1, n + 1)[:, None]).max() < 1 + 1e-6


def test_twenty_chunks_anywhere_have_the_shares_to_within_a_percent() -> None:
    weights = np.array([0.7, 0.25, 0.049, 0.001])
    counts = counts_of(Distributor([99] * 4, names(4), Constant(weights), 512, seed=1).chunks(0, 300), 512, 4)
    sums = np.cumsum(np.vstack([np.zeros(4), counts]), axis=0)
    windows = (sums[20:] - sums[:-20]) / (20 * 512)
    assert np.abs(windows - weights).max() < 0.01


def test_a_weight_of_one_in_a_million_has_its_turn_after_a_million_units() -> None:
    weights = np.array([1 - 1e-6, 1e-6])
    mixture = Distributor([100, 100], names(2), Constant(weights), 1000, seed=0)
    assert mixture.position(4000).done[1] in (3, 4)


def test_weights_that_change_at_every_chunk_carry_over_what_is_owed() -> None:
    class Wavering:
        known_to = None

        def at(self, chunk: int) -> tuple[np.ndarray, int]:
            tiny = 0.001 * (1 + chunk % 3)  # 0.002 on average
            return np.array([0.6, 0.4 - tiny, tiny]), chunk + 1

    mixture = Distributor([10**6] * 3, names(3), Wavering(), 10, seed=0)
    assert np.abs(mixture.position(3000).done - 30_000 * np.array([0.6, 0.398, 0.002])).max() <= 2


def test_parts_are_exact_and_refuse_what_is_no_weight() -> None:
    assert parts_of(np.array([3.0, 1.0])).tolist() == [3 << BITS - 2, 1 << BITS - 2]
    assert parts_of(np.array([1.0, 1e-30, 0.0]))[1:].tolist() == [1, 0]
    for wrong in ([0.0, 0.0], [1.0, -1.0], [np.nan, 1.0]):
        with pytest.raises(ValueError, match="weights"):
            parts_of(np.array(wrong))


def round_keys(seed: int, epoch: int) -> list[int]:
    """The twin of what csrc/mixture.cpp makes them of."""

    def mixed(x: int) -> int:
        x &= WORD
        x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & WORD
        x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & WORD
        return x ^ x >> 33

    own = mixed(seed + mixed(epoch))
    return [mixed(own + i) for i in range(1, 7)]


def test_orders_are_keyed_permutations_each_epoch_anew() -> None:
    n_units = np.array([1, 10, 1000])
    orders = Orders(n_units, names(3), seed=5)
    domain = np.repeat(np.arange(3, dtype=np.int32), 2500)
    number = np.tile(np.arange(2500), 3)
    units = orders.units(Turns(domain, number)).reshape(3, 2500)
    again = np.concatenate(
        [orders.units(Turns(domain[i : i + 7], number[i : i + 7])) for i in range(0, 7500, 7)]
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
    plain = Orders(n_units, names(3), seed=5, shuffle=False)
    assert plain.units(Turns(domain, number)).reshape(3, 2500)[1, :12].tolist() == [*range(10), 0, 1]


def test_chunks_are_the_same_from_any_place_for_any_number_of_groups() -> None:
    def fresh() -> Distributor:
        return Distributor([50, 70, 300], names(3), Constant([5, 3, 2]), 16, seed=3)

    whole = fresh().chunks(0, 60)
    for n_groups in (1, 2, 4):
        for group in range(n_groups):
            mixture = fresh()  # another process, asking in an order of its own
            for i in [*range(group, 60, n_groups)][::-1]:
                part = mixture.chunks(i, 1)
                assert np.array_equal(part.domain, whole.domain[i * 16 : i * 16 + 16])
                assert np.array_equal(part.number, whole.number[i * 16 : i * 16 + 16])
    numbers = np.random.default_rng(0).permutation(960)
    taken = fresh().take(numbers)
    assert np.array_equal(taken.domain, whole.domain[numbers])
    assert np.array_equal(taken.number, whole.number[numbers])


def test_a_saved_position_goes_on_without_what_was_before() -> None:
    mixture = Distributor([50, 70], names(2), Constant([5, 3]), 16, seed=3)
    told = mixture.position(41).as_dict()
    again = Distributor([50, 70], names(2), Constant([5, 3]), 16, seed=3)
    again.restore(Position.from_dict(told))
    assert np.array_equal(again.chunks(41, 9).number, mixture.chunks(41, 9).number)
    with pytest.raises(ValueError, match="position of 2 domains"):
        Distributor([1] * 3, names(3), Constant([1] * 3), 1, seed=0).restore(Position.from_dict(told))


def test_dry_domains_stop_repeat_or_leave_their_share_to_the_others() -> None:
    def mixture(dry: str) -> Distributor:
        return Distributor([20, 1000], names(2), Constant([1, 1]), 8, seed=0, dry=dry)

    stopped = mixture("stop").chunks(0, 100)
    assert len(stopped.domain) == 40  # the sixth chunk wants more than the 20
    with pytest.raises(ValueError, match="ends after 40 units"):
        mixture("stop").take(np.array([40]))
    assert mixture("repeat").position(100).done.tolist() == [400, 400]
    spread = mixture("redistribute").chunks(0, 200)
    counts = counts_of(Turns(spread.domain[:1016], spread.number[:1016]), 8, 2)
    assert counts[:5].tolist() == [[4, 4]] * 5
    assert counts[5:].tolist() == [[0, 8]] * (len(counts) - 5)
    for k, n in ((0, 20), (1, 1000)):
        assert spread.number[spread.domain == k].tolist() == list(range(n))


def test_redistributing_over_uneven_domains_gives_every_unit_once() -> None:
    n_units = np.random.default_rng(1).integers(1, 400, size=30)
    turns = Distributor(
        n_units, names(30), Constant(np.arange(1, 31)), 32, seed=0, dry="redistribute"
    ).chunks(0, 10**6)
    for k, n in enumerate(n_units.tolist()):
        assert turns.number[turns.domain == k].tolist() == list(range(n))


def ended_by_enumeration(n_units: list[int], weights: list[float], size: int) -> list[int]:
    """The twin of `stop`: units of each domain, by trying every length of the last chunk."""
    parts = parts_of(np.array(weights))
    position = Position.start(len(n_units))
    while True:
        trials = [take_turns(position, parts, np.array(n_units), n, 1, seed=3) for n in range(1, size + 1)]
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
        mixture = Distributor(n_units, names(n_domains), Constant(weights), size, seed=3, dry="stop")
        turns = mixture.chunks(0, 10**4)
        done = np.bincount(turns.domain, minlength=n_domains)
        assert done.tolist() == ended_by_enumeration(n_units, weights, size)
        for k in range(n_domains):
            assert turns.number[turns.domain == k].tolist() == list(range(done[k]))
        assert np.abs(done - np.array(weights) * done.sum()).max() < 1 + 1e-6
        as_they_are = Distributor(n_units, names(n_domains), Constant(n_units), size, seed=3, dry="stop")
        assert as_they_are.position(10**4).done.tolist() == n_units


@pytest.mark.parametrize("dry", ["stop", "redistribute"])
def test_the_last_shorter_chunk_is_the_same_from_any_place_and_the_last(dry) -> None:
    def fresh() -> Distributor:
        return Distributor([20, 37], names(2), Constant([20, 37]), 8, seed=0, dry=dry)

    whole = fresh().chunks(0, 100)
    assert len(whole.domain) == 57
    for begin in range(12):
        part = fresh().chunks(begin, 3)
        assert part.domain.tolist() == whole.domain[begin * 8 : begin * 8 + 24].tolist()
        assert part.number.tolist() == whole.number[begin * 8 : begin * 8 + 24].tolist()
    again = fresh()
    again.restore(Position.from_dict(fresh().position(8).as_dict()))
    assert len(again.chunks(8, 5).domain) == 0
    assert fresh().n_units_before(7) == 56
    assert fresh().n_units_before(8) == fresh().n_units_before(9) == 57
    assert fresh().take(np.array([56])).number.tolist() == whole.number[56:].tolist()
    with pytest.raises(ValueError, match="ends after 57 units"):
        fresh().take(np.array([56, 57]))
    with pytest.raises(ValueError, match="expected chunks of 16 units"):
        other = Distributor([20, 37], names(2), Constant([1, 1]), 16, seed=0, dry=dry)
        other.restore(fresh().position(3))


def test_an_empty_domain_may_have_no_weight() -> None:
    with pytest.raises(ValueError, match="'domain 1' holds nothing"):
        Distributor([3, 0], names(2), Constant([1, 1]), 1, seed=0)
    turns = Distributor([3, 0], names(2), Constant([1, 0]), 4, seed=0).chunks(0, 5)
    assert not turns.domain.any()
