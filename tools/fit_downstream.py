"""Fit the downstream score of one task to the loss, and predict it for a model through its law.

python tools/fit_downstream.py table.csv --score-column score_hellaswag
python tools/fit_downstream.py table.csv --score-column error --law law.json --predict 7e9 1.4e11
python tools/fit_downstream.py scores.csv --task piqa --score-column acc --kind accuracy --n-questions 1838
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.cli import create_parser, report_error, run_main
from megatron.laws.downstream_curve import CONSTANTS, chance_of_task, fit_downstream, predict_score
from megatron.laws.law import Law
from megatron.study.selection import Columns, Selection, optional_column_of, select_runs
from megatron.study.table import SCORE_PREFIX

TASK = "task"  # column of tables with a row for each run and task


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument("table", type=Path, metavar="TABLE.csv", help="table with one run per row")
    fit = parser.add_argument_group("fit")
    fit.add_argument(
        "--score-column",
        required=True,
        metavar="NAME",
        help="column of the score; runs without a value are skipped",
    )
    fit.add_argument(
        "--kind",
        choices=list(CONSTANTS),
        help="kind of score; default: accuracy for columns score_..., else error",
    )
    fit.add_argument(
        "--chance",
        metavar="SHARE",
        help="floor of an accuracy such as 0.25, or 'free' to fit it; default: chance if the task is known",
    )
    fit.add_argument(
        "--ceiling",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="top of an accuracy, for a task whose labels are not all right",
    )
    fit.add_argument(
        "--n-questions",
        type=int,
        metavar="N",
        help="questions of the task, for the binomial error of a score",
    )
    runs = parser.add_argument_group("selection of runs")
    runs.add_argument("--task", metavar="NAME", help="only rows whose column 'task' has this value")
    runs.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="only rows that satisfy this expression of pandas; may be repeated",
    )
    runs.add_argument("--objective", metavar="NAME", help="only runs of this objective")
    runs.add_argument(
        "--loss-column", default="loss", metavar="NAME", help="column of the loss, in nats per token"
    )
    runs.add_argument("--n-column", default="n_params", metavar="NAME", help="column of the parameters")
    runs.add_argument(
        "--d-column", default="train_tokens", metavar="NAME", help="column of the training tokens"
    )
    runs.add_argument(
        "--group", metavar="COLUMN",
        help="rows with equal values share a model or a trunk; default: trunk if runs branch, run if names "
        "repeat, else N if residuals correlate; 'none': every row is independent",
    )  # fmt: skip
    predict = parser.add_argument_group("prediction")
    predict.add_argument("--law", type=Path, metavar="LAW.json", help="the law of the loss, for --predict")
    predict.add_argument(
        "--predict", type=float, nargs=2, metavar=("N", "D"), help="parameters and tokens to predict for"
    )
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments and check their combinations."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.predict and args.law is None:
        parser.error("--predict requires --law LAW.json")
    return args


def find_task(args: argparse.Namespace, runs: Selection) -> str:
    """Return the task of the runs. Raise ValueError if the column 'task' has several values."""
    if TASK in runs.frame:
        # only the rows that the conditions select: a table of many tasks is valid with --task
        names = sorted(set(runs.frame[TASK]))
        if len(names) > 1:
            raise ValueError(
                f"{args.table}, column '{TASK}': got {', '.join(names[:4])}{', ...' * (len(names) > 4)}, "
                "expected one task. Choose one with --task."
            )
        return names[0]
    return args.score_column.removeprefix(SCORE_PREFIX)


def find_chance(word: str | None, task: str, kind: str) -> float | None:
    """Return the floor of the accuracy: --chance, else the chance of a known task.

    None: the floor is fitted.
    """
    if word is None:
        return chance_of_task(task) if kind == "accuracy" else None
    if word == "free":
        return None
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"--chance: got '{word}', expected a share such as 0.25, or 'free'") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Fit the curve, print it, and print a prediction with --predict."""
    args = parse_args(argv)
    try:
        columns = Columns(N=args.n_column, D=args.d_column, L=args.loss_column)
        where = args.where + ([] if args.task is None else [f"{TASK} == {args.task!r}"])
        runs = select_runs(args.table, columns, args.objective, where=where, group=args.group)
        task = find_task(args, runs)
        scores = optional_column_of(args.table, runs, args.score_column)
        kind = args.kind or ("accuracy" if args.score_column.startswith(SCORE_PREFIX) else "error")
        # a run that was not scored has an empty cell, read as NaN
        has_score = np.isfinite(scores)
        curve = fit_downstream(
            runs.L[has_score],
            scores[has_score],
            kind,
            chance=find_chance(args.chance, task, kind),
            n_questions=args.n_questions,
            ceiling=args.ceiling,
            groups=None if runs.groups is None else runs.groups[has_score],
            N=runs.N[has_score],
        )
        words = ", ".join(f"{name} {value:.6g}" for name, value in curve.params.items())
        print(f"{args.score_column} of loss, {curve.n_runs} runs: {words}")
        note = f"; top fixed at {args.ceiling:g}" if kind == "accuracy" else ""
        note += "" if curve.chance is None else ", floor at chance"
        print(f"  a score scatters by {curve.spread:.4f} around the curve{note}")
        for warning in runs.warnings + curve.warnings:
            print(f"  warning: {warning}")
        if args.predict:
            # two steps: (N, D) -> loss by the law -> score by the curve
            law = Law.load(args.law)
            words = [f"predicted {float(predict_score(law, curve, *args.predict)[0]):.4f}"]
            for interval in ("predictive", "confidence"):
                _, low, high = predict_score(law, curve, *args.predict, kind=interval)
                words.append(f"95 % {interval} [{float(low):.4f}, {float(high):.4f}]")
            print("  ".join(words))
    except (OSError, ValueError) as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    run_main(main)
