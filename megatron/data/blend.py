"""Blend of several corpora in fixed proportions; the corpus of sample i is a pure function of i."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from megatron.data.batches import SampleSource
from megatron.data.samples import Samples


class Schedule(Protocol):
    """Corpus of each sample: megatron.plan.weighted_round_robin.WeightedRoundRobin."""

    weights: Any
    block_slots: int

    def get_block(self, number: int) -> Any:
        """Return the corpora and their samples, int64 [block_slots] each, of a block of samples."""

    def prefix_counts(self, n: int) -> Sequence[int]:
        """Return the samples of each corpus among the first n."""


class Blend(SampleSource):
    """Samples of several corpora: of any first n samples, w_k n are from corpus k, to within one.

    Each corpus has its own epochs, in the order that it would have alone.
    Memory is constant.
    """

    def __init__(self, corpora: Sequence[Samples], shares: Schedule, single_pass: bool = False) -> None:
        """`single_pass`: an epoch ends before any corpus would repeat; else it is as long as all corpora.

        Raises ValueError if `single_pass` leaves no sample.
        """
        assert len(corpora) == len(shares.weights), "expected a weight per corpus"
        assert len({corpus.seq_len for corpus in corpora}) == 1, "all corpora have samples of the same length"
        self.corpora, self.shares = list(corpora), shares
        self.seq_len = corpora[0].seq_len
        self.samples_per_epoch = sum(corpus.samples_per_epoch for corpus in corpora)
        if single_pass:
            self.samples_per_epoch = self._count_without_repeats()

    def locate_samples(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (corpus, sample in that corpus), each int64 [n], of the samples `numbers` int64 [n]."""
        blocks, positions = np.divmod(numbers, self.shares.block_slots)
        corpora, indices = np.empty_like(positions), np.empty_like(positions)
        for block in np.unique(blocks):  # the schedule is computed per block of turns
            rows = blocks == block
            # array('q') of block_slots each; asarray makes a view
            takers, turns = self.shares.get_block(int(block))
            corpora[rows] = np.asarray(takers)[positions[rows]]
            indices[rows] = np.asarray(turns)[positions[rows]]
        return corpora, indices

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Return the samples `numbers` int64 [n], of any epochs: int64 [n, seq_len + 1]."""
        corpora, indices = self.locate_samples(numbers)
        # one `take` per corpus; the mask writes each sample to its own row
        samples = np.empty((len(numbers), self.seq_len + 1), dtype=np.int64)
        for corpus in np.unique(corpora):
            rows = corpora == corpus
            samples[rows] = self.corpora[corpus].take(indices[rows])
        return samples

    def _count_without_repeats(self) -> int:
        """Return the largest number of samples for which no corpus repeats, by bisection."""

        def repeats(n: int) -> bool:
            counts = zip(self.shares.prefix_counts(n), self.corpora, strict=True)
            return any(count > corpus.samples_per_epoch for count, corpus in counts)

        # counts grow with n, so bisection applies
        n_samples = bisect_left(range(self.samples_per_epoch + 1), True, key=repeats) - 1
        if not n_samples:
            raise ValueError(
                "corpora: got too little text for one sample in these proportions. Give more text, or change "
                "the weights."
            )
        return n_samples
