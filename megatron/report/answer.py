"""Answer of a study: what to train at the next budget and which loss to expect, and how that was checked.

All numbers are fields of the law or of the forecasts. The sentences are fixed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from megatron.laws.compute_law import MAX_HALF_WIDTH, ComputeLaw
from megatron.laws.forms import FORM
from megatron.laws.frontier import frontier_bands, optimal_frontier
from megatron.laws.law import Law
from megatron.laws.measured_crossover import MeasuredCrossover
from megatron.report.study_data import MASKED_DIFFUSION, Study, select_fitted_runs
from megatron.study.forecast import RUN
from megatron.study.format import (
    format_count,
    format_exponent,
    format_interval,
    format_plural,
    format_ratio,
    format_with_interval,
    join_list,
)
from megatron.study.frontier import suggest_next_steps, suggest_plan

STEPS = (4.0, 10.0)  # next budgets, times the largest fitted one
STALE = "stale"  # status of a run that the study no longer contains
SAME_BUDGET = 1.05  # budgets differ by the rounding to whole steps
# Up to about 4 epochs a repeated token is worth
# nearly as much as a new one (arXiv 2305.16264).
MAX_USEFUL_EPOCHS = 4


@dataclass(frozen=True)
class Answer:
    """First screen of the page.

    verdict   one sentence
    check     result of the forecasts that were scored, or "Not checked ..."
    scale     sizes, tokens, context, vocabulary and units of the runs
    todo      what to train or to run next; may be empty
    warnings  what changes the meaning of the verdict
    optima    rows of `find_optima` at the largest fitted budget, the next one
              and the furthest one
    """

    verdict: str
    check: str = ""
    scale: str = ""
    todo: str = ""
    warnings: list[str] = field(default_factory=list)
    optima: pd.DataFrame | None = None


def make_answer(study: Study) -> Answer:
    """Return the answer by the frontier, else by a sound law, else by the measured crossing of objectives."""
    # in this order: what a study was made for is answered first
    scale, optima = describe_scale(study), find_answers(study)
    if optima is not None:
        verdict = describe_optimum(optima.loc[optima["is_next"]].iloc[0], study.bits_per_byte)
        return Answer(verdict, describe_checks(study), scale, "", list_warnings(study, optima), optima)
    warnings = list_warnings(study)
    if study.crossings:
        return Answer(describe_crossings(study.crossings), describe_checks(study), scale, "", warnings)
    check = describe_checks(study) if len(study.forecasts) else ""
    return Answer(describe_no_answer(study), check, scale, suggest_runs(study), warnings)


def is_sound(law: Law) -> bool:
    """Return whether the runs identify every constant, and the form passes its test.

    A law without replicates, or without a test, is sound.
    """
    return law.identified is not False and law.lack_of_fit.get("passes", True)


def find_answers(study: Study) -> pd.DataFrame | None:
    """Return the optima of the answer's table; None if no law has an answer.

    The next budget is the smallest of STEPS times the largest fitted one that
    no run was trained with.
    """
    law = answering_law(study)
    if law is None:
        return None
    if isinstance(law, ComputeLaw):
        fitted, flops = law.C[1], study.main_runs["train_flops"]
    else:
        fitted, flops = select_fitted_runs(study, law)["C"].max(), study.main_runs["flops_6nd"]
    # a forecast's run may be far beyond the fitted ones
    trained = flops.max() / fitted if flops.notna().any() else 1.0
    steps = [step for step in STEPS if step > SAME_BUDGET * trained]
    chosen = steps[0] if steps else STEPS[-1]
    optima = find_optima(law, fitted * np.array([1.0, *STEPS]))
    # the largest fitted budget, and those beyond it, in times of it
    optima["times"] = optima["C"] / fitted
    optima["is_next"] = np.isclose(optima["times"], chosen)
    return optima if np.isfinite(optima[["N", "D", "loss"]]).all(axis=None) else None


def answering_law(study: Study) -> ComputeLaw | Law | None:
    """Return the law that the page's answer is from: the frontier, or else a sound law with intervals."""
    if study.frontier is not None:
        return study.frontier if study.frontier.identified else None
    law = study.law
    return law if law is not None and is_sound(law) and law.replicates else None


def find_optima(law: ComputeLaw | Law, C: np.ndarray) -> pd.DataFrame:
    """Return a row for each C [n] (FLOPs; 6 N D for a parametric law).

    Columns C, N, D, loss, and low and high of each:
    confidence of N and D, predictive of a run's loss.
    NaN where a value overflows.
    """
    if isinstance(law, ComputeLaw):
        try:
            frame = law.to_frame(C)
        except OverflowError:
            return pd.DataFrame({"C": C}).reindex(columns=["C", "N", "D", "loss"])
        return frame.rename(columns={"predictive_low": "loss_low", "predictive_high": "loss_high"})
    # bands are of the law; a run's loss scatters beyond them
    best = optimal_frontier(law, C)
    bands = frontier_bands(law, C)
    low, high = law.add_noise(best.L, *bands["L"], best.N, best.D)
    frame = pd.DataFrame(
        {"C": C, "N": best.N, "D": best.D, "loss": best.L, "loss_low": low, "loss_high": high}
    )
    for name in "ND":
        frame[f"{name}_low"], frame[f"{name}_high"] = bands[name]
    return frame


def describe_optimum(at: pd.Series, bits_per_byte: float | None) -> str:
    """Return the verdict of an optimum, a row of `find_optima`.

    At 1.2e13 FLOPs train 390k parameters (330k
    to 460k) on 5.8M tokens; expect 2.87 ...
    """
    N = format_count(at["N"])
    inside = format_interval((at["N_low"], at["N_high"]), format_count)
    ends = format_interval((at["loss_low"], at["loss_high"]), "{:.2f}".format)
    bits = f", {at['loss'] * bits_per_byte:.2f} bits per byte" if bits_per_byte else ""
    start = (
        f"At {format_exponent(at['C'])} FLOPs train {N} parameters{f' ({inside})' if inside else ''} on "
        f"{format_count(at['D'])} tokens"
    )
    # half of the interval in log L is wider than MAX_HALF_WIDTH
    if at["loss_high"] > at["loss_low"] * math.exp(2 * MAX_HALF_WIDTH):
        return f"{start}; no forecast of the loss: 95 % interval {ends} nats per token."
    return f"{start}; expect {at['loss']:.2f} nats per token{f' ({ends})' if ends else ''}{bits}."


def describe_crossings(crossings: Sequence[MeasuredCrossover]) -> str:
    """State where masked diffusion was measured to pass autoregression, for the most text with a crossing."""
    crossed = [at for at in crossings if at.C is not None]
    if not crossed:
        texts = join_list([format_count(at.U, 3) for at in crossings])
        return f"Masked diffusion did not pass autoregression on {texts} unique tokens."
    # the most text, which is nearest to a real run
    at = crossed[-1]
    low, high = (math.nan if end is None else end for end in at.interval or (None, None))
    where = format_with_interval(at.C or math.nan, (low, high), format_exponent)
    return (
        f"On {format_count(at.U, 3)} unique tokens masked diffusion passes autoregression at {where} FLOPs; "
        f"best losses {at.second.loss:.2f} and {at.first.loss:.2f} nats per token."
    )


def describe_no_answer(study: Study) -> str:
    """Return why there is no answer, and the lowest loss so far."""
    runs = study.main_runs
    if not len(runs):
        return f"No answer yet: 0 of {format_plural(len(study.runs), 'run')} finished."
    best = runs.loc[runs["loss"].idxmin()]
    law = study.frontier or study.law
    reason = "no law is fitted"
    if law is not None:
        reason = "these runs do not identify the law" if law.identified is False else "no law fits these runs"
    bits = f", {best['loss'] * study.bits_per_byte:.2f} bits per byte" if study.bits_per_byte else ""
    return (
        f"No answer yet: {reason}. Lowest loss so far: {best['loss']:.3f} nats per token{bits}, by "
        f"{format_count(best['n_params'])} parameters on {format_count(best['train_tokens'])} tokens."
    )


def describe_checks(study: Study) -> str:
    """Return how well unseen runs were predicted, in one sentence."""
    scored = study.scored
    if not len(scored):
        n_waiting = int(study.forecasts["observed"].isna().sum())
        if n_waiting:
            return f"Not checked yet: {format_plural(n_waiting, 'forecast')} without a finished run."
        return "Not checked by an unseen run."
    inside = is_inside(scored)
    share = f"{inside.sum()} of {len(scored)} inside the 95 % interval"
    if len(scored) == 1:
        share = f"{'inside' if inside.all() else 'outside'} its 95 % interval"
    if (scored["quantity"] != RUN).any():
        return f"Checked: {format_plural(len(scored), 'forecast')}, {share}."
    # in percent of what was predicted, as a reader compares them
    errors = 100 * (scored["observed"] / scored["predicted"] - 1).abs()
    size = format_interval((errors.min(), errors.max()), "{:.1f}".format)
    runs = "one unseen run" if len(scored) == 1 else f"{len(scored)} unseen runs"
    verb = "was" if len(scored) == 1 else "were"
    return f"Checked: {runs}{_describe_distance(study)} {verb} predicted to {size} %, {share}."


def is_inside(forecasts: pd.DataFrame) -> pd.Series:
    """Return whether each observed value is in its 95 % interval."""
    return forecasts["observed"].between(forecasts["low"], forecasts["high"])


def _describe_distance(study: Study) -> str:
    """Return ' at 4 times the largest fitted budget'.

    Empty without a frontier.
    """
    C = study.scored["C"].astype(float)
    if study.frontier is None or C.isna().any():
        return ""
    times = C / study.frontier.C[1]
    distance = format_interval((times.min(), times.max()), format_ratio)
    return f" at {distance} times the largest fitted budget"


def describe_scale(study: Study) -> str:
    """Return the number of runs, their sizes and tokens, the context, the vocabulary and the unit."""
    runs = study.finished
    if not len(runs):
        return ""
    # stale runs are of an earlier version of the study
    n_planned = int((study.runs["status"] != STALE).sum())
    share = "" if len(runs) == n_planned else f" of {n_planned}"
    parts = [f"{len(runs)}{share} {'run' if len(runs) == 1 else 'runs'} finished"]
    units = {"n_params": "parameters", "train_tokens": "training tokens", "seq_len": "tokens of context"}
    columns = [column for column in units if runs[column].notna().any()]
    parts += [f"{_format_span(runs[column].dropna())} {units[column]}" for column in columns]
    models = [(result.get("config") or {}).get("model") or {} for result in study.results]
    sizes = sorted({model["n_tokens"] for model in models if isinstance(model.get("n_tokens"), int)})
    if sizes:
        parts.append(f"vocabulary {join_list([f'{size:,}' for size in sizes])}")
    if study.bits_per_byte:
        parts.append(f"1 nat per token = {study.bits_per_byte:.3g} bits per byte")
    return "; ".join(parts) + "."


def _format_span(values: pd.Series) -> str:
    """Return '1.2M to 3.4M', or '1.2M' if both ends have the same text."""
    return format_interval((values.min(), values.max()), format_count)


def list_warnings(study: Study, optima: pd.DataFrame | None = None) -> list[str]:
    """Return what changes the meaning of the answer, one sentence each."""
    words: list[str] = []
    late = list(study.forecasts.loc[study.forecasts["is_late"].astype(bool), "name"])
    if late:
        words.append(f"Not an unseen run: {join_list(late)} began before its forecast was stored.")
    if study.frontier is not None:
        words += _list_frontier_warnings(study.frontier)
    elif study.law is not None:
        words += _list_law_warnings(study, study.law)
    words += _list_extrapolations(study, optima) if optima is not None else []
    if (study.finished["objective"] == MASKED_DIFFUSION).any():
        words.append("Masked-diffusion losses are upper bounds: a true crossing is at no more compute.")
    return list(dict.fromkeys(words))


def _list_frontier_warnings(law: ComputeLaw) -> list[str]:
    words = list(law.warnings)
    if not law.lack_of_fit.get("passes", True):
        misfit = 100 * law.lack_of_fit["misfit"]
        words.append(f"The form of the frontier is off by {misfit:.2g} %, which its intervals include.")
    return words


def _list_law_warnings(study: Study, law: Law) -> list[str]:
    words = list(law.warnings)
    # runs that finished after the law was fitted
    new = set(study.main_runs.query("held_out != 1")["run"]) - set(law.runs)
    if law.runs and new:
        words.append(f"The law lacks {format_plural(len(new), 'finished run')}: fit it again.")
    if study.finished["epochs"].max() > MAX_USEFUL_EPOCHS and not FORM[law.form].needs_unique:
        words.append("The law counts repeated tokens as new, which is too optimistic beyond about 4 epochs.")
    return words


def _list_extrapolations(study: Study, optima: pd.DataFrame) -> list[str]:
    words = []
    at = optima.loc[optima["is_next"]].iloc[0]
    # the budget is always beyond the runs; its best size need not be
    sizes = select_fitted_runs(study, answering_law(study))["N"]
    low, high = sizes.min(), sizes.max()
    if len(sizes) and not low <= at["N"] <= high:
        words.append(f"The size is outside those trained, {format_count(low)} to {format_count(high)}.")
    if not is_inside(study.scored).all():
        words.append("An unseen run was outside its interval: the intervals here may be too narrow.")
    if study.main_runs["train_flops"].max() > SAME_BUDGET * optima["C"].max():
        words.append("Runs beyond these budgets are finished: fit the law again.")
    return words


def suggest_runs(study: Study) -> str:
    """Return what to do for an answer: finish the runs, fit a law, or add runs, with their cost."""
    n_missing = int((~study.runs["status"].dropna().isin(["done", STALE])).sum())
    if n_missing:
        return f"To do: train {format_plural(n_missing, 'more run')} of this study with tools/sweep.py."
    if study.frontier is not None:
        return f"To do: {' '.join(suggest_next_steps(study.frontier))}"
    if study.law is None:
        return "To do: fit runs at equal compute with scaling frontier, others with tools/fit_law.py."
    # a plan in proportion to what the study has cost so far
    flops = float(study.main_runs["flops_6nd"].sum())
    return f"To do: {suggest_plan(flops, study.folder / 'table.csv', study.law.filter)}." if flops else ""
