"""Token orders of an autoregressive model.

An ablation of "Diffusion Beats Autoregressive in Data-Constrained Settings" (Prabhudesai et al., arXiv
2507.15857). Hypothesis: masked diffusion learns more from repeated text because each text appears in many
orders. If so, an autoregressive model trained on k orders (left to right and k - 1 others, drawn once per
run) should overfit later. Each token keeps the position that it has in the text.
"""

from functools import lru_cache

import numpy as np

from megatron.objective.sample_noise import Purpose, draw_uniform, make_generator


@lru_cache(maxsize=8)
def build_orders(seed: int, n_orders: int, n_tokens: int, kind: str, noise: float) -> np.ndarray:
    """Return the orders of a run, int64 [n_orders, n_tokens]: entry i is the text position of the i-th token.

    The first order is left to right, and every order starts with the first token of the text.

    random         uniform permutation of the rest
    noise_sorted   the rest sorted by position plus normal noise of std noise * n_tokens: neighbours stay
                   close for small noise, and the order approaches a random one for large noise
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
