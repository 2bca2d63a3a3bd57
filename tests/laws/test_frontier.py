"""The compute-optimal frontier and the crossing of two laws against a search, and conventions of compute."""

import numpy as np
import pytest

from megatron.config.schema import ModelConfig
from megatron.laws.crossover import critical_compute, crossover
from megatron.laws.frontier import frontier_bands, optimal_frontier, search_frontier
from megatron.laws.law import Law
from megatron.plan.conventions import training_flops_per_token
from tests.laws.known_laws import TRUTH, make_law

AR = make_law("repeated_data", TRUTH | {"R_D": 6.0})
DIFFUSION = make_law("repeated_data", TRUTH | {"A": 480.0, "B": 1100.0, "R_D": 200.0})


def search_least_loss(curve: Law, C: float, U: float) -> float:
    n = np.geomspace(1e4, 1e13, 40_001)
    return float(curve.loss(n, C / (6 * n), U).min())


def test_the_least_loss_is_that_of_a_dense_search_and_of_the_closed_form() -> None:
    for C in (1e17, 1e20, 1e23):
        assert search_frontier(AR, C, 1e9).L[0] == pytest.approx(search_least_loss(AR, C, 1e9), rel=1e-8)
    plain = make_law()
    result, closed = search_frontier(plain, [1e18, 1e22], np.inf), optimal_frontier(plain, [1e18, 1e22])
    np.testing.assert_allclose(result.N, closed.N, rtol=1e-3)
    np.testing.assert_allclose(result.L, closed.L, rtol=1e-9)


def test_the_form_without_a_closed_frontier_has_the_exponent_of_its_constants() -> None:
    kaplan = make_law("kaplan", {"Nc": 8.8e13, "Dc": 5.4e13, "alpha_N": 0.076, "alpha_D": 0.095})
    N = optimal_frontier(kaplan, [1e19, 1e21]).N
    assert np.log(N[1] / N[0]) / np.log(100) == pytest.approx(0.095 / (0.076 + 0.095), abs=1e-3)


def test_at_the_crossover_both_are_equal_and_below_it_the_first_is_better() -> None:
    U = 1e8
    C = critical_compute(AR, DIFFUSION, U)
    assert search_least_loss(AR, C, U) == pytest.approx(search_least_loss(DIFFUSION, C, U), rel=1e-6)
    assert search_least_loss(AR, C / 3, U) < search_least_loss(DIFFUSION, C / 3, U)
    assert search_least_loss(AR, C * 3, U) > search_least_loss(DIFFUSION, C * 3, U)
    result = crossover(AR, DIFFUSION, np.array([1e7, U, 1e9, 1e10]))
    assert (np.diff(result.C) > 0).all() and result.C[1] == C and result.ends is None
    worse = make_law("repeated_data", AR.params | {"E": 2.5})  # they never cross
    assert np.isnan(crossover(AR, worse, [U]).C).all()


def test_the_interval_of_the_crossover_is_that_of_its_replicates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.laws.crossover.LEVEL", 0.5)
    rng = np.random.default_rng(0)

    def add_replicates(curve: Law) -> Law:
        params = curve.params
        replicates = {k: (v * np.exp(0.02 * rng.standard_normal(9))).tolist() for k, v in params.items()}
        return make_law("repeated_data", params, replicates=replicates | {"E": [params["E"]] * 9})

    first, second = add_replicates(AR), add_replicates(DIFFUSION)
    result = crossover(first, second, [1e8])
    crossings = [critical_compute(first.replicate(i), second.replicate(i), 1e8) for i in range(9)]
    crossings = np.sort(np.where(np.isnan(crossings), np.inf, crossings))
    assert (result.ends[0][0], result.ends[1][0]) == (crossings[2], crossings[6])


def test_conventions_agree_where_they_count_the_same() -> None:
    model = ModelConfig(
        d_model=256, d_ff=704, d_head=64, n_heads=4, n_layers=6, n_tokens=5000, vocab_rows=5120
    )
    D, F, L, V, S = 256, 704, 6, 5120, 512
    matrices = L * (4 * D * D + 3 * D * F)
    result = training_flops_per_token(model, S)
    assert result["exact"] == 6 * (matrices + V * D) + 12 * L * S * D
    assert result["6nd"] == 6 * (matrices + V * D + (2 * L + 1) * D)
    assert result["kaplan"] == 6 * (matrices + (2 * L + 1) * D) + 6 * L * S * D
    assert result["palm"] == result["6nd"] + 12 * L * S * D
    # appendix F has the embedding as a product, and 3 FLOPs of softmax for each score
    assert result["chinchilla"] == pytest.approx(result["exact"] + 6 * V * D + 9 * L * 4 * S)
    # D x 4 D twice is 8 D^2 a block where this model has 3 D F
    assert result["megatron"] == pytest.approx(6 * L * 12 * D * D + 12 * L * S * D + 6 * V * D)


def test_bands_are_the_percentiles_of_the_replicates_frontiers() -> None:
    rng = np.random.default_rng(0)
    replicates = {name: (value * np.exp(rng.normal(0, 0.02, 101))).tolist() for name, value in TRUTH.items()}
    band = frontier_bands(make_law(params=TRUTH, replicates=replicates), [1e19, 1e21], level=0.9)
    laws = [make_law(params={name: values[i] for name, values in replicates.items()}) for i in range(101)]
    frontiers = [optimal_frontier(law, [1e19, 1e21]) for law in laws]
    for name in "NDL":
        values = np.array([getattr(frontier, name) for frontier in frontiers])
        np.testing.assert_allclose(band[name], np.quantile(values, [0.05, 0.95], axis=0))
    with pytest.raises(ValueError, match="no bootstrap replicates"):
        frontier_bands(make_law(params=TRUTH), 1e20)
