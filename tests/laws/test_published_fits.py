"""Every recorded number of shared/laws/expected.json, recomputed from its runs."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.laws.fit import fit_law
from megatron.laws.fitting.fit_problem import Problem
from megatron.laws.fitting.surface import RunPoints, Surface
from megatron.laws.forms import data_constrained
from megatron.laws.law import Law
from tests.laws.known_laws import count_trials
from tests.laws.published import (
    read_columns,
    read_datablations,
    read_expected,
    read_gadre,
    read_gadre_fit_points,
    refit_weighted,
    to_arrays,
)

CONSTANTS = ("E", "A", "B", "alpha", "beta")
NO_REPEAT_DECAY = {"R_D": 1e9}


@pytest.fixture(scope="module")
def runs(laws: Path) -> dict[str, np.ndarray]:
    return read_datablations(laws)


@pytest.fixture(scope="module")
def recorded_fits(laws: Path) -> dict:
    return read_expected(laws, "datablations")


@pytest.fixture(scope="module")
def base(recorded_fits: dict) -> dict[str, float]:
    """Published constants of the 54 one-epoch runs on C4, which are fixed in the published fit."""
    recorded = recorded_fits["c4_base_54pts_published"]
    exponent = recorded["alpha=beta"]
    named = {name: math.exp(recorded[name.lower()]) for name in "EAB"}
    return named | {"alpha": exponent, "beta": exponent}


def r2(measured: np.ndarray, predicted: np.ndarray) -> float:
    return float(1 - ((measured - predicted) ** 2).sum() / ((measured - measured.mean()) ** 2).sum())


def objective_at(runs: dict[str, np.ndarray], base: dict[str, float], form: str, **decay: float) -> float:
    points = RunPoints.from_columns(runs["N"], runs["D"], runs["L"], runs["U"])
    at = Problem(Surface(form), points, 1e-3)
    theta = at.surface.from_constants(base | decay, points)[None]
    return float(at.objective(theta, np.ones((1, len(runs["N"]))))[0])


def test_the_published_fit_has_the_published_objective_and_r2(runs, recorded_fits, base) -> None:
    published = recorded_fits["published"]
    at = {name: published[name] for name in ("R_D", "R_N")}
    objective = objective_at(runs, base, "data_constrained", **at)
    assert objective == pytest.approx(recorded_fits["objective_at_published_float64"], rel=1e-9)
    assert objective == pytest.approx(published["objective"], rel=1e-6)  # that one was computed in float32
    predicted = data_constrained(base | at, runs["N"], runs["D"], runs["U"])
    assert r2(runs["L"], predicted) == pytest.approx(recorded_fits["R2_at_published_refit"], rel=1e-7)


def test_the_fit_is_the_lowest_of_several_minima_and_below_the_published(runs, recorded_fits, base) -> None:
    law = fit_law(**runs, form="data_constrained", fixed=base, n_bootstrap=0)
    lowest = min(recorded_fits["lower_minima_found"], key=lambda minimum: minimum["objective"])
    assert law.objective == pytest.approx(lowest["objective"], rel=1e-6)
    assert law.objective < (1 - 1e-3) * recorded_fits["published"]["objective"]


def test_runs_do_not_identify_the_decay_of_repeated_data(runs, recorded_fits, base) -> None:
    # the recorded bootstrap draws single rows, so each run is a group of its own
    each_alone = np.arange(len(runs["N"]))
    law = fit_law(**runs, form="data_constrained", fixed=base, n_bootstrap=60, seed=0, groups=each_alone)
    assert law.fixed == sorted(base) and np.ptp(law.replicates["A"]) < 1e-9 * base["A"]
    low, high = law.interval["params"]["R_D"]
    assert high > 1e6 and recorded_fits["bootstrap95"]["R_D"][1] == "inf"
    assert low == pytest.approx(recorded_fits["bootstrap95"]["R_D"][0], rel=0.4)
    assert any(warning.startswith("R_D* ranges") and "not identified" in warning for warning in law.warnings)
    # the random draw of replicates changes the ends of R_N* by a factor of two at most
    for end, recorded in zip(law.interval["params"]["R_N"], recorded_fits["bootstrap95"]["R_N"], strict=True):
        assert 0.5 < end / recorded < 2


def test_one_decay_alone_has_the_recorded_optimum(runs, recorded_fits, base) -> None:
    data = fit_law(**runs, form="repeated_data", fixed=base, n_bootstrap=0)
    refit = recorded_fits["data_only"]["refit"]
    assert data.params["R_D"] == pytest.approx(refit["R_D"], rel=1e-5)
    assert data.objective == pytest.approx(refit["objective"], rel=1e-9)
    assert r2(runs["L"], data.loss(runs["N"], runs["D"], runs["U"])) == pytest.approx(refit["R2"], rel=1e-7)
    published = recorded_fits["data_only"]["published"]
    assert data.objective <= published["objective"]
    assert objective_at(runs, base, "repeated_data", R_D=published["R_D"]) == pytest.approx(
        published["objective"], rel=1e-6
    )
    size = fit_law(**runs, form="data_constrained", fixed=base | NO_REPEAT_DECAY, n_bootstrap=0)
    refit = recorded_fits["params_only"]["refit"]
    assert size.params["R_N"] == pytest.approx(refit["R_N"], rel=1e-4)
    assert size.objective == pytest.approx(refit["objective"], rel=5e-6)
    assert r2(runs["L"], size.loss(runs["N"], runs["D"], runs["U"])) == pytest.approx(refit["R2"], rel=1e-5)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("chinchilla", "chinchilla_5p"),
        ("repeated_data", "D_eff_only_6p"),
        ("data_constrained", "muennighoff_joint_7p"),
        ("over_repetition", "additive_overfit_8p"),
    ],
)
def test_the_joint_fits_of_all_constants_are_as_recorded(runs, recorded_fits, form: str, name: str) -> None:
    law = fit_law(**runs, form=form, n_bootstrap=0)
    objective, explained = recorded_fits["joint_forms_same_objective"][name]
    assert law.objective == pytest.approx(objective, abs=5e-7)  # to the last digit recorded
    predicted = law.loss(runs["N"], runs["D"], runs["U"])
    assert r2(runs["L"], predicted) == pytest.approx(explained, abs=6e-5)


@pytest.fixture(scope="module")
def chinchilla(laws: Path) -> dict[str, np.ndarray]:
    """The 245 points digitised from the figure of Hoffmann et al."""
    path = laws / "chinchilla_epoch" / "svg_extracted_data.csv"
    N, C, L = read_columns(path, "Model Size", "Training FLOP", "loss")
    return {"N": N, "D": C / (6 * N), "L": L, "C": C, "selected": np.sort(L)[-5] > L}


@pytest.fixture(scope="module")
def published(laws: Path) -> dict:
    return read_expected(laws, "chinchilla_epoch")


def fit_points(
    points: dict[str, np.ndarray], rows: np.ndarray | slice, units: float = 1.0, **options: Any
) -> Law:
    """Fit rows of the points, N in `units` and D in 1,000 `units`."""
    N, D, L = (points[name][rows] for name in "NDL")
    return fit_law(N / units, D / (1 if units == 1 else 1e3 * units), L, n_bootstrap=0, **options)


def check_constants(law: Law, recorded: dict, **tolerance: float) -> None:
    for name in CONSTANTS:
        assert law.params[name] == pytest.approx(recorded[name], **tolerance)


def test_the_published_points_have_the_recorded_global_optimum(chinchilla, published) -> None:
    recorded = published["huber_1e-3_global_optimum"]
    law = fit_points(chinchilla, chinchilla["selected"])
    assert law.n_runs == 240
    assert law.objective == pytest.approx(recorded["objective_sum"], rel=recorded["tol_rel_obj"])
    check_constants(law, recorded, rel=recorded["tol_rel_params"])
    assert law.derived["a_exponent"] == pytest.approx(recorded["a_exponent"], rel=1e-6)
    assert law.objective < published["epoch_notebook_4500_grid"]["objective_sum"]
    recorded = published["all_245_points_huber"]
    law = fit_points(chinchilla, slice(None))
    assert law.objective == pytest.approx(recorded["objective_sum"], rel=1e-8)
    check_constants(law, recorded, rel=1e-5)


def test_the_abstracts_values_are_the_least_absolute_deviation_optimum(chinchilla, published) -> None:
    law = fit_points(chinchilla, chinchilla["selected"], huber_delta=5e-9)
    check_constants(law, published["lad_optimum_delta_5e-9"], rel=2e-5)
    check_constants(law, published["published_abstract"], rel=5e-4)  # to the published number of digits


def test_least_squares_of_217_points_are_as_recorded_and_published(chinchilla, published) -> None:
    small = chinchilla["selected"] & (chinchilla["C"] < 1e21)
    assert small.sum() == 217
    law = fit_points(chinchilla, small, 1e6, huber_delta=1e3)
    check_constants(law, published["log_MSE_217pts"], rel=1e-6)
    recorded = published["vpnls_rawMSE_217pts"]
    law = fit_points(chinchilla, small, 1e6, huber_delta=1e3, residual="nats")
    check_constants(law, recorded, rel=1e-6)
    check_constants(law, recorded["published"], abs=5.1e-5)
    assert 2 * law.objective == pytest.approx(recorded["RSS"], rel=1e-8)
    assert 2 * law.objective == pytest.approx(recorded["published"]["RSS"], abs=5e-7)
    assert law.derived["a_exponent"] == pytest.approx(recorded["a_exponent"], rel=1e-7)


@count_trials(400, 4000)  # the first of the 4,000 recorded replicates
def test_the_bootstrap_is_as_recorded_and_its_errors_as_published(chinchilla, published, n: int) -> None:
    recorded, old_numpy = published["bootstrap_4000_numpy_seed42"], np.random.RandomState(42)
    resamples = [np.bincount(old_numpy.choice(240, 240, replace=True), minlength=240) for _ in range(n)]
    points = (chinchilla[name][chinchilla["selected"]] for name in "NDL")
    replicates = refit_weighted(*points, np.array(resamples))
    for name in CONSTANTS:
        assert replicates[name][0] == pytest.approx(recorded["first_replicate"][name], rel=2e-5)
        # the error of a standard deviation of n values is 1 / sqrt(2 n) of it, 3.5 % for 400
        spread = replicates[name].std(ddof=1)
        assert spread == pytest.approx(recorded["SE"][name], rel=1e-4 if n == 4000 else 0.12)
        if n < 4000:
            continue
        # published to four digits, from another draw of equally many replicates
        assert spread == pytest.approx(recorded["published_SE"][name], rel=2e-3)
        # recorded to 4 or 5 digits
        interval = np.quantile(replicates[name], [0.025, 0.975])
        assert interval == pytest.approx(recorded["CI95"][name], rel=2e-4)
    if n < 4000:
        return
    a, of_exponent = replicates["beta"] / (replicates["alpha"] + replicates["beta"]), recorded["a_exponent"]
    assert np.quantile(a, [0.025, 0.975]) == pytest.approx(of_exponent["CI95"], abs=2e-4)
    assert np.quantile(a, [0.1, 0.9]) == pytest.approx(of_exponent["CI80"], abs=1e-4)
    assert a.mean() == pytest.approx(of_exponent["mean"], abs=6e-6)
    assert a.std(ddof=1) == pytest.approx(of_exponent["sd"], abs=6e-6)


@pytest.mark.parametrize("dataset", ["c4_original", "rpj", "rw_original"])
def test_five_small_runs_give_the_published_law_of_over_training(laws: Path, dataset: str) -> None:
    n, d, loss = to_arrays(read_gadre_fit_points(laws, dataset), "N", "D", "loss_c4_val")
    law = fit_law(n, d, loss, form="over_training", residual="nats", huber_delta=1e3, n_bootstrap=0)
    published = json.loads((laws / "gadre_openlm" / "gadre_fits.json").read_text())
    assert law.params == pytest.approx(published[f"{dataset}|avg"]["loss"], rel=1e-5)
    if dataset != "rpj":
        return
    recorded = read_expected(laws, "gadre_openlm")
    rows = {row["name"]: row for row in read_gadre(laws)}
    for run, name in (("1b-32.0", "rpj_1b_M640_loss"), ("7b-1.0", "rpj_7b_M20_loss")):
        row = rows[f"rpj-open_lm_{run}"]
        predicted = float(law.loss(float(row["N"]), float(row["D"])))
        off = 100 * abs(predicted / float(row["loss_c4_val"]) - 1)
        assert off == pytest.approx(recorded["rel_err_pct_refit"][name], abs=6e-6)
        assert off == pytest.approx(recorded["rel_err_pct_published_notebook"][name], abs=6e-5)
