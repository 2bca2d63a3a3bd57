"""csrc/sample_starts.cpp against the ten lines that specify it."""

import numpy as np
import pytest

from megatron import _csrc


def twin(doc_tokens: list[int], seq_len: int, n_samples: int) -> list[tuple[int, int]]:
    """Lay every token out as (document, offset) and take each seq_len-th; a window is seq_len + 1 of them."""
    places = [(document, offset) for document, n in enumerate(doc_tokens) for offset in range(n)]
    starts = places[::seq_len][:n_samples]
    if n_samples and (n_samples - 1) * seq_len + seq_len + 1 > len(places):
        raise ValueError
    return starts


@pytest.mark.parametrize("seed", range(20))
def test_starts_are_those_of_the_twin_with_empty_documents_too(seed: int) -> None:
    rng = np.random.default_rng(seed)
    doc_tokens = rng.integers(0, 9, rng.integers(1, 40)) * (rng.random() < 0.9)
    seq_len = int(rng.integers(1, 12))
    n_samples = max(0, int(doc_tokens.sum()) - 1) // seq_len
    found = _csrc.sample_starts(doc_tokens, seq_len, n_samples)
    assert found.shape == (n_samples, 2)
    assert found.dtype == np.int64
    assert [tuple(row) for row in found.tolist()] == twin(doc_tokens.tolist(), seq_len, n_samples)


def test_more_windows_than_there_are_tokens_are_refused() -> None:
    assert len(_csrc.sample_starts(np.array([7]), 3, 2)) == 2
    with pytest.raises(ValueError, match="7 tokens hold fewer windows of 3"):
        _csrc.sample_starts(np.array([7]), 3, 3)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((np.array([7], dtype=np.int32), 3, 2), TypeError),
        ((np.array([7.0]), 3, 2), TypeError),
        ((np.array([[7]]), 3, 2), ValueError),
        ((np.array([7, -1]), 3, 2), ValueError),
        ((np.array([7]), 0, 2), ValueError),
        ((np.array([7]), 3, -1), ValueError),
    ],
)
def test_other_types_and_impossible_numbers_are_refused_and_not_converted(
    arguments: tuple, error: type
) -> None:
    with pytest.raises(error):
        _csrc.sample_starts(*arguments)
