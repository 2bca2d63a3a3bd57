"""Whether one model is better than another on the same documents: a paired bootstrap."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megatron.data.documents import read_parquet
from megatron.objective.noise import Purpose, generator

UNLIKE = 0.1  # share of the documents that both need not have scored token for token
ENDS = 2  # documents of a domain, its first and last, that may differ however few there are
ELEMENTS = 1 << 22  # resampled weights held at a time


@dataclass(frozen=True)
class Comparison:
    """Losses in nats a token of A and B, and what is known of their difference.

    difference   A - B: below 0, A is better
    low, high    percentile interval of 95 %
    p_value      two-sided: how often resampled differences lie on the other side of 0, doubled
    """

    loss_a: float
    loss_b: float
    difference: float
    low: float
    high: float
    p_value: float
    n_documents: int
    n_bootstrap: int

    def __str__(self) -> str:
        return (
            f"{self.loss_a:.5f} - {self.loss_b:.5f} = {self.difference:+.5f} nats a token "
            f"(95 %: {self.low:+.5f} to {self.high:+.5f}), p = {self.p_value:.2g}, "
            f"{self.n_documents:,} documents, {self.n_bootstrap:,} resamples"
        )

    def as_dict(self) -> dict[str, float | int]:
        """For JSON."""
        return asdict(self)


def compare_documents(a: Path, b: Path, *, n_bootstrap: int = 10_000, seed: int = 0) -> Comparison:
    """Compare two files that tools/validate.py --save-per-document wrote.

    A document is left out where one model scored a token more of it than the other: an autoregressive one
    does not score the first of a corpus. ValueError where that is more than the ends of the corpora and a
    tenth of the documents, or the documents are others.
    """
    one, two = read_parquet(a), read_parquet(b)
    for name in ("domain", "document"):
        if name not in one or name not in two or not np.array_equal(one[name], two[name]):
            raise ValueError(f"{a} and {b}: differ in {name!r}; score both on the same data")
    either = (one["tokens"] > 0) | (two["tokens"] > 0)
    alike = either & (one["tokens"] == two["tokens"])
    unlike, ends = either.sum() - alike.sum(), ENDS * len(np.unique(one["domain"]))
    if unlike > max(ends, UNLIKE * either.sum()):
        raise ValueError(
            f"{a} and {b}: differ in the tokens of {unlike} of {either.sum()} documents; "
            "score both on the same data with the same options"
        )
    return paired_bootstrap(one["nats"][alike], two["nats"][alike], one["tokens"][alike], n_bootstrap, seed)


def paired_bootstrap(
    nats_a: np.ndarray, nats_b: np.ndarray, tokens: np.ndarray, n_bootstrap: int, seed: int
) -> Comparison:
    """Resample documents, the same ones for both models: all float64 or int64 [n_documents].

    Pairing takes out what makes documents hard for both (Koehn, Statistical Significance Tests for Machine
    Translation Evaluation, 2004). A p-value is at least 2 / (n_bootstrap + 1).
    """
    if len(tokens) < 2:
        raise ValueError(f"{len(tokens)} documents: a bootstrap wants two or more")
    n = len(tokens)
    rng = generator(seed, Purpose.BOOTSTRAP, 0)
    apart = nats_a - nats_b
    drawn = np.empty(n_bootstrap)
    rows = max(1, ELEMENTS // n)
    for begin in range(0, n_bootstrap, rows):
        end = min(begin + rows, n_bootstrap)
        picked = rng.integers(0, n, size=(end - begin, n))
        drawn[begin:end] = apart[picked].sum(axis=1) / tokens[picked].sum(axis=1)
    beyond = min((drawn <= 0).sum(), (drawn >= 0).sum())
    low, high = np.percentile(drawn, [2.5, 97.5])
    total = tokens.sum()
    return Comparison(
        loss_a=float(nats_a.sum() / total),
        loss_b=float(nats_b.sum() / total),
        difference=float(apart.sum() / total),
        low=float(low),
        high=float(high),
        p_value=float(min(1.0, 2 * (beyond + 1) / (n_bootstrap + 1))),
        n_documents=n,
        n_bootstrap=n_bootstrap,
    )
