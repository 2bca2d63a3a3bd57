"""Fit a power law y = k x^p to the points of a table, such as N_opt against compute, and predict with it.

python tools/fit_power_law.py optima.csv --x-column C --y-column N_opt --sigma-column SE
python tools/fit_power_law.py optima.csv --x-column C --y-column N_opt --predict 1e24 --json
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from megatron.cli import create_parser, report_error, run_main
from megatron.config.presets import suggest_nearest
from megatron.laws.power_law import fit_power
from megatron.study.table import read_table

LEVEL = 0.95


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument("table", type=Path, metavar="TABLE.csv", help="table with one point per row")
    parser.add_argument("--x-column", default="C", metavar="NAME", help="column of x, such as compute")
    parser.add_argument(
        "--y-column",
        default="N_opt",
        metavar="NAME",
        help="column of y, such as the parameters at the optimum",
    )
    parser.add_argument(
        "--sigma-column", metavar="NAME", help="column of the standard errors of y; default: equal weights"
    )
    parser.add_argument("--log-sigma", action="store_true", help="the standard errors are those of log y")
    parser.add_argument(
        "--predict", type=float, nargs="+", default=[], metavar="X", help="predict y at each of these x"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def read_column(path: Path, name: str, option: str) -> np.ndarray:
    """Read a column as numbers above 0 [n]. Raise ValueError for a missing column or an invalid cell."""
    table = read_table(path)
    if name not in table:
        raise ValueError(
            f"{path}: no column '{name}'; {suggest_nearest(name, list(table))}. Name another with {option}."
        )
    values = pd.to_numeric(table[name], errors="coerce").to_numpy(float)
    # the fit is of log x and log y; NaN fails the comparison
    is_valid = (values > 0) & (values < np.inf)
    if not is_valid.all():
        i = int(np.argmin(is_valid))
        raise ValueError(f"{path}, row {i + 1}, {name}: got '{table[name][i]}', expected a number above 0")
    return values


def fit_table(args: argparse.Namespace) -> dict[str, Any]:
    """Fit the table's points, and return constants, intervals and predictions."""
    x = read_column(args.table, args.x_column, "--x-column")
    y = read_column(args.table, args.y_column, "--y-column")
    # se(log y) = se(y) / y to first order
    log_se = None  # the fit is of log y, whose standard error is that of y over y
    if args.sigma_column is not None:
        log_se = read_column(args.table, args.sigma_column, "--sigma-column") / (1.0 if args.log_sigma else y)
    # log y = log k + p log x, a straight line in the logs
    law = fit_power(x, y, log_se)
    answer: dict[str, Any] = {
        "x": args.x_column, "y": args.y_column, "n_points": len(x), "coefficient": law.coefficient,
        "exponent": law.exponent, "exponent_confidence": nan_to_none(law.interval),
        "scatter": nan_to_none([law.scatter])[0],
        "dof": law.dof, "level": LEVEL, "range": [float(x.min()), float(x.max())], "predictions": [],
    }  # fmt: skip
    for at in args.predict:
        if not 0 < at < float("inf"):
            raise ValueError(f"--predict: got {at}, expected a number above 0")
        ends = {kind: law.predict(at, LEVEL, kind)[1:] for kind in ("predictive", "confidence")}
        answer["predictions"].append(
            {"x": at, "y": float(law.evaluate(at)), "outside": not x.min() <= at <= x.max()}
            | {kind: nan_to_none(pair) for kind, pair in ends.items()}
        )
    return answer


def nan_to_none(values: Sequence[Any]) -> list[float | None]:
    """Convert numbers for JSON: NaN becomes None."""
    return [None if np.isnan(value) else float(value) for value in values]


def format_interval(ends: Sequence[float | None], digits: str) -> str:
    """Format an interval as [low, high], or 'not known' without an interval."""
    return "not known" if None in ends else f"[{ends[0]:{digits}}, {ends[1]:{digits}}]"


def format_answer(answer: dict[str, Any]) -> str:
    """Format the result as text."""
    percent = f"{100 * answer['level']:g} %"
    lines = [
        f"{answer['y']} = {answer['coefficient']:.5g} {answer['x']}^{answer['exponent']:.4f}"
        f"  ({answer['n_points']} points)",
        f"  exponent: {percent} confidence {format_interval(answer['exponent_confidence'], '.4f')}",
    ]
    for prediction in answer["predictions"]:
        lines.append(
            f"at {answer['x']} = {prediction['x']:.4g}: {answer['y']} {prediction['y']:.5g}"
            + ("  OUTSIDE the points" if prediction["outside"] else "")
        )
        lines += [
            f"  {words}: {percent} {kind} {format_interval(prediction[kind], '.5g')}"
            for words, kind in (("one new point", "predictive"), ("the law's value", "confidence"))
        ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Fit the power law, and print it with its predictions."""
    args = build_parser().parse_args(argv)
    try:
        answer = fit_table(args)
    except (OSError, ValueError) as error:
        return report_error(error)
    print(json.dumps(answer, indent=1, allow_nan=False) if args.json else format_answer(answer))
    return 0


if __name__ == "__main__":
    run_main(main)
