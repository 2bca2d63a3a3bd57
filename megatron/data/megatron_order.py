"""Megatron's order of samples, bit for bit, so that runs made with Megatron can be repeated.

What Megatron-LM's GPTDataset builds with numpy.random.RandomState(seed) for a number of samples:

    document index  every sequence once an epoch, all epochs shuffled together; the last epoch is shuffled
                    by itself when the run needs less than 80 % of its samples
    sample index    where each window of seq_len + 1 tokens begins in that order: (place in it, offset)
    shuffle index   the windows, shuffled; those of a separate last epoch by themselves, after the others

The classic megatron/data/gpt_dataset.py (Megatron-LM, Megatron-DeepSpeed, bigscience) and Megatron Core's
megatron/core/datasets/gpt_dataset.py draw the same numbers and give the same arrays wherever both run. Where
the last epoch needs one window more than an epoch alone would have, the classic one stops at an assertion;
past 2^31 places its int32 sample index overflows; we go on as Core does. Core's options that change the order
(samples without the extra token, a partial last sample) are off, as they are by default in training.
"""

from functools import cached_property

import numpy as np

from megatron import _csrc
from megatron.data.indexed import IndexedTokens
from megatron.data.samples import Samples

SEPARATE_BELOW = 0.80  # of an epoch's samples: Megatron's threshold
MOST_PLACES = 1 << 32  # past it numpy's shuffle draws 64 bits a number
EVERY = 8  # windows between two that are looked up: the ones between are found by adding lengths


class MegatronOrder:
    """The indices for sequences of `lengths` int32 or uint16 [n] tokens and at least `n_samples` samples.

    document_index  int32 [n_epochs * n]
    shuffle_index   uint32 [n_windows], int64 from 2^32 - 2 windows on
    n_windows       all windows that the epochs hold; Megatron's len(dataset)
    """

    def __init__(self, lengths: np.ndarray, seq_len: int, seed: int, n_samples: int) -> None:
        """ValueError for a seed that numpy does not take, and for more than 2^32 places."""
        if not 0 <= seed < 1 << 32:
            raise ValueError(f"seed {seed}: Megatron's order wants one from 0 to {(1 << 32) - 1:,}")
        n, per_epoch = len(lengths), int(lengths.sum(dtype=np.int64))
        self.seq_len = seq_len
        self.n_epochs, n_first = split_epochs(per_epoch, seq_len, n_samples)
        if self.n_epochs * n > MOST_PLACES:
            raise ValueError(
                f"{self.n_epochs:,} epochs of {n:,} sequences: Megatron's order is known up to 2^32 places; "
                "ask for fewer samples or take dataset.order=epoch"
            )
        self.n_windows = (self.n_epochs * per_epoch - 1) // seq_len
        state = np.random.RandomState(seed).get_state(legacy=False)["state"]
        epochs = [(0, n, self.n_epochs)] if n_first is None else [(0, n, self.n_epochs - 1), (0, n, 1)]
        self.document_index, key, pos = _csrc.shuffled(
            state["key"], state["pos"], np.array(epochs), np.dtype(np.int32)
        )
        self._starts = _csrc.sample_starts(
            lengths, self.document_index, EVERY * seq_len, self.n_windows // EVERY + 1
        )
        split = self.n_windows if n_first is None else n_first
        windows = [(0, split, 1), (split, self.n_windows, 1)]
        dtype = np.uint32 if self.n_windows < np.iinfo(np.uint32).max - 1 else np.int64
        self.shuffle_index, _, _ = _csrc.shuffled(key, pos, np.array(windows), np.dtype(dtype))

    def sample_index(self, lengths: np.ndarray) -> np.ndarray:
        """Megatron's whole sample index, [n_windows + 1, 2], from the same `lengths`; it is not kept."""
        found = _csrc.sample_starts(lengths, self.document_index, self.seq_len, self.n_windows + 1)
        found[0] = 0  # Megatron begins at the first sequence even when it is empty
        return found

    def start_before(self, window: int) -> tuple[int, int]:
        """(place in the document index, tokens from its beginning to the window's first), not negative."""
        place, offset = self._starts[window // EVERY].tolist()
        return place, offset + window % EVERY * self.seq_len


def split_epochs(tokens_per_epoch: int, seq_len: int, n_samples: int) -> tuple[int, int | None]:
    """(epochs that `n_samples` need, windows before a separate last epoch, None where it is not separate)."""
    n_epochs = max(1, -(-(n_samples * seq_len + 1) // tokens_per_epoch))
    if n_epochs == 1:
        return 1, None
    n_before = ((n_epochs - 1) * tokens_per_epoch - 1) // seq_len
    per_epoch = (tokens_per_epoch - 1) // seq_len
    return n_epochs, n_before if n_samples - n_before < int(SEPARATE_BELOW * per_epoch) else None


class MegatronSamples(Samples):
    """As `Samples`, for the first `n_samples` alone, in Megatron's order.

    Windows run across the ends of epochs, and epochs are mixed.
    """

    def __init__(self, tokens: IndexedTokens, seq_len: int, seed: int, n_samples: int) -> None:
        """ValueError for a corpus without a whole window, and as `MegatronOrder`."""
        super().__init__(tokens, seq_len, seed)
        self.indices = MegatronOrder(tokens.sequence_tokens(), seq_len, seed, n_samples)

    def window_of(self, i: int) -> int:
        """Which window of the order sample i is. IndexError past the last."""
        return int(self.windows_of(np.array([i]))[0])

    def windows_of(self, numbers: np.ndarray) -> np.ndarray:
        """`window_of` for samples int64 [n]."""
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.indices.n_windows:
            raise IndexError(
                f"{self.tokens.prefix}: no samples {numbers.min():,} to {numbers.max():,}, "
                f"the order was made for {self.indices.n_windows:,}"
            )
        return self.indices.shuffle_index[numbers].astype(np.int64)

    def _copy(self, window: int, row: np.ndarray) -> None:
        place, skip = self.indices.start_before(window)
        n_places = self._likely_places
        while True:
            sequences = self.indices.document_index[place : place + n_places]
            starts, lengths = self.tokens.sequence_spans(sequences)
            ends = np.cumsum(lengths)
            if ends[-1] >= skip + len(row):
                break
            n_places *= 2
        first = int(np.searchsorted(ends, skip, side="right"))
        at, skip = 0, skip - int(ends[first] - lengths[first])
        for start, length in zip(starts[first:].tolist(), lengths[first:].tolist(), strict=True):
            n = min(length - skip, len(row) - at)
            row[at : at + n] = self.tokens.tokens[start + skip : start + skip + n]
            at, skip = at + n, 0
            if at == len(row):
                return

    @cached_property
    def _likely_places(self) -> int:
        """Sequences that most often hold EVERY windows."""
        return 8 + 2 * EVERY * self.seq_len * self.tokens.n_sequences // self.tokens.n_tokens
