"""Blends: fixed proportions over corpora, each with its own epochs."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from megatron.data.blend import Blend
from megatron.data.indexed import IndexedTokens
from megatron.data.samples import Samples
from megatron.plan.weighted_round_robin import WeightedRoundRobin
from tests.datasets import write_dataset

SIZES = (101, 41, 1001)  # tokens: 10, 4 and 100 samples of 10
WEIGHTS = [Fraction("0.5"), Fraction("0.125"), Fraction("0.375")]


@pytest.fixture
def blend(tmp_path: Path) -> Callable[..., Blend]:
    """A factory for blends of three corpora. Token values encode the corpus and the position in it."""
    for k, size in enumerate(SIZES):
        write_dataset(tmp_path / str(k), [10_000 * k + np.arange(size)], dtype=[np.uint16, np.int32][k % 2])

    def make(shuffle: bool = True, once: bool = False, weights: list[Fraction] = WEIGHTS) -> Blend:
        corpora = [Samples(IndexedTokens(tmp_path / str(k)), 10, 3, shuffle) for k in range(3)]
        return Blend(corpora, WeightedRoundRobin(weights), once)

    return make


def list_sources(samples: np.ndarray) -> np.ndarray:
    return samples[:, 0] // 10_000


def test_each_corpus_has_its_own_epochs(blend: Callable[..., Blend]) -> None:
    samples = blend().take(np.arange(800))
    for k, n in enumerate((10, 4, 100)):
        rows = samples[list_sources(samples) == k]
        assert len(rows) == 800 * WEIGHTS[k]
        starts = (rows[:, 0] % 10_000) // 10
        epochs = [starts[e : e + n] for e in range(0, len(starts) - n + 1, n)]
        assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
        # whole windows, in the order that the corpus would have alone
        alone = blend().corpora[k]
        np.testing.assert_array_equal(rows[:20], np.stack([alone[i] for i in range(20)]))


def test_a_sample_depends_on_its_number_alone(blend: Callable[..., Blend]) -> None:
    numbers = np.array([5000, 0, 17, 1023, 1024, 999_999_999_999, 18])
    together = blend().take(numbers)
    assert together.dtype == np.int64
    fresh = blend()
    for row, number in zip(together[::-1], numbers[::-1], strict=True):
        np.testing.assert_array_equal(row, fresh[int(number)])


def test_held_out_text_ends_before_a_corpus_would_repeat_itself(blend: Callable[..., Blend]) -> None:
    held_out = blend(shuffle=False, once=True)
    # half of the samples are from a corpus of 10 samples, whose 11th would be sample 20 or 21 of the blend
    assert 20 <= held_out.samples_per_epoch <= 21
    samples = held_out.take(np.arange(held_out.samples_per_epoch))
    assert len({int(row[0]) for row in samples}) == len(samples)
    one_more = list_sources(held_out.take(np.arange(held_out.samples_per_epoch + 1)))
    assert (one_more == 0).sum() == 11
    assert blend().samples_per_epoch == 114
