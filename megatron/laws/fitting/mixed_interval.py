"""Quantiles of a mixture of predictive distributions of several laws, in log L."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.laws.fitting.noise import NORMAL_DOF
from megatron.laws.law import Law, expanded_level

N_CENTRES = 201  # quantiles of the replicates that represent a law at a point
N_BISECTIONS = 50
MIN_SCALE = 1e-12


@dataclass(frozen=True)
class Component:
    """Distribution of one law at n points: Student's t (`scale`, `dof` [n]) around `centres` [r, n]."""

    weight: float
    centres: np.ndarray
    scale: np.ndarray
    dof: np.ndarray

    def widen(self, scale: np.ndarray, dof: float) -> "Component":
        """Add an independent error of standard deviation `scale` [n]; dof by Welch and Satterthwaite."""
        variance, added_variance = self.scale**2, scale**2
        with np.errstate(divide="ignore", invalid="ignore"):
            # (sum v)^2 / sum(v^2 / dof); 0 / 0 where both scales are 0, and dof has no effect there
            joint = (variance + added_variance) ** 2 / (variance**2 / self.dof + added_variance**2 / dof)
        joint = np.minimum(np.where(np.isnan(joint), self.dof, joint), NORMAL_DOF)
        return replace(self, scale=np.sqrt(variance + added_variance), dof=joint)

    def cdf(self, value: np.ndarray) -> np.ndarray:
        """Return the cumulative distribution function [n] at `value` [n]."""
        from scipy.special import stdtr  # slow import

        scale = np.maximum(self.scale, MIN_SCALE)
        # a mixture of r equal parts: [r, n], then the mean over r
        return stdtr(self.dof, (value - self.centres) / scale).mean(axis=0)


def build_component(
    law: Law, weight: float, N: np.ndarray, D: np.ndarray, U: np.ndarray, kind: str, text: str
) -> Component:
    """Return the distribution of log L at N, D, U [n] by one law; `kind` and `text` as for Law.predict.

    Replicates are scaled around their median for the number of runs, as expanded percentiles are.
    """
    from scipy.special import ndtri  # slow import

    losses = np.log(law.losses(N, D, U))
    # midpoints of 201 slices of equal probability, from 0.25 % to 99.75 %: [201, n]
    centres = np.quantile(losses, (np.arange(N_CENTRES) + 0.5) / N_CENTRES, axis=0)
    middle = np.median(losses, axis=0)
    # ratio of the normal quantiles of the expanded and the plain level, at 95 %
    level = 0.95
    factor = ndtri((1 + expanded_level(level, law.n_units)) / 2) / ndtri((1 + level) / 2)
    sigma, dof = law.noise_at(N, D)
    component = Component(
        weight,
        middle + factor * (centres - middle),
        sigma if kind == "predictive" else np.zeros(len(N)),
        dof,
    )
    return component.widen(np.full(len(N), law.text_deviation(kind, text)), NORMAL_DOF)


def mixture_quantiles(components: Sequence[Component], shares: Sequence[float]) -> list[np.ndarray]:
    """Return the quantile [n] of the mixture for each of `shares`, by bisection."""
    from scipy.special import stdtrit  # slow import

    quantiles = []
    for share in shares:
        ends = [
            component.centres + stdtrit(component.dof, share) * np.maximum(component.scale, MIN_SCALE)
            for component in components
        ]
        # the quantile of a mixture is between the smallest and the largest quantile of its parts
        low = np.min([end.min(axis=0) for end in ends], axis=0)
        high = np.max([end.max(axis=0) for end in ends], axis=0)
        # cdf increases with the value; 50 halvings leave 1e-15 of the bracket
        for _ in range(N_BISECTIONS):
            middle = 0.5 * (low + high)
            is_below = sum(component.weight * component.cdf(middle) for component in components) < share
            low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
        quantiles.append(0.5 * (low + high))
    return quantiles
