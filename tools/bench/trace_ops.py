"""Count the operations of a training step at real sizes, without a GPU and without memory for the tensors.

    python tools/bench/trace_ops.py
    python tools/bench/trace_ops.py --sizes 425M 1143M --objectives masked_diffusion --top 12

The eager step of the torch engine runs on fake tensors, which have shapes and dtypes but no values. Every
operation of the dispatcher is counted: kernel launches, bytes read and written, FLOPs of matrix products,
bytes saved for the backward pass, and operations that would synchronize host and device. Branches are those
of a GPU: fused attention, torch's fused RMSNorm, chunks of the loss of 2^26 logits. Compiled steps fuse many
of these operations and are not traced.
"""

import argparse
import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megatron.cli import create_parser, format_table, positive_int, run_main
from megatron.config.presets import load_named_shape, padded_rows
from megatron.config.schema import DistConfig, ModelConfig, OptimConfig
from megatron.config.training_schema import OBJECTIVES
from megatron.engine.torch import rank_weights
from megatron.engine.torch.torch_native import TorchEngine
from megatron.kernels import cpu_attention, linear_cross_entropy, norm, softmax_nll
from megatron.model.transformer import Gpt
from megatron.objective.autoregressive import Autoregressive
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.objective.task import Objective, Task
from megatron.parallel.world import open_world
from megatron.plan.count import n_params
from megatron.plan.memory import block_bytes

SIZES = ("7M", "44M", "106M", "425M", "1143M")
N_TOKENS = 50257  # GPT-2's vocabulary
# operations that launch nothing: views, allocations, and reads of sizes
NO_LAUNCH = (
    "empty",
    "new_empty",
    "detach",
    "alias",
    "lift_fresh",
    "set_",
    "resize_",
    "record_",
    "_unsafe_view",
)
WRITES_ONLY = ("zeros", "ones", "full", "fill", "zero_", "new_", "arange")
# `item`, `nonzero` and boolean indexing wait for the device
SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "unique")
ATTENTION = "scaled_dot_product"


@dataclass
class StepTrace:
    """Counts of one training step.

    launches       operations that run a kernel
    total_bytes    bytes read and written by them; attention: its inputs and outputs
    product_flops  FLOPs of matrix products, without attention
    saved_bytes    bytes that autograd saves, without weights
    syncs          operations that wait for the device
    operations     {name: (launches, bytes)}
    """

    tokens: int
    launches: int = 0
    total_bytes: int = 0
    product_flops: int = 0
    saved_bytes: int = 0
    syncs: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    bytes_of: Counter[str] = field(default_factory=Counter)

    @property
    def elementwise_bytes(self) -> int:
        """Bytes of all operations except matrix products and attention."""
        return sum(n for name, n in self.bytes_of.items() if not is_product(name) and ATTENTION not in name)

    def as_dict(self) -> dict[str, int]:
        """Return the totals."""
        names = ("tokens", "launches", "total_bytes", "product_flops", "saved_bytes", "syncs")
        return {name: getattr(self, name) for name in names} | {"elementwise_bytes": self.elementwise_bytes}


def is_product(name: str) -> bool:
    """Return whether an operation is a matrix product."""
    return name.split(".")[0].rstrip("_") in ("mm", "bmm", "addmm", "baddbmm")


class OperationCounter(TorchDispatchMode):
    """Adds every operation of the dispatcher to a StepTrace."""

    def __init__(self, trace: StepTrace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and count one operation."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet, name = func._overloadpacket, func.__name__.removesuffix(".default")
        if any(word in name for word in SYNCS):
            self.trace.syncs += 1
        # "prim" reads attributes of fake tensors, such as their device
        if func.is_view or func.namespace == "prim" or packet.__name__.startswith(NO_LAUNCH):
            return out
        # `out=` is written, not read; an operation in place reads its first argument and writes it
        inputs = [x for x in tree_leaves((args, {k: v for k, v in kwargs.items() if k != "out"}))]
        n = sum(count_bytes(x) for x in (*inputs, *tree_leaves(out)) if isinstance(x, Tensor))
        if packet.__name__.startswith(WRITES_ONLY):
            n = sum(count_bytes(x) for x in tree_leaves(out) if isinstance(x, Tensor))
        self.trace.launches += 1
        self.trace.total_bytes += n
        self.trace.calls[name] += 1
        self.trace.bytes_of[name] += n
        if is_product(name):
            # registered without the trailing underscore of the form in place
            plain = getattr(torch.ops.aten, packet.__name__.rstrip("_"))
            values = {k: v for k, v in kwargs.items() if k != "out"}
            self.trace.product_flops += flop_registry[plain](*args, **values, out_val=out)
        return out


def count_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; repeated (expanded) ones count once."""
    n = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        n *= size if stride else 1
    return n


class _FusedNorm(torch.autograd.Function):
    """Torch's fused RMSNorm of a GPU as one operation forward and one backward, with its saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        rstd = x.new_empty((*x.shape[:-1], 1))
        ctx.save_for_backward(x, gain, rstd)
        return torch.mul(x, gain)  # the bytes of the forward kernel: reads x and gain, writes one like x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain, rstd = ctx.saved_tensors
        # one operation that reads grad, x and the statistics and writes grad_x; grad_gain is a view of it
        grad_x = torch.addcmul(grads[0], x, rstd)
        return grad_x, grad_x.flatten(0, -2)[0].view_as(gain), None


def run_fused_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return a stand-in for `F.rms_norm` on a GPU, for the arguments of `kernels.norm.cpu_rms_norm`."""
    return _FusedNorm.apply(x, gain, eps)


def write_fused_gradient(logits: Tensor, targets: Tensor, scale: Tensor | None, _: Any) -> Tensor:
    """Stand in for the Triton kernel of the loss: it reads the logits twice and writes them; float32 [N]."""
    torch.add(logits, logits, out=logits)
    return torch.zeros(len(logits), device=logits.device)


# a product that adds to a float32 total: one operation on a GPU, which has no implementation on a CPU
_LIBRARY = torch.library.Library("bench_trace", "FRAGMENT")
if not hasattr(torch.ops.bench_trace, "addmm_"):
    _LIBRARY.define("addmm_(Tensor(a!) total, Tensor left, Tensor right) -> Tensor(a!)")
    _LIBRARY.impl("addmm_", lambda total, left, right: total, "CompositeExplicitAutograd")
    torch.library.register_fake("bench_trace::addmm_", lambda total, left, right: total, lib=_LIBRARY)


def accumulate_in_float32(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return total + left^T right as one operation; without a total its memory is new."""
    if total is None:
        total = left.new_empty(left.shape[1], right.shape[1], dtype=torch.float32)
    return torch.ops.bench_trace.addmm_(total, left.t(), right)


# (module, name, value) that make a CPU choose the branches of a GPU; names that do not exist are skipped
GPU_BRANCHES: tuple[tuple[Any, str, Any], ...] = (
    (cpu_attention, "MAX_POSITIONS", 0),
    (norm, "can_use_cpu_rms_norm", lambda x, gain: True),
    (norm, "cpu_rms_norm", run_fused_norm),
    (softmax_nll, "can_use_triton", lambda tensor: True),
    (softmax_nll, "_write_gradient_triton", write_fused_gradient),
    (linear_cross_entropy, "can_use_triton", lambda tensor: True),
    (linear_cross_entropy, "_accumulate_product", accumulate_in_float32),
    (softmax_nll, "_write_gradient_cpu", getattr(softmax_nll, "_write_gradient", None)),
    (rank_weights, "_compute_norms", lambda tensors: torch.stack(torch._foreach_norm(tensors)).double()),
    (linear_cross_entropy, "CHUNK_ELEMENTS_CPU", getattr(linear_cross_entropy, "CHUNK_ELEMENTS_GPU", None)),
    (linear_cross_entropy, "MIN_ROWS_HALF", getattr(linear_cross_entropy, "MIN_ROWS", None)),
)


@contextlib.contextmanager
def choose_gpu_branches() -> Iterator[None]:
    """Replace the choices that kernels make for a CPU by those for a GPU, until the context ends."""
    before = [
        (module, name, getattr(module, name)) for module, name, _ in GPU_BRANCHES if hasattr(module, name)
    ]
    for module, name, value in GPU_BRANCHES:
        if hasattr(module, name):
            setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def make_model(size: str, n_tokens: int = N_TOKENS, **changes: Any) -> ModelConfig:
    """Return the shape of a named size, with changed keys."""
    shape = load_named_shape(size) | changes
    return ModelConfig(size=size, n_tokens=n_tokens, vocab_rows=padded_rows(n_tokens), **shape)


def make_objective(name: str, model: ModelConfig) -> Objective:
    """Return an objective with default options."""
    if name == "autoregressive":
        return Autoregressive()
    return MaskedDiffusion(model.n_tokens, 1e-3, 0)


def make_task(objective: Objective, model: ModelConfig, rows: int, seq_len: int, seed: int = 0) -> Task:
    """Return the task of random tokens."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, model.n_tokens, (rows, seq_len + 1))
    return objective.corrupt(tokens, np.arange(seed * rows, (seed + 1) * rows))


def trace_step(
    model: ModelConfig, objective_name: str, rows: int, seq_len: int, dist: DistConfig | None = None
) -> StepTrace:
    """Count one optimizer step with one microbatch of `rows` samples.

    The masks of masked diffusion are those of one seed: about half of the positions are predicted.
    """
    dist = dist or DistConfig(cpu_only=True)
    trace = StepTrace(rows * seq_len)
    objective = make_objective(objective_name, model)
    task = make_task(objective, model, rows, seq_len)
    storages: dict[int, int] = {}
    references: list[Tensor] = []  # so that no storage address is reused

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape not in weight_shapes:
            references.append(tensor)
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        open_world(dist, 1) as world,
        choose_gpu_branches(),
        FakeTensorMode(allow_non_fake_inputs=True) as fake,
    ):
        gpt = Gpt(model)
        gpt.to = lambda device: gpt  # fake parameters cannot be moved, and are on the right device
        # casts of weights are counted with the states, as in plan/memory.py
        weight_shapes = {p.shape for p in gpt.parameters()} | {p.shape[::-1] for p in gpt.parameters()}
        engine = TorchEngine(gpt, causal=objective.causal, dist=dist, optim=OptimConfig(), world=world)
        fake_task = task._map_tensors(fake.from_tensor)
        # the first step builds tables (rotary angles) that later steps reuse
        engine.step([fake_task], 1e-3)
        with OperationCounter(trace), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            engine.step([fake_task], 1e-3)
    clear_cached_tables()
    trace.saved_bytes = sum(storages.values())
    return trace


def clear_cached_tables() -> None:
    """Forget rotary tables made of fake tensors, which no real step can use."""
    from megatron.kernels import rotary

    rotary.rotary_table.cache_clear()


def per_block(size: str, objective: str, rows: int, seq_len: int, n_tokens: int) -> dict[str, float]:
    """Return launches, elementwise bytes and saved bytes of one block, per token for the bytes.

    The difference of two depths, so that embedding, head and optimizer cancel.
    """
    few, many = (trace_step(make_model(size, n_tokens, n_layers=n), objective, rows, seq_len) for n in (2, 4))
    return {
        "launches": (many.launches - few.launches) / 2,
        "elementwise_bytes": (many.elementwise_bytes - few.elementwise_bytes) / 2 / few.tokens,
        "saved_bytes": (many.saved_bytes - few.saved_bytes) / 2 / few.tokens,
    }


def describe_size(size: str, objective: str, args: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Return a row of the table and the record of one size and objective."""
    model = make_model(size, args.vocabulary)
    trace = trace_step(model, objective, args.rows, args.seq_len)
    block = per_block(size, objective, args.rows, args.seq_len, args.vocabulary)
    estimate = block_bytes(model, DistConfig())
    record = {"size": size, "objective": objective, "n_params": n_params(model)} | trace.as_dict()
    record |= {f"block_{name}": value for name, value in block.items()} | {"block_estimate": estimate}
    row = [
        size,
        objective[:2].upper() if objective == "autoregressive" else "MD",
        f"{trace.launches:,}",
        f"{trace.total_bytes / 1e9:,.1f}",
        f"{trace.elementwise_bytes / 1e9:,.1f}",
        f"{block['elementwise_bytes'] / 1e3:,.0f}",
        f"{trace.product_flops / 1e12:,.2f}",
        f"{block['saved_bytes'] / 1e3:,.1f}",
        f"{estimate / block['saved_bytes']:.2f}",
        f"{trace.syncs}",
    ]
    if args.top:
        for name, n in trace.bytes_of.most_common(args.top):
            print(f"  {name:<48} {trace.calls[name]:>6,} launches {n / 1e9:>10,.2f} GB")
    return row, record


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("model and batch").add_argument
    add("--sizes", nargs="+", default=list(SIZES), metavar="SIZE", help="names in utils/model_sizes.yaml")
    add("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES), help="objectives")
    add("--rows", type=positive_int, default=8, metavar="N", help="samples of the microbatch")
    add("--seq-len", type=positive_int, default=2048, metavar="N", help="positions of a sample")
    add("--vocabulary", type=positive_int, default=N_TOKENS, metavar="N", help="ids of the tokenizer")
    add = parser.add_argument_group("output").add_argument
    add("--top", type=int, default=0, metavar="N", help="also list the operations with the most bytes")
    add("--json", type=Path, metavar="FILE", help="also write the counts")
    return parser


HEAD = ("size", "obj", "launches", "GB", "elementwise GB", "kB/token/block", "product TFLOP", "saved kB",
        "estimate/saved", "syncs")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Trace each size and objective, and print the counts."""
    args = build_parser().parse_args(argv)
    rows, records = [], []
    for size in args.sizes:
        for objective in args.objectives:
            row, record = describe_size(size, objective, args)
            rows.append(row)
            records.append(record)
    print(f"one eager step of {args.rows} x {args.seq_len} tokens, bf16 products")
    print("\n".join(format_table(HEAD, [tuple(row) for row in rows], ("size", "obj"))))
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_main(main)
