"""Fit a scaling law to a table of runs.

python tools/fit_law.py experiments/quickstart/table.csv --objective autoregressive --out law.json
python tools/fit_law.py table.csv --form repeated_data --hold-out 3 --profile R_D
python tools/fit_law.py table.csv --compare chinchilla,repeated_data,over_repetition --hold-out 3
python tools/fit_law.py table.csv.gz --where "dataset = c4" --group model
python tools/fit_law.py table.csv --stack --hold-out 3
python tools/fit_law.py table.csv --approach 2 --flops-by train_flops
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.command import command, count, failed, run
from megatron.run_dir import with_null, write_json
from megatron.scaling.approaches import NAMES, compare_approaches
from megatron.scaling.envelope import curves_of_runs, fit_envelope
from megatron.scaling.fit import fit_law
from megatron.scaling.forms import FORM
from megatron.scaling.holdout import compare_forms, score, write_held_out
from megatron.scaling.isoflop import fit_isoflop
from megatron.scaling.law import Law
from megatron.scaling.noise import Trend
from megatron.scaling.priors import read_prior
from megatron.scaling.profile import HELD, profile
from megatron.scaling.proposal import propose_runs, rows_of_table
from megatron.scaling.selection import Columns, Selection, column_of, compute_of, known_of, select_runs
from megatron.scaling.stack import StackedLaw, stack_laws, summarise_stack
from megatron.scaling.table import read_table


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument(
        "table", type=Path, metavar="TABLE.csv", help="a run a row, as tools/collect.py writes it"
    )
    parser.add_argument(
        "--form", choices=list(FORM), default="chinchilla", help="chinchilla: E + A/N^alpha + B/D^beta"
    )
    parser.add_argument(
        "--out", type=Path, metavar="LAW.json", help="default: law.json, with --stack stacked_law.json"
    )
    runs = parser.add_argument_group("which runs")
    runs.add_argument(
        "--objective",
        metavar="NAME",
        help="only runs of this objective (by itself the only one in the table)",
    )
    runs.add_argument("--max-loss", type=float, metavar="NATS", help="leave out runs with a loss above this")
    runs.add_argument("--n-column", default="n_params", metavar="NAME", help="parameters")
    runs.add_argument("--d-column", default="train_tokens", metavar="NAME", help="tokens")
    runs.add_argument("--loss-column", default="loss", metavar="NAME", help="nats a token")
    runs.add_argument("--flops-column", metavar="NAME", help="FLOPs C, in place of tokens: D = C / (6 N)")
    runs.add_argument("--unique-column", default="unique_tokens", metavar="NAME", help="unique tokens")
    runs.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="only rows for which it holds, as 'dataset = c4' or 'loss < 3.4'; may be repeated",
    )
    runs.add_argument(
        "--group",
        metavar="COLUMN",
        help="rows with equal cells share a model, a trunk or a seed and are resampled together; "
        "default: trunk where runs branch, 'none' turns it off",
    )
    runs.add_argument(
        "--loss-se-column",
        default="loss_se",
        metavar="NAME",
        help="error of the loss by the held-out text that all runs share, if the table has it",
    )
    runs.add_argument("--weights", metavar="COLUMN", help="multiplies a run's term: 1 / variance, say")
    fit = parser.add_argument_group("how to fit")
    fit.add_argument(
        "--residual", choices=("log", "nats"), default="log", help="of log loss, or of the loss itself"
    )
    fit.add_argument(
        "--fix",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="hold a constant, or tie an exponent to another: alpha=0.34, alpha=beta; may be repeated",
    )
    fit.add_argument(
        "--prior",
        action="append",
        default=[],
        metavar="NAME=MEAN+-SD",
        help="what is known of a constant: normal for an exponent, log-normal for E, A, B and other "
        "positive ones; may be repeated",
    )
    fit.add_argument(
        "--approach",
        type=count,
        choices=(1, 2, 3),
        default=3,
        help="Chinchilla's: 1 envelope, 2 isoFLOP parabolas, 3 parametric, by --form",
    )
    fit.add_argument(
        "--flops-by",
        default="6nd",
        metavar="NAME",
        help="compute for approaches 1 and 2: a column, as train_flops, or 6nd",
    )
    fit.add_argument(
        "--hold-out", type=int, default=0, metavar="RUNS",
        help="keep so many of the largest runs to predict, beside those that the table marks held_out",
    )  # fmt: skip
    fit.add_argument("--fit-all", action="store_true", help="fit on the runs marked held_out too")
    fit.add_argument(
        "--compare", metavar="FORM,FORM", help="say which form predicts the --hold-out runs best, and stop"
    )
    fit.add_argument(
        "--stack",
        nargs="?",
        const="",
        metavar="FORM,FORM",
        help="fit several forms and weight them by their errors on the largest runs; default: all that apply",
    )
    fit.add_argument("--profile", choices=tuple(HELD), help="say how well the runs hold this constant")
    fit.add_argument("--huber-delta", type=float, metavar="NATS", default=1e-3, help="of log loss")
    fit.add_argument("--n-bootstrap", type=int, default=1000, metavar="R", help="resamplings of the runs")
    fit.add_argument("--seed", type=int, metavar="N", default=0, help="of the resamplings")
    return parser


def constants_of(words: Sequence[str]) -> tuple[dict[str, float], dict[str, str]]:
    """(constants held, exponents tied to others) of --fix NAME=VALUE and --fix NAME=NAME."""
    fixed: dict[str, float] = {}
    tied: dict[str, str] = {}
    for word in words:
        name, _, value = (part.strip() for part in word.partition("="))
        if name in fixed or name in tied:
            raise ValueError(f"--fix {word}: got {name} twice, expected it once")
        try:
            fixed[name] = float(value)
        except ValueError:
            if not value.isidentifier():
                raise ValueError(f"--fix {word}: wanted NAME=VALUE, as alpha=0.34 or alpha=beta") from None
            tied[name] = value
    return fixed, tied


def trend_words(law: Law) -> list[str]:
    """How the scatter of runs changes with compute, where it does."""
    trend = law.noise.get("trend")
    if not trend:
        return []
    sigma, _ = Trend(**trend).at(np.array([trend["low"], trend["high"]]))
    return [
        f"    it changes with compute: {100 * sigma[0]:.2g} % at the smallest N D, "
        f"{100 * sigma[1]:.2g} % at the largest (p = {trend['p_value']:.2g})"
    ]


def summary(law: Law) -> str:
    """The law in one line, then each constant with its interval, then the warnings."""
    lines = [f"{law.formula()}  ({law.n_runs} runs)"]
    if law.identified is False:
        names = ", ".join(name for name in law.params if name in law.not_identified)
        lines.append(
            f"  NOT IDENTIFIED by these runs: {names or 'the design'}. Do not quote these constants."
        )
    intervals = {**law.interval.get("params", {}), **law.interval.get("derived", {})}
    for name, value in {**law.params, **law.derived}.items():
        low, high = intervals.get(name, (None, None))
        mark = "  not identified" if name in law.not_identified else ""
        interval = "" if low is None else f"  95 % [{low:.4g}, {high:.4g}]"
        lines.append(f"  {name:<10} {value:.5g}{interval}{mark}")
    lines += [f"  tied: {follower} = {leader}" for follower, leader in law.tied.items()]
    lines += [f"  prior: {one['name']} = {one['mean']:g} +- {one['spread']:g}" for one in law.priors]
    if law.text_error and "E" in law.params and law.replicates:
        low, high = law.floor_interval(text="new")
        lines.append(
            f"  text: all losses share an error of {law.text_error['loss_se']:.2g} nats; E on a new text "
            f"95 % [{low:.4g}, {high:.4g}]"
        )
    if law.noise:
        lines.append(
            f"  noise of one run: {100 * law.spread:.2g} % of the loss, "
            f"{law.noise['dof']:.0f} degrees of freedom"
        )
        lines += trend_words(law)
    if law.lack_of_fit:
        tested = law.lack_of_fit
        verdict = "agrees with them" if tested["passes"] else "DOES NOT FIT them"
        lines.append(
            f"  repeated runs differ by {100 * tested['noise']:.2g} %; the form {verdict} "
            f"(lack of fit: F = {tested['statistic']:.3g}, p = {tested['p_value']:.2g}, "
            f"misfit {100 * tested['misfit']:.2g} %)"
        )
    lines += write_held_out(law.held_out)
    return "\n".join(lines + [f"  warning: {one}" for one in law.warnings])


def fitted(args: argparse.Namespace, runs: Selection) -> Law:
    """The parametric law, scored on the runs held out of it."""
    held = runs.held_out(args.hold_out)
    run_weights = None if args.weights is None else column_of(args.table, runs, args.weights)[~held]
    fixed, tied = constants_of(args.fix)
    law = fit_law(
        **runs.where(~held),
        run_weights=run_weights,
        loss_se=loss_errors(args, runs.only(~held)),
        form=args.form,
        residual=args.residual,
        fixed=fixed,
        tied=tied,
        priors=[read_prior(text) for text in args.prior],
        huber_delta=args.huber_delta,
        n_bootstrap=args.n_bootstrap,
        seed=args.seed,
    )
    warnings = law.warnings + runs.warnings
    scored = {}
    if held.any() and not law.replicates:
        warnings.append("No bootstrap: intervals of held-out runs have the scatter of single runs alone.")
    if held.any():
        scored = score_held_out(law, runs.only(held))
    if args.profile:
        held_law = profile(
            **{name: values for name, values in runs.where(~held).items() if name != "groups"},
            form=args.form,
            name=args.profile,
            huber_delta=args.huber_delta,
            fixed=fixed,
            tied=tied,
            run_weights=run_weights,
            residual=args.residual,
        )
        print(held_law.words)
        law = replace(law, profile=held_law.as_dict())
        warnings += [] if held_law.identified else [held_law.words]
    columns = runs.columns | ({} if args.weights is None else {"weights": args.weights})
    return replace(
        law, columns=columns, filter=runs.filter, table=runs.table, warnings=warnings, held_out=scored
    )


def score_held_out(law: Law | StackedLaw, runs: Selection) -> dict[str, Any]:
    """Runs kept from the fit, and how well they were predicted."""
    scored = score(law, runs.N, runs.D, runs.L, runs.U).as_dict()
    return scored | {"N": runs.N.tolist(), "D": runs.D.tolist(), "runs": runs.names or []}


def loss_errors(args: argparse.Namespace, runs: Selection) -> np.ndarray | None:
    """Standard errors of the losses by their text [n]; None where the table has no such column."""
    if args.loss_se_column not in read_table(args.table):
        if args.loss_se_column not in ("loss_se", "none"):
            raise ValueError(
                f"--loss-se-column: {args.table} has no column '{args.loss_se_column}'; give another or none"
            )
        return None
    return known_of(args.table, runs, args.loss_se_column)


def fit_stack(args: argparse.Namespace, runs: Selection) -> StackedLaw:
    """The stack of forms, scored on the runs held out of it. ValueError for options that it cannot use."""
    unused = {
        "--fix": args.fix, "--prior": args.prior, "--weights": args.weights, "--profile": args.profile,
        "--residual": args.residual != "log",
    }  # fmt: skip
    for option, value in unused.items():
        if value:
            raise ValueError(f"--stack: got {option} too, expected the forms as they are. Drop one of them.")
    held = runs.held_out(args.hold_out)
    fitted_on = runs.only(~held)
    stack = stack_laws(
        **runs.where(~held),
        forms=[form.strip() for form in args.stack.split(",")] if args.stack else None,
        loss_se=loss_errors(args, fitted_on),
        huber_delta=args.huber_delta,
        n_bootstrap=args.n_bootstrap,
        seed=args.seed,
    )
    return replace(
        stack,
        columns=runs.columns,
        filter=runs.filter,
        table=runs.table,
        warnings=stack.warnings + runs.warnings,
        held_out=score_held_out(stack, runs.only(held)) if held.any() and args.n_bootstrap else {},
    )


def needs_unique(args: argparse.Namespace) -> bool:
    """Whether unique tokens are read: by a form of repetition, or where all runs of a stack have them."""
    if args.stack == "":
        return all(read_table(args.table).get(args.unique_column, [""]))
    forms = (args.stack or args.compare or args.form).split(",")
    return any(form.strip() in FORM and FORM[form.strip()].wants_unique for form in forms)


def compared(args: argparse.Namespace, runs: Selection) -> str:
    """A line for each form, the best predictor first."""
    marked = runs.held_out()
    held = runs.held_out(args.hold_out if args.hold_out or marked.any() else max(1, len(runs.N) // 5))
    forms = args.compare.split(",")
    lines = [f"{'form':<18}{'constants':>9}  {str(held.sum()) + ' held out':>12}  {'5 folds':>9}"]
    for one in compare_forms(
        runs.N, runs.D, runs.L, runs.U, forms, held, seed=args.seed, huber_delta=args.huber_delta
    ):
        if one.refused:
            lines.append(f"{one.form:<18}{one.refused}")
        else:
            lines.append(
                f"{one.form:<18}{one.n_constants:>9}  {100 * one.largest_rms:>10.2f} %"
                f"  {100 * one.folds_rms:>7.2f} %"
            )
    return "\n".join(lines)


def without_a_form(args: argparse.Namespace, runs: Selection) -> str:
    """Approach 1 or 2 on the table; the result is also written as JSON."""
    flops = compute_of(args.table, runs, args.flops_by)
    if args.approach == 1:
        each = float(np.median(flops / (runs.N * runs.D)))
        found = fit_envelope(curves_of_runs(runs.N, flops, runs.L), each)
    else:
        found = fit_isoflop(runs.N, runs.D, runs.L, flops)
    lines, told = [], {"approach": args.approach, "flops_by": args.flops_by}
    for letter, law in (("N", found.size), ("D", found.tokens)):
        if law is not None:
            low, high = law.interval
            lines.append(
                f"{letter} = {law.coefficient:.5g} C^{law.exponent:.4f}"
                f"  95 % confidence [{low:.3f}, {high:.3f}]"
            )
            told[letter] = {
                "coefficient": law.coefficient,
                "exponent": law.exponent,
                "interval": law.interval,
            }
    for one in found.parabolas if args.approach == 2 else ():
        lines.append(
            f"  C {one.C:.3e}  N {one.N_best:.4g} (error {100 * one.log_se:.0f} %)  D {one.D_best:.4g}  "
            f"L {one.L_best:.4f}"
        )
    compared = compare_approaches(runs.N, runs.D, runs.L, flops, min(args.n_bootstrap, 200), args.seed)
    for one in compared.exponents:
        ends = (
            ""
            if one.interval is None
            else f"  95 % confidence [{one.interval[0]:.3f}, {one.interval[1]:.3f}]"
        )
        lines.append(f"  approach {one.approach} ({NAMES[one.approach]}): N* ~ C^{one.a:.4f}{ends}")
    bias = [compared.bias.words] if args.approach == 2 and compared.bias else []
    warnings = found.warnings + bias + compared.disagreements + runs.warnings
    write_json(args.out, with_null(told | {"approaches": compared.as_dict(), "warnings": warnings}))
    return "\n".join([f"{args.out}:", *lines, *(f"  warning: {one}" for one in warnings)])


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, save, and say what was found."""
    args = build_parser().parse_args(argv)
    args.out = args.out or Path("law.json" if args.stack is None else "stacked_law.json")
    columns = Columns(args.n_column, args.d_column, args.loss_column, args.flops_column, args.unique_column)
    try:
        # before the work, not after it
        if args.out.is_dir() or not args.out.parent.is_dir():
            raise ValueError(f"--out {args.out}: wanted a file name in a folder that exists, as law.json")
        runs = select_runs(
            args.table, columns, args.objective, args.max_loss, needs_unique(args), args.group, args.where
        )
        if args.fit_all:
            runs = replace(runs, marked=None)
        if args.compare:
            print(compared(args, runs))
            return 0
        if args.approach != 3:
            print(without_a_form(args, runs.only(~runs.held_out(args.hold_out))))
            return 0
        if args.stack is not None:
            stack = fit_stack(args, runs)
            stack.save(args.out)
            print(f"{args.out}: {summarise_stack(stack)}")
            return 0
        law = fitted(args, runs)
        law.save(args.out)
    except (OSError, ValueError) as error:
        return failed(error)
    print(f"{args.out}: {summary(law)}")
    if law.identified is False:
        rows = rows_of_table(read_table(args.table), law.columns, runs.names or [])
        if (proposal := propose_runs(law, rows)) is not None:
            print(f"  to do: {proposal.words()}")
    return 0


if __name__ == "__main__":
    run(main)
