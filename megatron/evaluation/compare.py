"""Compare two models on the same documents with a paired bootstrap."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from megatron.objective.sample_noise import Purpose, make_generator

DOCUMENTS = "validation/*/*.documents.parquet"  # relative to a run's folder
UNLIKE = 0.1  # largest share of documents with different numbers of scored tokens
ENDS = 2  # first and last document of a domain, which may always differ
ELEMENTS = 1 << 22  # resampled weights in memory at a time


@dataclass(frozen=True)
class Comparison:
    """Losses of models A and B in nats per token, and statistics of their difference.

    difference   A - B; A is better if it is negative
    low, high    95 % percentile interval
    p_value      two-sided: twice the share of resampled differences on the other side of 0
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
            f"{self.loss_a:.5f} - {self.loss_b:.5f} = {self.difference:+.5f} nats per token "
            f"(95 %: {self.low:+.5f} to {self.high:+.5f}), p = {self.p_value:.2g}, "
            f"{self.n_documents:,} documents, {self.n_bootstrap:,} resamples"
        )


def compare_documents(a: Path, b: Path, *, n_bootstrap: int = 10_000, seed: int = 0) -> Comparison:
    """Compare two files written by tools/validate.py --save-per-document.

    Documents with different numbers of scored tokens are skipped:
    an autoregressive model does not score the first token of a
    corpus. Raises ValueError if these are more than the first and
    last documents of the domains and more than a tenth of all, or
    if the documents differ.
    """
    first, second = (pd.read_parquet(path) for path in (a, b))
    for name in ("domain", "document"):
        if name not in first or name not in second or not first[name].equals(second[name]):
            raise ValueError(
                f"{a} and {b}: got different {name!r}, expected equal. Score both on the same data."
            )
    either = (first["tokens"] > 0) | (second["tokens"] > 0)
    comparable = either & (first["tokens"] == second["tokens"])
    unlike, ends = either.sum() - comparable.sum(), ENDS * first["domain"].nunique()
    if unlike > max(ends, UNLIKE * either.sum()):
        raise ValueError(
            f"{a} and {b}: got different numbers of tokens for {unlike} of {either.sum()} documents. "
            "Score both on the same data with the same options."
        )
    first, second = first[comparable], second[comparable]
    arrays = (first["nats"].to_numpy(), second["nats"].to_numpy(), first["tokens"].to_numpy())
    return paired_bootstrap(*arrays, n_bootstrap, seed)


def find_paired_error(a: Path, b: Path) -> tuple[float, float] | None:
    """Return standard error (nats) and degrees of freedom of the paired difference of two runs' folders.

    None if they have no per-document files of the same name and documents.
    """
    files = [{path.name: path for path in sorted(run.glob(DOCUMENTS))} for run in (a, b)]
    for name in sorted(files[0].keys() & files[1].keys()):
        # other documents under the same name: the next pair of files may match
        with contextlib.suppress(ValueError):
            comparison = compare_documents(files[0][name], files[1][name], n_bootstrap=2000)
            # the standard error of a normal 95 % interval of the bootstrap
            return (comparison.high - comparison.low) / (2 * 1.959964), comparison.n_documents - 1.0
    return None


def paired_bootstrap(
    nats_a: np.ndarray, nats_b: np.ndarray, tokens: np.ndarray, n_bootstrap: int, seed: int
) -> Comparison:
    """Resample documents, the same ones for both models; all arrays are [n_documents].

    Pairing removes the variance of document difficulty that both
    models share (Koehn, Statistical Significance Tests for Machine
    Translation Evaluation, 2004). A p-value is at least 2 /
    (n_bootstrap + 1).
    """
    if len(tokens) < 2:
        raise ValueError(f"got {len(tokens)} documents, expected at least 2 for a bootstrap")
    n = len(tokens)
    rng = make_generator(seed, Purpose.BOOTSTRAP, 0)
    # sums and not means per document: the statistic is
    # a ratio of sums over the resample, as the loss is
    differences = nats_a - nats_b
    resampled = np.empty(n_bootstrap)
    # resamples in blocks of at most ELEMENTS indices
    rows = max(1, ELEMENTS // n)
    for begin in range(0, n_bootstrap, rows):
        end = min(begin + rows, n_bootstrap)
        picked = rng.integers(0, n, size=(end - begin, n))
        resampled[begin:end] = differences[picked].sum(axis=1) / tokens[picked].sum(axis=1)
    # +1 below: the observed data count as one resample,
    # so p is never 0. With 10,000 resamples that are all
    # below 0: p = 2 (0 + 1) / 10,001 = 0.0002
    beyond = min((resampled <= 0).sum(), (resampled >= 0).sum())
    low, high = np.percentile(resampled, [2.5, 97.5])
    total = tokens.sum()
    return Comparison(
        loss_a=float(nats_a.sum() / total),
        loss_b=float(nats_b.sum() / total),
        difference=float(differences.sum() / total),
        low=float(low),
        high=float(high),
        p_value=float(min(1.0, 2 * (beyond + 1) / (n_bootstrap + 1))),
        n_documents=n,
        n_bootstrap=n_bootstrap,
    )
