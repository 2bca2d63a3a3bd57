"""Tests of scaling power-law from the command line."""

from pathlib import Path

import numpy as np
import pandas as pd

from megatron.laws.power_law import fit_power

X = np.geomspace(1e18, 1e21, 6)
SE = np.array([0.02, 0.1, 0.05, 0.03, 0.08, 0.04])
Y = 0.1 * X**0.5 * np.exp(SE * np.random.default_rng(0).standard_normal(6))


def test_points_with_errors_give_the_weighted_law_and_both_intervals(cli, tmp_path: Path) -> None:
    """Six optima with errors of N_opt."""
    table = tmp_path / "optima.csv"
    pd.DataFrame({"C": X, "N_opt": Y, "SE": Y * SE}).to_csv(table, index=False)
    weighted = ("power-law", table, "--sigma-column", "SE")
    done = cli(*weighted, "--predict", 1e22, 1e20)
    law = fit_power(X, Y, SE)
    assert f"N_opt = {law.coefficient:.5g} C^{law.exponent:.4f}  (6 points)" in done.output
    _, low, high = law.predict(1e22)
    assert f"95 % predictive [{low:.5g}, {high:.5g}]" in done.output and "95 % confidence [" in done.output
    assert done.output.count("OUTSIDE") == 1
    assert f"C^{fit_power(X, Y).exponent:.4f}" in cli("power-law", table).output


def test_two_points_without_errors_have_no_interval(cli, tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    path.write_text("C,N_opt\n1e18,1e8\n1e20,1e9\n")
    output = cli("power-law", path, "--predict", 1e21).output
    assert "exponent: 95 % confidence not known" in output and output.count("not known") == 3
