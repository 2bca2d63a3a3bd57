"""Initial weights, learning rates and multipliers follow the table of mup and completep."""

from typing import Any

import pytest
import torch

from megatron.config.schema import ModelConfig, OptimConfig
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from megatron.optim.adamw import build_adamw, set_lr, step_optimizer
from megatron.optim.muon import build_optimizer


def build_shape(parametrization: str, width: int = 32, depth: int = 2, **more: Any) -> ModelConfig:
    mup = {"base_d_model": 32}
    base = {"standard": {}, "mup": mup, "completep": {**mup, "base_n_layers": 2}}
    return ModelConfig(
        d_model=width, d_ff=8 * width // 3, d_head=16, n_heads=width // 16, n_layers=depth, n_tokens=64,
        vocab_rows=128, parametrization=parametrization, **base[parametrization], **more,
    )  # fmt: skip


def test_rates_decays_and_eps_follow_the_table() -> None:
    model = Gpt(wide := build_shape("completep", width=128, depth=8, biases=True, tied_embedding=False))
    optim = OptimConfig(lr=1e-2, weight_decay=0.1, eps=1e-8)
    optimizer = build_adamw(dict(model.named_parameters()), optim, wide)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {
        names[id(parameter)]: (group["lr_scale"], group["weight_decay"], group["eps"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert groups.keys() == dict(model.named_parameters()).keys()
    # four times the width, four times the depth
    assert groups["blocks.3.mlp.up.weight"] == pytest.approx((1 / 4, 0.4, 1e-8 / 16))
    assert groups["blocks.0.attention.query.weight"] == groups["blocks.3.mlp.up.weight"]
    assert groups["blocks.0.attention.query.bias"] == pytest.approx((1, 0, 1e-8 / 16))
    assert groups["blocks.7.mlp_norm.weight"] == pytest.approx((1, 0, 1e-8 / 16))
    assert groups["embedding.weight"] == pytest.approx((1, 0.1, 1e-8 / 4))
    assert groups["unembedding.weight"] == pytest.approx((1, 0.1, 1e-8 / 4))
    assert groups["norm.weight"] == pytest.approx((1, 0, 1e-8 / 4))
    init_weights(model, seed=0)
    std = {name: parameter.std().item() for name, parameter in model.named_parameters()}
    assert std["blocks.3.mlp.up.weight"] == pytest.approx(0.02 / 2, rel=0.05)
    assert std["blocks.3.mlp.down.weight"] == pytest.approx(0.02 / 2 / (2 * 2) ** 0.5, rel=0.05)  # base depth
    assert std["embedding.weight"] == pytest.approx(0.02, rel=0.05)


def test_multipliers_are_applied_as_in_the_table() -> None:
    config = build_shape("completep", width=64, depth=4, base_d_head=4)
    model, plain = Gpt(config), Gpt(build_shape("standard", width=64, depth=4))
    init_weights(model, seed=0)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():  # the same function, with the multipliers moved into the weights
        for block in plain.blocks:
            block.attention.out.weight /= 2
            block.mlp.down.weight /= 2
            block.attention.query.weight *= (4**0.5 / 16) * 16**0.5
        plain.norm.weight /= 2
        tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(model(tokens, True), plain(tokens, True), rtol=1e-5, atol=1e-6)


def test_every_group_uses_the_scheduled_rate_times_its_scale() -> None:
    model = Gpt(wide := build_shape("mup", width=64))
    init_weights(model, seed=0)
    optimizer = build_optimizer(dict(model.named_parameters()), OptimConfig(weight_decay=0.0), wide)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    set_lr(optimizer, 0.01)
    step_optimizer(optimizer, torch.tensor(1.0), torch.tensor(True))
    # Adam's first step changes each weight by its learning rate, for any gradient
    moved = {name: (p.detach() - before[name]).abs().max().item() for name, p in model.named_parameters()}
    assert moved["embedding.weight"] == pytest.approx(0.01, rel=1e-3)
    assert moved["blocks.0.mlp.down.weight"] == pytest.approx(0.005, rel=1e-3)
