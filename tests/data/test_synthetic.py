"""Random tokens as data."""

import numpy as np

from megatron.data.batches import Batches
from megatron.data.synthetic import SyntheticSamples


def test_synthetic_samples_depend_on_seed_and_number_and_not_on_ranks() -> None:
    samples = SyntheticSamples(1000, 64, seed=3)
    whole = Batches(samples, 6, 0, 1).batch_at(12).tokens
    shares = [Batches(samples, 6, rank, 3).batch_at(12).tokens for rank in range(3)]
    assert np.array_equal(np.concatenate(shares), whole)
    assert np.array_equal(whole[4], samples[16])
    assert not np.array_equal(samples[16], samples[17])
    assert not np.array_equal(samples[16], SyntheticSamples(1000, 64, seed=4)[16])


def test_synthetic_tokens_are_uniform_and_held_out_ones_differ() -> None:
    samples, held_out = SyntheticSamples(8, 7999, seed=0), SyntheticSamples(8, 7999, seed=0, held_out=True)
    tokens = samples.take(np.arange(10))
    counts = np.bincount(tokens.reshape(-1), minlength=8)
    # 80,000 draws, 10,000 per token: the standard deviation is sqrt(80000 * 1/8 * 7/8) = 94
    assert np.abs(counts - 10_000).max() < 5 * 94
    assert (held_out[0] == samples[0]).mean() < 0.2  # equal with probability 1/8
    assert np.array_equal(SyntheticSamples(8, 7999, seed=9, held_out=True)[5], held_out[5])


def test_unique_synthetic_samples_repeat_in_another_order_in_each_epoch() -> None:
    endless, repeated = SyntheticSamples(1000, 16, seed=3), SyntheticSamples(1000, 16, seed=3, n_unique=20)
    expected = {endless[i].tobytes() for i in range(20)}
    epochs = [[repeated[20 * epoch + i].tobytes() for i in range(20)] for epoch in range(3)]
    assert all(set(epoch) == expected for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
