"""Order of samples: true epochs, a pure function of the sample number; its random keys; synthetic tokens."""

import itertools
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megatron.data.batches import Batches
from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.keys import SAMPLE_ORDER, key_words, seed_sequence
from megatron.data.permutation import Permutation, ShuffledEpochs
from megatron.data.samples import Samples
from megatron.data.synthetic import SyntheticSamples
from tests.datasets import write_dataset

N_TOKENS = 1003


@pytest.fixture
def tokens(tmp_path: Path) -> IndexedTokens:
    """Tokens 0, 1, 2, ... in documents of many lengths: the first token of a window is its position."""
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.integers(0, N_TOKENS, 60))
    return IndexedTokens(write_dataset(tmp_path / "count", np.split(np.arange(N_TOKENS), cuts)))


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 65, 1000, 4097])
def test_the_keyed_permutation_is_a_permutation(n: int) -> None:
    positions = Permutation(n, [3, 1])(np.arange(n))
    assert sorted(positions.tolist()) == list(range(n))
    assert [int(Permutation(n, [3, 1])(np.array(i))) for i in range(min(n, 70))] == positions.tolist()[:70]


@pytest.mark.parametrize("seq_len", [1, 7, 100])
def test_each_epoch_has_every_window_exactly_once(tokens: IndexedTokens, seq_len: int) -> None:
    samples = Samples(tokens, seq_len, seed=5)
    n = samples.samples_per_epoch
    assert n == (N_TOKENS - 1) // seq_len
    rows = samples.take(np.arange(3 * n))
    # a sample is a whole window in the text
    assert (rows == rows[:, :1] + np.arange(seq_len + 1)).all()
    epochs = (rows[:, 0] // seq_len).reshape(3, n).tolist()
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_sample_depends_on_its_number_alone(tokens: IndexedTokens) -> None:
    numbers = np.array([0, 99, 100, 101, 399, 400, 7, 123_456_789])  # 100 samples per epoch
    for shuffle in (True, False):
        together = Samples(tokens, 10, 5, shuffle).take(numbers)
        assert together.dtype == np.int64
        other = Samples(tokens, 10, 5, shuffle)
        np.testing.assert_array_equal(together[::-1], np.stack([other[int(i)] for i in numbers[::-1]]))
    assert (Samples(tokens, 10, seed=6).take(numbers) != Samples(tokens, 10, seed=5).take(numbers)).any()


def test_samples_are_uniform_over_documents_at_every_position_of_an_epoch(tmp_path: Path) -> None:
    documents = [*([i] * 4 + [10] for i in range(10)), [10]]  # one window of 5 per document
    tokens = IndexedTokens(write_dataset(tmp_path / "ten", documents))
    # [position in the epoch, document]: 2,000 seeds, 200 expected in each cell
    counts, numbers = np.zeros((10, 10)), np.arange(10)
    for seed in range(2000):
        counts[numbers, Samples(tokens, 5, seed).take(numbers)[:, 0]] += 1
    # chi-squared with 81 degrees of freedom: mean 81, standard deviation sqrt(2 * 81) = 12.7
    assert abs(((counts - 200) ** 2 / 200).sum() - 81) < 5 * 12.7


def test_memory_grows_neither_with_documents_nor_with_samples_nor_with_epochs(tmp_path: Path) -> None:
    n_documents = 500_000
    with IndexedWriter(tmp_path / "many", np.dtype(np.uint16)) as writer:
        writer.add_documents(np.zeros(2 * n_documents, np.uint16), np.full(n_documents, 2))
    tracemalloc.start()
    samples = Samples(IndexedTokens(tmp_path / "many"), 1, seed=5)
    for epoch in range(100):
        samples[epoch * samples.samples_per_epoch]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert samples.samples_per_epoch == 2 * n_documents - 1
    assert peak < 1_000_000  # int32 lengths alone would need twice that


@pytest.mark.parametrize("n", [4**9 - 1, 4**9, 4**9 + 1])  # the network's domain is exactly n, and about 4 n
def test_a_very_late_epoch_is_a_permutation_too(n: int) -> None:
    order = ShuffledEpochs(n, [7])
    first, far = (order(np.arange(e * n, (e + 1) * n)) for e in (0, 10**6))
    for windows in (first, far):
        assert np.array_equal(np.bincount(windows, minlength=n), np.ones(n))
    # two independent orders agree in one position on average
    assert (first == far).sum() < 10


def test_without_shuffling_samples_come_in_file_order(tokens: IndexedTokens) -> None:
    samples = Samples(tokens, 10, seed=5, shuffle=False)
    assert samples.take(np.arange(100))[:, 0].tolist() == list(range(0, 1000, 10))


def test_a_corpus_shorter_than_a_window_is_refused(tokens: IndexedTokens) -> None:
    with pytest.raises(ValueError, match="got 1,003 tokens, expected 1004 or more"):
        Samples(tokens, 1003, seed=0)
    with pytest.raises(ValueError, match="expected a multiple of 3 ranks"):
        Batches(Samples(tokens, 10, 0), 8, 0, 3)


LOW, HIGH = SAMPLE_ORDER % 2**32, SAMPLE_ORDER >> 32
VALUES = (0, 1, 2, 3, 5, LOW, HIGH, 2**32 - 1, 2**32, 2**32 + 5, 2**64 - 1, 2**64, -1, -(2**32), SAMPLE_ORDER)


def test_no_two_keys_have_the_same_padded_words() -> None:
    keys = [key for n in range(4) for key in itertools.product(VALUES, repeat=n)]
    keys += itertools.product(VALUES[::2], repeat=4)
    words = [key_words(*key) for key in keys]
    padded = {tuple(key + [0] * (4 - len(key))) for key in words}  # as numpy does before it mixes them
    assert len(padded) == len(keys) > 7000
    assert all(0 <= word < 2**32 for key in words for word in key)


@pytest.mark.parametrize("key", [(0, 0, 0), (1, 2, 3), (2**32 - 1, 9, 2**32 - 1), (SAMPLE_ORDER, 7, 3)])
def test_a_key_of_three_small_numbers_gives_the_seed_of_numpy(key: tuple[int, ...]) -> None:
    ours, numpys = seed_sequence(*key), np.random.SeedSequence(list(key))
    np.testing.assert_array_equal(ours.generate_state(8), numpys.generate_state(8))


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
