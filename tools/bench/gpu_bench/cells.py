"""Cells of the GPU bench: what is measured, in order of importance, and the steps of each side."""

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.config.presets import load_named_shape, padded_rows
from megatron.config.schema import DistConfig, ModelConfig, OptimConfig
from megatron.engine.torch.torch_native import TorchEngine
from megatron.model.transformer import Gpt
from megatron.objective.autoregressive import Autoregressive
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.objective.task import Objective, Task
from megatron.parallel.world import World
from megatron.plan.hardware import find_device
from megatron.plan.roofline import StepSettings, StepTime, predict_step

AR, MD = "autoregressive", "masked_diffusion"
SHORT = {AR: "AR", MD: "MDM"}
ROWS = 8
N_TOKENS = 50257  # GPT-2's vocabulary: 50,304 rows
N_BATCHES = 4  # different batches that the steps use in turn
OPTIM = OptimConfig(lr=3e-4)
ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
TINY = {"d_model": 32, "d_ff": 64, "d_head": 16, "n_heads": 2, "n_layers": 2}
TINY_SIZE, TINY_TOKENS = "tiny", 200


@dataclass(frozen=True)
class Cell:
    """One measurement.

    side       ours, transformers or transformers-compiled
    setting    name of the one setting that differs from the defaults of the code
    dist       keys of DistConfig that differ
    attention  backend of torch's attention to force: flash, cudnn or efficient
    rows       samples per microbatch
    """

    side: str
    size: str
    objective: str
    setting: str = "default"
    dist: dict[str, Any] = field(default_factory=dict)
    attention: str | None = None
    rows: int = ROWS

    @property
    def name(self) -> str:
        """Name in the results, such as ours/425M/AR/compile off."""
        return "/".join((self.side, self.size, SHORT[self.objective], self.setting))

    @property
    def predicted(self) -> StepSettings:
        """Settings of the roofline's prediction."""
        if self.side != "ours":
            return StepSettings(compiled=self.side.endswith("compiled"), loss="chunked", stream="float32")
        return StepSettings(
            compiled=self.dist.get("compile", True),
            stream=self.dist.get("residual_dtype", "bfloat16"),
            attention="flash2" if self.attention in ("flash", "efficient") else "cudnn",
        )


class SkippedCellError(Exception):
    """A cell that cannot be measured, with the reason."""


def list_cells(sizes: list[str] | None = None) -> list[Cell]:
    """Return the cells in order of importance; `sizes` limits them, and replaces the sizes by tiny ones."""
    large, largest = Cell("ours", "425M", AR), Cell("ours", "1143M", AR)
    cells = [large, Cell("ours", "425M", MD), largest, Cell("ours", "1143M", MD)]
    other = "transformers-compiled"
    cells += [Cell(other, "425M", AR), Cell("transformers", "425M", AR), Cell(other, "1143M", AR)]
    eager = {"setting": "compile off", "dist": {"compile": False}}
    cells += [replace(large, **eager)]
    cells += [replace(large, setting=f"attention {name}", attention=name) for name in ATTENTION]
    cells += [replace(large, setting=f"microbatch {rows}", rows=rows) for rows in (16, 32)]
    cells += [replace(large, setting="float32 stream", dist={"residual_dtype": "float32"})]
    cells += [Cell("ours", "425M", MD, "attention flash", attention="flash")]
    cells += [replace(largest, setting="microbatch 16", rows=16), replace(largest, **eager)]
    cells += [Cell("ours", size, objective) for size in ("106M", "44M", "7M") for objective in (AR, MD)]
    cells += [Cell("ours", size, AR, **eager) for size in ("7M", "44M", "106M")]
    cells += [
        Cell("ours", "7M", MD, **eager),
        Cell(other, "44M", AR),
        Cell("ours", "7M", AR, "microbatch 32", rows=32),
        Cell(other, "7M", AR),
    ]
    if sizes == [TINY_SIZE]:
        # every kind of cell once, with the shape replaced
        unique = {(c.side, c.objective, c.setting): c for c in reversed(cells)}
        kinds = [cell for cell in cells if cell in unique.values()]
        return [replace(c, size=TINY_SIZE, rows=max(2, c.rows // 8)) for c in kinds]
    return [cell for cell in cells if sizes is None or cell.size in sizes]


def make_model(size: str) -> ModelConfig:
    """Return the configuration of a size."""
    n_tokens, shape = (TINY_TOKENS, TINY) if size == TINY_SIZE else (N_TOKENS, load_named_shape(size))
    return ModelConfig(size=size, n_tokens=n_tokens, vocab_rows=padded_rows(n_tokens), **shape)


def make_objective(name: str, n_tokens: int) -> Objective:
    """Return an objective with default options."""
    return Autoregressive() if name == AR else MaskedDiffusion(n_tokens, 1e-3, 0)


def draw_tokens(model: ModelConfig, rows: int, seq_len: int, seed: int) -> np.ndarray:
    """Return random tokens [rows, seq_len + 1]."""
    return np.random.default_rng(seed).integers(0, model.n_tokens, (rows, seq_len + 1))


def make_tasks(cell: Cell, seq_len: int, device: torch.device) -> list[Task]:
    """Return microbatches of random tokens, pinned for a GPU as the training loop's."""
    model = make_model(cell.size)
    objective = make_objective(cell.objective, model.n_tokens)
    numbers = np.arange(cell.rows)
    tasks = [
        objective.corrupt(draw_tokens(model, cell.rows, seq_len, i), i * cell.rows + numbers)
        for i in range(N_BATCHES)
    ]
    return [task.pin_memory() for task in tasks] if device.type == "cuda" else tasks


@torch.no_grad()
def fill_weights(model: nn.Module) -> None:
    """Fill matrices with normal numbers on their device: faster than the real initialization of 1e9."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0.0, 0.02)


Step = Callable[[int], Tensor]  # number of the step -> loss, on the device


def build_step(cell: Cell, device: torch.device, seq_len: int, accumulate: int) -> Step:
    """Build the function that takes one optimizer step of a cell. Raises SkippedCellError with a reason."""
    if device.type != "cuda" and cell.attention:
        raise SkippedCellError("needs CUDA")
    tasks = make_tasks(cell, seq_len, device)
    if cell.side == "ours":
        return build_engine_step(cell, tasks, device, accumulate)
    if importlib.util.find_spec("transformers") is None:
        raise SkippedCellError("transformers is not installed")
    with device:
        network = build_llama(make_model(cell.size), seq_len)
    fill_weights(network)
    if cell.side.endswith("compiled"):
        network.forward = torch.compile(network.forward)  # the whole model at once
    return build_plain_step(network, tasks, OPTIM, device, accumulate)


def build_engine_step(cell: Cell, tasks: list[Task], device: torch.device, accumulate: int) -> Step:
    """Build the step of the torch engine."""
    with device:
        network = Gpt(make_model(cell.size))
    fill_weights(network)
    dist = DistConfig(cpu_only=device.type != "cuda", **cell.dist)
    world, causal = World(0, 1, 0, device), cell.objective == AR
    engine = TorchEngine(network, causal=causal, dist=dist, optim=OPTIM, world=world)

    def step(i: int) -> Tensor:
        first = i * accumulate
        report = engine.step([tasks[(first + j) % len(tasks)] for j in range(accumulate)], OPTIM.lr)
        return report.loss_sum / report.count

    return step


def use_attention(cell: Cell) -> AbstractContextManager[None]:
    """Allow only the attention of a cell; without one, torch chooses."""
    return nullcontext() if cell.attention is None else sdpa_kernel([ATTENTION[cell.attention]])


def predict_cell(cell: Cell, hardware: str, seq_len: int, accumulate: int) -> StepTime | None:
    """Return the roofline's prediction of a cell; None for a device that it does not list."""
    device, tokens = find_device(hardware), cell.rows * seq_len
    if device is None:
        return None
    return predict_step(
        make_model(cell.size),
        seq_len,
        cell.objective == AR,
        device,
        cell.predicted,
        microbatch_tokens=tokens,
        tokens_per_step=tokens * accumulate,
    )


def build_plain_step(
    network: nn.Module, tasks: list[Task], optim: OptimConfig, device: torch.device, accumulate: int
) -> Step:
    """Build a training step in a few lines: autocast, cross_entropy, torch's fused AdamW."""
    matrices = [p for p in network.parameters() if p.ndim >= 2]
    gains = [p for p in network.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    betas = (optim.beta1, optim.beta2)
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=True)

    def step(i: int) -> Tensor:
        total = torch.zeros((), device=device)
        for j in range(accumulate):
            task = tasks[(i * accumulate + j) % len(tasks)].to(device)
            with torch.autocast(device.type, torch.bfloat16):
                logits = network(task.inputs).logits
                loss = F.cross_entropy(logits.flatten(0, 1), task.targets) / accumulate
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(network.parameters(), optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def build_llama(model: ModelConfig, seq_len: int) -> nn.Module:
    """Build LlamaForCausalLM of transformers with the shape of a model and torch's fused attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    names = {"hidden_size": "d_model", "intermediate_size": "d_ff", "head_dim": "d_head"}
    names |= {"num_attention_heads": "n_heads", "num_key_value_heads": "n_heads"}
    names |= {"num_hidden_layers": "n_layers", "vocab_size": "vocab_rows", "rms_norm_eps": "norm_eps"}
    shape = {name: getattr(model, ours) for name, ours in names.items()}
    return LlamaForCausalLM(
        LlamaConfig(
            **shape,
            max_position_embeddings=seq_len,
            tie_word_embeddings=True,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
