"""The compute-optimal frontier against a search."""

import numpy as np
import pytest

from megatron.laws.forms import chinchilla
from megatron.laws.frontier import frontier_bands, optimal_frontier
from tests.laws.known_laws import make_law

# Hoffmann et al., table A3; exponents before rounding
PARAMS = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.33917084, "beta": 0.2849083}


def test_no_other_split_of_the_compute_is_better() -> None:
    for compute in (1e18, 1e21, 5.76e23):
        frontier = optimal_frontier(make_law(params=PARAMS), compute)
        assert frontier.N[0] * frontier.D[0] * 6 == pytest.approx(compute)
        n = frontier.N[0] * np.geomspace(0.2, 5, 2001)
        losses = chinchilla(PARAMS, n, compute / (6 * n))
        assert losses.argmin() == 1000
        assert frontier.L[0] == pytest.approx(losses.min(), rel=1e-12)


def test_n_and_d_grow_by_the_published_exponents() -> None:
    frontier = optimal_frontier(make_law(params=PARAMS), [1e20, 1e22])
    # Hoffmann et al., table 2, approach 3: a = 0.46, b = 0.54
    assert np.log(frontier.N[1] / frontier.N[0]) / np.log(100) == pytest.approx(0.46, abs=0.005)
    assert np.log(frontier.D[1] / frontier.D[0]) / np.log(100) == pytest.approx(0.54, abs=0.005)


def test_bands_are_the_percentiles_of_the_replicates_frontiers() -> None:
    rng = np.random.default_rng(0)
    replicates = {name: (value * np.exp(rng.normal(0, 0.02, 101))).tolist() for name, value in PARAMS.items()}
    band = frontier_bands(make_law(params=PARAMS, replicates=replicates), [1e19, 1e21], level=0.9)
    laws = [make_law(params={name: values[i] for name, values in replicates.items()}) for i in range(101)]
    frontiers = [optimal_frontier(law, [1e19, 1e21]) for law in laws]
    for name in "NDL":
        values = np.array([getattr(frontier, name) for frontier in frontiers])
        np.testing.assert_allclose(band[name], np.quantile(values, [0.05, 0.95], axis=0))
    with pytest.raises(ValueError, match="no bootstrap replicates"):
        frontier_bands(make_law(params=PARAMS), 1e20)
