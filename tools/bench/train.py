"""Benchmark training on the CPU: our torch engine against transformers' LlamaForCausalLM with torch's AdamW.

    python tools/bench/train.py
    python tools/bench/train.py --dtype float32 --repeat 7 --threads 2 --compile
    python tools/bench/train.py --widths 16 48 96 --threads 1 --dtype float32

Both sides train the same Llama-shaped model with the same weights, tokens, optimizer settings and clipping:
ours with the code of tools/pretrain.py, theirs as in its documentation, with SDPA attention and products
under autocast. Both are eager; --compile compiles our blocks (dist.compile). Each side is a separate process,
to measure its peak memory; the sides alternate, so that other load on the machine affects both. --widths
trains small models of two layers with 512 ids and windows of 128 tokens instead of one of 10 M parameters.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from harness import add_options, write_results

from megatron.checkpoint.convert.names import choose_family, export_names
from megatron.cli import create_parser, positive_int, run_main
from megatron.config.schema import DistConfig, ModelConfig, OptimConfig
from megatron.engine.torch.torch_native import TorchEngine
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from megatron.objective.autoregressive import Autoregressive
from megatron.parallel.world import World, open_world
from megatron.plan.count import n_params

LARGE = ModelConfig(d_model=256, d_ff=640, d_head=64, n_heads=4, n_layers=8, n_tokens=16000, vocab_rows=16384)
HEADS = {16: 2, 32: 2, 48: 3}  # by d_model of small models; other widths have heads of 32 channels
OPTIM = OptimConfig(lr=1e-3)

Step = Callable[[np.ndarray], float]  # tokens [B, S + 1] -> loss


def build_shape(width: int) -> ModelConfig:
    """Return a small model of two layers, or the large one for width 0."""
    if not width:
        return LARGE
    n_heads = HEADS.get(width, max(1, width // 32))
    d_ff = -(-8 * width // 24) * 8  # 8/3 d_model, rounded up to a multiple of 8
    sizes = {"d_model": width, "d_ff": d_ff, "d_head": width // n_heads, "n_heads": n_heads}
    return ModelConfig(**sizes, n_layers=2, n_tokens=512, vocab_rows=512)


def build_our_step(shape: ModelConfig, dtype: str, world: World, compiled: bool) -> Step:
    """Return a function that runs one step of the torch engine."""
    model = Gpt(shape)
    init_weights(model, seed=0)
    dist = DistConfig(cpu_only=True, dtype=dtype, compile=compiled)
    engine = TorchEngine(model, causal=True, dist=dist, optim=OPTIM, world=world)
    objective = Autoregressive()

    def step(tokens: np.ndarray) -> float:
        report = engine.step([objective.corrupt(tokens, np.arange(len(tokens)))], OPTIM.lr)
        return float(report.loss_sum) / report.count

    return step


def build_their_step(shape: ModelConfig, seq_len: int, dtype: str) -> Step:
    """Return a function that runs one step of LlamaForCausalLM with the same weights."""
    from gpu_bench.cells import build_llama  # found only when this file is the command

    model = build_llama(shape, seq_len)
    ours = Gpt(shape)
    init_weights(ours, seed=0)
    # the head is tied to the embedding, but a strict load requires its name in the state
    state = export_names(choose_family("llama", ours.config), ours.state_dict(), ours.config)
    model.load_state_dict({"lm_head.weight": ours.embedding.weight} | state)
    # decay for matrices only, as ours: a decay of the norms' gains would be another optimizer
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": OPTIM.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps)
    products = torch.bfloat16 if dtype == "bfloat16" else torch.float32

    def step(tokens: np.ndarray) -> float:
        ids = torch.from_numpy(tokens)
        with torch.autocast("cpu", products, enabled=products != torch.float32):
            logits = model(input_ids=ids[:, :-1]).logits
            # logits [B, S, V] in bfloat16 under autocast; the loss in float32
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def run_side(args: argparse.Namespace) -> None:
    """Run the process of one side."""
    (width,) = args.widths
    shape, seq_len = build_shape(width), choose_seq_len(width)
    if args.side == "theirs":
        torch.set_num_threads(args.threads)
        run_rounds(build_their_step(shape, seq_len, args.dtype), args.batch, seq_len, shape.n_tokens)
        return
    with open_world(DistConfig(cpu_only=True), args.threads) as world:
        step = build_our_step(shape, args.dtype, world, args.compile)
        run_rounds(step, args.batch, seq_len, shape.n_tokens)


def choose_seq_len(width: int) -> int:
    """Return the tokens per window: 128 for a small model."""
    return 128 if width else 512


def run_rounds(step: Step, batch: int, seq_len: int, n_tokens: int) -> None:
    """Run n steps for each line `n` of standard input, and print their cost as a line of JSON."""
    rng = np.random.default_rng(0)
    # A side waits for its turn in the read, and the compiled code and the optimizer's state remain.
    for line in sys.stdin:
        # Zipf-distributed, so that the model can learn the frequencies; the same tokens on both sides
        batches = [np.minimum(rng.zipf(1.3, (batch, seq_len + 1)), n_tokens - 1) for _ in range(int(line))]
        wall, cpu = time.perf_counter(), time.process_time()
        losses = [step(tokens) for tokens in batches]
        record = {
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "loss": losses[-1],
            # Linux reports KiB
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        print(json.dumps(record), flush=True)


def start_side(side: str, dtype: str, width: int, args: argparse.Namespace) -> subprocess.Popen:
    """Start the process of one side, which waits for numbers of steps."""
    words = ["--side", side, "--dtype", dtype, "--widths", str(width), "--batch", str(args.batch)]
    words += ["--threads", str(args.threads), *["--compile"] * args.compile]
    command = [sys.executable, __file__, *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def compare_sides(dtype: str, width: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run both sides alternately, print their figures and the ratios, and return them."""
    sides = {side: start_side(side, dtype, width, args) for side in ("ours", "theirs")}
    records: dict[str, list[dict]] = {side: [] for side in sides}
    try:
        for turn in range(args.repeat + 1):  # the first round warms up and compiles, and is not timed
            for side, process in sides.items():
                assert process.stdin is not None and process.stdout is not None, "both are pipes"
                process.stdin.write(f"{2 if turn == 0 else args.steps}\n")
                process.stdin.flush()
                line = process.stdout.readline()
                if not line:
                    raise OSError(f"{side}: the process ended. Its error message is above.")
                records[side].append(json.loads(line))
    finally:
        # a side reads its standard input without end, so it must be killed
        for process in sides.values():
            process.kill()
            process.wait()
    return print_comparison(dtype, width, args, records)


def print_comparison(
    dtype: str, width: int, args: argparse.Namespace, records: dict[str, list[dict]]
) -> dict[str, Any]:
    """Print and return the medians over the timed rounds."""
    tokens = args.batch * choose_seq_len(width) * args.steps
    rates = {}
    for side, rounds in records.items():
        # [1:] skips the untimed round
        wall, cpu = (statistics.median(r[clock] for r in rounds[1:]) for clock in ("wall_s", "cpu_s"))
        rates[side] = {"tokens/s": tokens / wall, "tokens/CPU-s": tokens / cpu}
        rates[side] |= {"peak_mib": rounds[-1]["peak_mib"], "loss": rounds[-1]["loss"]}
        print(
            f"{dtype:9} {side:7} {tokens / wall:8,.0f} tokens/s   {tokens / cpu:8,.0f} per CPU-second   "
            f"peak {rates[side]['peak_mib']:6,.0f} MiB   loss {rates[side]['loss']:.4f}"
        )
    ours, theirs = rates["ours"], rates["theirs"]
    ratios = {key: ours[key] / theirs[key] for key in ("tokens/s", "tokens/CPU-s", "peak_mib")}
    print(
        f"{dtype:9} ratio   {ratios['tokens/s']:8.2f}            {ratios['tokens/CPU-s']:8.2f} CPU"
        f"              memory {ratios['peak_mib']:.2f}"
    )
    return {"ours": ours, "theirs": theirs, "ratio": ratios}


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    threads = torch.get_num_threads()
    add = parser.add_argument_group("model and batches").add_argument
    dtypes = ("float32", "bfloat16", "both")
    add("--dtype", choices=dtypes, default="both", help="dtype of the matrix products")
    add("--widths", type=int, nargs="+", default=[0], metavar="D", help="d_model; 0: 10 M parameters")
    add("--batch", type=positive_int, default=4, metavar="N", help="samples per step")
    add("--compile", action="store_true", help="compile our blocks in the untimed round")
    add("--steps", type=positive_int, default=4, metavar="N", help="steps per round")
    add("--threads", type=positive_int, default=threads, metavar="N", help="CPU threads of each side")
    add("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    add_options(parser, repeat=5)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the sides, and print the figures."""
    args = build_parser().parse_args(argv)
    if args.side:
        run_side(args)
        return 0
    results = {}
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {args.threads} threads")
    for width in args.widths:
        shape, seq_len = build_shape(width), choose_seq_len(width)
        print(f"d_model {shape.d_model}, {n_params(shape):,} parameters, {args.batch} x {seq_len} tokens")
        for dtype in ("float32", "bfloat16") if args.dtype == "both" else (args.dtype,):
            results[f"d_model {shape.d_model} {dtype}"] = compare_sides(dtype, width, args)
    write_results(args.json, results)
    return 0


if __name__ == "__main__":
    run_main(main)
