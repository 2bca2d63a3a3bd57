"""The rows of each batch that belong to this rank, starting at any sample number."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class SampleSource(Protocol):
    """Random access to samples of one corpus, of several corpora or of synthetic data."""

    seq_len: int
    samples_per_epoch: int

    def __getitem__(self, i: int) -> np.ndarray:
        """Return sample i: int64 [seq_len + 1]."""
        ...

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Return the samples `numbers` int64 [n]: int64 [n, seq_len + 1]."""
        ...


@dataclass(frozen=True)
class Batch:
    """Tokens int64 [b, S + 1] of the samples `numbers` int64 [b]."""

    tokens: np.ndarray
    numbers: np.ndarray


class Batches:
    """Iterator over this rank's rows of consecutive batches.

    Batch k consists of samples k * batch_size to (k + 1) * batch_size - 1. Rank r has rows r * b to
    (r + 1) * b - 1, where b = batch_size / n_ranks. The union over ranks does not depend on their number.
    The only state to save is `next_sample`.
    """

    def __init__(
        self, samples: SampleSource, batch_size: int, rank: int, n_ranks: int, first_sample: int
    ) -> None:
        if batch_size % n_ranks:
            raise ValueError(f"got a batch of {batch_size} samples, expected a multiple of {n_ranks} ranks")
        self.samples, self.batch_size = samples, batch_size
        self.rows = batch_size // n_ranks
        self.rank = rank
        self.next_sample = first_sample

    def sample_range(self, next_sample: int) -> tuple[int, int]:
        """Return this rank's first and last sample of the batch whose first sample is `next_sample`."""
        # ranks take consecutive blocks of rows, in rank order
        # batch of 8 on 4 ranks from sample 16: rank 1 has samples 18 and 19
        first = next_sample + self.rank * self.rows
        return first, first + self.rows - 1

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self.batch_at(self.next_sample)
        # by the batch of all ranks: `next_sample` is the same number on every rank
        self.next_sample += self.batch_size
        return batch

    def batch_at(self, sample: int) -> Batch:
        """Return this rank's rows of the batch whose first sample, over all ranks, is `sample`."""
        first, last = self.sample_range(sample)
        numbers = np.arange(first, last + 1, dtype=np.int64)
        return Batch(self.samples.take(numbers), numbers)
