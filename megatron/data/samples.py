"""Windows of S + 1 tokens of a corpus. Sample i is a pure function of (files, seed, i)."""

import numpy as np

from megatron.data.batches import SampleSource
from megatron.data.indexed import IndexedTokens
from megatron.data.keys import SAMPLE_ORDER
from megatron.data.permutation import ShuffledEpochs


class Samples(SampleSource):
    """Infinite sequence of samples 0, 1, 2, ... Each epoch visits every window once, in its own order.

    Documents are concatenated. Window w begins at token w * seq_len. Adjacent
    windows share one token: every token but the first is a target once per
    epoch. Tokens after the last whole window are not used.
    """

    def __init__(
        self, tokens: IndexedTokens, seq_len: int, seed: int, shuffle: bool = True,
        n_windows: int | None = None,
    ) -> None:  # fmt: skip
        """`shuffle` False: file order, for held-out text. `n_windows`: use only the first n_windows windows.

        Raises ValueError for a corpus without a whole window.
        """
        self.tokens, self.seq_len, self.seed, self.shuffle = tokens, seq_len, seed, shuffle
        # w windows use w * seq_len + 1 tokens, as adjacent
        # windows share one. 1025 tokens and seq_len 256:
        # 1024 // 256 = 4 windows, which begin at 0, 256, 512 and 768
        self.samples_per_epoch = n_windows or max(0, (tokens.n_tokens - 1) // seq_len)
        if not self.samples_per_epoch:
            raise ValueError(
                f"{tokens.prefix}: got {tokens.n_tokens:,} tokens, expected {seq_len + 1} or more. "
                "Lower seq_len."
            )
        # the number of windows is part of the permutation:
        # another `n_windows` gives another order
        self._order = ShuffledEpochs(self.samples_per_epoch, [SAMPLE_ORDER, seed])

    def sample_windows(self, numbers: np.ndarray) -> np.ndarray:
        """Return the windows of the samples `numbers` int64 [n], of any epochs."""
        return self._order(numbers) if self.shuffle else numbers % self.samples_per_epoch

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Return the samples `numbers` int64 [n], of any epochs: int64 [n, seq_len + 1]."""
        samples = np.empty((len(numbers), self.seq_len + 1), dtype=np.int64)
        windows = self.sample_windows(numbers)
        # `row` is a view of `samples`: _copy_window
        # converts to int64 without a temporary array
        for row, window in zip(samples, windows.tolist(), strict=True):
            self._copy_window(window, row)
        self.tokens.check_ids(samples)
        return samples

    def _copy_window(self, window: int, row: np.ndarray) -> None:
        begin = window * self.seq_len
        row[:] = self.tokens.tokens[begin : begin + self.seq_len + 1]
