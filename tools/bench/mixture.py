"""The data-mixture plane in numbers: registering, asking, dealing out, reading, and fitting ADO's laws.

    python tools/bench/mixture.py --documents 1e5 1e6
    python tools/bench/mixture.py --growth --documents 1e5 1e6 1e7 --folder /large/disk

Documents are lines of JSON of about 280 bytes with four properties. Each figure is the median of several
measurements, as wall time and as CPU time of the process: on a busy machine only the second tells.

--growth shows how time and memory grow with the number of documents (1e7 want 6 GB of disk for a while):
files of a million, every stage in a process of its own. Neighbours are of different domains, so that nearly
every document is an interval of its own: nothing is larger. `held`: what memory the process has more after a
stage than before it; `peak`: the most it had in between; both in bytes a document, without mapped files. The
last figure is the exponent of the growth of CPU time since the size before: 1 is linear.
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

from megatron.command import command, count, run
from megatron.mixture.adaptive import fit_law
from megatron.mixture.catalog import Catalog
from megatron.mixture.content import hash_content
from megatron.mixture.distributor import Constant, Distributor
from megatron.mixture.documents import DocumentChunks
from megatron.mixture.libraries import pyarrow
from megatron.mixture.properties import read_properties
from megatron.mixture.query import Query
from megatron.mixture.remote import Connection, RemoteChunks

LANGUAGES = ("C", "Go", "Java", "JavaScript", "Python", "Rust", "Scala", "TypeScript")
LICENCES = ("apache-2.0", "bsd", "gpl-3.0", "mit")
PROPERTIES = ("meta.language", "meta.licence", "meta.stars AS stars integer", "meta.quality AS quality float")
CONDITIONS = (
    "language IN ('Python', 'Rust', 'Go') AND licence <> 'bsd'", "stars > 10", "quality BETWEEN 0.1 AND 0.9"
)  # fmt: skip
CHUNK = 512
FILE_DOCUMENTS = 1_000_000
WARM_DOCUMENTS = 2_000  # with which a process has loaded what it needs
CATALOG = "catalog.duckdb"
BY = ("language", "licence")


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    add = parser.add_argument
    add("--documents", type=float, nargs="+", default=[1e5, 1e6], metavar="N", help="in the catalog")
    add("--threads", type=count, default=2, metavar="N", help="of DuckDB while registering")
    add("--repeat", type=count, default=3, metavar="N", help="measurements of each; the median counts")
    add("--growth", action="store_true", help="growth with the number of documents instead")
    add("--folder", type=Path, metavar="DIR", help="where files may lie for a while; by itself the system's")
    return parser


def write_documents(path: Path, n: int, first: int = 0) -> None:
    """Lines with properties that follow from their number in no obvious way."""
    text = "lorem ipsum dolor sit amet " * 6
    with path.open("w") as file:
        for i in range(first, first + n):
            mixed = i * 2654435761 >> 7
            file.write(
                f'{{"text": "{text}{i}", "meta": {{"language": "{LANGUAGES[mixed % 8]}", '
                f'"licence": "{LICENCES[mixed // 8 % 4]}", "stars": {mixed % 1000}, '
                f'"quality": {mixed % 997 / 997}}}}}\n'
            )


def measure(work: Callable[[], object], repeat: int) -> tuple[float, float]:
    """(wall, CPU) seconds, medians."""
    found = []
    for _ in range(repeat):
        wall, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        work()
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
        found.append((time.perf_counter() - wall, cpu))
    wall_s, cpu_s = np.median(found, axis=0).tolist()
    return wall_s, cpu_s


def tell(what: str, n: float, unit: str, seconds: tuple[float, float]) -> None:
    """One line: n things in so many seconds."""
    wall, cpu = seconds
    each = f"{n / wall:>14,.0f} {unit}/s   {n / max(cpu, 1e-9):>14,.0f} a CPU-second"
    print(f"{what:<44} {wall:8.3f} s   CPU {cpu:8.3f} s {each}", flush=True)


def of_size(n: int, threads: int, repeat: int) -> None:
    """Register, ask and read `n` documents."""
    print(f"{n:,} documents")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, lines = folder / "catalog.duckdb", folder / "documents.jsonl"
        write_documents(lines, n)
        for properties in (PROPERTIES[:1], PROPERTIES):
            with Catalog(path, n_threads=threads) as catalog:

                def register(catalog: Catalog = catalog, properties: Sequence[str] = properties) -> None:
                    if catalog.corpora():
                        catalog.remove("bench")
                    catalog.register("bench", [str(lines)], read_properties(properties), quiet=True)

                many = f"{len(properties)} propert{'y' if len(properties) == 1 else 'ies'}"
                tell(f"register, {many}", n, "documents", measure(register, repeat))
                if len(properties) == 1:
                    catalog.remove("bench")
        tell("of it, sums of the content", n, "documents", measure(lambda: hash_content(lines), repeat))
        query = Query(conditions=CONDITIONS)
        with Catalog(path, read_only=True, n_threads=1) as catalog:
            by = ["language", "licence"]
            tell(
                "query, 4 properties, 1 thread",
                n,
                "documents",
                measure(lambda: query.run(catalog, by), repeat),
            )
            result = query.run(catalog, by)
        rows = int(result.n_documents.sum())
        print(f"  {rows:,} documents, {result.intervals.nbytes / rows:.1f} bytes each")
        mixture = folder / "mixture.yaml"
        mixture.write_text("catalog: catalog.duckdb\nby: [language]\ncount: documents\n")
        source = DocumentChunks(mixture)
        n_chunks = min(200, n // CHUNK)

        def stream() -> None:
            for first in range(0, n_chunks, 20):
                source.read(first, min(20, n_chunks - first)).column("text").to_pylist()

        tell("stream text, warm, in this process", n_chunks * CHUNK, "documents", measure(stream, repeat))
        with served(mixture) as remote:

            def ask() -> None:
                for first in range(0, n_chunks, 20):
                    remote.read(first, min(20, n_chunks - first)).column("text").to_pylist()

            tell(
                "stream text through a server (CPU: client's)",
                n_chunks * CHUNK,
                "documents",
                measure(ask, repeat),
            )


@contextmanager
def served(mixture: Path) -> Iterator[RemoteChunks]:
    """The mixture from a server of its own."""
    words = [
        sys.executable,
        str(Path(__file__).parents[1] / "mixture_server.py"),
        str(mixture),
        "--port",
        "0",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        yield RemoteChunks(Connection(f"grpc+tcp://{address}"), mixture.stem)
        server.kill()


def of_small_files(n: int, threads: int) -> None:
    """Register `n` files of one line each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for i in range(n):
            write_documents(folder / f"{i:06}.jsonl", 1, first=i)
        with Catalog(folder / "catalog.duckdb", n_threads=threads) as catalog:
            properties = read_properties(PROPERTIES)
            work = partial(catalog.register, "bench", [str(folder)], properties, quiet=True)
            tell("register files of one line", n, "files", measure(work, 1))


def of_domains(n_domains: int, repeat: int) -> None:
    """Chunks of a mixture of so many domains."""
    rng = np.random.default_rng(0)
    names = [str(k) for k in range(n_domains)]
    units = rng.integers(100, 10_000, n_domains)
    mixture = Distributor(units, names, Constant(rng.dirichlet(np.ones(n_domains)) + 1e-6), CHUNK, seed=0)
    n_chunks, first = 2000, iter(range(0, 10**9, 2000))

    def deal() -> None:
        mixture.orders.units(mixture.chunks(next(first), n_chunks))

    deal()
    tell(f"chunks of {CHUNK}, {n_domains} domains", n_chunks * CHUNK, "samples", measure(deal, repeat))


@dataclass(frozen=True)
class Measured:
    """Of one stage: seconds, and bytes a document."""

    wall_s: float
    cpu_s: float
    held: float
    peak: float


def register(folder: Path, threads: int, n_properties: int) -> object:
    """All files into a catalog of their own."""
    path = folder / (CATALOG if n_properties == len(PROPERTIES) else f"{n_properties}.duckdb")
    with Catalog(path, n_threads=threads) as catalog:
        properties = read_properties(PROPERTIES[:n_properties])
        return catalog.register("bench", [str(folder / "*.jsonl")], properties, quiet=True)


def ask(folder: Path) -> object:
    """Some of the documents."""
    with Catalog(folder / CATALOG, read_only=True, n_threads=1) as catalog:
        return Query(conditions=CONDITIONS).run(catalog, BY)


def ask_for_all(folder: Path) -> object:
    """Every document, in 32 domains."""
    with Catalog(folder / CATALOG, read_only=True, n_threads=1) as catalog:
        return Query().run(catalog, BY)


def opened(folder: Path) -> object:
    """Every document, ready to be read."""
    source = DocumentChunks(folder / "mixture.yaml")
    source.read(0, 1)
    return source


def measured(stage: Callable[[Path], object], folder: Path, warm: Path, n: int) -> Measured:
    """A stage in this process, once it has been done for a few documents."""
    stage(warm)
    before, peak, over = settled_bytes(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            peak.append(max(peak.pop(), memory_bytes()))

    watching = threading.Thread(target=watch)
    watching.start()
    wall, cpu = time.perf_counter(), time.process_time()
    kept = stage(folder)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    over.set()
    watching.join()
    after = settled_bytes()
    del kept
    return Measured(wall, cpu, max(0, after - before) / n, max(0, max(after, *peak) - before) / n)


def settled_bytes() -> int:
    """Memory of this process after what is free was given back."""
    gc.collect()
    pyarrow().default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
    return memory_bytes()


def memory_bytes() -> int:
    """Of this process, without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def write_corpus(folder: Path, n: int) -> None:
    """Files, and a mixture of them."""
    folder.mkdir()
    for first in range(0, n, FILE_DOCUMENTS):
        write_documents(folder / f"{first:09}.jsonl", min(FILE_DOCUMENTS, n - first), first)
    (folder / "mixture.yaml").write_text(f"catalog: {CATALOG}\nby: [{', '.join(BY)}]\ncount: documents\n")


def growth(sizes: Sequence[int], threads: int, where: Path | None) -> None:
    """Measure every stage of every size."""
    stages = {
        "register, 1 property": partial(register, threads=threads, n_properties=1),
        "register, 4 properties": partial(register, threads=threads, n_properties=len(PROPERTIES)),
        "query, 4 properties, 1 thread": ask,
        "query for all, 1 thread": ask_for_all,
        "open all to read": opened,
    }
    context, last = multiprocessing.get_context("spawn"), dict[str, tuple[int, float]]()
    with tempfile.TemporaryDirectory(dir=where) as name:
        for n in sizes:
            folder = Path(name) / str(n)
            write_corpus(folder, n)
            for what, stage in stages.items():
                warm = Path(name) / f"warm {n} {what}"
                write_corpus(warm, WARM_DOCUMENTS)
                if not what.startswith("register"):
                    register(warm, threads, len(PROPERTIES))
                with ProcessPoolExecutor(1, mp_context=context) as process:
                    found = process.submit(measured, stage, folder, warm, n).result()
                before = last.get(what)
                grown = math.log(found.cpu_s / before[1]) / math.log(n / before[0]) if before else math.nan
                last[what] = n, found.cpu_s
                print(
                    f"{n:>10,}  {what:<30} {found.wall_s:8.2f} s {found.cpu_s:8.2f} CPU-s "
                    f"{n / found.wall_s:>12,.0f} documents/s  held {found.held:6.1f}  peak {found.peak:6.1f} "
                    f"bytes a document  {grown:5.2f}",
                    flush=True,
                )
            print(
                f"{n:>10,}  catalog {(folder / CATALOG).stat().st_size / n:.1f} bytes a document", flush=True
            )
            for path in folder.iterdir():
                path.unlink()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure everything."""
    args = build_parser().parse_args(argv)
    if args.growth:
        growth([int(n) for n in args.documents], args.threads, args.folder)
        return 0
    for n in args.documents:
        of_size(int(n), args.threads, args.repeat)
    of_small_files(1100, args.threads)
    for n_domains in (8, 760):
        of_domains(n_domains, args.repeat)
    n = np.linspace(500, 50_000, 1000)
    losses = (2 + 10 * n**-0.35) * np.exp(0.02 * np.random.default_rng(0).standard_normal(len(n)))
    tell("fit ADO's law to 1,000 losses", 1, "domains", measure(lambda: fit_law(n, losses), args.repeat))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory {peak:,.0f} MiB")
    return 0


if __name__ == "__main__":
    run(main)
