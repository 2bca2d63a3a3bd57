"""Random tokens without files, to test a model or a cluster."""

import numpy as np

from megatron.data.batches import SampleSource
from megatron.data.keys import seed_sequence
from megatron.data.permutation import ShuffledEpochs

TRAIN, HELD_OUT = 0x74, 0x65  # keys of two independent streams
N_HELD_OUT = 64


class SyntheticSamples(SampleSource):
    """Samples of seq_len + 1 uniform random tokens. Sample i is a pure function of (seed, stream, i).

    A model can only learn the uniform distribution: the minimum of its loss is
    log n_tokens nats.
    """

    def __init__(
        self, n_tokens: int, seq_len: int, seed: int, held_out: bool = False, n_unique: int | None = None
    ) -> None:
        """Training samples are infinite and do not repeat, unless `n_unique` is given.

        With `n_unique`, each epoch is a permutation of the first n_unique
        samples. There are 64 held-out samples, equal for every seed.
        """
        self.n_tokens, self.seq_len = n_tokens, seq_len
        # seed 0 for every run: evaluation losses of
        # different seeds are of the same samples
        self.key = [HELD_OUT, 0] if held_out else [TRAIN, seed]
        self.samples_per_epoch = N_HELD_OUT if held_out else n_unique or 2**40  # 2^40: never reached
        self._order = None if n_unique is None else ShuffledEpochs(n_unique, [TRAIN, seed])

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Return the samples `numbers` int64 [n], of any epochs: int64 [n, seq_len + 1]."""
        indices = numbers if self._order is None else self._order(numbers)
        return np.stack([self._draw_sample(index) for index in indices.tolist()])

    def _draw_sample(self, index: int) -> np.ndarray:
        # a generator per sample, not per stream: a
        # sample needs no draw of the samples before it
        rng = np.random.default_rng(seed_sequence(*self.key, index))
        return rng.integers(self.n_tokens, size=self.seq_len + 1)
