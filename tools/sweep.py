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
    report_error,
    run_main,
)
from megatron.study.forecast import RUN, read_forecasts
from megatron.study.ladder import (
    PlannedRun,
    StudyPlan,
    expand_study,
    read_study_plan,
    select_runs_of_part,
)
from megatron.study.price import Speed, estimate_speed, format_price_table
from megatron.study.sweep import SweepOptions, count_jobs, run_sweep, time_study
from megatron.study.tariff import add_tariff_options, fill_watts, read_tariff

REMOVED = {  # options of earlier versions -> replacement
    "--tflops": "--hardware GPU --mfu SHARE",
    "--details": "plan.json in the folder of each run, or tools/model_sizes.py",
}


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__, may_stop=True)
    parser.add_argument("study", metavar="STUDY.yaml", help="study file")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="changes to the study, e.g. run.optim.lr=1e-3",
    )
    running = parser.add_argument_group("execution")
    running.add_argument(
        "--launcher",
        choices=("local", "slurm"),
        default="local",
        help="processes on this machine, or Slurm job arrays",
    )
    running.add_argument(
        "--jobs",
        type=positive_int,
        metavar="N",
        help="concurrent runs; default: one per core, as many as fit on a GPU, with Slurm all",
    )
    running.add_argument("--part", metavar="NAME", help="only the runs of the cells with this `part`")
    running.add_argument(
        "--gpus-per-run", type=positive_int, default=1, metavar="N", help="GPUs that share each run"
    )
    running.add_argument(
        "--retries", type=non_negative_int, default=1, metavar="N", help="number of restarts of a failed run"
    )
    running.add_argument(
        "--sbatch", action="append", default=[], metavar="WORD", help="argument for sbatch; may be repeated"
    )
    price = parser.add_argument_group("price")
    price.add_argument(
        "--dry-run",
        action="store_true",
        help="print each run with its cost and exit; without data, add run.dataset.path_train=synthetic "
        "run.dataset.path_eval=synthetic",
    )
    price.add_argument(
        "--hardware",
        metavar="GPU",
        help="GPU to price for, e.g. H100; default: time a few steps of the smallest and largest model here",
    )
    price.add_argument(
        "--mfu",
        type=float,
        metavar="SHARE",
        help="with --hardware: share of the peak that every run reaches; default: by size, from a roofline",
    )
    add_tariff_options(price)
    for option in REMOVED:
        price.add_argument(option, nargs="?", const="", metavar="X", help=argparse.SUPPRESS)
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; options may appear between positional words."""
    parser = build_parser()
    args = parser.parse_intermixed_args(argv)
    for option, replacement in REMOVED.items():
        if getattr(args, option.removeprefix("--")) is not None:
            parser.error(f"{option} was removed; use {replacement}")
    return args


def has_forecast(study: StudyPlan) -> bool:
    """Return whether the forecast of the study's entry `size: best` is sealed."""
    return any(forecast.quantity == RUN for forecast in read_forecasts(study.directory))


def main(argv: Sequence[str] | None = None) -> int:
    """Price or train the runs of the study, and print the outcome."""
    args = parse_args(argv)
    options = SweepOptions(args.launcher, args.jobs, args.gpus_per_run, args.retries, args.sbatch, args.part)

    # called after `study` is read below; `probe` runs only where nothing else gives the speed
    def price_runs(runs: Sequence[PlannedRun]) -> Speed:
        probe = lambda: time_study(study, options, runs)  # noqa: E731
        return estimate_speed(runs, args.hardware, args.mfu, args.gpus_per_run, probe)

    try:
        study = read_study_plan(args.study, args.overrides)
        if args.dry_run:
            runs = select_runs_of_part(study, expand_study(study), args.part)
            # for other hardware the number of GPUs is not known, so one run at a time
            jobs = (args.jobs or 1) if args.hardware else count_jobs(study, options)
            tariff = fill_watts(read_tariff(args), args.hardware)
            speed = price_runs(runs)
            print(format_price_table(runs, speed, jobs, args.gpus_per_run, tariff))
            return 0
        outcome = run_sweep(study, options, price_runs)
    except (OSError, ValueError) as error:
        return report_error(error)
    except KeyboardInterrupt:  # raised while steps were timed, before any run has started
        print("stopped; nothing was trained", file=sys.stderr)
        return STOPPED
    print(f"{study.directory}: {outcome.n_done} of {outcome.n_runs} runs done")
    for line in outcome.failed:
        # the last line of a log may contain escape sequences
        print(f"error: {escape_controls(line)}", file=sys.stderr)
    if outcome.n_done == outcome.n_runs and study.best is not None and not has_forecast(study):
        print(f"next: python tools/fit_frontier.py {study.directory} --predict, then this command again")
    if outcome.interrupted:
        print("stopped; run the same command again to resume", file=sys.stderr)
        return STOPPED
    return 1 if outcome.n_done < outcome.n_runs else 0


if __name__ == "__main__":
    run_main(main)
