"""Number of samples, epochs and unique tokens that a run reads from each corpus, at any point of the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron.config.schema import RunConfig
from megatron.plan.datapaths import WeightedCorpus, count_corpus_tokens, name_corpora, read_corpora
from megatron.plan.mixture_use import ResolvedMixture, read_resolved, split_by_weights
from megatron.plan.weighted_round_robin import WeightedRoundRobin


@dataclass(frozen=True, kw_only=True)
class CorpusUse:
    """Use of one corpus after a number of samples of the run. Tokens are targets: seq_len per sample.

    share          of the run's samples, in (0, 1]
    tokens         targets of one epoch
    epochs         samples read over the samples of one epoch
    unique_tokens, repeated_tokens   targets read for the first time, and read again
    """

    name: str
    prefix: str
    share: float
    tokens: int
    samples: int
    epochs: float
    unique_tokens: int
    repeated_tokens: int


class Exposure:
    """Numbers of samples that a run takes from each corpus of dataset.path_train.

    epoch_samples   whole samples in one epoch of each corpus
    """

    round_robin: WeightedRoundRobin | None  # None for a mixture, whose weights may change

    def __init__(self, config: RunConfig) -> None:
        """Raises ValueError for a corpus without a whole sample, FileNotFoundError for a missing one."""
        path, self.seq_len = config.dataset.path_train, config.dataset.seq_len
        if config.dataset.mixture is not None:
            self._read_mixture(read_resolved(config.dataset.mixture))
            return
        if path is None:
            raise ValueError("dataset.path_train: missing, expected a .bin/.idx prefix or a data-path file")
        self.corpora = read_corpora(path)
        try:
            self.round_robin = WeightedRoundRobin([corpus.weight for corpus in self.corpora])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        self.epoch_samples = [self._count_samples(corpus, config) for corpus in self.corpora]
        if config.dataset.unique_tokens is not None:
            self.epoch_samples = self._limit_epoch_samples(config.dataset.unique_tokens)
        self.weights = [float(share) for share in self.round_robin.weights]
        self.names = name_corpora([corpus.prefix for corpus in self.corpora])

    @property
    def epoch_tokens(self) -> int:
        """Targets in one epoch of all corpora together."""
        return sum(self.epoch_samples) * self.seq_len

    def _count_samples(self, corpus: WeightedCorpus, config: RunConfig) -> int:
        """Return the samples of one epoch of a corpus, at most those of its unique tokens."""
        available = count_epoch_samples(corpus.prefix, self.seq_len)
        # rounded up to whole samples, as dataset.unique_tokens
        limited = available if corpus.unique_tokens is None else -(-corpus.unique_tokens // self.seq_len)
        has_order = corpus.unique_tokens is None or config.dataset.order == "epoch"
        if limited > available or not has_order:
            raise ValueError(
                f"{config.dataset.path_train}: got unique={corpus.unique_tokens} of {corpus.prefix}, "
                f"expected dataset.order=epoch and at most its {available * self.seq_len:,} tokens in whole "
                "samples."
            )
        return limited

    def _limit_epoch_samples(self, unique_tokens: int) -> list[int]:
        """Return the samples per epoch of each corpus for dataset.unique_tokens, by the corpora's weights."""
        # the exact split of the first ceil(unique_tokens / seq_len) samples of the blend.
        # Example: 1,000 tokens in samples of 300 are the first 4 samples.
        # With weights 3/4 and 1/4, the corpora have 3 and 1 of them.
        assert self.round_robin is not None, "__init__ sets it before"
        limited = self.round_robin.prefix_counts(-(-unique_tokens // self.seq_len))
        for corpus, n, available in zip(self.corpora, limited, self.epoch_samples, strict=True):
            if not 0 < n <= available:
                raise ValueError(
                    f"dataset.unique_tokens: {unique_tokens:,} are {n * self.seq_len:,} in whole samples of "
                    f"{corpus.prefix}, expected some and at most its {available * self.seq_len:,}. Set "
                    f"{'fewer, or preprocess more text' if n else 'more'}."
                )
        return limited

    def _read_mixture(self, resolved: ResolvedMixture) -> None:
        """Use one corpus for each domain of the mixture."""
        self.round_robin = None
        self.names = list(resolved.domains)
        # All domains are parts of the mixture's datasets; the first prefix
        # stands for all of them. The shares are in `self.weights`, not in
        # these weights of 1.
        self.corpora = (WeightedCorpus(resolved.pairs[0], Fraction(1)),) * len(self.names)
        self.weights, self.epoch_samples = list(resolved.weights), resolved.count_windows(self.seq_len)

    def usage_after(self, n_samples: int, counts: Sequence[int] | None = None) -> tuple[CorpusUse, ...]:
        """Return the use of each corpus after the first `n_samples` samples.

        counts   samples of each corpus, if known. The default is the exact schedule
                 of the weights, or for a mixture an estimate from its first weights.
        """
        if counts is None:
            exact = self.round_robin
            counts = exact.prefix_counts(n_samples) if exact else split_by_weights(self.weights, n_samples)
        return tuple(
            CorpusUse(
                name=name,
                prefix=corpus.prefix,
                share=share,
                tokens=epoch_samples * self.seq_len,
                samples=count,
                # a domain of a mixture may have no whole sample
                epochs=count / max(epoch_samples, 1),
                # an epoch reads every sample once, so repetition begins after
                # the first epoch
                unique_tokens=min(count, epoch_samples) * self.seq_len,
                repeated_tokens=max(0, count - epoch_samples) * self.seq_len,
            )
            for name, corpus, share, epoch_samples, count in zip(
                self.names, self.corpora, self.weights, self.epoch_samples, counts, strict=True
            )
        )


def count_epoch_samples(prefix: str, seq_len: int) -> int:
    """Return the number of whole samples in one epoch of a corpus. Raises ValueError if it is 0.

    A sample is seq_len + 1 tokens, and neighbours share one token: the last
    target of a sample is the first input of the next.
    """
    n_tokens = count_corpus_tokens(prefix)
    # 10 tokens, seq_len 3: samples 0-3, 3-6 and 6-9, (10 - 1) // 3 = 3
    n_samples = (n_tokens - 1) // seq_len
    if n_samples < 1:
        expected = f"at least one window of {seq_len} + 1"
        raise ValueError(f"{prefix}: got {n_tokens} tokens, expected {expected}. Lower dataset.seq_len.")
    return n_samples
