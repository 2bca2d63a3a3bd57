"""Text to a finished .bin/.idx: ours beside other ways, on the same file, in one run.

    python tools/bench/preprocess.py c4.jsonl --tokenizer-model gpt2 --workers 2

The other sides are written here as people write them: `tokenizers` is a pool of processes that call the
tokenizers library a document at a time and send ids back; `batch` gives each process whole batches;
`fastokens`, where it is installed, is a plain pipeline around a fast encoder from PyPI. Every side is a
process of its own; times are the operating system's, memory is the largest resident sum of the whole process
tree. The ids of all sides are compared.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from megatron.command import command, count, run
from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter, dtype_for
from megatron.tokenizer.bpe import load_tokenizer

TOOL = Path(__file__).resolve().parents[1] / "preprocess_data_many_cores.py"
SIDES = ("tokenizers", "batch", "fastokens")
_WORKER: dict[str, Any] = {}


@dataclass(frozen=True)
class Cost:
    """Of one side: seconds, and the largest resident memory of all its processes together, in MB."""

    wall_s: float
    cpu_s: float
    memory_mb: float
    said: str = ""  # on its standard output


def measure(command: Sequence[str]) -> Cost:
    """Run a command to its end. RuntimeError when it fails."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = 0.0
    stop = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.02):
            peak = max(peak, sum(resident_mb(pid) for pid in tree(process.pid)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert process.stdout is not None, "a pipe was asked for"
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - begin
    stop.set()
    watcher.join()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise OSError(f"{' '.join(command)}: exit status {process.returncode}")
    return Cost(wall_s, usage.ru_utime + usage.ru_stime, peak, said)


def tree(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from tree(int(child))
    except OSError:
        return  # gone meanwhile


def resident_mb(pid: int) -> float:
    """Resident memory of one process, 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return 0.0


def start(model: str, side: str) -> None:
    """In a worker of another side: load what it encodes with. A worker keeps to one core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    inner = load_tokenizer(model).inner
    if side == "fastokens":
        import fastokens

        flat = fastokens.Tokenizer.from_json_str(inner.to_str()).encode_batch_flat
        _WORKER["batch"] = lambda texts: split(*flat(texts))
    else:
        _WORKER["one"] = lambda text: inner.encode(text).ids
        _WORKER["batch"] = lambda texts: [found.ids for found in inner.encode_batch(texts)]


def split(ids: bytes, offsets: bytes) -> list[np.ndarray]:
    """The ids of each text, from those of all of them."""
    bounds = np.frombuffer(offsets, np.uint64).astype(np.int64)
    return np.split(np.frombuffer(ids, np.uint32), bounds[1:-1])


def encode_one(line: bytes) -> list[int]:
    """A document at a time, ids back as a list: the classic script."""
    return _WORKER["one"](json.loads(line)["text"])


def encode_many(lines: list[bytes]) -> list[np.ndarray]:
    """Some hundred documents at a time, ids back as arrays."""
    texts = [json.loads(line)["text"] for line in lines]
    return [np.asarray(ids, dtype=np.uint16) for ids in _WORKER["batch"](texts)] if texts else []


def batches(lines: Iterable[bytes], size: int = 256) -> Iterator[list[bytes]]:
    """Lists of `size` lines."""
    held: list[bytes] = []
    for line in lines:
        held.append(line)
        if len(held) == size:
            yield held
            held = []
    yield held


def other_side(side: str, source: str, model: str, n_workers: int, out: str) -> None:
    """Another way to do it, whole, in this process and its pool."""
    tokenizer = load_tokenizer(model)
    with (
        multiprocessing.get_context("spawn").Pool(n_workers, start, (model, side)) as pool,
        IndexedWriter(out, dtype_for(tokenizer.n_tokens)) as writer,
        open(source, "rb") as file,
    ):
        if side == "tokenizers":
            for ids in pool.imap(encode_one, file, 25):
                writer.add_document([*ids, tokenizer.eod_id])
        else:
            for many in pool.imap(encode_many, batches(file)):
                for ids in many:
                    writer.add_document(np.append(ids, tokenizer.eod_id))


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument("source", metavar="TEXT.jsonl", help="100 MB or more, with a key 'text'")
    add = parser.add_argument
    add("--tokenizer-model", default="gpt2", metavar="NAME", help="a folder, or a name")
    add("--workers", type=count, default=2, metavar="N", help="cores for every side")
    add("--sides", nargs="+", default=["tokenizers", "batch"], choices=SIDES, help="to run beside ours")
    add("--repeat", type=count, default=3, metavar="N", help="runs of ours; the median counts")
    add("--side", metavar="SIDE", help=argparse.SUPPRESS)
    add("--out", metavar="PATH", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all sides and print ratios."""
    args = build_parser().parse_args(argv)
    if "fastokens" in args.sides and find_spec("fastokens") is None:
        raise ValueError("--sides fastokens: it is not installed; pip install fastokens")
    if args.side:
        other_side(args.side, args.source, args.tokenizer_model, args.workers, args.out)
        return 0
    megabytes = os.path.getsize(args.source) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        ours = [sys.executable, str(TOOL), "--input", args.source, "--output-prefix", "ours",
                "--root", folder, "--tokenizer-model", args.tokenizer_model, "--append-eod", "--timing",
                "--workers", str(args.workers)]  # fmt: skip
        costs = []
        for _ in range(args.repeat):
            remove_pair(out / "ours_text_document")  # the same command would else find its work done
            costs.append(measure(ours))
        own = sorted(costs, key=lambda cost: cost.cpu_s)[len(costs) // 2]
        tokens = IndexedTokens(out / "ours_text_document")
        print(
            f"{args.source}: {megabytes:.0f} MB, {tokens.n_documents:,} documents, {tokens.n_tokens:,} tokens"
        )
        report("ours", own, own, megabytes, tokens.n_tokens)
        print(f"{'':12} {own.said.splitlines()[-1]}")
        for side in args.sides:
            prefix = str(out / side)
            command = [sys.executable, __file__, args.source, "--tokenizer-model", args.tokenizer_model,
                       "--workers", str(args.workers), "--side", side, "--out", prefix]  # fmt: skip
            cost = measure(command)
            same = Path(f"{prefix}.bin").read_bytes() == (out / "ours_text_document.bin").read_bytes()
            report(side, cost, own, megabytes, tokens.n_tokens)
            print(f"{'':12} its ids are {'the same' if same else 'DIFFERENT'}")
            remove_pair(out / side)
    return 0


def remove_pair(prefix: Path) -> None:
    """Remove a pair and its sidecar, if they are there."""
    for suffix in (".bin", ".idx", ".json"):
        Path(f"{prefix}{suffix}").unlink(missing_ok=True)


def report(side: str, cost: Cost, ours: Cost, megabytes: float, n_tokens: int) -> None:
    """One side in one line."""
    print(
        f"{side:12} wall {cost.wall_s:7.2f} s   CPU {cost.cpu_s:7.2f} s   "
        f"{megabytes / cost.cpu_s:7.1f} MB/CPU-s   "
        f"{n_tokens / cost.wall_s / 1e6:6.2f} M tokens/s   {cost.memory_mb:6.0f} MB   "
        f"ratio to ours: wall {cost.wall_s / ours.wall_s:5.1f}, CPU {cost.cpu_s / ours.cpu_s:5.1f}",
        flush=True,
    )


if __name__ == "__main__":
    run(main)
