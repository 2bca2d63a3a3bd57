"""Fit a downstream score to the loss, and predict it for a model through its law.

python tools/fit_downstream.py table.csv --score-column score_hellaswag
python tools/fit_downstream.py table.csv --score-column error --law law.json --predict 7e9 1.4e11
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.command import command, failed, run
from megatron.scaling.downstream import CONSTANTS, chained, fit_downstream
from megatron.scaling.law import Law
from megatron.scaling.selection import Columns, known_of, select_runs
from megatron.scaling.table import SCORE


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument("table", type=Path, metavar="TABLE.csv", help="a run a row")
    fit = parser.add_argument_group("what is fitted")
    fit.add_argument("--score-column", required=True, metavar="NAME", help="a run without is left out")
    fit.add_argument(
        "--kind", choices=list(CONSTANTS), help="what the score is; by itself error, of score_...: accuracy"
    )
    runs = parser.add_argument_group("which runs")
    runs.add_argument("--objective", metavar="NAME", help="only runs of this objective")
    runs.add_argument("--loss-column", default="loss", metavar="NAME", help="nats a token")
    runs.add_argument("--n-column", default="n_params", metavar="NAME", help="parameters")
    runs.add_argument("--d-column", default="train_tokens", metavar="NAME", help="tokens")
    predict = parser.add_argument_group("prediction")
    predict.add_argument("--law", type=Path, metavar="LAW.json", help="the law of the loss, for --predict")
    predict.add_argument(
        "--predict", type=float, nargs=2, metavar=("N", "D"), help="parameters and tokens to predict for"
    )
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Words that go together."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.predict and args.law is None:
        parser.error("--predict wants --law LAW.json")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, print, and predict if asked."""
    args = parse_args(argv)
    try:
        columns = Columns(N=args.n_column, D=args.d_column, L=args.loss_column)
        runs = select_runs(args.table, columns, args.objective)
        scores = known_of(args.table, runs, args.score_column)
        kind = args.kind or ("accuracy" if args.score_column.startswith(SCORE) else "error")
        known = np.isfinite(scores)
        curve = fit_downstream(runs.L[known], scores[known], kind)
        words = ", ".join(f"{name} {value:.6g}" for name, value in curve.params.items())
        print(f"{args.score_column} of loss, {curve.n_runs} runs: {words}")
        if args.predict:
            value, low, high = chained(Law.load(args.law), curve, *args.predict)
            print(f"predicted {float(value):.4f}  95 % [{float(low):.4f}, {float(high):.4f}]")
    except (OSError, ValueError) as error:
        return failed(error)
    return 0


if __name__ == "__main__":
    run(main)
