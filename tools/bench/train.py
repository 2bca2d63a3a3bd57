"""Benchmark training on the CPU: our torch engine against transformers' LlamaForCausalLM with torch's AdamW.

    python tools/bench/train.py
    python tools/bench/train.py --dtype float32 --rounds 7 --threads 2 --compile
    python tools/bench/train.py --sizes 16 48 96        # only ours, small models (small_models.py)

Both sides train the same Llama-shaped model with the same weights, tokens, optimizer settings and clipping:
ours with the code of tools/pretrain.py, theirs as in its documentation, with SDPA attention and products
under autocast. Both are eager; --compile compiles our blocks (dist.compile). Each side is a separate process,
to measure its peak memory; the sides alternate, so that other load on the machine affects both. The ratio is
that of the medians; `CPU` is the ratio of CPU seconds. GFLOP/s count the operations of a step, also as a
share of the machine's float32 GEMM rate.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from history import add_history_options, record_result

from megatron.checkpoint.convert.names import LLAMA, export_names
from megatron.cli import create_parser, positive_int, run_main
from megatron.config.schema import DistConfig, ModelConfig, OptimConfig
from megatron.engine.torch.torch_native import TorchEngine
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from megatron.objective.autoregressive import Autoregressive
from megatron.parallel.world import World, open_world
from megatron.plan.count import flops_per_token_executed, n_params

SHAPE = ModelConfig(d_model=256, d_ff=640, d_head=64, n_heads=4, n_layers=8, n_tokens=16000, vocab_rows=16384)
SEQ = 512
OPTIM = OptimConfig(lr=1e-3)

Step = Callable[[np.ndarray], float]  # tokens [B, S + 1] -> loss


def build_our_step(dtype: str, world: World, compiled: bool) -> Step:
    """Return a function that runs one step of the torch engine."""
    model = Gpt(SHAPE)
    init_weights(model, seed=0)
    engine = TorchEngine(
        model,
        causal=True,
        dist=DistConfig(cpu_only=True, dtype=dtype, compile=compiled),
        optim=OPTIM,
        world=world,
    )
    objective = Autoregressive()

    def step(tokens: np.ndarray) -> float:
        report = engine.step([objective.corrupt(tokens, np.arange(len(tokens)))], OPTIM.lr)
        return float(report.loss_sum) / report.count

    return step


def build_their_step(dtype: str) -> Step:
    """Return a function that runs one step of LlamaForCausalLM with the same weights."""
    from gpu_bench.baselines import build_llama  # found only when this file is the command

    model = build_llama(SHAPE, SEQ)
    ours = Gpt(SHAPE)
    init_weights(ours, seed=0)
    # the head is tied to the embedding, but a strict load requires its name in the state
    state = export_names(LLAMA, ours.state_dict(), ours.config)
    model.load_state_dict({"lm_head.weight": ours.embedding.weight} | state)
    del ours, state
    # decay for matrices only, as ours: a decay of the norms' gains would be another optimizer
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": OPTIM.weight_decay},
            {"params": gains, "weight_decay": 0.0},
        ],
        lr=OPTIM.lr,
        betas=(OPTIM.beta1, OPTIM.beta2),
        eps=OPTIM.eps,
    )
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
    if args.side == "theirs":
        torch.set_num_threads(args.threads)
        run_rounds(build_their_step(args.dtype), args.batch)
        return
    with open_world(DistConfig(cpu_only=True), args.threads) as world:
        run_rounds(build_our_step(args.dtype, world, args.compile), args.batch)


def run_rounds(step: Step, batch: int) -> None:
    """Run n steps for each line `n` of standard input, and print their cost as a line of JSON."""
    rng = np.random.default_rng(0)
    # Protocol: one line "n" in, one line of JSON out. A side waits for its turn in the read, and the
    # compiled code and the optimizer's state remain between rounds.
    for line in sys.stdin:
        losses = []
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            # Zipf-distributed, so that the model can learn the frequencies
            # drawn within the time of both sides, from the same seed: the losses are comparable
            tokens = np.minimum(rng.zipf(1.3, (batch, SEQ + 1)), SHAPE.n_tokens - 1)
            losses.append(step(tokens))
        record = {
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "losses": losses,
            # Linux reports KiB
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        print(json.dumps(record), flush=True)


def compare_sides(dtype: str, args: argparse.Namespace) -> None:
    """Run both sides alternately, and print their figures and the ratios."""
    sides = {
        side: subprocess.Popen(
            [sys.executable, __file__, "--side", side, "--dtype", dtype]
            + ["--batch", str(args.batch), "--threads", str(args.threads)]
            + ["--compile"] * args.compile,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for side in ("ours", "theirs")
    }
    try:
        records: dict[str, list[dict]] = {side: [] for side in sides}
        for turn in range(args.rounds + 1):  # the first round warms up and compiles, and is not timed
            for side, process in sides.items():
                assert process.stdin is not None and process.stdout is not None, "stdin and stdout are pipes"
                process.stdin.write(f"{2 if turn == 0 else args.steps}\n")
                process.stdin.flush()
                line = process.stdout.readline()
                if not line:
                    raise OSError(f"{side}: the process ended. Its error message is above.")
                records[side].append(json.loads(line))
    # a side reads its standard input without end, so it must be killed
    finally:
        for process in sides.values():
            process.kill()
            process.wait()
    print_comparison(dtype, args, records)
    record_comparison(dtype, args, records)


def print_comparison(dtype: str, args: argparse.Namespace, records: dict[str, list[dict]]) -> None:
    """Print the medians over the timed rounds."""
    # [1:] skips the untimed round
    tokens = args.batch * SEQ * args.steps
    rate = {
        side: {
            clock: statistics.median(tokens / record[clock] for record in rounds[1:])
            for clock in ("wall_s", "cpu_s")
        }
        for side, rounds in records.items()
    }
    peak = {side: rounds[-1]["peak_mib"] for side, rounds in records.items()}
    for side, by in rate.items():
        print(
            f"{dtype:9} {side:7} {by['wall_s']:8,.0f} tokens/s   {by['cpu_s']:8,.0f} per CPU-second   "
            f"peak {peak[side]:6,.0f} MiB   loss {records[side][-1]['losses'][-1]:.4f}"
        )
    ours, theirs = rate["ours"], rate["theirs"]
    import small_models  # in the same folder

    # FLOPs per token x tokens per second; the product has the same threads, so the share is comparable
    flops = flops_per_token_executed(SHAPE, SEQ, True, 1.0) * ours["wall_s"]
    torch.set_num_threads(args.threads)
    products = small_models.gemm_rate(1024)
    share = f"{flops / products:.0%} of {products / 1e9:,.0f} in float32"
    print(f"{dtype:9} ours    {flops / 1e9:8,.0f} GFLOP/s, {share}")
    print(
        f"{dtype:9} ratio   {ours['wall_s'] / theirs['wall_s']:8.2f}            "
        f"{ours['cpu_s'] / theirs['cpu_s']:8.2f} CPU              memory {peak['ours'] / peak['theirs']:.2f}"
    )


def record_comparison(dtype: str, args: argparse.Namespace, records: dict[str, list[dict]]) -> None:
    """Store our speeds, the ratio to the other side, and our memory."""
    ours, theirs = records["ours"][1:], records["theirs"][1:]
    tokens = args.batch * SEQ * args.steps
    compiled = ", compiled" if args.compile else ""
    cell = f"{dtype}, {args.batch} x {SEQ} tokens, {args.threads} threads{compiled}"
    figures = {
        "ours": ("tokens/s", [tokens / record["wall_s"] for record in ours]),
        "ours, CPU": ("tokens/CPU-s", [tokens / record["cpu_s"] for record in ours]),
        "times transformers": ("", [b["wall_s"] / a["wall_s"] for a, b in zip(ours, theirs, strict=True)]),
    }
    for name, (unit, rates) in figures.items():
        value = statistics.median(rates)
        record_result(args.history, "train", f"{cell}: {name}", value, unit, better="higher", repeats=rates)
    record_result(args.history, "train", f"{cell}: memory", ours[-1]["peak_mib"], "MiB", better="lower")


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    threads = torch.get_num_threads()
    add = parser.add_argument_group("model and batches").add_argument
    add(
        "--dtype",
        choices=("float32", "bfloat16", "both"),
        default="both",
        help="dtype of the matrix products",
    )
    add("--batch", type=positive_int, default=4, metavar="N", help=f"samples of {SEQ} tokens per step")
    add("--compile", action="store_true", help="compile our blocks in the untimed round")
    add = parser.add_argument_group("measurement").add_argument
    add("--rounds", type=positive_int, default=5, metavar="N", help="timed rounds of each side")
    add("--steps", type=positive_int, default=4, metavar="N", help="steps per round")
    add("--threads", type=positive_int, default=threads, metavar="N", help="CPU threads of each side")
    add(
        "--sizes",
        type=positive_int,
        nargs="+",
        metavar="D",
        help="time our steps of small models with these d_model instead",
    )
    add("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    add_history_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the sides, and print the figures."""
    args = build_parser().parse_args(argv)
    if args.side:
        run_side(args)
        return 0
    import small_models  # in the same folder

    if args.sizes:
        history = ["--history", str(args.history)] if args.history else ["--no-history"]
        widths = ["--widths", *map(str, args.sizes)]
        return small_models.main([*widths, "--batch", str(args.batch), *history])
    print(small_models.describe_machine())
    print(f"{n_params(SHAPE):,} parameters, {args.batch} x {SEQ} tokens per step, {args.threads} threads")
    for dtype in ("float32", "bfloat16") if args.dtype == "both" else (args.dtype,):
        compare_sides(dtype, args)
    return 0


if __name__ == "__main__":
    run_main(main)
