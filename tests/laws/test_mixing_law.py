"""Mixing laws: recovery, choice of the form, RegMix's table, larger sizes, coverage, refusals."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import approx_fprime
from scipy.stats import spearmanr

from megatron.laws.best_mixture import BETTER, NOT_SHOWN, find_best_mixture
from megatron.laws.fitting.mixing_form import PLACES, MixingForm, MixtureRuns
from megatron.laws.mixing_law import MixingLaw, fit_mixing_law, read_runs

Truth = Callable[[np.ndarray, float, float], float]  # (shares, N, D) -> loss
WORTH = np.array([1.0, 0.3, -0.5, 0.0, -1.0])  # log of the worth of each domain
G = 0.6
UNIQUE = 2e8  # tokens of the first domain


def power_truth(
    w: np.ndarray, N: float, D: float, worth: np.ndarray = WORTH, unique: float = np.inf
) -> float:
    """Return a loss in which w^G of each domain adds up, with `unique` tokens of the first one, R = 15."""
    tokens = w * D
    repeats = max(tokens[0] / unique - 1, 0)
    if repeats:
        tokens[0] = unique * (1 + 15 * (1 - np.exp(-repeats / 15)))
    D = tokens.sum()
    factor = (np.exp(worth) * (tokens / D) ** G).sum() ** -0.25
    return 1.7 + factor * (400 * N**-0.34 + 400 * D**-0.28)


def interacting_truth(rng: np.random.Generator, k: int) -> Truth:
    """Return a loss outside of all forms: 3 k skills with domains and saturation; domains interact."""
    reach, weight = rng.dirichlet(np.full(k, 0.5), 3 * k), rng.dirichlet(np.ones(3 * k))
    pairs = rng.normal(0, 0.15, (k, k))

    def loss(w: np.ndarray, N: float, D: float) -> float:
        share = reach @ w
        skills = 1.2 + 0.8 * np.exp(-2 * share) + 350 * N**-0.33 + 250 * (D * (share + 0.02)) ** -0.3
        return float(weight @ skills * np.exp(0.15 * w @ (pairs + pairs.T) @ w / 2))

    return loss


def make_table(
    truth: Truth, W: np.ndarray, sizes: tuple[float, ...], rng: np.random.Generator, noise: float = 0.003
) -> pd.DataFrame:
    """Return runs of every mixture and size at 20 tokens per parameter; column `law` is without noise."""
    runs = [(w, N, 20 * N) for N in sizes for w in W]
    table = pd.DataFrame(
        [w for w, _, _ in runs], columns=[f"weight_{name}" for name in "abcdefg"[: W.shape[1]]]
    )
    law = np.array([truth(w, N, D) for w, N, D in runs])
    sizes_of_runs = {"n_params": [N for _, N, _ in runs], "train_tokens": [D for _, _, D in runs]}
    return table.assign(**sizes_of_runs, law=law, loss=law * np.exp(noise * rng.normal(size=len(runs))))


def add_epochs(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(epochs_a=table.weight_a * table.train_tokens / UNIQUE)


@pytest.fixture(scope="module")
def exact() -> MixingLaw:
    """A law of 40 mixtures, three sizes, almost no noise."""
    rng = np.random.default_rng(0)
    table = make_table(power_truth, rng.dirichlet(np.ones(5), 40), (5e7, 1e8, 2e8), rng, noise=1e-4)
    return fit_mixing_law(table, n_bootstrap=40)


def test_a_law_predicts_new_mixtures_and_sizes(exact: MixingLaw) -> None:
    rng = np.random.default_rng(1)
    new = make_table(power_truth, rng.dirichlet(np.ones(5), 20), (1e8, 8e8), rng)
    predicted = exact.predict(new)
    assert np.abs(np.log(predicted.loss / new.law))[:20].max() < 2e-3
    assert np.abs(np.log(predicted.loss / new.law))[20:].max() < 1e-2
    assert (predicted.predictive_low < predicted.confidence_low).all()


def test_the_best_mixture_is_that_of_the_calculus(exact: MixingLaw) -> None:
    """sum exp(t_j) w_j^g is largest at w_j proportional to exp(t_j / (1 - g))."""
    expected = np.exp(WORTH / (1 - G)) / np.exp(WORTH / (1 - G)).sum()
    anywhere = dict.fromkeys("abcde", (0.0, 1.0))
    best = find_best_mixture(exact, bounds=anywhere, compared={"natural": dict.fromkeys("abcde", 0.2)})
    np.testing.assert_allclose(best.domains.weight, expected, atol=0.02)
    saved = 1 - power_truth(expected, 2e8, 4e9) / power_truth(np.full(5, 0.2), 2e8, 4e9)
    natural = best.gains.loc["natural"]
    assert natural.low < saved < natural.high
    assert natural.verdict == BETTER
    assert natural.gain == pytest.approx(saved, rel=0.05)


def test_a_limit_of_epochs_bounds_the_share(exact: MixingLaw) -> None:
    best = find_best_mixture(exact, N=1e8, D=2e9, unique={"a": 1e8}, max_epochs=4)
    assert best.domains.weight.sum() == pytest.approx(1)
    assert best.domains.loc["a"].tolist()[:3] == [pytest.approx(0.2), pytest.approx(4), True]
    assert np.isnan(best.domains.epochs["b"])


def test_unique_tokens_of_one_domain_keep_the_limits_of_others() -> None:
    rng = np.random.default_rng(0)
    table = add_epochs(make_table(power_truth_of_three, rng.dirichlet(np.ones(3), 12), (5e7, 1e8), rng))
    law = fit_mixing_law(table, n_bootstrap=5)
    best = find_best_mixture(law, unique={"b": 4e8}, max_epochs=1)
    assert best.domains.weight["a"] <= UNIQUE / 2e9 * 1.001
    assert best.domains.weight["b"] <= 0.2001


def test_the_default_budget_is_that_of_the_largest_run() -> None:
    rng = np.random.default_rng(0)
    table = make_table(power_truth_of_three, rng.dirichlet(np.ones(3), 12), (5e7, 1e8), rng)
    table["train_tokens"] = np.where(table.n_params > 6e7, 2e9, 4e9)
    best = find_best_mixture(fit_mixing_law(table, n_bootstrap=5))
    assert (best.prediction["N"], best.prediction["D"]) == (1e8, 2e9)


def test_a_drift_of_the_slope_widens_what_is_beyond_the_runs(exact: MixingLaw) -> None:
    points = make_table(power_truth, np.full((1, 5), 0.2), (2e8, 8e8), np.random.default_rng(0))
    none, some = (replace(exact, drift=drift) for drift in (0.0, 0.02))
    inside, beyond = some.drift_variance(read_runs(points, exact.domains))
    # the reducible share of the loss; log(N D) is log 16 further, and log 4 between the two largest sizes
    share = 1 - 1.7 / points.law[1]
    assert inside == 0
    spread = 0.02 * share * math.log(16) * math.sqrt(math.log(64) / 3)
    assert math.sqrt(beyond) == pytest.approx(spread, rel=0.1)
    widths = [np.log(law.predict(points).confidence_high / law.predict(points).loss) for law in (none, some)]
    assert widths[1][0] == widths[0][0]
    assert widths[1][1] == pytest.approx(math.hypot(widths[0][1], 1.96 * math.sqrt(beyond)), rel=0.1)
    # slopes of two mixtures drift apart
    gains = [find_best_mixture(law, N=8e8, D=1.6e10).gains.iloc[0] for law in (none, some)]
    assert gains[1].high - gains[1].low > math.sqrt(beyond) > gains[0].high - gains[0].low


def test_repeated_tokens_are_worth_less() -> None:
    """Truth of R = 15; the second half of the table predicts 16 epochs of a domain from up to 8."""
    rng = np.random.default_rng(0)

    def truth(w: np.ndarray, N: float, D: float) -> float:
        return power_truth(w, N, D, unique=UNIQUE)

    W = rng.dirichlet(np.ones(5), 30)
    law = fit_mixing_law(add_epochs(make_table(truth, W, (5e7, 1e8), rng, noise=5e-4)), n_bootstrap=40)
    far = add_epochs(make_table(truth, W[W[:, 0] > 0.3], (2e8,), rng))
    predicted = law.predict(far)
    fresh = law.predict(far.assign(epochs_a=1.0))
    assert far.epochs_a.max() > 10
    assert np.abs(np.log(predicted.loss / far.law)).max() < 0.01
    assert (fresh.loss < predicted.loss).all()


@pytest.mark.parametrize("place", PLACES)
def test_slopes_are_those_of_differences(place: str) -> None:
    rng = np.random.default_rng(0)
    W = rng.dirichlet(np.ones(3), 4)
    runs = MixtureRuns(
        W, np.geomspace(1e7, 1e9, 4), np.geomspace(1e9, 1e10, 4), np.tile([1e8, np.inf, 1e9], (4, 1))
    )
    form = MixingForm(place, 3, {"N": 1e8, "D": 3e9}, True, 2.0, 1.0)
    theta = form.moments[0] + 0.3 * rng.normal(size=len(form.prior))
    expected = approx_fprime(theta, lambda at: form.log_loss(at[None], runs)[0], 1e-7)
    np.testing.assert_allclose(form.differentiate(theta[None], runs)[0], expected, atol=1e-5)


def test_targets_are_fitted_apart_and_summed() -> None:
    """A sum of two laws is outside of the forms; its targets are not."""
    rng = np.random.default_rng(0)
    W = rng.dirichlet(np.ones(5), 40)
    tables = [
        make_table(lambda w, N, D, t=t: power_truth(w, N, D, t), W, (1e8,), rng, 1e-4)
        for t in (2 * WORTH, -WORTH)
    ]
    both = tables[0].assign(loss_of_x=tables[0].loss, loss_of_y=tables[1].loss)
    weights = {"loss_of_x": 0.7, "loss_of_y": 0.3}
    law = fit_mixing_law(both, targets=weights, n_bootstrap=20)
    mean = both.assign(loss=0.7 * both.loss_of_x + 0.3 * both.loss_of_y)
    single = fit_mixing_law(mean, targets={"loss": 1.0}, n_bootstrap=20)
    assert law.errors["reducible"][0] < single.errors["reducible"][0] / 2
    np.testing.assert_allclose(law.predict(both).loss, 0.7 * tables[0].law + 0.3 * tables[1].law, rtol=2e-3)


def test_a_trained_mixture_is_predicted_with_its_effect() -> None:
    rng = np.random.default_rng(0)
    W, effects = rng.dirichlet(np.ones(3), 30), 0.02 * rng.normal(size=30)
    table = make_table(lambda w, N, D: power_truth(w, N, D, WORTH[:3]), W, (5e7, 1e8), rng, noise=1e-3)
    law = fit_mixing_law(table.assign(loss=table.loss * np.exp(np.tile(effects, 2))), n_bootstrap=40)
    assert law.noise.between == pytest.approx(0.02, rel=0.3)
    assert law.noise.within < 0.004
    predicted = law.predict(table)
    error = np.log(predicted.loss / table.law) - np.tile(effects, 2)
    assert error.std() < 0.003
    width = np.log(predicted.predictive_high / predicted.loss)
    other = law.predict(make_table(power_truth_of_three, rng.dirichlet(np.ones(3), 5), (1e8,), rng))
    assert np.log(other.predictive_high / other.loss).min() > 2 * width.median()


def power_truth_of_three(w: np.ndarray, N: float, D: float) -> float:
    return power_truth(w, N, D, WORTH[:3])


def test_equal_mixtures_have_no_better_one() -> None:
    rng = np.random.default_rng(3)
    table = make_table(lambda w, N, D: 1.7 + 400 * N**-0.34, rng.dirichlet(np.ones(4), 20), (5e7, 1e8), rng)
    assert find_best_mixture(fit_mixing_law(table, n_bootstrap=60)).gains.verdict.tolist() == [NOT_SHOWN]


def test_domains_that_the_runs_leave_open_are_named() -> None:
    rng = np.random.default_rng(0)
    W = rng.dirichlet(np.ones(3), 12)
    table = make_table(power_truth_of_three, W, (1e8,), rng).assign(weight_z=0.0)
    assert fit_mixing_law(table, n_bootstrap=5).not_identified == ["z"]
    few = fit_mixing_law(table[:4], n_bootstrap=40)
    assert few.not_identified == ["a", "b", "c", "z"]
    assert "NOT IDENTIFIED" in repr(few)
    widths = [
        np.log(law.predict(table).confidence_high / law.predict(table).confidence_low)
        for law in (few, fit_mixing_law(table, n_bootstrap=40))
    ]
    assert widths[0][4:].mean() > 1.5 * widths[1][4:].mean()


def test_with_one_run_of_each_mixture_all_scatter_may_be_of_the_form() -> None:
    rng = np.random.default_rng(0)
    law = fit_mixing_law(make_table(interacting_truth(rng, 3), rng.dirichlet(np.ones(3), 16), (1e8,), rng))
    assert law.noise.within == 0
    assert law.noise.between == law.noise.sigma > 0
    assert not law.effects.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_a": 0.5}, "row 1: got .* sum of .* expected 0 or more and 1"),
        ({"weight_a": np.nan}, "weights of a, b, c, row 1: got .nan"),
        ({"loss": np.nan}, "loss, run 1: got nan"),
        ({"epochs_A": 2.0}, "epochs_A: got no"),
        ({"n_params": 0.0}, "n_params, run 1: got 0.0"),
        ({"weight_a": 0.2, "weight_b": 0.3, "weight_c": 0.5}, "mixtures: got 1"),
    ],
)
def test_a_table_is_refused(change: dict[str, float], message: str) -> None:
    rng = np.random.default_rng(0)
    table = make_table(power_truth_of_three, rng.dirichlet(np.ones(3), 8), (1e8,), rng).assign(**change)
    with pytest.raises(ValueError, match=message):
        fit_mixing_law(table)


def test_missing_columns_are_refused(exact: MixingLaw) -> None:
    for columns, name in ((["loss"], "weight_DOMAIN"), (["weight_a"], "loss")):
        with pytest.raises(ValueError, match=f"^{name}: got no such column"):
            fit_mixing_law(pd.DataFrame(dict.fromkeys(columns, [1.0, 1.0])))
    with pytest.raises(ValueError, match="weight_a: got no such column"):
        exact.predict(pd.DataFrame({"weight_b": [1.0]}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bounds": {"z": (0, 1)}}, "bounds: got domain 'z'"),
        ({"unique": {"z": 1e9}}, "unique: got domain 'z'"),
        ({"compared": {"natural": {"a": 0.5}}}, "row 1: got"),
        ({"bounds": {"a": (0.5, 0.4)}}, "bounds: got"),
        ({"max_epochs": 4}, "max_epochs: got no domain"),
        ({"bounds": dict.fromkeys("abcde", (0.3, 1.0))}, "around sums of 1"),
        ({"unique": dict.fromkeys("abcde", 1e8), "max_epochs": 4}, "around sums of 1"),
    ],
)
def test_a_search_is_refused(exact: MixingLaw, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_best_mixture(exact, **options)


def read_regmix(laws: Path, name: str) -> pd.DataFrame:
    """Return a table of Liu et al.: `name` is train_1m, test_1m, test_60m or test_1B."""
    split, size = name.split("_")
    parts = [
        pd.read_csv(laws / "regmix" / f"{split}_{kind}_{size}.csv", index_col=0)
        for kind in ("mixture", "pile_loss")
    ]
    names = {at: at.replace("train_the_pile_", "weight_") for at in parts[0]}
    names |= {at: at.replace("metric/the_pile_", "loss_of_").removesuffix("_val_loss") for at in parts[1]}
    return parts[0].join(parts[1], how="inner").rename(columns=names).reset_index(drop=True)


def correlate_ranks(law: MixingLaw, table: pd.DataFrame) -> SimpleNamespace:
    """Return the rank correlation with measured losses, and its 95 % interval over the mixtures."""
    measured = sum(weight * table[name] for name, weight in law.targets.items())
    predicted = law.predict(table).loss
    rng = np.random.default_rng(0)
    draws = [rng.integers(0, len(table), len(table)) for _ in range(500)]
    low, high = np.quantile([spearmanr(predicted[i], measured[i])[0] for i in draws], [0.025, 0.975])
    return SimpleNamespace(value=spearmanr(predicted, measured)[0], low=low, high=high)


def test_mixtures_at_1m_parameters_rank_those_of_1b(laws: Path) -> None:
    """RegMix (arXiv 2407.01492, table 2): 98.45 by its regression on 512 mixtures, loss on Pile-CC."""
    train = read_regmix(laws, "train_1m")
    law = fit_mixing_law(train, targets={"loss_of_pile_cc": 1.0}, n_bootstrap=10)
    assert law.form == "reducible"
    assert correlate_ranks(law, read_regmix(laws, "test_1m")).low > 0.985
    assert correlate_ranks(law, read_regmix(laws, "test_60m")).value > 0.988
    far = correlate_ranks(law, read_regmix(laws, "test_1B"))
    assert far.value >= 0.9845
    assert far.low > 0.96


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_table_of_61_mixtures_predicts_a_larger_size(seed: int) -> None:
    """Sizes 122M to 410M, predicted 2.7B, by a truth outside of the forms."""
    rng = np.random.default_rng(seed)
    k = 4 + 3 * (seed % 2)
    truth, W = interacting_truth(rng, k), rng.dirichlet(np.ones(k), 61)
    law = fit_mixing_law(make_table(truth, W, (1.22e8, 2e8, 4.1e8), rng, 0.002), n_bootstrap=100)
    far = make_table(truth, W, (2.7e9,), rng, 0.002)
    predicted = law.predict(far)
    assert np.sqrt((np.log(predicted.loss / far.loss) ** 2).mean()) < 0.007
    assert spearmanr(predicted.loss, far.loss)[0] > 0.95
    assert ((predicted.predictive_low < far.loss) & (far.loss < predicted.predictive_high)).mean() > 0.85


@pytest.mark.slow
def test_intervals_cover() -> None:
    """60 studies: 20 mixtures of 5 domains, one repeated, two sizes; predicted at twice the size."""
    inside, gains = [], []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        worth = rng.normal(size=5)

        def truth(w: np.ndarray, N: float, D: float, worth: np.ndarray = worth) -> float:
            return power_truth(w, N, D, worth, UNIQUE)

        table = add_epochs(make_table(truth, rng.dirichlet(np.ones(5), 20), (5e7, 1e8), rng))
        law = fit_mixing_law(table, seed=seed, n_bootstrap=100)
        new = add_epochs(make_table(truth, rng.dirichlet(np.ones(5), 10), (2e8,), rng))
        predicted = law.predict(new)
        inside.append(((predicted.predictive_low < new.loss) & (new.loss < predicted.predictive_high)).mean())
        equal = dict.fromkeys("abcde", 0.2)
        best = find_best_mixture(law, N=1e8, D=2e9, unique={"a": UNIQUE}, compared={"equal": equal})
        losses = [truth(w, 1e8, 2e9) for w in (best.domains.weight.to_numpy(), np.full(5, 0.2))]
        gain = best.gains.loc["equal"]
        gains.append(gain.low < 1 - losses[0] / losses[1] < gain.high)
    assert np.mean(inside) > 0.9
    assert np.mean(gains) > 0.87  # 95 % less two standard errors of 60 studies


@pytest.mark.slow
def test_gains_of_one_run_per_mixture_cover() -> None:
    """25 studies of 24 mixtures at one size, by a truth outside of the forms."""
    inside = []
    for seed in range(25):
        rng = np.random.default_rng(seed)
        truth = interacting_truth(rng, 5)
        table = make_table(truth, rng.dirichlet(np.ones(5), 24), (1e8,), rng, noise=1e-3)
        equal = dict.fromkeys("abcde", 0.2)
        best = find_best_mixture(fit_mixing_law(table, n_bootstrap=100), compared={"equal": equal})
        losses = [truth(w, 1e8, 2e9) for w in (best.domains.weight.to_numpy(), np.full(5, 0.2))]
        gain = best.gains.loc["equal"]
        inside.append(gain.low < 1 - losses[0] / losses[1] < gain.high)
    assert np.mean(inside) > 0.86  # 95 % less two standard errors


@pytest.mark.slow
def test_a_better_mixture_is_rarely_shown_where_all_are_equal() -> None:
    shown = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        W = rng.dirichlet(np.ones(5), 20)
        table = make_table(lambda w, N, D: 1.7 + 400 * N**-0.34 + 400 * D**-0.28, W, (5e7, 1e8), rng)
        shown.append(
            find_best_mixture(fit_mixing_law(table, n_bootstrap=100)).gains.verdict.tolist() == [BETTER]
        )
    assert np.mean(shown) < 0.11  # 5 % and two standard errors
