"""Benchmark preprocessing of text to a .bin/.idx dataset: ours against other implementations on the same
file.

    python tools/bench/preprocess.py c4.jsonl --tokenizer-model gpt2 --workers 2

The other sides are the usual code: `tokenizers` is a pool of processes that call the tokenizers library one
document at a time and send ids back; `batch` gives each process whole batches; `fastokens` and `gigatoken`,
if installed, are plain pipelines around fast encoders from PyPI. Each side is a separate process. Times are
from the operating system; memory is the maximum resident sum of the process tree. The ids of all sides
are compared.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from harness import add_options, write_results

from megatron.cli import create_parser, positive_int, run_main
from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter, dtype_for
from megatron.tokenizer.bpe import load_hf_tokenizer
from megatron.tokenizer.kinds import TokenizerSpec, load_tokenizer

TOOL = Path(__file__).resolve().parents[1] / "preprocess_data_many_cores.py"
SIDES = ("tokenizers", "batch", "fastokens", "gigatoken")
REQUIRED = {"fastokens": ["fastokens"], "gigatoken": ["gigatoken", "awkward"]}
_WORKER: dict[str, Any] = {}


@dataclass(frozen=True)
class Cost:
    """Cost of one side: seconds, and the maximum resident memory of all its processes together in MB."""

    wall_s: float
    cpu_s: float
    memory_mb: float
    stdout: str = ""


def measure_command(command: Sequence[str]) -> Cost:
    """Run a command to its end and measure it. Raise OSError if it fails."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = 0.0
    stop = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.02):
            peak = max(peak, sum(resident_mb(pid) for pid in process_tree(process.pid)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert process.stdout is not None, "stdout is a pipe"
    # read to its end before waiting: a command that fills the pipe would wait for this process forever
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)  # includes the CPU time of ended children
    wall_s = time.perf_counter() - begin
    stop.set()
    watcher.join()
    # wait4 has reaped the process, so Popen must not wait for an id that may have been reused
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise OSError(f"{' '.join(command)}: exit status {process.returncode}")
    return Cost(wall_s, usage.ru_utime + usage.ru_stime, peak, output)


def process_tree(pid: int) -> Iterator[int]:
    """Yield the ids of a process and all its descendants."""
    yield pid
    with suppress(OSError):  # the process may have ended meanwhile
        # the kernel lists children by the thread that started them, not by process
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from process_tree(int(child))


def resident_mb(pid: int) -> float:
    """Return the resident memory of one process in MB; 0 if it has ended."""
    with suppress(OSError):
        # the second field is the resident size in pages;
        # a page shared by two processes counts twice in the sum
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return 0.0


def load_encoder(model: str, side: str) -> None:
    """Load the encoder of another side in a worker, limited to one core."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    inner = load_library_tokenizer(model)
    _WORKER["dtype"] = dtype_for(inner.get_vocab_size())
    if side == "fastokens":
        import fastokens

        # returns (ids uint32, offsets uint64) of all texts as bytes
        flat = fastokens.Tokenizer.from_json_str(inner.to_str()).encode_batch_flat
        _WORKER["batch"] = lambda texts: split_ids(*flat(texts))
    elif side == "gigatoken":
        import awkward
        import gigatoken

        encode = gigatoken.Tokenizer(inner).encode_batch
        _WORKER["batch"] = lambda texts: [awkward.to_numpy(row) for row in encode(texts, parallel=False)]
    else:
        _WORKER["document"] = lambda text: inner.encode(text, add_special_tokens=False).ids
        _WORKER["batch"] = lambda texts: [
            encoding.ids for encoding in inner.encode_batch_fast(texts, add_special_tokens=False)
        ]


def load_library_tokenizer(model: str) -> Any:
    """Load the library's tokenizer as a plain pipeline does, without the work of ours."""
    path = Path(model) / "tokenizer.json"
    if not path.is_file():
        return load_hf_tokenizer(model).inner
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def split_ids(ids: bytes, offsets: bytes) -> list[np.ndarray]:
    """Split the ids of all texts by their offsets."""
    # offsets [0, 3, 5] of two texts: the inner bounds [3] split the ids
    bounds = np.frombuffer(offsets, np.uint64).astype(np.int64)
    return np.split(np.frombuffer(ids, np.uint32), bounds[1:-1])


def encode_document(line: bytes) -> list[int]:
    """Encode one document and return its ids as a list, as in the usual script."""
    return _WORKER["document"](json.loads(line)["text"])


def encode_documents(lines: list[bytes]) -> list[np.ndarray]:
    """Encode a batch of documents and return their ids as arrays."""
    texts = [json.loads(line)["text"] for line in lines]
    # arrays of the dataset's type: few bytes are pickled back to the parent
    return [np.asarray(ids, dtype=_WORKER["dtype"]) for ids in _WORKER["batch"](texts)] if texts else []


def batch_lines(lines: Iterable[bytes], size: int = 256) -> Iterator[list[bytes]]:
    """Yield lists of `size` lines; the last one is shorter."""
    batch: list[bytes] = []
    for line in lines:
        batch.append(line)
        if len(batch) == size:
            yield batch
            batch = []
    yield batch


def run_other_side(side: str, source: str, args: argparse.Namespace, out: str) -> None:
    """Run another implementation completely, in this process and its pool."""
    model, n_workers = args.tokenizer_model, args.workers
    tokenizer = load_tokenizer(TokenizerSpec(model=model, eod_token=args.eod_token))
    for package in REQUIRED.get(side, ()):
        import_module(package)  # a Pool whose initializer fails would start processes forever
    with (
        # spawn: threads that a library has started do not exist in a forked process
        multiprocessing.get_context("spawn").Pool(n_workers, load_encoder, (model, side)) as pool,
        IndexedWriter(out, dtype_for(tokenizer.n_tokens)) as writer,
        open(source, "rb") as file,
    ):
        if side == "tokenizers":
            # imap returns results in input order, so the .bin is comparable; 25 lines per message
            for ids in pool.imap(encode_document, file, 25):
                writer.add_document([*ids, tokenizer.eod_id])
        else:
            for many in pool.imap(encode_documents, batch_lines(file)):
                for ids in many:
                    writer.add_document(np.append(ids, tokenizer.eod_id))


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument("source", metavar="TEXT.jsonl", help="100 MB or more of JSON lines with a key 'text'")
    add = parser.add_argument_group("sides").add_argument
    add("--tokenizer-model", default="gpt2", metavar="NAME", help="tokenizer folder or name")
    add("--eod-token", metavar="TOKEN", help="end-of-document token, if the tokenizer has several")
    add("--workers", type=positive_int, default=2, metavar="N", help="worker processes of each side")
    sides = ["tokenizers", "batch"]
    add("--sides", nargs="+", default=sides, choices=SIDES, help="implementations to compare with")
    add("--side", metavar="SIDE", help=argparse.SUPPRESS)
    add("--out", metavar="PATH", help=argparse.SUPPRESS)
    add_options(parser, repeat=3)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all sides, and print the ratios."""
    args = build_parser().parse_args(argv)
    for side, packages in REQUIRED.items():
        if side in args.sides and any(find_spec(package) is None for package in packages):
            raise ValueError(f"--sides: {side} is not installed. Run pip install {' '.join(packages)}.")
    if args.side:
        run_other_side(args.side, args.source, args, args.out)
        return 0
    megabytes = os.path.getsize(args.source) / 1e6
    eod_option = [] if args.eod_token is None else ["--eod-token", args.eod_token]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        ours = [sys.executable, str(TOOL), "--input", args.source, "--output-prefix", "part",
                "--root", str(out / "ours"), "--tokenizer-model", args.tokenizer_model, "--append-eod",
                "--workers", str(args.workers), *eod_option]  # fmt: skip
        costs = []
        for _ in range(args.repeat):
            # otherwise the command would skip the finished work
            shutil.rmtree(out / "ours", ignore_errors=True)
            costs.append(measure_command(ours))
        # the median by CPU time, since wall time depends on the load
        our_cost = sorted(costs, key=lambda cost: cost.cpu_s)[len(costs) // 2]
        tokens = IndexedTokens(out / "ours" / "part_text_document")
        n_tokens = tokens.n_tokens
        print(f"{args.source}: {megabytes:.0f} MB, {tokens.n_documents:,} documents, {n_tokens:,} tokens")
        print_side("ours", our_cost, our_cost, megabytes, n_tokens)
        results = {"ours": asdict(our_cost)}
        for side in args.sides:
            prefix = str(out / side)
            command = [sys.executable, __file__, args.source, "--tokenizer-model", args.tokenizer_model,
                       "--workers", str(args.workers), "--side", side, "--out", prefix,
                       *eod_option]  # fmt: skip
            cost = measure_command(command)
            results[side] = asdict(cost)
            n_different = count_different(tokens, IndexedTokens(Path(prefix)))
            print_side(side, cost, our_cost, megabytes, n_tokens)
            same = f"DIFFERENT in {n_different:,} documents" if n_different else "the same"
            print(f"{'':12} its ids are {same}")
    write_results(args.json, {"megabytes": megabytes, "tokens": n_tokens, **results})
    return 0


def count_different(ours: IndexedTokens, theirs: IndexedTokens) -> int:
    """Return the number of documents whose ids differ."""
    n_common = min(ours.n_documents, theirs.n_documents)
    different = (not np.array_equal(ours.get_document(i), theirs.get_document(i)) for i in range(n_common))
    return sum(different) + abs(ours.n_documents - theirs.n_documents)


def print_side(side: str, cost: Cost, ours: Cost, megabytes: float, n_tokens: int) -> None:
    """Print one line for one side."""
    print(
        f"{side:12} wall {cost.wall_s:7.2f} s   CPU {cost.cpu_s:7.2f} s   "
        f"{megabytes / cost.cpu_s:7.1f} MB/CPU-s   "
        f"{n_tokens / cost.wall_s / 1e6:6.2f} M tokens/s   {cost.memory_mb:6.0f} MB   "
        f"ratio to ours: wall {cost.wall_s / ours.wall_s:5.1f}, CPU {cost.cpu_s / ours.cpu_s:5.1f}",
        flush=True,
    )


if __name__ == "__main__":
    run_main(main)
