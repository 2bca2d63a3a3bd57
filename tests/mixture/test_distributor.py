"""Chunks: exact shares, true epochs without a lost document, and the same result from every position."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.mixture.distributor import WHOLE, ChunkUnits, Distributor, Position, UnitOrder, quantize_weights
from megatron.mixture.weights import DomainWeights


def make_distributor(
    n_units: list[int], weights: Any, size: int, dry: str = "repeat", seed: int = 0
) -> Distributor:
    shares = weights if hasattr(weights, "weights_at") else DomainWeights([(0, np.asarray(weights))])
    return Distributor(n_units, [f"domain {k}" for k in range(len(n_units))], shares, size, seed, dry)


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


def count_units(units: ChunkUnits, size: int, n_domains: int) -> np.ndarray:
    return np.array([np.bincount(part, minlength=n_domains) for part in units.domain.reshape(-1, size)])


@pytest.mark.parametrize("size", [1, 7, 64])
def test_counts_equal_the_slow_twin(size) -> None:
    rng = np.random.default_rng(size)
    for n in (1, 2, 9, 40):
        weights = rng.dirichlet(np.full(n, 0.3))
        units = make_distributor([10**6] * n, weights, size).schedule_chunks(0, 50)
        assert count_units(units, size, n).tolist() == slow_counts(quantize_weights(weights), size, 50)


def test_every_prefix_of_chunks_has_the_exact_shares_to_within_one_unit() -> None:
    weights = np.random.default_rng(0).dirichlet(np.full(760, 0.2))
    units = make_distributor([10**6] * 760, weights, 512, seed=1).schedule_chunks(0, 400)
    cumulated = np.cumsum(count_units(units, 512, 760), axis=0)
    assert np.abs(cumulated - weights * 512 * np.arange(1, 401)[:, None]).max() < 1 + 1e-6


def test_weights_that_change_at_every_chunk_carry_over_the_remainder() -> None:
    class Wavering:
        known_to = None

        def weights_at(self, chunk: int) -> tuple[np.ndarray, int]:
            tiny = 0.001 * (1 + chunk % 3)  # 0.002 on average
            return np.array([0.6, 0.4 - tiny, tiny]), chunk + 1

    mixture = make_distributor([10**6] * 3, Wavering(), 10)
    assert np.abs(mixture.find_position(3000).done - 30_000 * np.array([0.6, 0.398, 0.002])).max() <= 2


def test_a_linear_schedule_gives_the_mean_shares() -> None:
    schedule = DomainWeights([(0, np.array([1.0, 0.0])), (100, np.array([0.0, 1.0]))], linear=True)
    done = make_distributor([10**6] * 2, schedule, 20).find_position(150).done
    # the mean of the first 100 chunks is 1/2 + 1/200
    assert done.tolist() == pytest.approx([1010, 1990], abs=2)


def test_quantized_weights_are_exact_and_invalid_weights_are_refused() -> None:
    assert quantize_weights(np.array([3.0, 1.0])).tolist() == [3 << 38, 1 << 38]
    assert quantize_weights(np.array([1.0, 1e-30, 0.0]))[1:].tolist() == [1, 0]
    for wrong in ([0.0, 0.0], [1.0, -1.0], [np.nan, 1.0]):
        with pytest.raises(ValueError, match="weights"):
            quantize_weights(np.array(wrong))


MIXTURES = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 60), min_size=n, max_size=n),
        st.lists(st.floats(0.01, 1), min_size=n, max_size=n),
        st.integers(1, 17),
    )
)


@settings(max_examples=150, deadline=None)
@given(MIXTURES, st.integers(0, 2**63))
def test_an_epoch_of_redistribute_contains_every_document_once(mixture, seed) -> None:
    n_units, weights, size = mixture
    mixture = make_distributor(n_units, weights, size, "redistribute", seed)
    units = mixture.schedule_chunks(0, sum(n_units) + 5)
    pairs = sorted(zip(units.domain.tolist(), units.number.tolist(), strict=True))
    assert pairs == [(k, i) for k, n in enumerate(n_units) for i in range(n)]


@settings(max_examples=150, deadline=None)
@given(
    MIXTURES,
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=5),
    st.sampled_from(["repeat", "stop", "redistribute"]),
)
def test_restarts_on_any_numbers_of_groups_read_the_chunks_of_one_group(mixture, restarts, dry) -> None:
    n_units, weights, size = mixture
    whole = make_distributor(n_units, weights, size, dry)
    state, read, position = 0, [], None
    for n_groups, n_rounds in restarts:
        for _ in range(n_rounds):
            for group in range(n_groups):  # each group is another process, with the saved position only
                process = make_distributor(n_units, weights, size, dry)
                read.append(process.schedule_chunks(state + group, 1, position))
            state += n_groups
        position = Position.from_dict(whole.find_position(state, position).as_dict())
    expected = whole.schedule_chunks(0, state)
    empty = whole.schedule_chunks(0, 0)
    columns = zip(*((part.domain, part.number) for part in (empty, *read)), strict=True)
    units = ChunkUnits(*map(np.concatenate, columns))
    assert units.domain.tolist() == expected.domain.tolist()
    assert units.number.tolist() == expected.number.tolist()


def test_numbers_of_a_domain_are_consecutive_and_an_epoch_is_a_permutation() -> None:
    mixture = make_distributor([37, 11], [3.0, 1.0], 8)
    units = mixture.schedule_chunks(0, 60)
    for k in range(2):
        assert units.number[units.domain == k].tolist() == list(range(int((units.domain == k).sum())))
    for epoch in range(3):
        numbers = np.arange(37) + 37 * epoch
        order = mixture.orders.lookup_units(ChunkUnits(np.zeros(37, dtype=np.int32), numbers))
        assert sorted(order.tolist()) == list(range(37))


def test_the_order_of_a_domain_depends_on_its_name_and_the_seed_only() -> None:
    def order(sizes: list[int], names: list[str], seed: int, domain: int, **options: Any) -> list[int]:
        units = ChunkUnits(np.full(60, domain, np.int32), np.arange(60))
        return UnitOrder(np.array(sizes), names, seed, **options).lookup_units(units).tolist()

    alone = order([50], ["b"], 7, 0)
    plain = [*range(50), *range(10)]
    assert alone == order([9, 50], ["a", "b"], 7, 1) != plain
    assert order([50], ["b"], 8, 0) != alone
    assert order([50], ["b"], 7, 0, shuffle=False) == plain


def test_positions_of_other_mixtures_are_refused() -> None:
    mixture = make_distributor([100, 100], [0.5, 0.5], 4)
    for change, reason in (
        ({"chunk": -1}, "expected chunk, done and lag"),
        ({"done": "x"}, "expected chunk, done and lag"),
        ({"done": [4, 4, 4]}, "the mixture has 2"),
        ({"chunk": 9}, "expected chunks of 4 units"),
        ({"lag": [1, 1]}, "expected chunks of 4 units"),
    ):
        with pytest.raises(ValueError, match=reason):
            mixture.restore(Position.from_dict(mixture.find_position(2).as_dict() | change))


def test_stop_ends_before_the_first_chunk_with_a_missing_document_and_get_units_says_so() -> None:
    mixture = make_distributor([5, 100], [0.5, 0.5], 4, "stop")
    units = mixture.schedule_chunks(0, 100)
    # the sixth unit of domain 0 would be in the third chunk of 4
    assert len(units.domain) == 8 and (units.domain == 0).sum() == 4
    with pytest.raises(ValueError, match="the mixture ends after .* units, where a domain is exhausted"):
        mixture.get_units(np.array([40]))
    with pytest.raises(ValueError, match="domain 'domain 0' has no units"):
        make_distributor([0, 5], [0.5, 0.5], 4)
