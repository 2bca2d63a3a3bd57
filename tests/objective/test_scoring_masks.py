"""Scoring masks of a diffusion model: mean token weights, and coverage of the interval."""

import itertools
import math

import numpy as np
import pytest
import torch

from megatron.evaluation.corpus_loss import CorpusLoss
from megatron.model.transformer import Gpt
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.objective.sample_noise import Purpose, make_generator

MASK = 40


def token_weights(n: int, number: int, draw: int, seed: int = 0) -> np.ndarray:
    """Return the weight of each token of a window in a draw, float64 [n]."""
    task = MaskedDiffusion(MASK, 1e-3, seed).corrupt(np.zeros((1, n + 1), np.int64), np.array([number]), draw)
    weight = np.zeros(n)
    weight[task.positions.numpy()] = task.scale.numpy()
    return weight


@pytest.mark.parametrize(("n", "number"), [(2, 2**32), (12, 0)])
def test_the_mean_weight_of_every_token_is_one(n: int, number: int) -> None:
    """Includes the first token of window 0, whose masking probability was once the t of the draw."""
    weights = np.stack([token_weights(n, number, draw) for draw in range(2000)])
    error = weights.std(axis=0, ddof=1) / math.sqrt(len(weights))
    assert (np.abs(weights.mean(axis=0) - 1) <= 4.5 * error + 1e-12).all()
    # a model with equal loss for all tokens is scored without error
    np.testing.assert_allclose(weights.sum(axis=1), n, rtol=1e-6)


def test_masks_of_a_window_have_their_exact_probabilities() -> None:
    """A mask of l tokens has probability 1 / (n C(n, l)). Chi-square over the 7 masks of three tokens."""
    n, draws = 3, 3000
    hidden = np.stack([token_weights(n, 0, draw) > 0 for draw in range(draws)])
    counts = np.bincount(hidden @ [1, 2, 4], minlength=8)
    masks = [mask[::-1] for mask in itertools.product([0, 1], repeat=n)]
    chances = np.array([1 / (n * math.comb(n, sum(mask))) if any(mask) else 0 for mask in masks])
    assert chances.sum() == pytest.approx(1) and counts[0] == 0
    expected = draws * chances[1:]
    assert ((counts[1:] - expected) ** 2 / expected).sum() < 22.5  # 0.1 % of 6 degrees of freedom


def test_draws_windows_and_seeds_have_different_masks() -> None:
    cases = list(itertools.product((0, 1, 5, 2**32 + 5), (0, 1, 2, 5), (0, 1, 2, 5)))  # seed, draw, window
    masks = {(token_weights(64, number, draw, seed) > 0).tobytes() for seed, draw, number in cases}
    assert len(masks) == len(cases)


def test_training_noise_equals_that_of_recorded_runs() -> None:
    """Recorded draws: a resumed run continues with the masks that it started with."""
    assert make_generator(0, Purpose.TRAIN, 0).random() == 0.014067035665647709
    assert make_generator(7, Purpose.STRATA, 3).permutation(5).tolist() == [0, 3, 4, 2, 1]
    assert make_generator(2**32 - 1, Purpose.ORDERS, 2**32 - 1).random() == 0.19049211269537436


@pytest.mark.parametrize(("n_windows", "num_mc"), [(1, 2), (5, 4)])
def test_the_interval_of_the_bound_covers_in_95_percent(tiny: Gpt, n_windows: int, num_mc: int) -> None:
    """The exact bound by enumeration: the model's loss under every mask, weighted by its probability."""
    n, seeds = 6, 400
    text = np.random.default_rng(n_windows).integers(0, MASK, (n_windows, 1, n))
    hidden = np.array(list(itertools.product([0, 1], repeat=n)), dtype=bool)
    inputs = torch.from_numpy(np.where(hidden, MASK, text))
    log_p = tiny(inputs.flatten(0, 1), causal=False).double().log_softmax(-1).unflatten(0, inputs.shape[:2])
    targets = torch.from_numpy(text).expand(inputs.shape)
    nats = (-log_p.gather(-1, targets[..., None])[..., 0].numpy() * hidden).sum(axis=2)  # [windows, masks]
    count = hidden.sum(axis=1)
    chance = np.array([0.0 if not k else 1 / (n * math.comb(n, k)) for k in count])
    exact = float((nats * chance * n / np.maximum(count, 1)).sum()) / (n * n_windows)
    place = 1 << np.arange(n)[::-1]
    n_inside, losses = 0, []
    for seed in range(seeds):
        objective, draws = MaskedDiffusion(MASK, 1e-3, seed), np.zeros(num_mc)
        for draw in range(num_mc):
            clean, numbers = np.zeros((n_windows, n + 1), np.int64), np.arange(n_windows)
            task = objective.corrupt(clean, numbers, draw)
            masks = (task.inputs.numpy() == MASK) @ place
            weight = n / np.maximum((task.inputs.numpy() == MASK).sum(axis=1), 1)
            draws[draw] = (nats[numbers, masks] * weight).sum()
        metrics = CorpusLoss(np.array([draws.mean()]), np.array([n * n_windows]), draws, None).metrics()
        low, high = metrics["mc_interval"]
        n_inside += low <= exact <= high
        losses.append(metrics["loss"])
    assert abs(np.mean(losses) - exact) < 4 * np.std(losses) / math.sqrt(seeds)
    assert 0.905 <= n_inside / seeds <= 0.985  # four standard errors of a share of 0.95 in 400
