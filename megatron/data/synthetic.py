"""Random tokens without files, to try a model or a cluster on."""

import numpy as np

from megatron.data.permutation import Epochs
from megatron.keys import seed_sequence

TRAIN, HELD_OUT = 0x74, 0x65  # two streams that share no sample
N_HELD_OUT = 64


class SyntheticSamples:
    """Sample i: seq_len + 1 tokens, uniform over the vocabulary, a pure function of (seed, stream, i).

    What a model can learn of them is that they are uniform: its loss goes to log n_tokens nats and no lower.
    """

    def __init__(
        self, n_tokens: int, seq_len: int, seed: int, held_out: bool = False, n_unique: int | None = None
    ) -> None:
        """Training samples never end, and repeat only where `n_unique` is given: then each epoch of so many
        is a permutation of the first ones. Held-out samples are 64, the same for every seed."""
        self.n_tokens, self.seq_len = n_tokens, seq_len
        self.key = [HELD_OUT, 0] if held_out else [TRAIN, seed]
        self.samples_per_epoch = N_HELD_OUT if held_out else n_unique or 2**40
        self._order = None if n_unique is None else Epochs(n_unique, [TRAIN, seed])

    def __getitem__(self, i: int) -> np.ndarray:
        """Sample i, for any i >= 0: int64 [seq_len + 1]."""
        number = i if self._order is None else self._order.one(i)
        rng = np.random.default_rng(seed_sequence(*self.key, number))
        return rng.integers(self.n_tokens, size=self.seq_len + 1)

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Samples int64 [n]: int64 [n, seq_len + 1]."""
        return np.stack([self[int(i)] for i in numbers])
