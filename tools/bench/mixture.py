"""Benchmark data mixtures: registration, queries, chunk assignment, reading, and the fit of ADO's laws.

    python tools/bench/mixture.py --documents 1e5 1e6

Documents are JSON lines of about 280 bytes with four properties. Each figure is the median of several
measurements, as wall time and as CPU time of the process. On a busy machine only the CPU time is meaningful.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, islice
from pathlib import Path

import numpy as np
from harness import Cost, add_options, median_cpu, median_wall, time_call, write_results

from megatron.cli import create_parser, positive_int, run_main
from megatron.mixture.adaptive import fit_domain_law
from megatron.mixture.catalog import Catalog
from megatron.mixture.client import MixtureClient, RemoteChunks, make_token_file, read_token
from megatron.mixture.distributor import Distributor
from megatron.mixture.documents import DocumentChunks
from megatron.mixture.properties import read_properties
from megatron.mixture.query import Query
from megatron.mixture.weights import DomainWeights

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
    sizes = [1e5, 1e6]
    add("--documents", type=float, nargs="+", default=sizes, metavar="N", help="documents in the catalog")
    add("--threads", type=positive_int, default=2, metavar="N", help="DuckDB threads for registration")
    add_options(parser, repeat=3)
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


class Report:
    """Measured rates, printed at once. `repeat`: calls of each work, of which the medians count."""

    def __init__(self, repeat: int) -> None:
        self.repeat, self.results = repeat, dict[str, float]()

    def add(self, what: str, n: float, unit: str, work: Callable[[], object]) -> None:
        """Measure a work of n units, and print wall and CPU seconds."""
        costs: list[Cost] = [time_call(work) for _ in range(self.repeat)]
        wall, cpu = median_wall(costs), median_cpu(costs)
        rates = f"{n / wall:>14,.0f} {unit}/s   {n / cpu:>14,.0f} a CPU-second"
        print(f"{what:<44} {wall:8.3f} s   CPU {cpu:8.3f} s {rates}", flush=True)
        self.results[f"{what}, {n:.0f} {unit}: CPU-s"] = cpu


def bench_size(n: int, threads: int, report: Report) -> None:
    """Time registration, queries and reading of `n` documents, and Python's json as the other side."""
    print(f"{n:,} documents")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, lines = folder / "catalog", folder / "documents.jsonl"
        write_documents(lines, n)
        number = count()
        for properties in (PROPERTIES, PROPERTIES[:1]):
            with Catalog(path, n_threads=threads) as catalog:

                def register(catalog: Catalog = catalog, properties: Sequence[str] = properties) -> None:
                    # another name, because unchanged files would be skipped
                    catalog.register(
                        f"bench {next(number)}", [str(lines)], read_properties(properties), quiet=True
                    )

                report.add(f"register, properties: {len(properties)}", n, "documents", register)
        query = Query(("bench 0",), CONDITIONS)
        with Catalog(path, read_only=True, n_threads=1) as catalog:
            by = ["language", "licence"]
            report.add("query, 4 properties, 1 thread", n, "documents", lambda: query.run(catalog, by))
        mixture = folder / "mixture.yaml"
        mixture.write_text("catalog: catalog\ncorpora: [bench 0]\nby: [language]\ncount: documents\n")
        n_chunks = min(200, n // CHUNK)

        def stream(source: DocumentChunks | RemoteChunks) -> None:
            # 20 chunks per read; to_pylist makes Python's strings, as a tokenizer requires them
            for first in range(0, n_chunks, 20):
                source.read(first, min(20, n_chunks - first)).column("text").to_pylist()

        def parse_lines() -> None:
            with lines.open("rb") as file:
                for line in islice(file, n_chunks * CHUNK):
                    json.loads(line)["text"]

        units = (n_chunks * CHUNK, "documents")
        report.add("json.loads of lines in order", *units, parse_lines)
        report.add("stream text, warm, in this process", *units, partial(stream, DocumentChunks(mixture)))
        with serve_mixture(mixture) as remote:
            report.add("stream text through a server (CPU: client's)", *units, partial(stream, remote))


@contextmanager
def serve_mixture(mixture: Path) -> Iterator[RemoteChunks]:
    """Start a server of the mixture, and yield a client."""
    tool = str(Path(__file__).parents[1] / "mixtures.py")
    token = read_token(make_token_file(mixture.parent))
    words = [sys.executable, tool, "serve", str(mixture.parent), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        # The line is printed when the server listens: "listening on 127.0.0.1:PORT". Port 0 was requested, so
        # the port is not known before.
        try:
            address = server.stdout.readline().split()[-1]
            yield MixtureClient(f"grpc+tcp://{address}", token).open_chunks(mixture.stem)
        finally:
            server.kill()  # otherwise the end of Popen's context would wait for it without limit


def bench_domains(n_domains: int, report: Report) -> None:
    """Time the chunks of a mixture of `n_domains` domains."""
    rng = np.random.default_rng(0)
    names = [str(k) for k in range(n_domains)]
    units = rng.integers(100, 10_000, n_domains)
    weights = DomainWeights([(0, rng.dirichlet(np.ones(n_domains)) + 1e-6)])
    mixture = Distributor(units, names, weights, CHUNK, seed=0)
    # every call takes the next 2,000 chunks
    n_chunks, first = 2000, iter(range(0, 10**9, 2000))

    def draw_chunks() -> None:
        mixture.orders.lookup_units(mixture.schedule_chunks(next(first), n_chunks))

    draw_chunks()
    report.add(f"chunks of {CHUNK}, {n_domains} domains", n_chunks * CHUNK, "samples", draw_chunks)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all benchmarks."""
    args = build_parser().parse_args(argv)
    report = Report(args.repeat)
    for n in args.documents:
        bench_size(int(n), args.threads, report)
    for n_domains in (8, 760):
        bench_domains(n_domains, report)
    # 2 + 10 n^-0.35 nats with 2 % of noise
    steps = np.linspace(500, 50_000, 1000)
    losses = (2 + 10 * steps**-0.35) * np.exp(0.02 * np.random.default_rng(0).standard_normal(len(steps)))
    report.add("fit ADO's law to 1,000 losses", 1, "domains", lambda: fit_domain_law(steps, losses))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory {peak:,.0f} MiB")
    write_results(args.json, report.results)
    return 0


if __name__ == "__main__":
    run_main(main)
