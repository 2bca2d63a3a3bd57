"""The optimizer's groups, its fused scaling, and the optional apex kernel."""

import sys

import pytest
import torch
from torch import nn

from megatron.config.schema import ModelConfig, OptimConfig
from megatron.optim.adamw import build_adamw, set_lr, step_optimizer
from megatron.optim.muon import build_optimizer

CONFIG = OptimConfig(lr=0.1, weight_decay=0.5, beta1=0.9, beta2=0.95, eps=1e-8)
SHAPE = ModelConfig()


def name_parameters(pair: tuple[nn.Parameter, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {"blocks.0.mlp.up.weight": pair[0], "norm.weight": pair[1]}


@pytest.fixture
def pair() -> tuple[nn.Parameter, nn.Parameter]:
    """A matrix and a gain with gradients 6 and -3."""
    matrix, gain = nn.Parameter(torch.full((2, 2), 2.0)), nn.Parameter(torch.ones(2))
    matrix.grad, gain.grad = torch.full((2, 2), 6.0), torch.full((2,), -3.0)
    return matrix, gain


def test_the_first_step_is_the_sign_and_matrices_decay(pair) -> None:
    optimizer = build_optimizer(name_parameters(pair), CONFIG, SHAPE)
    set_lr(optimizer, 0.1)
    step_optimizer(optimizer, torch.tensor(3.0), torch.tensor(True))
    # Adam's first step is lr * sign; decay is lr * weight_decay * weight
    torch.testing.assert_close(pair[0].detach(), torch.full((2, 2), 2.0 - 0.1 * 0.5 * 2.0 - 0.1))
    torch.testing.assert_close(pair[1].detach(), torch.full((2,), 1.0 + 0.1))
    # the moment is (1 - beta1) of the gradient over 3
    torch.testing.assert_close(optimizer.state[pair[0]]["exp_avg"], torch.full((2, 2), 0.1 * 2.0))
    assert float(optimizer.state[pair[1]]["step"]) == 1.0


def test_ten_steps_are_bit_equal_to_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)
    copies = [tuple(nn.Parameter(weight.clone()) for weight in weights) for _ in range(3)]
    fused, on_device = (build_optimizer(name_parameters(pair), CONFIG, SHAPE) for pair in copies[:2])
    reference = build_adamw(name_parameters(copies[2]), CONFIG, SHAPE)
    on_device.keep_lr_on_device()
    for step in range(10):
        lr, divisor = 0.1 / (step + 1), torch.tensor(1.5)
        finite = torch.tensor(step != 4)  # that step is skipped
        for parameters in zip(*copies, strict=True):
            gradient = torch.randn(parameters[0].shape, generator=generator)
            for parameter in parameters:
                parameter.grad = gradient.clone() if finite else gradient * torch.nan
        for optimizer in (fused, on_device):
            set_lr(optimizer, lr)
            step_optimizer(optimizer, divisor, finite)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.grad_scale, reference.found_inf = divisor, 1.0 - finite.float()
        reference.step()
    for ours, second, theirs in zip(*copies, strict=True):
        assert torch.equal(ours, theirs) and torch.equal(second, theirs)
        for name, value in reference.state[theirs].items():
            assert torch.equal(fused.state[ours][name], value)
            assert torch.equal(on_device.state[second][name], value)
    assert float(fused.state[copies[0][0]]["step"]) == 9.0
    assert float(on_device.param_groups[0]["lr_tensor"]) == 0.1 / 10


def test_missing_apex_gives_a_one_line_error(pair, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)
    with pytest.raises(ValueError, match="`pip install apex` is a different package"):
        build_adamw(name_parameters(pair), OptimConfig(kernel="apex"), SHAPE)
