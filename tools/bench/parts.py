"""Benchmark a dataset of many parts: write the list, open it, read samples, and their memory.

    python tools/bench/parts.py
    python tools/bench/parts.py --parts 1024 --documents 1e5 1e7 365e6

The datasets are simulated. A part has documents of log-normal lengths, with the mean of C4 in GPT-2 tokens
(478.6), and a sparse .bin; all parts have the same lengths. The index of the whole is real: 20 bytes per
document. "one file" is the same index over one sparse .bin. Each measurement is a separate process.

Bytes a document are the peak growth of the resident set after the imports until the first sample can be read.
Samples are measured in CPU time: cold ones the first time (the process maps their part and pages), warm ones
on a second pass. The pages of the .bin files that they map are page cache, and are counted separately.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from history import add_history_options, record_result

from megatron.cli import create_parser, positive_int, run_main
from megatron.data import open_dataset
from megatron.data.indexed import DTYPE_CODES
from megatron.data.megatron_order import MegatronSamples
from megatron.data.samples import Samples
from megatron.data.sidecar import HEADER, MAGIC, PARTS_INDEX_SUFFIX, VERSION

TOKENS_PER_DOCUMENT = 478.6
SEED = 1234
READS = 5000
BATCH = 32  # samples of a read, as training reads them
ACTIONS = ("write", "parts", "one file", "parts, Megatron's order", "one file, Megatron's order")


def write_part(prefix: Path, n_documents: int) -> int:
    """Write the index of a part, its sidecar and a sparse .bin; return its tokens."""
    dtype = np.dtype("<u2")
    lengths = np.random.default_rng(0).lognormal(0, 1, n_documents)
    lengths = np.maximum(1, lengths * (TOKENS_PER_DOCUMENT / lengths.mean())).astype("<i4")
    ends = np.cumsum(lengths, dtype="<i8")
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, DTYPE_CODES[dtype], n_documents, n_documents + 1))
        for array in (lengths, (ends - lengths) * 2, np.arange(n_documents + 1, dtype="<i8")):
            file.write(array.data)
    n_tokens = int(ends[-1])
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(n_tokens * dtype.itemsize)
    sidecar = {"dtype": "uint16", "documents": n_documents, "tokens": n_tokens, "append_eod": False}
    sums = {"bin": "simulated", "idx": "simulated"}
    tokenizer = {"sha256": "simulated", "n_tokens": 50257}
    Path(f"{prefix}.json").write_text(json.dumps(sidecar | {"sha256": sums, "tokenizer": tokenizer}))
    return n_tokens


def simulate_parts(folder: Path, n_parts: int, n_documents: int) -> None:
    """Write the parts. All but the first are links to its index and sidecar, with a .bin of their own."""
    first = folder / "part-0"
    n_bytes = 2 * write_part(first, max(1, n_documents // n_parts))
    for number in range(1, n_parts):
        for suffix in (".idx", ".json"):
            Path(f"{folder}/part-{number}{suffix}").hardlink_to(f"{first}{suffix}")
        with Path(f"{folder}/part-{number}.bin").open("wb") as file:
            file.truncate(n_bytes)


def link_single_file(folder: Path) -> None:
    """Link the index of the parts as that of one dataset with a sparse .bin."""
    Path(f"{folder}/whole.idx").hardlink_to(f"{folder}/all{PARTS_INDEX_SUFFIX}")
    with Path(f"{folder}/whole.bin").open("wb") as file:
        file.truncate(2 * open_dataset(folder / "all").n_tokens)


def measure(action: str, folder: Path, n_parts: int, seq_len: int) -> dict[str, float]:
    """Run one action in this process; return its figures."""
    if action == "write":
        from megatron.text.write_parts import write_parts_list

        before, start = read_memory_bytes(), time.perf_counter()
        result = write_parts_list(
            [f"{folder}/part-{i}" for i in range(n_parts)], folder / "all", overwrite=True
        )
        grown = read_memory_bytes("VmHWM") - before
        return {"write_s": time.perf_counter() - start, "bytes_per_document": grown / result.n_documents}
    before, start = read_memory_bytes(), time.perf_counter()
    tokens = open_dataset(folder / ("whole" if "one file" in action else "all"))
    opened_s = time.perf_counter() - start
    n_windows = (tokens.n_tokens - 1) // seq_len
    samples = (
        MegatronSamples(tokens, seq_len, SEED, n_windows)
        if "order" in action
        else Samples(tokens, seq_len, SEED)
    )
    samples.sample_windows(np.array([n_windows - 1]))
    ready_s = time.perf_counter() - start
    peak = read_memory_bytes("VmHWM") - before
    numbers = np.random.default_rng(1).integers(0, n_windows, READS)
    us = []
    for _ in range(3):
        begin = time.process_time()
        for first in range(0, READS, BATCH):
            samples.take(numbers[first : first + BATCH])
        us.append((time.process_time() - begin) / READS * 1e6)
    return {
        "open_s": opened_s, "ready_s": ready_s, "cold_us": us[0], "warm_us": min(us[1:]),
        "bytes_per_document": peak / tokens.n_documents,
        "maps_mb": (read_memory_bytes("RssFile") + read_memory_bytes("RssShmem")) / 1e6,
        "peak_mb": read_memory_bytes("VmHWM") / 1e6, "files": float(len(os.listdir("/proc/self/fd"))),
    }  # fmt: skip


def read_memory_bytes(field: str = "VmRSS") -> int:
    """Return VmRSS, its peak VmHWM, or its part RssFile, of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def run_action(action: str, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Measure an action in processes; return the median of each figure. Raise OSError if one fails."""
    words = [sys.executable, __file__, "--action", action, "--folder", str(folder)]
    words += ["--parts", str(args.parts), "--seq-len", str(args.seq_len)]
    alone = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # threads that spin after the import are CPU time
    records: list[dict[str, float]] = []
    for _ in range(args.repeat if action != "write" else 1):
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=alone)
        if done.returncode:
            raise OSError(f"{action}: {done.stderr.strip()}")
        records.append(json.loads(done.stdout))
    return {name: statistics.median(record[name] for record in records) for name in records[0]}


def format_figures(action: str, cost: dict[str, float]) -> str:
    """Format one line of the output."""
    if action == "write":
        memory = f"{cost['bytes_per_document']:.1f} bytes a document"
        return f"  {'write the list':26} {cost['write_s']:6.2f} s   {memory}"
    return (
        f"  {action:26} open {cost['open_s']:6.3f} s, ready {cost['ready_s']:6.2f} s   sample cold "
        f"{cost['cold_us']:5.1f}, warm {cost['warm_us']:5.1f} us   bytes a document "
        f"{cost['bytes_per_document']:5.1f}   maps {cost['maps_mb']:5.0f}, peak {cost['peak_mb']:5.0f} MB   "
        f"{cost['files']:.0f} open files"
    )


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("datasets").add_argument
    add("--parts", type=positive_int, default=1024, metavar="N", help="parts")
    add(
        "--documents",
        type=lambda word: int(float(word)),
        nargs="+",
        default=[100_000, 10_000_000],
        metavar="N",
        help="documents of all parts together, one size after another; 365e6 requires 8 GB of disk",
    )
    add("--seq-len", type=positive_int, default=2048, metavar="N", help="positions per sample")
    add("--folder", type=Path, metavar="DIR", help="folder of the datasets; default: a temporary one")
    add = parser.add_argument_group("measurement").add_argument
    add(
        "--repeat",
        type=positive_int,
        default=3,
        metavar="N",
        help="processes per action; medians are printed",
    )
    add("--action", choices=ACTIONS, metavar="NAME", help=argparse.SUPPRESS)
    add_history_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all actions for each number of documents, and print the figures."""
    args = build_parser().parse_args(argv)
    if args.action:
        print(json.dumps(measure(args.action, args.folder, args.parts, args.seq_len)))
        return 0
    for n_documents in args.documents:
        folder = Path(tempfile.mkdtemp(prefix="parts-", dir=args.folder))
        try:
            simulate_parts(folder, args.parts, n_documents)
            figures: dict[str, dict[str, Any]] = {"write": run_action("write", folder, args)}
            link_single_file(folder)
            n = open_dataset(folder / "all").n_documents
            print(f"{n:,} documents, {args.parts:,} parts, S = {args.seq_len}")
            print(format_figures("write", figures["write"]), flush=True)
            for action in ACTIONS[1:]:
                figures[action] = run_action(action, folder, args)
                print(format_figures(action, figures[action]), flush=True)
        finally:
            shutil.rmtree(folder)
        cell = f"{args.parts} parts, {n} documents"
        units = {"open_s": "s", "cold_us": "us", "warm_us": "us", "bytes_per_document": "B"}
        for action in ("parts", "parts, Megatron's order"):
            for name, unit in units.items():
                value = figures[action][name]
                record_result(args.history, "parts", f"{cell}: {action}: {name}", value, unit, better="lower")
    return 0


if __name__ == "__main__":
    run_main(main)
