"""The torch engine on one process: refused states, skipped steps and loss scaling."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config.schema import ModelConfig
from megatron.engine.torch.torch_native import BACKOFF, INITIAL_SCALE, LossScale
from megatron.model.transformer import Gpt
from megatron.parallel.world import World
from tests.engine.conftest import MASKED, SHAPE, build_engine, build_task


def test_a_state_is_a_copy_and_restores_exactly() -> None:
    first, second = build_engine(seed=0), build_engine(seed=1)
    first.step([build_task()], 0.01)
    state = first.state_dict()
    assert set(state["model"]) == set(state["optim"]["state"]) == set(dict(Gpt(SHAPE).named_parameters()))
    second.load_state_dict(state)
    before = {name: weight.clone() for name, weight in state["model"].items()}
    loss, other = (float(trained.step([build_task(seed=1)], 0.01).loss_sum) for trained in (first, second))
    assert all(torch.equal(before[name], weight) for name, weight in state["model"].items())
    assert loss == other
    for name, weight in first.state_dict()["model"].items():
        assert torch.equal(weight, second.state_dict()["model"][name]), name


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ({"d_ff": 64}, r"blocks.0.mlp.gate.weight: got \[64, 16\], expected \[32, 16\]"),
        ({"n_layers": 1}, "blocks.1.attention_norm.weight: got none, expected"),
        ({"n_layers": 3}, "blocks.2.attention.key.weight is not in this model"),
    ],
)
def test_the_state_of_another_model_is_refused(shape, sentence) -> None:
    other = build_engine(shape=ModelConfig(**{**SHAPE.__dict__, **shape})).state_dict()
    with pytest.raises(ValueError, match=f"weights of another model: {sentence}"):
        build_engine().load_state_dict(other)


def test_the_state_of_another_optimizer_is_refused() -> None:
    sentence = "got a state of exp_avg, exp_avg_sq, step, expected momentum_buffer too"
    with pytest.raises(ValueError, match=f"blocks.0.attention.query.weight: {sentence}"):
        build_engine(optim={"kind": "muon"}).load_state_dict(build_engine().state_dict())


def test_weights_alone_do_not_change_the_optimizer() -> None:
    donor, taker = build_engine(seed=1), build_engine(seed=0)
    taker.step([build_task()], 0.01)
    taker.load_state_dict({"model": donor.state_dict()["model"]})
    state = taker.state_dict()
    assert torch.equal(state["model"]["embedding.weight"], donor.state_dict()["model"]["embedding.weight"])
    assert float(state["optim"]["state"]["embedding.weight"]["step"]) == 1.0


def test_a_nan_gradient_is_reported_and_changes_no_weight() -> None:
    broken = build_engine()
    with torch.no_grad():
        broken.weights.local_tensors["blocks.0.mlp.up.weight"][0, 0] = torch.nan
    before = broken.state_dict()["model"]["embedding.weight"]
    report = broken.step([build_task()], 0.01)
    assert not torch.isfinite(report.grad_norm)
    assert torch.equal(broken.state_dict()["model"]["embedding.weight"], before)


def test_the_norm_of_a_large_gradient_is_exact() -> None:
    trained = build_engine()
    large = torch.randn(50304, 64, generator=torch.Generator().manual_seed(0))
    small = torch.full((3,), 100.0)
    exact = (large.double().square().sum() + 3 * 100.0**2).sqrt()
    assert float(trained.weights.gradient_norm([large, small])) == pytest.approx(float(exact), rel=1e-7)


def test_float16_halves_its_scale_after_an_overflow() -> None:
    trained = build_engine(dtype="float16")
    trained.loss_scale.scale.fill_(2.0**127)
    before = trained.state_dict()["model"]["embedding.weight"]
    trained.step([build_task()], 0.01)
    assert float(trained.loss_scale.scale) == 2.0**126
    assert torch.equal(trained.state_dict()["model"]["embedding.weight"], before)
    trained.loss_scale.scale.fill_(INITIAL_SCALE)
    report = trained.step([build_task()], 0.01)
    exact = build_engine().step([build_task()], 0.01)
    assert float(report.grad_norm) == pytest.approx(float(exact.grad_norm), rel=0.01)
    assert trained.state_dict()["optim"]["loss_scale"]["scale"] == INITIAL_SCALE


def test_the_loss_scale_doubles_after_2000_good_steps() -> None:
    scale = LossScale(torch.device("cpu"))
    for _ in range(2000):
        scale.update(torch.tensor(True))
    assert float(scale.scale) == 2 * INITIAL_SCALE
    scale.update(torch.tensor(False))
    assert float(scale.scale) == 2 * INITIAL_SCALE * BACKOFF


def test_float8_without_a_suitable_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="dist.float8: got the CPU, expected a GPU of compute capability"):
        build_engine(dtype="bfloat16", float8=True)


class Counting(TorchDispatchMode):
    """Counts torch operations, and the rows multiplied by the head."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Any] = Counter()
        self.rows_of_head = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.seen[op] += 1
        if op is torch.ops.aten.mm.out and args[1].shape == (SHAPE.d_model, SHAPE.vocab_rows):
            self.rows_of_head += len(args[0])
        return op(*args, **(kwargs or {}))


def test_the_head_of_diffusion_computes_masked_positions() -> None:
    hidden = build_task(objective=MASKED)
    n_hidden = int((hidden.inputs == 60).sum())
    assert 0 < n_hidden < 4 * 32
    trained = build_engine(MASKED)
    with Counting() as ops:
        trained.step([hidden], 0.01)
    assert ops.rows_of_head == n_hidden


@pytest.mark.parametrize(
    ("dtype", "optim"), [("float32", {}), ("bfloat16", {}), ("float16", {}), ("float32", {"kind": "muon"})]
)
def test_nothing_in_a_step_waits_for_the_device(dtype: str, optim: dict[str, Any]) -> None:
    trained = build_engine(dtype=dtype, optim=optim)
    tasks = [build_task(0), build_task(seed=1)]
    trained.step(tasks, 0.01)
    with Counting() as ops:
        trained.step(tasks, 0.02)
    assert ops.seen[torch.ops.aten._fused_adamw_.default] > 0
    # reading a number, and copying one from pageable memory: both synchronize with a GPU
    assert ops.seen[torch.ops.aten._local_scalar_dense.default] == 0
    assert ops.seen[torch.ops.aten.lift_fresh.default] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("settings", [{}, {"compile": True}, {"activation_checkpointing": "selective"}])
def test_on_a_gpu_a_step_never_synchronises(settings: dict[str, Any]) -> None:
    world = World(0, 1, 0, torch.device("cuda", 0))
    trained = build_engine(world=world, dtype="bfloat16", **settings)
    tasks = [build_task(seed=i).pin_memory() for i in range(2)]
    trained.step(tasks, 0.01)
    torch.cuda.set_sync_debug_mode("error")
    try:
        report = trained.step(tasks, 0.01)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(report.loss_sum)
