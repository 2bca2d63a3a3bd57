"""Masked (absorbing) diffusion."""

from dataclasses import dataclass

import numpy as np
import torch

from megatron.objective.sample_noise import (
    Purpose,
    draw_dropout_keys,
    draw_scoring_masks,
    draw_training_noise,
    draw_uniform,
    pair_antithetic,
    stratify_groups,
)
from megatron.objective.task import Task


@dataclass(frozen=True)
class MaskedDiffusion:
    """Masked tokens are predicted from both sides; the loss is an upper bound on -log p(tokens).

    For each sample t ~ U(0, 1) and rate = (1 - rate_min) t + rate_min. Each token
    is masked with probability `rate`, and its cross-entropy is weighted by 1 / rate.
    The expectation over t and masks is a bound in nats (Sahoo et al., arXiv 2406.07524,
    eq. 10; LLaDA, arXiv 2502.09992, eq. 3). `rate_min` keeps the weights finite.

    Scores use the plain bound, the same integral with rate_min = 0, in terms of the number l of masked
    tokens: l is uniform in 1..S, and each masked token is weighted by S / l (LLaDA, eq. 6). Weights 1 / rate
    would be heavy-tailed, since a small rate occasionally masks a token.

    The options apply to training only:

    t_draw, t_group     independent; antithetic: t and 1 - t in pairs of samples; stratified:
                        one t in each of t_group equal parts of (0, 1), over groups
                        of consecutive samples. The mean of the loss is the same for all.
    low_noise_start     the first low_noise_samples samples have t ~ U(0, low_noise_start)
    ar_ratio            share of samples with the same number of masked tokens,
                        moved to the end of the sample: "left to right" in the ablations
                        of arXiv 2507.15857. The loss is then no longer a bound.
    drops_attention     the model has attention dropout and requires a key per sample
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
        """Build the task of tokens int64 [B, S + 1].

        The first S are used, as many as in next-token prediction.
        """
        clean = tokens[:, :-1]
        keys = None
        if draw is None:
            hidden, weight = self._draw_training_masks(numbers, clean.shape[1])
            keys = draw_dropout_keys(self.seed, numbers) if self.drops_attention else None
        else:
            hidden, n_hidden = draw_scoring_masks(self.seed, numbers, clean.shape[1], draw)
            weight = clean.shape[1] / n_hidden  # S / l: a uniform model costs log V per token exactly
        # the head is applied to masked positions
        # only: rows of the flattened [B * S]
        positions = np.flatnonzero(hidden)
        # both index `hidden` row by row, so scale[i] is the weight of positions[i]
        scale = np.broadcast_to(weight[:, None], hidden.shape)[hidden]
        return Task(
            inputs=torch.from_numpy(np.where(hidden, self.mask_id, clean)),
            positions=torch.from_numpy(positions),
            targets=torch.from_numpy(clean.reshape(-1)[positions]),
            scale=torch.from_numpy(scale.astype(np.float32)),
            count=clean.size,
            model_kwargs={} if keys is None else {"dropout_key": torch.from_numpy(keys)},
        )

    def _draw_training_masks(self, numbers: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw (masked positions bool [B, n], weight of masked tokens [B]) of training samples."""
        t, u = draw_training_noise(self.seed, numbers, n)
        # rate >= rate_min, so no weight exceeds 1 / rate_min
        rate = (1 - self.rate_min) * self._spread_t(t, numbers) + self.rate_min  # [B]
        hidden = u < rate[:, None]
        return (hidden if self.ar_ratio == 0 else self._move_to_end(hidden, numbers)), 1 / rate

    def _spread_t(self, t: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return the t of training samples under `t_draw` and low noise, from independent draws t [B]."""
        if self.t_draw == "antithetic":
            t = pair_antithetic(self.seed, numbers, t)
        elif self.t_draw == "stratified":
            t = stratify_groups(self.seed, numbers, t, self.t_group)
        # by sample number, not by step: independent of batch size and ranks
        return np.where(numbers < self.low_noise_samples, self.low_noise_start * t, t)

    def _move_to_end(self, hidden: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Move masked positions [B, S] to the end of the sample, for a share `ar_ratio` of samples."""
        # the number of masked tokens, and with it the
        # weight 1 / rate, is as with independent masks
        n_shown = hidden.shape[1] - hidden.sum(axis=1, keepdims=True)
        last = np.arange(hidden.shape[1]) >= n_shown
        moved = draw_uniform(self.seed, Purpose.LEFT_TO_RIGHT, numbers) < self.ar_ratio
        return np.where(moved[:, None], last, hidden)
