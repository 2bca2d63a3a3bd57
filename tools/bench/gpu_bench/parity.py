"""Checks of the GPU bench: results on a device against float64 on a CPU, resuming, graphs and several ranks.

Each check is a dictionary with name, status (passed, failed or skipped) and a detail.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gpu_bench import cells
from gpu_bench.baselines import NanoGpt, load_our_weights
from megatron.config.schema import DistConfig, ModelConfig, OptimConfig
from megatron.engine.torch.torch_native import TorchEngine
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from megatron.objective.task import Task
from megatron.parallel.world import World, open_world

# heads of 64 channels and S = 256, so that a GPU takes its fused kernels; 3 x 256 rows in a step
MODEL = ModelConfig(d_model=128, d_ff=320, d_head=64, n_heads=2, n_layers=3, n_tokens=1000, vocab_rows=1024)
SEQ_LEN, ROWS = 256, 3
OPTIM = OptimConfig(lr=1e-3)
# relative error of the loss, and of the gradient of each matrix as |difference| / |gradient|
TOLERANCES = {"float32": (1e-5, 1e-3), "bfloat16": (2e-3, 4e-2)}
RANK_TOLERANCE = 1e-5
RANK_TIMEOUT_S = 180
BENCH = str(Path(__file__).resolve().parents[1])  # where the ranks find the package of this file
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

Check = dict[str, Any]


def run_checks(device_name: str) -> list[Check]:
    """Run all checks on a device."""
    device = torch.device("cuda", 0) if device_name == "cuda" else torch.device("cpu")
    checks: list[Callable[[], Check]] = [
        *(
            lambda objective=objective, dtype=dtype, dist=dist: check_gradients(
                objective, dtype, device, dist
            )
            for objective in (cells.AR, cells.MD)
            for dtype in TOLERANCES
            for dist in list_variants(device)
        ),
        *(lambda objective=objective: check_resume(objective, device) for objective in (cells.AR, cells.MD)),
        *(lambda objective=objective: check_graph(objective, device) for objective in (cells.AR, cells.MD)),
        lambda: check_ranks(device),
    ]
    results = []
    for check in checks:
        try:
            results.append(check())
        # a failure of one check must not hide the others
        except Exception as error:
            results.append({"name": "check", "status": FAILED, "detail": f"{type(error).__name__}: {error}"})
    return results


def describe_check(check: Check) -> str:
    """Return one line."""
    return f"parity: {check['name']:<48} {check['status']:<8} {check['detail']}"


def list_variants(device: torch.device) -> list[dict[str, Any]]:
    """Return the settings under which gradients are compared: the defaults and, on a GPU, eager steps."""
    compiled = device.type == "cuda" and cells.is_default_on("compile")
    return [{}, {"compile": False}] if compiled else [{}]


def make_task(objective: str, step: int = 0) -> Task:
    """Return a task of random tokens."""
    tokens = cells.draw_tokens(MODEL, ROWS, SEQ_LEN, step)
    numbers = np.arange(step * ROWS, (step + 1) * ROWS)
    return cells.make_objective(objective, MODEL.n_tokens).corrupt(tokens, numbers)


def build_engine(objective: str, world: World, **dist: Any) -> TorchEngine:
    """Return an engine with the weights of seed 0."""
    network = Gpt(MODEL)
    init_weights(network, 0)
    config = DistConfig(cpu_only=world.device.type != "cuda", **dist)
    return TorchEngine(network, causal=objective == cells.AR, dist=config, optim=OPTIM, world=world)


def compute_reference(objective: str) -> tuple[float, dict[str, Tensor]]:
    """Return (nats, gradients by name) in float64 on the CPU, of plain modules without our kernels."""
    network, ours = NanoGpt(MODEL), Gpt(MODEL)
    init_weights(ours, 0)
    load_our_weights(network, ours)
    network = network.double()
    task = make_task(objective)
    logits = network(task.inputs, causal=objective == cells.AR).flatten(0, 1)
    rows = logits if task.positions is None else logits[task.positions]
    nats = F.cross_entropy(rows, task.targets, reduction="none")
    total = (nats if task.scale is None else nats * task.scale.double()).sum()
    total.backward()
    return float(total.detach()), {
        name: p.grad for name, p in network.named_parameters() if p.grad is not None
    }


def check_gradients(objective: str, dtype: str, device: torch.device, dist: dict[str, Any]) -> Check:
    """Compare the loss and every gradient on the device with float64."""
    settings = "".join(f" {key}={value}" for key, value in dist.items())
    name = f"{cells.SHORT[objective]} {dtype}{settings} against float64"
    nats, gradients = compute_reference(objective)
    engine = build_engine(objective, World(0, 1, 0, device), dtype=dtype, **dist)
    task = make_task(objective).to(device)
    share = torch.ones((), dtype=torch.float64, device=device)
    with engine._autocast_context():
        total = float(engine.passes.backward([task], share))
    worst, worst_name = 0.0, ""
    for key, parameter in engine.passes.named_parameters().items():
        assert parameter.grad is not None, key
        error = (parameter.grad.cpu().double() - gradients[key]).norm() / gradients[key].norm()
        # `not <=` and not `>`: NaN is the worst error
        if not float(error) <= worst:
            worst, worst_name = float(error), key
    loss_error = abs(total - nats) / abs(nats)
    limits = TOLERANCES[dtype]
    passed = loss_error <= limits[0] and worst <= limits[1]
    detail = f"loss {loss_error:.1e} (limit {limits[0]:g}), gradient {worst:.1e} (limit {limits[1]:g})"
    detail += f", worst {worst_name}"
    return {"name": name, "status": PASSED if passed else FAILED, "detail": detail}


@contextmanager
def use_deterministic_kernels() -> Iterator[None]:
    """Prefer deterministic kernels; others only warn."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def take_steps(engine: TorchEngine, objective: str, first: int, n: int) -> list[float]:
    """Take n steps and return their losses."""
    reports = [engine.step([make_task(objective, i)], OPTIM.lr) for i in range(first, first + n)]
    return [float(report.loss_sum) / report.count for report in reports]


def copy_weights(engine: TorchEngine) -> dict[str, Tensor]:
    """Return the weights on the CPU."""
    return {name: p.detach().cpu().clone() for name, p in engine.passes.named_parameters().items()}


def is_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Return whether all tensors are equal bit for bit."""
    return all(torch.equal(a[name], b[name]) for name in a)


def check_resume(objective: str, device: torch.device) -> Check:
    """Compare 4 steps with 2 steps, a state dictionary loaded by another engine, and 2 steps: bit for bit."""
    name = f"{cells.SHORT[objective]} resumed equals uninterrupted"
    world = World(0, 1, 0, device)
    with use_deterministic_kernels():
        runs = []
        for _ in range(2):
            whole = build_engine(objective, world)
            take_steps(whole, objective, 0, 4)
            runs.append(copy_weights(whole))
        first, second = build_engine(objective, world), build_engine(objective, world)
        take_steps(first, objective, 0, 2)
        second.load_state_dict(first.state_dict())
        take_steps(second, objective, 2, 2)
    if is_equal(runs[0], copy_weights(second)):
        return {"name": name, "status": PASSED, "detail": "equal bits after 2 + 2 steps"}
    cause = "two uninterrupted runs are equal" if is_equal(*runs) else "two uninterrupted runs differ as well"
    return {"name": name, "status": FAILED, "detail": f"other bits; {cause}"}


def check_graph(objective: str, device: torch.device) -> Check:
    """Compare steps replayed from a CUDA graph with eager ones."""
    name = f"{cells.SHORT[objective]} graph replay equals eager"
    if device.type != "cuda":
        return {"name": name, "status": SKIPPED, "detail": "needs CUDA"}
    if not cells.has_dist_key("cuda_graphs"):
        return {"name": name, "status": SKIPPED, "detail": "this code has no option dist.cuda_graphs"}
    world = World(0, 1, 0, device)
    with use_deterministic_kernels():
        # more steps than the capture takes to warm up
        results = []
        for value in (True, False):
            engine = build_engine(objective, world, cuda_graphs=value)
            results.append((take_steps(engine, objective, 0, 12), copy_weights(engine)))
    (losses, weights), (eager_losses, eager_weights) = results
    error = max(abs(a - b) for a, b in zip(losses, eager_losses, strict=True))
    equal = is_equal(weights, eager_weights)
    detail = "equal bits after 12 steps" if equal else f"largest difference of losses {error:.1e}"
    return {"name": name, "status": PASSED if equal or error < 1e-5 else FAILED, "detail": detail}


def check_ranks(device: torch.device) -> Check:
    """Compare the losses of two ranks with those of one, in float32."""
    name = "two ranks equal one"
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        return {"name": name, "status": SKIPPED, "detail": f"got {torch.cuda.device_count()} GPU, needs 2"}
    with tempfile.TemporaryDirectory() as folder:
        alone, both = (run_ranks(n, device, Path(folder) / f"{n}.json") for n in (1, 2))
    error = max(abs(a - b) / abs(a) for a, b in zip(alone, both, strict=True))
    status = PASSED if error <= RANK_TOLERANCE else FAILED
    return {"name": name, "status": status, "detail": f"relative error of the losses {error:.1e}"}


def run_ranks(n: int, device: torch.device, out: Path) -> list[float]:
    """Return the losses of n ranks, as processes of this file."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = []
    for rank in range(n):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, __file__, device.type, str(out)]
        path = os.pathsep.join([BENCH, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | ranks | address | {"PYTHONPATH": path}
        processes.append(subprocess.Popen(command, env=environment))
    try:
        statuses = [process.wait(RANK_TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(statuses):
        raise RuntimeError(f"{n} ranks: got exit statuses {statuses}, expected 0.")
    return json.loads(out.read_text(encoding="utf-8"))


def run_rank(device_name: str, out: Path) -> None:
    """Take 3 steps as one of the ranks; rank 0 writes the losses of the whole batch."""
    rows = 4
    dist = DistConfig(cpu_only=device_name != "cuda", dtype="float32")
    with open_world(dist, 1) as world:
        network = Gpt(MODEL)
        init_weights(network, 0)
        engine = TorchEngine(network, causal=True, dist=dist, optim=OPTIM, world=world)
        losses = []
        for step in range(3):
            tokens = cells.draw_tokens(MODEL, rows, SEQ_LEN, step)
            part = slice(world.rank * rows // world.n_ranks, (world.rank + 1) * rows // world.n_ranks)
            task = cells.make_objective(cells.AR, MODEL.n_tokens).corrupt(tokens[part], np.arange(rows)[part])
            report = engine.step([task], OPTIM.lr)
            total = report.loss_sum.clone()
            if world.n_ranks > 1:
                torch.distributed.all_reduce(total)
            losses.append(float(total) / (rows * SEQ_LEN))
        if world.is_first:
            out.write_text(json.dumps(losses), encoding="utf-8")


if __name__ == "__main__":
    run_rank(sys.argv[1], Path(sys.argv[2]))
