"""csrc/shuffled.h against numpy's own RandomState, and arguments of csrc/sample_starts.h.

data/test_megatron_order.py compares the results of the latter with a slow twin.
"""

import numpy as np
import pytest

from megatron import _csrc


def get_state(random: np.random.RandomState) -> tuple[np.ndarray, int]:
    state = random.get_state(legacy=False)["state"]
    return state["key"], state["pos"]


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 255, 256, 257, 511, 512, 513, 65536, 65537, 300_001])
def test_ranges_are_shuffled_as_by_numpy_and_the_state_continues(n: int, dtype: type) -> None:
    """Lengths near powers of two, where the mask of the random numbers changes."""
    parts, random = [(0, n, 1), (5, 5 + n, 1), (3, 40, 3)], np.random.RandomState(1234)
    values, key, pos = _csrc.shuffled(*get_state(random), np.array(parts, np.int64), np.dtype(dtype))
    # what Megatron computes: ranges, repeated, shuffled in place
    shuffled = [np.tile(np.arange(begin, end), times).astype(dtype) for begin, end, times in parts]
    for part in shuffled:
        random.shuffle(part)
    expected = np.concatenate(shuffled)
    assert values.dtype == expected.dtype
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(key, get_state(random)[0])
    assert pos == get_state(random)[1]  # so all later numbers are equal too


I32 = np.int32


def test_a_start_past_the_last_token_is_refused() -> None:
    lengths, order = np.array([0, 7, 2], np.uint16), np.array([1, 0, 2, 1], I32)
    assert _csrc.sample_starts(lengths, order, 4, 4).tolist() == [[0, 0], [0, 4], [2, 1], [3, 3]]
    with pytest.raises(ValueError, match="too few tokens for 5 starts every 4 tokens"):
        _csrc.sample_starts(lengths, order, 4, 5)


def test_numbers_that_would_be_read_outside_their_array_are_refused() -> None:
    lengths, order = np.array([7], I32), np.array([0], I32)
    for arguments in (
        (np.array([7, -1], I32), np.array([0, 1], I32), 3, 4),
        (lengths, order + 1, 3, 2),
        (lengths, order - 1, 3, 2),
        (lengths, order, 0, 2),
        (lengths, order, 3, -1),
    ):
        with pytest.raises(ValueError):
            _csrc.sample_starts(*arguments)
