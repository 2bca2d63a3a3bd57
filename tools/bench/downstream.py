"""Downstream scores: ours beside lm-eval's own `hf` model, with the same weights, in one process.

    python tools/bench/downstream.py --data-dir ../shared/data/downstream --size 7M --limit 100
    python tools/bench/downstream.py --data-dir ../shared/data/downstream --model stories260K.bin \\
        --tokenizer tok512.bin

Both answer the same requests of a task, in turn, at the same batch size and on the same threads, tokenising
included; what lm-eval does before and after is left out, being the same. All log-likelihoods must agree. The
ratio is of the medians; above 1 ours is the faster one.
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

from megatron.checkpoint.convert import read_any
from megatron.checkpoint.huggingface import write_huggingface
from megatron.checkpoint.tokenizer_files import write_tokenizer
from megatron.checkpoint.weights import Weights
from megatron.command import command, count, run
from megatron.config.presets import padded_rows, shape_of_size
from megatron.config.schema import ModelConfig
from megatron.evaluation.harness import harness_model, hf_model, open_tasks
from megatron.evaluation.reader import Reader, Scoring
from megatron.model.gpt import Gpt
from megatron.model.initial import initialise
from megatron.parallel.world import World

N_TOKENS = 50257  # GPT-2's
CLOSE = 1e-4  # nats, or 1e-6 of a long continuation's, which hf adds up in float32


def build(size: str) -> Weights:
    """A named size with random weights and GPT-2's tokenizer."""
    config = ModelConfig(
        **{**shape_of_size(size), "n_tokens": N_TOKENS, "vocab_rows": padded_rows(N_TOKENS), "size": size}
    )
    model = Gpt(config)
    initialise(model, seed=0)
    state = model.state_dict()
    return Weights(
        config=config, objective="autoregressive", state=state, seq_len=2048, tokenizer="gpt2", source=size
    )


def timed(run: Callable[[], Any]) -> tuple[float, float, Any]:
    """(wall, CPU, what it gave)."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = run()
    return time.perf_counter() - wall, time.process_time() - cpu, found


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    add = parser.add_argument_group("what is scored").add_argument
    add("--data-dir", type=Path, required=True, metavar="DIR", help="the tasks' data")
    add("--size", default="7M", metavar="NAME", help="of utils/model_sizes.yaml, with random weights")
    add("--model", type=Path, metavar="PATH", help="an autoregressive model instead")
    add("--tokenizer", metavar="NAME", help="of the model, where it does not say")
    add("--tasks", default="hellaswag,lambada_openai", metavar="TASK,TASK", help="of lm-eval")
    add("--limit", type=count, default=100, metavar="N", help="documents of a task")
    add = parser.add_argument_group("how it is measured").add_argument
    add("--batch-size", type=count, default=16, metavar="N", help="requests of a forward")
    add("--repeat", type=count, default=3, metavar="N", help="turns of each side; medians count")
    add("--threads", type=count, metavar="N", help="by itself torch's choice")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a line for each task."""
    args = build_parser().parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    weights = read_any(args.model, tokenizer=args.tokenizer) if args.model else build(args.size)
    weights = replace(weights, source=weights.source or args.size)
    world = World(0, 1, 0, torch.device("cpu"))
    ours = harness_model(Reader(weights, Scoring(batch_size=args.batch_size), world))
    tokenizer = str(weights.tokenizer)
    with tempfile.TemporaryDirectory() as folder, open_tasks(args.tasks.split(","), args.data_dir) as tasks:
        exported = Path(folder) / "model"
        write_huggingface(weights, exported, write_tokenizer=lambda path: write_tokenizer(tokenizer, path))
        theirs = hf_model(exported, args.batch_size)
        for name, task in tasks.items():
            requests = task.requests(args.limit)
            turns = [
                (
                    timed(lambda asked=requests: ours.loglikelihood(asked)),
                    timed(lambda asked=requests: theirs.loglikelihood(asked, disable_tqdm=True)),
                )
                for _ in range(args.repeat + 1)
            ][1:]
            a, b = turns[0][0][2], turns[0][1][2]
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
            if not same:
                return 1
    return 0


if __name__ == "__main__":
    run(main)
