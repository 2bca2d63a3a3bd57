"""Scores and logits that are NaN or Inf: an error that names them, never a figure."""

import numpy as np
import torch
from torch import Tensor

CAUSE = "the weights are damaged, or overflow in this precision"


class NonFiniteError(ValueError):
    """A model gave NaN or Inf where a number is needed; other models can still be scored."""


class NonFiniteRequestError(NonFiniteError):
    """The same of a request; `number` is its place in the list that was scored."""

    def __init__(self, number: int, log_p: float) -> None:
        super().__init__(
            f"request {number}: got a log-likelihood of {log_p}, expected a finite number; {CAUSE}."
        )
        self.number, self.log_p = number, log_p


def check_logits(logits: Tensor) -> None:
    """NonFiniteError where any logit is NaN or Inf."""
    if not bool(torch.isfinite(logits).all()):
        raise NonFiniteError(f"the model's logits: got NaN or Inf, expected finite numbers; {CAUSE}.")


def check_log_p(log_p: np.ndarray) -> None:
    """NonFiniteRequestError for the first of log_p [N] that is NaN or Inf."""
    bad = np.flatnonzero(~np.isfinite(log_p))
    if len(bad):
        raise NonFiniteRequestError(int(bad[0]), float(log_p[bad[0]]))
