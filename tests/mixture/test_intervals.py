"""Intervals of domains against a slow twin, for any order and batches of documents."""

import tracemalloc

import numpy as np
import pyarrow
import pytest

from megatron import _csrc
from megatron.mixture.catalog.intervals import TOKENS_COLUMN, GatheredDocuments, _encode_batch_domains


def slow_intervals(domain: list[int], file: list[int], row: list[int]) -> list[tuple[int, int, int, int]]:
    """Return the intervals of documents in any order."""
    intervals: list[list[int]] = []
    for d, f, r in sorted(zip(domain, file, row, strict=True)):
        if intervals and intervals[-1][:2] == [d, f] and intervals[-1][3] == r:
            intervals[-1][3] += 1
        else:
            intervals.append([d, f, r, r + 1])
    return [(d, f, begin, end) for d, f, begin, end in intervals]


def make_documents(rng: np.random.Generator, n: int, n_domains: int) -> list[np.ndarray]:
    """Return domain, file, row: documents with gaps, in order; domains in runs."""
    places = np.sort(rng.choice(3 * n, n, replace=False))
    domain = np.repeat(rng.integers(n_domains, size=n), rng.integers(1, 4, size=n))[:n]
    return [a.astype(np.int32) for a in (domain, places // n, places % n)]


@pytest.mark.parametrize("n_domains", [1, 3, 40])
def test_intervals_equal_the_slow_twin(n_domains: int) -> None:
    rng = np.random.default_rng(n_domains)
    for n in (1, 2, 17, 500):
        domain, file, row = make_documents(rng, n, n_domains)
        columns = _csrc.domain_intervals(domain, file, row, n_domains)
        assert [a.dtype for a in columns] == [np.int32, np.int32, np.int64, np.int64]
        intervals = list(zip(*(a.tolist() for a in columns), strict=True))
        assert intervals == slow_intervals(domain.tolist(), file.tolist(), row.tolist())


def test_numbers_out_of_range_are_refused() -> None:
    zero = np.zeros(1, dtype=np.int32)
    for domain, file, row in (
        (zero + 1, zero, zero),
        (zero - 1, zero, zero),
        (zero, zero - 1, zero),
        (zero, zero, zero - 1),
    ):
        with pytest.raises(ValueError, match="out of range"):
            _csrc.domain_intervals(domain, file, row, 1)
    with pytest.raises(ValueError, match="expected as many as domains"):
        _csrc.domain_intervals(zero, np.zeros(2, dtype=np.int32), zero, 1)


@pytest.mark.parametrize("rows_at_once", [1, 7, 1000])
@pytest.mark.parametrize("in_order", [True, False])
def test_batches_and_their_order_do_not_change_the_intervals(rows_at_once: int, in_order: bool) -> None:
    rng = np.random.default_rng(5)
    domain, file, row = make_documents(rng, 300, 6)
    names = [None, "b", "a", "", "z", "c"]  # by their values: "", a, b, c, z, none
    order = np.arange(300) if in_order else rng.permutation(300)
    tokens = rng.integers(1, 2**40, size=300)
    table = pyarrow.table({
        "file": file[order] + 10, "row": row[order].astype(np.int64),
        "of": [names[k] for k in domain[order]], TOKENS_COLUMN: tokens[order],
    })  # fmt: skip
    gathered = GatheredDocuments.from_batches(table.to_batches(max_chunksize=rows_at_once), 400, ("of",))
    values, sums, used, intervals = gathered.compute_intervals()
    assert values == (("",), ("a",), ("b",), ("c",), ("z",), (None,))
    place = np.array([5, 2, 1, 0, 4, 3])[domain]
    assert sums == [int(tokens[place == k].sum()) for k in range(6)]
    assert used == [10, 11, 12]
    rows = list(zip(*(intervals.column(i).to_pylist() for i in range(4)), strict=True))
    assert rows == slow_intervals(place.tolist(), file.tolist(), row.tolist())


def test_two_properties_with_as_many_values_as_documents_need_no_square_of_memory() -> None:
    n = 1 << 14
    batch = pyarrow.record_batch(
        {"a": [f"a{i}" for i in range(n)], "b": [f"b{i % (n // 2)}" for i in range(n)]}
    )
    tracemalloc.start()
    codes, values = _encode_batch_domains(batch, ("a", "b"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [values[code] for code in codes.tolist()] == [(f"a{i}", f"b{i % (n // 2)}") for i in range(n)]
    assert peak < 50e6, "counters of every pair of values would be 1 GB"
