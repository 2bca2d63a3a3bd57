"""Benchmark training steps on a GPU, cell by cell in order of importance, beside the predicted speed.

    python tools/bench/gpu.py --out gpu_bench --parity          # only the parity checks
    python tools/bench/gpu.py --out gpu_bench                   # measures until --minutes are over
    python tools/bench/gpu.py --device cpu --sizes tiny --steps 2 --out /tmp/tiny

A cell is a size, an objective and at most one setting that differs from the defaults; the other side is
LlamaForCausalLM of transformers, eager and compiled. Each cell or check is a process of its own, which warms
up and is timed. Its record is appended to OUT/cells.jsonl (OUT/parity.jsonl) at once, and the same command
again measures what is missing. OUT/table.md is the table for benchmarks.md. A CPU exercises the bench and
gives no benchmark.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.cli import create_parser, positive_int, report_error, run_main

WARMUP = 12
MIN_LEFT_S = 30.0  # nothing is begun with less time
LIMIT_S = 240.0  # time of one cell or check
N_BLOCKS = 5
HEAD = ("cell", "tokens/s", "MFU", "predicted tokens/s", "predicted MFU", "GiB")


def run_worker(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one cell or check in this process."""
    # cuBLAS reads it when CUDA starts, and is deterministic with it
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch
    from gpu_bench import cells, parity

    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cpu":
        # "aot_eager" traces and splits graphs as on a GPU, but needs no C++ compiler and no minute per cell
        torch.compile = partial(torch.compile, backend="aot_eager")
    if args.parity:
        return parity.list_checks(device)[args.worker]()
    cell = next(cell for cell in cells.list_cells(args.sizes) if cell.name == args.worker)
    try:
        return measure_cell(cell, args, device)
    except cells.SkippedCellError as skipped:
        return {"skipped": str(skipped)}


def measure_cell(cell: Any, args: argparse.Namespace, device: Any) -> dict[str, Any]:
    """Return the record of a cell. Raises SkippedCellError with a reason."""
    import torch
    from gpu_bench import cells

    from megatron.plan.count import flops_per_token_mfu
    from megatron.plan.hardware import find_device

    with cells.use_attention(cell):
        step = cells.build_step(cell, device, args.seq_len, args.accumulate)
        for i in range(min(WARMUP, args.steps)):
            loss = step(i)
        first_loss = float(loss)  # waits: compilation ends before the timed steps begin
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = time_steps(step, args.steps, device)
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    rate = cell.rows * args.seq_len * args.accumulate / statistics.median(seconds)
    record = {"tokens_per_s": rate, "step_s": seconds, "hardware": name, "loss": first_loss}
    record["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    record |= {"attention": cell.attention, "torch": torch.__version__}
    if hardware := find_device(name):
        flops = rate * flops_per_token_mfu(cells.make_model(cell.size), args.seq_len)
        record["mfu"] = flops / (hardware.peak_tflops * 1e12)
    if predicted := cells.predict_cell(cell, name, args.seq_len, args.accumulate):
        record |= {"predicted": predicted.tokens_per_s, "predicted_mfu": predicted.mfu}
    return record


def time_steps(step: Any, n_steps: int, device: Any) -> list[float]:
    """Return the mean seconds of a step in each of several blocks, whose median is robust."""
    import torch

    seconds, n = [], max(1, n_steps // N_BLOCKS)
    for _ in range(N_BLOCKS):
        began = time.perf_counter()
        # the host runs ahead: nothing in a block waits for the device
        for i in range(n):
            step(i)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - began) / n)
    return seconds


def run_all(names: Sequence[str], args: argparse.Namespace, words: Sequence[str]) -> list[dict[str, Any]]:
    """Run each name without a record in a process of its own until the time is over; return all records."""
    path = args.out / ("parity.jsonl" if args.parity else "cells.jsonl")
    args.out.mkdir(parents=True, exist_ok=True)
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    stored = {record["name"]: record for record in map(json.loads, lines) if "failed" not in record}
    deadline = time.monotonic() + 60.0 * args.minutes
    for name in names:
        left = deadline - time.monotonic()
        if name in stored:
            continue
        if left < MIN_LEFT_S:
            print(f"{name}: not run, {max(left, 0):.0f} s are left", flush=True)
            continue
        command = [sys.executable, __file__, *words, "--worker", name]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, timeout=min(left, LIMIT_S), check=True
            )
            record = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            record = {"failed": str(error).rpartition("--worker ")[2]}
        stored[name] = {"name": name, **record}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(stored[name]) + "\n")
        print(f"{name:<48} {describe_record(record)}", flush=True)
    return [stored[name] for name in names if name in stored]


def describe_record(record: dict[str, Any]) -> str:
    """Return the outcome of a cell or a check in one line."""
    if "tokens_per_s" not in record:
        return " ".join(f"{key}: {value}" for key, value in record.items())
    return f"{record['tokens_per_s']:,.0f} tokens/s"


def format_markdown(records: Sequence[dict[str, Any]], seq_len: int) -> str:
    """Return the table for benchmarks.md, and the ratios to the other sides of the same run."""
    lines = [f"| {' | '.join(HEAD)} |", f"| {' | '.join('---' for _ in HEAD)} |"]
    keys = ("tokens_per_s", "mfu", "predicted", "predicted_mfu", "memory_gib")
    measured = {record["name"]: record for record in records if "tokens_per_s" in record}
    for name, record in measured.items():
        values = (record.get(key) for key in keys)
        cells = ("n/a" if x is None else f"{x:.3f}" if x < 10 else f"{x:,.0f}" for x in values)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for name, record in measured.items():
        side, size, objective, _ = name.split("/")
        base = measured.get(f"ours/{size}/{objective}/default")
        if side != "ours" and base is not None:
            ratio = base["tokens_per_s"] / record["tokens_per_s"]
            lines.append(f"\nours / {side}, {size} {objective}: {ratio:.2f} times")
    for record in list(measured.values())[:1]:
        lines.append(f"\n{record['hardware']}, torch {record['torch']}, S = {seq_len}")
    return "\n".join(lines) + "\n"


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("cells").add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: exercises the bench, not a benchmark")
    add("--sizes", nargs="+", metavar="SIZE", help="only these sizes; tiny: every kind of cell, very small")
    add("--only", nargs="+", metavar="WORD", help="only cells whose name contains one of these words")
    add("--seq-len", type=positive_int, metavar="N", help="positions of a sample; default: 2048, tiny: 32")
    add("--accumulate", type=positive_int, default=2, metavar="N", help="microbatches per step")
    add("--steps", type=positive_int, default=50, metavar="N", help="timed steps of a cell")
    add = parser.add_argument_group("time and output").add_argument
    add("--minutes", type=float, default=8.0, metavar="M", help="time limit")
    add("--out", type=Path, default=Path("gpu_bench"), metavar="FOLDER", help="folder of the results")
    add("--parity", action="store_true", help="compare results with a CPU in float64 instead of measuring")
    add("--worker", metavar="NAME", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks or measure the cells, and print where the results are."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(words)
    args.seq_len = args.seq_len or (32 if args.sizes == ["tiny"] else 2048)
    if args.worker:
        print("\n" + json.dumps(run_worker(args)))
        return 0
    import torch
    from gpu_bench import cells, parity

    if args.device == "cuda" and not torch.cuda.is_available():
        return report_error(ValueError("--device: got cuda, but torch sees no GPU. Set --device cpu."))
    names = [cell.name for cell in cells.list_cells(args.sizes)]
    if args.parity:
        names = list(parity.list_checks(torch.device(args.device)))
    names = [name for name in names if not args.only or any(word in name for word in args.only)]
    records = run_all(names, args, words)
    if not args.parity:
        (args.out / "table.md").write_text(format_markdown(records, args.seq_len), encoding="utf-8")
    failed = [r["name"] for r in records if "failed" in r or r.get("status") == parity.FAILED]
    print(f"results: {args.out}, {len(records)} of {len(names)}, failed: {', '.join(failed) or 'none'}")
    return int(bool(failed) or len(records) < len(names))


if __name__ == "__main__":
    run_main(main)
