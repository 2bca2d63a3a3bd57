"""Published laws against numbers in their papers other than the constants."""

import math
import runpy
from pathlib import Path

import numpy as np
import pytest

from megatron.laws.frontier import optimal_frontier
from megatron.laws.prediction import predict_run
from megatron.study.published import HyperparameterLaw, PublishedLaw, find_law, load_published

published = runpy.run_path(str(Path(__file__).parents[1] / "laws" / "published.py"))
# FLOPs, parameters, tokens by approach 3: table A3 of Hoffmann et al.
TABLE_A3 = [
    (2.21e19, 4e8, 9.2e9),
    (1.62e20, 1e9, 2.71e10),
    (2.46e22, 1e10, 4.101e11),
    (1.71e24, 6.7e10, 4.1e12),
]


def law_of(name: str):
    entry = load_published()[name]
    assert isinstance(entry, PublishedLaw)
    return entry.to_law()


@pytest.mark.parametrize(("C", "N", "D"), TABLE_A3)
def test_chinchilla_gives_the_optima_of_its_table(C: float, N: float, D: float) -> None:
    frontier = optimal_frontier(law_of("chinchilla-unrounded"), C)
    assert frontier.N[0] == pytest.approx(N, rel=0.06) and frontier.D[0] == pytest.approx(D, rel=0.06)


def test_chinchilla_puts_gophers_budget_at_40_billion_parameters() -> None:
    assert optimal_frontier(law_of("chinchilla-unrounded"), 5.76e23).N[0] == pytest.approx(40e9, rel=0.02)
    # the rounded constants do not, and have a note about it
    rounded = law_of("chinchilla")
    assert optimal_frontier(rounded, 5.76e23).N[0] == pytest.approx(32e9, rel=0.02)
    assert "32B" in rounded.warnings[0]


def test_printed_and_unrounded_chinchilla_constants_agree_in_the_printed_digits() -> None:
    digits = {"E": 2, "A": 1, "B": 1, "alpha": 2, "beta": 2}
    for name, places in digits.items():
        exact = law_of("chinchilla-unrounded").params[name]
        assert round(exact, places) == law_of("chinchilla").params[name]


def test_besiroglu_has_the_optima_of_its_abstract_and_text() -> None:
    law = law_of("besiroglu")
    a = law.params["beta"] / (law.params["alpha"] + law.params["beta"])
    assert round(a, 3) == 0.513 or round(a, 3) == 0.512
    at = optimal_frontier(law, 5.76e23)
    assert 15 < at.D[0] / at.N[0] < 25  # "consistent with the 20 tokens per parameter of Chinchilla"
    other = optimal_frontier(law_of("chinchilla-unrounded"), 5.76e23)
    assert 50 < other.D[0] / other.N[0] < 75  # "70 tokens per parameter" of the original fit


def test_muennighoff_rounds_to_the_printed_law_and_has_the_published_objective(laws: Path) -> None:
    law = law_of("muennighoff")
    printed = {"E": 1.87, "A": 521, "B": 1488, "alpha": 0.353, "beta": 0.353, "R_D": 15.39, "R_N": 5.31}
    for name, value in printed.items():
        assert law.params[name] == pytest.approx(value, rel=1.5e-3)
    runs = published["read_datablations"](laws)
    r = np.abs(np.log(runs["L"]) - np.log(law.loss(runs["N"], runs["D"], runs["U"])))
    huber = np.minimum(r, 1e-3) * (r - 0.5 * np.minimum(r, 1e-3))
    recorded = published["read_expected"](laws, "datablations")["published"]
    assert huber.sum() == pytest.approx(recorded["objective"], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "E", "a", "b", "eta"),
    [
        ("gadre-c4", 1.51, 141, 190, 0.121),
        ("gadre-redpajama", 1.84, 212, 367, 0.136),
        ("gadre-refinedweb", 1.73, 157, 246, 0.127),
    ],
)
def test_gadre_in_the_papers_own_constants(name: str, E: float, a: float, b: float, eta: float) -> None:
    params = law_of(name).params
    half = params["eta"] / 2
    assert (round(params["E"], 2), round(half, 3)) == (E, eta)
    assert (round(params["a"] * 6**half), round(params["b"])) == (a, b)
    # and the form in N and D is that of C and M = D/N
    N, D = 1.4e9, 9e11
    C, M = 6 * N * D, D / N
    paper = params["E"] + (params["a"] * 6**half * M**half + params["b"] * M**-half) * C**-half
    assert float(law_of(name).loss(N, D)) == pytest.approx(paper, rel=1e-12)


@pytest.mark.parametrize(
    ("run", "recorded"),
    [("rpj-open_lm_1b-32.0", "rpj_1b_M640_loss"), ("rpj-open_lm_7b-1.0", "rpj_7b_M20_loss")],
)
def test_gadre_misses_the_large_runs_by_what_is_published(laws: Path, run: str, recorded: str) -> None:
    row = next(row for row in published["read_gadre"](laws) if row["name"] == run)
    loss = float(law_of("gadre-redpajama").loss(float(row["N"]), float(row["D"])))
    off = 100 * abs(loss / float(row["loss_c4_val"]) - 1)
    recorded_errors = published["read_expected"](laws, "gadre_openlm")["rel_err_pct_published_notebook"]
    assert off == pytest.approx(recorded_errors[recorded], abs=1e-3)


@pytest.mark.parametrize("N", [1e6, 1e8, 1.5e9])
def test_kaplan_loses_two_percent_where_the_paper_says_that_overfitting_begins(N: float) -> None:
    """Their equation 4.4: D above 5e3 N^0.74 keeps the penalty of finite data within 0.02."""
    law = law_of("kaplan")
    penalty = float(law.loss(N, 5e3 * N**0.74) / law.loss(N, 1e30)) - 1
    assert penalty == pytest.approx(0.02, abs=0.003)


def test_step_law_is_the_formula_of_its_abstract() -> None:
    law = load_published()["step-law"]
    assert isinstance(law, HyperparameterLaw)
    N, D = 1e9, 1e11
    expected = (1.79 * N**-0.713 * D**0.307, 0.58 * D**0.571)
    assert law.predict(N, D) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match="D: got .*nan"):
        law.predict(N, math.nan)


@pytest.mark.parametrize("name", load_published())
def test_each_has_a_source_and_predicts_without_an_interval(name: str, tmp_path: Path) -> None:
    law, entry = find_law(name)
    assert "arXiv" in load_published()[name].source
    if entry is not None:
        prediction = predict_run(law, 1e9, 2e10)
        assert 1.5 < prediction.loss < 4 and prediction.confidence is None and prediction.predictive is None
        law.save(tmp_path / "law.json")
        again, nothing = find_law(tmp_path / "law.json")
        assert nothing is None and again.params == law.params


def test_an_unknown_name_gets_the_nearest_suggestion() -> None:
    with pytest.raises(FileNotFoundError, match="did you mean 'chinchilla'"):
        find_law("chinchila")
