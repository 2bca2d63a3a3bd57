"""Compilation of the blocks: when, how, and where the compiled code is stored."""

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.config.schema import DistConfig
from megatron.log import get_logger
from megatron.model.transformer import Block, Gpt
from megatron.parallel.collectives import any_rank
from megatron.parallel.world import World

# Graphs of one function: training, scoring,
# and each with a variable number of samples.
# A process that trains several models compiles
# the same function for each of their shapes.
MAX_GRAPHS = 64
BACKEND = "inductor"  # for torch.compile
CACHE = "compiled"  # folder of compiled code
CACHE_VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}

log = get_logger(__name__)


def set_cache_folder(run: Path) -> None:
    """Store compiled code in the folder of the run or of its study, unless the environment names another.

    Runs of one study with the same shapes then compile once.
    Must be called before anything is compiled.
    """
    # the runs of a study are <study>/runs/<name>
    folder = (run.parent.parent if run.parent.name == "runs" else run) / CACHE
    if all(name in os.environ for name in CACHE_VARIABLES):
        return
    # compiled code is executed: nobody else may write to it
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, part in CACHE_VARIABLES.items():
        os.environ.setdefault(name, str((folder / part).absolute()))


def choose_compilation(config: DistConfig, world: World) -> bool:
    """Return whether to compile the blocks, equally on all ranks. Collective.

    The default is yes on a GPU whose compiler works.
    Raises ValueError if dist.compile is true and it does not.
    """
    if not is_compilation_requested(config, world.device):
        return False
    problem = find_compiler_problem(world.device)
    if not any_rank(problem is not None, world):
        return True
    reason = problem or "it fails on another rank"
    if config.compile:
        raise ValueError(
            f"dist.compile: got true, but torch.compile does not work here ({reason}). Install a C compiler "
            "and the triton of this torch, or set dist.compile=false."
        )
    log.warning("dist.compile: torch.compile does not work here (%s); the blocks run uncompiled", reason)
    return False


def is_compilation_requested(config: DistConfig, device: torch.device) -> bool:
    """Return the value of dist.compile; its default is true on a GPU and with the torch engine only."""
    if config.compile is None:
        return device.type == "cuda" and config.engine == "torch"
    return config.compile


def find_compiler_problem(device: torch.device) -> str | None:
    """Compile and run a function of one operation; return the first line of the error, or None."""
    try:
        x = torch.ones(8, device=device)
        if float(torch.compile(_add_one, backend=BACKEND)(x).sum()) != 16:
            return "a compiled sum is wrong"
    except Exception as error:  # the compiler is a large program: every kind of error means the same
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None


def _add_one(x: Tensor) -> Tensor:
    return x + 1


def compile_blocks(model: Gpt, *, has_tensor_ranks: bool, has_context_ranks: bool) -> None:
    """Compile the forward of each block, or of its feed-forward only, in place.

    Compiling the forward instead of the module keeps
    the hooks of FSDP outside. All blocks share one graph.
    """
    # DDP would cut each block's graph wherever a bucket of 25 MB of
    # gradients ends, for an overlap that it has between blocks anyway
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.recompile_limit = max(MAX_GRAPHS, torch._dynamo.config.recompile_limit)
    for block in model.blocks:
        assert isinstance(block, Block)
        # the compiler of torch 2.13 cannot trace
        # a whole block under sequence parallelism
        module: nn.Module = block.mlp if has_tensor_ranks else block
        # A graph break in a block costs speed without a message:
        # with fullgraph it is an error. The exchange of context
        # parallelism is not compiled and breaks each graph in two.
        module.forward = torch.compile(module.forward, fullgraph=not has_context_ranks, backend=BACKEND)
