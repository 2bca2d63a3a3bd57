"""Benchmark training steps on a GPU, cell by cell in order of importance, beside the predicted speed.

    python tools/bench/gpu.py --out gpu_bench --no-cells --parity  # the parity checks
    python tools/bench/gpu.py --out gpu_bench                   # measures until --minutes are over
    python tools/bench/gpu.py --predict --hardware H200         # predictions only, without a GPU
    python tools/bench/gpu.py --device cpu --sizes tiny --steps 2 --out /tmp/tiny

A cell is a size, an objective and at most one setting that differs from the defaults; other sides are
LlamaForCausalLM of transformers and a model in the style of nanoGPT, eager and compiled, from the same run.
Each cell warms up, is timed for --steps steps by events of the device, and is then profiled. Its record is
appended to OUT/cells.jsonl at once, so that a time limit loses at most one cell; the same command again
measures the cells that are missing. OUT/table.md is the table for benchmarks.md; OUT/parity.json is written
after each check. Tokens are random, inputs are copied from pinned memory as in training, a step has
--accumulate microbatches. A CPU exercises the bench and gives no benchmark: compiled cells are traced there,
but no code is generated.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from history import add_history_options, record_result

from megatron.cli import create_parser, positive_int, report_error, run_main

CELLS, TABLE, PARITY = "cells.jsonl", "table.md", "parity.json"
STEPS = 50
COMPILE_S = 60.0  # expected time of compiling and starting a cell
CELL_TIMEOUT_S, CHECK_TIMEOUT_S = 240.0, 150.0


def run_worker(args: argparse.Namespace) -> None:
    """Measure the cells or checks named on standard input; one line of JSON for each on standard output."""
    if args.worker == "parity":
        # cuBLAS reads it when CUDA starts, and is deterministic with it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch
    from gpu_bench import cells, parity
    from gpu_bench.measure import measure_cell
    from gpu_bench.worker import serve

    from megatron.parallel.world import use_expandable_segments

    use_expandable_segments()
    if args.device == "cpu":
        # "aot_eager" traces and splits graphs as on a GPU, but needs no C++ compiler and no minute per cell
        torch.compile = partial(torch.compile, backend="aot_eager")
    if args.worker == "parity":
        device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
        checks = parity.list_checks(device)
        serve(lambda name: parity.run_check(name, checks[name], device))
        return
    by_name = {cell.name: cell for cell in cells.list_cells(args.sizes)}

    def measure(name: str) -> dict[str, Any]:
        try:
            return measure_cell(by_name[name], args)
        except cells.SkippedCellError as skipped:
            return {"cell": name, "skipped": str(skipped)}

    serve(measure)


def start_worker(argv: Sequence[str], kind: str) -> Any:
    """Return the process that measures `cells` or checks `parity`; it starts with the first name."""
    from gpu_bench.worker import Worker

    return Worker([sys.executable, __file__, *argv, "--worker", kind])


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
    records, worker = read_records(args.out), start_worker(argv, "cells")
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


def run_parity(args: argparse.Namespace, argv: Sequence[str]) -> list[dict[str, Any]]:
    """Run the parity checks until the time is over; write and print the result of each at once."""
    import torch
    from gpu_bench import parity

    args.out.mkdir(parents=True, exist_ok=True)
    worker = start_worker(argv, "parity")

    def report(checks: list[dict[str, Any]]) -> None:
        (args.out / PARITY).write_text(json.dumps(checks, indent=1) + "\n", encoding="utf-8")
        print(parity.describe_check(checks[-1]), flush=True)

    names = list(parity.list_checks(torch.device(args.device)))
    try:
        return parity.run_checks(
            names, worker.measure, report, minutes=args.minutes, timeout_s=CHECK_TIMEOUT_S
        )
    finally:
        worker.stop()


def expect_seconds(cell: Any, args: argparse.Namespace) -> float:
    """Return a rough time of a cell, from the prediction for an H100; little on a CPU."""
    if args.device != "cuda":
        return 0.0
    from gpu_bench.measure import WARMUP
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
    names = ("mfu", "mfu_executed", "memory_gib", "memory_kind", "predicted", "kernels_per_step", "hardware")
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
    add("--minutes", type=float, default=8.0, metavar="M", help="time limit of the checks, and of the cells")
    add("--out", type=Path, default=Path("gpu_bench"), metavar="FOLDER", help="folder of the results")
    add("--parity", action="store_true", help="also compare results with a CPU in float64")
    add("--no-cells", action="store_true", help="measure no cell, for example only --parity")
    add_history_options(parser)
    add = parser.add_argument_group("prediction").add_argument
    add("--predict", action="store_true", help="print the predicted speed of every cell and exit")
    add("--hardware", default="H200", metavar="GPU", help="GPU of --predict")
    add("--worker", choices=("cells", "parity"), help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cells, and print where the results are."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(words)
    args.seq_len = args.seq_len or (32 if args.sizes == ["tiny"] else 2048)
    if args.worker:
        run_worker(args)
        return 0
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
    checks = run_parity(args, words) if args.parity else []
    wrong = [check["name"] for check in checks if check["status"] not in ("passed", "skipped")]
    records = {} if args.no_cells else run_cells(args, words)
    failed = [name for name, record in records.items() if "failed" in record]
    failed += wrong
    print(
        f"results: {args.out}, {len(checks)} checks, {len(records)} cells"
        + (f", failed: {', '.join(failed)}" if failed else "")
    )
    return int(bool(failed))


if __name__ == "__main__":
    run_main(main)
