"""Masked (absorbing) diffusion."""

from dataclasses import dataclass

import numpy as np
import torch

from megatron.objective.base import Task
from megatron.objective.noise import scoring_noise, training_noise


@dataclass(frozen=True)
class MaskedDiffusion:
    """Hidden tokens are predicted from both sides; the loss bounds -log p(tokens) from above.

    For each sample t ~ U(0, 1), rate = (1 - rate_min) t + rate_min; each token is hidden with chance
    `rate`, and its cross-entropy counts 1 / rate. Averaged over t and masks the sum is a bound in nats
    (Sahoo et al., arXiv 2406.07524, eq. 10; LLaDA, arXiv 2502.09992, eq. 3). `rate_min` keeps the weights
    finite.
    """

    mask_id: int
    rate_min: float
    seed: int
    name: str = "masked_diffusion"
    causal: bool = False
    exact: bool = False

    def corrupt(self, tokens: np.ndarray, numbers: np.ndarray, draw: int | None = None) -> Task:
        """tokens int64 [B, S + 1]: the first S are the clean sequence: both objectives read as many."""
        clean = tokens[:, :-1]
        n_positions = clean.shape[1]
        if draw is None:
            t, u = training_noise(self.seed, numbers, n_positions)
        else:
            t, u = scoring_noise(self.seed, numbers, n_positions, draw)
        rate = (1 - self.rate_min) * t + self.rate_min  # [B]
        hidden = u < rate[:, None]  # [B, S]
        positions = np.flatnonzero(hidden)
        scale = np.broadcast_to((1 / rate)[:, None], hidden.shape)[hidden]
        return Task(
            inputs=torch.from_numpy(np.where(hidden, self.mask_id, clean)),
            positions=torch.from_numpy(positions),
            targets=torch.from_numpy(clean.reshape(-1)[positions]),
            scale=torch.from_numpy(scale.astype(np.float32)),
            count=clean.size,
        )
