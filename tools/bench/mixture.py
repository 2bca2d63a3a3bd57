"""Benchmark data mixtures: registration, queries, chunk assignment, reading, and the fit of ADO's laws.

    python tools/bench/mixture.py --documents 1e5 1e6
    python tools/bench/mixture.py --growth --documents 1e5 1e6 1e7 --folder /large/disk

Documents are JSON lines of about 280 bytes with four properties. Each figure is the median of several
measurements, as wall time and as CPU time of the process. On a busy machine only the CPU time is meaningful.

--growth measures how time and memory grow with the number of documents (1e7 require 6 GB of temporary disk):
files of a million documents, each stage in a separate process. Neighbouring documents are of different
domains, so nearly every document is a separate interval, the worst case for memory. `retained` is the memory
after a stage minus that before it; `peak` is the maximum during the stage minus that before it. Both are in
bytes per document, without mapped files. The last figure is the exponent of the growth of CPU time relative
to the previous size: 1 is linear.
"""

import argparse
import ctypes
import gc
import math
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from megatron.bench_history import add_history_options, record_result
from megatron.command import create_parser, positive_int, run_main
from megatron.mixture.adaptive import fit_domain_law
from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.input_files import hash_content
from megatron.mixture.catalog.properties import read_properties
from megatron.mixture.catalog.query import Query
from megatron.mixture.distributor import ConstantWeights, Distributor
from megatron.mixture.document_chunks import DocumentChunks
from megatron.mixture.lazy_imports import import_pyarrow
from megatron.mixture.serve.remote import Connection, RemoteChunks

LANGUAGES = ("C", "Go", "Java", "JavaScript", "Python", "Rust", "Scala", "TypeScript")
LICENCES = ("apache-2.0", "bsd", "gpl-3.0", "mit")
PROPERTIES = ("meta.language", "meta.licence", "meta.stars AS stars integer", "meta.quality AS quality float")
CONDITIONS = (
    "language IN ('Python', 'Rust', 'Go') AND licence <> 'bsd'", "stars > 10", "quality BETWEEN 0.1 AND 0.9"
)  # fmt: skip
CHUNK = 512
FILE_DOCUMENTS = 1_000_000
WARM_DOCUMENTS = 2_000  # for a first run of each stage, which loads libraries
CATALOG = "catalog.duckdb"
BY = ("language", "licence")


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("documents and threads").add_argument
    add(
        "--documents", type=float, nargs="+", default=[1e5, 1e6], metavar="N", help="documents in the catalog"
    )
    add("--threads", type=positive_int, default=2, metavar="N", help="DuckDB threads for registration")
    add = parser.add_argument_group("measurement").add_argument
    add(
        "--repeat",
        type=positive_int,
        default=3,
        metavar="N",
        help="measurements of each figure; the median is printed",
    )
    add("--growth", action="store_true", help="measure the growth with the number of documents instead")
    add("--folder", type=Path, metavar="DIR", help="folder of temporary files; default: that of the system")
    add_history_options(parser)
    return parser


def write_documents(path: Path, n: int, first: int = 0) -> None:
    """Write JSON lines whose properties are a hash of the line number."""
    text = "lorem ipsum dolor sit amet " * 6
    with path.open("w") as file:
        for i in range(first, first + n):
            # Language is bits 7 to 9 of the product and licence bits 10 and 11. The factor is odd, so any
            # 4,096 consecutive documents have each of the 32 pairs 128 times.
            mixed = i * 2654435761 >> 7  # Knuth's multiplicative hash
            file.write(
                f'{{"text": "{text}{i}", "meta": {{"language": "{LANGUAGES[mixed % 8]}", '
                f'"licence": "{LICENCES[mixed // 8 % 4]}", "stars": {mixed % 1000}, '
                f'"quality": {mixed % 997 / 997}}}}}\n'
            )


def time_work(work: Callable[[], object], repeat: int) -> list[tuple[float, float]]:
    """Return (wall, CPU) seconds of each of some calls."""
    times = []
    for _ in range(repeat):
        # user and system time of all threads of this process, but not of a server
        wall, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        work()
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
        times.append((time.perf_counter() - wall, cpu))
    return times


def report_rate(
    history: Path | None, what: str, n: float, unit: str, times: list[tuple[float, float]]
) -> None:
    """Print and store one line: the median wall and CPU seconds of n units."""
    wall, cpu = np.median(times, axis=0).tolist()
    rates = f"{n / wall:>14,.0f} {unit}/s   {n / max(cpu, 1e-9):>14,.0f} a CPU-second"
    print(f"{what:<44} {wall:8.3f} s   CPU {cpu:8.3f} s {rates}", flush=True)
    # the CPU time of this process: other load on the machine changes it least
    cpu_s = [max(seconds[1], 1e-9) for seconds in times]
    cell = f"{what}, {n:.0f} {unit}"
    record_result(history, "mixture", cell, max(cpu, 1e-9), "CPU-s", better="lower", repeats=cpu_s)


def bench_size(n: int, threads: int, repeat: int, history: Path | None) -> None:
    """Time registration, queries and reading of `n` documents."""
    print(f"{n:,} documents")
    report = partial(report_rate, history)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, lines = folder / "catalog.duckdb", folder / "documents.jsonl"
        write_documents(lines, n)
        for properties in (PROPERTIES[:1], PROPERTIES):
            with Catalog(path, n_threads=threads) as catalog:

                def register(catalog: Catalog = catalog, properties: Sequence[str] = properties) -> None:
                    # The defaults bind the loop's variables at the definition. A repetition must register
                    # everything again: unchanged files would be skipped.
                    if catalog.list_corpora():
                        catalog.remove("bench")
                    catalog.register("bench", [str(lines)], read_properties(properties), quiet=True)

                many = f"{len(properties)} propert{'y' if len(properties) == 1 else 'ies'}"
                report(f"register, {many}, {threads} threads", n, "documents", time_work(register, repeat))
                if len(properties) == 1:
                    catalog.remove("bench")
        times = time_work(lambda: hash_content(lines), repeat)
        report("of it, sums of the content", n, "documents", times)
        query = Query(conditions=CONDITIONS)
        with Catalog(path, read_only=True, n_threads=1) as catalog:
            by = ["language", "licence"]
            times = time_work(lambda: query.run(catalog, by), repeat)
            report("query, 4 properties, 1 thread", n, "documents", times)
            result = query.run(catalog, by)
        rows = int(result.n_documents.sum())
        print(f"  {rows:,} documents, {result.intervals.nbytes / rows:.1f} bytes each")
        mixture = folder / "mixture.yaml"
        mixture.write_text("catalog: catalog.duckdb\nby: [language]\ncount: documents\n")
        n_chunks = min(200, n // CHUNK)

        def stream(source: DocumentChunks | RemoteChunks) -> None:
            # 20 chunks per read; to_pylist makes Python's strings, as a tokenizer requires them
            for first in range(0, n_chunks, 20):
                source.read(first, min(20, n_chunks - first)).column("text").to_pylist()

        times = time_work(partial(stream, DocumentChunks(mixture)), repeat)
        report("stream text, warm, in this process", n_chunks * CHUNK, "documents", times)
        with serve_mixture(mixture) as remote:
            times = time_work(partial(stream, remote), repeat)
            report("stream text through a server (CPU: client's)", n_chunks * CHUNK, "documents", times)


@contextmanager
def serve_mixture(mixture: Path) -> Iterator[RemoteChunks]:
    """Start a server of the mixture, and yield a client."""
    words = [
        sys.executable,
        str(Path(__file__).parents[1] / "mixture_server.py"),
        str(mixture),
        "--port",
        "0",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        # The line is printed when the server listens: "listening on 127.0.0.1:PORT". Port 0 was requested, so
        # the port is not known before.
        try:
            address = server.stdout.readline().split()[-1]
            yield RemoteChunks(Connection(f"grpc+tcp://{address}"), mixture.stem)
        finally:
            server.kill()  # otherwise the end of Popen's context would wait for it without limit


def bench_small_files(n: int, threads: int, history: Path | None) -> None:
    """Time the registration of `n` files with one line each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for i in range(n):
            write_documents(folder / f"{i:06}.jsonl", 1, first=i)
        with Catalog(folder / "catalog.duckdb", n_threads=threads) as catalog:
            properties = read_properties(PROPERTIES)
            work = partial(catalog.register, "bench", [str(folder)], properties, quiet=True)
            what = f"register files of one line, {threads} threads"
            report_rate(history, what, n, "files", time_work(work, 1))


def bench_domains(n_domains: int, repeat: int, history: Path | None) -> None:
    """Time the chunks of a mixture of `n_domains` domains."""
    rng = np.random.default_rng(0)
    names = [str(k) for k in range(n_domains)]
    units = rng.integers(100, 10_000, n_domains)
    mixture = Distributor(
        units, names, ConstantWeights(rng.dirichlet(np.ones(n_domains)) + 1e-6), CHUNK, seed=0
    )
    # every call takes the next 2,000 chunks: chunks that were computed before could be cached
    n_chunks, first = 2000, iter(range(0, 10**9, 2000))

    def draw_chunks() -> None:
        mixture.orders.lookup_units(mixture.schedule_chunks(next(first), n_chunks))

    draw_chunks()
    what = f"chunks of {CHUNK}, {n_domains} domains"
    report_rate(history, what, n_chunks * CHUNK, "samples", time_work(draw_chunks, repeat))


@dataclass(frozen=True)
class StageCost:
    """Cost of one stage: wall and CPU seconds, and bytes per document retained and at the peak."""

    wall_s: float
    cpu_s: float
    retained: float
    peak: float


def register_files(folder: Path, threads: int, n_properties: int) -> object:
    """Register all files in a new catalog."""
    path = folder / (CATALOG if n_properties == len(PROPERTIES) else f"{n_properties}.duckdb")
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


def measure_stage(stage: Callable[[Path], object], folder: Path, warm: Path, n: int) -> StageCost:
    """Measure a stage in this process, after a run on a few documents that loads the libraries."""
    stage(warm)
    # `peak` is a list of one number, which the thread replaces. A peak of less than 5 ms may be missed.
    before, peak, over = settled_bytes(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            peak.append(max(peak.pop(), memory_bytes()))

    watching = threading.Thread(target=watch)
    watching.start()
    wall, cpu = time.perf_counter(), time.process_time()
    result = stage(folder)
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


def measure_growth(sizes: Sequence[int], threads: int, where: Path | None, history: Path | None) -> None:
    """Measure every stage at every size, each in a new process."""
    stages = {
        "register, 1 property": partial(register_files, threads=threads, n_properties=1),
        "register, 4 properties": partial(register_files, threads=threads, n_properties=len(PROPERTIES)),
        "query, 4 properties, 1 thread": query_some,
        "query for all, 1 thread": query_all,
        "open all to read": open_documents,
    }
    # spawn: a forked process would start with the heap of this one, and its free memory
    context, last = multiprocessing.get_context("spawn"), dict[str, tuple[int, float]]()
    with tempfile.TemporaryDirectory(dir=where) as name:
        for n in sizes:
            folder = Path(name) / str(n)
            write_corpus(folder, n)
            # the stages of a size depend on each other: the queries read the catalog of "register, 4
            # properties"
            for what, stage in stages.items():
                warm = Path(name) / f"warm {n} {what}"
                write_corpus(warm, WARM_DOCUMENTS)
                if not what.startswith("register"):
                    register_files(warm, threads, len(PROPERTIES))
                # a new process for each stage: DuckDB and malloc retain memory of earlier ones
                with ProcessPoolExecutor(1, mp_context=context) as process:
                    cost = process.submit(measure_stage, stage, folder, warm, n).result()
                before = last.get(what)
                # exponent e of time ~ n^e between two sizes: log(t2 / t1) / log(n2 / n1); 1 is linear
                grown = math.log(cost.cpu_s / before[1]) / math.log(n / before[0]) if before else math.nan
                last[what] = n, cost.cpu_s
                print(
                    f"{n:>10,}  {what:<30} {cost.wall_s:8.2f} s {cost.cpu_s:8.2f} CPU-s "
                    f"{n / cost.wall_s:>12,.0f} documents/s  retained {cost.retained:6.1f}  "
                    f"peak {cost.peak:6.1f} "
                    f"bytes per document  {grown:5.2f}",
                    flush=True,
                )
                cell = f"growth, {what}, {n} documents"
                record_result(history, "mixture", f"{cell}: CPU", cost.cpu_s, "CPU-s", better="lower")
                record_result(history, "mixture", f"{cell}: peak", cost.peak, "bytes", better="lower")
            print(
                f"{n:>10,}  catalog {(folder / CATALOG).stat().st_size / n:.1f} bytes per document",
                flush=True,
            )
            for path in folder.iterdir():
                path.unlink()


def main(argv: Sequence[str] | None = None) -> int:
    """Run all benchmarks."""
    args = build_parser().parse_args(argv)
    if args.growth:
        measure_growth([int(n) for n in args.documents], args.threads, args.folder, args.history)
        return 0
    for n in args.documents:
        bench_size(int(n), args.threads, args.repeat, args.history)
    bench_small_files(1100, args.threads, args.history)
    for n_domains in (8, 760):
        bench_domains(n_domains, args.repeat, args.history)
    # 2 + 10 n^-0.35 nats with 2 % of noise
    n = np.linspace(500, 50_000, 1000)
    losses = (2 + 10 * n**-0.35) * np.exp(0.02 * np.random.default_rng(0).standard_normal(len(n)))
    times = time_work(lambda: fit_domain_law(n, losses), args.repeat)
    report_rate(args.history, "fit ADO's law to 1,000 losses", 1, "domains", times)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory {peak:,.0f} MiB")
    return 0


if __name__ == "__main__":
    run_main(main)
