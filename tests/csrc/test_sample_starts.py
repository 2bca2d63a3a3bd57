"""Arguments of csrc/sample_starts.cpp; data/test_megatron_order.py compares its results with a slow twin."""

import numpy as np
import pytest

from megatron import _csrc

I32 = np.int32


def test_a_start_past_the_last_token_is_refused() -> None:
    lengths, order = np.array([0, 7, 2], np.uint16), np.array([1, 0, 2, 1], I32)
    assert _csrc.sample_starts(lengths, order, 4, 4).tolist() == [[0, 0], [0, 4], [2, 1], [3, 3]]
    with pytest.raises(ValueError, match="too few tokens for 5 starts every 4 tokens"):
        _csrc.sample_starts(lengths, order, 4, 5)


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
