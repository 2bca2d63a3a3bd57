"""csrc/sample_starts.cpp against a two-line specification."""

import numpy as np
import pytest

from megatron import _csrc

I32 = np.int32


def list_starts(lengths: list[int], order: list[int], stride: int, n_rows: int) -> list[tuple[int, int]]:
    """List every token as (place, offset), and return each stride-th."""
    tokens = [(place, offset) for place, sequence in enumerate(order) for offset in range(lengths[sequence])]
    return tokens[::stride][:n_rows]


@pytest.mark.parametrize("dtype", [np.int32, np.uint16])
@pytest.mark.parametrize("seed", range(30))
def test_starts_equal_the_specification_with_empty_sequences_too(seed: int, dtype: type) -> None:
    rng = np.random.default_rng(seed)
    lengths = (rng.integers(0, 9, rng.integers(1, 40)) * (rng.random() < 0.9)).astype(dtype)
    order = rng.integers(0, len(lengths), rng.integers(0, 200)).astype(I32)
    stride = int(rng.integers(1, 12))
    n_rows = -(-int(lengths[order].sum()) // stride)
    starts = _csrc.sample_starts(lengths, order, stride, n_rows)
    assert starts.shape == (n_rows, 2)
    assert starts.dtype == np.int32
    assert [tuple(row) for row in starts.tolist()] == list_starts(
        lengths.tolist(), order.tolist(), stride, n_rows
    )
    with pytest.raises(ValueError, match=f"too few tokens for {n_rows + 1} starts every {stride} tokens"):
        _csrc.sample_starts(lengths, order, stride, n_rows + 1)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((np.array([7], np.int64), np.array([0], I32), 3, 2), TypeError),
        ((np.array([7], I32), np.array([0]), 3, 2), TypeError),
        ((np.array([7, 7, 7], I32)[::2], np.array([0], I32), 3, 2), TypeError),
        ((np.array([7], np.int16), np.array([0], I32), 3, 2), TypeError),
        ((np.array([[7]], I32), np.array([0], I32), 3, 2), ValueError),
        ((np.array([7, -1], I32), np.array([0, 1], I32), 3, 4), ValueError),
        ((np.array([7], I32), np.array([1], I32), 3, 2), ValueError),
        ((np.array([7], I32), np.array([-1], I32), 3, 2), ValueError),
        ((np.array([7], I32), np.array([0], I32), 0, 2), ValueError),
        ((np.array([7], I32), np.array([0], I32), 3, -1), ValueError),
    ],
)
def test_other_types_and_impossible_numbers_are_refused_and_not_converted(
    arguments: tuple, error: type
) -> None:
    with pytest.raises(error):
        _csrc.sample_starts(*arguments)
