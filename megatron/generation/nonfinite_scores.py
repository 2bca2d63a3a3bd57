"""Errors for scores and logits that are NaN or Inf, so that none reaches a result."""

import numpy as np
import torch
from torch import Tensor

CAUSE = "the weights are damaged, or overflow in this precision"


class NonFiniteError(ValueError):
    """A model returned NaN or Inf. Other models can still be scored."""


class NonFiniteRequestError(NonFiniteError):
    """A request has a log-likelihood of NaN or Inf; `number` is its index in the list of requests."""

    def __init__(self, number: int, log_p: float) -> None:
        super().__init__(
            f"request {number}: got a log-likelihood of {log_p}, expected a finite number; {CAUSE}."
        )
        self.number, self.log_p = number, log_p


def check_logits(logits: Tensor) -> None:
    """Raise NonFiniteError if any logit is NaN or Inf."""
    if not bool(torch.isfinite(logits).all()):
        raise NonFiniteError(f"the model's logits: got NaN or Inf, expected finite numbers; {CAUSE}.")


def check_log_p(log_p: np.ndarray) -> None:
    """Raise NonFiniteRequestError for the first value of log_p [N] that is NaN or Inf."""
    bad = np.flatnonzero(~np.isfinite(log_p))
    if len(bad):
        raise NonFiniteRequestError(int(bad[0]), float(log_p[bad[0]]))
