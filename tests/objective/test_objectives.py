"""Each objective on cases with a known answer."""

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
