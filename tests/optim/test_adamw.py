"""The optimizer's groups, its fused scaling, and the kernel that has to be asked for."""

import sys

import pytest
import torch
from torch import nn

from megatron.config.schema import ModelConfig, OptimConfig
from megatron.optim.adamw import adamw, fused_adamw, update

CONFIG = OptimConfig(lr=0.1, weight_decay=0.5, beta1=0.9, beta2=0.95, eps=1e-8)
SHAPE = ModelConfig()


def named(pair: tuple[nn.Parameter, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {"blocks.0.mlp.up.weight": pair[0], "norm.weight": pair[1]}


@pytest.fixture
def pair() -> tuple[nn.Parameter, nn.Parameter]:
    """A matrix and a gain with gradients 6 and -3."""
    matrix, gain = nn.Parameter(torch.full((2, 2), 2.0)), nn.Parameter(torch.ones(2))
    matrix.grad, gain.grad = torch.full((2, 2), 6.0), torch.full((2,), -3.0)
    return matrix, gain


def test_the_first_step_is_the_rate_against_the_sign_and_only_matrices_decay(pair) -> None:
    optimizer = fused_adamw(named(pair), CONFIG, SHAPE)
    update(optimizer, 0.1, torch.tensor(3.0), torch.tensor(True))
    # Adam's first step is lr * sign; decay is lr * weight_decay * weight
    torch.testing.assert_close(pair[0].detach(), torch.full((2, 2), 2.0 - 0.1 * 0.5 * 2.0 - 0.1))
    torch.testing.assert_close(pair[1].detach(), torch.full((2,), 1.0 + 0.1))
    # the moment is (1 - beta1) of the gradient over 3
    torch.testing.assert_close(optimizer.state[pair[0]]["exp_avg"], torch.full((2, 2), 0.1 * 2.0))
    assert float(optimizer.state[pair[1]]["step"]) == 1.0


def test_a_gradient_that_is_no_number_moves_nothing(pair) -> None:
    optimizer = fused_adamw(named(pair), CONFIG, SHAPE)
    pair[1].grad.fill_(torch.nan)
    update(optimizer, 0.1, torch.tensor(1.0), torch.tensor(False))
    assert torch.equal(pair[0].detach(), torch.full((2, 2), 2.0))
    assert torch.equal(pair[1].detach(), torch.ones(2))
    assert float(optimizer.state[pair[0]]["step"]) == 0.0
    assert not optimizer.state[pair[0]]["exp_avg"].any()


def test_ten_steps_equal_those_of_torch_to_the_last_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    ours = [
        nn.Parameter(torch.randn(5, 3, generator=generator)),
        nn.Parameter(torch.randn(7, generator=generator)),
    ]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    fused, reference = fused_adamw(named(ours), CONFIG, SHAPE), adamw(named(theirs), CONFIG, SHAPE)
    for step in range(10):
        lr, divisor = 0.1 / (step + 1), torch.tensor(1.5)
        finite = torch.tensor(step != 4)  # that step is left out
        for own, other in zip(ours, theirs, strict=True):
            own.grad = torch.randn(own.shape, generator=generator)
            other.grad = own.grad.clone()
        update(fused, lr, divisor, finite)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.grad_scale, reference.found_inf = divisor, 1.0 - finite.float()
        reference.step()
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own, other)
        for name, held in reference.state[other].items():
            assert torch.equal(fused.state[own][name], held)
    assert float(fused.state[ours[0]]["step"]) == 9.0


def test_apex_that_is_not_there_is_one_sentence(pair, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)
    with pytest.raises(ValueError, match="`pip install apex` is a different package"):
        adamw(named(pair), OptimConfig(kernel="apex"), SHAPE)
