"""The rows of each batch that belong to this rank, starting at any sample number."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class SampleSource(Protocol):
    """Random access to samples of one corpus, of several corpora, of a mixture or of synthetic data.

    Sources whose samples depend on nothing but files, seed and number inherit
    the defaults below. A mixture overrides them: its samples also depend on
    weights, which may follow the losses of the model.

    names   names of the domains of a mixture
    """

    seq_len: int
    samples_per_epoch: int
    names: Sequence[str] = ()

    def __getitem__(self, i: int) -> np.ndarray:
        """Return sample i: int64 [seq_len + 1]."""
        sample: np.ndarray = self.take(np.array([i]))[0]
        return sample

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Return the samples `numbers` int64 [n], of any epochs: int64 [n, seq_len + 1]."""
        ...

    def state(self, step: int) -> dict[str, Any]:
        """Return the state at a step for JSON, from which `restore` resumes; may be empty."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state of `state`."""
        return  # a default, not an abstract method

    def scored_domains(self, step: int, numbers: np.ndarray) -> np.ndarray | None:
        """Return the domain of the samples int64 [n], int32 [n], if `observe` expects the losses of a step.

        None if it does not.
        """
        return None

    def observe(self, step: int, nats: np.ndarray, tokens: np.ndarray) -> None:
        """Report the loss of the model on each domain in a step: float64 [K] nats over `tokens` [K]."""
        return  # a default, not an abstract method

    def domain_usage(self, n_samples: int, step: int) -> tuple[Sequence[int], Sequence[float]] | None:
        """Return per domain its number of the first `n_samples` samples and its weight at a step.

        None without domains.
        """
        return None


@dataclass(frozen=True)
class Batch:
    """Tokens int64 [b, S + 1] of the samples `numbers` int64 [b]."""

    tokens: np.ndarray
    numbers: np.ndarray


class Batches:
    """This rank's rows of consecutive batches.

    Batch k consists of samples k * batch_size to (k + 1) * batch_size - 1. Rank
    r has rows r * b to (r + 1) * b - 1, where b = batch_size / n_ranks. The
    union over ranks is always the batch.
    """

    def __init__(self, samples: SampleSource, batch_size: int, rank: int, n_ranks: int) -> None:
        if batch_size % n_ranks:
            raise ValueError(f"got a batch of {batch_size} samples, expected a multiple of {n_ranks} ranks")
        self.samples, self.batch_size = samples, batch_size
        self.rank, self.rows = rank, batch_size // n_ranks

    def sample_range(self, next_sample: int) -> tuple[int, int]:
        """Return this rank's first and last sample of the batch at `next_sample`."""
        # ranks take consecutive blocks of rows, in rank order
        # batch of 8 on 4 ranks from sample 16: rank 1 has samples 18 and 19
        first = next_sample + self.rank * self.rows
        return first, first + self.rows - 1

    def batch_at(self, sample: int) -> Batch:
        """Return this rank's rows of the batch whose first sample, over all ranks, is `sample`."""
        first, last = self.sample_range(sample)
        numbers = np.arange(first, last + 1, dtype=np.int64)
        return Batch(self.samples.take(numbers), numbers)
