"""Benchmark data mixtures: registration, queries, chunk assignment, reading, and the fit of ADO's laws.

    python tools/bench/mixture.py --documents 1e5 1e6

Documents are JSON lines of about 280 bytes with four properties. Each figure is the median of several
measurements, as wall time and as CPU time of the process. On a busy machine only the CPU time is meaningful.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from history import add_history_options, record_result

from megatron.cli import create_parser, positive_int, run_main
from megatron.mixture.adaptive import fit_domain_law
from megatron.mixture.catalog import Catalog
from megatron.mixture.client import Connection, RemoteChunks, make_token_file, read_token
from megatron.mixture.distributor import Distributor
from megatron.mixture.documents import DocumentChunks
from megatron.mixture.files import hash_content
from megatron.mixture.properties import read_properties
from megatron.mixture.query import Query
from megatron.mixture.weights import ConstantWeights

LANGUAGES = ("C", "Go", "Java", "JavaScript", "Python", "Rust", "Scala", "TypeScript")
LICENCES = ("apache-2.0", "bsd", "gpl-3.0", "mit")
PROPERTIES = ("meta.language", "meta.licence", "meta.stars AS stars integer", "meta.quality AS quality float")
CONDITIONS = (
    "language IN ('Python', 'Rust', 'Go') AND licence <> 'bsd'", "stars > 10", "quality BETWEEN 0.1 AND 0.9"
)  # fmt: skip
CHUNK = 512


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("documents and threads").add_argument
    add(
        "--documents", type=float, nargs="+", default=[1e5, 1e6], metavar="N", help="documents in the catalog"
    )
    add("--threads", type=positive_int, default=2, metavar="N", help="DuckDB threads for registration")
    add("--files", type=positive_int, default=1000, metavar="N", help="files of the mixture of many files")
    add = parser.add_argument_group("measurement").add_argument
    add(
        "--repeat",
        type=positive_int,
        default=3,
        metavar="N",
        help="measurements of each figure; the median is printed",
    )
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
        path, lines = folder / "catalog", folder / "documents.jsonl"
        write_documents(lines, n)
        for properties in (PROPERTIES[:1], PROPERTIES):
            with Catalog(path, n_threads=threads) as catalog:

                def register(catalog: Catalog = catalog, properties: Sequence[str] = properties) -> None:
                    # The defaults bind the loop's variables at the definition. A repetition must register
                    # everything again: unchanged files would be skipped.
                    if catalog.tables:
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
        print(f"  {rows:,} documents, {result.documents.nbytes / rows:.1f} bytes each")
        mixture = folder / "mixture.yaml"
        mixture.write_text("catalog: catalog\nby: [language]\ncount: documents\n")
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
    tool = str(Path(__file__).parents[1] / "mixture_server.py")
    token = read_token(make_token_file(mixture.parent))
    words = [sys.executable, tool, str(mixture.parent), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        # The line is printed when the server listens: "listening on 127.0.0.1:PORT". Port 0 was requested, so
        # the port is not known before.
        try:
            address = server.stdout.readline().split()[-1]
            yield RemoteChunks(Connection(f"grpc+tcp://{address}", token), mixture.stem)
        finally:
            server.kill()  # otherwise the end of Popen's context would wait for it without limit


def bench_small_files(n: int, threads: int, history: Path | None) -> None:
    """Time the registration of `n` files with one line each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for i in range(n):
            write_documents(folder / f"{i:06}.jsonl", 1, first=i)
        with Catalog(folder / "catalog", n_threads=threads) as catalog:
            properties = read_properties(PROPERTIES)
            work = partial(catalog.register, "bench", [str(folder)], properties, quiet=True)
            what = f"register files of one line, {threads} threads"
            report_rate(history, what, n, "files", time_work(work, 1))


def bench_many_files(n_files: int, repeat: int, history: Path | None) -> None:
    """Time reading as 8 groups from `n_files` files of 500 documents of 240 bytes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = "lorem ipsum dolor sit amet " * 6
        for f in range(n_files):
            with (folder / f"{f:06}.jsonl").open("w") as file:
                file.writelines(
                    f'{{"text": "{text}{i}", "language": "{LANGUAGES[i % 8]}"}}\n' for i in range(500)
                )
        with Catalog(folder / "catalog") as catalog:
            catalog.register("bench", [str(folder)], read_properties(["language"]), quiet=True)
        (folder / "mixture.yaml").write_text("catalog: catalog\nby: [language]\ncount: documents\n")
        n_rounds = max(1, min(40, n_files * 500 // CHUNK // 8))
        with DocumentChunks(folder / "mixture.yaml") as source:

            def read_rounds() -> None:
                # the first of 8 groups reads chunks 0, 8, 16, ...
                for first in range(0, 8 * n_rounds, 8):
                    source.read(first, 1).column("text").to_pylist()

            for n, work in ((1, lambda: source.read(0, n_rounds)), (8, read_rounds)):
                what = f"stream text, {n_files} files, {n} group{'s' * (n > 1)}"
                report_rate(history, what, n_rounds * CHUNK, "documents", time_work(work, repeat))


def bench_domains(n_domains: int, repeat: int, history: Path | None) -> None:
    """Time the chunks of a mixture of `n_domains` domains."""
    rng = np.random.default_rng(0)
    names = [str(k) for k in range(n_domains)]
    units = rng.integers(100, 10_000, n_domains)
    mixture = Distributor(
        units, names, ConstantWeights(rng.dirichlet(np.ones(n_domains)) + 1e-6), CHUNK, seed=0
    )
    # every call takes the next 2,000 chunks
    n_chunks, first = 2000, iter(range(0, 10**9, 2000))

    def draw_chunks() -> None:
        mixture.orders.lookup_units(mixture.schedule_chunks(next(first), n_chunks))

    draw_chunks()
    what = f"chunks of {CHUNK}, {n_domains} domains"
    report_rate(history, what, n_chunks * CHUNK, "samples", time_work(draw_chunks, repeat))


def main(argv: Sequence[str] | None = None) -> int:
    """Run all benchmarks."""
    args = build_parser().parse_args(argv)
    for n in args.documents:
        bench_size(int(n), args.threads, args.repeat, args.history)
    bench_small_files(1100, args.threads, args.history)
    bench_many_files(args.files, args.repeat, args.history)
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
