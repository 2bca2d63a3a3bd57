"""Fit frontiers, scores and power laws, predict with laws, and compare runs and objectives.

    scaling frontier experiments/quickstart --predict
    scaling frontier table.csv --flops-by train_flops --budgets 1e19 1e20 --out compute_law.json
    scaling downstream table.csv --score-column score_hellaswag --law law.json --predict 7e9 1.4e11
    scaling downstream scores.csv --where "task == 'piqa'" --score-column acc --kind accuracy
    scaling power-law optima.csv --x-column C --y-column N_opt --sigma-column SE --predict 1e24
    scaling predict law.json 7e9 1.4e11
    scaling predict muennighoff 2.8e9 5.5e10 --unique 4e9
    scaling predict law.json --seal STUDY.yaml
    scaling curve constant.csv cosine.csv --predict wsd.csv --warmup-steps 2000
    scaling crossover law_autoregressive.json law_masked_diffusion.json --unique 1e8 1e9 1e10
    scaling crossover experiments/study_crossover_cpu --without '*masked*' '*drop*'
    scaling compare experiments/study RUN_A RUN_B
    scaling gain experiments/optimizers '*-adamw-*' '*-muon-*'
    scaling mix experiments/mixtures --natural code=0.4 web=0.6

`python tools/laws.py ACTION ...` is the same. frontier --predict stores the forecast of a study's cell
`size: best` before that run is trained; --check compares it with the result. crossover compares two laws at
their best sizes, or the runs of a study on dataset.path_test, and writes crossover.json. The noise of compare
is the scatter of runs that differ only in their seed, or around the study's law, and the paired error of
per-document losses, if both have them (tools/validate.py --save-per-document).
"""

import argparse
import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.cli import add_action, create_parser, positive_float, run_main, shorten_path
from megatron.io import replace_nonfinite
from megatron.laws import downstream_curve, prediction, prediction_text
from megatron.laws.best_mixture import find_best_mixture
from megatron.laws.compute_law import ComputeLaw
from megatron.laws.crossover import crossover
from megatron.laws.forms import FORM
from megatron.laws.law import Law
from megatron.laws.mixing_law import fit_mixing_law
from megatron.laws.power_law import fit_power
from megatron.laws.prediction_text import NO_INTERVAL
from megatron.report import gain_text, mixture, plot_command
from megatron.study import differences, forecast, frontier, gain, sealing
from megatron.study.curves import describe_curves
from megatron.study.decision import decide
from megatron.study.ladder import read_study_plan
from megatron.study.published import HyperparameterLaw, PublishedLaw, find_law, load_published
from megatron.study.selection import (
    Columns,
    Selection,
    optional_column_of,
    read_positive,
    select_points,
    select_runs,
)
from megatron.study.table import SCORE_PREFIX, read_runs, read_table, select_finished

TASK = "task"  # column of tables with a row for each run and task
RENAME = "Rename the columns with `scaling collect TABLE.csv --from csv --map`"
REMOVED = {
    "--again": "A forecast is never replaced; use another study directory",
    "--d-column": RENAME,
    "--flops-per-param-token": "Use --flops with 6/K times the FLOPs",
    "--level": "Use Law.predict(N, D, level=SHARE) in Python",
    "--group": "Fit a table of independent rows, or a law with `scaling fit --group`",
    "--log-sigma": "Write a column of the standard errors of y: y times the errors of log y",
    "--loss-column": RENAME,
    "--n-column": RENAME,
    "--replicates": "Use `crossover(..., n_replicates=N)` in Python",
    "--task": "Use --where \"task == 'NAME'\"",
    "--new-text": "Add text_error.relative of the law to log L, in quadrature",
}


def add_frontier(actions: Any) -> None:
    """Add the action frontier."""
    parser = add_action(actions, "frontier", run_frontier)
    add = parser.add_argument
    add("runs", type=Path, metavar="STUDY_DIR|TABLE.csv", help="a study, or a table of runs or points (C, L)")
    add("--out", type=Path, metavar="LAW.json", help=f"default: STUDY_DIR/{frontier.COMPUTE_LAW}")
    budgets = "budgets to list, in FLOPs; default: the runs' budgets"
    add("--budgets", type=positive_float, nargs="+", metavar="C", help=budgets)
    compute = "compute of a table: a column of FLOPs, or 6nd; default: train_flops, else 6nd"
    add("--flops-by", metavar="NAME", help=compute)
    add_selection(parser)
    plot_command.add_plot_option(parser)
    steps = parser.add_mutually_exclusive_group()
    predict = f"choose the size of `size: best`, and seal a forecast in {forecast.FORECASTS}/"
    steps.add_argument("--predict", action="store_true", help=predict)
    check = "compare the prediction with the result, and stop"
    steps.add_argument("--check", action="store_true", help=check)


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that select rows of a table."""
    parser.add_argument("--objective", metavar="NAME", help="only runs of this objective")
    where = "only rows that satisfy this expression of pandas, for example \"dataset == 'c4'\""
    parser.add_argument("--where", action="append", default=[], metavar="CONDITION", help=where)


def run_frontier(args: argparse.Namespace) -> int:
    """Fit the compute-optimal frontier: the best N and D at C FLOPs, and the loss there.

    scaling frontier experiments/quickstart --predict
    """
    is_study = args.runs.is_dir()
    if (args.predict or args.check) and not is_study:
        raise ValueError(f"{args.runs}: got a file, expected a study's directory for --predict, --check.")
    if is_study and (args.where or args.flops_by):
        raise ValueError("--where, --flops-by: got a study's directory, expected a table. Collect it first.")
    if args.check:
        outcome = sealing.find_outcome(args.runs)
        print(f"check: {forecast.describe_outcome(outcome)}")
        return 1 if math.isnan(outcome["measured"]) else 0
    out = args.out or (args.runs if is_study else Path()) / frontier.COMPUTE_LAW
    # --check returned above: a fit with later runs must not replace the law of the prediction
    if is_study:
        runs = frontier.read_study_runs(args.runs, args.objective)
    elif read_table(args.runs).reindex(columns=[Columns.N, Columns.D]).notna().any(axis=None):
        runs = frontier.read_table_runs(args.runs, args.objective, args.flops_by, args.where)
    else:
        return run_recipe(args)
    law = frontier.fit_frontier(runs)
    text = frontier.summarise_frontier(law, runs, args.runs, args.budgets or ())
    law.save(out)
    print(f"{shorten_path(out)}: {text}")
    if args.plot:
        plot_command.write_figure(args.plot, plot_command.plot_frontier(law, runs, args.budgets))
    if args.predict:
        sealing.seal_best(args.runs)
        outcome = sealing.find_outcome(args.runs)
        print(f"forecast: {forecast.describe_outcome(outcome)}")
        if math.isnan(outcome["measured"]):
            print("next: rerun tools/sweep.py on this study to train this run")
    return 0


def run_recipe(args: argparse.Namespace) -> int:
    """Fit the losses of one recipe to compute, from a table without N and D."""
    points = select_points(args.runs, args.flops_by, args.objective, args.where)
    law = frontier.fit_recipe(points)
    out = args.out or Path(frontier.RECIPE_LAW)
    law.save(out)
    print(f"{shorten_path(out)}: " + "\n".join(frontier.describe_recipe(law, args.budgets or (), points)))
    if args.plot:
        plot_command.write_figure(args.plot, plot_command.plot_recipe(law, points, args.budgets))
    return 0


def add_downstream(actions: Any) -> None:
    """Add the action downstream."""
    parser = add_action(actions, "downstream", run_downstream)
    add = parser.add_argument
    add("table", type=Path, metavar="TABLE.csv", help="table with one run per row")
    column = "column of the score; runs without a value are skipped"
    add("--score-column", required=True, metavar="NAME", help=column)
    kind = "default: what a column score_... ends with, or accuracy; error for other columns"
    add("--kind", choices=list(downstream_curve.CONSTANTS), help=kind)
    chance = "floor of an accuracy, or 'free' to fit it; default: chance if the task is known"
    add("--chance", metavar="SHARE", help=chance)
    ceiling = "top of an accuracy, for a task whose labels are not all right"
    add("--ceiling", type=float, default=1.0, metavar="SHARE", help=ceiling)
    add("--n-questions", type=int, metavar="N", help="questions, for the binomial error of a score")
    add_selection(parser)
    add("--law", type=Path, metavar="LAW.json", help="the law of the loss, for --predict")
    sizes = "parameters and tokens to predict for"
    add("--predict", type=float, nargs=2, metavar=("N", "D"), help=sizes)


def run_downstream(args: argparse.Namespace) -> int:
    """Fit the downstream score of one task to the loss, and predict it through a law.

    scaling downstream table.csv --score-column score_hellaswag
    """
    if args.predict and args.law is None:
        args.refuse("--predict requires --law LAW.json")
    runs = select_runs(args.table, Columns(), args.objective, where=args.where)
    task = find_task(args, runs)
    scores = optional_column_of(args.table, runs, args.score_column)
    is_score = args.score_column.startswith(SCORE_PREFIX)
    kind = args.kind or (downstream_curve.kind_of_score(task) if is_score else "error")
    # a run that was not scored has an empty cell, read as NaN
    has_score = np.isfinite(scores)
    curve = downstream_curve.fit_downstream(
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
    note = f"; top fixed at {args.ceiling:g}" if "top" in curve.params else ""
    note += "" if curve.chance is None else ", floor at chance"
    print(f"  a score scatters by {curve.spread:.4f} around the curve{note}")
    for warning in runs.warnings + curve.warnings:
        print(f"  warning: {warning}")
    if args.predict:
        # two steps: (N, D) -> loss by the law -> score by the curve
        law = Law.load(args.law)
        parts = []
        for interval in ("predictive", "confidence"):
            value, low, high = downstream_curve.predict_score(law, curve, *args.predict, kind=interval)
            parts.append(f"95 % {interval} [{float(low):.4f}, {float(high):.4f}]")
        print("  ".join([f"predicted {float(value):.4f}", *parts]))
    return 0


def find_task(args: argparse.Namespace, runs: Selection) -> str:
    """Return the task of the runs. Raise ValueError if the column 'task' has several values."""
    if TASK in runs.frame:
        # only the rows that the conditions select: a table of many tasks is valid with --where
        names = sorted(set(runs.frame[TASK]))
        if len(names) > 1:
            raise ValueError(
                f"{args.table}, column '{TASK}': got {', '.join(names[:4])}{', ...' * (len(names) > 4)}, "
                f"expected one task. Choose with --where \"task == '{names[0]}'\"."
            )
        return names[0]
    return args.score_column.removeprefix(SCORE_PREFIX)


def find_chance(word: str | None, task: str, kind: str) -> float | None:
    """Return the floor of the accuracy: --chance, else a known task's; None: it is fitted."""
    if word is None:
        return downstream_curve.chance_of_task(task, kind)
    try:
        return None if word == "free" else float(word)
    except ValueError:
        raise ValueError(f"--chance: got '{word}', expected a share such as 0.25, or 'free'") from None


def add_power_law(actions: Any) -> None:
    """Add the action power-law."""
    parser = add_action(actions, "power-law", run_power_law)
    add = parser.add_argument
    add("table", type=Path, metavar="TABLE.csv", help="table with one point per row")
    add("--x-column", default="C", metavar="NAME", help="column of x, such as compute")
    add("--y-column", default="N_opt", metavar="NAME", help="column of y, such as the best N")
    sigma = "column of the standard errors of y; default: equal weights"
    add("--sigma-column", metavar="NAME", help=sigma)
    add("--predict", type=positive_float, nargs="+", default=[], metavar="X", help="predict y at these x")


def run_power_law(args: argparse.Namespace) -> int:
    """Fit a power law y = k x^p to the points of a table, such as N_opt against compute.

    scaling power-law optima.csv --x-column C --y-column N_opt --predict 1e24
    """
    names = (args.x_column, args.y_column, args.sigma_column)
    table = read_table(args.table)
    x, y, sigma = (None if name is None else read_positive(args.table, table, name) for name in names)
    # log y = log k + p log x; se(log y) = se(y) / y to first order
    law = fit_power(x, y, None if sigma is None else sigma / y)
    print(f"{names[1]} = {law.coefficient:.5g} {names[0]}^{law.exponent:.4f}  ({len(x)} points)")
    print(f"  exponent: 95 % confidence {prediction_text.format_ends(law.interval, '.4f')}")
    for at in args.predict:
        note = "" if x.min() <= at <= x.max() else "  OUTSIDE the points"
        print(f"at {names[0]} = {at:.4g}: {names[1]} {law.evaluate(at):.5g}{note}")
        for kind, words in (("predictive", "one new point"), ("confidence", "the law's value")):
            ends = law.predict(at, differences.LEVEL, kind)[1:]
            print(f"  {words}: 95 % {kind} {prediction_text.format_ends(ends, '.5g')}")
    return 0


def print_json(value: Any) -> None:
    """Print a value as JSON; NaN and Inf become null, since JSON has no such numbers."""
    print(json.dumps(replace_nonfinite(value), indent=1, allow_nan=False, default=float))


def add_predict(actions: Any) -> None:
    """Add the action predict."""
    parser = add_action(actions, "predict", run_predict)
    add = parser.add_argument
    add("law", nargs="?", metavar="LAW", help="a law.json, or the name of a published law")
    add("N", nargs="?", type=float, metavar="N", help="parameters")
    add("D", nargs="?", type=float, metavar="D", help="training tokens")
    add("--unique", type=float, metavar="TOKENS", help="unique tokens; default: all tokens")
    add("--flops", type=float, metavar="C", help="print the optimum at this compute")
    seal = "store predictions of runs of this study that are not started; default: its held-out runs"
    add("--seal", type=Path, metavar="STUDY.yaml", help=seal)
    add("--runs", metavar="PATTERN", help="names of the runs to seal, e.g. '*-131kunique-*'")
    add("--json", action="store_true", help="print JSON")
    add("--list", action="store_true", help="list the published laws with their sources")
    plot_command.add_plot_option(parser)


def run_predict(args: argparse.Namespace) -> int:
    """Predict the loss of a run, or the best use of a budget, with a fitted or a published law.

    scaling predict law.json 7e9 1.4e11 --flops 1e21
    """
    check_prediction(args)
    if args.list:
        for name, law in load_published().items():
            formula = (law.to_law() if isinstance(law, PublishedLaw) else law).formula()
            note = f"\n  {law.note}" if law.note else ""
            print(f"{name:<21}{formula}\n  {law.source}; N: {law.counts}{note}")
        return 0
    if args.seal is not None:
        study = read_study_plan(args.seal)
        forecasts = sealing.seal_runs(study, args.law, args.runs)
        print("\n".join(forecast.list_forecasts(forecasts, ".4f", " nats per token")))
        print(f"{study.directory / forecast.FORECASTS}: {len(forecasts)} sealed")
        return 0
    law, published = find_law(args.law)
    if isinstance(law, HyperparameterLaw):
        predict_hyperparameters(args, law)
    else:
        predict_loss(args, law, published)
    return 0


def check_prediction(args: argparse.Namespace) -> None:
    """Exit with status 2 for arguments that do not go together."""
    if (args.json or args.plot) and (args.list or args.seal is not None):
        args.refuse("--json and --plot show a prediction; omit them with --list and --seal")
    if args.list:
        return
    if args.law is None:
        args.refuse("got no LAW, expected a law.json or the name of a published law (--list)")
    if (args.N is None) != (args.D is None):
        args.refuse("got N without D, expected both")
    if args.runs and args.seal is None:
        args.refuse("--runs requires --seal STUDY.yaml")
    is_target = args.N is not None or args.flops is not None
    if args.seal is not None and (is_target or args.unique is not None):
        args.refuse("--seal: the study defines N and D of its runs; omit them")
    if args.seal is None and not is_target:
        args.refuse("got no N and D and no --flops, expected one of the two")


def predict_loss(args: argparse.Namespace, law: Law, published: PublishedLaw | None) -> None:
    """Predict with a law of loss, and print the result."""
    # without a term for repetition, a prediction would silently ignore --unique
    if args.unique is not None and not FORM[law.form].needs_unique:
        raise ValueError(
            f"--unique: got {args.unique:g} for form {law.form}, which has no term for repetition. "
            "Use a law of form data_constrained, repeated_data or over_repetition."
        )
    about = prediction_text.describe_law(law)
    if published is not None:
        about |= {"source": published.source, "N_counts": published.counts}
    answer: dict[str, Any] = {"law": str(args.law)} | about
    lines = [*prediction_text.list_warnings(about), f"{args.law}: {law.formula()}"]
    predictions: list[prediction.Prediction | prediction.OptimumPrediction] = []
    if published is not None:
        lines.append(f"  {published.source}; N: {published.counts}")
    if args.N is not None:
        run = prediction.predict_run(law, args.N, args.D, args.unique)
        predictions.append(run)
        note = prediction_text.describe_extrapolation(law, run.outside)
        answer["prediction"] = asdict(run) | {"note": note}
        unique = "" if run.U is None else f", {run.U:.4g} of them unique"
        lines.append(f"N {run.N:.4g} parameters, D {run.D:.4g} tokens{unique}:")
        lines += prediction_text.format_values(
            ("loss in nats per token", run.loss, run.confidence, run.predictive)
        )
        lines += prediction_text.format_range_check(law, run.outside)
    if args.flops is not None:
        optimum = prediction.predict_optimum(law, args.flops, args.unique)
        predictions.append(optimum)
        note = prediction_text.describe_extrapolation(law, optimum.outside)
        answer["optimum"] = asdict(optimum) | {"note": note}
        lines.append(f"C {optimum.C:.4g} FLOPs (C = 6 N D):")
        lines += prediction_text.format_values(
            ("N*", optimum.N, optimum.N_confidence, None),
            ("D*", optimum.D, optimum.D_confidence, None),
            ("L*", optimum.L, optimum.L_confidence, optimum.L_predictive),
        )
        lines += prediction_text.format_range_check(law, optimum.outside)
    if args.json:
        print_json(answer)
    else:
        print("\n".join(lines))
    if args.plot:
        plot_command.write_figure(args.plot, plot_command.plot_prediction(law, predictions))


def predict_hyperparameters(args: argparse.Namespace, law: HyperparameterLaw) -> None:
    """Predict learning rate and batch size with a law of hyperparameters, and print the result."""
    if args.N is None or args.flops is not None or args.unique is not None or args.plot:
        raise ValueError(
            f"{law.name}: got --flops, --unique or --plot, expected N and D. It is not a law of loss."
        )
    rate, batch = law.predict(args.N, args.D)
    if args.json:
        record = {"law": law.name, "source": law.source, "N_counts": law.counts, "note": law.note}
        print_json(record | {"N": args.N, "D": args.D, "lr": rate, "batch_tokens": batch})
        return
    print(f"{law.name}: {law.formula()}\n  {law.source}; N: {law.counts}\n  {law.note}")
    print(f"N {args.N:.4g}, D {args.D:.4g}: learning rate {rate:.4g}, batch {batch:.4g} tokens")
    print(f"  {NO_INTERVAL}")


def add_curve(actions: Any) -> None:
    """Add the action curve."""
    parser = add_action(actions, "curve", run_curve)
    add = parser.add_argument
    add("curves", type=Path, nargs="+", metavar="CURVE.csv", help="fitted curves: columns step, lr, loss")
    other = "curves to predict: step, lr of the whole schedule, and the loss of finished steps"
    add("--predict", type=Path, nargs="+", default=[], metavar="CURVE.csv", help=other)
    add("--warmup-steps", type=float, default=0.0, metavar="N", help="steps of the linear warm-up")


def run_curve(args: argparse.Namespace) -> int:
    """Fit whole loss curves of one size under their learning rates, and predict other schedules.

    scaling curve constant.csv cosine.csv --predict wsd.csv --warmup-steps 2000
    """
    print("\n".join(describe_curves(args.curves, args.predict, args.warmup_steps)))
    return 0


def add_crossover(actions: Any) -> None:
    """Add the action crossover."""
    parser = add_action(actions, "crossover", run_crossover)
    add = parser.add_argument
    first = "law of the objective that is better at low compute, a study, or its table.csv"
    add("first", type=Path, metavar="FIRST.json", help=first)
    add("second", type=Path, nargs="?", metavar="SECOND.json", help="law of the other objective")
    seal = "of a study: store forecasts for this amount of unique text, before its runs"
    add("--seal", type=positive_float, metavar="TOKENS", help=seal)
    without = "leave out the autoregressive runs whose name matches, and store nothing"
    add("--without", nargs="+", default=[], metavar="PATTERN", help=without)
    amounts = [1e7, 1e8, 1e9, 1e10]
    unique = "amounts of unique text"
    add("--unique", type=positive_float, nargs="+", default=amounts, metavar="TOKENS", help=unique)


def run_crossover(args: argparse.Namespace) -> int:
    """Find the compute above which one objective beats another on the same unique text.

    scaling crossover experiments/study_crossover_cpu
    """
    if args.seal is not None and (args.second is not None or args.first.is_file()):
        args.refuse("--seal requires the folder of a study")
    if args.without and (args.second is not None or args.seal is not None):
        args.refuse("--without requires a study or its table, and no --seal")
    if args.seal is not None:
        print("\n".join(forecast.list_forecasts(sealing.seal_text(args.first, args.seal), ".4g")))
    elif args.second is None:
        from megatron.study.measured import describe_study  # imports scipy, which --help does not need

        table = read_table(args.first) if args.first.suffix == ".csv" else read_runs(args.first)
        print("\n".join(describe_study(args.first, select_finished(table), args.without)))
    else:
        laws = [Law.load(args.first), Law.load(args.second)]
        result = crossover(*laws, args.unique)
        for i, (u, c) in enumerate(zip(result.U, result.C, strict=True)):
            ends = result.ends and f"  95 % confidence [{result.ends[0][i]:.3g}, {result.ends[1][i]:.3g}]"
            words = f"C_crit {c:.4g} FLOPs{ends or ''}" if math.isfinite(c) else "no crossover"
            print(f"U {u:.3g} tokens: {words}")
    return 0


def parse_share(word: str) -> float:
    """Parse a share such as 0.5% or 0.005 (an argparse type)."""
    try:
        value = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"got '{word}', expected a share of the loss such as 0.5%")
    return value


def add_compare(actions: Any) -> None:
    """Add the action compare."""
    parser = add_action(actions, "compare", run_compare)
    add = parser.add_argument
    add("study", type=Path, metavar="STUDY_DIR|TABLE.csv", help="a study or a table of its runs")
    add("a", nargs="?", metavar="RUN_A", help="a run or a cell: a prefix of its name, or a pattern")
    add("b", nargs="?", metavar="RUN_B", help="the run or cell to compare with")
    best = "compare the lowest loss with the others, for each compute or each objective"
    add("--best", nargs="?", const="compute", choices=("compute", "objective"), help=best)
    add("--law", type=Path, metavar="LAW.json", help="for a table: law whose scatter is the noise")
    until = "decide, or name the next seed: a difference below this share of the loss is none, e.g. 0.5%%"
    add("--until", type=parse_share, metavar="SHARE", help=until)
    paired = "--until: from differences of runs of equal seed, by their own scatter"
    add("--paired", action="store_true", help=paired)
    add("--json", action="store_true", help="print JSON")
    plot_command.add_plot_option(parser)


def run_compare(args: argparse.Namespace) -> int:
    """Compare the held-out losses of two runs, or of two cells of seeds, against the noise floor.

    scaling compare experiments/study --best objective
    """
    from megatron.report.difference_text import describe_difference, describe_floor, format_text_table

    if (args.best is None) == (args.a is None) or (args.a is not None and args.b is None):
        args.refuse("expected either RUN_A and RUN_B, or --best")
    if (args.paired and args.until is None) or (args.best and args.until is not None):
        args.refuse("expected --paired with --until, and --until with RUN_A and RUN_B")
    table, laws = differences.read_compared(args.study, args.law)
    floors = differences.estimate_noise_floors(table, laws)
    equivalent = None
    if args.best is None:
        a, b = differences.find_side(table, args.a), differences.find_side(table, args.b)
        if args.until is not None:
            result = decide(a, b, floors, args.until, args.paired)
            print_json(asdict(result)) if args.json else print(gain_text.describe_decision(result))
            return 0
        paired = None
        # documents pair only between two single runs: the mean of a cell has no per-document losses
        if args.study.is_dir() and a.n_seeds == b.n_seeds == 1:
            from megatron.evaluation.compare import find_paired_error

            paired = find_paired_error(*(args.study / str(side.runs["path"].iloc[0]) for side in (a, b)))
        groups = [[differences.compare_sides(a, b, floors, paired=paired)]]
        if (args.study / frontier.COMPUTE_LAW).is_file():
            law = ComputeLaw.load(args.study / frontier.COMPUTE_LAW)
            equivalent = gain.cell_gain(law, a, b, groups[0][0])
    else:
        groups = differences.compare_best(table, floors, args.best)
    if not groups:
        raise ValueError(
            f"{args.study}: got no two finished runs of the same {args.best}, expected at least one pair."
        )
    compared = [difference for group in groups for difference in group]
    if args.plot:
        plot_command.write_figure(args.plot, plot_command.plot_differences(compared))
    if args.json:
        noise = {name: asdict(floor) for name, floor in floors.items()}
        record = {"noise_floor": noise, "differences": [asdict(at) for at in compared]}
        print_json(record | ({"gain": asdict(equivalent)} if equivalent else {}))
        return 0
    for name, floor in floors.items():
        print(describe_floor(name, floor))
    for group in groups:
        print(f"\n{format_text_table(group)}\n{describe_difference(group[0])}")
    if equivalent is not None:
        print(gain_text.describe_cell_gain(equivalent))
    return 0


def add_gain(actions: Any) -> None:
    """Add the action gain."""
    parser = add_action(actions, "gain", run_gain)
    add = parser.add_argument
    add("study", type=Path, metavar="STUDY_DIR|TABLE.csv", help="a study or a table of its runs")
    ladder = "pattern of run names of recipe %s; PATTERN:COLUMN takes another loss, such as *:loss_ema"
    add("a", metavar="A", help=ladder % "A")
    add("b", metavar="B", help=ladder % "B")
    by = "what grows: train_flops, or train_tokens of one size"
    add("--by", choices=gain.UNITS, default=gain.COMPUTE, help=f"{by} (default %(default)s)")
    add(
        "--at",
        type=positive_float,
        nargs="+",
        metavar="C",
        help="compute of A to list; default: five in range",
    )
    add("--json", action="store_true", help="print JSON")
    plot_command.add_plot_option(parser)


def run_gain(args: argparse.Namespace) -> int:
    """Find the share of recipe A's compute that recipe B needs for the same loss, from two ladders.

    scaling gain experiments/optimizers '*-adamw-*' '*-muon-*'
    """
    table, _ = differences.read_compared(args.study, None)
    fitted = gain.compare_ladders(table, args.a, args.b, args.by)
    gains = gain.list_gains(fitted, args.at)
    if args.plot:
        plot_command.write_figure(args.plot, plot_command.plot_gain(fitted, args.by))
    if args.json:
        print_json(gain.record_gain(fitted, gains))
    else:
        print(gain_text.describe_gain(fitted, gains, args.a, args.b, args.by))
    return 0


def add_mix(actions: Any) -> None:
    """Add the action mix."""
    parser = add_action(actions, "mix", run_mix)
    add = parser.add_argument
    runs = "runs with columns weight_DOMAIN, and loss_of_DOMAIN or loss"
    add("runs", type=Path, metavar="STUDY_DIR|TABLE.csv", help=runs)
    targets = "losses whose mean is minimised; default: all loss_of_*, or loss"
    add("--targets", nargs="+", metavar="COLUMN", help=targets)
    add("--size", type=positive_float, metavar="N", help="parameters; default: the largest run's")
    add("--tokens", type=positive_float, metavar="D", help="training tokens; default: the largest run's")
    bounds = "limits of weights; default: the range of the trained mixtures"
    add("--bounds", type=parse_domain, nargs="+", default=[], metavar="DOMAIN=LOW:HIGH", help=bounds)
    add("--max-epochs", type=positive_float, default=math.inf, metavar="X", help="most epochs of a domain")
    natural = "a mixture to compare with, besides the best trained one"
    add("--natural", type=parse_domain, nargs="+", default=[], metavar="DOMAIN=WEIGHT", help=natural)
    where = "only rows that satisfy this expression of pandas"
    add("--where", action="append", default=[], metavar="CONDITION", help=where)
    plot_command.add_plot_option(parser)


def parse_domain(word: str) -> tuple[str, list[float]]:
    """Return the domain and the numbers of DOMAIN=X or DOMAIN=X:Y."""
    domain, _, numbers = word.partition("=")
    with contextlib.suppress(ValueError):
        return domain, [float(number) for number in numbers.split(":")]
    raise argparse.ArgumentTypeError(f"got '{word}', expected a domain with numbers, such as code=0.4")


def run_mix(args: argparse.Namespace) -> int:
    """Find the mixture of domains with the lowest loss, and its gain over others.

    scaling mix experiments/mixtures --natural code=0.4 web=0.6
    """
    runs, unseen, warnings = mixture.read_mixture_runs(args.runs, args.where)
    names = dict.fromkeys(args.targets or ())
    targets = dict.fromkeys(names, 1 / max(len(names), 1))
    law = replace(fit_mixing_law(runs, targets=targets), drift=frontier.read_drift(args.runs))
    best = find_best_mixture(
        law,
        N=args.size,
        D=args.tokens,
        bounds={name: (ends[0], ends[-1]) for name, ends in args.bounds},
        max_epochs=args.max_epochs,
        compared={"natural": {name: weights[0] for name, weights in args.natural}} if args.natural else {},
    )
    lines = mixture.describe_mixture(law, best, unseen)
    print("\n".join([*lines, *(f"warning: {warning}" for warning in warnings)]))
    if args.plot:
        plot_command.write_figure(args.plot, mixture.plot_mixtures(law, best))
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__, removed=REMOVED)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", help="what to do")
    fits = (add_frontier, add_downstream, add_power_law, add_predict, add_curve, add_crossover)
    for add in (*fits, add_compare, add_gain, add_mix):
        add(actions)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one action, and print its result."""
    args = build_parser().parse_args(argv)
    return int(args.run(args))


if __name__ == "__main__":
    run_main(main)
