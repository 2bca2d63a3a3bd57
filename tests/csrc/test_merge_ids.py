"""Ids of merges, from a vocabulary, or from the order of the merges alone."""

import pytest

from megatron import _csrc


def test_pieces_have_the_first_ids_and_each_merge_defines_the_next() -> None:
    rows = _csrc.ranked_merge_ids("a\nb\nĠ", "Ġ a\na b\nĠa b\n")
    assert rows.tolist() == [[2, 0, 3], [0, 1, 4], [3, 1, 5]]


def test_both_ways_to_read_merges_agree() -> None:
    merges = ["x y", "xy xy", "y x"]
    vocabulary = {"x": 0, "y": 1, "xy": 2, "xyxy": 3, "yx": 4}
    from_order = _csrc.ranked_merge_ids("x\ny", "\n".join(merges))
    assert from_order.tolist() == _csrc.merge_ids(vocabulary, merges).tolist()


def test_an_undefined_piece_is_refused_by_both() -> None:
    with pytest.raises(KeyError, match="c"):
        _csrc.ranked_merge_ids("a\nb", "a c")
    with pytest.raises(KeyError, match="c"):
        _csrc.merge_ids({"a": 0, "b": 1}, ["a c"])


def test_a_merge_of_one_piece_is_refused() -> None:
    with pytest.raises(ValueError, match="got ab, expected two pieces"):
        _csrc.ranked_merge_ids("a\nb", "ab")
