"""The paired bootstrap, compared with normal theory."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from megatron.evaluation.compare import compare_documents, find_paired_error, paired_bootstrap

N = 400
RNG = np.random.default_rng(0)
HARD = RNG.normal(3, 1, N)  # difficulty of a document for both models
NOISE = RNG.normal(0, 0.1, N)
TOKENS = np.full(N, 10)


def test_the_interval_and_the_p_value_are_those_of_a_normal_mean() -> None:
    """Pairing removes the documents' variation, which is ten times the differences' variation."""
    better = HARD * 10 + NOISE - NOISE.mean() - 0.012
    result = paired_bootstrap(better, HARD * 10, TOKENS, 20_000, seed=1)
    error = NOISE.std() / np.sqrt(N) / 10
    assert result.difference == pytest.approx(-0.0012)
    assert (result.low, result.high) == pytest.approx(
        (-0.0012 - 1.96 * error, -0.0012 + 1.96 * error), abs=0.1 * error
    )
    assert result.p_value == pytest.approx(2 * norm.cdf(-0.0012 / error), rel=0.25)
    back = paired_bootstrap(HARD * 10, better, TOKENS, 20_000, seed=1)
    assert (back.difference, back.p_value) == pytest.approx((-result.difference, result.p_value))


def test_a_model_does_not_differ_from_itself_and_documents_are_weighted_by_their_tokens() -> None:
    result = paired_bootstrap(HARD, HARD, TOKENS, 1000, seed=0)
    assert (result.difference, result.low, result.high, result.p_value) == (0, 0, 0, 1)
    nats = (np.array([5.0, 99.0]), np.array([1.0, 198.0]))
    result = paired_bootstrap(*nats, np.array([1, 99]), 1000, seed=0)
    assert (result.loss_a, result.loss_b) == pytest.approx((1.04, 1.99))


def write_scores(path: Path, tokens: list[int], nats: list[float]) -> Path:
    columns = {"domain": "a", "document": range(len(tokens)), "tokens": tokens, "nats": nats}
    pd.DataFrame(columns).to_parquet(path)
    return path


def test_only_scores_of_the_same_documents_are_compared(tmp_path: Path) -> None:
    nats = [1.0, 2.0, 0.0]
    a = write_scores(tmp_path / "a", [3, 4, 0], nats)
    same = compare_documents(a, write_scores(tmp_path / "b", [3, 4, 0], nats), n_bootstrap=10)
    assert (same.n_documents, same.loss_a) == (2, pytest.approx(3 / 7))
    (tmp_path / "text").write_text("no parquet")
    for path, error, sentence in (
        (write_scores(tmp_path / "c", [4, 5, 1], nats), ValueError, "numbers of tokens for 3 of 3 documents"),
        (write_scores(tmp_path / "d", [3, 5, 0], nats), ValueError, "^got 1 documents, expected at least 2"),
        (tmp_path / "none", FileNotFoundError, "none"),
        (tmp_path / "text", ValueError, "not a parquet"),
    ):
        with pytest.raises(error, match=sentence):
            compare_documents(a, path)


def test_the_paired_error_of_two_runs_is_of_their_first_files_with_the_same_documents(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in "ab"]
    assert find_paired_error(*runs) is None
    for run, nats in zip(runs, (HARD * 10 + NOISE, HARD * 10), strict=True):
        (run / "validation" / "step").mkdir(parents=True)
        # other documents under one name, then the same ones
        n = 5 if run.name == "a" else 6
        write_scores(run / "validation" / "step" / "1.documents.parquet", [9] * n, [1.0] * n)
        write_scores(run / "validation" / "step" / "2.documents.parquet", TOKENS.tolist(), nats.tolist())
    se, dof = find_paired_error(*runs)
    assert (se, dof) == (pytest.approx(NOISE.std() / np.sqrt(N) / 10, rel=0.1), N - 1)


def test_a_document_with_different_numbers_of_scored_tokens_is_skipped(tmp_path: Path) -> None:
    """An autoregressive model does not score the first token of the corpus."""
    for n in (3, 20):
        nats = list(map(float, range(n)))
        ar, diffusion = (
            write_scores(tmp_path / f"{first}", [first] + [5] * (n - 1), nats) for first in (4, 5)
        )
        result = compare_documents(ar, diffusion, n_bootstrap=10)
        assert (result.n_documents, result.loss_a) == (n - 1, pytest.approx(n / 2 / 5))
