"""Steps of small models on one CPU thread, beside the machine's own rate of float32 products.

    python tools/bench/small_models.py
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python tools/bench/small_models.py --widths 16 96

A step is the torch engine's, in float32, of a Llama-shaped model with two layers. Sizes take turns, so that
whatever else the machine does falls on all; times are lower quartiles of processor time of the thread.
"""

import argparse
import os
import time
from collections.abc import Sequence

import numpy as np
import torch

from megatron.command import command, count, run
from megatron.config.count import flops_per_token_executed, n_params
from megatron.config.schema import DistConfig, ModelConfig, OptimConfig
from megatron.engine.torch_native import TorchEngine
from megatron.model.gpt import Gpt
from megatron.model.initial import initialise
from megatron.objective.autoregressive import Autoregressive
from megatron.parallel.world import World, open_world

HEADS = {16: 2, 32: 2, 48: 3}  # else 32 wide
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def describe_machine() -> str:
    """torch's version, its kernels' instruction set, and the limits that the environment sets."""
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {capability}, {' '.join(limits) or 'no limits set'}"


def gemm_rate(size: int = 512, repeats: int = 20) -> float:
    """FLOP/s of square float32 products on torch's threads, by the clock; the best of several."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        torch.mm(left, right, out=out)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def lower_quartile(seconds: Sequence[float]) -> float:
    """Of several timings of the same work, on a machine that does other work too."""
    return sorted(seconds)[len(seconds) // 4]


def shape_of(d_model: int, n_tokens: int) -> ModelConfig:
    """Two layers of a width, the feed-forward 8/3 as wide."""
    n_heads = HEADS.get(d_model, max(1, d_model // 32))
    return ModelConfig(
        d_model=d_model,
        d_ff=-(-8 * d_model // 24) * 8,
        d_head=d_model // n_heads,
        n_heads=n_heads,
        n_layers=2,
        n_tokens=n_tokens,
        vocab_rows=n_tokens,
    )


def engine_of(shape: ModelConfig, world: World) -> TorchEngine:
    """The engine that tools/pretrain.py runs, around fresh weights."""
    model = Gpt(shape)
    initialise(model, seed=0)
    dist = DistConfig(cpu_only=True, dtype="float32")
    return TorchEngine(model, causal=True, dist=dist, optim=OptimConfig(lr=1e-3), world=world)


def step_seconds(
    engines: Sequence[TorchEngine], n_tokens: int, batch: int, seq_len: int, steps: int
) -> list[float]:
    """Seconds of the thread for a step of each engine; the first three steps are not timed."""
    rng, objective = np.random.default_rng(0), Autoregressive()
    taken: list[list[float]] = [[] for _ in engines]
    for _ in range(steps + 3):
        tokens = np.minimum(rng.zipf(1.3, (batch, seq_len + 1)), n_tokens - 1)
        task = objective.corrupt(tokens, np.arange(batch))
        for engine, seconds in zip(engines, taken, strict=True):
            begin = time.thread_time()
            float(engine.step([task], 1e-3).loss_sum)
            seconds.append(time.thread_time() - begin)
    return [lower_quartile(seconds[3:]) for seconds in taken]


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    add = parser.add_argument_group("what is trained").add_argument
    add(
        "--widths",
        type=count,
        nargs="+",
        default=[16, 32, 48, 96, 192],
        metavar="D",
        help="d_model of each size",
    )
    add("--batch", type=count, default=4, metavar="N", help="windows a step")
    add("--seq-len", type=count, default=128, metavar="S", help="tokens of a window")
    add("--tokens", type=count, default=512, metavar="N", help="of the vocabulary")
    add = parser.add_argument_group("how it is measured").add_argument
    add("--steps", type=count, default=40, metavar="N", help="timed steps of each width")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Time every width, and print the figures."""
    args = build_parser().parse_args(argv)
    with open_world(DistConfig(cpu_only=True), 1) as world:
        shapes = [shape_of(width, args.tokens) for width in args.widths]
        peak = gemm_rate()
        seconds = step_seconds(
            [engine_of(shape, world) for shape in shapes], args.tokens, args.batch, args.seq_len, args.steps
        )
        peak = max(peak, gemm_rate())
    print(f"{describe_machine()}; a product of 512 x 512 x 512 takes {peak / 1e9:.0f} GFLOP/s of one thread")
    print("d_model  parameters  ms a step  tokens/s  GFLOP/s  of the product's rate")
    for shape, one in zip(shapes, seconds, strict=True):
        tokens = args.batch * args.seq_len
        rate = flops_per_token_executed(shape, args.seq_len, True, 1.0) * tokens / one
        print(
            f"{shape.d_model:7} {n_params(shape):11,} {1e3 * one:10.2f} {tokens / one:9,.0f}"
            f" {rate / 1e9:8.1f} {rate / peak:10.0%}"
        )
    return 0


if __name__ == "__main__":
    run(main)
