"""Next-token prediction."""

import numpy as np
import torch

from megatron.objective.base import Task


class Autoregressive:
    """Position p predicts token p + 1 from tokens 0..p."""

    name = "autoregressive"
    causal = True
    exact = True

    def corrupt(self, tokens: np.ndarray, numbers: np.ndarray, draw: int | None = None) -> Task:
        """tokens int64 [B, S + 1] -> S predictions a sample."""
        whole = torch.from_numpy(tokens)
        return Task(
            inputs=whole[:, :-1].contiguous(),
            positions=None,
            targets=whole[:, 1:].flatten(),
            scale=None,
            count=tokens.shape[0] * (tokens.shape[1] - 1),
        )
