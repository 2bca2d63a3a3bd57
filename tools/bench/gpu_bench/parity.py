"""Checks of the GPU bench: results on a device against float64 on a CPU, and resuming.

Each check returns a dictionary with status (passed or failed) and a detail.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_bench import cells
from megatron.config.schema import DistConfig, ModelConfig, OptimConfig
from megatron.engine.torch.torch_native import TorchEngine
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from megatron.objective.task import Task
from megatron.parallel.world import World

# heads of 64 channels and S = 256, so that a GPU takes its fused kernels; 3 x 256 rows in a step
MODEL = ModelConfig(d_model=128, d_ff=320, d_head=64, n_heads=2, n_layers=3, n_tokens=1000, vocab_rows=1024)
SEQ_LEN, ROWS = 256, 3
# What is dropped is a hash, equal on every device.
SPECIAL = replace(MODEL, attention_dropout=0.1, hidden_dropout=0.1, document_mask=True, eod_id=7)
DOCUMENT = 61  # positions of a document of SPECIAL
OPTIM = OptimConfig(lr=1e-3)
# relative error of the loss, and of the gradient of each matrix as |difference| / |gradient|
TOLERANCES = {"float32": (1e-5, 1e-3), "bfloat16": (2e-3, 4e-2)}
PASSED, FAILED = "passed", "failed"

Check = dict[str, Any]


def list_checks(device: torch.device) -> dict[str, Callable[[], Check]]:
    """Return the checks on a device by name."""
    checks: dict[str, Callable[[], Check]] = {}
    variants: dict[str, dict[str, Any]] = {"": {}}
    if device.type == "cuda":
        variants[" eager"] = {"compile": False}
    for objective, dtype in itertools.product(cells.SHORT, TOLERANCES):
        name = f"{cells.SHORT[objective]} {dtype}"
        for variant, dist in variants.items():
            check = partial(check_gradients, objective, dtype, device, dist)
            checks[f"{name}{variant} against float64"] = check
        check = partial(check_gradients, objective, dtype, device, {}, SPECIAL)
        checks[f"{name} dropout and documents against float64"] = check
    for objective, short in cells.SHORT.items():
        checks[f"{short} resumed equals uninterrupted"] = partial(check_resume, objective, device)
    return checks


def make_task(objective: str, step: int = 0, model: ModelConfig = MODEL) -> Task:
    """Return a task of random tokens, with documents and keys of dropout if the model reads them."""
    tokens = cells.draw_tokens(model, ROWS, SEQ_LEN, step)
    if model.eod_id is not None:
        tokens[:, DOCUMENT - 1 :: DOCUMENT] = model.eod_id
    numbers = np.arange(step * ROWS, (step + 1) * ROWS)
    noise = replace(cells.make_objective(objective, model.n_tokens), drops_attention=model.hidden_dropout > 0)
    return noise.corrupt(tokens, numbers)


def build_engine(objective: str, world: World, model: ModelConfig = MODEL, **dist: Any) -> TorchEngine:
    """Return an engine with the weights of seed 0, and compile it anew."""
    torch._dynamo.reset()
    network = Gpt(model)
    init_weights(network, 0)
    config = DistConfig(cpu_only=world.device.type != "cuda", **dist)
    return TorchEngine(network, causal=objective == cells.AR, dist=config, optim=OPTIM, world=world)


def compute_reference(objective: str, model: ModelConfig) -> tuple[float, dict[str, Tensor]]:
    """Return (nats, gradients by name) of our model in float64 on the CPU, where attention is dense."""
    network = Gpt(model)
    init_weights(network, 0)
    network = network.double()
    task = make_task(objective, 0, model)
    logits = network(task.inputs, causal=objective == cells.AR, **task.model_kwargs).flatten(0, 1)
    rows = logits if task.positions is None else logits[task.positions]
    nats = F.cross_entropy(rows, task.targets, reduction="none")
    total = (nats if task.scale is None else nats * task.scale.double()).sum()
    total.backward()
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return float(total.detach()), gradients


def check_gradients(
    objective: str, dtype: str, device: torch.device, dist: dict[str, Any], model: ModelConfig = MODEL
) -> Check:
    """Compare the loss and every gradient on the device with float64."""
    nats, gradients = compute_reference(objective, model)
    engine = build_engine(objective, World(0, 1, 0, device), model, dtype=dtype, **dist)
    task = make_task(objective, 0, model).to(device)
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
    return {"status": PASSED if passed else FAILED, "detail": f"{detail}, worst {worst_name}"}


@contextmanager
def use_deterministic_kernels() -> Iterator[None]:
    """Prefer deterministic kernels, and no attention of cuDNN, whose backward is not; others only warn."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def take_steps(engine: TorchEngine, objective: str, steps: range) -> dict[str, Tensor]:
    """Take steps; return the weights on the CPU."""
    for i in steps:
        engine.step([make_task(objective, i)], OPTIM.lr)
    return {name: p.detach().cpu().clone() for name, p in engine.passes.named_parameters().items()}


def is_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Return whether all tensors are equal bit for bit."""
    return all(torch.equal(a[name], b[name]) for name in a)


def check_resume(objective: str, device: torch.device) -> Check:
    """Compare 4 steps with 2 steps, a state dictionary loaded by another engine, and 2 steps: bit for bit."""
    world = World(0, 1, 0, device)
    with use_deterministic_kernels():
        runs = [take_steps(build_engine(objective, world), objective, range(4)) for _ in range(2)]
        first = build_engine(objective, world)
        take_steps(first, objective, range(2))
        second = build_engine(objective, world)
        second.load_state_dict(first.state_dict())
        resumed = take_steps(second, objective, range(2, 4))
    if is_equal(runs[0], resumed):
        return {"status": PASSED, "detail": "equal bits after 2 + 2 steps"}
    cause = "two uninterrupted runs are equal" if is_equal(*runs) else "two uninterrupted runs differ as well"
    return {"status": FAILED, "detail": f"other bits; {cause}"}
