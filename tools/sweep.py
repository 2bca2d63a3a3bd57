"""Run every run of a study's ladder that has no result yet.

python tools/sweep.py examples_scaling/quickstart/quickstart.yaml --dry-run --hardware H100
python tools/sweep.py examples_scaling/quickstart/quickstart.yaml run.optim.lr=1e-3
python tools/sweep.py examples_scaling/training/learning_rate.yaml --launcher slurm --sbatch=--qos=low
"""

import argparse
import sys
from collections.abc import Sequence

from megatron.command import STOPPED, command, count, failed, run, whole
from megatron.scaling.blind_record import load_blind
from megatron.scaling.ladder import PlannedRun, expand, read_study_plan
from megatron.scaling.price import GPU_EFFICIENCY, Speed, speed_of
from megatron.scaling.price_table import price_table
from megatron.scaling.sweep import Options, jobs_of, sweep, time_study


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__, may_stop=True)
    parser.add_argument("study", metavar="STUDY.yaml", help="the study")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="changes to it, e.g. run.optim.lr=1e-3"
    )
    running = parser.add_argument_group("running")
    running.add_argument(
        "--launcher", choices=("local", "slurm"), default="local", help="processes here, or arrays of Slurm"
    )
    running.add_argument(
        "--jobs",
        type=count,
        metavar="N",
        help="runs at a time; by itself one a core, as many as fit a GPU, all of Slurm",
    )
    running.add_argument(
        "--gpus-per-run", type=count, default=1, metavar="N", help="GPUs that share each run"
    )
    running.add_argument(
        "--retries", type=whole, default=1, metavar="N", help="how often a run that failed is started again"
    )
    running.add_argument(
        "--sbatch", action="append", default=[], metavar="WORD", help="a word for sbatch; may be repeated"
    )
    price = parser.add_argument_group("price")
    price.add_argument(
        "--dry-run",
        action="store_true",
        help="print each run with its cost, and run nothing; before there is any text, with "
        "run.dataset.path_train=synthetic run.dataset.path_eval=synthetic",
    )
    price.add_argument(
        "--hardware",
        metavar="GPU",
        help="to price for, e.g. H100; default: time a few steps of the smallest and largest model here",
    )
    price.add_argument(
        "--mfu", type=float, default=GPU_EFFICIENCY, metavar="SHARE", help="part of its peak that runs reach"
    )
    price.add_argument(
        "--tflops", type=float, metavar="TFLOPS", help="sustained TFLOP/s of one run, for the expected time"
    )
    price.add_argument(
        "--details", action="store_true", help="also unique tokens, batch, rate, FLOPs by other conventions"
    )
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options may stand between other words."""
    return build_parser().parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Plan or run, and say how it ended."""
    args = parse_args(argv)
    options = Options(args.launcher, args.jobs, args.gpus_per_run, args.retries, args.sbatch, args.details)

    def price(runs: Sequence[PlannedRun]) -> Speed:
        elsewhere = args.launcher == "slurm"
        return speed_of(
            runs,
            args.tflops,
            args.hardware,
            args.gpus_per_run,
            args.mfu,
            elsewhere,
            probe=lambda: time_study(study, options, runs),
        )

    try:
        study = read_study_plan(args.study, args.overrides)
        if args.dry_run:
            runs = expand(study)
            jobs = (args.jobs or 1) if args.hardware else jobs_of(study, options)
            print(price_table(runs, price(runs), jobs, args.gpus_per_run, args.details))
            return 0
        outcome = sweep(study, options, price)
    except (OSError, ValueError) as error:
        return failed(error)
    except KeyboardInterrupt:  # while steps were timed: nothing of the study has started
        print("stopped; nothing was trained", file=sys.stderr)
        return STOPPED
    print(f"{study.directory}: {outcome.n_done} of {outcome.n_runs} runs done")
    for line in outcome.failed:
        print(f"error: {line}", file=sys.stderr)
    if outcome.n_done == outcome.n_runs and study.blind is not None and load_blind(study.directory) is None:
        print(f"next: python tools/fit_frontier.py {study.directory} --predict, then this command again")
    if outcome.interrupted:
        print("stopped; run the same command again to go on", file=sys.stderr)
        return STOPPED
    return 1 if outcome.n_done < outcome.n_runs else 0


if __name__ == "__main__":
    run(main)
