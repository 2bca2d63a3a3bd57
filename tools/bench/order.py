"""The order of samples: ours beside arrays built as Megatron builds them, in one run.

    python tools/bench/order.py
    python tools/bench/order.py --documents 1000000 --tokens 500000000 --epochs 1 10

The other side does what Megatron-LM's GPTDataset does where its cache is empty: read the lengths from the
index; document index by mgrid and RandomState.shuffle; sample index by a plain C++ loop (compiled here, from
megatron_sample_index.cpp); shuffle index; save the three as .npy and open those again, mapped. Where mgrid's
three 64-bit arrays want more memory than is free, the document index is tiled instead, which takes less time
and memory than Megatron does: the ratios are then too low.

The text is made up: documents of random lengths that sum to the tokens asked for, over a .bin that is one
hole. Every side is a process of its own, sides take turns, the median counts. Memory is the largest resident
set of the process, and what of it came after its imports. Time ends when the first sample could be read; ours
includes opening the pair and checking the whole index. The indices of ours in Megatron's order are compared
with the others.
"""

import argparse
import ctypes
import hashlib
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

from megatron.command import command, count, run
from megatron.data.indexed import CODES, HEADER, MAGIC, VERSION, IndexedTokens
from megatron.data.megatron_order import MegatronSamples
from megatron.data.samples import Samples

SEED = 1234
SIDES = {
    "arrays": "Megatron's arrays",
    "tiled": "arrays, tiled",
    "epoch": "ours, epoch",
    "megatron": "ours, megatron",
}
GRID_BYTES = 32  # a place of the document index while mgrid fills it: two int64 rows, two temporaries
TILED_BYTES = 12  # likewise, where it is tiled, with the windows' indices
PLAIN_LOOP = Path(__file__).with_name("megatron_sample_index.cpp")
READS = 5000


def write_pair(prefix: Path, n_documents: int, n_tokens: int) -> None:
    """A pair whose documents have log-normal lengths and whose tokens are a hole in the file."""
    dtype = np.dtype("<u2")
    weights = np.exp(np.random.default_rng(0).normal(0, 1, n_documents))
    ends = np.round(np.cumsum(weights) * (n_tokens / weights.sum())).astype("<i8")
    ends[-1] = n_tokens
    lengths = np.diff(ends, prepend=0)
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], n_documents, n_documents + 1))
        for part in (lengths.astype("<i4"), (ends - lengths) * 2, np.arange(n_documents + 1, dtype="<i8")):
            file.write(part.data)
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(n_tokens * dtype.itemsize)


def compile_loop(folder: Path) -> None:
    """The plain loop as a library in `folder`. RuntimeError without a compiler."""
    words = [os.environ.get("CXX", "c++"), "-O3", "-shared", "-fPIC", str(PLAIN_LOOP)]
    done = subprocess.run(
        [*words, "-o", str(folder / "loop.so")], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def megatron_arrays(prefix: str, seq_len: int, n_epochs: int, tiled: bool) -> tuple[np.ndarray, ...]:
    """Document, sample and shuffle index of whole epochs, saved and mapped."""
    folder = Path(prefix).parent
    index = np.memmap(f"{prefix}.idx", mode="r")
    n = HEADER.unpack(index[: HEADER.size].tobytes())[3]
    lengths = np.frombuffer(index, "<i4", n, HEADER.size)
    documents = np.arange(n, dtype=np.int32)
    per_epoch = int(np.sum(lengths[documents]))
    random = np.random.RandomState(SEED)
    if tiled:
        document_index = np.tile(documents, n_epochs)
    else:
        grid = np.mgrid[0:n_epochs, 0:n][1]
        grid[:] = documents
        document_index = grid.reshape(-1).astype(np.int32)
        del grid
    random.shuffle(document_index)
    n_windows = (n_epochs * per_epoch - 1) // seq_len
    sample_index = np.empty((n_windows + 1, 2), dtype=np.int32)
    held = lengths.copy()  # Megatron copies them out of the map where each is read more than once or so
    ctypes.CDLL(str(folder / "loop.so")).sample_index(
        held.ctypes.data_as(ctypes.c_void_p), document_index.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(seq_len), ctypes.c_int64(n_windows), sample_index.ctypes.data_as(ctypes.c_void_p),
    )  # fmt: skip
    shuffle_index = np.arange(n_windows, dtype=np.uint32)
    random.shuffle(shuffle_index)
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    made = {"document": document_index, "sample": sample_index, "shuffle": shuffle_index}
    for name, indices in made.items():
        np.save(cache / f"{name}.npy", indices, allow_pickle=True)
    return tuple(np.load(cache / f"{name}.npy", allow_pickle=True, mmap_mode="r") for name in made)


def samples_of(side: str, prefix: str, seq_len: int, n_epochs: int) -> Samples:
    """Ours, in either order, opened and ready for the first sample."""
    tokens = IndexedTokens(prefix)
    if side == "epoch":
        return Samples(tokens, seq_len, SEED)
    return MegatronSamples(tokens, seq_len, SEED, (n_epochs * tokens.n_tokens - 1) // seq_len)


def build_side(side: str, prefix: str, seq_len: int, n_epochs: int) -> dict[str, Any]:
    """In a process of its own: build one side and tell seconds, MB, and sums of its indices."""
    before_mb, wall, cpu = memory_mb("VmRSS"), time.perf_counter(), time.process_time()
    if side in ("arrays", "tiled"):
        indices = megatron_arrays(prefix, seq_len, n_epochs, side == "tiled")
    else:
        samples = samples_of(side, prefix, seq_len, n_epochs)
        samples.window_of(0)
        samples.window_of(n_epochs * samples.samples_per_epoch - 1)
    told = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    told |= {"peak_mb": memory_mb("VmHWM"), "before_mb": before_mb}
    if side == "megatron":
        assert isinstance(samples, MegatronSamples)
        made = samples.indices
        lengths = samples.tokens.sequence_tokens()
        indices = made.document_index, made.sample_index(lengths), made.shuffle_index
    if side != "epoch":
        told["sums"] = [f"{each.dtype} {hashlib.sha256(each).hexdigest()}" for each in indices]
    return told


def memory_mb(field: str) -> float:
    """VmRSS or VmHWM (its largest so far) of this process."""
    return kilobytes("/proc/self/status", field) * 1024 / 1e6


def kilobytes(path: str, field: str) -> int:
    """A line of the kernel's tables."""
    return next(
        int(line.split()[1]) for line in Path(path).read_text().splitlines() if line.startswith(field)
    )


def read_side(side: str, prefix: str, seq_len: int) -> dict[str, Any]:
    """Microseconds a random sample of one epoch, read when its pages and rows are in memory."""
    samples = samples_of(side, prefix, seq_len, 1)
    numbers = np.random.default_rng(1).integers(0, samples.samples_per_epoch, READS).tolist()
    seconds = []
    for _ in range(6):
        begin = time.process_time()
        for i in numbers:
            samples[i]
        seconds.append(time.process_time() - begin)
    return {"us": statistics.median(seconds[1:]) / READS * 1e6}  # the first warms the cache


def run_side(args: argparse.Namespace, prefix: Path, side: str, n_epochs: int) -> dict[str, Any]:
    """One side in a process of its own. RuntimeError when it fails."""
    words = [sys.executable, __file__, "--side", side, "--prefix", str(prefix)]
    words += ["--seq-len", str(args.seq_len), "--epochs", str(n_epochs)]
    # numpy's own threads, which nothing here asks for, would spin for a while after the import and be counted
    alone = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=alone)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def compare(args: argparse.Namespace, prefix: Path, n_epochs: int) -> None:
    """All sides for so many epochs, in turns, and the ratios."""
    free_gb = kilobytes("/proc/meminfo", "MemAvailable") / 1e6
    places = n_epochs * args.documents
    fitting = {
        "arrays": GRID_BYTES * places / 1e9 < 0.8 * free_gb,
        "tiled": TILED_BYTES * places / 1e9 < free_gb,
    }
    other = next((side for side, fits in fitting.items() if fits), None)
    sides = [side for side in SIDES if side not in fitting or side == other]
    told: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(args.repeat):
        for side in sides:
            told[side].append(run_side(args, prefix, side, n_epochs))
    cost = {
        side: {key: statistics.median(one[key] for one in all_told) for key in all_told[0] if key != "sums"}
        for side, all_told in told.items()
    }
    print(f"epochs {n_epochs}")
    if other != "arrays":
        wants_gb = GRID_BYTES * places / 1e9
        print(f"  {SIDES['arrays']:18} not run: wants about {wants_gb:.0f} GB, {free_gb:.0f} are free")
    for side in sides:
        mine = cost[side]
        own_mb = mine["peak_mb"] - mine["before_mb"]
        line = f"  {SIDES[side]:18} CPU {mine['cpu_s']:7.3f} s   wall {mine['wall_s']:7.3f} s   "
        line += f"{mine['peak_mb']:6.0f} MB, {own_mb:6.0f} of its own"
        if other and side != other:
            theirs = cost[other]
            line += f"   less: time {theirs['cpu_s'] / mine['cpu_s']:5.1f} times, "
            line += f"memory {theirs['peak_mb'] / mine['peak_mb']:4.1f}, "
            line += f"its own {(theirs['peak_mb'] - theirs['before_mb']) / own_mb:5.1f}"
        print(line, flush=True)
    if other:
        same = told[other][0]["sums"] == told["megatron"][0]["sums"]
        print(f"  document, sample and shuffle index are {'the same' if same else 'DIFFERENT'}", flush=True)


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    add = parser.add_argument_group("what is ordered").add_argument
    add("--documents", type=count, default=10_000_000, metavar="N", help="of random lengths")
    add("--tokens", type=count, default=5_000_000_000, metavar="N", help="of all documents together")
    add("--seq-len", type=count, default=2048, metavar="N", help="positions of a sample")
    add = parser.add_argument_group("how it is measured").add_argument
    add("--epochs", type=count, nargs="+", default=[1, 10, 100], metavar="N", help="numbers of them, in turn")
    add("--repeat", type=count, default=3, metavar="N", help="turns; the median counts")
    add("--side", metavar="NAME", help=argparse.SUPPRESS)
    add("--prefix", metavar="PREFIX", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every side and print ratios."""
    args = build_parser().parse_args(argv)
    if args.side:
        kind, _, side = args.side.rpartition(":")
        told = (
            read_side(side, args.prefix, args.seq_len)
            if kind == "read"
            else build_side(side, args.prefix, args.seq_len, args.epochs[0])
        )
        print(json.dumps(told))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "pair"
        compile_loop(Path(folder))
        write_pair(prefix, args.documents, args.tokens)
        print(f"{args.documents:,} documents, {args.tokens:,} tokens, S = {args.seq_len}", flush=True)
        for n_epochs in args.epochs:
            compare(args, prefix, n_epochs)
        for side in ("epoch", "megatron"):
            us = run_side(args, prefix, f"read:{side}", 1)["us"]
            print(f"random sample, warm: {SIDES[side]}: {us:.1f} microseconds")
    return 0


if __name__ == "__main__":
    run(main)
