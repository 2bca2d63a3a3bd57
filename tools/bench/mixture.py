"""The data-mixture plane in numbers: registering, asking, dealing out, reading, and fitting ADO's laws.

    python tools/bench/mixture.py                       1e5 and 1e6 documents
    python tools/bench/mixture.py --documents 1e7       for an idle machine with 8 GB of free disk

Documents are lines of JSON of about 280 bytes with four properties. Each figure is the median of several
measurements, as wall time and as CPU time of the process: on a busy machine only the second tells.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from megatron.mixture.adaptive import fit_law
from megatron.mixture.catalog import Catalog
from megatron.mixture.distributor import Constant, Distributor
from megatron.mixture.documents import DocumentChunks
from megatron.mixture.properties import read_properties
from megatron.mixture.query import Query
from megatron.mixture.remote import Connection, RemoteChunks

LANGUAGES = ("C", "Go", "Java", "JavaScript", "Python", "Rust", "Scala", "TypeScript")
LICENCES = ("apache-2.0", "bsd", "gpl-3.0", "mit")
PROPERTIES = ("meta.language", "meta.licence", "meta.stars AS stars integer", "meta.quality AS quality float")
CHUNK = 512


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command-line words."""
    parser = argparse.ArgumentParser(description="Measure megatron.mixture.")
    parser.add_argument("--documents", type=float, nargs="+", default=[1e5, 1e6], help="(1e5 1e6)")
    parser.add_argument("--threads", type=int, default=2, help="of DuckDB while registering (2)")
    parser.add_argument("--repeat", type=int, default=3, help="measurements of each (3)")
    return parser.parse_args(argv)


def write_documents(path: Path, n: int) -> None:
    """Lines with properties that follow from their number in no obvious way."""
    text = "lorem ipsum dolor sit amet " * 6
    with path.open("w") as file:
        for i in range(n):
            mixed = i * 2654435761 >> 7
            meta = {
                "language": LANGUAGES[mixed % 8], "licence": LICENCES[mixed // 8 % 4],
                "stars": mixed % 1000, "quality": mixed % 997 / 997,
            }  # fmt: skip
            file.write(json.dumps({"text": f"{text}{i}", "meta": meta}) + "\n")


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
        query = Query().where("language IN ('Python', 'Rust', 'Go') AND licence <> 'bsd'").where("stars > 10")
        query = query.where("quality BETWEEN 0.1 AND 0.9")
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
    command = [
        sys.executable,
        str(Path(__file__).parents[1] / "mixture_server.py"),
        str(mixture),
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        yield RemoteChunks(Connection(f"grpc+tcp://{address}"), mixture.stem)
        server.kill()


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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure everything."""
    args = parse_args(argv)
    for n in args.documents:
        of_size(int(n), args.threads, args.repeat)
    for n_domains in (8, 760):
        of_domains(n_domains, args.repeat)
    n = np.linspace(500, 50_000, 1000)
    losses = (2 + 10 * n**-0.35) * np.exp(0.02 * np.random.default_rng(0).standard_normal(len(n)))
    tell("fit ADO's law to 1,000 losses", 1, "domains", measure(lambda: fit_law(n, losses), args.repeat))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory {peak:,.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
