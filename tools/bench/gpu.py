"""Benchmark training steps on a GPU, cell by cell in order of importance, beside the predicted speed.

    python tools/bench/gpu.py --out gpu_bench                   # measures until --minutes are over
    python tools/bench/gpu.py --out gpu_bench --parity          # then the next cells, and the parity checks
    python tools/bench/gpu.py --predict --hardware H200         # predictions only, without a GPU
    python tools/bench/gpu.py --device cpu --sizes tiny --steps 2 --out /tmp/tiny

A cell is a size, an objective and at most one setting that differs from the defaults; other sides are
LlamaForCausalLM of transformers and a model in the style of nanoGPT, eager and compiled, from the same run.
Each cell warms up, is timed for --steps steps by events of the device, and is then profiled. Its record is
appended to OUT/cells.jsonl at once, so that a time limit loses at most one cell; the same command again
measures the cells that are missing. OUT/table.md is the table for benchmarks.md. Tokens are random, inputs
are copied from pinned memory as in training, a step has --accumulate microbatches. A CPU exercises the bench
and gives no benchmark: compiled cells are traced there, but no code is generated.
"""

import argparse
import json
import os
import platform
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.bench_history import add_history_options, record_result
from megatron.command import create_parser, positive_int, report_error, run_main
from megatron.plan.hardware import find_device

CELLS, TABLE, PARITY = "cells.jsonl", "table.md", "parity.json"
WARMUP, STEPS = 12, 50
COMPILE_S = 60.0  # expected time of compiling and starting a cell
CELL_TIMEOUT_S = 240.0
TOP_KERNELS = 8


def measure_cell(cell: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one cell in this process. Raises SkippedCellError with a reason."""
    import torch
    from gpu_bench import cells

    from megatron.plan.count import flops_per_token_executed, flops_per_token_mfu, n_params

    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    cells.free_memory(device)
    model = cells.make_model(cell.size)
    with cells.use_kernels(cell):
        began = time.perf_counter()
        step = cells.build_step(cell, device, args.seq_len, args.accumulate)
        for i in range(min(WARMUP, args.steps)):
            loss = step(i)
        first_loss = float(loss)  # waits: compilation ends before the timed steps begin
        startup_s = time.perf_counter() - began
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step_s = time_steps(step, args.steps, device)
        kernels, n_kernels = profile_kernels(step, device)
    tokens = cell.rows * args.seq_len * args.accumulate
    rate = tokens / median(step_s)
    causal = cell.objective == cells.AR
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    hardware = find_device(name)
    executed = flops_per_token_executed(model, args.seq_len, causal, 1.0 if causal else 0.5)
    record = {
        "cell": cell.name,
        "value": rate,
        "unit": "tokens/s",
        "better": "higher",
        "repeats": [tokens / seconds for seconds in step_s],
        "step_ms": 1e3 * median(step_s),
        "tflops": rate * flops_per_token_mfu(model, args.seq_len) / 1e12,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else None,
        "n_params": n_params(model),
        "tokens_per_step": tokens,
        "startup_s": startup_s,
        "loss": first_loss,
        "kernels": kernels,
        "kernels_per_step": n_kernels,
        "settings": {**cell.dist, "attention": cell.attention, "rows": cell.rows, "steps": args.steps},
        "hardware": name,
        "torch": torch.__version__,
    }
    if hardware is not None:
        peak = hardware.peak_tflops * 1e12
        record["mfu"] = record["tflops"] * 1e12 / peak
        record["mfu_executed"] = rate * executed / peak
    return record


def median(values: Sequence[float]) -> float:
    """Return the middle value; of an even number the upper one of the two."""
    return sorted(values)[len(values) // 2]


def time_steps(step: Any, n_steps: int, device: Any) -> list[float]:
    """Return the seconds of each step: by events on a GPU, by the host's clock on a CPU."""
    import torch

    if device.type != "cuda":
        seconds = []
        for i in range(n_steps):
            began = time.perf_counter()
            step(i)
            seconds.append(time.perf_counter() - began)
        return seconds
    # The host runs ahead: nothing in the loop waits for the device. Differences of consecutive events include
    # every gap in which the device has no work.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(n_steps + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for i in range(n_steps):
        step(i)
        events[i + 1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:], strict=False)]


def profile_kernels(step: Any, device: Any, n_steps: int = 3) -> tuple[list[dict[str, Any]], float]:
    """Return the kernels with the most time, as shares of all, and the number of launches of a step."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    n_steps = n_steps if on_gpu else 1
    with profile(activities=activities) as profiler:
        for i in range(n_steps):
            step(i)
        if on_gpu:
            torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profiler.key_averages():
        # on a GPU only events of the device itself, not the operators that launched them
        if on_gpu and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        if getattr(event, "is_user_annotation", False):
            continue  # a range around kernels that are listed themselves
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        times[event.key] = [us, event.count]
    whole = sum(us for us, _ in times.values()) or 1.0
    top = sorted(times.items(), key=lambda item: -item[1][0])[:TOP_KERNELS]
    listed = [{"name": name[:96], "share": us / whole, "calls": count / n_steps} for name, (us, count) in top]
    return listed, sum(count for _, count in times.values()) / n_steps


def run_worker(args: argparse.Namespace) -> int:
    """Measure the cells named on standard input, and print a line of JSON for each."""
    import torch
    from gpu_bench import cells

    # libraries may print to standard output, which is the protocol's: they get standard error instead
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if args.device == "cpu":
        # "aot_eager" traces and splits graphs as on a GPU, but needs no C++ compiler and no minute per cell
        torch.compile = partial(torch.compile, backend="aot_eager")
    by_name = {cell.name: cell for cell in cells.list_cells(args.sizes)}
    for line in sys.stdin:
        cell = by_name[line.rstrip("\n")]
        try:
            record = measure_cell(cell, args)
        except cells.SkippedCellError as skipped:
            record = {"cell": cell.name, "skipped": str(skipped)}
        # the bench reports any failure of a cell and measures the next
        except Exception as error:
            kind = "out of memory" if isinstance(error, torch.OutOfMemoryError) else type(error).__name__
            record = {"cell": cell.name, "failed": f"{kind}: {str(error)[:400]}"}
        print(json.dumps(record), file=protocol, flush=True)
    return 0


class Worker:
    """The process that measures cells. It is replaced after a crash or a cell that exceeds its time."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = [sys.executable, __file__, *argv, "--worker"]
        self.process: subprocess.Popen[str] | None = None

    def measure(self, name: str, timeout_s: float) -> dict[str, Any]:
        """Return the record of a cell."""
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                self.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
        process = self.process
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        process.stdin.write(name + "\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                self.stop()
                return {"cell": name, "failed": f"exceeded {timeout_s:.0f} s"}
        line = process.stdout.readline()
        if not line:
            status = process.wait()
            return {"cell": name, "failed": f"the process ended with status {status}"}
        return json.loads(line)

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def read_records(out: Path) -> dict[str, dict[str, Any]]:
    """Return the records of earlier commands by cell; failed cells are measured again."""
    path = out / CELLS
    if not path.is_file():
        return {}
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return {record["cell"]: record for record in records if "failed" not in record}


def run_cells(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Measure the cells that have no record until the time is over; append each record at once."""
    from gpu_bench import cells
    from gpu_bench.table import describe_record, format_markdown, predict_cell

    args.out.mkdir(parents=True, exist_ok=True)
    records, worker = read_records(args.out), Worker(argv)
    deadline = time.monotonic() + 60.0 * args.minutes
    try:
        for cell in cells.list_cells(args.sizes):
            if cell.name in records or (args.only and not any(word in cell.name for word in args.only)):
                continue
            left = deadline - time.monotonic()
            if left < expect_seconds(cell, args):
                print(f"{cell.name}: not measured, {left:.0f} s are left", flush=True)
                continue
            record = worker.measure(cell.name, min(left, CELL_TIMEOUT_S))
            expected = predict_cell(cell, record.get("hardware", ""), args.seq_len, args.accumulate)
            if expected is not None:
                record |= {"predicted": expected.tokens_per_s, "predicted_mfu": expected.mfu}
            records[cell.name] = record
            with (args.out / CELLS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            print(describe_record(record), flush=True)
            (args.out / TABLE).write_text(
                format_markdown(records, args.sizes, args.seq_len), encoding="utf-8"
            )
            store_in_history(args, record)
    finally:
        worker.stop()
    return records


def expect_seconds(cell: Any, args: argparse.Namespace) -> float:
    """Return a rough time of a cell, from the prediction for an H100; little on a CPU."""
    if args.device != "cuda":
        return 0.0
    from gpu_bench.table import predict_cell

    expected = predict_cell(cell, "H100", args.seq_len, args.accumulate)
    assert expected is not None, "the H100 is listed"
    steps = args.steps + min(WARMUP, args.steps) + 3
    compile_s = COMPILE_S if cell.predicted.compiled else COMPILE_S / 4
    return compile_s + steps * cell.rows * args.seq_len * args.accumulate * expected.seconds_per_token


def store_in_history(args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Append a record to the history of all benches."""
    if "value" not in record:
        return
    names = ("mfu", "mfu_executed", "memory_gib", "predicted", "kernels_per_step", "hardware")
    details = {name: record[name] for name in names if record.get(name) is not None}
    record_result(
        args.history,
        "gpu",
        record["cell"],
        record["value"],
        record["unit"],
        better=record["better"],
        repeats=record["repeats"],
        details=details,
    )


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("cells").add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: exercises the bench, not a benchmark")
    add("--sizes", nargs="+", metavar="SIZE", help="only these sizes; tiny: every kind of cell, very small")
    add("--only", nargs="+", metavar="WORD", help="only cells whose name contains one of these words")
    add("--seq-len", type=positive_int, metavar="N", help="positions of a sample; default: 2048, tiny: 32")
    add("--accumulate", type=positive_int, default=2, metavar="N", help="microbatches per step")
    add("--steps", type=positive_int, default=STEPS, metavar="N", help="timed steps of a cell")
    add = parser.add_argument_group("time and output").add_argument
    add("--minutes", type=float, default=9.0, metavar="M", help="time limit of this command")
    add("--out", type=Path, default=Path("gpu_bench"), metavar="FOLDER", help="folder of the results")
    add("--parity", action="store_true", help="also compare results with a CPU in float64")
    add("--no-cells", action="store_true", help="measure no cell, for example only --parity")
    add_history_options(parser)
    add = parser.add_argument_group("prediction").add_argument
    add("--predict", action="store_true", help="print the predicted speed of every cell and exit")
    add("--hardware", default="H200", metavar="GPU", help="GPU of --predict")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cells, and print where the results are."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(words)
    args.seq_len = args.seq_len or (32 if args.sizes == ["tiny"] else 2048)
    if args.worker:
        return run_worker(args)
    if args.predict:
        from gpu_bench.table import print_predictions

        try:
            print_predictions(args.hardware, args.sizes, args.seq_len, args.accumulate)
        except ValueError as error:
            return report_error(error)
        return 0
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            return report_error(ValueError("--device: got cuda, but torch sees no GPU. Set --device cpu."))
    records = {} if args.no_cells else run_cells(args, words)
    status = 0
    if args.parity:
        from gpu_bench import parity

        args.out.mkdir(parents=True, exist_ok=True)
        checks = parity.run_checks(args.device)
        (args.out / PARITY).write_text(json.dumps(checks, indent=1) + "\n", encoding="utf-8")
        for check in checks:
            print(parity.describe_check(check))
        status = int(any(check["status"] == "failed" for check in checks))
    failed = [name for name, record in records.items() if "failed" in record]
    print(f"results: {args.out}, {len(records)} cells" + (f", failed: {', '.join(failed)}" if failed else ""))
    return status or int(bool(failed))


if __name__ == "__main__":
    run_main(main)
