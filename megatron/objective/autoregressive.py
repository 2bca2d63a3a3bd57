"""Next-token prediction."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from megatron.objective.sample_noise import Purpose, draw_dropout_keys, draw_uniform, make_generator
from megatron.objective.task import ModelKwargs, Task


@dataclass(frozen=True)
class Autoregressive:
    """Next-token prediction: position p predicts token p + 1 from tokens 0..p.

    All options apply to training only. Scores are always of plain text, left to right.

    orders, order_kind, order_noise   see build_orders; 1: left to right only
    randmask_ratio   share of positions with a randomly masked
                     past; rate_min as in masked diffusion
    masked_input_ratio, masked_input_rate   share of samples with masked
                                            inputs, see _mask_inputs
    mask_id          row of [MASK], for masked inputs
    boundary_id      id that is never masked: the end of documents,
                     where a document mask depends on it
    drops_attention  the model has attention dropout and requires a key per sample
    """

    seed: int = 0
    orders: int = 1
    order_kind: str = "random"
    order_noise: float = 0.1
    randmask_ratio: float = 0.0
    rate_min: float = 1e-3
    masked_input_ratio: float = 0.0
    masked_input_rate: float = 0.5
    mask_id: int = 0
    boundary_id: int | None = None
    drops_attention: bool = False
    name: str = "autoregressive"
    causal: bool = True
    exact: bool = True

    def corrupt(self, tokens: np.ndarray, numbers: np.ndarray, draw: int | None = None) -> Task:
        """Build the task of tokens int64 [B, S + 1]: S predictions per sample."""
        model_kwargs: ModelKwargs = {}
        if draw is None and self.orders > 1:
            orders = build_orders(self.seed, self.orders, tokens.shape[1], self.order_kind, self.order_noise)
            order = draw_sample_orders(self.seed, numbers, orders)
            # tokens and their text positions are permuted together;
            # inputs are all but the last of them order 0 2 1 3 of the
            # text a b c d: inputs a c b at positions 0 2 1, targets c b d
            tokens = np.take_along_axis(tokens, order, axis=1)
            model_kwargs["positions"] = torch.from_numpy(order[:, :-1].copy())
        if draw is None and self.randmask_ratio > 0:
            model_kwargs["visible"] = torch.from_numpy(self._draw_visibility(numbers, tokens.shape[1] - 1))
        if draw is None and self.drops_attention:
            model_kwargs["dropout_key"] = torch.from_numpy(draw_dropout_keys(self.seed, numbers))
        inputs = tokens[:, :-1]
        if draw is None and self.masked_input_ratio > 0:
            inputs = self._mask_inputs(inputs, numbers)
        return Task(
            inputs=torch.from_numpy(inputs).contiguous(),
            positions=None,
            targets=torch.from_numpy(tokens[:, 1:]).flatten(),
            scale=None,
            count=tokens.shape[0] * (tokens.shape[1] - 1),
            model_kwargs=model_kwargs,
        )

    def _mask_inputs(self, inputs: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Replace inputs int64 [B, S] of a share of the samples by [MASK]; all targets stay.

        A selected sample draws a rate ~ U(0, masked_input_rate), and each of its inputs
        is masked with this probability. Masked-input regularization (Xu et al.,
        arXiv 2606.06888) adds the loss on masked inputs to the loss on plain
        inputs of the same batch, with a weight of 0.4, at twice the FLOPs.
        Here a sample is one or the other, at no additional FLOPs:
        with a share r the mean of the gradient is as with a weight r / (1 - r).
        """
        masked = inputs.copy()
        for row, i in zip(masked, numbers, strict=True):
            rng = make_generator(self.seed, Purpose.MASKED_INPUT, int(i))
            selected, rate = rng.random() < self.masked_input_ratio, rng.random() * self.masked_input_rate
            if selected:
                hidden = rng.random(len(row)) < rate
                if self.boundary_id is not None:
                    hidden &= row != self.boundary_id
                row[hidden] = self.mask_id
        return masked

    def _draw_visibility(self, numbers: np.ndarray, n: int) -> np.ndarray:
        """Draw the keys visible to each position, bool [B, n, n], before causality.

        This is the random masking of the ablations in arXiv 2507.15857, as in its code.
        A share of the positions is selected. Each selected position draws t ~ U(0,
        1) and masks every other position independently with probability
        (1 - rate_min) t + rate_min. A position always attends to itself.
        The cost is n draws per selected position: milliseconds per sample at n = 2048.
        """
        visible = np.ones((len(numbers), n, n), dtype=bool)
        for seen, i in zip(visible, numbers, strict=True):
            rng = make_generator(self.seed, Purpose.RANDOM_MASK, int(i))
            picked = np.flatnonzero(rng.random(n) < self.randmask_ratio)
            # one t per selected position, then an independent draw for each key
            rate = (1 - self.rate_min) * rng.random(len(picked)) + self.rate_min
            seen[picked] = rng.random((len(picked), n), dtype=np.float32) >= rate[:, None]
        # after the draws, so that every selected
        # position uses n numbers of the stream.
        # It also keeps every row of the softmax non-empty
        visible[:, np.arange(n), np.arange(n)] = True
        return visible


@lru_cache(maxsize=8)
def build_orders(seed: int, n_orders: int, n_tokens: int, kind: str, noise: float) -> np.ndarray:
    """Return the orders of a run, int64 [n_orders, n_tokens]: entry i is the text position of the i-th token.

    The first order is left to right, and every order starts with the first
    token of the text. Each token keeps the position that it has in the text.

    random         uniform permutation of the rest
    noise_sorted   the rest sorted by position plus normal noise of std
                   noise * n_tokens: neighbours stay close for small noise,
                   and the order approaches a random one for large noise

    An ablation of "Diffusion Beats Autoregressive in Data-Constrained Settings" (Prabhudesai
    et al., arXiv 2507.15857). Hypothesis: masked diffusion learns more from repeated text
    because each text appears in many orders. If so, an autoregressive model trained on k
    orders (left to right and k - 1 others, drawn once per run) should overfit later.
    """
    orders = np.tile(np.arange(n_tokens), (n_orders, 1))
    for k in range(1, n_orders):
        rng = make_generator(seed, Purpose.ORDERS, k)
        if kind == "random":
            orders[k, 1:] = 1 + rng.permutation(n_tokens - 1)
        else:
            # noise 0.1 and 1000 tokens: each key moves by about 100 positions
            keys = np.arange(1, n_tokens) + noise * n_tokens * rng.standard_normal(n_tokens - 1)
            orders[k, 1:] = 1 + np.argsort(keys, kind="stable")
    orders.flags.writeable = False  # shared through the cache
    return orders


def draw_sample_orders(seed: int, numbers: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Draw the order of each sample, [B, n_tokens], uniformly from the list."""
    indices = draw_uniform(seed, Purpose.ORDER_OF_SAMPLE, numbers) * len(orders)
    return orders[indices.astype(np.int64)]
