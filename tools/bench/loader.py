"""Benchmark batches for training: ours with 0, 2 and 4 workers against torch's DataLoader on the same
samples.

    python tools/bench/loader.py
    python tools/bench/loader.py tokens/c4_text_document --objective masked_diffusion --corrupt

The other side is the usual code: a map-style dataset that returns one sample as a tensor, and a DataLoader
with the default collation and the same number of worker processes. Without a prefix the corpus is random
tokens. With `--corrupt` both sides return the model's inputs: ours corrupts in the workers, the other side in
the loop. The sides alternate several times and the medians are compared, as are the tokens of all sides.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from history import add_history_options, record_result
from torch.utils.data import DataLoader, Dataset

from megatron.cli import create_parser, positive_int, run_main
from megatron.data import open_dataset
from megatron.data.batches import Batches
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.prefetch import Prefetcher
from megatron.data.samples import Samples
from megatron.objective.autoregressive import Autoregressive
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.objective.task import Objective

N_TOKENS = 50257


@dataclass(frozen=True)
class Speed:
    """Samples per second, CPU seconds of the process and its workers, and a checksum of the ids."""

    samples_per_s: float
    cpu_s: float
    checksum: int


class SamplesDataset(Dataset):
    """Map-style dataset for a DataLoader, which requests the samples of a batch together."""

    def __init__(self, samples: Samples, n: int) -> None:
        self.samples, self.n = samples, n

    def __len__(self) -> int:
        return self.n

    def __getitems__(self, numbers: list[int]) -> list[torch.Tensor]:
        return list(torch.from_numpy(self.samples.take(np.array(numbers))))


def iterate_ours(
    samples: Samples, rows: int, n_batches: int, n_workers: int, task: Objective | None
) -> Iterator[int]:
    """Yield the sum of the first ids of each batch, made by our prefetcher."""
    # rank 0 of 1, from sample 0: batch k is samples k * rows to (k + 1) * rows - 1, as in the DataLoader
    batches = Batches(samples, rows, 0, 1)

    def make_batch(step: int) -> np.ndarray:
        batch = batches.batch_at(step * rows)
        if task is not None:
            task.corrupt(batch.tokens, batch.numbers)
        return batch.tokens

    with Prefetcher(make_batch, n_batches, n_workers) as feed:
        for tokens in feed:
            # one column: a sum over all ids would be a considerable part of the time
            yield int(tokens[:, 0].sum())


def iterate_torch(
    samples: Samples, rows: int, n_batches: int, n_workers: int, task: Objective | None
) -> Iterator[int]:
    """Yield the sum of the first ids of each batch, made by a DataLoader."""
    loader = DataLoader(SamplesDataset(samples, rows * n_batches), rows, num_workers=n_workers)
    for step, batch in enumerate(loader):
        if task is not None:
            task.corrupt(batch.numpy(), np.arange(step * rows, (step + 1) * rows))
        yield int(batch[:, 0].sum())


def read_cpu_s() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    # Children count only after they have ended. The DataLoader ends its workers with its last batch, before
    # the second call.
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measure_side(side: Callable[[], Iterator[int]], n_samples: int) -> Speed:
    """Read all batches of one side, including its start-up and shutdown."""
    begin, cpu = time.perf_counter(), read_cpu_s()
    checksum = sum(side())
    return Speed(n_samples / (time.perf_counter() - begin), read_cpu_s() - cpu, checksum)


def write_synthetic(folder: str) -> str:
    """Write a dataset of 100 M random tokens and return its prefix."""
    rng = np.random.default_rng(0)
    with IndexedWriter(Path(folder) / "random", np.dtype(np.uint16)) as writer:
        for _ in range(100):
            # 100 x 1,000 documents of 1,000 tokens
            writer.add_documents(rng.integers(0, N_TOKENS, 10**6, dtype=np.uint16), np.full(1000, 1000))
    return str(Path(folder) / "random")


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument(
        "prefix", nargs="?", metavar="PREFIX", help="a .bin/.idx dataset; default: 100 M random tokens"
    )
    add = parser.add_argument_group("batches").add_argument
    add("--seq-len", type=positive_int, default=2048, metavar="N", help="positions per sample")
    add("--batch-size", type=positive_int, default=32, metavar="N", help="samples per batch")
    add("--corrupt", action="store_true", help="also corrupt the batches for the objective")
    objectives = ("autoregressive", "masked_diffusion")
    add("--objective", default="autoregressive", choices=objectives, help="objective of the corruption")
    add = parser.add_argument_group("measurement").add_argument
    add(
        "--workers",
        type=int,
        nargs="+",
        default=[0, 2, 4],
        metavar="N",
        help="numbers of workers, one after another",
    )
    add("--batches", type=positive_int, default=200, metavar="N", help="batches of each measurement")
    add(
        "--repeat",
        type=positive_int,
        default=5,
        metavar="N",
        help="measurements of each side; the median is printed",
    )
    add_history_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both sides with each number of workers and print ratios."""
    args = build_parser().parse_args(argv)
    torch.set_num_threads(1)
    task: Objective | None = None
    if args.corrupt:
        diffusion = args.objective == "masked_diffusion"
        task = MaskedDiffusion(N_TOKENS, 1e-3, 0) if diffusion else Autoregressive()
    n_samples = args.batch_size * args.batches
    with tempfile.TemporaryDirectory() as folder:
        samples = Samples(open_dataset(args.prefix or write_synthetic(folder)), args.seq_len, 0)
        samples.take(np.arange(n_samples))  # load the samples into the page cache for all sides
        print(f"{n_samples:,} samples of {args.seq_len} in batches of {args.batch_size}")
        for n_workers in args.workers:
            speeds: dict[str, list[Speed]] = {"ours": [], "torch": []}
            for _ in range(args.repeat):
                for name, side in (("ours", iterate_ours), ("torch", iterate_torch)):
                    arguments = (samples, args.batch_size, args.batches, n_workers, task)
                    speeds[name].append(
                        # bound as defaults, since the lambda would read the loop's variables at its call
                        measure_side(lambda side=side, arguments=arguments: side(*arguments), n_samples)
                    )
            print_report(n_workers, speeds["ours"], speeds["torch"], n_samples)
            record_speeds(args, n_workers, speeds["ours"], n_samples)
    return 0


def record_speeds(args: argparse.Namespace, n_workers: int, speeds: list[Speed], n_samples: int) -> None:
    """Store our samples per second and per CPU second for one number of workers."""
    task = args.objective if args.corrupt else "tokens"
    corpus = f"{Path(args.prefix).name}, " if args.prefix else ""
    cell = f"{corpus}{task}, {args.batch_size} x {args.seq_len}, {n_workers} workers"
    for unit, rates in (
        ("samples/s", [speed.samples_per_s for speed in speeds]),
        ("samples/CPU-s", [n_samples / speed.cpu_s for speed in speeds]),
    ):
        value = float(np.median(rates))
        record_result(args.history, "loader", f"{cell}: {unit}", value, unit, better="higher", repeats=rates)


def print_report(n_workers: int, our_speeds: list[Speed], torch_speeds: list[Speed], n_samples: int) -> None:
    """Print the two sides for one number of workers."""
    speeds, costs = (
        [
            float(np.median([getattr(measurement, name) for measurement in side]))
            for side in (our_speeds, torch_speeds)
        ]
        for name in ("samples_per_s", "cpu_s")
    )
    same = len({measurement.checksum for measurement in our_speeds + torch_speeds}) == 1
    for name, speed, cost in zip(("ours", "DataLoader"), speeds, costs, strict=True):
        ratios = f"ratio to ours: time {speeds[0] / speed:4.1f}, CPU {cost / costs[0]:4.1f}"
        cpu_per_sample = f"CPU {cost / n_samples * 1e6:4.0f} us a sample"
        print(
            f"{n_workers} workers  {name:10} {speed:9,.0f} samples/s   {cpu_per_sample}   {ratios}",
            flush=True,
        )
    print(f"           the samples are {'the same' if same else 'DIFFERENT'}", flush=True)


if __name__ == "__main__":
    run_main(main)
