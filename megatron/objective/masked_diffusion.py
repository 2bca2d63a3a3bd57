"""Masked (absorbing) diffusion."""

from dataclasses import dataclass

import numpy as np
import torch

from megatron.objective.base import Task
from megatron.objective.noise import (
    Purpose,
    antithetic,
    chances,
    dropout_keys,
    scoring_masks,
    stratified,
    training_noise,
)


@dataclass(frozen=True)
class MaskedDiffusion:
    """Hidden tokens are predicted from both sides; the loss bounds -log p(tokens) from above.

    For each sample t ~ U(0, 1), rate = (1 - rate_min) t + rate_min; each token is hidden with chance
    `rate`, and its cross-entropy counts 1 / rate. Averaged over t and masks the sum is a bound in nats
    (Sahoo et al., arXiv 2406.07524, eq. 10; LLaDA, arXiv 2502.09992, eq. 3). `rate_min` keeps the weights
    finite.

    A score is always the plain bound, the same integral with rate_min = 0, by the number l of hidden tokens:
    l is uniform in 1 .. S, and each hidden token counts S / l (LLaDA, eq. 6). Weights by rate have a heavy
    tail there, since a small rate that hides a token by chance counts it 1 / rate times. The rest is for
    training alone.

    t_draw, t_group     independent; antithetic: t and 1 - t in pairs of samples; stratified: one t in each of
                        t_group equal parts of (0, 1), over groups of consecutive samples. All have one mean.
    low_noise_start     the first low_noise_samples samples have t ~ U(0, low_noise_start)
    ar_ratio            share of samples that hide their last tokens, as many as chance had hidden anywhere:
                        "left to right" in the ablations of arXiv 2507.15857. No bound any more.
    drops_attention     the model wants keys for its attention dropout
    """

    mask_id: int
    rate_min: float
    seed: int
    t_draw: str = "independent"
    t_group: int = 1
    low_noise_start: float = 1.0
    low_noise_samples: int = 0
    ar_ratio: float = 0.0
    drops_attention: bool = False
    name: str = "masked_diffusion"
    causal: bool = False
    exact: bool = False

    def corrupt(self, tokens: np.ndarray, numbers: np.ndarray, draw: int | None = None) -> Task:
        """tokens int64 [B, S + 1]: the first S are the clean sequence: both objectives read as many."""
        clean = tokens[:, :-1]
        keys = None
        if draw is None:
            hidden, weight = self._training_masks(numbers, clean.shape[1])
            keys = dropout_keys(self.seed, numbers) if self.drops_attention else None
        else:
            hidden, n_hidden = scoring_masks(self.seed, numbers, clean.shape[1], draw)
            weight = clean.shape[1] / n_hidden
        positions = np.flatnonzero(hidden)
        scale = np.broadcast_to(weight[:, None], hidden.shape)[hidden]
        return Task(
            inputs=torch.from_numpy(np.where(hidden, self.mask_id, clean)),
            positions=torch.from_numpy(positions),
            targets=torch.from_numpy(clean.reshape(-1)[positions]),
            scale=torch.from_numpy(scale.astype(np.float32)),
            count=clean.size,
            reading={} if keys is None else {"dropout_key": torch.from_numpy(keys)},
        )

    def _training_masks(self, numbers: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """(hidden bool [B, n], the weight of its hidden tokens [B]) of training samples."""
        t, u = training_noise(self.seed, numbers, n)
        rate = (1 - self.rate_min) * self._spread(t, numbers) + self.rate_min  # [B]
        hidden = u < rate[:, None]
        return (hidden if self.ar_ratio == 0 else self._at_the_end(hidden, numbers)), 1 / rate

    def _spread(self, t: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """The t of training samples from their own draws, all [B]."""
        if self.t_draw == "antithetic":
            t = antithetic(self.seed, numbers, t)
        elif self.t_draw == "stratified":
            t = stratified(self.seed, numbers, t, self.t_group)
        return np.where(numbers < self.low_noise_samples, self.low_noise_start * t, t)

    def _at_the_end(self, hidden: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """The same number of hidden tokens [B, S], moved to the end in a share `ar_ratio` of the samples."""
        n_shown = hidden.shape[1] - hidden.sum(axis=1, keepdims=True)
        last = np.arange(hidden.shape[1]) >= n_shown
        moved = chances(self.seed, Purpose.LEFT_TO_RIGHT, numbers) < self.ar_ratio
        return np.where(moved[:, None], last, hidden)
