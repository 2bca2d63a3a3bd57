"""Cells of the GPU bench: what is measured, in order of importance, and the steps of each side."""

import contextlib
import gc
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_bench.baselines import NanoGpt, build_llama, build_plain_step
from megatron.config.presets import load_named_shape, padded_rows
from megatron.config.schema import DistConfig, ModelConfig, OptimConfig
from megatron.engine.torch.torch_native import TorchEngine
from megatron.kernels import linear_cross_entropy, softmax_nll
from megatron.kernels.attention_backend import (
    AttentionChoice,
    AttentionShape,
    choose_attention_backend,
    use_attention_backend,
)
from megatron.model.transformer import Gpt
from megatron.objective.autoregressive import Autoregressive
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.objective.task import Objective, Task
from megatron.parallel.world import World
from megatron.plan.count import n_params
from megatron.plan.roofline import StepSettings

AR, MD = "autoregressive", "masked_diffusion"
SHORT = {AR: "AR", MD: "MDM"}
SEQ_LEN, ROWS, ACCUMULATE = 2048, 8, 2
N_TOKENS = 50257  # GPT-2's vocabulary: 50,304 rows
N_BATCHES = 4  # different batches that the steps use in turn
OPTIM = OptimConfig(lr=3e-4)
PROBED_SAMPLES = 8  # of the calls that choose the attention kernel, as in megatron/train/build.py
FUSED_LOSS = "can_use_triton"  # decides about the kernel of the loss
GRAPH_PARAMS = 150_000_000  # up to which steps are graphs by default
ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
TINY = {"d_model": 32, "d_ff": 64, "d_head": 16, "n_heads": 2, "n_layers": 2}
TINY_SIZE, TINY_ROWS, TINY_TOKENS = "tiny", 2, 200


@dataclass(frozen=True)
class Cell:
    """One measurement.

    side       ours, transformers, nanogpt or nanogpt-compiled
    setting    name of the one setting that differs from the defaults of the code; default: none
    dist       keys of DistConfig that differ
    attention  backend of torch's attention to force: flash, cudnn or efficient
    unfused_loss   without the Triton kernel of the loss
    rows       samples per microbatch
    predicted  settings of the roofline's prediction
    """

    side: str
    size: str
    objective: str
    setting: str = "default"
    dist: dict[str, Any] = field(default_factory=dict)
    attention: str | None = None
    unfused_loss: bool = False
    rows: int = ROWS
    predicted: StepSettings = field(default_factory=StepSettings)
    cuda_only: bool = False

    @property
    def name(self) -> str:
        """Name in the results, such as ours/425M/AR/compile off."""
        return "/".join((self.side, self.size, SHORT[self.objective], self.setting))

    @property
    def expects_graph(self) -> bool:
        """Return whether its steps are replayed from CUDA graphs on a GPU."""
        return self.predicted.graph and has_dist_key("cuda_graphs")


class SkippedCellError(Exception):
    """A cell that cannot be measured, with the reason."""


def has_dist_key(key: str) -> bool:
    """Return whether the configuration has a key `dist.<key>`."""
    return key in {entry.name for entry in fields(DistConfig)}


def is_default_on(key: str) -> bool:
    """Return whether a switch of DistConfig is on by default on a GPU; None stands for auto, which is on."""
    return getattr(DistConfig(), key, False) in (None, True)


def choose_default_prediction(size: str) -> StepSettings:
    """Return the roofline settings of the defaults of this code on one GPU."""
    return StepSettings(
        compiled=is_default_on("compile"),
        loss="fused" if hasattr(softmax_nll, FUSED_LOSS) else "chunked",
        stream="bfloat16" if has_dist_key("residual_dtype") else "float32",
        graph=is_default_on("cuda_graphs") and n_params(make_model(size)) <= GRAPH_PARAMS,
    )


def load_shape(size: str) -> dict[str, int]:
    """Return the shape of a named size or of the tiny one."""
    return TINY if size == TINY_SIZE else load_named_shape(size)


def list_cells(sizes: list[str] | None = None) -> list[Cell]:
    """Return the cells in order of importance; `sizes` limits them, and replaces the sizes by tiny ones."""
    cells = [ours("425M", AR), ours("425M", MD), ours("1143M", AR), ours("1143M", MD)]
    cells += [baseline(side, "425M") for side in ("nanogpt-compiled", "nanogpt", "transformers")]
    cells += [
        switch_compile("425M", AR),
        force_attention("425M", AR, "flash"),
        force_attention("425M", AR, "cudnn"),
        separate_loss("425M", AR),
        replace(ours("425M", AR), rows=16, setting="microbatch 16"),
        replace(ours("425M", AR), rows=32, setting="microbatch 32"),
        switch("425M", AR, "float32 stream", {"residual_dtype": "float32"}, stream="float32"),
        force_attention("425M", MD, "flash"),
        replace(ours("1143M", AR), rows=16, setting="microbatch 16"),
        switch_compile("1143M", AR),
    ]
    cells += [ours(size, objective) for size in ("106M", "44M", "7M") for objective in (AR, MD)]
    cells += [
        switch_graph("7M", AR),
        switch_graph("44M", AR),
        switch_graph("106M", AR),
        switch_graph("7M", MD),
    ]
    cells += [switch_compile("7M", AR), replace(ours("7M", AR), rows=32, setting="microbatch 32")]
    cells += [baseline("nanogpt-compiled", "7M")]
    if sizes is None:
        return cells
    if sizes == [TINY_SIZE]:
        # every kind of cell once, with the shape replaced
        unique = {(c.side, c.objective, c.setting): c for c in reversed(cells)}
        ordered = [c for c in cells if unique[c.side, c.objective, c.setting] is c]
        return [replace(c, size=TINY_SIZE, rows=max(TINY_ROWS, c.rows // 8)) for c in ordered]
    return [cell for cell in cells if cell.size in sizes]


def ours(size: str, objective: str) -> Cell:
    """Return the cell of the code's defaults."""
    return Cell("ours", size, objective, predicted=choose_default_prediction(size))


def baseline(side: str, size: str) -> Cell:
    """Return the cell of another implementation: autocast, float32 residual stream, unfused loss."""
    compiled = side.endswith("compiled")
    predicted = StepSettings(compiled=compiled, loss="chunked", stream="float32")
    return Cell(side, size, AR, predicted=predicted)


def switch(size: str, objective: str, name: str, dist: dict[str, Any], **predicted: Any) -> Cell:
    """Return a cell with other keys of DistConfig."""
    cell = ours(size, objective)
    return replace(cell, setting=name, dist=dist, predicted=replace(cell.predicted, **predicted))


def switch_compile(size: str, objective: str) -> Cell:
    """Return the cell with compilation on or off, whichever is not the default."""
    compiled = not ours(size, objective).predicted.compiled
    name = f"compile {'on' if compiled else 'off'}"
    return switch(size, objective, name, {"compile": compiled}, compiled=compiled)


def switch_graph(size: str, objective: str) -> Cell:
    """Return the cell with a graph of the whole step on or off, whichever is not the default."""
    graph = not ours(size, objective).predicted.graph
    name = f"graph {'on' if graph else 'off'}"
    return replace(switch(size, objective, name, {"cuda_graphs": graph}, graph=graph), cuda_only=True)


def separate_loss(size: str, objective: str) -> Cell:
    """Return the cell with the loss in separate operations of torch instead of one kernel."""
    cell = switch(size, objective, "loss unfused", {}, loss="chunked")
    return replace(cell, unfused_loss=True)


def force_attention(size: str, objective: str, backend: str) -> Cell:
    """Return the cell with one of torch's attention backends."""
    cell = ours(size, objective)
    name = "cudnn" if backend == "cudnn" else "flash2"
    predicted = replace(cell.predicted, attention=name)
    return replace(
        cell, setting=f"attention {backend}", attention=backend, predicted=predicted, cuda_only=True
    )


def make_model(size: str) -> ModelConfig:
    """Return the configuration of a size."""
    n_tokens = TINY_TOKENS if size == TINY_SIZE else N_TOKENS
    return ModelConfig(size=size, n_tokens=n_tokens, vocab_rows=padded_rows(n_tokens), **load_shape(size))


def make_objective(name: str, n_tokens: int) -> Objective:
    """Return an objective with default options."""
    return Autoregressive() if name == AR else MaskedDiffusion(n_tokens, 1e-3, 0)


def draw_tokens(model: ModelConfig, rows: int, seq_len: int, seed: int) -> np.ndarray:
    """Return random tokens [rows, seq_len + 1]."""
    return np.random.default_rng(seed).integers(0, model.n_tokens, (rows, seq_len + 1))


def make_tasks(cell: Cell, seq_len: int, n: int, device: torch.device) -> list[Task]:
    """Return microbatches of random tokens, pinned for a GPU as the training loop's."""
    model = make_model(cell.size)
    objective = make_objective(cell.objective, model.n_tokens)
    tasks = [
        objective.corrupt(
            draw_tokens(model, cell.rows, seq_len, i), np.arange(i * cell.rows, (i + 1) * cell.rows)
        )
        for i in range(n)
    ]
    return [task.pin_memory() for task in tasks] if device.type == "cuda" else tasks


@torch.no_grad()
def fill_weights(model: nn.Module, seed: int = 0) -> None:
    """Fill matrices with normal numbers on their device: faster than the real initialization of 1e9."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0.0, 0.02)


Step = Callable[[int], Tensor]  # number of the step -> loss, on the device


def build_step(cell: Cell, device: torch.device, seq_len: int, accumulate: int) -> Step:
    """Build the function that takes one optimizer step of a cell. Raises SkippedCellError with a reason."""
    if cell.cuda_only and device.type != "cuda":
        raise SkippedCellError("needs CUDA")
    for key in cell.dist:
        if not has_dist_key(key):
            raise SkippedCellError(f"this code has no option dist.{key}")
    if cell.side == "ours":
        return build_our_step(cell, device, seq_len, accumulate)
    if cell.side == "transformers" and importlib.util.find_spec("transformers") is None:
        raise SkippedCellError("transformers is not installed")
    model = make_model(cell.size)
    with device:
        network: nn.Module = NanoGpt(model) if cell.side != "transformers" else build_llama(model, seq_len)
    fill_weights(network)
    if cell.side == "nanogpt-compiled":
        network.forward = torch.compile(network.forward)  # the whole model, as in nanoGPT
    tasks = make_tasks(cell, seq_len, N_BATCHES, device)
    return build_plain_step(network, tasks, OPTIM, device, accumulate)


class EngineStep:
    """The step of the torch engine."""

    def __init__(self, engine: TorchEngine, tasks: list[Task], accumulate: int) -> None:
        self.engine, self.tasks, self.accumulate = engine, tasks, accumulate
        self.n_steps = 0

    def __call__(self, i: int) -> Tensor:
        first = i * self.accumulate
        microbatches = [self.tasks[(first + j) % len(self.tasks)] for j in range(self.accumulate)]
        report = self.engine.step(microbatches, OPTIM.lr)
        self.n_steps += 1
        return report.loss_sum / report.count

    def count_replays(self) -> int:
        """Return the number of CUDA graphs that were replayed."""
        static = getattr(self.engine, "static_step", None)
        if static is None:
            return 0
        # each microbatch and each update either replays its graph or is counted as a run without one
        return self.n_steps * (self.accumulate + 1) - sum(static.n_runs.values())


def choose_dist(cell: Cell, device: torch.device) -> dict[str, Any]:
    """Return the keys of DistConfig of a cell. It requires its graphs: a failed recording is an error."""
    required = {"cuda_graphs": True} if cell.expects_graph and device.type == "cuda" else {}
    return required | cell.dist


def build_our_step(cell: Cell, device: torch.device, seq_len: int, accumulate: int) -> EngineStep:
    """Build the step of the torch engine."""
    model = make_model(cell.size)
    with device:
        network = Gpt(model)
    fill_weights(network)
    dist = DistConfig(cpu_only=device.type != "cuda", **choose_dist(cell, device))
    world = World(0, 1, 0, device)
    engine = TorchEngine(network, causal=cell.objective == AR, dist=dist, optim=OPTIM, world=world)
    return EngineStep(engine, make_tasks(cell, seq_len, N_BATCHES, device), accumulate)


@contextlib.contextmanager
def use_kernels(cell: Cell, device: torch.device, seq_len: int) -> Iterator[AttentionChoice | None]:
    """Allow only the attention and the loss of a cell; return the measured choice of attention, if any.

    Raises SkippedCellError for a missing kernel.
    """
    choice = None
    with contextlib.ExitStack() as stack:
        if cell.attention is not None:
            stack.enter_context(use_attention([ATTENTION[cell.attention]], cell.attention))
        elif cell.side == "ours":
            choice = stack.enter_context(use_fastest_attention(cell, device, seq_len))
        if cell.unfused_loss:
            if not hasattr(softmax_nll, FUSED_LOSS):
                raise SkippedCellError("this code has no fused loss")
            for module in (softmax_nll, linear_cross_entropy):
                stack.enter_context(mock.patch.object(module, FUSED_LOSS, lambda *_: False))
        yield choice


@contextlib.contextmanager
def use_attention(backends: list[SDPBackend], tag: str) -> Iterator[None]:
    """Allow only some of torch's attention backends, and share no compiled code with others."""
    with tag_compiled_code(f"only-{tag}"), sdpa_kernel(backends):
        yield


@contextlib.contextmanager
def use_fastest_attention(cell: Cell, device: torch.device, seq_len: int) -> Iterator[AttentionChoice]:
    """Measure and use the fastest attention backend, as a run of training does."""
    model = make_model(cell.size)
    shape = AttentionShape(
        n_samples=min(cell.rows, PROBED_SAMPLES),
        n_heads=model.n_heads,
        n_kv_heads=model.kv_heads,
        n_positions=seq_len,
        d_head=model.d_head,
        causal=cell.objective == AR,
    )
    choice = choose_attention_backend(shape, torch.bfloat16, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the candidates' tensors
    with tag_compiled_code(f"attention-{choice.name}"):
        try:
            use_attention_backend(choice)
            yield choice
        finally:
            # a name without a backend restores torch's order
            use_attention_backend(AttentionChoice("none", "the cell has ended", {}))


@contextlib.contextmanager
def tag_compiled_code(tag: str) -> Iterator[None]:
    """Give compiled code its own entries in torch's caches on disk.

    Their key contains neither the allowed attention backends nor their order, which the code depends on.
    """
    config = getattr(torch.compiler, "config", None)
    if not hasattr(config, "cache_key_tag"):  # torch below 2.7
        yield
        return
    before = config.cache_key_tag
    config.cache_key_tag = tag
    try:
        yield
    finally:
        config.cache_key_tag = before


def free_memory(device: torch.device) -> None:
    """Free what a cell or a check has left: compiled code, garbage, cached blocks."""
    gc.collect()  # CUDA graphs first: they launch kernels of the compiled code
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
