"""Random numbers that belong to a sample: keyed by (seed, purpose, number, draw), never by rank or time."""

from enum import IntEnum

import numpy as np

from megatron.keys import seed_sequence

GOLDEN = 0.6180339887498949  # fractional part of the golden ratio: its multiples spread evenly over (0, 1)


class Purpose(IntEnum):
    """What the noise is for, so that no two uses share a draw."""

    TRAIN = 0
    VALIDATE = 1
    STRATA = 2  # which part of (0, 1) each sample of a group has its t in
    LEFT_TO_RIGHT = 3  # whether a sample hides its last tokens
    ORDERS = 4  # the list of orders of a run
    ORDER_OF_SAMPLE = 5
    RANDOM_MASK = 6
    ATTENTION_DROPOUT = 7
    GENERATE = 8
    ANSWER = 9  # which tokens of an answer are hidden when it is scored
    VALIDATE_LATTICE = 10  # where the lattice of a scoring draw begins
    BOOTSTRAP = 11  # which documents are resampled when two models are compared


def generator(seed: int, purpose: Purpose, *numbers: int) -> np.random.Generator:
    """The counter-based generator (Philox) of one key; the same numbers on every machine."""
    return np.random.Generator(np.random.Philox(seed_sequence(seed, int(purpose), *numbers)))


def training_noise(seed: int, numbers: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """t [B] and u [B, n], uniform in [0, 1), for the training samples of these numbers [B]."""
    drawn = np.stack([generator(seed, Purpose.TRAIN, int(i)).random(n + 1) for i in numbers])
    return drawn[:, 0], drawn[:, 1:]


def antithetic(seed: int, numbers: np.ndarray, t: np.ndarray) -> np.ndarray:
    """t [B] for pairs of samples 2j, 2j + 1: the second has 1 - the first's, so what one lacks the other has.

    `t` are the samples' own draws; those of even number stay.
    """
    odd = numbers % 2 == 1
    first = [generator(seed, Purpose.TRAIN, int(i) - 1).random() for i in numbers[odd]]
    paired = t.copy()
    paired[odd] = 1 - np.array(first)
    return paired


def stratified(seed: int, numbers: np.ndarray, t: np.ndarray, group: int) -> np.ndarray:
    """t [B] for groups of `group` consecutive samples: one in each of as many equal parts of (0, 1).

    Which sample has which part is drawn anew for each group; where in it, the sample's own draw `t` says.
    Each t by itself is uniform, and the mean over a group has the variance within parts only.
    """
    of, place = np.divmod(numbers, group)
    parts = {int(g): generator(seed, Purpose.STRATA, int(g)).permutation(group) for g in np.unique(of)}
    part = np.array([parts[int(g)][i] for g, i in zip(of, place, strict=True)])
    return (part + t) / group


def chances(seed: int, purpose: Purpose, numbers: np.ndarray) -> np.ndarray:
    """One uniform number in [0, 1) for each sample, [B]."""
    return np.array([generator(seed, purpose, int(i)).random() for i in numbers])


def dropout_keys(seed: int, numbers: np.ndarray) -> np.ndarray:
    """int64 [B]: what a model derives a training sample's attention dropout from."""
    return np.array([generator(seed, Purpose.ATTENTION_DROPOUT, int(i)).integers(2**62) for i in numbers])


def scoring_masks(seed: int, numbers: np.ndarray, n: int, draw: int) -> tuple[np.ndarray, np.ndarray]:
    """(hidden bool [B, n], how many are hidden int64 [B]) of the samples of these numbers [B], in a draw.

    The number of hidden positions is uniform in 1..n, and all sets of so many have the same chance. Within a
    draw the numbers of neighbouring samples follow a rotated lattice, t = frac(v_k + i * golden): each t is
    uniform, they cover (0, 1) evenly, and different draws are independent, so that the spread between draws
    gives an honest standard error.
    """
    start = generator(seed, Purpose.VALIDATE_LATTICE, draw).random()
    t = (start + numbers * GOLDEN) % 1.0
    n_hidden = np.minimum(1 + np.floor(t * n).astype(np.int64), n)  # t * n may be rounded up to n
    u = np.stack([generator(seed, Purpose.VALIDATE, draw, int(i)).random(n) for i in numbers])
    rank = u.argsort(axis=1).argsort(axis=1)
    return rank < n_hidden[:, None], n_hidden
