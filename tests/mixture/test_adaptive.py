"""ADO against its equations, its fit against a slow twin, and the syntax of weights."""

import numpy as np
import pytest
from scipy.optimize import minimize

from megatron.mixture.adaptive import Ado, AdoConfig, DomainLaw, fit_domain_law
from megatron.mixture.weights import DomainWeights, compute_weights


def twin_objective(x: np.ndarray, n: np.ndarray, losses: np.ndarray) -> float:
    """Return the objective in NOTES of the authors' code, including the penalties."""
    a, e, alpha = x
    r = np.abs(np.log(losses) - np.logaddexp(a - alpha * np.log(n), e))
    huber = np.where(r <= 1e-3, 0.5 * r**2, 1e-3 * (r - 0.5e-3)).sum()
    return huber + max(alpha - 0.8, 0) + max(0.001 - alpha, 0) + max(a - 6.5, 0) + max(0.5 - e, 0)


def test_the_fit_recovers_the_law_that_made_the_points() -> None:
    n = np.linspace(500, 50_000, 300)
    for eps, beta, alpha in ((2.0, 8.0, 0.3), (1.8, 20.0, 0.5), (3.0, 4.0, 0.1)):
        law = fit_domain_law(n, eps + beta * n**-alpha)
        assert law.objective < 1e-12
        assert np.allclose([np.exp(law.e), np.exp(law.a), law.alpha], [eps, beta, alpha], rtol=1e-2)
        exact = alpha * beta * 20_000 ** (-alpha - 1)
        assert law.speed(20_000) == pytest.approx(exact, rel=1e-3)


def test_the_fit_of_noisy_points_is_no_worse_than_a_search_from_many_starts() -> None:
    rng = np.random.default_rng(0)
    n = np.linspace(500, 50_000, 200)
    for _ in range(2):
        losses = (2 + 10 * n**-0.35) * np.exp(0.02 * rng.standard_normal(len(n)))
        starts = [(a, e, alpha) for a in (-2, 1, 4) for e in (0.5, 1.5) for alpha in (0, 0.3, 0.7)]
        search = {"args": (n, losses), "method": "Nelder-Mead", "options": {"maxiter": 600}}
        twin = min(minimize(twin_objective, x, **search).fun for x in starts)
        assert fit_domain_law(n, losses).objective <= twin * (1 + 1e-6)


def test_an_update_follows_the_equations_of_the_paper() -> None:
    config = AdoConfig(n_ignored=0, refit_every=10**9)
    ado = Ado([0.5, 0.3, 0.2], config)
    ado.laws = [DomainLaw(2.0, 0.7, 0.3, 0.0), DomainLaw(1.0, 0.7, 0.2, 0.0), DomainLaw(2.0, 0.9, 0.01, 0.0)]
    mu, h, mean = np.array([0.5, 0.3, 0.2]), np.array([0.5, 0.3, 0.2]), np.array([0.5, 0.3, 0.2])
    for t, counts in enumerate(np.array([[60, 30, 10], [10, 80, 10], [40, 40, 20]], dtype=float), 1):
        n = 1000.0 * t
        pi = ado.observe(int(n), counts * 3.0, counts)
        h = 0.1 * counts / 100 + 0.9 * h
        speed = np.array([0.3 * np.exp(2) * n**-1.3, 0.2 * np.exp(1) * n**-1.2, 0.05 * np.exp(2) * n**-1.01])
        rho = mu * np.sqrt(h) * speed
        rho = np.maximum(rho / rho.sum(), 0.01)
        rho /= rho.sum()
        assert np.allclose(pi, 0.1 * rho + 0.9 * mean)
        mean = rho / (t + 1) + (1 - 1 / (t + 1)) * mean


def make_losses(n: float) -> np.ndarray:
    """Return the losses of three domains, of which the second learns fastest for a long time."""
    return np.array([2.5 + 3 * n**-0.5, 2.0 + 30 * n**-0.3, 3.0 + 1 * n**-0.2])


def test_the_domain_that_learns_fastest_gains_weight() -> None:
    ado = Ado([1, 1, 1], AdoConfig(n_ignored=5, refit_every=20))
    rng = np.random.default_rng(0)
    weights = ado.prior
    for step in range(1, 160):
        counts = 1000 * weights
        nats = counts * make_losses(100.0 * step) * np.exp(0.01 * rng.standard_normal(3))
        weights = ado.observe(100 * step, nats, counts)
    assert weights[1] > 0.6 > 0.2 > weights[0]
    assert weights.min() >= 0.01 * 0.1
    assert weights.sum() == pytest.approx(1)


def test_a_restored_ado_continues_as_if_never_interrupted() -> None:
    config = AdoConfig(n_ignored=2, refit_every=15)
    uninterrupted, interrupted = Ado([1, 2, 1], config), Ado([1, 2, 1], config)
    for step in range(1, 41):
        counts = np.array([50.0, 30.0, 20.0 * (step % 2)])
        expected = uninterrupted.observe(100 * step, counts * make_losses(100.0 * step), counts)
        resumed = interrupted.observe(100 * step, counts * make_losses(100.0 * step), counts)
        if step in (7, 33):
            state = interrupted.as_dict()
            interrupted = Ado([1, 2, 1], config)
            interrupted.restore(state)
    assert np.array_equal(expected, resumed)


def test_a_log_returns_known_weights_and_refuses_later_chunks() -> None:
    log = DomainWeights([(0, np.array([1.0, 0.0]))], known_to=5)
    assert log.weights_at(4)[1] == 5
    with pytest.raises(ValueError, match="chunk 5 are not known yet"):
        log.weights_at(5)
    log.append(5, np.array([0.5, 0.5]), known_to=9)
    assert log.weights_at(4)[1] == 5 and log.weights_at(8)[0].tolist() == [0.5, 0.5]
    again = DomainWeights([(0, np.ones(2))])
    again.restore(log.as_dict(6))
    assert again.weights_at(6)[0].tolist() == [0.5, 0.5] and len(again.computed) == 1


def test_a_schedule_applies_up_to_its_last_point_and_the_log_from_there() -> None:
    points = [(at, np.array([w, 1 - w])) for at, w in ((0, 0.2), (4, 0.4), (10, 1.0))]
    log = DomainWeights(points, known_to=8)
    log.append(8, np.array([0.5, 0.5]), 18)
    log.append(18, np.array([0.6, 0.4]), 28)
    for chunk, weight, until in ((0, 0.2, 4), (9, 0.4, 10), (10, 0.5, 18), (18, 0.6, 28)):
        assert (log.weights_at(chunk)[0][0], log.weights_at(chunk)[1]) == (weight, until)
    with pytest.raises(ValueError, match="chunk 28 are not known yet"):
        log.weights_at(28)
    early = DomainWeights(points, known_to=6)
    assert early.weights_at(5)[1] == 6  # chunk 6 waits for losses, although its weights are written


BY = ("source", "language")
DOMAINS = [("Github", "C"), ("Github", "Go"), ("Github", "Python"), ("Web", "en"), ("Web", "fr")]
NATURAL = np.array([10.0, 20.0, 70.0, 300.0, 100.0])


def test_weights_are_normalized_level_by_level() -> None:
    nested = {"Github": {"weight": 0.6, "weights": {"C": 1, "Go": 2}}, "Web": 0.4}
    for written, expected in (
        ("inferred", NATURAL / 500),
        ({"Github": 3, "Web": 1}, [0.075, 0.15, 0.525, 0.1875, 0.0625]),
        (nested, [0.2, 0.4, 0, 0.3, 0.1]),
        ({"Web": {"weight": 1, "weights": {"fr": 1}}}, [0, 0, 0, 0, 1]),
    ):
        assert np.allclose(compute_weights(written, BY, DOMAINS, NATURAL), expected)


def test_weights_that_match_nothing_are_refused() -> None:
    for written, sentence in (
        ({"Githubb": 1}, "no document has source=Githubb; did you mean 'Github'"),
        ({"Github": -1}, "expected a number of at least 0"),
        ({"Github": 0}, "expected a finite sum above 0"),
        ([{"where": {"language": "C"}, "weight": 1}], "expected 'inferred', or values with weights, nested"),
        ({"Github": {"weight": 1, "weights": {"Cc": 1}}}, "weights.Github.Cc: no document has language=Cc"),
        ({"Github": {"wieght": 1}}, "did you mean 'weight'"),
        (3, "expected 'inferred'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            compute_weights(written, BY, DOMAINS, NATURAL)


def test_a_schedule_changes_at_once_or_linearly() -> None:
    points = [(0, np.array([1.0, 0.0])), (10, np.array([0.0, 1.0]))]
    assert DomainWeights(points).weights_at(9)[0].tolist() == [1, 0]
    assert DomainWeights(points).weights_at(3)[1] == 10
    assert DomainWeights(points, linear=True).weights_at(4)[0] == pytest.approx([0.6, 0.4])
    assert DomainWeights(points, linear=True).weights_at(99) == (pytest.approx(points[1][1]), None)
