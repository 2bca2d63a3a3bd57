"""Muon: equal to torch's optimizers, skipped steps, orthogonal updates, rates for every width."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import _muon

from megatron.config.schema import ModelConfig, OptimConfig
from megatron.optim.adamw import set_lr, step_optimizer
from megatron.optim.muon import NS_COEFFICIENTS, build_optimizer, orthogonalize
from tests.tool_modules import TOOLS, load_tool

CONFIG = OptimConfig(kind="muon", lr=0.1, weight_decay=0.5, momentum=0.9)
SHAPES = {
    "embedding.weight": (20, 6), "blocks.0.attention.query.weight": (6, 6), "blocks.0.mlp.up.weight": (9, 6),
    "blocks.1.mlp.down.weight": (6, 9), "blocks.1.mlp.up.bias": (9,), "norm.weight": (6,),
    "unembedding.weight": (20, 6),
}  # fmt: skip
SHAPE = ModelConfig(n_layers=2)
ONE, FINITE = torch.tensor(1.0), torch.tensor(True)


def build_parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def build_references(parameters: dict[str, nn.Parameter], config: OptimConfig) -> list[torch.optim.Optimizer]:
    """Return torch.optim.Muon for the matrices of blocks, and torch.optim.AdamW for the rest."""
    hidden = {name for name, p in parameters.items() if name.startswith("blocks.") and p.ndim == 2}
    rest = [p for name, p in parameters.items() if name not in hidden]
    groups = [
        {"params": [p for p in rest if p.ndim == 2]},
        {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
    ]
    betas = config.beta1, config.beta2
    return [
        torch.optim.Muon(
            [parameters[name] for name in hidden],
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            groups, lr=config.lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay
        ),
    ]


def test_ten_steps_are_those_of_torch_with_a_step_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's iteration rounds to bfloat16 on a CPU too: this makes it compute in float32
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    ours, theirs = build_parameters(), build_parameters()
    optimizer, references = build_optimizer(ours, CONFIG, SHAPE), build_references(theirs, CONFIG)
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        is_skipped, lr = step == 4, 0.1 / (step + 1)
        for name, parameter in theirs.items():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad, ours[name].grad = gradient, 3.0 * gradient
        if is_skipped:
            ours["blocks.0.mlp.up.weight"].grad[2, 1] = torch.nan
        set_lr(optimizer, lr)
        step_optimizer(optimizer, torch.tensor(3.0), torch.tensor(not is_skipped))
        for reference in references if not is_skipped else ():
            for group in reference.param_groups:
                group["lr"] = lr
            reference.step()
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter, rtol=1e-6, atol=1e-6)
    for name in ("blocks.0.mlp.up.weight", "blocks.1.mlp.down.weight"):
        average = references[0].state[theirs[name]]["momentum_buffer"]
        state = optimizer.state[ours[name]]
        assert state.keys() == {"momentum_buffer"}
        torch.testing.assert_close(state["momentum_buffer"], average, rtol=1e-6, atol=1e-6)


def test_in_bfloat16_the_iteration_is_that_of_torch_up_to_rounding() -> None:
    matrix = torch.randn(40, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    theirs = _muon._zeropower_via_newtonschulz(
        matrix, NS_COEFFICIENTS, _muon.DEFAULT_NS_STEPS, _muon.EPS
    ).float()
    assert float((orthogonalize(matrix).float() - theirs).norm() / theirs.norm()) < 5e-3


@pytest.mark.parametrize("shape", [(64, 48), (96, 32), (32, 96)])
def test_an_update_has_equal_singular_values_and_the_rms_of_adamw(shape: tuple[int, int]) -> None:
    """Torch's iteration takes the singular values to 0.7 to 1.2; those of U V^T from an SVD are 1."""
    matrix = nn.Parameter(torch.zeros(shape))
    matrix.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    optimizer = build_optimizer({"blocks.0.mlp.up.weight": matrix}, CONFIG, SHAPE)
    set_lr(optimizer, 0.01)
    step_optimizer(optimizer, ONE, FINITE)
    update = -matrix.detach().double() / 0.01
    u, _, v = torch.linalg.svd(matrix.grad.double(), full_matrices=False)
    exact = 0.2 * max(shape) ** 0.5 * u @ v
    assert float(exact.square().mean().sqrt()) == pytest.approx(0.2)
    assert float(update.square().mean().sqrt()) == pytest.approx(0.2, rel=0.25)
    # the same singular vectors: only the singular values differ
    values = torch.diagonal(u.T @ update @ v.T) / (0.2 * max(shape) ** 0.5)
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3
    assert float((u.T @ update @ v.T / (0.2 * max(shape) ** 0.5) - values.diag()).abs().max()) < 0.02


@pytest.mark.slow
def test_with_the_rule_of_mup_activations_change_equally_at_every_width() -> None:
    """The slopes of tools/bench/coordinate_check.py. AdamW's rule gives -0.5 and -0.9."""
    check: Any = load_tool(TOOLS / "bench/coordinate_check.py")
    widths = (32, 256)
    words = "--widths 32 256 --depths 2 4 --d-head 16 --n-tokens 63"
    args, optim = check.build_parser().parse_args(words.split()), OptimConfig(kind="muon", lr=4e-2)
    moved = [
        check.measure_coordinates(check.build_shape(args, "mup", width, 2), optim, n_steps=4)
        for width in widths
    ]
    for name in ("embedding", "attention", "feed_forward", "residual", "logits"):
        growth = moved[1][name][-1] / moved[0][name][-1]
        assert abs(np.log(growth) / np.log(widths[1] / widths[0])) < 0.35, name
