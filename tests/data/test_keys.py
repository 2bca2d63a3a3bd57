"""Keys of random numbers are equal only for equal tuples of numbers."""

import itertools

import numpy as np
import pytest

from megatron.data.keys import SAMPLE_ORDER, key_words, seed_sequence

LOW, HIGH = SAMPLE_ORDER % 2**32, SAMPLE_ORDER >> 32
VALUES = (0, 1, 2, 3, 5, LOW, HIGH, 2**32 - 1, 2**32, 2**32 + 5, 2**64 - 1, 2**64, -1, -(2**32), SAMPLE_ORDER)


def test_no_two_keys_have_the_same_padded_words() -> None:
    keys = [key for n in range(5) for key in itertools.product(VALUES, repeat=n)]
    words = [key_words(*key) for key in keys]
    padded = {tuple(key + [0] * (4 - len(key))) for key in words}  # as numpy does before it mixes them
    assert len(padded) == len(keys) > 50_000
    assert all(0 <= word < 2**32 for key in words for word in key)


@pytest.mark.parametrize("key", [(0, 0, 0), (1, 2, 3), (2**32 - 1, 9, 2**32 - 1), (SAMPLE_ORDER, 7, 3)])
def test_a_key_of_three_small_numbers_gives_the_seed_of_numpy(key: tuple[int, ...]) -> None:
    ours, numpys = seed_sequence(*key), np.random.SeedSequence(list(key))
    np.testing.assert_array_equal(ours.generate_state(8), numpys.generate_state(8))


def test_keys_that_numpy_maps_to_one_seed_give_different_numbers() -> None:
    for first, second in (((0, 1, 2), (0, 1, 2, 0)), ((2**32 + 5, 0, 3), (5, 1, 0, 3)), ((7,), (7, 0))):
        same = [np.random.SeedSequence(list(key)).generate_state(4).tolist() for key in (first, second)]
        assert same[0] == same[1]
        ours = [seed_sequence(*key).generate_state(4).tolist() for key in (first, second)]
        assert ours[0] != ours[1]
