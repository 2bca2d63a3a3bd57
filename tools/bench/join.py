"""Benchmark the joining of shards by several threads, and what a restart of a preprocessing job costs.

    python tools/bench/join.py text.jsonl --tokenizer-model gpt2 --workers 2 --threads 1 2 --repeat 3

The joining is measured alone, on shards of random ids: bytes of tokens a second, as written, hashed, counted
and synced to the disk. A restart is measured with the command: it is killed when the share --at of its pieces
is finished, and run again. The cost is the time of the second run without that of the pieces that were left.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from history import add_history_options, record_result

from megatron.cli import create_parser, positive_int, run_main
from megatron.text.join import ShardJoiner
from megatron.text.preprocess import PIECE_BYTES
from megatron.text.shards import JOURNAL_FILE, PieceResult, ShardFolder
from megatron.text.text_readers import InputPiece

TOOL = Path(__file__).resolve().parents[1] / "preprocess_data_many_cores.py"
PIECE_DOCUMENTS = 4000  # of C4 in a piece
DTYPE = np.dtype("<u2")


def measure_joining(folder: Path, n_threads: int, megabytes: int) -> tuple[float, float, float]:
    """Return wall and CPU seconds of joining `megabytes` of tokens in pieces of 4 MB.

    The third value is the CPU seconds of the thread that places the pieces, which alone does not scale.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shards = ShardFolder(folder / "shards", ("text",))
    shards.folder.mkdir()
    rng, results = np.random.default_rng(0), {}
    ids = (50257 * rng.random(2_000_000) ** 4).astype(DTYPE)  # few ids are most of a text
    lengths = np.full(PIECE_DOCUMENTS, len(ids) // PIECE_DOCUMENTS, "<i4")
    for number in range(megabytes // 4):
        ids.tofile(shards.ids_path(number, "text"))
        lengths.tofile(shards.lengths_path(number, "text"))
        results[number] = PieceResult(PIECE_DOCUMENTS, PIECE_DOCUMENTS, len(ids), 0, ids.nbytes)
    pieces = [InputPiece(Path("-"), 0, 0)] * len(results)
    begun, cpu_begun, thread_begun = time.perf_counter(), time.process_time(), time.thread_time()
    joiner = ShardJoiner(
        pieces, shards, folder / "out", DTYPE, {"append_eod": False}, None, results, n_threads
    )
    with joiner:
        joiner.join_ready()
        joiner.finish([Path("-")], None)
    serial_s = time.thread_time() - thread_begun
    return time.perf_counter() - begun, time.process_time() - cpu_begun, serial_s


def count_done(shards: Path) -> int:
    """Return the number of finished pieces, joined or not."""
    try:
        markers = {int(name[:8]) for name in os.listdir(shards) if name.endswith(".done")}
        journal = shards / JOURNAL_FILE
        n_joined = journal.read_bytes().count(b"\n") if journal.is_file() else 0
    except FileNotFoundError:
        return 0
    return n_joined + sum(number >= n_joined for number in markers)


def run_command(command: Sequence[str], shards: Path, kill_at: int | None = None) -> tuple[float, float, int]:
    """Run the tool; kill it when `kill_at` pieces are finished. Return wall and CPU s, finished pieces."""
    begun, done = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while kill_at is not None and process.poll() is None and done < kill_at:
        done = count_done(shards)
        time.sleep(0.002)
    if kill_at is not None:
        process.kill()
        process.wait()
        return 0.0, 0.0, count_done(shards)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise OSError(f"{' '.join(command)}: exit status {process.returncode}")
    return time.perf_counter() - begun, usage.ru_utime + usage.ru_stime, done


def measure_restart(args: argparse.Namespace, folder: Path) -> tuple[float, float, float]:
    """Return the cost of one restart in wall and CPU seconds, and the share that was left."""
    n_pieces = -(-os.path.getsize(args.source) // PIECE_BYTES)
    costs = []
    for kill_at in (None, int(args.at * n_pieces)):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        command = [sys.executable, str(TOOL), "--input", args.source, "--output-prefix", "x", "--append-eod",
                   "--root", str(folder), "--tokenizer-model", args.tokenizer_model,
                   "--workers", str(args.workers)]  # fmt: skip
        done = run_command(command, folder / ".x.shards", kill_at)[2] if kill_at is not None else 0
        costs.append((*run_command(command, folder / ".x.shards")[:2], 1 - done / n_pieces))
    (whole_s, whole_cpu_s, _), (wall_s, cpu_s, left) = costs
    print(f"  whole {whole_s:.2f} s, {whole_cpu_s:.2f} CPU-s; from {1 - left:.1%} "
          f"{wall_s:.2f} s, {cpu_s:.2f} CPU-s")  # fmt: skip
    return wall_s - left * whole_s, cpu_s - left * whole_cpu_s, left


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument("source", metavar="TEXT.jsonl", help="JSON lines with a key 'text', 100 MB or more")
    add = parser.add_argument_group("measurement").add_argument
    add("--tokenizer-model", default="gpt2", metavar="NAME", help="tokenizer folder or name")
    add("--workers", type=positive_int, default=2, metavar="N", help="workers of the restarted command")
    add("--at", type=float, default=0.97, metavar="SHARE", help="share of the pieces at the kill")
    add("--threads", type=positive_int, nargs="+", default=[1, 2], metavar="N", help="threads of joining")
    add("--megabytes", type=positive_int, default=512, metavar="N", help="tokens to join, in MB")
    add("--repeat", type=positive_int, default=3, metavar="N", help="repetitions; medians are printed")
    add_history_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both, print and record the medians."""
    args = build_parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "job"
        for n_threads in args.threads:
            runs = [measure_joining(folder, n_threads, args.megabytes) for _ in range(args.repeat)]
            rates = [args.megabytes / 1e3 / wall_s for wall_s, _, _ in runs]
            rate = float(np.median(rates))
            _, cpu_s, serial_s = (float(value) for value in np.median(np.array(runs), axis=0))
            print(f"joining, {n_threads} threads: {rate:.2f} GB of tokens/s, "
                  f"{args.megabytes / 1e3 / cpu_s:.2f} GB/CPU-s, "
                f"{args.megabytes / 1e3 / serial_s:.1f} GB/CPU-s of the placing thread")  # fmt: skip
            cell = f"joining {args.megabytes} MB, {n_threads} threads: GB/s"
            record_result(args.history, "join", cell, rate, "GB/s", better="higher", repeats=rates)
        restarts = [measure_restart(args, folder) for _ in range(args.repeat)]
        wall_s, cpu_s, left = (float(value) for value in np.median(np.array(restarts), axis=0))
        size = os.path.getsize(args.source) / 1e6
        print(f"restart of {size:.0f} MB at {1 - left:.0%}: costs {wall_s:.2f} s, {cpu_s:.2f} CPU-s")
        costs = [cost for _, cost, _ in restarts]
        cell = f"restart of {Path(args.source).name}, {size:.1f} MB: CPU-s"
        record_result(args.history, "join", cell, cpu_s, "CPU-s", better="lower", repeats=costs)
    return 0


if __name__ == "__main__":
    run_main(main)
