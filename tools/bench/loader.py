"""Batches for training: ours with 0, 2 and 4 workers beside torch's DataLoader over the same samples.

    python tools/bench/loader.py
    python tools/bench/loader.py tokens/c4_text_document --objective masked_diffusion --corrupt

The other side is written as people write it: a map-style dataset that gives one sample as a tensor, a
DataLoader with the default collation and as many worker processes. Without a prefix the corpus is random
tokens. With `--corrupt` both sides give what the model reads: ours in the workers, the other in the loop.
All sides run in turn, several times, and the median counts; the tokens of all are compared.
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
from torch.utils.data import DataLoader, Dataset

from megatron.command import command, count, run
from megatron.data.ahead import Ahead
from megatron.data.batches import Batches
from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.samples import Samples
from megatron.objective.autoregressive import Autoregressive
from megatron.objective.base import Objective
from megatron.objective.masked_diffusion import MaskedDiffusion

N_TOKENS = 50257


@dataclass(frozen=True)
class Speed:
    """Of one side: samples a second, CPU seconds of the process and its workers, and a sum over all ids."""

    samples_per_s: float
    cpu_s: float
    checksum: int


class OneByOne(Dataset):
    """What a DataLoader wants: sample i as a tensor."""

    def __init__(self, samples: Samples, n: int) -> None:
        self.samples, self.n = samples, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.from_numpy(self.samples[i])


def ours(
    samples: Samples, rows: int, n_batches: int, n_workers: int, task: Objective | None
) -> Iterator[int]:
    """Sums of the ids of each batch."""
    batches = Batches(samples, rows, 0, 1, 0)

    def make(step: int) -> np.ndarray:
        batch = batches.beginning_at(step * rows)
        if task is not None:
            task.corrupt(batch.tokens, batch.numbers)
        return batch.tokens

    with Ahead(make, n_batches, n_workers) as feed:
        for tokens in feed:
            yield int(tokens[:, 0].sum())


def torchs(
    samples: Samples, rows: int, n_batches: int, n_workers: int, task: Objective | None
) -> Iterator[int]:
    """The same through a DataLoader."""
    loader = DataLoader(OneByOne(samples, rows * n_batches), rows, num_workers=n_workers)
    for step, batch in enumerate(loader):
        if task is not None:
            task.corrupt(batch.numpy(), np.arange(step * rows, (step + 1) * rows))
        yield int(batch[:, 0].sum())


def cpu_s() -> float:
    """Of this process and of those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(side: Callable[[], Iterator[int]], n_samples: int) -> Speed:
    """Drain one side, its start and end included."""
    begin, cpu = time.perf_counter(), cpu_s()
    checksum = sum(side())
    return Speed(n_samples / (time.perf_counter() - begin), cpu_s() - cpu, checksum)


def synthetic(folder: str) -> str:
    """Prefix of 100 M random tokens."""
    rng = np.random.default_rng(0)
    with IndexedWriter(Path(folder) / "random", np.dtype(np.uint16)) as writer:
        for _ in range(100):
            writer.add_documents(rng.integers(0, N_TOKENS, 10**6, dtype=np.uint16), np.full(1000, 1000))
    return str(Path(folder) / "random")


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument(
        "prefix", nargs="?", metavar="PREFIX", help="of a .bin/.idx pair; by itself 100 M random tokens"
    )
    add = parser.add_argument_group("what is made").add_argument
    add("--seq-len", type=count, default=2048, metavar="N", help="positions of a sample")
    add("--batch-size", type=count, default=32, metavar="N", help="samples of a batch")
    add("--corrupt", action="store_true", help="up to what the model reads")
    objectives = ("autoregressive", "masked_diffusion")
    add("--objective", default="autoregressive", choices=objectives, help="whose corruption")
    add = parser.add_argument_group("how it is measured").add_argument
    add("--workers", type=int, nargs="+", default=[0, 2, 4], metavar="N", help="numbers of them, in turn")
    add("--batches", type=count, default=200, metavar="N", help="of each measurement")
    add("--repeat", type=count, default=5, metavar="N", help="measurements of each; the median counts")
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
        samples = Samples(IndexedTokens(args.prefix or synthetic(folder)), args.seq_len, 0)
        samples.take(np.arange(n_samples))  # into the page cache, for all sides
        print(f"{n_samples:,} samples of {args.seq_len} in batches of {args.batch_size}")
        for n_workers in args.workers:
            found: dict[str, list[Speed]] = {"ours": [], "torch": []}
            for _ in range(args.repeat):
                for name, side in (("ours", ours), ("torch", torchs)):
                    made = (samples, args.batch_size, args.batches, n_workers, task)
                    found[name].append(measure(lambda side=side, made=made: side(*made), n_samples))
            report(n_workers, found["ours"], found["torch"], n_samples)
    return 0


def report(n_workers: int, own: list[Speed], other: list[Speed], n_samples: int) -> None:
    """One number of workers in two lines."""
    speeds, costs = (
        [[float(np.median([getattr(one, name) for one in side])) for side in (own, other)]
         for name in ("samples_per_s", "cpu_s")]
    )  # fmt: skip
    same = len({one.checksum for one in own + other}) == 1
    for name, speed, cost in zip(("ours", "DataLoader"), speeds, costs, strict=True):
        ratios = f"ratio to ours: time {speeds[0] / speed:4.1f}, CPU {cost / costs[0]:4.1f}"
        each = f"CPU {cost / n_samples * 1e6:4.0f} us a sample"
        print(f"{n_workers} workers  {name:10} {speed:9,.0f} samples/s   {each}   {ratios}", flush=True)
    print(f"           the samples are {'the same' if same else 'DIFFERENT'}", flush=True)


if __name__ == "__main__":
    run(main)
