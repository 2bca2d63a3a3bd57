"""IsoFLOP runs on a surface of Chinchilla's form, whose best sizes are known."""

import numpy as np

E, A, B, ALPHA, BETA = 1.7, 90.0, 200.0, 0.35, 0.37
BUDGETS = np.geomspace(2e10, 1e12, 6)
SPREAD = np.geomspace(0.4, 2.5, 5)  # sizes at each budget, relative to its best one


def best_size(C: np.ndarray | float) -> np.ndarray | float:
    """Return the argmin over N of E + A/N^alpha + B/(C / 6N)^beta."""
    return (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA)) * (C / 6) ** (BETA / (ALPHA + BETA))


def true_loss(N: np.ndarray | float, C: np.ndarray | float) -> np.ndarray | float:
    """Return the loss of a model of N parameters at C FLOPs."""
    return E + A / N**ALPHA + B / (C / (6 * N)) ** BETA


def simulate_surface(noise: float, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (N, D, L, C) of 5 sizes at each of 6 budgets, and a second seed of four cells."""
    C = np.repeat(BUDGETS, len(SPREAD))
    N = best_size(C) * np.tile(SPREAD, len(BUDGETS))
    repeated = [7, 12, 17, 22]
    C, N = np.append(C, C[repeated]), np.append(N, N[repeated])
    rng = np.random.default_rng(seed)
    L = true_loss(N, C) * np.exp(noise * rng.standard_normal(len(N)))
    return N, C / (6 * N), L, C
