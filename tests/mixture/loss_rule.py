"""A rule of a user: `adaptive: {rule: "tests.mixture.loss_rule:LossProportional"}`."""

from typing import Any

import numpy as np


class LossProportional:
    """Weights in proportion to the first weights times the smoothed loss of each domain."""

    def __init__(self, first: np.ndarray) -> None:
        self.first, self.losses = first, np.full(len(first), np.nan)

    def observe(self, n: int, nats: np.ndarray, counts: np.ndarray) -> np.ndarray:
        # a domain without tokens keeps its loss, and one never observed gets the mean
        new = np.divide(nats, counts, out=self.losses.copy(), where=counts > 0)
        smooth = 0.1 * new + 0.9 * self.losses
        self.losses = np.where(np.isnan(self.losses), new, smooth)
        weights = self.first * np.where(np.isnan(self.losses), np.nanmean(self.losses), self.losses)
        return weights / weights.sum()

    def as_dict(self) -> dict[str, Any]:
        return {"losses": self.losses.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        self.losses = np.array(state["losses"])
