"""Fit the compute-optimal frontier: the best N and D at C FLOPs, and the loss there.

python tools/fit_frontier.py experiments/quickstart
python tools/fit_frontier.py experiments/quickstart --predict
python tools/fit_frontier.py experiments/quickstart --check
python tools/fit_frontier.py table.csv --flops-by train_flops --budgets 1e19 1e20 --out compute_law.json

The fit uses runs of several sizes at several budgets, without held-out runs. --predict stores the frontier's
prediction of the study's blind run before that run is trained; --check compares it with the result.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from megatron.cli import create_parser, report_error, run_main, shorten_path
from megatron.laws.compute_law import ComputeLaw
from megatron.study.forecast import FORECASTS, RUN, Forecast, Outcome, read_forecasts, score_forecasts
from megatron.study.frontier import (
    COMPUTE_LAW,
    choose_compute,
    describe_frontier,
    fit_frontier,
    format_frontier_table,
    read_study_runs,
    read_table_runs,
)
from megatron.study.ladder import STUDY, read_study_plan
from megatron.study.sealing import seal_best
from megatron.study.selection import Columns, Selection
from megatron.study.table import read_runs as read_study_table


def parse_flops(word: str) -> float:
    """Parse a number of FLOPs above 0."""
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    # NaN fails every comparison, so it is refused here too
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got '{word}', expected FLOPs above 0, for example 1e20")
    return value


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument(
        "runs",
        type=Path,
        metavar="STUDY_DIR|TABLE.csv",
        help="a study's directory, or a table with one run per row",
    )
    parser.add_argument(
        "--out", type=Path, metavar="LAW.json", help=f"output file; default: STUDY_DIR/{COMPUTE_LAW}"
    )
    parser.add_argument(
        "--budgets",
        type=parse_flops,
        nargs="+",
        metavar="C",
        help="budgets to list, in FLOPs; default: those of the runs",
    )
    which = parser.add_argument_group("selection of runs")
    which.add_argument("--objective", metavar="NAME", help="only runs of this objective")
    which.add_argument(
        "--n-column", default="n_params", metavar="NAME", help="for a table: column of the parameters"
    )
    which.add_argument(
        "--d-column", default="train_tokens", metavar="NAME", help="column of the training tokens"
    )
    which.add_argument(
        "--loss-column", default="loss", metavar="NAME", help="column of the loss, in nats per token"
    )
    which.add_argument(
        "--flops-by",
        metavar="NAME",
        help="compute: a column of FLOPs, or 6nd; default: train_flops, else 6nd",
    )
    which.add_argument(
        "--where", action="append", default=[], metavar="EXPRESSION",
        help="only rows of a table that satisfy this expression of pandas, for example \"dataset == 'c4'\"",
    )  # fmt: skip
    which.add_argument(
        "--group", metavar="COLUMN",
        help="rows with equal values share a model or a trunk; default: trunk if runs branch, run if names "
        "repeat, else N if residuals correlate; 'none': every row is independent",
    )  # fmt: skip
    blind = parser.add_argument_group("forecast of a study's cell `size: best`")
    steps = blind.add_mutually_exclusive_group()
    steps.add_argument(
        "--predict", action="store_true", help=f"choose the size, and seal a forecast in {FORECASTS}/"
    )
    steps.add_argument(
        "--check", action="store_true", help="compare the prediction with the result, and stop"
    )
    blind.add_argument("--again", action="store_true", help=argparse.SUPPRESS)
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments and check their combinations."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.again:
        parser.error("--again was removed: a forecast is never replaced; use another study directory")
    return args


def check_options(args: argparse.Namespace) -> None:
    """Raise ValueError for options of a table with a study, or options of a study with a table."""
    is_study = args.runs.is_dir()
    if (args.predict or args.check) and not is_study:
        raise ValueError(
            f"{args.runs}: not a directory, expected a study's directory for --predict and --check."
        )
    if is_study and (args.where or args.flops_by or args.group):
        raise ValueError(
            "--where, --flops-by and --group: got a study's directory, expected a table. Collect it first."
        )


def next_budget(study_dir: Path) -> float | None:
    """Return the FLOPs of the study's cell `size: best`; None if the study has none."""
    if not (study_dir / STUDY).is_file():
        return None
    best = read_study_plan(study_dir / STUDY).best
    return None if best is None else best.flops[0]


def read_runs(args: argparse.Namespace) -> Selection:
    """Read the runs of the given study or table."""
    if args.runs.is_dir():
        return read_study_runs(args.runs, args.objective)
    columns = Columns(args.n_column, args.d_column, args.loss_column)
    return read_table_runs(args.runs, columns, args.objective, args.flops_by, args.where, args.group)


def summarise_law(args: argparse.Namespace, law: ComputeLaw, runs: Selection) -> str:
    """Return the table of optima with a heading and notes."""
    budget = next_budget(args.runs) if args.runs.is_dir() else None
    compute = [(C, "") for C in args.budgets] if args.budgets else choose_compute(law, runs.C, budget)
    head = f"{law.n_runs} runs at {law.n_budgets} budgets, C = {law.C[0]:.2e} to {law.C[1]:.2e} FLOPs"
    return "\n".join([head, format_frontier_table(law, compute), *describe_frontier(law, runs)])


def find_outcome(study_dir: Path) -> Outcome:
    """Return the outcome of the forecast of one run. Raise ValueError without a forecast."""
    forecasts: list[Forecast] = [f for f in read_forecasts(study_dir) if f.quantity == RUN]
    if not forecasts:
        raise ValueError(
            f"{study_dir / FORECASTS}: got no forecast of a run. Run tools/fit_frontier.py {study_dir} "
            "--predict before training it."
        )
    return score_forecasts(forecasts[-1:], read_study_table(study_dir))[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, save and print the frontier; store or check the blind prediction with --predict or --check."""
    args = parse_args(argv)
    out = args.out or (args.runs / COMPUTE_LAW if args.runs.is_dir() else Path(COMPUTE_LAW))
    try:
        check_options(args)
        if args.check:
            outcome = find_outcome(args.runs)
            print(f"check: {outcome.describe()}")
            return 0 if outcome.observed is not None else 1
        if out.is_dir() or not out.parent.is_dir():
            raise ValueError(
                f"--out: got {out}, expected a file in an existing folder, such as {COMPUTE_LAW}"
            )
        # --check returned above: a fit with later runs must not replace the law of the prediction
        runs = read_runs(args)
        law = fit_frontier(runs)
        text = summarise_law(args, law, runs)
        law.save(out)
        print(f"{shorten_path(out)}: {text}")
        if args.predict:
            seal_best(args.runs)
            outcome = find_outcome(args.runs)
            print(f"forecast: {outcome.describe()}")
            if outcome.observed is None:
                print("next: rerun tools/sweep.py on this study to train this run")
    except (OSError, ValueError) as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    run_main(main)
