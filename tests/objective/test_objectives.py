"""Each objective on cases with a known answer."""

import itertools
import math

import numpy as np
import pytest
import torch

from megatron.objective.autoregressive import Autoregressive
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.objective.task import Task, compute_sample_nats, compute_task_loss

MASK = 4  # ids 0..3, then [MASK]


def build_diffusion(seed: int = 0) -> MaskedDiffusion:
    return MaskedDiffusion(mask_id=MASK, rate_min=1e-3, seed=seed)


def draw_tokens(n: int, n_positions: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, MASK, (n, n_positions + 1))


def test_autoregressive_targets_are_the_inputs_shifted_by_one() -> None:
    tokens = draw_tokens(3, 5)
    task = Autoregressive().corrupt(tokens, np.arange(3))
    np.testing.assert_array_equal(task.inputs, tokens[:, :-1])
    np.testing.assert_array_equal(task.targets.view(3, 5), tokens[:, 1:])
    assert task.count == 15


def test_autoregressive_loss_equals_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=8
    )
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = draw_tokens(2, 12)
    task = Autoregressive().corrupt(tokens, np.arange(2))
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens), labels=torch.from_numpy(tokens)).loss.item()
        hidden = model.model(task.inputs).last_hidden_state
        nats, count = compute_task_loss(hidden, model.lm_head.weight, task)
    assert nats.item() / count == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("objective", [Autoregressive(), build_diffusion()], ids=lambda o: o.name)
def test_a_uniform_model_costs_log_v_a_token(objective: Autoregressive | MaskedDiffusion) -> None:
    # zero hidden states give equal logits; the diffusion bound is then unbiased for log V, E[hidden/rate] = 1
    n, n_positions = 400, 16
    total = count = 0.0
    for draw in range(4):
        task = objective.corrupt(draw_tokens(n, n_positions), np.arange(n), draw=draw)
        hidden = torch.zeros(n, n_positions, 2)
        total += compute_sample_nats(hidden, torch.randn(MASK + 1, 2), task).sum().item()
        count += task.count
    assert total / count == pytest.approx(math.log(MASK + 1), rel=0.03)


def test_only_masked_positions_are_predicted_with_weight_one_over_rate() -> None:
    tokens = draw_tokens(50, 30)
    task = build_diffusion().corrupt(tokens, np.arange(50))
    hidden = np.zeros((50, 30), dtype=bool)
    hidden.reshape(-1)[task.positions.numpy()] = True
    np.testing.assert_array_equal(task.inputs.numpy() == MASK, hidden)
    np.testing.assert_array_equal(task.inputs.numpy()[~hidden], tokens[:, :-1][~hidden])
    np.testing.assert_array_equal(task.targets, tokens[:, :-1][hidden])
    # one rate per sample
    row = task.positions // 30
    for i in range(50):
        assert len(task.scale[row == i].unique()) <= 1
    assert task.scale.min() >= 1.0
    assert task.count == 1500


def test_the_bound_averaged_over_draws_is_its_exact_value_by_enumeration() -> None:
    """Three positions, a table for a model: sum over all 8 masks, the integral over t by Simpson's rule."""
    tokens = np.array([[2, 0, 3, 1]])
    generator = torch.Generator().manual_seed(0)
    table = {
        mask: torch.randn(3, MASK + 1, generator=generator, dtype=torch.float64)
        for mask in itertools.product([False, True], repeat=3)
    }
    clean = torch.tensor([2, 0, 3])

    def compute_nats(mask: tuple[bool, ...], rate: float) -> float:
        log_p = table[mask].log_softmax(-1)[torch.arange(3), clean]
        return -(log_p * torch.tensor(mask)).sum().item() / rate

    def compute_mean(t: float) -> float:
        rate = (1 - 1e-3) * t + 1e-3
        return sum(
            math.prod(rate if hidden else 1 - rate for hidden in mask) * compute_nats(mask, rate)
            for mask in table
        )

    knots = [compute_mean(t) for t in np.linspace(0, 1, 201)]
    exact = (knots[0] + knots[-1] + 4 * sum(knots[1:-1:2]) + 2 * sum(knots[2:-1:2])) / 600
    n = 40_000
    task = build_diffusion(seed=1).corrupt(np.repeat(tokens, n, axis=0), np.arange(n), draw=0)
    masks = (task.inputs == MASK).numpy()
    rates = np.ones(n)
    rates[(task.positions // 3).numpy()] = 1 / task.scale.double().numpy()
    draws = np.array(
        [compute_nats(tuple(bool(x) for x in mask), rate) for mask, rate in zip(masks, rates, strict=True)]
    )
    error = draws.std() / math.sqrt(n)
    assert abs(draws.mean() - exact) < 4 * error
    assert error < 0.02 * exact


def test_noise_depends_on_the_sample_and_not_on_its_place_in_a_batch() -> None:
    tokens = draw_tokens(6, 20)
    numbers = np.array([5, 900, 17, 3, 44, 2**40])
    whole = build_diffusion().corrupt(tokens, numbers)
    for i in range(6):
        alone = build_diffusion().corrupt(tokens[i : i + 1], numbers[i : i + 1])
        assert torch.equal(alone.inputs[0], whole.inputs[i])
    other = build_diffusion(seed=1).corrupt(tokens, numbers)
    scoring = build_diffusion().corrupt(tokens, numbers, draw=0)
    assert not torch.equal(whole.inputs, other.inputs)
    assert not torch.equal(whole.inputs, scoring.inputs)


def test_the_loss_of_a_batch_is_the_sum_over_its_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 20, 8, generator=generator)
    head = torch.randn(MASK + 1, 8, generator=generator)
    for objective in (Autoregressive(), build_diffusion()):
        task: Task = objective.corrupt(draw_tokens(6, 20), np.arange(6))
        torch.testing.assert_close(
            compute_task_loss(hidden, head, task)[0], compute_sample_nats(hidden, head, task).sum()
        )
