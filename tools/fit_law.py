"""Fit a scaling law to a table of runs.

python tools/fit_law.py experiments/quickstart/table.csv --objective autoregressive --out law.json
python tools/fit_law.py table.csv --form repeated_data --hold-out 3
python tools/fit_law.py table.csv --compare chinchilla,repeated_data,over_repetition --hold-out 3
python tools/fit_law.py table.csv.gz --where "dataset == 'c4'" --group model
python tools/fit_law.py table.csv --approach 2 --flops-by train_flops
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.cli import create_parser, report_error, run_main
from megatron.io import replace_nonfinite, write_json
from megatron.laws.forms import FITTED_FORMS, FORM, check_fitted_form
from megatron.laws.holdout import compare_forms, extrapolate_law, score_holdout
from megatron.laws.isoflop import fit_isoflop
from megatron.laws.law import Law
from megatron.laws.law_text import format_comparisons, summarise_law
from megatron.study.frontier import suggest_plan
from megatron.study.selection import (
    Columns,
    Selection,
    compute_of,
    optional_column_of,
    select_runs,
)
from megatron.study.table import read_table

REMOVED = {  # options of earlier versions -> replacement
    "--max-loss": "--where 'loss <= NATS'",
    "--prior": "--fix NAME=VALUE, or a form of your own in Python (LIBRARY.md)",
    "--profile": "the bootstrap interval of the constant, or --fix NAME=VALUE at several values",
    "--stack": "a fit without it, which measures the error of extrapolation",
    "--weights": "--where to skip runs; noise that changes with compute is estimated",
}
BIASED = (
    "Parabolas are symmetric and losses are not: their minima are biased (arXiv 2603.22339). "
    "tools/fit_frontier.py fits these runs without this bias."
)


def refuse_option(replacement: str) -> Callable[[str], str]:
    """Return an argument type that refuses any value and names the replacement of the option."""

    def refuse(word: str) -> str:
        raise argparse.ArgumentTypeError(f"this option was removed; use {replacement}")

    return refuse


def parse_form(name: str) -> str:
    """Parse the name of a form."""
    try:
        check_fitted_form(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("form: ")) from None
    return name


def parse_approach(word: str) -> int:
    """Parse the number of an approach."""
    if word not in ("2", "3"):
        raise argparse.ArgumentTypeError(
            f"got '{word}', expected 2 or 3. Approach 1: use tools/fit_frontier.py."
        )
    return int(word)


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument(
        "table",
        type=Path,
        metavar="TABLE.csv",
        help="table with one run per row, as written by tools/collect.py",
    )
    parser.add_argument(
        "--form",
        type=parse_form,
        metavar="FORM",
        default="chinchilla",
        help=f"{', '.join(FITTED_FORMS)}; default: chinchilla, E + A/N^alpha + B/D^beta",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="LAW.json",
        default=Path("law.json"),
        help="output file; default: law.json",
    )
    runs = parser.add_argument_group("selection of runs")
    runs.add_argument(
        "--objective",
        metavar="NAME",
        help="only runs of this objective; default: the only objective in the table",
    )
    runs.add_argument("--n-column", default="n_params", metavar="NAME", help="column of the parameters")
    runs.add_argument(
        "--d-column", default="train_tokens", metavar="NAME", help="column of the training tokens"
    )
    runs.add_argument(
        "--loss-column", default="loss", metavar="NAME", help="column of the loss, in nats per token"
    )
    runs.add_argument(
        "--flops-column", metavar="NAME", help="column of FLOPs C that replaces tokens: D = C / (6 N)"
    )
    runs.add_argument(
        "--unique-column", default="unique_tokens", metavar="NAME", help="column of the unique tokens"
    )
    runs.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="only rows that satisfy this expression of pandas, for example \"dataset == 'c4'\" or "
        "'loss < 3.4'; may be repeated",
    )
    runs.add_argument(
        "--group",
        metavar="COLUMN",
        help="rows with equal values share a model, a trunk or a seed and are resampled together; "
        "default: trunk if runs branch, run if names repeat, else N if residuals correlate; 'none': "
        "every row is independent",
    )
    runs.add_argument(
        "--loss-se-column",
        default="loss_se",
        metavar="NAME",
        help="column of the loss's standard error due to the shared held-out text; used if present",
    )
    fit = parser.add_argument_group("fit")
    fit.add_argument(
        "--residual",
        choices=("log", "nats"),
        default="log",
        help="residuals of the log loss, or of the loss in nats",
    )
    fit.add_argument(
        "--fix",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="fix a constant: alpha=0.34; may be repeated",
    )
    for option, replacement in REMOVED.items():
        refuse = refuse_option(replacement)
        fit.add_argument(option, type=refuse, nargs="?", const="", metavar="X", help=argparse.SUPPRESS)
    fit.add_argument(
        "--approach",
        type=parse_approach,
        default=3,
        metavar="2|3",
        help="approach of the Chinchilla paper: 2 isoFLOP parabolas, 3 parametric (--form)",
    )
    fit.add_argument(
        "--flops-by",
        default="6nd",
        metavar="NAME",
        help="compute for approach 2: a column such as train_flops, or 6nd",
    )
    fit.add_argument(
        "--hold-out", type=int, default=0, metavar="RUNS",
        help="hold out this many of the largest runs, besides those that the table marks held_out",
    )  # fmt: skip
    fit.add_argument("--fit-all", action="store_true", help="also fit the runs marked held_out")
    fit.add_argument(
        "--compare", metavar="FORM,FORM", help="print which form predicts the --hold-out runs best, and exit"
    )
    fit.add_argument(
        "--huber-delta",
        type=float,
        metavar="NATS",
        default=1e-3,
        help="threshold of the Huber loss, in log loss",
    )
    fit.add_argument(
        "--n-bootstrap", type=int, default=1000, metavar="R", help="bootstrap resamples of the runs"
    )
    fit.add_argument("--seed", type=int, metavar="N", default=0, help="seed of the resamples")
    return parser


def parse_constants(words: Sequence[str]) -> dict[str, float]:
    """Return the fixed constants of --fix NAME=VALUE."""
    fixed: dict[str, float] = {}
    for word in words:
        name, _, value = (part.strip() for part in word.partition("="))
        if name in fixed:
            raise ValueError(f"--fix {word}: got {name} twice, expected it once")
        try:
            fixed[name] = float(value)
        except ValueError:
            hint = " Exponents are one in --form over_training." if value.isidentifier() else ""
            raise ValueError(
                f"--fix: got {word}, expected NAME=VALUE, for example alpha=0.34.{hint}"
            ) from None
    return fixed


def fit_parametric_law(args: argparse.Namespace, runs: Selection) -> Law:
    """Fit the parametric law to the runs, and score it on the held-out runs."""
    is_held_out = runs.held_out(args.hold_out)
    fixed = parse_constants(args.fix)
    law = extrapolate_law(
        **runs.columns_where(~is_held_out),
        loss_se=read_loss_errors(args, runs.subset(~is_held_out)),
        form=args.form,
        residual=args.residual,
        fixed=fixed,
        huber_delta=args.huber_delta,
        n_bootstrap=args.n_bootstrap,
        seed=args.seed,
    )
    warnings = law.warnings + runs.warnings
    scored = {}
    if is_held_out.any() and not law.replicates:
        warnings.append("No bootstrap: intervals of held-out runs include only the scatter of single runs.")
    if is_held_out.any():
        scored = score_held_out(law, runs.subset(is_held_out))
    return replace(
        law, columns=runs.columns, filter=runs.filter, table=runs.table, warnings=warnings, held_out=scored,
        runs=runs.subset(~is_held_out).names or [],
    )  # fmt: skip


def score_held_out(law: Law, runs: Selection) -> dict[str, Any]:
    """Score the predictions of the held-out runs, and list these runs."""
    scored = score_holdout(law, runs.N, runs.D, runs.L, runs.U).as_dict()
    return scored | {"N": runs.N.tolist(), "D": runs.D.tolist(), "runs": runs.names or []}


def read_loss_errors(args: argparse.Namespace, runs: Selection) -> np.ndarray | None:
    """Read the losses' standard errors due to their text [n]; None if the table has no such column."""
    if args.loss_se_column not in read_table(args.table):
        if args.loss_se_column not in ("loss_se", "none"):
            raise ValueError(
                f"{args.table}: no column '{args.loss_se_column}' for --loss-se-column. "
                "Name another column, or none."
            )
        return None
    return optional_column_of(args.table, runs, args.loss_se_column)


def requires_unique_tokens(args: argparse.Namespace) -> bool:
    """Return whether a form with repetition is fitted, which requires the unique tokens."""
    forms = (args.compare or args.form).split(",")
    return any(form.strip() in FORM and FORM[form.strip()].needs_unique for form in forms)


def format_comparison(args: argparse.Namespace, runs: Selection) -> str:
    """Compare the forms, and format one line for each, the best predictor first."""
    marked = runs.held_out()
    is_held_out = runs.held_out(args.hold_out if args.hold_out or marked.any() else max(1, len(runs.N) // 5))
    forms = args.compare.split(",")
    results = compare_forms(runs.N, runs.D, runs.L, runs.U, forms, is_held_out, huber_delta=args.huber_delta)
    return format_comparisons(results, int(is_held_out.sum()))


def fit_without_form(args: argparse.Namespace, runs: Selection) -> str:
    """Apply approach 2 to the runs, write the result as JSON and format it as text."""
    flops = compute_of(args.table, runs, args.flops_by)
    fit = fit_isoflop(runs.N, runs.D, runs.L, flops, groups=runs.groups)
    lines, record = [], {"approach": args.approach, "flops_by": args.flops_by}
    for letter, law in (("N", fit.size), ("D", fit.tokens)):
        if law is not None:
            low, high = law.interval
            lines.append(
                f"{letter} = {law.coefficient:.5g} C^{law.exponent:.4f}"
                f"  95 % confidence [{low:.3f}, {high:.3f}]"
            )
            record[letter] = {name: getattr(law, name) for name in ("coefficient", "exponent", "interval")}
    lines += [
        f"  C {parabola.C:.3e}  N {parabola.N_best:.4g} (error {100 * parabola.log_se:.0f} %)  "
        f"D {parabola.D_best:.4g}  L {parabola.L_best:.4f}"
        for parabola in fit.parabolas
    ]
    warnings = [*fit.warnings, BIASED, *runs.warnings]
    write_json(args.out, replace_nonfinite(record | {"warnings": warnings}))
    return "\n".join([f"{args.out}:", *lines, *(f"  warning: {warning}" for warning in warnings)])


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, save and print the law."""
    args = build_parser().parse_args(argv)
    columns = Columns(args.n_column, args.d_column, args.loss_column, args.flops_column, args.unique_column)
    try:
        # check the output path before the fit, which may take minutes
        if args.out.is_dir() or not args.out.parent.is_dir():
            raise ValueError(
                f"--out: got {args.out}, expected a file in an existing folder, such as law.json"
            )
        runs = select_runs(
            args.table,
            columns,
            args.objective,
            requires_unique_tokens(args),
            args.group,
            args.where,
        )
        if args.fit_all:
            runs = replace(runs, frame=runs.frame.assign(held_out=0.0))
        if args.compare:
            print(format_comparison(args, runs))
            return 0
        if args.approach != 3:
            print(fit_without_form(args, runs.subset(~runs.held_out(args.hold_out))))
            return 0
        law = fit_parametric_law(args, runs)
        law.save(args.out)
    except (OSError, ValueError) as error:
        return report_error(error)
    print(f"{args.out}: {summarise_law(law)}")
    if law.identified is False:
        fitted = runs.subset(~runs.held_out(args.hold_out))
        print(f"  to do: {suggest_plan(float(6 * fitted.N @ fitted.D), args.table, law.filter)}")
    return 0


if __name__ == "__main__":
    run_main(main)
