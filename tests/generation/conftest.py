"""A test of sampled frequencies."""

from collections import Counter
from collections.abc import Iterable, Mapping

from scipy.stats import chisquare


def assert_frequencies(samples: Iterable[Iterable[int]], expected: Mapping[tuple[int, ...], float]) -> None:
    """Compare counts of sequences with their probabilities by a chi-square test at p = 1e-4.

    Sequences with less than five expected samples are counted together with the last other one.
    """
    counts = Counter(map(tuple, samples))
    n = counts.total()
    possible = {sequence: n * p for sequence, p in expected.items() if p}
    assert set(counts) <= set(possible)
    common = [sequence for sequence, share in possible.items() if share >= 5]
    assert len(common) > 3
    observed = [counts[sequence] for sequence in common]
    shares = [possible[sequence] for sequence in common]
    observed[-1] += n - sum(observed)
    shares[-1] += n - sum(shares)
    assert chisquare(observed, shares).pvalue > 1e-4
