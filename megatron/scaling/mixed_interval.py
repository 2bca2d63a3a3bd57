"""Quantiles of a mixture of predictive distributions of several laws, in log L."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtri, stdtr, stdtrit

from megatron.scaling.law import Law, expanded_level
from megatron.scaling.noise import NORMAL_DOF

N_CENTRES = 201  # of each law at each point: quantiles of its replicates
N_BISECTIONS = 50
LEAST_SCALE = 1e-12


@dataclass(frozen=True)
class Component:
    """One law at n points: Student's t around each of `centres` [r, n], of `scale` [n] and `dof` [n]."""

    weight: float
    centres: np.ndarray
    scale: np.ndarray
    dof: np.ndarray

    def widen(self, scale: np.ndarray, dof: float) -> "Component":
        """With another independent error of deviation `scale` [n]; dof by Welch and Satterthwaite."""
        own, more = self.scale**2, scale**2
        with np.errstate(divide="ignore", invalid="ignore"):
            joint = (own + more) ** 2 / (own**2 / self.dof + more**2 / dof)
        joint = np.minimum(np.where(np.isnan(joint), self.dof, joint), NORMAL_DOF)
        return replace(self, scale=np.sqrt(own + more), dof=joint)

    def share_below(self, value: np.ndarray) -> np.ndarray:
        """Its distribution function [n] at `value` [n]."""
        scale = np.maximum(self.scale, LEAST_SCALE)
        return stdtr(self.dof, (value - self.centres) / scale).mean(axis=0)


def component_of(
    law: Law, weight: float, N: np.ndarray, D: np.ndarray, U: np.ndarray, kind: str, text: str
) -> Component:
    """The distribution of log L at N, D, U [n] by one law: see Law.predict for `kind` and `text`.

    Replicates are spread around their median for the number of runs, as expanded percentiles are.
    """
    losses = np.log(law.losses(N, D, U))
    centres = np.quantile(losses, (np.arange(N_CENTRES) + 0.5) / N_CENTRES, axis=0)
    middle = np.median(losses, axis=0)
    level = 0.95
    factor = ndtri((1 + expanded_level(level, law.n_units)) / 2) / ndtri((1 + level) / 2)
    sigma, dof = law.noise_at(N, D)
    found = Component(
        weight,
        middle + factor * (centres - middle),
        sigma if kind == "predictive" else np.zeros(len(N)),
        dof,
    )
    return found.widen(np.full(len(N), law.text_deviation(kind, text)), NORMAL_DOF)


def mixture_quantiles(components: Sequence[Component], shares: Sequence[float]) -> list[np.ndarray]:
    """For each of `shares` the quantile [n] of the mixture, by bisection."""
    found = []
    for share in shares:
        ends = [
            one.centres + stdtrit(one.dof, share) * np.maximum(one.scale, LEAST_SCALE) for one in components
        ]
        low = np.min([end.min(axis=0) for end in ends], axis=0)
        high = np.max([end.max(axis=0) for end in ends], axis=0)
        for _ in range(N_BISECTIONS):
            middle = 0.5 * (low + high)
            is_below = sum(one.weight * one.share_below(middle) for one in components) < share
            low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
        found.append(0.5 * (low + high))
    return found
