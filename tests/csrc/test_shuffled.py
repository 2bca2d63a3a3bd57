"""csrc/shuffled.cpp against numpy's own RandomState."""

import numpy as np
import pytest

from megatron import _csrc


def shuffle_ranges(
    random: np.random.RandomState, parts: list[tuple[int, int, int]], dtype: type
) -> np.ndarray:
    """Return what Megatron computes: ranges, repeated, shuffled in place."""
    shuffled = [np.tile(np.arange(begin, end), times).astype(dtype) for begin, end, times in parts]
    for part in shuffled:
        random.shuffle(part)
    return np.concatenate([np.empty(0, dtype), *shuffled])


def get_state(random: np.random.RandomState) -> tuple[np.ndarray, int]:
    state = random.get_state(legacy=False)["state"]
    return state["key"], state["pos"]


def check_shuffle(seed: int, parts: list[tuple[int, int, int]], dtype: type) -> None:
    random = np.random.RandomState(seed)
    values, key, pos = _csrc.shuffled(
        *get_state(random), np.array(parts, np.int64).reshape(-1, 3), np.dtype(dtype)
    )
    expected = shuffle_ranges(random, parts, dtype)
    assert values.dtype == expected.dtype
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(key, get_state(random)[0])
    assert pos == get_state(random)[1]  # so all later numbers are equal too


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 255, 256, 257, 511, 512, 513, 65536, 65537, 300_001])
def test_ranges_are_shuffled_as_by_numpy_and_the_state_continues(n: int, dtype: type) -> None:
    """Lengths near powers of two, where the mask of the random numbers changes."""
    check_shuffle(1234, [(0, n, 1), (5, 5 + n, 1), (3, 40, 3)], dtype)


def test_the_words_of_a_state_are_not_modified() -> None:
    key, pos = get_state(np.random.RandomState(7))
    before = key.copy()
    _csrc.shuffled(key, pos, np.array([(0, 5000, 1)]), np.dtype(np.int32))
    np.testing.assert_array_equal(key, before)


KEY = np.zeros(624, np.uint32)
PARTS = np.array([(0, 3, 1)])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((KEY.astype(np.int64), 0, PARTS, np.dtype(np.int32)), TypeError),
        ((KEY[:-1], 0, PARTS, np.dtype(np.int32)), ValueError),
        ((KEY, 625, PARTS, np.dtype(np.int32)), ValueError),
        ((KEY, -1, PARTS, np.dtype(np.int32)), ValueError),
        ((KEY, 0, PARTS.astype(np.int32), np.dtype(np.int32)), TypeError),
        ((KEY, 0, PARTS[0], np.dtype(np.int32)), ValueError),
        ((KEY, 0, PARTS, np.dtype(np.int16)), ValueError),
        ((KEY, 0, PARTS, np.dtype(np.float32)), ValueError),
        ((KEY, 0, PARTS, np.dtype(np.uint64)), ValueError),
        ((KEY, 0, np.array([(-1, 3, 1)]), np.dtype(np.int32)), ValueError),
        ((KEY, 0, np.array([(3, 0, 1)]), np.dtype(np.int32)), ValueError),
        ((KEY, 0, np.array([(0, 3, -1)]), np.dtype(np.int32)), ValueError),
        ((KEY, 0, np.array([(2**31, 2**31 + 1, 1)]), np.dtype(np.int32)), ValueError),
        ((KEY, 0, np.array([(2**32, 2**32 + 1, 1)]), np.dtype(np.uint32)), ValueError),
        ((KEY, 0, np.array([(0, 2**20, 2**13)]), np.dtype(np.int32)), ValueError),
        ((KEY, 0, np.array([(0, 2**40, 2**40)]), np.dtype(np.int64)), ValueError),
    ],
)
def test_other_types_and_impossible_ranges_are_refused_and_not_converted(
    arguments: tuple, error: type
) -> None:
    with pytest.raises(error):
        _csrc.shuffled(*arguments)
