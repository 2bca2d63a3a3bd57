"""Mixtures to train: on the simplex, within bounds, spread or optimal."""

import numpy as np
import pytest

from megatron.laws.mixture_design import design_mixtures

LOW, HIGH = np.array([0.0, 0.05, 0.0]), np.array([0.6, 1.0, 0.9])


def determinant(weights: np.ndarray) -> float:
    return float(np.linalg.det(weights.T @ weights))


@pytest.mark.parametrize("kind", ["spread", "optimal"])
def test_mixtures_are_different_points_within_the_bounds(kind: str) -> None:
    weights = design_mixtures(20, LOW, HIGH, kind)
    assert len(np.unique(weights, axis=0)) == 20
    assert weights.sum(axis=1) == pytest.approx(np.ones(20), abs=1e-12)
    assert (weights >= LOW - 1e-12).all() and (weights <= HIGH + 1e-12).all()
    assert (design_mixtures(20, LOW, HIGH, kind) == weights).all()


def test_spread_points_are_far_from_each_other() -> None:
    weights = design_mixtures(12, np.zeros(3), np.ones(3))
    random = np.random.default_rng(0).dirichlet(np.ones(3), 12)

    def nearest(points: np.ndarray) -> float:
        distances = np.linalg.norm(points[:, None] - points, axis=-1) + 9 * np.eye(len(points))
        return float(distances.min())

    assert nearest(weights) > 1.5 * nearest(random)


def test_optimal_points_have_more_information_on_the_exponents() -> None:
    low, high = np.zeros(4), np.full(4, 0.7)
    spread, optimal = (design_mixtures(10, low, high, kind) for kind in ("spread", "optimal"))
    assert determinant(optimal) > 1.2 * determinant(spread)
    # without bounds the best design of k points are the corners, whose determinant is 1
    corners = design_mixtures(3, np.zeros(3), np.ones(3), "optimal")
    assert determinant(corners) > 0.8


@pytest.mark.parametrize(
    ("n", "low", "high", "words"),
    [
        (5, [0.6, 0.6], [1.0, 1.0], "no mixture meets"),
        (5, [0.0, 0.0], [0.4, 0.4], "no mixture meets"),
        (1, [0.0, 0.0], [1.0, 1.0], "got 1 mixtures of 2 domains"),
        (9, [0.5, 0.499], [1.0, 1.0], "within the bounds, expected 9"),
    ],
)
def test_impossible_designs_are_refused(n: int, low: list[float], high: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        design_mixtures(n, np.array(low), np.array(high))
