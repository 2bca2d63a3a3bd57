"""Train every run of a study that has no result yet.

python tools/sweep.py examples_scaling/quickstart/quickstart.yaml --dry-run --hardware H100
python tools/sweep.py examples_scaling/quickstart/quickstart.yaml run.optim.lr=1e-3
python tools/sweep.py examples_scaling/training/learning_rate.yaml --launcher slurm --sbatch=--qos=low
"""

import argparse
import sys
from collections.abc import Sequence

from megatron.cli import (
    STOPPED,
    create_parser,
    escape_controls,
    non_negative_int,
    positive_int,
    run_main,
)
from megatron.report.plot_command import add_plot_option, plot_price, write_figure
from megatron.study.forecast import RUN, read_forecasts
from megatron.study.ladder import PlannedRun, expand_study, read_study_plan, select_runs_of_part
from megatron.study.price import Speed, Tariff, add_tariff_options, estimate_speed, format_price
from megatron.study.sweep import SweepOptions, count_jobs, run_sweep, time_study

REMOVED = {
    "--currency": "A price is in any unit",
    "--details": "Use plan.json in the folder of each run, or `scaling sizes`",
    "--tflops": "Use --hardware GPU --mfu SHARE",
}


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__, may_stop=True, removed=REMOVED)
    add = parser.add_argument
    add("study", metavar="STUDY.yaml", help="study file")
    changes = "changes to the study, e.g. run.optim.lr=1e-3"
    add("overrides", nargs="*", default=[], metavar="key=value", help=changes)
    add = parser.add_argument_group("execution").add_argument
    launcher = "processes on this machine, or Slurm job arrays"
    add("--launcher", choices=("local", "slurm"), default="local", help=launcher)
    jobs = "concurrent runs; default: one per core, as many as fit on a GPU, with Slurm all"
    add("--jobs", type=positive_int, metavar="N", help=jobs)
    add("--part", metavar="NAME", help="only the runs of the cells with this `part`")
    add("--gpus-per-run", type=positive_int, default=1, metavar="N", help="GPUs that share each run")
    add("--retries", type=non_negative_int, default=1, metavar="N", help="restarts of a failed run")
    sbatch = "argument for sbatch; may be repeated"
    add("--sbatch", action="append", default=[], metavar="WORD", help=sbatch)
    price = parser.add_argument_group("price")
    add = price.add_argument
    dry_run = "print each run with its cost and exit; without data, set the paths of run.dataset to synthetic"
    add("--dry-run", action="store_true", help=dry_run)
    gpu = "GPU to price for, e.g. H100; default: time steps of the smallest and largest model here"
    add("--hardware", metavar="GPU", help=gpu)
    mfu = "with --hardware: share of the peak that every run reaches; default: from a roofline"
    add("--mfu", type=float, metavar="SHARE", help=mfu)
    add_tariff_options(price)
    add_plot_option(price)
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; options may appear between positional words."""
    parser = build_parser()
    args = parser.parse_intermixed_args(argv)
    if args.plot and not args.dry_run:
        parser.error("--plot requires --dry-run")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Price or train the runs of the study, and print the outcome."""
    args = parse_args(argv)
    options = SweepOptions(args.launcher, args.jobs, args.gpus_per_run, args.retries, args.sbatch, args.part)

    # called after `study` is read below
    def price_runs(runs: Sequence[PlannedRun]) -> Speed:
        if args.hardware is None:
            return time_study(study, options, runs)
        return estimate_speed(runs, args.hardware, args.mfu, args.gpus_per_run)

    study = read_study_plan(args.study, args.overrides)
    if args.dry_run:
        runs = select_runs_of_part(study, expand_study(study), args.part)
        # for other hardware the number of GPUs is not known, so one run at a time
        jobs = (args.jobs or 1) if args.hardware else count_jobs(study, options)
        tariff = Tariff(args.price_per_hour, args.watts, args.hardware)
        speed = price_runs(runs)
        print(format_price(runs, speed, jobs, args.gpus_per_run, tariff))
        if args.plot:
            write_figure(args.plot, plot_price(runs, speed))
        return 0
    outcome = run_sweep(study, options, price_runs)
    print(f"{study.directory}: {outcome.n_done} of {outcome.n_runs} runs done")
    for line in outcome.failed:
        # the last line of a log may contain escape sequences
        print(f"error: {escape_controls(line)}", file=sys.stderr)
    has_forecast = any(forecast.quantity == RUN for forecast in read_forecasts(study.directory))
    if outcome.n_done == outcome.n_runs and study.best is not None and not has_forecast:
        print(f"next: scaling frontier {study.directory} --predict, then this command again")
    if outcome.interrupted:
        print("stopped; run the same command again to resume", file=sys.stderr)
        return STOPPED
    return 1 if outcome.n_done < outcome.n_runs else 0


if __name__ == "__main__":
    run_main(main)
