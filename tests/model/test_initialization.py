"""Initial weights have the configured standard deviation."""

from typing import Any

import pytest
import torch
from torch import nn

from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from megatron.plan.resolve import resolve_config


def build_model(seed: int = 0, **model: Any) -> Gpt:
    shape = {"d_model": 64, "n_heads": 4, "n_layers": 2, "n_tokens": 500, "vocab_rows": 512}
    raw = {
        "dataset": {"path_train": "synthetic"},
        "model": shape | model,
        "lr_scheduler": {"total_iterations": 1},
    }
    gpt = Gpt(resolve_config(raw, "test").model)
    init_weights(gpt, seed)
    return gpt


def measure_std(parameter: nn.Parameter) -> float:
    return float(parameter.detach().std())


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(99)
    first, again, other = build_model(5), build_model(5), build_model(6)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_init_std_sets_the_spread_of_every_matrix_and_002_is_the_default() -> None:
    default, wide = build_model(), build_model(init_std=0.1)
    for gpt, std in ((default, 0.02), (wide, 0.1)):
        assert measure_std(gpt.embedding.weight) == pytest.approx(std, rel=0.02)
        assert measure_std(gpt.blocks[0].mlp.up.weight) == pytest.approx(std, rel=0.03)
        # matrices that write to the residual stream are smaller by sqrt(2 L) = 2
        assert measure_std(gpt.blocks[1].mlp.down.weight) == pytest.approx(std / 2, rel=0.03)


def test_init_std_is_that_of_the_base_width_under_mup() -> None:
    gpt = build_model(init_std=0.1, parametrization="mup", base_d_model=16)
    assert measure_std(gpt.embedding.weight) == pytest.approx(0.1, rel=0.02)
    assert measure_std(gpt.blocks[0].mlp.up.weight) == pytest.approx(0.05, rel=0.03)  # 0.1 / sqrt(64 / 16)
