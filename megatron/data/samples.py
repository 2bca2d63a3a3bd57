"""Windows of S + 1 tokens over a corpus, in an order that is a pure function of (files, seed, number)."""

import numpy as np

from megatron.data.indexed import IndexedTokens
from megatron.data.permutation import Epochs
from megatron.keys import SAMPLE_ORDER


class Samples:
    """Sample numbers 0, 1, 2, ... without end: each epoch visits every window once, in an order of its own.

    Documents are laid end to end; window w begins at token w * seq_len, and neighbours share one token, so
    that every token but the first is a target once an epoch. Tokens after the last whole window are never
    seen.
    """

    def __init__(
        self,
        tokens: IndexedTokens,
        seq_len: int,
        seed: int,
        shuffle: bool = True,
        n_windows: int | None = None,
    ) -> None:
        """`shuffle` False: file order, for held-out text. `n_windows`: the first so many are the corpus.

        ValueError for a corpus without a whole window.
        """
        self.tokens, self.seq_len, self.seed, self.shuffle = tokens, seq_len, seed, shuffle
        self.samples_per_epoch = max(0, (tokens.n_tokens - 1) // seq_len)
        assert n_windows is None or 0 < n_windows <= self.samples_per_epoch, "Exposure refuses the others"
        self.samples_per_epoch = n_windows or self.samples_per_epoch
        if not self.samples_per_epoch:
            raise ValueError(
                f"{tokens.prefix}: {tokens.n_tokens:,} tokens hold no window of {seq_len} + 1; lower seq_len"
            )
        self._order = Epochs(self.samples_per_epoch, [SAMPLE_ORDER, seed])

    def window_of(self, i: int) -> int:
        """Which window of the corpus sample i is."""
        return self._order.one(i) if self.shuffle else i % self.samples_per_epoch

    def windows_of(self, numbers: np.ndarray) -> np.ndarray:
        """`window_of` for samples int64 [n] of any epochs."""
        return self._order(numbers) if self.shuffle else numbers % self.samples_per_epoch

    def __getitem__(self, i: int) -> np.ndarray:
        """Sample i, for any i >= 0: int64 [seq_len + 1]."""
        sample = np.empty(self.seq_len + 1, dtype=np.int64)
        self._copy(self.window_of(i), sample)
        self.tokens.check_ids(sample)
        return sample

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Samples int64 [n] of any epochs: int64 [n, seq_len + 1]."""
        taken = np.empty((len(numbers), self.seq_len + 1), dtype=np.int64)
        for row, window in zip(taken, self.windows_of(numbers).tolist(), strict=True):
            self._copy(window, row)
        self.tokens.check_ids(taken)
        return taken

    def _copy(self, window: int, row: np.ndarray) -> None:
        begin = window * self.seq_len
        row[:] = self.tokens.tokens[begin : begin + self.seq_len + 1]
