"""Benchmark batches for training: ours with 0, 2 and 4 workers against torch's DataLoader on the same
samples.

    python tools/bench/loader.py
    python tools/bench/loader.py tokens/c4_text_document --objective masked_diffusion

The other side is the usual code: a map-style dataset that returns one sample as a tensor, and a DataLoader
with the default collation and the same number of worker processes. Without a prefix the corpus is random
tokens. With --objective both sides return the model's inputs: ours corrupts in the workers, the other side in
the loop. The sides alternate several times and the medians are compared, as are the tokens of all sides.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from harness import Cost, add_options, median_cpu, median_wall, time_in_turns, write_results
from torch.utils.data import DataLoader, Dataset

from megatron.cli import create_parser, positive_int, run_main
from megatron.data import open_dataset
from megatron.data.batches import Batches
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.prefetch import prefetch
from megatron.data.samples import Samples
from megatron.objective.autoregressive import Autoregressive
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.objective.task import Objective

N_TOKENS = 50257


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

    with prefetch(make_batch, n_batches, n_workers) as feed:
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
    objectives = ("autoregressive", "masked_diffusion")
    add("--objective", choices=objectives, help="also corrupt the batches for this objective")
    workers = [0, 2, 4]
    add("--workers", type=int, nargs="+", default=workers, metavar="N", help="numbers of workers")
    add("--batches", type=positive_int, default=200, metavar="N", help="batches of each measurement")
    add_options(parser, repeat=5)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both sides with each number of workers and print ratios."""
    args = build_parser().parse_args(argv)
    torch.set_num_threads(1)
    task: Objective | None = None
    if args.objective:
        diffusion = args.objective == "masked_diffusion"
        task = MaskedDiffusion(N_TOKENS, 1e-3, 0) if diffusion else Autoregressive()
    n_samples = args.batch_size * args.batches
    with tempfile.TemporaryDirectory() as folder:
        samples = Samples(open_dataset(args.prefix or write_synthetic(folder)), args.seq_len, 0)
        samples.take(np.arange(n_samples))  # load the samples into the page cache for all sides
        print(f"{n_samples:,} samples of {args.seq_len} in batches of {args.batch_size}")
        results = {}
        for n_workers in args.workers:
            arguments = (samples, args.batch_size, args.batches, n_workers, task)
            sides = {
                # bound as defaults, since a lambda would read the loop's variables at its call
                "ours": lambda arguments=arguments: sum(iterate_ours(*arguments)),
                "DataLoader": lambda arguments=arguments: sum(iterate_torch(*arguments)),
            }
            costs = time_in_turns(sides, args.repeat)
            results[f"{n_workers} workers"] = print_report(n_workers, costs, n_samples)
    write_results(args.json, results)
    return 0


def print_report(n_workers: int, costs: dict[str, list[Cost]], n_samples: int) -> dict[str, float]:
    """Print both sides for one number of workers; return the samples per second of each."""
    ours = costs["ours"]
    for name, side in costs.items():
        ratio_wall, ratio_cpu = median_wall(side) / median_wall(ours), median_cpu(side) / median_cpu(ours)
        print(
            f"{n_workers} workers  {name:10} {n_samples / median_wall(side):9,.0f} samples/s   "
            f"CPU {median_cpu(side) / n_samples * 1e6:4.0f} us a sample   "
            f"ratio to ours: time {ratio_wall:4.1f}, CPU {ratio_cpu:4.1f}",
            flush=True,
        )
    same = len({cost.result for side in costs.values() for cost in side}) == 1
    print(f"           the samples are {'the same' if same else 'DIFFERENT'}", flush=True)
    return {name: n_samples / median_wall(side) for name, side in costs.items()}


if __name__ == "__main__":
    run_main(main)
