"""Curves from loss to score, against published fits and known curves."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import least_squares
from scipy.stats import linregress

from megatron.laws.downstream_curve import chance_of_task, fit_downstream, kind_of_score, predict_score
from megatron.laws.fit import fit_law
from megatron.laws.fitting.noise import GROUPED
from tests.laws.known_laws import BESIROGLU, make_ratios, simulate_grid, simulate_losses
from tests.laws.published import read_gadre, read_gadre_fit_points, to_arrays


def error_of(L: np.ndarray) -> np.ndarray:
    """Return errors of a known curve."""
    return 0.85 - 2.2 * np.exp(-0.71 * L)


@pytest.mark.parametrize("kind", ["error", "accuracy"])
def test_a_noise_free_curve_is_recovered(kind: str) -> None:
    L = np.linspace(1.8, 4.5, 12)
    if kind == "error":
        expected = {"eps": 0.85, "k": 2.2, "gamma": 0.71}
        y = error_of(L)
    else:
        expected = {"floor": 0.25, "top": 0.9, "s": 3.0, "L0": 2.9}
        y = 0.25 + 0.65 / (1 + np.exp(3.0 * (L - 2.9)))
    curve = fit_downstream(L, y, kind, n_bootstrap=0, ceiling=expected.get("top", 1.0))
    assert curve.params == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(curve.score(L), y, atol=1e-9)


def bits_of(L: np.ndarray) -> np.ndarray:
    """Return bits per byte of a known line."""
    return 0.2 + 0.3 * L


def test_bits_per_byte_are_a_line_with_the_errors_of_least_squares() -> None:
    L = np.linspace(2.0, 5.0, 40)
    bits = bits_of(L) + 0.02 * np.random.default_rng(0).standard_normal(40)
    curve, twin = fit_downstream(L, bits, "bits_per_byte", n_bootstrap=2000), linregress(L, bits)
    assert curve.params == pytest.approx({"intercept": twin.intercept, "slope": twin.slope}, rel=1e-10)
    assert curve.spread == pytest.approx(np.sqrt(((bits - curve.score(L)) ** 2).sum() / 38), rel=1e-10)
    assert (curve.dof, curve.chance, curve.score_sd(0.9)) == (38, None, curve.spread)
    errors = {name: np.std(values) for name, values in curve.replicates.items()}
    assert errors == pytest.approx({"intercept": twin.intercept_stderr, "slope": twin.stderr}, rel=0.15)


def test_the_kind_of_a_score_decides_whether_it_has_a_chance_level() -> None:
    names = ("hellaswag-first200", "hellaswag-first200-bits_per_byte", "hellaswag-choice_probability", "a")
    kinds = [kind_of_score(name) for name in names]
    assert kinds == ["accuracy", "bits_per_byte", "choice_probability", "accuracy"]
    levels = [chance_of_task(name, kind) for name, kind in zip(names, kinds, strict=True)]
    assert levels == [0.25, None, 0.25, None]
    L, y = noisy_accuracies(400, 0)
    both = [fit_downstream(L, y, kind, 5, chance=0.25) for kind in ("accuracy", "choice_probability")]
    assert both[0].params == both[1].params and both[0].spread == both[1].spread


@pytest.mark.parametrize("dataset", ["c4_original", "rpj", "rw_original"])
@pytest.mark.parametrize(("column", "name"), [("err_avg_subset", "avg_subset"), ("err_avg", "avg")])
def test_six_runs_give_the_published_map_from_loss_to_error(
    laws: Path, dataset: str, column: str, name: str
) -> None:
    rows = read_gadre_fit_points(laws, dataset)
    rows += [row for row in read_gadre(laws) if row["name"] == f"{dataset}-open_lm_1b-1.0"]
    L, error = to_arrays(rows, "loss_c4_val", column)
    curve = fit_downstream(L, error, n_bootstrap=0)
    fits = json.loads((laws / "gadre_openlm" / "gadre_fits.json").read_text())
    assert curve.params == pytest.approx(fits[f"{dataset}|{name}"]["err"], rel=2e-4)


def test_the_interval_of_the_chain_includes_both_fits() -> None:
    n, d, loss = simulate_grid(5, 4, 0.005)
    error = error_of(loss) + 0.003 * np.random.default_rng(1).standard_normal(20)
    law = fit_law(n, d, loss, n_bootstrap=40)
    curve = fit_downstream(loss, error, n_bootstrap=40)
    value, low, high = predict_score(law, curve, np.array([1e9, 3e9]), 1e11)
    np.testing.assert_allclose(value, curve.score(law.loss(np.array([1e9, 3e9]), 1e11)), rtol=1e-12)
    assert value.shape == low.shape == (2,)
    assert ((low < value) & (value < high)).all()
    # intervals are wider for larger extrapolation
    assert (high - low)[1] > (high - low)[0]
    # a spread that few runs determine has wider intervals
    many, few = (predict_score(law, replace(curve, spread=0.02, dof=n), 1e9, 1e11) for n in (10**6, 2))
    assert few[2] - few[1] > 1.3 * (many[2] - many[1])
    with pytest.raises(ValueError, match="got 'credible', expected predictive or confidence"):
        predict_score(law, curve, 1e9, 1e10, kind="credible")


def noisy_accuracies(n_questions: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Losses and accuracies of a sigmoid from chance 0.25, with binomial error."""
    L = np.linspace(2.0, 3.6, 16)
    p = 0.25 + 0.6 / (1 + np.exp(4.0 * (L - 2.5)))
    return L, np.random.default_rng(seed).binomial(n_questions, p) / n_questions


@pytest.mark.parametrize("seed", range(2))
def test_a_sigmoid_stays_between_0_and_1_and_is_the_best_that_does(seed: int) -> None:
    L = np.linspace(2.0, 3.0, 12)  # the upper half of a curve: unbounded least squares leave [0, 1]
    rng = np.random.default_rng(seed)
    y = np.clip(1 / (1 + np.exp(6 * (L - 2.9))) + 0.02 * rng.standard_normal(12), 0, 1)
    curve = fit_downstream(L, y, "accuracy", n_bootstrap=20)
    assert all(0 <= floor <= 1 for floor in [curve.params["floor"], *curve.replicates["floor"]])
    assert {curve.params["top"], *curve.replicates["top"]} == {1.0} and curve.params["s"] > 0
    # scipy with bounds, from many starts
    twins = [
        least_squares(
            lambda x: x[0] + (1 - x[0]) / (1 + np.exp(x[1] * (L - x[2]))) - y,
            [floor, s, middle], bounds=([0, 1e-6, -np.inf], [1, np.inf, np.inf]), xtol=1e-14,
        ).cost
        for floor in (0.05, 0.3) for s in (2.0, 8.0) for middle in (2.5, 3.3)
    ]  # fmt: skip
    assert ((curve.score(L) - y) ** 2).sum() / 2 <= min(twins) * (1 + 1e-6)


def test_the_floor_is_chance_where_it_is_known() -> None:
    L, y = noisy_accuracies(400, 0)
    fixed = fit_downstream(L, y, "accuracy", chance=0.25, n_bootstrap=10)
    assert fixed.params["floor"] == 0.25 and set(fixed.replicates["floor"]) == {0.25} and fixed.dof == 14
    free = fit_downstream(L, y, "accuracy", n_bootstrap=0)
    assert free.params["floor"] != 0.25 and free.dof == 13
    assert chance_of_task("hellaswag-first200") == 0.25 and chance_of_task("my_own") is None


def test_the_scatter_of_a_score_is_unbiased_and_not_less_than_binomial() -> None:
    spreads = []
    for seed in range(30):
        L, y = noisy_accuracies(400, seed)
        curve = fit_downstream(L, y, "accuracy", n_bootstrap=0, chance=0.25, ceiling=0.85)
        spreads.append(curve.spread**2)
    p = 0.25 + 0.6 / (1 + np.exp(4.0 * (L - 2.5)))
    assert np.mean(spreads) == pytest.approx((p * (1 - p) / 400).mean(), rel=0.15)
    curve = fit_downstream(L, y, "accuracy", n_bootstrap=0, n_questions=20)
    assert float(curve.score_sd(0.5)) == pytest.approx(np.sqrt(0.25 / 20))
    assert float(curve.score_sd(1.0)) == curve.spread


def test_scores_of_one_model_are_grouped_and_the_curve_has_wider_intervals() -> None:
    n, d = make_ratios(22, 9)
    loss = simulate_losses(n, d, 0.0, params=BESIROGLU)
    rng = np.random.default_rng(0)
    noise = 0.01 * rng.standard_normal(22).repeat(9) + 0.003 * rng.standard_normal(198)
    scores = error_of(loss) + noise
    alone = fit_downstream(loss, scores, n_bootstrap=50, N=n, groups=range(198))
    grouped = fit_downstream(loss, scores, n_bootstrap=50, N=n)
    assert (grouped.n_groups, grouped.warnings) == (22, [GROUPED]) and alone.n_groups is None
    # nine rows of one model count as about one: the error grows by up to the root of nine
    ratio = np.std(grouped.replicates["gamma"]) / np.std(alone.replicates["gamma"])
    assert 1.8 < ratio < 4 and grouped.dof < 40 < alone.dof
    independent = error_of(loss) + 0.01 * rng.standard_normal(198)
    assert fit_downstream(loss, independent, n_bootstrap=0, N=n).warnings == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["accuracy", "bits_per_byte"])
def test_the_predictive_interval_covers_a_new_runs_score_and_the_confidence_interval_its_curve(
    kind: str,
) -> None:
    """60 trials: 57 are expected inside at 95 %; fewer than 50 has a probability below 1e-4. The
    confidence interval has a new run inside less often."""
    n, d, truth = simulate_grid(4, 4)
    at = 1.7 + 400 / 2e9**0.34 + 900 / 1e11**0.31
    inside = {"predictive": 0, "confidence": 0, "curve": 0}
    options = {"chance": 0.25, "n_questions": 500, "ceiling": 0.85} if kind == "accuracy" else {}

    def true_score(L: np.ndarray | float) -> np.ndarray:
        L = np.asarray(L)
        return 0.25 + 0.6 / (1 + np.exp(3.0 * (L - 2.6))) if kind == "accuracy" else bits_of(L)

    for seed in range(60):
        rng = np.random.default_rng(seed)
        loss = truth * np.exp(0.003 * rng.standard_normal(16))

        def measure(L: np.ndarray | float, rng: np.random.Generator = rng) -> np.ndarray:
            score = true_score(L)
            noisy = score + 0.01 * rng.standard_normal(score.shape)
            return rng.binomial(500, score) / 500 if kind == "accuracy" else noisy

        law = fit_law(n, d, loss, n_bootstrap=60, seed=seed)
        curve = fit_downstream(loss, measure(loss), kind, 60, seed, **options)
        new = measure(at * np.exp(0.003 * rng.standard_normal()))
        for interval in ("predictive", "confidence"):
            _, low, high = predict_score(law, curve, 2e9, 1e11, kind=interval)
            inside[interval] += bool(low <= new <= high)
        inside["curve"] += bool(low <= true_score(at) <= high)
    assert inside["predictive"] >= 50 and inside["confidence"] < inside["predictive"]
    assert inside["curve"] >= 50


def test_what_cannot_be_fitted_is_refused() -> None:
    arguments = {"L": np.linspace(2, 3, 9), "scores": np.linspace(0.3, 0.8, 9)[::-1], "kind": "accuracy"}
    for change, sentence in (
        ({"L": [2.0, 3.0], "scores": [0.1, 0.2], "kind": "error"}, "got 2 different losses for 3 constants"),
        ({"L": [2.0, np.nan], "scores": [0.1, 0.2]}, "expected equally many finite numbers"),
        ({"kind": "guess"}, "got 'guess', expected one of error, accuracy"),
        ({"kind": "bits_per_byte", "scores": [-0.1] * 9}, "bits_per_byte: got -0.1, expected 0 or more"),
        ({"kind": "bits_per_byte", "chance": 0.25}, "chance: got 0.25"),
        ({"kind": "bits_per_byte", "L": [2.0, 3.0] * 4 + [2.0]}, "got 2 different losses for 2 constants"),
        ({"kind": "choice_probability", "scores": [1.2] * 9}, r"got \[1.2\], expected shares"),
        ({"kind": "choice_probability", "n_questions": 9}, "n_questions: got choice_probability"),
        ({"scores": [30.0] * 9}, r"got \[30.0\], expected shares"),
        ({"chance": 1.5}, "chance: got 1.5"),
        ({"kind": "error", "chance": 0.25}, "for an accuracy"),
        ({"n_questions": 0}, "n_questions: got 0"),
        ({"chance": 0.5, "ceiling": 0.5}, "ceiling: got 0.5"),
        ({"kind": "error", "ceiling": 0.9}, "ceiling: got 0.9 for kind error"),
    ):
        with pytest.raises(ValueError, match=sentence):
            fit_downstream(**(arguments | change))


def test_a_score_has_the_noise_of_the_loss_at_its_compute() -> None:
    n, d = (a.ravel() for a in np.meshgrid(np.geomspace(1e6, 1e10, 8), np.geomspace(1e8, 1e12, 8)))
    sd = 0.05 * (n * d / (n * d).min()) ** -0.25  # 0.05 for the smallest run, 0.0005 for the largest
    loss = simulate_losses(n, d, sd, 1)
    law = fit_law(n, d, loss, n_bootstrap=50)
    assert law.noise["trend"]["slope"] < 0
    curve = fit_downstream(loss, error_of(loss), n_bootstrap=50)
    widths = []
    for size, tokens in ((1e6, 1e8), (1e10, 1e12)):
        _, low, high = predict_score(law, curve, size, tokens, kind="predictive")
        L = law.loss(size, tokens)
        slope = 2.2 * 0.71 * np.exp(-0.71 * L) * L  # d error / d log L
        widths.append(float((high - low) / slope))
    assert widths[0] > 5 * widths[1]
