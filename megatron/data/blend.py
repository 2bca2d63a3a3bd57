"""Several corpora in fixed proportions: which one sample i is from is a pure function of i."""

from collections.abc import Sequence

import numpy as np

from megatron.config.shares import Shares
from megatron.data.samples import Samples


class Blend:
    """As `Samples`, over several of them: of any first n samples corpus k has w_k n, to within one sample.

    Each corpus goes through epochs of its own, in the order it would have alone. Nothing is held that grows
    with the number of samples.
    """

    def __init__(self, corpora: Sequence[Samples], shares: Shares, once: bool = False) -> None:
        """`once`: an epoch ends before any corpus would repeat itself, else it is as long as all together.

        ValueError where `once` leaves no sample.
        """
        assert len(corpora) == len(shares.weights), "a weight for each corpus"
        assert len({corpus.seq_len for corpus in corpora}) == 1, "all are cut into samples of one length"
        self.corpora, self.shares = list(corpora), shares
        self.seq_len = corpora[0].seq_len
        self.samples_per_epoch = sum(corpus.samples_per_epoch for corpus in corpora)
        if once:
            self.samples_per_epoch = self._without_repeats()

    def sources_of(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(corpus, number inside the corpus) of samples int64 [n]: two arrays int64 [n]."""
        blocks, places = np.divmod(numbers, self.shares.block_turns)
        corpora, inside = np.empty_like(places), np.empty_like(places)
        for block in np.unique(blocks):
            rows = blocks == block
            takers, turns = self.shares.block(int(block))
            corpora[rows] = np.asarray(takers)[places[rows]]
            inside[rows] = np.asarray(turns)[places[rows]]
        return corpora, inside

    def __getitem__(self, i: int) -> np.ndarray:
        """Sample i, for any i >= 0: int64 [seq_len + 1]."""
        corpus, inside = self.shares.turn(i)
        return self.corpora[corpus][inside]

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Samples int64 [n] of any epochs: int64 [n, seq_len + 1]."""
        corpora, inside = self.sources_of(numbers)
        taken = np.empty((len(numbers), self.seq_len + 1), dtype=np.int64)
        for corpus in np.unique(corpora):
            rows = corpora == corpus
            taken[rows] = self.corpora[corpus].take(inside[rows])
        return taken

    def _without_repeats(self) -> int:
        """The most samples that ask no corpus for more than it has."""
        low, high = 0, self.samples_per_epoch
        while low < high:
            middle = (low + high + 1) // 2
            counts = self.shares.counts(middle)
            if all(count <= c.samples_per_epoch for count, c in zip(counts, self.corpora, strict=True)):
                low = middle
            else:
                high = middle - 1
        if not low:
            raise ValueError(
                "the corpora hold no sample in these proportions; give more text, or other weights"
            )
        return low
