"""Ids of merges, from a vocabulary, or from the order of the merges alone."""

import json

import pytest

from megatron import _csrc


def read_model(vocabulary: dict[str, int], merges: list) -> "_csrc.TokenizerModel":
    content = json.dumps({"model": {"type": "BPE", "vocab": vocabulary, "merges": merges}})
    return _csrc.TokenizerModel(content.encode())


def test_both_ways_to_read_merges_agree() -> None:
    rows = _csrc.ranked_merge_ids("a\nb\n\u0120", "\u0120 a\na b\n\u0120a b\n")
    assert rows.tolist() == [[2, 0, 3], [0, 1, 4], [3, 1, 5]]  # each merge defines the next id
    merges, vocabulary = ["x y", "xy xy", "y x"], {"x": 0, "y": 1, "xy": 2, "xyxy": 3, "yx": 4}
    from_order = _csrc.ranked_merge_ids("x\ny", "\n".join(merges))
    assert from_order.tolist() == read_model(vocabulary, merges).merge_ids().tolist()
    with pytest.raises(KeyError, match="c"):
        _csrc.ranked_merge_ids("a\nb", "a c")
    with pytest.raises(ValueError, match="pieces outside the vocabulary"):
        read_model({"a": 0, "b": 1}, ["a c"])
    with pytest.raises(ValueError, match="got ab, expected two pieces"):
        _csrc.ranked_merge_ids("a\nb", "ab")


def test_pieces_with_escapes_are_written_as_the_library_writes_them() -> None:
    pieces = {'"': 3, "\\": 1, "\n": 0, "\x01": 2, "\x7f": 5, "\U0001f642": 4, "/": 6, "a": 8, "\u2028": 7}
    for ascii_only in (True, False):
        content = json.dumps(
            {"model": {"merges": ["a a"][:0], "vocab": pieces, "x": [{"vocab": "}"}, "\\"]}, "y": -1.5e3},
            ensure_ascii=ascii_only,
            indent=ascii_only or None,
        )
        model = _csrc.TokenizerModel(content.encode())
        ordered = dict(sorted(pieces.items(), key=lambda item: item[1]))
        written = json.dumps(ordered, ensure_ascii=False, separators=(",", ":"))
        assert model.vocab_json().decode() == written
        rest = json.loads(model.settings)
        assert rest == {"model": {"merges": [], "vocab": {}, "x": [{"vocab": "}"}, "\\"]}, "y": -1500.0}


REFUSED = [
    b"",
    b"[]",
    b"{",
    b'{"model":{}}',
    b'{"model":{"vocab":{"a":0},"merges":[]}',
    b'{"model":{"vocab":{"a":0},"merges":[]}} x',
    b'{"model":{"vocab":{"a":0,"a":1},"merges":[]}}',
    b'{"model":{"vocab":{"a":0,"b":0},"merges":[]}}',
    b'{"model":{"vocab":{"a":0},"vocab":{},"merges":[]}}',
    b'{"model":{"vocab":{"a":-1},"merges":[]}}',
    b'{"model":{"vocab":{"a":1.5},"merges":[]}}',
    b'{"model":{"vocab":{"a":4294967296},"merges":[]}}',
    b'{"model":{"vocab":{"a":0},"merges":["a  a"]}}',
    b'{"model":{"vocab":{"a":0,"aa":1},"merges":["a a","a a"]}}',
    b'{"model":{"vocab":{"\xff":0},"merges":[]}}',
    b'{"model":{"vocab":{"\\ud800":0},"merges":[]}}',
    b'{"model":{"vocab":{"\\u00g0":0},"merges":[]}}',
    b'{"model":{"vocab":["a"],"merges":[]}}',
]


def test_other_files_are_refused() -> None:
    for content in REFUSED:
        with pytest.raises(ValueError, match=r"tokenizer\.json: got "):
            _csrc.TokenizerModel(content)
