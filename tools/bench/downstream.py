"""Benchmark downstream scoring: ours against lm-eval's `hf` model, with the same weights, in one process.

    python tools/bench/downstream.py --data-dir ../shared/data/downstream --size 7M --limit 100
    python tools/bench/downstream.py --data-dir ../shared/data/downstream --model stories260K.bin \\
        --tokenizer tok512.bin

Both sides score the same requests of a task, alternating, with the same batch size and threads, including
tokenization. The work of lm-eval before and after is the same and is not timed. All log-likelihoods must
agree. The ratio is that of the medians; above 1 ours is faster.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from history import add_history_options, record_result

from megatron.checkpoint.convert.formats import read_any
from megatron.checkpoint.convert.huggingface import write_huggingface
from megatron.checkpoint.convert.tokenizer_files import write_tokenizer
from megatron.checkpoint.model_weights import Weights
from megatron.cli import create_parser, positive_int, run_main
from megatron.config.presets import load_named_shape, padded_rows
from megatron.config.schema import ModelConfig
from megatron.evaluation.harness import build_hf_model, harness_model
from megatron.evaluation.harness_tasks import open_tasks
from megatron.evaluation.reader import Reader, Scoring
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from megatron.parallel.world import World

N_TOKENS = 50257  # GPT-2's
CLOSE = 1e-4  # nats; or a relative 1e-6 for long continuations, which hf sums in float32


def build_weights(size: str) -> Weights:
    """Return a model of a named size with random weights and GPT-2's tokenizer."""
    config = ModelConfig(
        **{**load_named_shape(size), "n_tokens": N_TOKENS, "vocab_rows": padded_rows(N_TOKENS), "size": size}
    )
    model = Gpt(config)
    init_weights(model, seed=0)
    state = model.state_dict()
    return Weights(
        config=config, objective="autoregressive", state=state, seq_len=2048, tokenizer="gpt2", source=size
    )


def time_call(run: Callable[[], Any]) -> tuple[float, float, Any]:
    """Call a function; return (wall seconds, CPU seconds, result)."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("model and tasks").add_argument
    add("--data-dir", type=Path, required=True, metavar="DIR", help="folder with the tasks' data")
    add("--size", default="7M", metavar="NAME", help="size of utils/model_sizes.yaml, with random weights")
    add("--model", type=Path, metavar="PATH", help="an autoregressive model instead of --size")
    add("--tokenizer", metavar="NAME", help="tokenizer, if the model does not name it")
    add("--tasks", default="hellaswag,lambada_openai", metavar="TASK,TASK", help="lm-eval tasks")
    add("--limit", type=positive_int, default=100, metavar="N", help="documents per task")
    add = parser.add_argument_group("measurement").add_argument
    add("--batch-size", type=positive_int, default=16, metavar="N", help="requests per forward pass")
    add(
        "--repeat",
        type=positive_int,
        default=3,
        metavar="N",
        help="timed runs of each side; the ratio is that of the medians",
    )
    add("--threads", type=positive_int, metavar="N", help="default: torch's choice")
    add_history_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Time both sides, and print a line for each task."""
    args = build_parser().parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    weights = read_any(args.model, tokenizer=args.tokenizer) if args.model else build_weights(args.size)
    weights = replace(weights, source=weights.source or args.size)
    world = World(0, 1, 0, torch.device("cpu"))
    # world 0, 1, 0: rank 0 of one process, local rank 0, on the CPU
    ours = harness_model(Reader(weights, Scoring(batch_size=args.batch_size), world))
    tokenizer = str(weights.tokenizer)
    with tempfile.TemporaryDirectory() as folder, open_tasks(args.tasks.split(","), args.data_dir) as tasks:
        exported = Path(folder) / "model"
        write_huggingface(weights, exported, write_tokenizer=lambda path: write_tokenizer(tokenizer, path))
        theirs = build_hf_model(exported, args.batch_size)
        for name, task in tasks.items():
            requests = task.build_requests(args.limit)
            # turns[repeat][side] = (wall, CPU, result); [1:] drops the first turn, which fills caches
            turns = [
                (
                    time_call(lambda batch=requests: ours.loglikelihood(batch)),
                    time_call(lambda batch=requests: theirs.loglikelihood(batch, disable_tqdm=True)),
                )
                for _ in range(args.repeat + 1)
            ][1:]
            a, b = turns[0][0][2], turns[0][1][2]
            # each result is (log-likelihood, whether the continuation is the most likely one)
            same = all(
                abs(x[0] - y[0]) < max(CLOSE, 1e-6 * abs(y[0])) and x[1] == y[1]
                for x, y in zip(a, b, strict=True)
            )
            wall = [statistics.median(turn[side][0] for turn in turns) for side in (0, 1)]
            cpu = [statistics.median(turn[side][1] for turn in turns) for side in (0, 1)]
            print(
                f"{Path(weights.source).name} {name}: ours {len(requests) / wall[0]:,.0f} requests/s, hf "
                f"{len(requests) / wall[1]:,.0f}, ratio {wall[1] / wall[0]:.2f} (CPU {cpu[1] / cpu[0]:.2f}), "
                f"{'the same scores' if same else 'OTHER SCORES'}, batch {args.batch_size}, "
                f"{torch.get_num_threads()} threads"
            )
            n_threads, n_requests = torch.get_num_threads(), len(requests)
            cell = f"{Path(weights.source).name} {name}, {n_requests} requests, {n_threads} threads"
            for side_name, unit, rates in (
                ("ours", "requests/s", [n_requests / ours_turn[0] for ours_turn, _ in turns]),
                ("ours, CPU", "requests/CPU-s", [n_requests / ours_turn[1] for ours_turn, _ in turns]),
                ("times hf", "", [hf_turn[0] / ours_turn[0] for ours_turn, hf_turn in turns]),
            ):
                value, name_of_cell = statistics.median(rates), f"{cell}: {side_name}"
                record_result(
                    args.history, "downstream", name_of_cell, value, unit, better="higher", repeats=rates
                )
            if not same:
                return 1
    return 0


if __name__ == "__main__":
    run_main(main)
