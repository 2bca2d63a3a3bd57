"""Run a study: every run of its ladder that has no result yet.

    python tools/sweep.py STUDY.yaml --dry-run
    python tools/sweep.py STUDY.yaml [key=value ...]

Exit status: 0 all runs are done, 1 some failed, 2 wrong usage, 75 stopped when asked to (run it again to go
on).
"""

import argparse
import sys
from collections.abc import Sequence

from megatron.scaling.ladder import expand, read_study_plan
from megatron.scaling.price import gpu_names, speed_of
from megatron.scaling.sweep import PREEMPTED, default_jobs, price_table, sweep


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command-line words."""
    parser = argparse.ArgumentParser(
        description="Run every run of a study that has no result yet.",
        epilog="example: python tools/sweep.py examples_scaling/quickstart/quickstart.yaml --dry-run",
    )
    parser.add_argument("study", metavar="STUDY.yaml", help="the study")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes to it, e.g. run.optim.lr=1e-3"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print each run with its cost, and run nothing"
    )
    parser.add_argument("--jobs", type=int, help="runs at a time (by itself: one a core, or four a GPU)")
    parser.add_argument("--tflops", type=float, help="sustained TFLOP/s of one run, for the expected time")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Plan or run, and say how it ended."""
    args = parse_args(argv)
    try:
        study = read_study_plan(args.study, args.overrides)
        if args.dry_run:
            runs = expand(study)
            print(price_table(runs, speed_of(runs, args.tflops), args.jobs or default_jobs(len(gpu_names()))))
            return 0
        outcome = sweep(study, args.jobs)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{study.directory}: {outcome.n_done} of {outcome.n_runs} runs done")
    for line in outcome.failed:
        print(f"error: {line}", file=sys.stderr)
    if outcome.interrupted:
        print("stopped; run the same command again to go on", file=sys.stderr)
        return PREEMPTED
    return 1 if outcome.n_done < outcome.n_runs else 0


if __name__ == "__main__":
    sys.exit(main())
