"""Initial weights have the configured standard deviation."""

import pytest
from torch import nn

from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from megatron.plan.resolve import resolve_config


def build_model(**model) -> Gpt:
    shape = {"d_model": 64, "n_heads": 4, "n_layers": 2, "n_tokens": 500, "vocab_rows": 512}
    raw = {
        "dataset": {"path_train": "synthetic"},
        "model": shape | model,
        "lr_scheduler": {"total_iterations": 1},
    }
    gpt = Gpt(resolve_config(raw, "test").model)
    init_weights(gpt, seed=0)
    return gpt


def measure_std(parameter: nn.Parameter) -> float:
    return float(parameter.detach().std())


def test_init_std_sets_the_spread_of_every_matrix_and_002_is_the_default():
    default, wide = build_model(), build_model(init_std=0.1)
    for gpt, std in ((default, 0.02), (wide, 0.1)):
        assert measure_std(gpt.embedding.weight) == pytest.approx(std, rel=0.02)
        assert measure_std(gpt.blocks[0].mlp.up.weight) == pytest.approx(std, rel=0.03)
        # matrices that write to the residual stream are smaller by sqrt(2 L) = 2
        assert measure_std(gpt.blocks[1].mlp.down.weight) == pytest.approx(std / 2, rel=0.03)


def test_init_std_is_that_of_the_base_width_under_mup():
    gpt = build_model(init_std=0.1, parametrization="mup", base_d_model=16)
    assert measure_std(gpt.embedding.weight) == pytest.approx(0.1, rel=0.02)
    assert measure_std(gpt.blocks[0].mlp.up.weight) == pytest.approx(0.05, rel=0.03)  # 0.1 / sqrt(64 / 16)
