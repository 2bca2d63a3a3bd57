"""Compiled blocks: one graph for all of them, when they are compiled, and where the code is stored."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

from megatron.config.schema import DistConfig
from megatron.engine.task_loss import TaskLoss
from megatron.engine.torch import compilation
from megatron.engine.torch.compilation import CACHE, choose_compilation, compile_blocks, set_cache_folder
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from tests.engine.conftest import ALONE, CAUSAL, MASKED, SHAPE, build_engine, build_task


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    """Counters of the compiler, which generates no code: aot_eager runs the captured graphs."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("objective", [CAUSAL, MASKED], ids=lambda objective: objective.name)
def test_all_blocks_and_batch_sizes_share_a_graph(counters, objective) -> None:
    trained = build_engine(objective, dtype="bfloat16", compile=True)
    n_probe = 1  # the function that tries the compiler

    def count_graphs() -> int:
        assert not counters["graph_break"]
        return counters["stats"]["unique_graphs"] - n_probe

    # the number of masked positions differs in every step, and the head is outside of the blocks
    for seed in range(3):
        trained.step([build_task(seed, objective), build_task(seed + 9, objective)], 0.01)
    assert count_graphs() == 1
    trained.score(build_task(objective=objective))
    assert count_graphs() == 2  # without gradients
    # another number of samples adds one graph of a variable number, also used by all further numbers
    for n_samples in (6, 2, 8, 3):
        trained.step([build_task(0, objective, n_samples)], 0.01)
    assert count_graphs() == 3
    for n_samples in (7, 5, 3):
        trained.score(build_task(0, objective, n_samples))
    for seed in range(3):
        trained.step([build_task(seed, objective)], 0.01)
    assert count_graphs() == 4


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_blocks_share_a_graph_too(counters, mode: str) -> None:
    trained = build_engine(dtype="bfloat16", compile=True, activation_checkpointing=mode)
    for seed in range(2):
        trained.step([build_task(seed)], 0.01)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # the probe's graph included


def test_a_compiled_step_gives_the_losses_of_an_eager_one(counters) -> None:
    losses = []
    for compiled in (False, True):
        trained = build_engine(MASKED, compile=compiled)
        reports = [trained.step([build_task(seed, MASKED)], 0.01) for seed in range(3)]
        losses.append([float(report.loss_sum) / report.count for report in reports])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_ddp_does_not_cut_the_graph_at_its_buckets(counters) -> None:
    model, task = Gpt(SHAPE), build_task()
    init_weights(model, 0)
    compile_blocks(model, has_tensor_ranks=False, has_context_ranks=False)
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        # buckets smaller than a matrix: DDPOptimizer would cut each block's graph at every matrix
        ddp = DistributedDataParallel(TaskLoss(model, True), bucket_cap_mb=1e-3)
        for _ in range(2):
            ddp(task).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
    finally:
        destroy_process_group()


def test_the_default_is_eager_on_a_cpu_and_compiled_on_a_gpu(monkeypatch) -> None:
    gpu = SimpleNamespace(device=torch.device("cuda", 0), n_ranks=1)
    monkeypatch.setattr(compilation, "find_compiler_problem", lambda device: None)
    for setting, on_cpu, on_gpu in ((None, False, True), (True, True, True), (False, False, False)):
        dist = DistConfig(compile=setting)
        assert (choose_compilation(dist, ALONE), choose_compilation(dist, gpu)) == (on_cpu, on_gpu)
    assert not choose_compilation(DistConfig(engine="deepspeed"), gpu)


def test_without_a_compiler_the_default_is_eager(monkeypatch, caplog) -> None:
    # what torch raises without a C++ compiler, or with a triton of another version
    monkeypatch.setattr(compilation, "BACKEND", "no-such-backend")
    gpu = SimpleNamespace(device=torch.device("cuda", 0), n_ranks=1)
    monkeypatch.setattr(torch, "ones", lambda n, device: torch.full((n,), 1.0))
    with caplog.at_level("WARNING", logger=compilation.log.name):
        assert choose_compilation(DistConfig(), gpu) is False
    (record,) = caplog.records
    assert "torch.compile does not work here" in record.getMessage()
    with pytest.raises(ValueError, match="dist.compile: got true, but torch.compile does not work here"):
        choose_compilation(DistConfig(compile=True), ALONE)


def test_runs_of_a_study_share_compiled_code(monkeypatch, tmp_path: Path) -> None:
    study, alone = tmp_path / "study", tmp_path / "alone"
    for run, variables, folder in (
        (study / "runs" / "7M-1", {}, study / CACHE),
        (study / "runs" / "44M-2", {}, study / CACHE),
        (alone, {}, alone / CACHE),
        (alone, {"TORCHINDUCTOR_CACHE_DIR": "/a"}, alone / CACHE),
    ):
        for name in compilation.CACHE_VARIABLES:
            monkeypatch.setenv(name, "")  # restores the variable after the test
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        set_cache_folder(run)
        inductor, triton = (os.environ[name] for name in compilation.CACHE_VARIABLES)
        assert inductor == variables.get("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        assert triton == str(folder / "triton")
    assert (study / CACHE).stat().st_mode & 0o077 == 0
