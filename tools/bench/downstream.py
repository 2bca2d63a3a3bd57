"""Benchmark downstream scoring: ours against lm-eval's `hf` model, with the same weights, in one process.

    python tools/bench/downstream.py --include-path data/tasks --size 7M --limit 100

Both sides score the same requests of a task, alternating, with the same batch size and threads, including
tokenization. The work of lm-eval before and after is the same and is not timed. All log-likelihoods must
agree. A ratio above 1: ours is faster.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from generate import build_weights
from harness import add_options, format_ratio, median_wall, time_in_turns, write_results

from megatron.checkpoint.convert.formats import read_any
from megatron.checkpoint.convert.huggingface import write_huggingface
from megatron.cli import create_parser, positive_int, run_main
from megatron.evaluation.harness import harness_model
from megatron.evaluation.harness_tasks import open_tasks
from megatron.evaluation.reader import Reader, Scoring
from megatron.parallel.world import World

CLOSE = 1e-4  # nats; or a relative 1e-6 for long continuations, which hf sums in float32


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("model and tasks").add_argument
    add("--include-path", type=Path, metavar="DIR", help="folder of lm-eval task files with local data")
    add("--size", default="7M", metavar="NAME", help="size of utils/model_sizes.yaml, with random weights")
    add("--model", type=Path, metavar="PATH", help="an autoregressive model instead of --size")
    add("--tokenizer", metavar="NAME", help="tokenizer, if the model does not name it")
    add("--tasks", default="hellaswag,lambada_openai", metavar="TASK,TASK", help="lm-eval tasks")
    add("--limit", type=positive_int, default=100, metavar="N", help="documents per task")
    add("--batch-size", type=positive_int, default=16, metavar="N", help="requests per forward pass")
    add("--threads", type=positive_int, metavar="N", help="default: torch's choice")
    add_options(parser, repeat=3)
    return parser


def agree(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Return whether all pairs (log-likelihood, is the most likely continuation) are equal."""
    return all(
        abs(a[0] - b[0]) < max(CLOSE, 1e-6 * abs(b[0])) and a[1] == b[1]
        for a, b in zip(ours, theirs, strict=True)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Time both sides, and print a line for each task."""
    args = build_parser().parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    from lm_eval.models.huggingface import HFLM

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    weights = read_any(args.model, tokenizer=args.tokenizer) if args.model else build_weights(args.size)
    weights = replace(weights, source=weights.source or args.size)
    # rank 0 of one process, local rank 0, on the CPU
    world = World(0, 1, 0, torch.device("cpu"))
    ours = harness_model(Reader(weights, Scoring(batch_size=args.batch_size), world))
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        tasks = open_tasks(args.tasks.split(","), args.include_path)
        exported = Path(folder) / "model"
        write_huggingface(weights, exported)
        theirs = HFLM(pretrained=str(exported), batch_size=args.batch_size, device="cpu", dtype="float32")
        for name, task in tasks.items():
            requests = task.build_requests(args.limit)
            sides = {
                "ours": lambda batch=requests: ours.loglikelihood(batch),
                "hf": lambda batch=requests: theirs.loglikelihood(batch, disable_tqdm=True),
            }
            costs = time_in_turns(sides, args.repeat, warmup=1)
            same = agree(costs["ours"][0].result, costs["hf"][0].result)
            speeds = {side: len(requests) / median_wall(turns) for side, turns in costs.items()}
            results[name] = (
                f"ours {speeds['ours']:,.0f} requests/s, hf {speeds['hf']:,.0f}, "
                f"{format_ratio(costs['ours'], costs['hf'])}, {'the same' if same else 'OTHER'} scores"
            )
            print(
                f"{Path(weights.source).name} {name}: {results[name]}, batch {args.batch_size}, "
                f"{torch.get_num_threads()} threads"
            )
            if not same:
                return 1
    write_results(args.json, results)
    return 0


if __name__ == "__main__":
    run_main(main)
