"""Coordinate check: the change of activations in the first training steps, constant under mup and completep.

Source: Yang et al., arXiv 2203.03466, appendix D.1. Under a parametrization with learning rate transfer, the
change of every activation after a few steps does not depend on the width (or depth) of the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from megatron.config.schema import ModelConfig, OptimConfig
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from megatron.objective.autoregressive import Autoregressive
from megatron.objective.task import Task, compute_task_loss
from megatron.optim.adamw import build_adamw

QUANTITIES = ("embedding", "attention", "feed_forward", "residual", "logits")


def make_text(n_tokens: int, n_samples: int, seq_len: int, seed: int) -> np.ndarray:
    """Return samples int64 [n_samples, seq_len + 1] whose tokens follow from the previous one, with noise."""
    rng = np.random.default_rng(seed)
    # the next token is the previous one plus 3, 4 or 5: a loss of log 3 nats can be learned
    steps = 3 + rng.integers(0, 3, (n_samples, seq_len + 1))
    return (rng.integers(n_tokens, size=(n_samples, 1)) + steps.cumsum(axis=1)) % n_tokens


def measure_coordinates(
    shape: ModelConfig, *, lr: float, n_steps: int, seed: int = 0, n_samples: int = 8, seq_len: int = 64
) -> dict[str, list[float]]:
    """Return, per quantity, the RMS of its change since initialization after steps 1..n_steps.

    `attention` and `feed_forward` are the outputs of the branches of the last block, `residual` is the input
    of the final norm. A new model is trained with AdamW at a constant `lr`. Each step uses its own batch, and
    the activations are those of one additional batch.
    """
    model = Gpt(shape)
    init_weights(model, seed)
    optimizer = build_adamw(dict(model.named_parameters()), OptimConfig(lr=lr), shape)
    objective = Autoregressive()
    numbers = np.arange(n_samples)
    batches = [make_text(shape.n_tokens, n_samples, seq_len, seed + i) for i in range(n_steps + 1)]
    tasks = [objective.corrupt(batch, numbers) for batch in batches]
    at_first = record_activations(model, tasks[0])
    moved: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    for task in tasks[1:]:
        (
            compute_task_loss(model.hidden_states(task.inputs, True), model.head_weight, task)[0] / task.count
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, now in record_activations(model, tasks[0]).items():
            # always against the activations at initialization, on the same batch
            moved[name].append((now - at_first[name]).square().mean().sqrt().item())
    return moved


@torch.no_grad()
def record_activations(model: Gpt, task: Task) -> dict[str, Tensor]:
    """Return the QUANTITIES of a task."""
    outputs: dict[str, Tensor] = {}
    last = model.blocks[-1]
    modules = {"embedding": model.embedding, "attention": last.attention, "feed_forward": last.mlp}
    with (
        _capture_outputs(modules, outputs),
        _capture_outputs({"residual": model.norm}, outputs, capture_input=True),
    ):
        outputs["logits"] = model(task.inputs, True)
    return outputs


@contextmanager
def _capture_outputs(
    modules: dict[str, nn.Module], outputs: dict[str, Tensor], capture_input: bool = False
) -> Iterator[None]:
    """Store the outputs (or inputs) of modules in `outputs` inside a `with` block."""

    def add_hook(name: str) -> torch.utils.hooks.RemovableHandle:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            outputs[name] = inputs[0] if capture_input else output

        return modules[name].register_forward_hook(hook)

    handles = [add_hook(name) for name in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
