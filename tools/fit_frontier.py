"""Fit the compute-optimal frontier: the best N and D at C FLOPs, and the loss there.

python tools/fit_frontier.py experiments/quickstart
python tools/fit_frontier.py experiments/quickstart --predict
python tools/fit_frontier.py experiments/quickstart --check
python tools/fit_frontier.py table.csv --flops-by train_flops --budgets 1e19 1e20 --out compute_law.json

Runs of several sizes at several budgets are fitted, those that are held out are not. --predict stores what
the frontier says of the study's blind run before that run is trained; --check compares it with the result.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from megatron.command import command, failed, near, run
from megatron.scaling.blind import check_blind, predict_blind
from megatron.scaling.blind_record import BLIND
from megatron.scaling.compute_law import ComputeLaw
from megatron.scaling.frontier_table import default_compute, frontier_notes, frontier_table
from megatron.scaling.ladder import STUDY, blind_budget, expand_grids, read_study_plan
from megatron.scaling.selection import Columns
from megatron.scaling.study_frontier import COMPUTE_LAW, FrontierRuns, read_study_runs, read_table_runs


def flops(word: str) -> float:
    """A number of FLOPs above 0."""
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got '{word}', expected FLOPs above 0, as 1e20")
    return value


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument(
        "runs", type=Path, metavar="STUDY_DIR|TABLE.csv", help="a study's directory, or a run a row"
    )
    parser.add_argument("--out", type=Path, metavar="LAW.json", help=f"default: STUDY_DIR/{COMPUTE_LAW}")
    parser.add_argument(
        "--budgets", type=flops, nargs="+", metavar="C", help="FLOPs to list; default: those of the runs"
    )
    which = parser.add_argument_group("which runs")
    which.add_argument("--objective", metavar="NAME", help="only runs of this objective")
    which.add_argument("--n-column", default="n_params", metavar="NAME", help="parameters, of a table")
    which.add_argument("--d-column", default="train_tokens", metavar="NAME", help="tokens")
    which.add_argument("--loss-column", default="loss", metavar="NAME", help="nats a token")
    which.add_argument(
        "--flops-by", metavar="NAME", help="FLOPs: a column, or 6nd; default: train_flops, else 6nd"
    )
    which.add_argument(
        "--where", action="append", default=[], metavar="CONDITION",
        help="only rows of a table for which it holds, as 'dataset = c4'; may be repeated",
    )  # fmt: skip
    blind = parser.add_argument_group("blind check of a study")
    steps = blind.add_mutually_exclusive_group()
    steps.add_argument(
        "--predict", action="store_true", help=f"predict the blind run and store it as STUDY_DIR/{BLIND}"
    )
    steps.add_argument(
        "--check", action="store_true", help="compare the prediction with the result, and stop"
    )
    blind.add_argument(
        "--again", action="store_true", help="replace a prediction whose run has not been started"
    )
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Words that go together."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.again and not args.predict:
        parser.error("--again goes with --predict")
    return args


def check_place(args: argparse.Namespace) -> None:
    """ValueError for options of a table with a study, and the other way round."""
    is_study = args.runs.is_dir()
    if (args.predict or args.check) and not is_study:
        raise ValueError(
            f"{args.runs}: got no folder, expected a study's directory for --predict and --check."
        )
    if is_study and (args.where or args.flops_by):
        raise ValueError(
            "--where and --flops-by: got a study's directory, expected a table. Collect it first."
        )


def blind_compute(study_dir: Path) -> float | None:
    """FLOPs of the study's blind run; None where it names none."""
    if not (study_dir / STUDY).is_file():
        return None
    study = read_study_plan(study_dir / STUDY, [f"directory={study_dir}"])
    return None if study.blind is None else blind_budget(study, expand_grids(study))


def read_runs_of(args: argparse.Namespace) -> FrontierRuns:
    """The runs of the study or table that was named."""
    if args.runs.is_dir():
        return read_study_runs(args.runs, args.objective)
    columns = Columns(args.n_column, args.d_column, args.loss_column)
    return read_table_runs(args.runs, columns, args.objective, args.flops_by, args.where)


def summary(args: argparse.Namespace, law: ComputeLaw, runs: FrontierRuns) -> str:
    """The table and what is to be known beside it."""
    budget = blind_compute(args.runs) if args.runs.is_dir() else None
    compute = [(C, "") for C in args.budgets] if args.budgets else default_compute(law, runs, budget)
    head = f"{law.n_runs} runs at {law.n_budgets} budgets, C = {law.C[0]:.2e} to {law.C[1]:.2e} FLOPs"
    return "\n".join([head, frontier_table(law, compute), *frontier_notes(law, runs)])


def print_check(study_dir: Path) -> int:
    """The blind check in one line; the exit status."""
    outcome = check_blind(study_dir)
    if outcome is None:
        raise ValueError(
            f"{study_dir / BLIND}: got no prediction. Run tools/fit_frontier.py {study_dir} --predict before "
            "the blind run is trained."
        )
    print(outcome.words)
    return 0 if outcome.measured is not None else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, save and print; predict or check where asked to."""
    args = parse_args(argv)
    out = args.out or (args.runs / COMPUTE_LAW if args.runs.is_dir() else Path(COMPUTE_LAW))
    try:
        check_place(args)
        if args.check:
            return print_check(args.runs)
        if out.is_dir() or not out.parent.is_dir():
            raise ValueError(f"--out {out}: expected a file name in a folder that exists, as {COMPUTE_LAW}")
        runs = read_runs_of(args)
        law = runs.fit()
        text = summary(args, law, runs)
        law.save(out)
        print(f"{near(out)}: {text}")
        if args.predict:
            predict_blind(args.runs, args.again)
            outcome = check_blind(args.runs)
            print(f"{near(args.runs / BLIND)}: {outcome.words}")
            if outcome.measured is None:
                print("next: run tools/sweep.py of this study again, which trains it")
    except (OSError, ValueError) as error:
        return failed(error)
    return 0


if __name__ == "__main__":
    run(main)
