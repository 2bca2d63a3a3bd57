"""Megatron's order against a direct implementation of its algorithm in numpy."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed import IndexedTokens
from megatron.data.megatron_order import MegatronOrder, MegatronSamples, split_epochs
from tests.datasets import write_dataset


def build_indices(
    lengths: np.ndarray, seq_len: int, seed: int, n_samples: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return document, sample and shuffle index, computed step by step."""
    per_epoch, n_epochs = int(lengths.sum()), 1
    while (n_epochs * per_epoch - 1) // seq_len < n_samples:
        n_epochs += 1
    before_last = ((n_epochs - 1) * per_epoch - 1) // seq_len
    in_last, whole = n_samples - before_last, (per_epoch - 1) // seq_len
    separate = n_epochs > 1 and in_last < int(0.80 * whole)
    random = np.random.RandomState(seed)

    def shuffled(begin: int, end: int, times: int, dtype: type) -> np.ndarray:
        numbers = np.array(list(range(begin, end)) * times, dtype=dtype)
        random.shuffle(numbers)
        return numbers

    n = len(lengths)
    groups = [n_epochs - 1, 1] if separate else [n_epochs]
    documents = np.concatenate([shuffled(0, n, times, np.int32) for times in groups])
    n_windows = (n_epochs * per_epoch - 1) // seq_len
    place = offset = 0
    starts = [(0, 0)]
    for _ in range(n_windows):
        left = seq_len + 1  # tokens still needed for this window; its last token is the first of the next
        while (available := int(lengths[documents[place]]) - offset) < left:
            left, place, offset = left - available, place + 1, 0
        offset += left - 1
        starts.append((place, offset))
    cuts = [0, before_last, n_windows] if separate else [0, n_windows]
    order = [shuffled(a, b, 1, np.uint32) for a, b in zip(cuts, cuts[1:], strict=False)]
    return documents, np.array(starts, dtype=np.int32), np.concatenate(order)


def read_sample(
    documents: list[np.ndarray], indices: tuple[np.ndarray, np.ndarray, np.ndarray], i: int
) -> list[int]:
    """Return sample i as Megatron assembles it."""
    order, starts, shuffle = indices
    (first, begin), (last, end) = starts[shuffle[i]].tolist(), starts[shuffle[i] + 1].tolist()
    places = [documents[order[place]].tolist() for place in range(first, last + 1)]
    places[-1] = places[-1][: end + 1]
    places[0] = places[0][begin:]
    return sum(places, [])


def random_shape(seed: int) -> tuple[np.ndarray, int, int]:
    """(lengths with empty ones, seq_len, n_samples): under one epoch to seven."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, rng.integers(2, 60), rng.integers(1, 80)).astype(np.int32)
    lengths[rng.random(len(lengths)) < 0.2] = 0
    lengths[rng.integers(len(lengths))] += 20
    seq_len = int(rng.integers(1, 20))
    whole = int(lengths.sum() - 1) // seq_len
    return lengths, seq_len, int(rng.integers(1, max(2, 7 * whole)))


def test_samples_are_the_tokens_that_megatron_reads(tmp_path: Path) -> None:
    kinds = Counter()
    for seed in range(200):
        lengths, seq_len, n_samples = random_shape(seed)
        documents = np.split(np.arange(lengths.sum()), np.cumsum(lengths)[:-1])
        tokens = IndexedTokens(write_dataset(tmp_path / str(seed), documents))
        samples = MegatronSamples(tokens, seq_len, seed, n_samples)
        indices = build_indices(lengths, seq_len, seed, n_samples)
        n_windows = len(indices[2])
        assert samples.indices.n_windows == n_windows >= n_samples
        numbers = np.linspace(0, n_windows - 1, 30).astype(int)
        assert samples.take(numbers).tolist() == [read_sample(documents, indices, i) for i in numbers]
        assert samples.samples_per_epoch == (lengths.sum() - 1) // seq_len
        n_epochs, n_before = split_epochs(int(lengths.sum()), seq_len, n_samples)
        kinds[n_epochs > 1, n_before is None] += 1
    # the shapes have one epoch, and several with a separate last one and without
    assert len(kinds) == 3 and min(kinds.values()) > 10


def test_requests_that_megatron_cannot_serve_are_refused(tmp_path: Path) -> None:
    lengths = np.full(3, 20, np.int32)
    with pytest.raises(ValueError, match="seed: got -1, expected 0 to"):
        MegatronOrder(lengths, 4, -1, 5)
    with pytest.raises(ValueError, match="supports 2\\^32 places. Request fewer samples"):
        MegatronOrder(lengths, 4, 0, 10**11)
    tokens = IndexedTokens(write_dataset(tmp_path / "pair", [np.arange(20)]))
    with pytest.raises(ValueError, match="got 20 tokens, expected 21 or more"):
        MegatronSamples(tokens, 20, 0, 5)
    samples = MegatronSamples(tokens, 4, 0, 4)
    with pytest.raises(IndexError, match="out of bounds"):
        samples[4]
