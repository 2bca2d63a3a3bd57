"""Score models on downstream tasks through lm-evaluation-harness.

    python tools/evaluate_downstream.py experiments/run --tasks arc_easy,copa --limit 200
    python tools/evaluate_downstream.py EleutherAI/pythia-70m@step1000 --tasks arc_easy --batch-size 64
    torchrun --standalone --nproc-per-node 2 tools/evaluate_downstream.py experiments/run --tasks hellaswag

MODEL is any format that tools/convert_checkpoint.py reads, a folder of checkpoints, a study, or NAME or
NAME@REVISION of the Hugging Face hub, from its cache or downloaded. Prompts, metrics and answers come from
lm-eval. Results, with files that lm-eval's tools
read, are written to downstream/<checkpoint>/<method>/ in the run's folder, for a name of the hub to
NAME.scores/; finished tasks are not scored again.
"""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from megatron.cli import create_parser, positive_int, run_main, shorten_path
from megatron.config.cli_choices import METHODS
from megatron.evaluation.machine_options import add_machine_options, open_requested_world


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    removed = {
        "--backend": "Use `lm_eval --model hf`",
        "--data-dir": "Use --include-path, as in DOWNSTREAM.md",
    }
    parser = create_parser(__doc__, takes_ranks=True, removed=removed)
    models = "checkpoints, runs, a study, models in other formats, names of the hub"
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL", help=models)
    add = parser.add_argument_group("tasks").add_argument
    add("--tasks", required=True, metavar="NAMES", help="lm-eval tasks, separated by commas")
    folder = "folder of task files, for example with local data; default: lm-eval's tasks"
    add("--include-path", type=Path, metavar="DIR", help=folder)
    add("--limit", type=positive_int, metavar="N", help="first N documents of each task; default: all")
    add("--num-fewshot", type=int, metavar="N", help="examples of each question; default: the task's")
    how = parser.add_argument_group("scoring")
    method = "masked diffusion: mc, the likelihood bound (default), or ar, left to right"
    how.add_argument("--method", choices=METHODS, help=method)
    masks = "mc: sampled masks per answer"
    how.add_argument("--num-mc", type=positive_int, default=32, metavar="N", help=masks)
    add = how.add_mutually_exclusive_group().add_argument
    add("--only-generate", action="store_true", help="masked diffusion: only exact-match tasks")
    add("--only-mc-nll", action="store_true", help="masked diffusion: only tasks ranked by the bound")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="seed of masks and of sampled text")
    how.add_argument("--tokenizer", metavar="PATH", help="default: the tokenizer that the model names")
    add = parser.add_argument_group("results").add_argument
    add("--out", type=Path, metavar="DIR", help="output folder, for a single model")
    add(
        "--log-samples",
        action="store_true",
        dest="samples",
        help="write every prompt with the model's output",
    )
    add_machine_options(parser, batch_size=32, unit="requests")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Score, and print a table and the path of the results for each model."""
    args = build_parser().parse_args(argv)
    # imported after parsing, so that --help does not load torch
    from megatron.evaluation.downstream_tasks import DownstreamRequest, evaluate_downstream
    from megatron.evaluation.harness_files import format_results
    from megatron.evaluation.reader import Scoring
    from megatron.evaluation.scored_models import find_models
    from megatron.plan.run_dir import DOWNSTREAM_RESULTS

    how = {field.name: getattr(args, field.name) for field in fields(DownstreamRequest)}
    request = DownstreamRequest(**how | {"tasks": tuple(name for name in args.tasks.split(",") if name)})
    names = {field.name for field in fields(Scoring)} & set(vars(args))
    scoring = Scoring(**{name: getattr(args, name) for name in names})
    models = find_models(args.models, args.out)
    with open_requested_world(args) as world:
        for model in models:
            results, before, folder = evaluate_downstream(
                model, request, scoring, world, tokenizer=args.tokenizer, out=args.out
            )
            if world.is_first:
                print(format_results(results))
                if before:
                    print(f"scored before: {', '.join(before)}")
                print(shorten_path(folder / DOWNSTREAM_RESULTS))
    return 0


if __name__ == "__main__":
    run_main(main)
