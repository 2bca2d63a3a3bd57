"""The mixture that a mixing law recommends: text for the terminal, and a figure of all mixtures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from megatron.cli import format_table
from megatron.laws.best_mixture import BestMixture
from megatron.laws.mixing_law import MixingLaw
from megatron.report.plot import INK, Chart, add_line, make_chart, ramp_colour
from megatron.report.plot_command import describe_chart
from megatron.study.format import format_digits, format_interval, format_loss
from megatron.study.selection import filter_rows
from megatron.study.table import read_runs, read_table


def read_mixture_runs(path: Path, where: Sequence[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the finished runs of a study or a table: those to fit, and those that are held out.

    Raises the errors of `select_runs`.
    """
    table = read_runs(path) if path.is_dir() else read_table(path)
    runs, _, _ = filter_rows(path, table, None, where)
    is_held_out = runs.reindex(columns=["held_out"])["held_out"] > 0
    return runs[~is_held_out], runs[is_held_out]


def list_unique_tokens(law: MixingLaw) -> dict[str, float]:
    """Return the unique tokens of each domain that some run has, by the epochs of the runs."""
    if law.runs.U is None:
        return {}
    # a run without the domain does not show its tokens
    least = law.runs.U.min(axis=0)
    return {
        name: float(tokens) for name, tokens in zip(law.domains, least, strict=True) if np.isfinite(tokens)
    }


def describe_mixture(law: MixingLaw, best: BestMixture, unseen: pd.DataFrame) -> list[str]:
    """Return the chosen form with its errors, the best mixture and its gains, and the held-out runs."""
    errors = [f"{form} {_percent(error)}" for form, (error, _) in law.errors.items()]
    rows = [
        (
            name,
            f"{at.weight:.3f}",
            "" if np.isnan(at.epochs) else f"{at.epochs:.2f}",
            "at a bound" * at.at_bound,
        )
        for name, at in best.domains.iterrows()
    ]
    lines = [
        f"{len(law.runs.W)} runs of {len(law.effects)} mixtures: {law.form}; errors of mixtures that are not "
        f"fitted: {', '.join(errors)}",
        *(f"NOT IDENTIFIED: {name}" for name in law.not_identified),
        "best mixture:",
        *format_table(("domain", "weight", "epochs", ""), rows, ("domain", "")),
        f"  predicted {_predicted(best.prediction)}, 95 % of one new run",
    ]
    for name, gain in best.gains.iterrows():
        ends = format_interval((gain["low"], gain["high"]), _percent)
        lines.append(f"  loss below {name}: {_percent(gain['gain'])} (95 %: {ends}): {gain['verdict']}")
    return lines + _describe_unseen(law, unseen)


def _describe_unseen(law: MixingLaw, unseen: pd.DataFrame) -> list[str]:
    """Return a line for each held-out run."""
    if unseen.empty:
        return []
    lines, predicted = [], law.predict(unseen).to_dict("records")
    measured = sum(weight * unseen[name] for name, weight in law.targets.items())
    for name, at, loss in zip(unseen["run"], predicted, measured, strict=True):
        verdict = "inside" if at["predictive_low"] <= loss <= at["predictive_high"] else "outside"
        lines.append(
            f"not fitted: {name}: predicted {_predicted(at)}, measured {format_loss(loss)}, {verdict}"
        )
    return lines


def plot_mixtures(law: MixingLaw, best: BestMixture) -> Chart:
    """Return parallel coordinates: weights of the mixtures of the largest size by loss, and of the best one."""
    N, places = law.runs.N, np.arange(len(law.domains))
    shown = np.ones(len(law.runs.W), dtype=bool) if N is None else N.max() == N
    losses = law.predict(law.runs)["loss"].to_numpy()[shown]
    chart = make_chart()
    # the highest loss first, below the others
    for i, row in enumerate(np.argsort(-losses)):
        text, colour = format_loss(losses[row]), ramp_colour(len(losses) - 1 - i, len(losses))
        add_line(chart, places, law.runs.W[shown][row], "trained", colour, text, width=1.0)
    weights = best.domains["weight"]
    add_line(chart, places, weights, "best", INK, format_loss(best.prediction["loss"]), width=4.0)
    gains = [f"{_percent(gain['gain'])} below {name}" for name, gain in best.gains.iterrows()]
    axis = {"tickvals": places.tolist(), "ticktext": law.domains}
    chart.update_layout(xaxis=axis, yaxis={"title": {"text": "weight"}, "rangemode": "tozero"})
    caption = f"Blue to yellow: mixtures of the largest size, by loss. Black: the best, {', '.join(gains)}."
    return describe_chart(chart, "Weights of mixtures", caption)


def _predicted(at: Mapping[Any, float]) -> str:
    ends = format_interval((at["predictive_low"], at["predictive_high"]), format_loss)
    return f"{format_loss(at['loss'])} ({ends})"


def _percent(share: float) -> str:
    return f"{format_digits(100 * share, 2)} %"
