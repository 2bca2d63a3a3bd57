"""A tiny model in the torch engine of a single process, and batches for it."""

from typing import Any

import numpy as np
import torch

from megatron.config.schema import DistConfig, ModelConfig, OptimConfig
from megatron.engine.torch.torch_native import TorchEngine
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from megatron.objective.autoregressive import Autoregressive
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.objective.task import Objective, Task
from megatron.parallel.world import World

SHAPE = ModelConfig(d_model=16, d_ff=32, d_head=4, n_heads=4, n_layers=2, n_tokens=60, vocab_rows=64)
ALONE = World(0, 1, 0, torch.device("cpu"))
CAUSAL, MASKED = Autoregressive(), MaskedDiffusion(60, 1e-3, seed=0)


def build_engine(
    objective: Objective = CAUSAL,
    shape: ModelConfig = SHAPE,
    seed: int = 0,
    world: World = ALONE,
    optim: dict[str, Any] | None = None,
    **dist: object,
) -> TorchEngine:
    """Build an engine; it computes in float32 unless `dist` has another dtype."""
    model = Gpt(shape)
    init_weights(model, seed)
    config = DistConfig(**{"cpu_only": world is ALONE, "dtype": "float32", **dist})
    update = OptimConfig(**{"lr": 0.01, **(optim or {})})
    return TorchEngine(model, causal=objective.causal, dist=config, optim=update, world=world)


def build_task(seed: int = 0, objective: Objective = CAUSAL, n_samples: int = 4) -> Task:
    """Return a corrupted batch of samples of 32 tokens."""
    tokens = np.random.default_rng(seed).integers(0, 60, (n_samples, 33))
    return objective.corrupt(tokens, np.arange(n_samples))
