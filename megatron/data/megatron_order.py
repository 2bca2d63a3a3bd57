"""Megatron's order of samples, bit for bit, to reproduce runs of Megatron.

Megatron-LM's GPTDataset builds three
arrays with numpy.random.RandomState(seed):

    document index  every sequence once per epoch, all epochs shuffled together;
                    a last epoch of which less than 80 % is needed is shuffled separately
    sample index    (place in that order, offset) of each window of seq_len + 1 tokens
    shuffle index   shuffled windows; windows of a separate last epoch come after the others

The classic gpt_dataset.py and Megatron Core's build the same arrays. The
classic one fails beyond 2^31 places, and if the last epoch needs one window
more than an epoch has: this module follows Core. Core's options that change the
order are off, as by default in training.
"""

from functools import cached_property

import numpy as np

from megatron import _csrc
from megatron.data.indexed import IndexedTokens
from megatron.data.samples import Samples

SEPARATE_EPOCH_THRESHOLD = 0.80  # Megatron's threshold, as a fraction of an epoch's samples
MAX_PLACES = 1 << 32  # above this numpy's shuffle draws 64 bits per number
INDEX_STRIDE = 8  # the sample index stores the start of every 8th window


class MegatronOrder:
    """Megatron's indices for sequences of `lengths` int32 or uint16 [n].

    document_index  int32 [n_epochs * n]
    shuffle_index   uint32 [n_windows], int64 from 2^32 - 2 windows on
    n_windows       number of windows in all epochs; Megatron's len(dataset)
    """

    def __init__(self, lengths: np.ndarray, seq_len: int, seed: int, n_samples: int) -> None:
        """Raises ValueError for a seed that numpy rejects, and for more than 2^32 places."""
        if not 0 <= seed < 1 << 32:
            raise ValueError(f"seed: got {seed}, expected 0 to {(1 << 32) - 1:,} for Megatron's order")
        # lengths may be uint16: the sum needs 64 bits
        n, per_epoch = len(lengths), int(lengths.sum(dtype=np.int64))
        self.seq_len = seq_len
        self.n_epochs, n_first = split_epochs(per_epoch, seq_len, n_samples)
        if self.n_epochs * n > MAX_PLACES:
            raise ValueError(
                f"got {self.n_epochs:,} epochs of {n:,} sequences, Megatron's order supports 2^32 places. "
                "Request fewer samples, or set dataset.order=epoch."
            )
        # windows share one token: w windows need w * seq_len + 1 tokens
        self.n_windows = (self.n_epochs * per_epoch - 1) // seq_len
        state = np.random.RandomState(seed).get_state(legacy=False)["state"]
        # One generator shuffles documents, then
        # windows: (key, pos) is its state between both.
        # ranges (begin, end, times) for
        # csrc/shuffled.h; each is shuffled separately
        epochs = [(0, n, self.n_epochs)] if n_first is None else [(0, n, self.n_epochs - 1), (0, n, 1)]
        self.document_index, key, pos = _csrc.shuffled(
            state["key"], state["pos"], np.array(epochs), np.dtype(np.int32)
        )
        # [n_windows // 8 + 1, 2]: one row per 8 windows,
        # where Megatron stores one per window. The token of the last
        # row exists: n_windows * seq_len <= all tokens - 1.
        self._starts = _csrc.sample_starts(
            lengths, self.document_index, INDEX_STRIDE * seq_len, self.n_windows // INDEX_STRIDE + 1
        )
        split = self.n_windows if n_first is None else n_first  # windows before a separate last epoch
        windows = [(0, split, 1), (split, self.n_windows, 1)]
        # Megatron's condition, including its "- 1"
        dtype = np.uint32 if self.n_windows < np.iinfo(np.uint32).max - 1 else np.int64
        self.shuffle_index, _, _ = _csrc.shuffled(key, pos, np.array(windows), np.dtype(dtype))

    def find_start(self, window: int) -> tuple[int, int]:
        """Return (place in the document index, offset of the window from its start).

        The offset may be beyond the sequence: it counts from a stored window.
        """
        # window 19 with stride 8: stored row 2 is
        # window 16, 3 * seq_len tokens before this one
        place, offset = self._starts[window // INDEX_STRIDE].tolist()
        return place, offset + window % INDEX_STRIDE * self.seq_len


def split_epochs(tokens_per_epoch: int, seq_len: int, n_samples: int) -> tuple[int, int | None]:
    """Return (number of epochs, windows before a separate last epoch or None)."""
    # smallest e with (e * tokens - 1) // seq_len >= n_samples
    n_epochs = max(1, -(-(n_samples * seq_len + 1) // tokens_per_epoch))
    if n_epochs == 1:
        return 1, None
    # Example: 1000 tokens per epoch and seq_len
    # 100 give 9 windows in one epoch, 19 in two.
    # 12 samples need two epochs, and 12 - 9 = 3 of them start in the last one.
    # 3 < int(0.8 * 9) = 7: it is shuffled separately.
    n_before = ((n_epochs - 1) * tokens_per_epoch - 1) // seq_len
    per_epoch = (tokens_per_epoch - 1) // seq_len
    return n_epochs, n_before if n_samples - n_before < int(SEPARATE_EPOCH_THRESHOLD * per_epoch) else None


class MegatronSamples(Samples):
    """Samples in Megatron's order, like `Samples`, for a fixed number of samples.

    Windows cross the ends of epochs, and epochs are mixed.
    """

    def __init__(self, tokens: IndexedTokens, seq_len: int, seed: int, n_samples: int) -> None:
        """Raises ValueError for a corpus without a whole window, and as `MegatronOrder`."""
        super().__init__(tokens, seq_len, seed)
        self.indices = MegatronOrder(tokens.sequence_tokens(), seq_len, seed, n_samples)

    def sample_windows(self, numbers: np.ndarray) -> np.ndarray:
        """Return the windows of samples int64 [n]. Raises IndexError after the last one."""
        return self.indices.shuffle_index[numbers].astype(np.int64)

    def _copy_window(self, window: int, row: np.ndarray) -> None:
        # `skip`: tokens from the start of sequence `place` to the window
        place, skip = self.indices.find_start(window)
        n_places = self._likely_places
        while True:  # double the number of sequences until they contain the window
            sequences = self.indices.document_index[place : place + n_places]
            starts, lengths = self.tokens.sequence_spans(sequences)
            # ends[i]: tokens up to the end of sequence place + i
            # The loop ends: the last window ends at
            # or before the last token of the order.
            ends = np.cumsum(lengths)
            if ends[-1] >= skip + len(row):
                break
            n_places *= 2
        # skip the sequences before the window; side="right" also skips empty ones
        first = int(np.searchsorted(ends, skip, side="right"))
        # now `skip` counts from the start of sequence
        # `first`; `at` is the next element of `row`
        at, skip = 0, skip - int(ends[first] - lengths[first])
        for start, length in zip(starts[first:].tolist(), lengths[first:].tolist(), strict=True):
            n = min(length - skip, len(row) - at)
            row[at : at + n] = self.tokens.tokens[start + skip : start + skip + n]
            at, skip = at + n, 0
            if at == len(row):
                return

    @cached_property
    def _likely_places(self) -> int:
        """Sequences that usually contain INDEX_STRIDE windows: twice the mean, and 8."""
        return 8 + 2 * INDEX_STRIDE * self.seq_len * self.tokens.n_sequences // self.tokens.n_tokens
