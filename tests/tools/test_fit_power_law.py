"""Tests of scaling power-law from the command line."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.laws.power_law import fit_power

X = np.geomspace(1e18, 1e21, 6)
SE = np.array([0.02, 0.1, 0.05, 0.03, 0.08, 0.04])
Y = 0.1 * X**0.5 * np.exp(SE * np.random.default_rng(0).standard_normal(6))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Six optima with errors of N_opt."""
    rows = [f"{x},{y},{y * s}" for x, y, s in zip(X, Y, SE, strict=True)]
    path = tmp_path / "optima.csv"
    path.write_text("\n".join(["C,N_opt,SE", *rows]) + "\n")
    return path


def test_points_with_errors_give_the_weighted_law_and_both_intervals(cli, table: Path) -> None:
    done = cli("power-law", table, "--sigma-column", "SE", "--predict", 1e22, 1e20)
    law = fit_power(X, Y, SE)
    assert f"N_opt = {law.coefficient:.5g} C^{law.exponent:.4f}  (6 points)" in done.output
    _, low, high = law.predict(1e22)
    assert f"95 % predictive [{low:.5g}, {high:.5g}]" in done.output and "95 % confidence [" in done.output
    assert done.output.count("OUTSIDE") == 1
    answer = json.loads(
        cli("power-law", table, "--sigma-column", "SE", "--predict", 1e22, "--json", status=None).output
    )
    assert answer["exponent"] == pytest.approx(law.exponent)
    assert answer["predictions"][0]["predictive"] == pytest.approx([float(low), float(high)])
    plain = json.loads(cli("power-law", table, "--json").output)
    assert plain["exponent"] == pytest.approx(fit_power(X, Y).exponent)


def test_two_points_without_errors_have_no_interval(cli, tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    path.write_text("C,N_opt\n1e18,1e8\n1e20,1e9\n")
    assert "not known" in cli("power-law", path, "--predict", 1e21, status=None).output
    assert json.loads(cli("power-law", path, "--json").output)["exponent_confidence"] == [
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--y-column", "N_op"], "no column 'N_op'; did you mean 'N_opt'?"),
        (["--sigma-column", "se"], "no column 'se'"),
        (["--predict", "-1"], "--predict: got -1.0"),
    ],
)
def test_invalid_arguments_are_refused(cli, table: Path, words: list[str], sentence: str) -> None:
    done = cli("power-law", table, *words, status=None)
    assert done.status == 1 and sentence in done.error and done.output == ""


@pytest.mark.parametrize("cell", ["nan", "", "-3", "many"])
def test_an_invalid_cell_is_named(cli, tmp_path: Path, cell: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(f"C,N_opt\n1e18,1e8\n1e20,{cell}\n")
    done = cli("power-law", path, status=None)
    assert done.status == 1 and "row 2, N_opt: got" in done.error
