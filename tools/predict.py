"""Predict the loss of a run, or the best use of a compute budget, by a fitted or a published law.

python tools/predict.py law.json 7e9 1.4e11
python tools/predict.py law.json --flops 1e21 --json
python tools/predict.py muennighoff 2.8e9 5.5e10 --unique 4e9
python tools/predict.py step-law 1e9 1e11
python tools/predict.py stacked_law.json 7e9 1.4e11 --new-text
python tools/predict.py --list
"""

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

from megatron.command import command, failed, run
from megatron.scaling.forms import FORM
from megatron.scaling.law import Law
from megatron.scaling.prediction import (
    OptimumPrediction,
    Prediction,
    check_positive,
    predict_optimum,
    predict_run,
)
from megatron.scaling.published import PUBLISHED_LAWS, HyperparameterLaw, PublishedLaw, find_law
from megatron.scaling.stack import StackedLaw, is_stack

NO_INTERVAL = "no interval: the law has no bootstrap replicates"


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument(
        "law", nargs="?", metavar="LAW", help="a law.json or stacked_law.json, or the name of a published law"
    )
    parser.add_argument("N", nargs="?", type=float, metavar="N", help="parameters")
    parser.add_argument("D", nargs="?", type=float, metavar="D", help="tokens trained on")
    target = parser.add_argument_group("what to predict")
    target.add_argument("--unique", type=float, metavar="TOKENS", help="unique tokens; default: all of them")
    target.add_argument("--flops", type=float, metavar="C", help="print the optimum at this compute")
    target.add_argument(
        "--flops-per-param-token", type=float, default=6.0, metavar="K", help="C = K N D, for --flops"
    )
    target.add_argument("--level", type=float, default=0.95, metavar="SHARE", help="of the intervals")
    target.add_argument(
        "--new-text",
        action="store_true",
        help="of a loss on another text of the same distribution, default: on that of the fitted runs",
    )
    printed = parser.add_argument_group("what to print")
    printed.add_argument("--json", action="store_true", help="print JSON")
    printed.add_argument("--list", action="store_true", help="list the published laws with their sources")
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Words that go together."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.list:
        return args
    if args.law is None:
        parser.error("got no LAW, expected a law.json or the name of a published law (--list)")
    if (args.N is None) != (args.D is None):
        parser.error("got N without D, expected both")
    if args.N is None and args.flops is None:
        parser.error("got no N and D and no --flops, expected one of the two")
    return args


def list_laws() -> list[dict[str, str]]:
    """Name, formula, what N counts, source and note of each published law."""
    rows = []
    for name, one in PUBLISHED_LAWS.items():
        formula = one.law().formula() if isinstance(one, PublishedLaw) else one.formula()
        rows.append(
            {"name": name, "formula": formula, "N": one.counts, "source": one.source, "note": one.note}
        )
    return rows


def describe_law(law: Law, published: PublishedLaw | None) -> dict[str, Any]:
    """What the law is and how far it is to be trusted."""
    found: dict[str, Any] = {"formula": law.formula(), "form": law.form, "identified": law.identified}
    found |= {"not_identified": law.not_identified, "warnings": list(law.warnings), "ranges": law.ranges}
    if published is not None:
        found |= {"source": published.source, "N_counts": published.counts}
    if law.lack_of_fit and not law.lack_of_fit["passes"]:
        found["warnings"].append(
            f"The form does not fit repeated runs (lack of fit, p = {law.lack_of_fit['p_value']:.2g})."
        )
    return found


def describe_stack(stack: StackedLaw) -> dict[str, Any]:
    """What `describe_law` has, of a stack: its forms with their weights and errors."""
    return {
        "formula": stack.formula(), "form": "stack", "weights": stack.weights, "growth": stack.growth,
        "cuts": stack.cuts, "identified": None, "not_identified": {}, "warnings": [], "ranges": stack.ranges,
    }  # fmt: skip


def warn_first(about: dict[str, Any]) -> list[str]:
    """Lines that stand before any number."""
    lines = []
    if about["identified"] is False:
        names = ", ".join(about["not_identified"]) or "its constants"
        lines.append(f"NOT IDENTIFIED by the runs of this law: {names}.")
    reasons = list(dict.fromkeys(about["not_identified"].values()))
    return lines + [f"warning: {one}" for one in dict.fromkeys(reasons + about["warnings"])]


def write_interval(level: float, kind: str, interval: tuple[float, float] | None, digits: str) -> str:
    """One interval with its level and kind."""
    if interval is None:
        return NO_INTERVAL
    low, high = (format(end, digits) for end in interval)
    return f"{100 * level:g} % {kind} [{low}, {high}]"


def write_outside(law: Law | StackedLaw, outside: dict[str, str]) -> list[str]:
    """One line for each value beyond the fitted range, or one that says that there is none."""
    if not law.ranges:
        return ["  range of the fitted runs: not known"]
    if not outside:
        return ["  within the range of the fitted runs"]
    return [
        f"  OUTSIDE of the fitted runs: {name} is {side} {law.ranges[name][side == 'above']:.4g}; "
        "this extrapolates"
        for name, side in outside.items()
    ]


def write_run(law: Law | StackedLaw, found: Prediction) -> list[str]:
    """The prediction of one run for people."""
    unique = "" if found.U is None else f", {found.U:.4g} of them unique"
    lines = [
        f"N {found.N:.4g} parameters, D {found.D:.4g} tokens{unique}: loss {found.loss:.4f} nats a token"
    ]
    if found.predictive is None:
        lines.append(f"  {NO_INTERVAL}")
    else:
        lines.append(
            f"  one new run:     {write_interval(found.level, 'predictive', found.predictive, '.4f')}"
        )
        lines.append(
            f"  the law's value: {write_interval(found.level, 'confidence', found.confidence, '.4f')}"
        )
    return lines + write_text(found.text) + write_outside(law, found.outside)


def write_text(text: str) -> list[str]:
    """That the intervals are of another text, where they are."""
    return ["  on a new text of the same distribution and size"] if text == "new" else []


def write_optimum(law: Law | StackedLaw, found: OptimumPrediction) -> list[str]:
    """The optimum at one compute for people."""
    lines = [f"C {found.C:.4g} FLOPs (C = {found.flops_per_param_token:g} N D):"]
    for name, value, interval in (
        ("N*", found.N, found.N_confidence),
        ("D*", found.D, found.D_confidence),
        ("L*", found.L, found.L_confidence),
    ):
        lines.append(f"  {name} {value:.5g}  {write_interval(found.level, 'confidence', interval, '.5g')}")
    if found.L_predictive is not None:
        words = write_interval(found.level, "predictive", found.L_predictive, ".5g")
        lines.append(f"     one new run there: {words}")
    return lines + write_text(found.text) + write_outside(law, found.outside)


def write_json_text(value: Any) -> str:
    """JSON text; what is not finite becomes null, since JSON has no such numbers."""

    def clean(one: Any) -> Any:
        if isinstance(one, dict):
            return {key: clean(item) for key, item in one.items()}
        if isinstance(one, (list, tuple)):
            return [clean(item) for item in one]
        return None if isinstance(one, float) and not math.isfinite(one) else one

    return json.dumps(clean(value), indent=1, allow_nan=False)


def predict_loss(args: argparse.Namespace, law: Law | StackedLaw, published: PublishedLaw | None) -> str:
    """The answer by a law of loss, or a stack of them."""
    forms = list(law.laws) if isinstance(law, StackedLaw) else [law.form]
    if args.unique is not None and not any(FORM[form].wants_unique for form in forms):
        raise ValueError(
            f"--unique: got {args.unique:g} for form {', '.join(forms)}, which has no term for repetition. "
            "Take a law of form data_constrained, repeated_data or over_repetition."
        )
    about = describe_stack(law) if isinstance(law, StackedLaw) else describe_law(law, published)
    text = "new" if args.new_text else "same"
    answer: dict[str, Any] = {"law": str(args.law)} | about
    lines = [*warn_first(about), f"{args.law}: {law.formula()}"]
    if published is not None:
        lines.append(f"  {published.source}; N: {published.counts}")
    if args.N is not None:
        one = predict_run(law, args.N, args.D, args.unique, args.level, text)
        answer["prediction"] = one.as_dict()
        lines += write_run(law, one)
    if args.flops is not None:
        best = predict_optimum(law, args.flops, args.unique, args.flops_per_param_token, args.level, text)
        answer["optimum"] = best.as_dict()
        lines += write_optimum(law, best)
    return write_json_text(answer) if args.json else "\n".join(lines)


def predict_hyperparameters(args: argparse.Namespace, law: HyperparameterLaw) -> str:
    """Learning rate and batch by a law of hyperparameters."""
    if args.N is None or args.flops is not None or args.unique is not None:
        raise ValueError(f"{law.name}: got --flops or --unique, expected N and D: it is no law of loss")
    check_positive(N=args.N, D=args.D)
    rate, batch = (float(f(args.N, args.D)) for f in (law.learning_rate, law.batch_tokens))
    if args.json:
        told = {"law": law.name, "source": law.source, "N_counts": law.counts, "note": law.note}
        return write_json_text(told | {"N": args.N, "D": args.D, "lr": rate, "batch_tokens": batch})
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
    """Print what was target for."""
    args = parse_args(argv)
    try:
        if args.list:
            rows = list_laws()
            print(
                write_json_text(rows)
                if args.json
                else "\n".join(
                    f"{row['name']:<21}{row['formula']}\n  {row['source']}; N: {row['N']}"
                    + (f"\n  {row['note']}" if row["note"] else "")
                    for row in rows
                )
            )
            return 0
        law, published = (StackedLaw.load(args.law), None) if is_stack(args.law) else find_law(args.law)
        print(
            predict_hyperparameters(args, law)
            if isinstance(law, HyperparameterLaw)
            else predict_loss(args, law, published)
        )
    except (OSError, ValueError) as error:
        return failed(error)
    return 0


if __name__ == "__main__":
    run(main)
