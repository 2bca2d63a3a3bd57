"""Steps on static buffers equal eager steps, and are recorded as CUDA graphs where that is possible."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit

from megatron.config.schema import DistConfig, ModelConfig, OptimConfig
from megatron.engine.torch import static_step
from megatron.engine.torch.static_step import (
    N_ROW_SIZES,
    StaticStep,
    choose_static_step,
    find_graph_obstacle,
    pad_row_count,
)
from megatron.engine.torch.torch_native import TorchEngine
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from megatron.objective.autoregressive import Autoregressive
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.objective.task import Objective, Task
from megatron.parallel.world import World

SHAPE = ModelConfig(d_model=16, d_ff=32, d_head=4, n_heads=4, n_layers=2, n_tokens=60, vocab_rows=64)
AR, MDM = Autoregressive(), MaskedDiffusion(60, 1e-3, seed=0)
CPU = World(0, 1, 0, torch.device("cpu"))
GPU = World(0, 1, 0, torch.device("cuda", 0))
SEQ = 300  # 2 samples have 600 positions: row sizes are multiples of 128


def build_engine(
    objective: Objective, world: World = CPU, shape: ModelConfig = SHAPE, **dist: Any
) -> TorchEngine:
    model = Gpt(shape)
    init_weights(model, 0)
    config = DistConfig(**{"dtype": "float32", "cpu_only": world is CPU, **dist})
    return TorchEngine(
        model, causal=objective.causal, dist=config, optim=OptimConfig(lr=0.01, grad_clip=0.1), world=world
    )


def build_tasks(objective: Objective, step: int, n_microbatches: int = 2) -> list[Task]:
    numbers = [np.arange(2) + 2 * (n_microbatches * step + i) for i in range(n_microbatches)]
    tokens = [np.random.default_rng(n).integers(0, 60, (2, SEQ + 1)) for n in numbers]
    return [objective.corrupt(t, n) for t, n in zip(tokens, numbers, strict=True)]


def pad_task(task: Task) -> Task:
    """Return a task of diffusion with padding rows, as the buffers of a static step have."""
    if task.positions is None:
        return task
    more = pad_row_count(len(task.targets), task.inputs.numel()) - len(task.targets)

    def pad(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor.new_zeros(more)])

    return replace(task, positions=pad(task.positions), targets=pad(task.targets), scale=pad(task.scale))


def run_steps(
    engine: TorchEngine, tasks: list[list[Task]]
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return losses, norms and weights of steps with a learning rate that changes."""
    reports = [engine.step(batch, 0.01 / (i + 1)) for i, batch in enumerate(tasks)]
    losses = [float(report.loss_sum) / report.count for report in reports]
    return losses, [float(report.grad_norm) for report in reports], engine.state_dict()["model"]


@pytest.mark.parametrize("objective", [AR, MDM], ids=lambda objective: objective.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_static_step_without_recording_is_bit_equal_to_an_eager_one(objective, dtype: str) -> None:
    batches = [build_tasks(objective, step) for step in range(4)]
    eager, static = build_engine(objective, dtype=dtype), build_engine(objective, dtype=dtype)
    static.static_step = static.build_static_step(record=False)
    static.optimizer.keep_lr_on_device()
    losses, norms, weights = run_steps(eager, [[pad_task(task) for task in batch] for batch in batches])
    losses_static, norms_static, weights_static = run_steps(static, batches)
    assert (losses_static, norms_static) == (losses, norms)
    for name, weight in weights.items():
        assert torch.equal(weight, weights_static[name]), name
    # the score between steps, and the state, read the same weights
    assert torch.equal(static.score(batches[0][0])[0], eager.score(batches[0][0])[0])


def test_padding_rows_change_nothing_but_rounding() -> None:
    batches = [build_tasks(MDM, step) for step in range(3)]
    n_rows = {len(task.targets) for batch in batches for task in batch}
    assert len(n_rows) == 6
    losses, norms, weights = run_steps(build_engine(MDM), batches)
    padded = [[pad_task(task) for task in batch] for batch in batches]
    assert {len(task.targets) % 128 for batch in padded for task in batch} == {0}
    losses_padded, norms_padded, weights_padded = run_steps(build_engine(MDM), padded)
    assert losses_padded == pytest.approx(losses, rel=1e-6)
    assert norms_padded == pytest.approx(norms, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, weights_padded[name], rtol=1e-4, atol=1e-5)


def test_a_nan_gradient_changes_no_weight_and_not_the_next_step() -> None:
    trained = build_engine(MDM)
    trained.static_step = trained.build_static_step(record=False)
    good, bad = build_tasks(MDM, 0), build_tasks(MDM, 1)
    bad[0].scale.fill_(torch.nan)
    before = trained.state_dict()["model"]
    assert not torch.isfinite(trained.step(bad, 0.01).grad_norm)
    assert all(torch.equal(before[name], weight) for name, weight in trained.state_dict()["model"].items())
    expected = build_engine(MDM).step([pad_task(task) for task in good], 0.01)
    assert float(trained.step(good, 0.01).grad_norm) == float(expected.grad_norm)


def test_the_row_sizes_are_few_and_at_least_the_rows() -> None:
    for n_positions in (600, 2048, 16 * 2048, 256 * 2048):
        sizes = [pad_row_count(n, n_positions) for n in range(0, n_positions + 1, max(1, n_positions // 999))]
        assert len(set(sizes)) <= N_ROW_SIZES
        assert all(size % 128 == 0 for size in sizes)
        assert sizes[-1] >= n_positions - max(1, n_positions // 999)
        assert sizes == sorted(sizes)
    assert pad_row_count(5000, 16 * 2048) == 8192
    assert pad_row_count(4096, 16 * 2048) == 4096
    assert pad_row_count(0, 2048) > 0


def test_every_shape_has_its_own_buffers_with_fixed_addresses() -> None:
    seen: dict[int, list[int]] = {}

    def accumulate(task: Task, share: Tensor) -> Tensor:
        seen.setdefault(len(task.targets), []).append(task.targets.data_ptr())
        return torch.zeros((), dtype=torch.float64)

    weight = torch.nn.Parameter(torch.ones(3))
    steps = StaticStep(
        [weight], torch.device("cpu"), accumulate=accumulate, update=lambda: torch.zeros(()),
        retain=lambda task: None, record=False,
    )  # fmt: skip
    for step in range(6):
        steps.run(build_tasks(MDM, step), torch.ones((), dtype=torch.float64))
    assert len(seen) > 1
    assert all(len(set(addresses)) == 1 for addresses in seen.values())
    assert len({addresses[0] for addresses in seen.values()}) == len(seen)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"dist": {"cuda_graphs": False}}, "dist.cuda_graphs=false"),
        ({"world": CPU}, "the device is not a GPU"),
        ({"world": replace(GPU, n_ranks=2)}, "the run has several ranks"),
        ({"dist": {"engine": "deepspeed"}}, "dist.engine=deepspeed"),
        ({"dist": {"cpu_offload": True}}, "dist.cpu_offload updates the weights on the CPU"),
        ({"dist": {"float8": True}}, "dist.float8"),
        ({"optim": {"kernel": "apex"}}, "optim.kernel=apex reads the gradient norm on the host"),
        ({"model": {"n_layers": 12000, "d_model": 128}}, "the model has more than 150M parameters"),
        ({"model": {"n_layers": 12000, "d_model": 128}, "dist": {"cuda_graphs": True}}, None),
    ],
)
def test_steps_are_recorded_unless_there_is_a_reason(settings: dict[str, Any], reason: str | None) -> None:
    dist = DistConfig(**settings.get("dist", {}))
    model = replace(SHAPE, **settings.get("model", {}))
    obstacle = find_graph_obstacle(
        dist, model, OptimConfig(**settings.get("optim", {})), settings.get("world", GPU)
    )
    assert obstacle is None if reason is None else obstacle.startswith(reason)


def test_the_reason_is_logged_and_an_error_if_graphs_were_required(caplog) -> None:
    offload = DistConfig(cpu_offload=True)
    with caplog.at_level("INFO", logger=static_step.log.name):
        assert not choose_static_step(offload, SHAPE, OptimConfig(), GPU)
    (record,) = caplog.records
    assert "steps are not recorded: dist.cpu_offload" in record.getMessage()
    with pytest.raises(ValueError, match="dist.cuda_graphs: got true, but dist.cpu_offload"):
        choose_static_step(replace(offload, cuda_graphs=True), SHAPE, OptimConfig(), GPU)


class FakeGraph:
    """A graph whose replay calls the function: everything but the capture, on a CPU."""

    def __init__(self, function: Any) -> None:
        self.replay = function


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Pools of the graphs that were captured."""
    pools: list[tuple[int, int]] = []
    handles = iter([(0, 1)])

    def capture(function: Any, pool: tuple[int, int], stream: Any) -> FakeGraph:
        pools.append(pool)
        return FakeGraph(function)

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(static_step, "capture_graph", capture)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles, (0, 2)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return pools


@pytest.mark.parametrize("objective", [AR, MDM], ids=lambda objective: objective.name)
def test_each_shape_is_recorded_after_two_runs_and_replays_are_steps(captures, objective) -> None:
    batches = [build_tasks(objective, step) for step in range(12)]
    sizes = Counter(len(pad_task(task).targets) for batch in batches for task in batch)
    eager, recorded = build_engine(objective), build_engine(objective)
    recorded.static_step = recorded.build_static_step(record=True)
    expected = run_steps(eager, [[pad_task(task) for task in batch] for batch in batches])
    losses, norms, weights = run_steps(recorded, batches)
    assert (losses, norms) == expected[:2]
    assert all(torch.equal(weight, weights[name]) for name, weight in expected[2].items())
    # the update, and every shape that occurred more than twice; all in one pool
    assert len(captures) == 1 + sum(n > 2 for n in sizes.values())
    assert captures == [(0, 1)] * len(captures)
    assert recorded.static_step.retained


class FakeCapture:
    """`torch.cuda.graph` of torch 2.11: ending a capture that failed raises before the stream is restored."""

    current, in_pool = "ordinary", False

    def __init__(self, graph: Any, pool: Any, stream: str, capture_error_mode: str) -> None:
        self.stream, self.before = stream, FakeCapture.current

    def __enter__(self) -> None:
        FakeCapture.current, FakeCapture.in_pool = self.stream, True

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        FakeCapture.current, FakeCapture.in_pool = self.before, False


def test_a_failed_capture_restores_stream_and_allocator_and_names_the_cause(monkeypatch) -> None:
    def fail() -> None:  # the error is no RuntimeError
        raise FailOnRecompileLimitHit("recompile_limit reached")

    def end_allocation(device: int, pool: tuple[int, int]) -> None:
        assert (device, pool) == (3, (0, 1))
        if not FakeCapture.in_pool:
            raise RuntimeError("not currently recording to mempool_id")
        FakeCapture.in_pool = False

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", FakeCapture)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: FakeCapture.current)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(FakeCapture, "current", stream))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocation, raising=False)
    with pytest.raises(RuntimeError, match="^FailOnRecompileLimitHit: recompile_limit reached$") as caught:
        static_step.capture_graph(fail, (0, 1), "capturing")
    assert isinstance(caught.value.__cause__, FailOnRecompileLimitHit)
    assert (FakeCapture.current, FakeCapture.in_pool) == ("ordinary", False)
    static_step.capture_graph(lambda: None, (0, 1), "capturing")
    assert (FakeCapture.current, FakeCapture.in_pool) == ("ordinary", False)


def test_steps_continue_unrecorded_if_recording_fails(captures, monkeypatch, caplog) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    monkeypatch.setattr(static_step, "capture_graph", fail)
    batches = [build_tasks(AR, step) for step in range(4)]
    trained = build_engine(AR)
    trained.static_step = trained.build_static_step(record=True)
    with caplog.at_level("WARNING", logger=static_step.log.name):
        assert run_steps(trained, batches)[:2] == run_steps(build_engine(AR), batches)[:2]
    (record,) = caplog.records
    assert "recording failed (operation not permitted when stream is capturing); the" in record.getMessage()
    required = build_engine(AR)
    required.requires_graphs = True
    required.static_step = required.build_static_step(record=True)
    with pytest.raises(ValueError, match="dist.cuda_graphs: got true, but recording failed"):
        run_steps(required, batches)


needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
WIDE = ModelConfig(d_model=128, d_ff=256, d_head=32, n_heads=4, n_layers=2, n_tokens=60, vocab_rows=128)


@pytest.mark.parametrize("objective", [pytest.param(o, id=o.name, marks=needs_gpu) for o in (AR, MDM)])
@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {}, {"compile": True}, {"dtype": "float16"}])
def test_replays_equal_the_same_step_without_recording(objective, settings: dict[str, Any]) -> None:
    batches = [build_tasks(objective, step) for step in range(12)]
    pinned = [[task.pin_memory() for task in batch] for batch in batches]
    settings = {"dtype": "bfloat16", "compile": False, **settings}
    results = []
    for record in (False, True):
        trained = build_engine(objective, GPU, WIDE, cuda_graphs=False, **settings)
        trained.requires_graphs = True
        trained.static_step = trained.build_static_step(record=record)
        losses, norms, weights = run_steps(trained, pinned)
        assert bool(trained.static_step.graphs) == record
        # scoring between replays reads the updated weights
        results.append((losses, norms, trained.score(pinned[0][0])[0].tolist(), weights))
    for values, expected in zip(results[1][:3], results[0][:3], strict=True):
        assert values == pytest.approx(expected, rel=1e-6)
    for name, weight in results[0][3].items():
        torch.testing.assert_close(weight, results[1][3][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("objective", [pytest.param(AR, marks=needs_gpu)])
def test_recorded_steps_never_synchronise(objective) -> None:
    trained = build_engine(objective, GPU, WIDE, dtype="bfloat16", cuda_graphs=True, compile=False)
    pinned = [[task.pin_memory() for task in build_tasks(objective, step)] for step in range(5)]
    run_steps(trained, pinned)  # two warm-ups, a recording, replays
    torch.cuda.set_sync_debug_mode("error")
    try:
        report = trained.step(pinned[0], 0.01)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(report.loss_sum)
