"""Measure how a catalog grows with its documents, and extrapolate to the 365 million documents of C4.

    python tools/bench/mixture_growth.py --documents 1e5 1e6 1e7 --folder /large/disk

Documents are JSON lines of about 280 bytes with four properties, in files of up to a million. Up to
--real documents are registered from their text; beyond it the files of the largest size are registered under
other names, with copies of their parts, which takes 1 GB of disk in place of 3. Each stage runs in a process
of its own, after a run on a few documents. Neighbouring documents are of different domains, so nearly every
document is a separate interval, the worst case for memory. `retained` is the memory after a stage minus that
before it; `peak` is the maximum during the stage minus that before it, in bytes per document and without
mapped files, whose pages all processes of a machine share. The last figure is the exponent of the growth of
CPU time relative to the previous size: 1 is linear.

Model of the extrapolation, for each stage: seconds = a + b documents + c parts. a and b are from the two
largest sizes (a at least 0), c from a catalog of --parts parts with a document each. Memory follows the same
model without c; that of a registration depends on the largest file and is not extrapolated. The result is a
forecast for one machine like this, not a measurement.
"""

import argparse
import ctypes
import gc
import math
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from history import add_history_options, record_result

from megatron.cli import create_parser, positive_int, run_main
from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.commits import Commit, make_file_keys
from megatron.mixture.catalog.part_files import PartWriter, publish_part
from megatron.mixture.catalog.properties import read_properties
from megatron.mixture.catalog.query import Query
from megatron.mixture.document_chunks import DocumentChunks
from megatron.mixture.lazy_imports import import_parquet, import_pyarrow

sys.path.insert(0, str(Path(__file__).parent))
from mixture import CHUNK, CONDITIONS, PROPERTIES, write_documents  # noqa: E402

FILE_DOCUMENTS = 1_000_000
WARM_DOCUMENTS = 2_000  # for a first run of each stage, which loads libraries
CATALOG = "catalog"
BY = ("language", "licence")
N_CHUNKS = 100
C4_DOCUMENTS, C4_FILES = 365e6, 1024  # of C4's English part, as its authors distribute it


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("catalog").add_argument
    add(
        "--documents", type=float, nargs="+", default=[1e5, 1e6, 1e7], metavar="N",
        help="documents in the catalog, in rising order",
    )  # fmt: skip
    add("--real", type=float, default=1e6, metavar="N", help="most documents that are registered from text")
    add("--parts", type=positive_int, default=1024, metavar="N", help="parts of the catalog of many parts")
    add("--threads", type=positive_int, default=1, metavar="N", help="DuckDB threads for registration")
    add("--folder", type=Path, metavar="DIR", help="folder of temporary files; default: that of the system")
    add_history_options(parser)
    return parser


@dataclass(frozen=True)
class StageCost:
    """Cost of one stage: wall and CPU seconds, and bytes per document retained and at the peak."""

    wall_s: float
    cpu_s: float
    retained: float
    peak: float


def register_files(folder: Path, threads: int, n_properties: int) -> object:
    """Register all files in a new catalog."""
    path = folder / (CATALOG if n_properties == len(PROPERTIES) else f"{n_properties} properties")
    with Catalog(path, n_threads=threads) as catalog:
        properties = read_properties(PROPERTIES[:n_properties])
        return catalog.register("bench", [str(folder / "*.jsonl")], properties, quiet=True)


def query_some(folder: Path) -> object:
    """Query some of the documents."""
    with Catalog(folder / CATALOG, read_only=True, n_threads=1) as catalog:
        return Query(conditions=CONDITIONS).run(catalog, BY)


def query_all(folder: Path) -> object:
    """Query all documents, in 32 domains."""
    with Catalog(folder / CATALOG, read_only=True, n_threads=1) as catalog:
        return Query().run(catalog, BY)


def open_documents(folder: Path) -> object:
    """Open all documents for reading, and read the first chunk."""
    source = DocumentChunks(folder / "mixture.yaml")
    source.read(0, 1)
    return source


def read_chunks(folder: Path) -> object:
    """Read chunks from open documents. `measure_stage` counts the reading only."""
    source = DocumentChunks(folder / "mixture.yaml")

    def read() -> object:
        n_chunks = min(N_CHUNKS, int(source.counts.sum()) // CHUNK)
        for first in range(0, n_chunks, 20):
            source.read(first, min(20, n_chunks - first)).column("text").to_pylist()
        return source

    return read


def clone_registration(folder: Path, n_files: int) -> None:
    """Register the file of a folder under other names, with copies of its part."""
    with Catalog(folder / CATALOG) as catalog:
        (first,) = catalog.files
        table = import_parquet().read_table(folder / CATALOG / first.part)
        for i in range(1, n_files):
            path = folder / f"{i:09}.jsonl"
            os.link(first.entry.path, path)
            entry = replace(first.entry, path=str(path))
            (key,) = make_file_keys(first.corpus, [(entry.path, entry.n_bytes, entry.mtime_ns)], (), ())
            keys = import_pyarrow().array(np.full(len(table), key))
            with catalog.storage.make_scratch() as scratch:
                with PartWriter(scratch, first.corpus) as sink:
                    sink.write(table.set_column(0, "file", keys))
                part = publish_part(catalog.storage, scratch, first.corpus)
            catalog.add_commit(Commit.create(first.corpus, files=(replace(entry, key=key),), part=part))


def measure_stage(stage: Callable[[Path], object], folder: Path, warm: Path, n: int) -> StageCost:
    """Measure a stage in this process, after a run on a few documents that loads the libraries."""
    warmed = stage(warm)
    if callable(warmed):
        warmed()
    work = stage(folder) if callable(warmed) else partial(stage, folder)
    del warmed
    # `peak` is a list of one number, which the thread replaces. A peak of less than 5 ms may be missed.
    before, peak, over = settled_bytes(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            peak.append(max(peak.pop(), memory_bytes()))

    watching = threading.Thread(target=watch)
    watching.start()
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    over.set()
    watching.join()
    # before `del result`: what the stage returns is what a training process retains
    after = settled_bytes()
    del result
    return StageCost(wall, cpu, max(0, after - before) / n, max(0, max(after, *peak) - before) / n)


def settled_bytes() -> int:
    """Return the memory of this process after free memory was returned to the system."""
    # Each allocator returns its free memory to the system: Python's objects, Arrow's pool, then malloc's
    # arenas. Otherwise freed memory of the warm run would hide what the stage allocates.
    gc.collect()
    import_pyarrow().default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
    return memory_bytes()


def memory_bytes() -> int:
    """Return the anonymous resident memory of this process, without mapped files."""
    # RssAnon excludes mapped files: DuckDB's and the readers' pages belong to the page cache
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def write_corpus(folder: Path, n: int) -> None:
    """Write files of documents, and a mixture of them."""
    folder.mkdir()
    for first in range(0, n, FILE_DOCUMENTS):
        write_documents(folder / f"{first:09}.jsonl", min(FILE_DOCUMENTS, n - first), first)
    (folder / "mixture.yaml").write_text(f"catalog: {CATALOG}\nby: [{', '.join(BY)}]\ncount: documents\n")


def list_stages(n: int, n_real: int, threads: int) -> dict[str, Callable[[Path], object]]:
    """Return the stages of a size. They depend on each other: queries read what registration wrote."""
    stages: dict[str, Callable[[Path], object]] = {}
    if n <= n_real:
        stages["register, 1 property"] = partial(register_files, threads=threads, n_properties=1)
        stages["register, 4 properties"] = partial(
            register_files, threads=threads, n_properties=len(PROPERTIES)
        )
    return stages | {
        "query, 4 properties, 1 thread": query_some,
        "query for all, 1 thread": query_all,
        "open, first process": open_documents,
        "open, other processes": open_documents,
        f"read {N_CHUNKS} chunks of {CHUNK}": read_chunks,
    }


Costs = dict[str, list[tuple[int, StageCost]]]


def measure_growth(
    sizes: Sequence[int], n_real: int, threads: int, where: Path, history: Path | None
) -> Costs:
    """Measure every stage at every size, each in a new process. Returns the costs of each stage."""
    # spawn: a forked process would start with the heap of this one, and its free memory
    context, costs = multiprocessing.get_context("spawn"), Costs()
    for n in sizes:
        folder = where / str(n)
        write_corpus(folder, n if n <= n_real else min(n, FILE_DOCUMENTS))
        if n > n_real:
            register_files(folder, threads, len(PROPERTIES))
            clone_registration(folder, n // FILE_DOCUMENTS)
        for what, stage in list_stages(n, n_real, threads).items():
            warm = where / f"warm {n} {what}"
            write_corpus(warm, WARM_DOCUMENTS)
            if not what.startswith("register"):
                register_files(warm, threads, len(PROPERTIES))
            # a new process for each stage: DuckDB and malloc retain memory of earlier ones
            with ProcessPoolExecutor(1, mp_context=context) as process:
                cost = process.submit(measure_stage, stage, folder, warm, n).result()
            before = costs.setdefault(what, [])
            # exponent e of time ~ n^e between two sizes: log(t2 / t1) / log(n2 / n1); 1 is linear
            grown = math.nan
            if before:
                last_n, last = before[-1]
                grown = math.log(max(cost.cpu_s, 1e-6) / max(last.cpu_s, 1e-6)) / math.log(n / last_n)
            before.append((n, cost))
            print(
                f"{n:>10,}  {what:<30} {cost.wall_s:8.2f} s {cost.cpu_s:8.2f} CPU-s "
                f"retained {cost.retained:6.1f}  peak {cost.peak:6.1f} bytes per document  {grown:5.2f}",
                flush=True,
            )
            cell = f"growth, {what}, {n} documents"
            record_result(history, "mixture_growth", f"{cell}: CPU", cost.cpu_s, "CPU-s", better="lower")
            record_result(history, "mixture_growth", f"{cell}: peak", cost.peak, "bytes", better="lower")
        n_bytes = sum(path.stat().st_size for path in (folder / CATALOG).rglob("*") if path.is_file())
        shared = sum(path.stat().st_size for path in folder.glob("mixture.mixture/*.bin"))
        print(
            f"{n:>10,}  catalog {n_bytes / n:.1f} bytes per document, locations on disk {shared / n:.1f}",
            flush=True,
        )
        for path in folder.glob("*.jsonl"):
            path.unlink()
    return costs


def measure_parts(n_parts: int, where: Path) -> tuple[float, float]:
    """Return CPU seconds per part of (a registration, a query) in a catalog of parts of one document."""
    folder = where / "parts"
    folder.mkdir()
    for i in range(n_parts):
        write_documents(folder / f"{i:06}.jsonl", 1, first=i)
    with Catalog(folder / CATALOG) as catalog:
        properties = read_properties(PROPERTIES)
        begin = time.process_time()
        for i in range(n_parts):  # one at a time, hence in a part each
            catalog.register("bench", [str(folder / f"{i:06}.jsonl")], properties, quiet=True)
        registered = time.process_time() - begin
    begin = time.process_time()
    query_all(folder)
    queried = time.process_time() - begin
    print(f"{n_parts:>10,} parts: {registered:.2f} CPU-s to register, {queried:.2f} CPU-s to query")
    return registered / n_parts, queried / n_parts


def print_extrapolation(costs: Costs, per_part: tuple[float, float]) -> None:
    """Print the forecast of each stage for C4."""
    print(f"forecast for {C4_DOCUMENTS:,.0f} documents in {C4_FILES:,} files (a + b documents + c parts)")
    for what, measured in costs.items():
        if len(measured) < 2 or what.startswith("read "):
            continue
        (n1, first), (n2, last) = measured[-2:]
        slope = max(0.0, (last.cpu_s - first.cpu_s) / (n2 - n1))
        offset = max(0.0, last.cpu_s - slope * n2)
        parts_s = C4_FILES * per_part[0 if what.startswith("register") else 1]
        memory = ""
        if not what.startswith("register"):
            retained, peak = (
                C4_DOCUMENTS * max(0.0, (last_bytes * n2 - first_bytes * n1) / (n2 - n1)) / 2**30
                for first_bytes, last_bytes in ((first.retained, last.retained), (first.peak, last.peak))
            )
            memory = f"  retained {retained:.2f} GiB  peak {peak:.1f} GiB"
        print(
            f"{what:<30} {offset + slope * C4_DOCUMENTS + parts_s:10.1f} CPU-s "
            f"({slope * 1e6:.2f} per million documents, {parts_s:.1f} for the parts){memory}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all sizes, and print the forecast."""
    args = build_parser().parse_args(argv)
    sizes = [int(n) for n in args.documents]
    if sizes != sorted(set(sizes)) or any(n > args.real and n % FILE_DOCUMENTS for n in sizes):
        print(
            f"--documents: got {sizes}, expected rising numbers, beyond --real multiples of "
            f"{FILE_DOCUMENTS:,}.",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        costs = measure_growth(sizes, int(args.real), args.threads, Path(name), args.history)
        print_extrapolation(costs, measure_parts(args.parts, Path(name)))
    return 0


if __name__ == "__main__":
    run_main(main)
