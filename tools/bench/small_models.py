"""Benchmark training steps of small models on one CPU thread, relative to the machine's float32 GEMM rate.

    python tools/bench/small_models.py
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python tools/bench/small_models.py --widths 16 96

A step is that of the torch engine in float32, for a Llama-shaped model with two layers. Sizes alternate, so
that other load on the machine affects all of them. Times are lower quartiles of the thread's CPU time.
"""

import argparse
import os
import time
from collections.abc import Sequence

import numpy as np
import torch
from history import add_history_options, record_result

from megatron.cli import create_parser, positive_int, run_main
from megatron.config.schema import DistConfig, ModelConfig, OptimConfig
from megatron.engine.torch.torch_native import TorchEngine
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from megatron.objective.autoregressive import Autoregressive
from megatron.parallel.world import World, open_world
from megatron.plan.count import flops_per_token_executed, n_params

HEADS = {16: 2, 32: 2, 48: 3}  # by d_model; other widths have heads of 32 channels
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def describe_machine() -> str:
    """Return torch's version, the instruction set of its kernels, and limits set in the environment."""
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {capability}, {' '.join(limits) or 'no limits set'}"


def gemm_rate(size: int = 512, repeats: int = 20) -> float:
    """Return the FLOP/s of square float32 products on torch's threads, by wall time; the best of several."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    best = float("inf")
    # the best, not the mean: other load can only make a product slower
    for _ in range(repeats):
        begin = time.perf_counter()
        torch.mm(left, right, out=out)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def lower_quartile(seconds: Sequence[float]) -> float:
    """Return the lower quartile of several timings, which is robust against other load on the machine."""
    return sorted(seconds)[len(seconds) // 4]


def build_shape(d_model: int, n_tokens: int) -> ModelConfig:
    """Return a config of two layers with a feed-forward width of 8/3 d_model."""
    n_heads = HEADS.get(d_model, max(1, d_model // 32))
    return ModelConfig(
        d_model=d_model,
        d_ff=-(-8 * d_model // 24) * 8,  # 8/3 d_model, rounded up to a multiple of 8
        d_head=d_model // n_heads,
        n_heads=n_heads,
        n_layers=2,
        n_tokens=n_tokens,
        vocab_rows=n_tokens,
    )


def build_engine(shape: ModelConfig, world: World) -> TorchEngine:
    """Return the engine of tools/pretrain.py with new weights."""
    model = Gpt(shape)
    init_weights(model, seed=0)
    dist = DistConfig(cpu_only=True, dtype="float32")
    return TorchEngine(model, causal=True, dist=dist, optim=OptimConfig(lr=1e-3), world=world)


def time_steps(
    engines: Sequence[TorchEngine], n_tokens: int, batch: int, seq_len: int, steps: int
) -> list[list[float]]:
    """Return the thread's CPU seconds of every step of each engine; the first three steps are not timed."""
    rng, objective = np.random.default_rng(0), Autoregressive()
    timings: list[list[float]] = [[] for _ in engines]
    for _ in range(steps + 3):
        tokens = np.minimum(rng.zipf(1.3, (batch, seq_len + 1)), n_tokens - 1)
        # the batch is made outside the timed part, once for all engines
        task = objective.corrupt(tokens, np.arange(batch))
        for engine, seconds in zip(engines, timings, strict=True):
            begin = time.thread_time()
            float(engine.step([task], 1e-3).loss_sum)
            seconds.append(time.thread_time() - begin)
    return [seconds[3:] for seconds in timings]


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("models").add_argument
    add(
        "--widths",
        type=positive_int,
        nargs="+",
        default=[16, 32, 48, 96, 192],
        metavar="D",
        help="d_model of each size",
    )
    add("--batch", type=positive_int, default=4, metavar="N", help="windows per step")
    add("--seq-len", type=positive_int, default=128, metavar="S", help="tokens per window")
    add("--tokens", type=positive_int, default=512, metavar="N", help="tokens of the vocabulary")
    add = parser.add_argument_group("measurement").add_argument
    add("--steps", type=positive_int, default=40, metavar="N", help="timed steps of each width")
    add_history_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Time all widths, and print the figures."""
    args = build_parser().parse_args(argv)
    with open_world(DistConfig(cpu_only=True), 1) as world:
        shapes = [build_shape(width, args.tokens) for width in args.widths]
        peak = gemm_rate()
        timings = time_steps(
            [build_engine(shape, world) for shape in shapes],
            args.tokens,
            args.batch,
            args.seq_len,
            args.steps,
        )
        # before and after the steps, since the clock rate of a CPU changes with its load and temperature
        peak = max(peak, gemm_rate())
    print(
        f"{describe_machine()}; a product of 512 x 512 x 512 runs at {peak / 1e9:.0f} GFLOP/s on one thread"
    )
    print("d_model  parameters  ms a step  tokens/s  GFLOP/s  of the product's rate")
    tokens = args.batch * args.seq_len
    for shape, seconds in zip(shapes, timings, strict=True):
        step_s = lower_quartile(seconds)
        rate = flops_per_token_executed(shape, args.seq_len, True, 1.0) * tokens / step_s
        print(
            f"{shape.d_model:7} {n_params(shape):11,} {1e3 * step_s:10.2f} {tokens / step_s:9,.0f}"
            f" {rate / 1e9:8.1f} {rate / peak:10.0%}"
        )
        cell = f"d_model {shape.d_model}, {args.batch} x {args.seq_len} tokens, vocabulary {args.tokens}"
        record_result(
            args.history,
            "small_models",
            cell,
            tokens / step_s,
            "tokens/CPU-s",
            better="higher",
            repeats=[tokens / step for step in seconds],
        )
    return 0


if __name__ == "__main__":
    run_main(main)
