"""Tests of scaling frontier on a table of runs."""

import json
from pathlib import Path

import numpy as np
import pandas as pd

E, A, B, ALPHA, BETA = 1.8, 480.0, 2080.0, 0.35, 0.37


def best_size(flops: float) -> float:
    """Return N of the lowest loss at C = 6 N D."""
    return (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA)) * (flops / 6) ** (BETA / (ALPHA + BETA))


def loss_of(n: float, flops: float) -> float:
    return E + A / n**ALPHA + B / (flops / (6 * n)) ** BETA


def test_the_optimum_of_a_table_is_that_of_its_surface(cli, tmp_path: Path) -> None:
    """Four sizes at five budgets of a Chinchilla surface with 0.2 % of noise, and rows of another corpus."""
    rng, rows = np.random.default_rng(0), []
    for corpus, worse in (("c4", 1.0), ("code", 1.5)):
        for flops in np.geomspace(1e17, 1e20, 5):
            for n in best_size(flops) * np.array([0.4, 0.8, 1.5, 3.0]):
                loss = worse * loss_of(n, flops) * np.exp(0.002 * rng.standard_normal())
                rows.append((n, flops / (6 * n), loss, flops, corpus))
    columns = ["n_params", "train_tokens", "loss", "flops", "corpus"]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "table.csv", index=False)
    words = ("--flops-by", "flops", "--where", "corpus == 'c4'", "--budgets", 1e19, 4e20)
    output = cli("frontier", tmp_path / "table.csv", *words, "--out", tmp_path / "law.json").output
    law = json.loads((tmp_path / "law.json").read_text())
    assert abs(law["params"]["size_exponent"] - BETA / (ALPHA + BETA)) < 0.02
    for flops, start in ((1e19, "1.00e+19"), (4e20, "4.00e+20")):
        (line,) = (line.split() for line in output.splitlines() if line.strip().startswith(start))
        numbers = [float(word) for word in line if word.replace(".", "").isdigit()]
        loss = loss_of(best_size(flops), flops)
        assert any(abs(number / loss - 1) < 0.01 for number in numbers), (loss, line)
