"""Benchmark the order of samples: ours against index arrays built as in Megatron, in one run.

    python tools/bench/order.py
    python tools/bench/order.py --documents 1000000 --tokens 500000000 --epochs 1 10

The other side repeats the steps of Megatron-LM's GPTDataset with an empty cache: read the lengths from the
index; build the document index with mgrid and RandomState.shuffle, the sample index with a plain C++ loop
(compiled from megatron_sample_index.cpp), and the shuffle index; save the three as .npy and map these files.

The text is synthetic: documents of random lengths with the requested sum of tokens, over a sparse .bin. Each
side is a separate process, the sides alternate, and the medians are printed. Memory is the maximum resident
set of the process, and the part of it that was added after the imports. Time ends when the first sample can
be read; ours includes opening the dataset and checking the whole index. Our indices in Megatron's order are
compared with the other side's.
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
from harness import add_options, write_results

from megatron import _csrc
from megatron.cli import create_parser, positive_int, run_main
from megatron.data import open_dataset
from megatron.data.indexed import DTYPE_CODES
from megatron.data.megatron_order import MegatronSamples
from megatron.data.samples import Samples
from megatron.data.sidecar import HEADER, MAGIC, VERSION

SEED = 1234
SIDES = {"arrays": "Megatron's arrays", "epoch": "ours, epoch", "megatron": "ours, megatron"}
PLAIN_LOOP = Path(__file__).with_name("megatron_sample_index.cpp")


def write_dataset(prefix: Path, n_documents: int, n_tokens: int) -> None:
    """Write a dataset with log-normal document lengths and a sparse .bin file."""
    dtype = np.dtype("<u2")
    # The cumulative sums are rounded, not the lengths: differences of rounded sums add up to n_tokens
    # exactly, where rounded lengths would be off by about sqrt(n_documents). Some documents may be empty.
    weights = np.exp(np.random.default_rng(0).normal(0, 1, n_documents))
    ends = np.round(np.cumsum(weights) * (n_tokens / weights.sum())).astype("<i8")
    ends[-1] = n_tokens
    lengths = np.diff(ends, prepend=0)
    with Path(f"{prefix}.idx").open("wb") as file:
        # .idx: header, int32 lengths [n], int64 byte offsets [n], int64 document bounds [n + 1]
        file.write(HEADER.pack(MAGIC, VERSION, DTYPE_CODES[dtype], n_documents, n_documents + 1))
        for part in (lengths.astype("<i4"), (ends - lengths) * 2, np.arange(n_documents + 1, dtype="<i8")):
            file.write(part.data)
    with Path(f"{prefix}.bin").open("wb") as file:
        # a hole of zeros: 10 GB of tokens occupy no disk, and a read costs no I/O
        file.truncate(n_tokens * dtype.itemsize)


def compile_loop(folder: Path) -> None:
    """Compile the plain loop to a library in `folder`."""
    words = [os.environ.get("CXX", "c++"), "-O3", "-shared", "-fPIC", str(PLAIN_LOOP)]
    subprocess.run([*words, "-o", str(folder / "loop.so")], check=True)


def build_megatron_arrays(prefix: str, seq_len: int, n_epochs: int) -> tuple[np.ndarray, ...]:
    """Build document, sample and shuffle index of whole epochs as in Megatron; save and map them."""
    folder = Path(prefix).parent
    index = np.memmap(f"{prefix}.idx", mode="r")
    # field 3 of (magic, version, dtype code, sequences, document bounds)
    n = HEADER.unpack(index[: HEADER.size].tobytes())[3]
    lengths = np.frombuffer(index, "<i4", n, HEADER.size)
    documents = np.arange(n, dtype=np.int32)
    per_epoch = int(np.sum(lengths[documents]))
    # one generator for both shuffles: the second continues where the first ended, as in Megatron
    random = np.random.RandomState(SEED)
    # as in Megatron: all [n_epochs, n] places at once, in 64 bits
    grid = np.mgrid[0:n_epochs, 0:n][1]
    grid[:] = documents
    document_index = grid.reshape(-1).astype(np.int32)
    del grid
    random.shuffle(document_index)
    # a window has seq_len + 1 tokens and shares its last one with the next window
    n_windows = (n_epochs * per_epoch - 1) // seq_len
    # row w is (place in the document index, offset in that document) of window w; the last row is the end
    sample_index = np.empty((n_windows + 1, 2), dtype=np.int32)
    copied_lengths = (
        lengths.copy()
    )  # Megatron copies the lengths out of the map if they are read more than about once
    ctypes.CDLL(str(folder / "loop.so")).sample_index(
        copied_lengths.ctypes.data_as(ctypes.c_void_p), document_index.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(seq_len), ctypes.c_int64(n_windows), sample_index.ctypes.data_as(ctypes.c_void_p),
    )  # fmt: skip
    shuffle_index = np.arange(n_windows, dtype=np.uint32)
    random.shuffle(shuffle_index)
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    index_arrays = {"document": document_index, "sample": sample_index, "shuffle": shuffle_index}
    for name, indices in index_arrays.items():
        np.save(cache / f"{name}.npy", indices, allow_pickle=True)
    return tuple(np.load(cache / f"{name}.npy", allow_pickle=True, mmap_mode="r") for name in index_arrays)


def open_samples(side: str, prefix: str, seq_len: int, n_epochs: int) -> Samples:
    """Open our samples in either order, ready for the first sample."""
    tokens = open_dataset(prefix)
    if side == "epoch":
        return Samples(tokens, seq_len, SEED)
    return MegatronSamples(tokens, seq_len, SEED, (n_epochs * tokens.n_tokens - 1) // seq_len)


def build_side(side: str, prefix: str, seq_len: int, n_epochs: int) -> dict[str, Any]:
    """Build one side in this process; return seconds, MB and the hashes of its indices."""
    before_mb, wall, cpu = read_memory_mb("VmRSS"), time.perf_counter(), time.process_time()
    if side == "arrays":
        indices = build_megatron_arrays(prefix, seq_len, n_epochs)
    else:
        samples = open_samples(side, prefix, seq_len, n_epochs)
        # the first and the last sample of the run, so that work is not deferred beyond the clock
        samples.sample_windows(np.array([0]))
        samples.sample_windows(np.array([n_epochs * samples.samples_per_epoch - 1]))
    # the clock stops here; hashes and full indices below are only for the comparison
    record = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    record |= {"peak_mb": read_memory_mb("VmHWM"), "before_mb": before_mb}
    if side == "megatron":
        assert isinstance(samples, MegatronSamples)
        sample_indices = samples.indices
        # Megatron's sample index, which ours stores for every eighth window only
        starts = _csrc.sample_starts(
            samples.tokens.sequence_tokens(),
            sample_indices.document_index,
            seq_len,
            sample_indices.n_windows + 1,
        )
        starts[0] = 0  # Megatron starts at the first sequence even if it is empty
        indices = (sample_indices.document_index, starts, sample_indices.shuffle_index)
    if side != "epoch":
        record["sums"] = [f"{array.dtype} {hashlib.sha256(array).hexdigest()}" for array in indices]
    return record


def read_memory_mb(field: str) -> float:
    """Return VmRSS or VmHWM (the peak of VmRSS) of this process in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6


def run_side(args: argparse.Namespace, prefix: Path, side: str, n_epochs: int) -> dict[str, Any]:
    """Run one side in a separate process."""
    words = [sys.executable, __file__, "--side", side, "--prefix", str(prefix)]
    words += ["--seq-len", str(args.seq_len), "--epochs", str(n_epochs)]
    # OpenBLAS threads, which are not used here, would spin after the import and be counted as CPU time
    alone = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=alone, check=True)
    return json.loads(done.stdout)


def compare_sides(args: argparse.Namespace, prefix: Path, n_epochs: int) -> dict[str, dict[str, float]]:
    """Run all sides alternately for a number of epochs; print the ratios and return the medians."""
    records: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    # alternating, so that a change of the machine's load affects all sides
    for _ in range(args.repeat):
        for side in SIDES:
            records[side].append(run_side(args, prefix, side, n_epochs))
    cost = {
        side: {key: statistics.median(r[key] for r in rows) for key in rows[0] if key != "sums"}
        for side, rows in records.items()
    }
    print(f"epochs {n_epochs}")
    for side, ours in cost.items():
        added_mb = ours["peak_mb"] - ours["before_mb"]
        line = f"  {SIDES[side]:18} CPU {ours['cpu_s']:7.3f} s   wall {ours['wall_s']:7.3f} s   "
        line += f"{ours['peak_mb']:6.0f} MB, {added_mb:6.0f} of its own"
        if side != "arrays":
            other = cost["arrays"]
            line += f"   less: time {other['cpu_s'] / ours['cpu_s']:5.1f} times, "
            line += f"memory {other['peak_mb'] / ours['peak_mb']:4.1f}, "
            line += f"its own {(other['peak_mb'] - other['before_mb']) / max(added_mb, 1):5.1f}"
        print(line, flush=True)
    same = records["arrays"][0]["sums"] == records["megatron"][0]["sums"]
    print(f"  document, sample and shuffle index are {'the same' if same else 'DIFFERENT'}", flush=True)
    return cost


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("samples").add_argument
    add("--documents", type=positive_int, default=10**7, metavar="N", help="documents of random lengths")
    add("--tokens", type=positive_int, default=5 * 10**9, metavar="N", help="tokens of all documents")
    add("--seq-len", type=positive_int, default=2048, metavar="N", help="positions per sample")
    epochs = [1, 10]
    add("--epochs", type=positive_int, nargs="+", default=epochs, metavar="N", help="numbers of epochs")
    add("--side", metavar="NAME", help=argparse.SUPPRESS)
    add("--prefix", metavar="PREFIX", help=argparse.SUPPRESS)
    add_options(parser, repeat=3)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all sides, and print the ratios."""
    args = build_parser().parse_args(argv)
    if args.side:
        print(json.dumps(build_side(args.side, args.prefix, args.seq_len, args.epochs[0])))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "pair"
        compile_loop(Path(folder))
        write_dataset(prefix, args.documents, args.tokens)
        print(f"{args.documents:,} documents, {args.tokens:,} tokens, S = {args.seq_len}", flush=True)
        results: dict[str, Any] = {}
        for n_epochs in args.epochs:
            results[f"{n_epochs} epochs"] = compare_sides(args, prefix, n_epochs)
    write_results(args.json, results)
    return 0


if __name__ == "__main__":
    run_main(main)
