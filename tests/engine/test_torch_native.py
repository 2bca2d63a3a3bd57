"""The torch engine on one process: what it refuses, skips and scales."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config.schema import DistConfig, ModelConfig, OptimConfig
from megatron.engine.loss_scale import BACKOFF, START, LossScale
from megatron.engine.torch_native import TorchEngine
from megatron.model.gpt import Gpt
from megatron.model.initial import initialise
from megatron.objective.autoregressive import Autoregressive
from megatron.objective.base import Task
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.parallel.world import World

SHAPE = ModelConfig(d_model=16, d_ff=32, d_head=4, n_heads=4, n_layers=2, n_tokens=60, vocab_rows=64)


def engine(shape: ModelConfig = SHAPE, seed: int = 0, **dist: object) -> TorchEngine:
    model = Gpt(shape)
    initialise(model, seed)
    return TorchEngine(
        model,
        causal=True,
        dist=DistConfig(**{"cpu_only": True, "dtype": "float32", **dist}),
        optim=OptimConfig(lr=0.01),
        world=World(0, 1, 0, torch.device("cpu")),
    )


def task(seed: int = 0) -> Task:
    tokens = np.random.default_rng(seed).integers(0, 60, (2, 9))
    return Autoregressive().corrupt(tokens, np.arange(2))


def test_a_state_is_named_by_the_model_and_undone_exactly() -> None:
    first, second = engine(seed=0), engine(seed=1)
    first.step([task()], 0.01)
    state = first.state_dict()
    assert set(state["model"]) == set(state["optim"]["state"]) == set(dict(Gpt(SHAPE).named_parameters()))
    second.load_state_dict(state)
    one, other = (float(each.step([task(1)], 0.01).loss_sum) for each in (first, second))
    assert one == other
    for name, weight in first.state_dict()["model"].items():
        assert torch.equal(weight, second.state_dict()["model"][name]), name


def test_a_state_is_a_copy() -> None:
    trained = engine()
    state = trained.state_dict()
    before = {name: weight.clone() for name, weight in state["model"].items()}
    trained.step([task()], 0.01)
    assert all(torch.equal(before[name], weight) for name, weight in state["model"].items())


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ({"d_ff": 64}, r"blocks.0.mlp.gate.weight wanted \[32, 16\], found \[64, 16\]"),
        ({"n_layers": 1}, "blocks.1.attention_norm.weight wanted .* found none"),
        ({"n_layers": 3}, "blocks.2.attention.key.weight is not in this model"),
    ],
)
def test_the_state_of_another_model_is_one_sentence(shape, sentence) -> None:
    other = engine(ModelConfig(**{**SHAPE.__dict__, **shape})).state_dict()
    with pytest.raises(ValueError, match=f"weights of another model: {sentence}"):
        engine().load_state_dict(other)


def test_weights_alone_leave_the_optimizer_as_it_is() -> None:
    donor, taker = engine(seed=1), engine(seed=0)
    taker.step([task()], 0.01)
    taker.load_state_dict({"model": donor.state_dict()["model"]})
    state = taker.state_dict()
    assert torch.equal(state["model"]["embedding.weight"], donor.state_dict()["model"]["embedding.weight"])
    assert float(state["optim"]["state"]["embedding.weight"]["step"]) == 1.0


def test_a_gradient_that_is_no_number_is_told_and_moves_nothing() -> None:
    broken = engine()
    with torch.no_grad():
        broken.weights.own["blocks.0.mlp.up.weight"][0, 0] = torch.nan
    before = broken.state_dict()["model"]["embedding.weight"]
    report = broken.step([task()], 0.01)
    assert not torch.isfinite(report.grad_norm)
    assert torch.equal(broken.state_dict()["model"]["embedding.weight"], before)


def test_the_norm_of_a_large_gradient_is_exact() -> None:
    trained = engine()
    large = torch.randn(50304, 64, generator=torch.Generator().manual_seed(0))
    small = torch.full((3,), 100.0)
    exact = (large.double().square().sum() + 3 * 100.0**2).sqrt()
    assert float(trained.weights.norm([large, small])) == pytest.approx(float(exact), rel=1e-7)


def test_float16_halves_its_scale_after_an_overflow_and_goes_on() -> None:
    trained = engine(dtype="float16")
    trained.loss_scale.scale.fill_(2.0**127)
    before = trained.state_dict()["model"]["embedding.weight"]
    trained.step([task()], 0.01)
    assert float(trained.loss_scale.scale) == 2.0**126
    assert torch.equal(trained.state_dict()["model"]["embedding.weight"], before)
    trained.loss_scale.scale.fill_(START)
    report = trained.step([task()], 0.01)
    exact = engine().step([task()], 0.01)
    assert float(report.grad_norm) == pytest.approx(float(exact.grad_norm), rel=0.01)
    assert trained.state_dict()["optim"]["loss_scale"]["scale"] == START


def test_the_loss_scale_doubles_after_2000_good_steps() -> None:
    scale = LossScale(torch.device("cpu"))
    for _ in range(2000):
        scale.after(torch.tensor(True))
    assert float(scale.scale) == 2 * START
    scale.after(torch.tensor(False))
    assert float(scale.scale) == 2 * START * BACKOFF


def test_float8_without_its_gpu_is_one_sentence() -> None:
    with pytest.raises(ValueError, match="dist.float8: wants a GPU of compute capability 8.9 or more"):
        engine(dtype="bfloat16", float8=True)


class Counting(TorchDispatchMode):
    """Counts the operations that go through torch, and the rows that the head is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Any] = Counter()
        self.rows_of_head = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.seen[op] += 1
        if op is torch.ops.aten.mm.out and args[1].shape == (SHAPE.d_model, SHAPE.vocab_rows):
            self.rows_of_head += len(args[0])
        return op(*args, **(kwargs or {}))


def test_the_head_of_diffusion_reads_hidden_positions_only() -> None:
    tokens = np.random.default_rng(0).integers(0, 60, (4, 33))
    hidden = MaskedDiffusion(60, 1e-3, seed=0).corrupt(tokens, np.arange(4))
    n_hidden = int((hidden.inputs == 60).sum())
    assert 0 < n_hidden < 4 * 32
    trained = engine()
    with Counting() as ops:
        trained.step([hidden], 0.01)
    assert ops.rows_of_head == n_hidden


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nothing_in_a_step_waits_for_the_device(dtype: str) -> None:
    trained = engine(dtype=dtype)
    tasks = [task(0), task(1)]
    trained.step(tasks, 0.01)
    with Counting() as ops:
        trained.step(tasks, 0.02)
    assert ops.seen[torch.ops.aten._fused_adamw_.default] > 0
    # a number read back, and one copied there from the host's ordinary memory: both wait on a GPU
    assert ops.seen[torch.ops.aten._local_scalar_dense.default] == 0
    assert ops.seen[torch.ops.aten.lift_fresh.default] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("settings", [{}, {"compile": True}, {"activation_checkpointing": "selective"}])
def test_on_a_gpu_a_step_never_synchronises(settings: dict[str, Any]) -> None:
    device = torch.device("cuda", 0)
    model = Gpt(SHAPE)
    initialise(model, 0)
    config = DistConfig(dtype="bfloat16", **settings)
    trained = TorchEngine(
        model, causal=True, dist=config, optim=OptimConfig(lr=0.01), world=World(0, 1, 0, device)
    )
    tasks = [task(i).pinned() for i in range(2)]
    trained.step(tasks, 0.01)
    torch.cuda.set_sync_debug_mode("error")
    try:
        report = trained.step(tasks, 0.01)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(report.loss_sum)
