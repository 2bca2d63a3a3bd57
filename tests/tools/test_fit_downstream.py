"""Tests of scaling downstream and scaling crossover from the command line."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from megatron.laws.fit import fit_law
from megatron.laws.forms import FORM
from tests.tools.conftest import TRUTH, simulate_runs


def save_law(runs: pd.DataFrame, path: Path, n_bootstrap: int) -> None:
    columns = (runs[name].to_numpy() for name in ("n_params", "train_tokens", "loss"))
    fit_law(*columns, n_bootstrap=n_bootstrap).save(path)


def test_a_score_is_fitted_and_predicted_through_the_law(cli, tmp_path: Path) -> None:
    runs = simulate_runs(5, 4)
    runs.assign(err=0.9 - 2.0 * np.exp(-0.7 * runs.loss)).to_csv(tmp_path / "table.csv", index=False)
    save_law(runs, tmp_path / "law.json", 5)
    words = ("--score-column", "err", "--law", tmp_path / "law.json", "--predict", 7e9, 1.4e12)
    done = cli("downstream", tmp_path / "table.csv", *words)
    assert "eps 0.9, k 2, gamma 0.7" in done.output
    at = FORM["chinchilla"].loss(TRUTH, 7e9, 1.4e12)
    assert f"predicted {0.9 - 2 * np.exp(-0.7 * at):.4f}" in done.output


def test_bits_per_byte_of_right_answers_follow_compute_and_accuracy_follows_them(cli, tmp_path: Path) -> None:
    """Llama 3's two steps: bits per byte over N and D, then accuracy over bits per byte."""
    runs, bits = simulate_runs(5, 4), FORM["chinchilla"].loss(TRUTH, 7e9, 1.4e12) * 0.3 + 0.1
    runs["score_quiz-bits_per_byte"] = 0.3 * runs.loss + 0.1
    runs["score_quiz"] = 0.2 + 0.8 / (1 + np.exp(6 * (runs["score_quiz-bits_per_byte"] - 0.8)))
    runs.to_csv(tmp_path / "table.csv", index=False)
    save_law(runs, tmp_path / "law.json", 5)
    at = ("--predict", 7e9, 1.4e12)
    column = ("--score-column", "score_quiz-bits_per_byte")
    line = cli("downstream", tmp_path / "table.csv", *column, "--law", tmp_path / "law.json", *at).output
    assert "intercept 0.1, slope 0.3" in line and f"predicted {bits:.4f}" in line and "chance" not in line
    words = ("--from", "csv", "--map", "loss=score_quiz-bits_per_byte", "--out", tmp_path / "bits.csv")
    cli("collect", tmp_path / "table.csv", *words)
    save_law(pd.read_csv(tmp_path / "bits.csv"), tmp_path / "bits.json", 5)
    words = ("--score-column", "score_quiz", "--chance", 0.2, "--law", tmp_path / "bits.json")
    chain = cli("downstream", tmp_path / "bits.csv", *words, *at).output
    assert "floor 0.2, top 1, s 6, L0 0.8" in chain
    assert f"predicted {0.2 + 0.8 / (1 + np.exp(6 * (bits - 0.8))):.4f}" in chain


def test_the_crossover_of_two_laws_is_printed(cli, tmp_path: Path) -> None:
    n, u, e = np.meshgrid(np.geomspace(1e7, 1e9, 4), np.geomspace(1e8, 1e10, 3), [1, 4, 15, 60])
    n, d, u = n.ravel(), (u * e).ravel(), u.ravel()
    base = TRUTH | {"R_D": 6.0}
    for name, params in (("ar", base), ("md", base | {"A": 480.0, "B": 1100.0, "R_D": 200.0})):
        loss = FORM["repeated_data"].loss(params, n, d, u)
        fit_law(n, d, loss, U=u, form="repeated_data", n_bootstrap=3).save(tmp_path / f"{name}.json")
    done = cli("crossover", tmp_path / "ar.json", tmp_path / "md.json", "--unique", 1e8, 1e9)
    assert done.output.count("C_crit ") == 2 and "95 % confidence [" in done.output


@pytest.mark.slow
def test_tasks_are_not_mixed_and_the_interval_is_labelled_with_its_kind(cli, tmp_path: Path) -> None:
    rng, runs = np.random.default_rng(0), simulate_runs(5, 4, noise=0.003)
    scores = []
    for task, chance in (("piqa", 0.5), ("hellaswag", 0.25)):
        p = chance + 0.4 / (1 + np.exp(3 * (runs.loss - 2.6)))
        scores.append(runs.assign(task=task, accuracy=rng.binomial(900, p) / 900))
    pd.concat(scores).to_csv(tmp_path / "scores.csv", index=False)
    save_law(runs, tmp_path / "law.json", 20)
    words = ("downstream", tmp_path / "scores.csv", "--score-column", "accuracy", "--kind", "accuracy")
    words += ("--where", "task == 'piqa'")
    predicted = ("--law", tmp_path / "law.json", "--predict", 2e9, 1e11)
    done = cli(*words, "--n-questions", 900, *predicted)
    assert "20 runs: floor 0.5, " in done.output and "; top fixed at 1, floor at chance" in done.output
    assert "95 % predictive [" in done.output and "95 % confidence [" in done.output
    free = cli(*words, "--chance", "free", "--ceiling", 0.9).output
    assert "floor 0.5," not in free and "; top fixed at 0.9\n" in free
