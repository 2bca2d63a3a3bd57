"""Random numbers that belong to a sample: keyed by (seed, purpose, number, draw), never by rank or time."""

from enum import IntEnum

import numpy as np

GOLDEN = 0.6180339887498949  # fractional part of the golden ratio: its multiples spread evenly over (0, 1)


class Purpose(IntEnum):
    """What the noise is for, so that training and scoring never share a draw."""

    TRAIN = 0
    VALIDATE = 1


def generator(seed: int, purpose: Purpose, *numbers: int) -> np.random.Generator:
    """The counter-based generator (Philox) of one key; the same numbers on every machine."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, int(purpose), *numbers])))


def training_noise(seed: int, numbers: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """t [B] and u [B, n], uniform in [0, 1), for the training samples of these numbers [B]."""
    drawn = np.stack([generator(seed, Purpose.TRAIN, int(i)).random(n + 1) for i in numbers])
    return drawn[:, 0], drawn[:, 1:]


def scoring_noise(seed: int, numbers: np.ndarray, n: int, draw: int) -> tuple[np.ndarray, np.ndarray]:
    """As `training_noise`, for draw k of a Monte-Carlo score.

    Within a draw the t of neighbouring samples lie on a rotated lattice, t = frac(v_k + i * golden): each t
    is uniform, they cover (0, 1) evenly, and different draws are independent, so that the spread between
    draws gives an honest standard error.
    """
    start = generator(seed, Purpose.VALIDATE, draw).random()
    t = (start + numbers * GOLDEN) % 1.0
    u = np.stack([generator(seed, Purpose.VALIDATE, draw, int(i)).random(n) for i in numbers])
    return t, u
