"""Sample tokens from logits, with random numbers keyed by sequence."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.objective.sample_noise import Purpose, make_generator


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings for sampling a token.

    temperature  divisor of the logits; 0: greedy
    top_k        sample only from the k most probable tokens
    top_p        sample only from the most probable tokens whose probabilities sum
                 to top_p (nucleus sampling, Holtzman et al., arXiv 1904.09751)
    seed         seed of the random numbers
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for values out of range."""
        if not self.temperature >= 0:
            raise ValueError(f"temperature: got {self.temperature}, expected 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: got {self.top_k}, expected 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}, expected more than 0 and at most 1")

    @property
    def is_greedy(self) -> bool:
        """True if the most probable token is always chosen."""
        return self.temperature == 0 or self.top_k == 1


def draw_uniforms(seed: int, sequence: int, *shape: int) -> np.ndarray:
    """Return float64 numbers in [0, 1), multiples of 2^-24, keyed by seed and sequence.

    They do not depend on the batch in which the sequence is generated.
    """
    uniforms = make_generator(seed, Purpose.GENERATE, sequence).random(shape, dtype=np.float32)
    return uniforms.astype(np.float64)


def sample_tokens(logits: Tensor, u: Tensor | None, sampling: Sampling) -> Tensor:
    """Sample one token per row by inverting the cumulative distribution at u.

    logits [N, V]
    u      [N]     float64 in [0, 1); None if greedy

    Returns int64 [N]. Equal u and logits give equal tokens.
    """
    if sampling.is_greedy:
        return logits.argmax(-1)
    assert u is not None, "sampling requires one number per row"
    # float64, because the cumulative sum is compared with u, a multiple of 2^-24
    scaled = logits.double() / sampling.temperature
    ids = None
    if sampling.top_k is not None and sampling.top_k < scaled.shape[-1]:
        # in descending order, which top_p below requires as well
        scaled, ids = scaled.topk(sampling.top_k, dim=-1)
    elif sampling.top_p is not None:
        scaled, ids = scaled.sort(dim=-1, descending=True)
    probabilities = scaled.softmax(-1)
    if sampling.top_p is not None:
        # sum of all more probable tokens; the token that crosses top_p is included
        preceding = probabilities.cumsum(-1) - probabilities
        # keeps at least the first: the sum before it is 0
        probabilities = probabilities * (preceding < sampling.top_p)
    cumulative = probabilities.cumsum(-1)
    # u is scaled by the total, so that truncated probabilities
    # need no normalization. right=True: token i is chosen
    # if cumulative[i - 1] <= u total < cumulative[i].
    # A token of probability 0 is never chosen, also for u = 0.
    indices = torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)
    indices = indices.clamp_max(scaled.shape[-1] - 1)
    return indices[:, 0] if ids is None else ids.gather(-1, indices)[:, 0]
