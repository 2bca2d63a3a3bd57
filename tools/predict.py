"""Predict the loss of a run, or the optimal use of a compute budget, with a fitted or a published law.

python tools/predict.py law.json 7e9 1.4e11
python tools/predict.py law.json --flops 1e21 --json
python tools/predict.py muennighoff 2.8e9 5.5e10 --unique 4e9
python tools/predict.py step-law 1e9 1e11
python tools/predict.py law.json --seal STUDY.yaml
python tools/predict.py --list
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.cli import create_parser, report_error, run_main
from megatron.laws.forms import FORM
from megatron.laws.law import Law
from megatron.laws.prediction import (
    OptimumPrediction,
    Prediction,
    predict_optimum,
    predict_run,
)
from megatron.study.published import HyperparameterLaw, PublishedLaw, find_law, load_published

NO_INTERVAL = "no interval: the law has no bootstrap replicates"
NOT_MEASURED = (  # benchmarks.md
    "outside the runs such 95 % intervals included .84 of the held-out runs of public sets, and .95 with the "
    "error of extrapolation: fit this law again with tools/fit_law.py"
)


def refuse_convention(word: str) -> float:
    """Refuse a removed option, and name its replacement."""
    raise argparse.ArgumentTypeError("this option was removed; use --flops with 6/K times the FLOPs")


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument("law", nargs="?", metavar="LAW", help="a law.json, or the name of a published law")
    parser.add_argument("N", nargs="?", type=float, metavar="N", help="parameters")
    parser.add_argument("D", nargs="?", type=float, metavar="D", help="training tokens")
    target = parser.add_argument_group("prediction")
    target.add_argument("--unique", type=float, metavar="TOKENS", help="unique tokens; default: all tokens")
    target.add_argument("--flops", type=float, metavar="C", help="print the optimum at this compute")
    target.add_argument(
        "--flops-per-param-token", type=refuse_convention, metavar="K", help=argparse.SUPPRESS
    )
    target.add_argument(
        "--level", type=float, default=0.95, metavar="SHARE", help="confidence level of the intervals"
    )
    target.add_argument("--new-text", action="store_true", help=argparse.SUPPRESS)
    sealed = parser.add_argument_group("sealed forecasts")
    sealed.add_argument(
        "--seal",
        type=Path,
        metavar="STUDY.yaml",
        help="predict runs of this study that have not been started, by default its held-out runs, and store "
        "the predictions in its folder",
    )
    sealed.add_argument(
        "--runs", metavar="PATTERN", help="names of the runs to predict, e.g. '*-131kunique-*'"
    )
    printed = parser.add_argument_group("output")
    printed.add_argument("--json", action="store_true", help="print JSON")
    printed.add_argument("--list", action="store_true", help="list the published laws with their sources")
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments and check their combinations."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.new_text:
        parser.error("--new-text: removed. Add text_error.relative of the law to log L, in quadrature.")
    if args.list:
        return args
    if args.law is None:
        parser.error("got no LAW, expected a law.json or the name of a published law (--list)")
    if (args.N is None) != (args.D is None):
        parser.error("got N without D, expected both")
    if args.runs and args.seal is None:
        parser.error("--runs requires --seal STUDY.yaml")
    if args.seal is not None:
        if args.N is not None or args.flops is not None or args.unique is not None:
            parser.error("--seal: the study defines N and D of its runs; omit them")
        return args
    if args.N is None and args.flops is None:
        parser.error("got no N and D and no --flops, expected one of the two")
    return args


def list_laws() -> list[dict[str, str]]:
    """Return name, formula, definition of N, source and note of each published law."""
    rows = []
    for name, published in load_published().items():
        formula = published.to_law().formula() if isinstance(published, PublishedLaw) else published.formula()
        rows.append(
            {
                "name": name,
                "formula": formula,
                "N": published.counts,
                "source": published.source,
                "note": published.note,
            }
        )
    return rows


def describe_law(law: Law, published: PublishedLaw | None) -> dict[str, Any]:
    """Return the law's formula and form, with its warnings and unidentified constants."""
    description: dict[str, Any] = {"formula": law.formula(), "form": law.form, "identified": law.identified}
    description |= {
        "not_identified": law.not_identified,
        "warnings": list(law.warnings),
        "ranges": law.ranges,
    }
    if published is not None:
        description |= {"source": published.source, "N_counts": published.counts}
    if law.lack_of_fit and not law.lack_of_fit["passes"]:
        description["warnings"].append(
            f"The form does not fit repeated runs (lack of fit, p = {law.lack_of_fit['p_value']:.2g})."
        )
    return description


def list_warnings(about: dict[str, Any]) -> list[str]:
    """Return the warnings, which are printed before any number."""
    lines = []
    if about["identified"] is False:
        names = ", ".join(about["not_identified"]) or "its constants"
        lines.append(f"NOT IDENTIFIED by the runs of this law: {names}.")
    reasons = list(dict.fromkeys(about["not_identified"].values()))
    return lines + [f"warning: {warning}" for warning in dict.fromkeys(reasons + about["warnings"])]


def format_interval(level: float, kind: str, interval: tuple[float, float] | None, digits: str) -> str:
    """Format one interval with its level and kind."""
    if interval is None:
        return NO_INTERVAL
    low, high = (format(end, digits) for end in interval)
    return f"{100 * level:g} % {kind} [{low}, {high}]"


def format_range_check(law: Law, outside: dict[str, str]) -> list[str]:
    """Format one line for each value outside the fitted range, or one line if all are inside."""
    if not law.ranges:
        return ["  range of the fitted runs: not known"]
    if not outside:
        return ["  within the range of the fitted runs"]
    return [
        # ranges[name] is (low, high), and False and True are the indices 0 and 1
        f"  OUTSIDE the fitted runs: {name} is {side} {law.ranges[name][side == 'above']:.4g}; "
        "this extrapolates"
        for name, side in outside.items()
    ]


def format_run(law: Law, prediction: Prediction) -> list[str]:
    """Format the prediction of one run as text."""
    unique = "" if prediction.U is None else f", {prediction.U:.4g} of them unique"
    lines = [
        f"N {prediction.N:.4g} parameters, D {prediction.D:.4g} tokens{unique}: "
        f"loss {prediction.loss:.4f} nats per token"
    ]
    if prediction.predictive is None:
        lines.append(f"  {NO_INTERVAL}")
    else:
        predictive = format_interval(prediction.level, "predictive", prediction.predictive, ".4f")
        confidence = format_interval(prediction.level, "confidence", prediction.confidence, ".4f")
        lines += [f"  one new run:     {predictive}", f"  the law's value: {confidence}"]
    return lines + format_range_check(law, prediction.outside)


def format_optimum(law: Law, optimum: OptimumPrediction) -> list[str]:
    """Format the optimum at one compute as text."""
    lines = [f"C {optimum.C:.4g} FLOPs (C = 6 N D):"]
    for name, value, interval in (
        ("N*", optimum.N, optimum.N_confidence),
        ("D*", optimum.D, optimum.D_confidence),
        ("L*", optimum.L, optimum.L_confidence),
    ):
        lines.append(f"  {name} {value:.5g}  {format_interval(optimum.level, 'confidence', interval, '.5g')}")
    if optimum.L_predictive is not None:
        words = format_interval(optimum.level, "predictive", optimum.L_predictive, ".5g")
        lines.append(f"     one new run there: {words}")
    return lines + format_range_check(law, optimum.outside)


def describe_extrapolation(law: Law, outside: dict[str, str]) -> str:
    """Describe the error of extrapolation in the intervals of a prediction; "" inside the runs."""
    if not outside or not law.replicates:
        return ""
    if not law.extrapolation:
        return NOT_MEASURED
    growth = 100 * law.extrapolation["growth"]
    return f"the intervals include {growth:.2g} % more deviation for each factor of e in compute"


def format_json(value: Any) -> str:
    """Format a value as JSON. NaN and Inf become null, since JSON has no such numbers."""

    # json.dumps would write NaN and Infinity, which other parsers refuse
    def replace_non_finite(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: replace_non_finite(item) for key, item in node.items()}
        if isinstance(node, (list, tuple)):
            return [replace_non_finite(item) for item in node]
        return None if isinstance(node, float) and not math.isfinite(node) else node

    return json.dumps(replace_non_finite(value), indent=1, allow_nan=False)


def predict_loss(args: argparse.Namespace, law: Law, published: PublishedLaw | None) -> str:
    """Predict with a law of loss, and format the result."""
    # without a term for repetition, a prediction would silently ignore --unique
    if args.unique is not None and not FORM[law.form].needs_unique:
        raise ValueError(
            f"--unique: got {args.unique:g} for form {law.form}, which has no term for repetition. "
            "Use a law of form data_constrained, repeated_data or over_repetition."
        )
    about = describe_law(law, published)
    answer: dict[str, Any] = {"law": str(args.law)} | about
    lines = [*list_warnings(about), f"{args.law}: {law.formula()}"]
    if published is not None:
        lines.append(f"  {published.source}; N: {published.counts}")
    if args.N is not None:
        prediction = predict_run(law, args.N, args.D, args.unique, args.level)
        note = describe_extrapolation(law, prediction.outside)
        answer["prediction"] = asdict(prediction) | {"note": note}
        lines += format_run(law, prediction) + ([f"  {note}"] if note else [])
    if args.flops is not None:
        optimum = predict_optimum(law, args.flops, args.unique, args.level)
        note = describe_extrapolation(law, optimum.outside)
        answer["optimum"] = asdict(optimum) | {"note": note}
        lines += format_optimum(law, optimum) + ([f"  {note}"] if note else [])
    return format_json(answer) if args.json else "\n".join(lines)


def seal_study(args: argparse.Namespace) -> str:
    """Seal forecasts of runs of a study, and format them."""
    from megatron.study.forecast import FORECASTS, LEVELS  # imports the study, which others do not need
    from megatron.study.ladder import read_study_plan
    from megatron.study.sealing import seal_runs

    study = read_study_plan(args.seal)
    forecasts = seal_runs(study, args.law, args.runs)
    if args.json:
        return format_json([asdict(forecast) | {"sha256": forecast.sha256()} for forecast in forecasts])
    lines = []
    for forecast in forecasts:
        ends = ", ".join(
            f"{100 * level:g} % [{low:.4f}, {high:.4f}]"
            for level, (low, high) in zip(LEVELS, forecast.intervals, strict=True)
        )
        seal = forecast.sha256()[:12]
        lines.append(f"{forecast.name}: {forecast.predicted:.4f} nats per token; {ends}; sha256 {seal}")
    return "\n".join([*lines, f"{study.directory / FORECASTS}: {len(forecasts)} sealed"])


def predict_hyperparameters(args: argparse.Namespace, law: HyperparameterLaw) -> str:
    """Predict learning rate and batch size with a law of hyperparameters, and format the result."""
    if args.N is None or args.flops is not None or args.unique is not None:
        raise ValueError(f"{law.name}: got --flops or --unique, expected N and D. It is not a law of loss.")
    rate, batch = law.predict(args.N, args.D)
    if args.json:
        record = {"law": law.name, "source": law.source, "N_counts": law.counts, "note": law.note}
        return format_json(record | {"N": args.N, "D": args.D, "lr": rate, "batch_tokens": batch})
    return "\n".join(
        [
            f"{law.name}: {law.formula()}",
            f"  {law.source}; N: {law.counts}",
            f"  {law.note}",
            f"N {args.N:.4g}, D {args.D:.4g}: learning rate {rate:.4g}, batch {batch:.4g} tokens",
            f"  {NO_INTERVAL}",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the prediction, or the list of published laws."""
    args = parse_args(argv)
    try:
        if args.list:
            rows = list_laws()
            print(
                format_json(rows)
                if args.json
                else "\n".join(
                    f"{row['name']:<21}{row['formula']}\n  {row['source']}; N: {row['N']}"
                    + (f"\n  {row['note']}" if row["note"] else "")
                    for row in rows
                )
            )
            return 0
        if args.seal is not None:
            print(seal_study(args))
            return 0
        law, published = find_law(args.law)
        print(
            predict_hyperparameters(args, law)
            if isinstance(law, HyperparameterLaw)
            else predict_loss(args, law, published)
        )
    except (OSError, ValueError) as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    run_main(main)
