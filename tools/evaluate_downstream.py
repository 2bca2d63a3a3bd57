"""Score models on downstream tasks through lm-evaluation-harness.

    python tools/evaluate_downstream.py experiments/run --tasks arc_easy,copa --limit 200
    torchrun --standalone --nproc-per-node 2 tools/evaluate_downstream.py experiments/run --tasks hellaswag

MODEL is whatever tools/convert_checkpoint.py reads, a folder of checkpoints, or a whole study. Prompts,
metrics and answers are lm-eval's own. Results go to downstream/<checkpoint>/<method>/ in the run's folder;
finished tasks are not scored again.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.command import command, count, failed, near, run
from megatron.config.choices import METHODS
from megatron.evaluation.options import add_machine_options, open_asked_world


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__, takes_ranks=True)
    parser.add_argument(
        "models", nargs="+", type=Path, metavar="MODEL", help="checkpoints, runs, a study, models of others"
    )
    add = parser.add_argument_group("what is asked").add_argument
    add("--tasks", required=True, metavar="NAMES", help="of lm-eval, joined by commas")
    add(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="the tasks' data from files there; else lm-eval downloads",
    )
    add("--limit", type=count, metavar="N", help="first documents of each task; by itself all")
    add(
        "--num-fewshot", type=int, metavar="N", help="examples before each question; by itself the task's own"
    )
    how = parser.add_argument_group("how it is scored")
    add = how.add_argument
    add("--method", choices=METHODS, help="masked diffusion: mc, its bound (by itself), or ar, left to right")
    add("--num-mc", type=count, default=32, metavar="N", help="mc: masks for an answer")
    only = how.add_mutually_exclusive_group()
    only.add_argument("--only-generate", action="store_true", help="masked diffusion: exact match alone")
    only.add_argument(
        "--only-mc-nll", action="store_true", help="masked diffusion: ranking by the bound alone"
    )
    add("--seed", type=int, default=0, metavar="N", help="of masks and of sampled text")
    add("--tokenizer", metavar="PATH", help="by itself the one that the model says")
    add = parser.add_argument_group("results").add_argument
    add("--out", type=Path, metavar="DIR", help="where results go, for a single model")
    add("--log-samples", action="store_true", help="write every prompt with what the model said")
    add_machine_options(parser, batch_size=32, unit="requests")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Score, print a table for each model, and say where the results are."""
    args = build_parser().parse_args(argv)
    # after the words: --help should not wait for torch
    from megatron.evaluation.downstream import Asked, evaluate_downstream
    from megatron.evaluation.harness import table
    from megatron.evaluation.reader import Scoring
    from megatron.evaluation.scores import models_of
    from megatron.run_dir import DOWNSTREAM_RESULTS

    try:
        asked = Asked(
            tasks=tuple(name for name in args.tasks.split(",") if name),
            data=args.data_dir,
            limit=args.limit,
            num_fewshot=args.num_fewshot,
            samples=args.log_samples,
        )
        scoring = Scoring(
            method=args.method,
            num_mc=args.num_mc,
            only_generate=args.only_generate,
            only_mc_nll=args.only_mc_nll,
            seed=args.seed,
            batch_size=args.batch_size,
        )
        models = models_of(args.models, args.out)
        with open_asked_world(args) as world:
            for model in models:
                results, before, folder = evaluate_downstream(
                    model, asked, scoring, world, tokenizer=args.tokenizer, out=args.out
                )
                if world.is_first:
                    print(table(results))
                    if before:
                        print(f"scored before: {', '.join(before)}")
                    print(near(folder / DOWNSTREAM_RESULTS))
    except (OSError, ValueError) as error:
        return failed(error)
    return 0


if __name__ == "__main__":
    run(main)
