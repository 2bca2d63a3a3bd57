"""Every recorded number of shared/laws/expected.json that is not in test_fit.py, from the runs beside it."""

import json
import math
import runpy
from pathlib import Path

import numpy as np
import pytest

from megatron.scaling.fit import fit_law
from megatron.scaling.fit_form import Problem, fit_theta, limits_of, minimise
from megatron.scaling.forms import data_constrained, params_for
from megatron.scaling.frontier import optimal
from megatron.scaling.law import Law
from megatron.scaling.surface import Points, constants, theta_of

published_runs = runpy.run_path(str(Path(__file__).with_name("published.py")))
columns, datablations, expected, gadre, gadre_fit_points, numbers = (
    published_runs[name]
    for name in ("columns", "datablations", "expected", "gadre", "gadre_fit_points", "numbers")
)
CONSTANTS = ("E", "A", "B", "alpha", "beta")


@pytest.fixture(scope="module")
def runs(laws: Path) -> dict[str, np.ndarray]:
    return datablations(laws)


@pytest.fixture(scope="module")
def wanted(laws: Path) -> dict:
    return expected(laws, "datablations")


@pytest.fixture(scope="module")
def base(wanted: dict) -> dict[str, float]:
    """The constants of the 54 one-epoch runs on C4, as published; they are held in the published fit."""
    held = wanted["c4_base_54pts_published"]
    exponent = held["alpha=beta"]
    named = {name: math.exp(held[name.lower()]) for name in "EAB"}
    return named | {"alpha": exponent, "beta": exponent}


def r2(measured: np.ndarray, said: np.ndarray) -> float:
    return float(1 - ((measured - said) ** 2).sum() / ((measured - measured.mean()) ** 2).sum())


def problem(runs: dict[str, np.ndarray], form: str = "data_constrained") -> Problem:
    return Problem(form, Points.of(runs["N"], runs["D"], runs["L"], runs["U"]), 1e-3)


def objective_at(runs: dict[str, np.ndarray], base: dict[str, float], form: str, **decay: float) -> float:
    at = problem(runs, form)
    theta = theta_of(form, base | decay, at.points)[None]
    return float(at.objective(theta, np.ones((1, len(runs["N"]))))[0])


def huber_sum(measured: np.ndarray, said: np.ndarray) -> float:
    r = np.abs(np.log(measured) - np.log(said))
    inside = np.minimum(r, 1e-3)
    return float((inside * (r - inside / 2)).sum())


def test_the_size_that_unique_tokens_call_for_is_the_one_of_the_published_code(base, wanted) -> None:
    alpha, beta = base["alpha"], base["beta"]
    G = (alpha * base["A"] / (beta * base["B"])) ** (1 / (alpha + beta))
    unique = np.array([1e8, 4e9, 1e11])
    compute = 6 * (G * unique) ** ((alpha + beta) / alpha)
    np.testing.assert_allclose(
        params_for(base, unique), G * (compute / 6) ** (beta / (alpha + beta)), rtol=1e-12
    )


def test_the_published_fit_has_the_published_objective_and_r2(runs, wanted, base) -> None:
    published = wanted["published"]
    at = {name: published[name] for name in ("R_D", "R_N")}
    found = objective_at(runs, base, "data_constrained", **at)
    assert found == pytest.approx(wanted["objective_at_published_float64"], rel=1e-9)
    assert found == pytest.approx(published["objective"], rel=1e-6)  # that one was computed in float32
    said = data_constrained(base | at, runs["N"], runs["D"], runs["U"])
    assert r2(runs["L"], said) == pytest.approx(wanted["R2_at_published_refit"], rel=1e-7)


def test_the_published_optimum_is_one_of_several_and_not_the_lowest(runs, wanted, base) -> None:
    at = problem(runs)
    start = theta_of("data_constrained", base | {"R_D": 15.387756, "R_N": 5.309743}, at.points)[None]
    ones = np.ones((1, 182))
    here = minimise(at, start, ones, limits_of(at, base), 200)
    local = constants("data_constrained", here.phi, at.points)
    for name in ("R_D", "R_N"):
        assert local[name][0] == pytest.approx(wanted["local_minimum_at_published"][name], rel=2e-4)
    assert here.objective[0] == pytest.approx(wanted["local_minimum_at_published"]["objective"], rel=1e-6)
    every = fit_theta(at, ones[0], base)
    found = constants("data_constrained", every.phi, at.points)
    for lower in wanted["lower_minima_found"]:
        i = int(np.abs(every.objective - lower["objective"]).argmin())
        assert every.objective[i] == pytest.approx(lower["objective"], rel=1e-6)
        for name in ("R_D", "R_N"):
            assert found[name][i] == pytest.approx(lower[name], rel=5e-4)
    assert every.objective[0] < here.objective[0] * (1 - 1e-3)


def test_runs_do_not_hold_the_decay_of_repeated_data(runs, wanted, base) -> None:
    law = fit_law(**runs, form="data_constrained", fixed=base, n_bootstrap=60, seed=0)
    low, high = law.interval["params"]["R_D"]
    assert high > 1e6 and wanted["bootstrap95"]["R_D"][1] == "inf"
    assert low == pytest.approx(wanted["bootstrap95"]["R_D"][0], rel=0.4)
    assert any(one.startswith("R_D* ranges") and "not identified" in one for one in law.warnings)
    # of the recorded ends of R_N* at most a factor of two is the draw of the replicates
    for found, recorded in zip(law.interval["params"]["R_N"], wanted["bootstrap95"]["R_N"], strict=True):
        assert 0.5 < found / recorded < 2


def test_one_decay_alone_has_the_recorded_optimum(runs, wanted, base) -> None:
    data = fit_law(**runs, form="repeated_data", fixed=base, n_bootstrap=0)
    refit = wanted["data_only"]["refit"]
    assert data.params["R_D"] == pytest.approx(refit["R_D"], rel=1e-5)
    assert data.objective == pytest.approx(refit["objective"], rel=1e-9)
    assert r2(runs["L"], data.loss(runs["N"], runs["D"], runs["U"])) == pytest.approx(refit["R2"], rel=1e-7)
    published = wanted["data_only"]["published"]
    assert data.objective <= published["objective"]
    assert objective_at(runs, base, "repeated_data", R_D=published["R_D"]) == pytest.approx(
        published["objective"], rel=1e-6
    )
    size = fit_law(**runs, form="excess_params", fixed=base, n_bootstrap=0)
    refit = wanted["params_only"]["refit"]
    assert size.params["R_N"] == pytest.approx(refit["R_N"], rel=1e-4)
    assert size.objective == pytest.approx(refit["objective"], rel=5e-6)
    assert r2(runs["L"], size.loss(runs["N"], runs["D"], runs["U"])) == pytest.approx(refit["R2"], rel=1e-5)


def test_the_published_decay_of_excess_parameters_alone_is_no_optimum(runs, wanted, base) -> None:
    published = wanted["params_only"]["published"]
    at = base | {"R_N": published["R_N"]}
    N, D, U = (runs[name] for name in "NDU")
    assert r2(runs["L"], data_constrained(at, N, D, U)) == pytest.approx(published["R2"], rel=1e-6)
    # its objective is not of that law but of one that counts the unique tokens only
    seen_once = data_constrained(at, N, U, U)
    assert huber_sum(runs["L"], seen_once) == pytest.approx(published["objective"], rel=1e-6)
    found = objective_at(runs, base, "excess_params", R_N=published["R_N"])
    assert found > 2 * wanted["params_only"]["refit"]["objective"]
    # ten times as far away hardly anything changes: the gradient has vanished there
    assert objective_at(runs, base, "excess_params", R_N=7130.0) == pytest.approx(found, rel=0.005)


def test_without_any_decay_the_published_constants_explain_less_than_half(runs, wanted, base) -> None:
    said = base["E"] + base["A"] / runs["N"] ** base["alpha"] + base["B"] / runs["D"] ** base["beta"]
    for recorded in wanted["R2_no_decay_chinchilla"].values():
        assert r2(runs["L"], said) == pytest.approx(recorded, rel=1e-7)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("chinchilla", "chinchilla_5p"),
        ("repeated_data", "D_eff_only_6p"),
        ("data_constrained", "muennighoff_joint_7p"),
        ("over_repetition", "additive_overfit_8p"),
        ("bounded", "h/(1+h)_9p"),
    ],
)
def test_the_joint_fits_of_all_constants_are_as_recorded(runs, wanted, form: str, name: str) -> None:
    law = fit_law(**runs, form=form, n_bootstrap=0)
    objective, explained = wanted["joint_forms_same_objective"][name]
    assert law.objective == pytest.approx(objective, abs=5e-7)  # to the last digit recorded
    said = law.loss(runs["N"], runs["D"], runs["U"])
    assert law.objective == pytest.approx(huber_sum(runs["L"], said), rel=1e-9)
    assert r2(runs["L"], said) == pytest.approx(explained, abs=6e-5)


def chinchilla_points(laws: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    path = laws / "chinchilla_epoch" / "svg_extracted_data.csv"
    n, c, loss = columns(path, "Model Size", "Training FLOP", "loss")
    kept = loss < np.sort(loss)[-5]
    return n[kept], c[kept] / (6 * n[kept]), loss[kept], c[kept]


def test_least_squares_of_the_plain_loss_are_as_published(laws: Path) -> None:
    recorded = expected(laws, "chinchilla_epoch")["vpnls_rawMSE_217pts"]
    n, d, loss, c = chinchilla_points(laws)
    small = c < 1e21
    law = fit_law(
        n[small] / 1e6, d[small] / 1e9, loss[small], residual="nats", huber_delta=1e3, n_bootstrap=0
    )
    assert law.n_runs == 217
    for name in CONSTANTS:
        assert law.params[name] == pytest.approx(recorded[name], rel=1e-6)
        assert law.params[name] == pytest.approx(recorded["published"][name], abs=5.1e-5)
    assert 2 * law.objective == pytest.approx(recorded["RSS"], rel=1e-8)
    assert 2 * law.objective == pytest.approx(recorded["published"]["RSS"], abs=5e-7)
    assert law.derived["a_exponent"] == pytest.approx(recorded["a_exponent"], rel=1e-7)


def test_the_bootstrap_of_the_exponent_is_as_recorded_and_the_errors_as_published(laws: Path) -> None:
    recorded = expected(laws, "chinchilla_epoch")["bootstrap_4000_numpy_seed42"]
    n, d, loss, _ = chinchilla_points(laws)
    old_numpy = np.random.RandomState(42)
    drawn = [np.bincount(old_numpy.choice(240, 240, replace=True), minlength=240) for _ in range(4000)]
    law = fit_law(n, d, loss, weights=np.array(drawn))
    alpha, beta = (np.array(law.replicates[name]) for name in ("alpha", "beta"))
    a = beta / (alpha + beta)
    wanted = recorded["a_exponent"]
    assert a.mean() == pytest.approx(wanted["mean"], abs=6e-6)
    assert a.std(ddof=1) == pytest.approx(wanted["sd"], abs=6e-6)
    assert np.quantile(a, [0.1, 0.9]) == pytest.approx(wanted["CI80"], abs=1e-4)
    for name in CONSTANTS:
        # published to four digits; another draw of as many replicates
        assert law.standard_error[name] == pytest.approx(recorded["published_SE"][name], rel=2e-3)


def test_rounding_hoffmanns_exponents_moves_the_tokens_a_parameter_by_half(laws: Path) -> None:
    table = expected(laws, "chinchilla_epoch")["hoffmann_table_A3"]
    source = table["unrounded_tex"]
    whole = {name: math.exp(source[f"ln{name}"]) for name in "EAB"}
    whole |= {name: source[name] for name in ("alpha", "beta")}
    # what is printed is the source, rounded: 406.4 and 410.7 to four digits, the rest to two or three
    for name, digits in (("A", 1), ("B", 1), ("E", 2), ("alpha", 2), ("beta", 2)):
        assert round(whole[name], digits) == pytest.approx(table[name], abs=1e-9)
    ratios = []
    for params in (whole, {name: table[name] for name in CONSTANTS}):
        law = Law(form="chinchilla", params=params, objective=0.0, huber_delta=1e-3, n_runs=400)
        best = optimal(law, 5.76e23)
        ratios.append(float(best.D[0] / best.N[0]))
    # NOTES of the data: 58.9 before rounding, 92.7 after
    assert ratios == pytest.approx([58.9, 92.7], abs=0.06)


@pytest.mark.parametrize("dataset", ["c4_original", "rpj", "rw_original"])
def test_five_small_runs_give_the_published_law_of_over_training(laws: Path, dataset: str) -> None:
    n, d, loss = numbers(gadre_fit_points(laws, dataset), "N", "D", "loss_c4_val")
    law = fit_law(n, d, loss, form="over_training", residual="nats", huber_delta=1e3, n_bootstrap=0)
    published = json.loads((laws / "gadre_openlm" / "gadre_fits.json").read_text())
    assert law.params == pytest.approx(published[f"{dataset}|avg"]["loss"], rel=1e-5)
    if dataset != "rpj":
        return
    recorded = expected(laws, "gadre_openlm")
    for row in gadre(laws):
        name = {"rpj-open_lm_1b-32.0": "rpj_1b_M640_loss", "rpj-open_lm_7b-1.0": "rpj_7b_M20_loss"}.get(
            row["name"]
        )
        if name:
            measured = float(row["loss_c4_val"])
            off = 100 * abs(float(law.loss(float(row["N"]), float(row["D"]))) / measured - 1)
            assert off == pytest.approx(recorded["rel_err_pct_refit"][name], abs=6e-6)
            assert off == pytest.approx(recorded["rel_err_pct_published_notebook"][name], abs=6e-5)
