"""Random numbers of a sample, keyed by (seed, purpose, sample number, draw) and never by rank or time."""

from enum import IntEnum

import numpy as np

from megatron.data.keys import seed_sequence

# fractional part of the golden ratio: its
# multiples modulo 1 are evenly spread over (0, 1)
GOLDEN = 0.6180339887498949


class Purpose(IntEnum):
    """Purpose of the random numbers, part of the key, so that no two uses share a draw."""

    TRAIN = 0
    VALIDATE = 1
    STRATA = 2  # part of (0, 1) for the t of each sample of a group
    LEFT_TO_RIGHT = 3  # whether the masked tokens of a sample are moved to its end
    ORDERS = 4  # list of orders of a run
    ORDER_OF_SAMPLE = 5
    RANDOM_MASK = 6
    ATTENTION_DROPOUT = 7
    GENERATE = 8
    ANSWER = 9  # masked tokens of an answer that is scored
    VALIDATE_LATTICE = 10  # offset of the lattice of a scoring draw
    BOOTSTRAP = 11  # resampled documents in a comparison of two models
    MASKED_INPUT = 12  # input tokens of a next-token prediction that are replaced by [MASK]


def make_generator(seed: int, purpose: Purpose, *numbers: int) -> np.random.Generator:
    """Return the counter-based generator (Philox) of a key; it gives the same numbers on every machine."""
    return np.random.Generator(np.random.Philox(seed_sequence(seed, int(purpose), *numbers)))


def draw_training_noise(seed: int, numbers: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return t [B] and u [B, n], uniform in [0, 1), for training samples with numbers [B]."""
    # one stream per sample: t first, then u for positions 0 .. n - 1
    draws = np.stack([make_generator(seed, Purpose.TRAIN, int(i)).random(n + 1) for i in numbers])
    return draws[:, 0], draws[:, 1:]


def pair_antithetic(seed: int, numbers: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Return antithetic t [B]: in each pair of samples 2j, 2j + 1 the second has 1 minus the t of the first.

    t [B] are the independent draws of the samples; those with even numbers are unchanged.
    """
    # the partner's draw is computed again: it
    # may be in another batch or on another rank
    odd = numbers % 2 == 1
    # random() is the first number of the stream, the
    # column 0 that draw_training_noise returns as t
    first = [make_generator(seed, Purpose.TRAIN, int(i) - 1).random() for i in numbers[odd]]
    paired = t.copy()
    paired[odd] = 1 - np.array(first)
    return paired


def stratify_groups(seed: int, numbers: np.ndarray, t: np.ndarray, group: int) -> np.ndarray:
    """Return stratified t [B]: each sample of a group of consecutive samples has its own part of (0, 1).

    (0, 1) is divided into `group` equal parts. Each group draws a permutation that assigns
    parts to samples; the independent draw t is the position within the part. Each t
    is uniform on its own, and the mean over a group has only the variance within parts.
    """
    # drawn per group, not per batch: a rank computes
    # the permutation of a group it holds only partly
    groups, places = np.divmod(numbers, group)
    parts = {
        int(g): make_generator(seed, Purpose.STRATA, int(g)).permutation(group) for g in np.unique(groups)
    }
    # group 4, permutation 2 0 3 1, all t = 0.5: result 0.625, 0.125, 0.875, 0.375
    part = np.array([parts[int(g)][i] for g, i in zip(groups, places, strict=True)])
    return (part + t) / group


def draw_uniform(seed: int, purpose: Purpose, numbers: np.ndarray) -> np.ndarray:
    """Return one uniform number in [0, 1) per sample, [B]."""
    return np.array([make_generator(seed, purpose, int(i)).random() for i in numbers])


def draw_dropout_keys(seed: int, numbers: np.ndarray) -> np.ndarray:
    """Return the attention dropout key of each training sample, int64 [B]."""
    return np.array(
        [make_generator(seed, Purpose.ATTENTION_DROPOUT, int(i)).integers(2**62) for i in numbers]
    )


def draw_scoring_masks(seed: int, numbers: np.ndarray, n: int, draw: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (masked positions bool [B, n], their number int64 [B]) of samples in a scoring draw.

    The number of masked positions is uniform in 1..n, and all sets of that size are equally
    likely. Within draw k the numbers of samples i follow a rotated lattice, t = frac(v_k +
    i * golden). Each t is uniform, neighbouring samples cover (0, 1) evenly, and different
    draws are independent. The spread between draws therefore gives a valid standard error.
    """
    start = make_generator(seed, Purpose.VALIDATE_LATTICE, draw).random()
    # v_k of this draw plus the golden-ratio (Kronecker) lattice over sample numbers
    # float64: for sample number 10^9 the product
    # is resolved to 1e-7, far finer than 1 / n
    t = (start + numbers * GOLDEN) % 1.0
    n_hidden = np.minimum(1 + np.floor(t * n).astype(np.int64), n)  # rounding may give t * n = n
    u = np.stack([make_generator(seed, Purpose.VALIDATE, draw, int(i)).random(n) for i in numbers])
    # the l positions with the smallest u are masked: a uniform
    # set of size l. Argsort of argsort is the rank: u = .7 .1 .4
    # has argsort 1 2 0 and ranks 2 0 1; l = 2 masks the last two
    rank = u.argsort(axis=1).argsort(axis=1)
    return rank < n_hidden[:, None], n_hidden
