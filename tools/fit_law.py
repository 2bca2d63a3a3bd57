"""Fit a scaling law to a table of runs.

python tools/fit_law.py experiments/quickstart/table.csv --objective autoregressive --out law.json
python tools/fit_law.py table.csv --form repeated_data --hold-out 3
python tools/fit_law.py table.csv --compare chinchilla,repeated_data,over_repetition --hold-out 3
python tools/fit_law.py table.csv.gz --where "dataset == 'c4'" --group model
python tools/fit_law.py table.csv --approach 2 --flops-by train_flops
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.cli import create_parser, run_main
from megatron.io import replace_nonfinite, write_json
from megatron.laws.forms import FITTED_FORMS, FORM, check_fitted_form
from megatron.laws.holdout import compare_forms, extrapolate_law, score_holdout
from megatron.laws.isoflop import fit_isoflop
from megatron.laws.law import Law
from megatron.laws.law_text import format_comparisons, summarise_law
from megatron.study.frontier import suggest_plan
from megatron.study.selection import Columns, Selection, compute_of, optional_column_of, select_runs

REMOVED = {
    "--loss-se-column": "Rename the column to loss_se",
    "--max-loss": "Use --where 'loss <= NATS'",
    "--prior": "Use --fix NAME=VALUE, or a form of your own in Python (LAWS.md)",
    "--profile": "Use the bootstrap interval of the constant, or --fix NAME=VALUE at several values",
    "--seed": "The resamples use seed 0; use `fit_law(..., seed=...)` in Python",
    "--stack": "A fit measures the error of extrapolation",
    "--weights": "Use --where to skip runs; noise that changes with compute is estimated",
}
COLUMNS = {  # option -> (default, what the column has)
    "--n-column": ("n_params", "parameters"),
    "--d-column": ("train_tokens", "training tokens"),
    "--loss-column": ("loss", "loss, in nats per token"),
    "--flops-column": (None, "FLOPs C that replaces tokens: D = C / (6 N)"),
    "--unique-column": ("unique_tokens", "unique tokens"),
}
SE = "loss_se"  # column of the standard errors of the losses due to the shared held-out text
BIASED = (
    "Parabolas are symmetric and losses are not: their minima are biased (arXiv 2603.22339). "
    "`scaling frontier` fits these runs without this bias."
)


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__, removed=REMOVED)
    add = parser.add_argument
    add("table", type=Path, metavar="TABLE.csv", help="table of runs, as written by tools/collect.py")
    forms = f"{', '.join(FITTED_FORMS)}; chinchilla: E + A/N^alpha + B/D^beta"
    add("--form", metavar="FORM", default="chinchilla", help=forms)
    add("--out", type=Path, metavar="LAW.json", default=Path("law.json"), help="output file")
    add = parser.add_argument_group("selection of runs").add_argument
    objective = "only runs of this objective; default: the only objective in the table"
    add("--objective", metavar="NAME", help=objective)
    for option, (default, what) in COLUMNS.items():
        add(option, default=default, metavar="NAME", help=f"column of the {what}")
    where = "only rows that satisfy this expression of pandas, for example 'loss < 3.4'; may be repeated"
    add("--where", action="append", default=[], metavar="CONDITION", help=where)
    group = "rows with equal values share a model or a seed and are resampled together; or none (LAWS.md)"
    add("--group", metavar="COLUMN", help=group)
    add = parser.add_argument_group("fit").add_argument
    residual = "residuals of the log loss, or of the loss in nats"
    add("--residual", choices=("log", "nats"), default="log", help=residual)
    fix = "fix a constant: alpha=0.34; may be repeated"
    add("--fix", action="append", type=parse_constant, default=[], metavar="NAME=VALUE", help=fix)
    approach = "of the Chinchilla paper: 2 isoFLOP parabolas, 3 parametric (--form); 1: scaling frontier"
    add("--approach", type=int, choices=(2, 3), default=3, help=approach)
    flops = "compute for approach 2: a column such as train_flops, or 6nd"
    add("--flops-by", default="6nd", metavar="NAME", help=flops)
    hold_out = "hold out this many of the largest runs, besides those that the table marks held_out"
    add("--hold-out", type=int, default=0, metavar="RUNS", help=hold_out)
    add("--fit-all", action="store_true", help="also fit the runs marked held_out")
    compare = "print which form predicts the --hold-out runs best, and exit"
    add("--compare", metavar="FORM,FORM", help=compare)
    delta = "threshold of the Huber loss, in log loss"
    add("--huber-delta", type=float, metavar="NATS", default=1e-3, help=delta)
    add("--n-bootstrap", type=int, default=1000, metavar="R", help="bootstrap resamples of the runs")
    return parser


def parse_constant(word: str) -> tuple[str, float]:
    """Parse the fixed constant NAME=VALUE."""
    name, _, value = word.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        message = f"got {word}, expected NAME=VALUE, for example alpha=0.34"
        raise argparse.ArgumentTypeError(message) from None


def fit_parametric_law(args: argparse.Namespace, runs: Selection) -> Law:
    """Fit the parametric law to the runs, and score it on the held-out runs."""
    is_held_out = runs.held_out(args.hold_out)
    fitted = runs.subset(~is_held_out)
    law = extrapolate_law(
        fitted.N, fitted.D, fitted.L, U=fitted.U, groups=fitted.groups,
        loss_se=optional_column_of(args.table, fitted, SE) if SE in fitted.frame else None,
        form=args.form, residual=args.residual, fixed=dict(args.fix), huber_delta=args.huber_delta,
        n_bootstrap=args.n_bootstrap,
    )  # fmt: skip
    warnings = law.warnings + runs.warnings
    scored: dict[str, Any] = {}
    if is_held_out.any() and not law.replicates:
        warnings.append("No bootstrap: intervals of held-out runs include only the scatter of single runs.")
    if is_held_out.any():
        rest = runs.subset(is_held_out)
        scored = score_holdout(law, rest.N, rest.D, rest.L, rest.U).as_dict()
        scored |= {"N": rest.N.tolist(), "D": rest.D.tolist(), "runs": rest.names or []}
    return replace(
        law, columns=runs.columns, filter=runs.filter, table=runs.table, warnings=warnings, held_out=scored,
        runs=fitted.names or [],
    )  # fmt: skip


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
            ends = "[{:.3f}, {:.3f}]".format(*law.interval)
            lines.append(f"{letter} = {law.coefficient:.5g} C^{law.exponent:.4f}  95 % confidence {ends}")
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
    # check the output path before the fit, which may take minutes
    if args.out.is_dir() or not args.out.parent.is_dir():
        raise ValueError(f"--out: got {args.out}, expected a file in an existing folder, such as law.json")
    columns = Columns(args.n_column, args.d_column, args.loss_column, args.flops_column, args.unique_column)
    forms = (args.compare or args.form).split(",")
    for form in forms:
        check_fitted_form(form)
    needs_unique = any(FORM[form].needs_unique for form in forms)
    runs = select_runs(args.table, columns, args.objective, needs_unique, args.group, args.where)
    if args.fit_all:
        runs = replace(runs, frame=runs.frame.assign(held_out=0.0))
    if args.compare:
        print(format_comparison(args, runs))
        return 0
    fitted = runs.subset(~runs.held_out(args.hold_out))
    if args.approach != 3:
        print(fit_without_form(args, fitted))
        return 0
    law = fit_parametric_law(args, runs)
    law.save(args.out)
    print(f"{args.out}: {summarise_law(law)}")
    if law.identified is False:
        print(f"  to do: {suggest_plan(float(6 * fitted.N @ fitted.D), args.table, law.filter)}")
    return 0


if __name__ == "__main__":
    run_main(main)
