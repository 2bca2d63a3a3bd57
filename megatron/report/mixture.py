"""The mixture that a mixing law recommends: text for the terminal, and a figure of all mixtures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from megatron.laws.best_mixture import BestMixture
from megatron.laws.fitting.mixing_form import SAME_SIZE
from megatron.laws.mixing_law import SIZES, MixingLaw
from megatron.report.plot import Chart, draw_parallel
from megatron.report.plot_command import describe_chart
from megatron.study.format import format_count, format_digits, format_interval, format_loss
from megatron.study.selection import filter_rows
from megatron.study.table import read_runs, read_table


def read_mixture_runs(path: Path, where: Sequence[str]) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """Return the finished runs of a study or a table: those to fit, and those that are held out; warnings.

    Raises the errors of `select_runs`.
    """
    table = read_runs(path) if path.is_dir() else read_table(path)
    runs, _, warnings = filter_rows(path, table, None, where)
    is_held_out = runs.reindex(columns=["held_out"])["held_out"] > 0
    return runs[~is_held_out], runs[is_held_out], warnings


def describe_mixture(law: MixingLaw, best: BestMixture, unseen: pd.DataFrame) -> list[str]:
    """Return the chosen form with its errors, the best mixture and its gains, and the held-out runs."""
    errors = [f"{form} {_percent(error)}" for form, (error, _) in law.errors.items()]
    place, not_shown = "", []
    sizes = [(name, axis, getattr(law.runs, axis)) for name, axis in zip(SIZES, "ND", strict=True)]
    for name, axis, trained in (size for size in sizes if size[-1] is not None):
        at = best.prediction[axis]
        place += f", {name} {format_count(at)}"
        # without a term the prediction is that of the trained size
        away = np.log(np.array([at, *unseen.get(name, ())]) / trained[0])
        if axis not in law.forms[0].centre and np.abs(away).max() > SAME_SIZE:
            not_shown.append(f"NOT IDENTIFIED: other {name}: all runs have {format_count(trained[0])}")
    lines = [
        f"{len(law.runs.W)} runs of {len(law.effects)} mixtures: {law.form}; errors of mixtures that are not "
        f"fitted: {', '.join(errors)}",
        *(f"NOT IDENTIFIED: {name}" for name in law.not_identified),
        *not_shown,
        "best mixture:",
        *best.domains.to_string(float_format="{:.3f}".format, na_rep="").splitlines(),
        f"  predicted {_predicted(best.prediction)}, 95 % of one new run{place}",
    ]
    for name, gain in best.gains.iterrows():
        ends = format_interval((gain["low"], gain["high"]), _percent)
        lines.append(f"  loss below {name}: {_percent(gain['gain'])} (95 %: {ends}): {gain['verdict']}")
    return lines + _describe_unseen(law, unseen)


def _describe_unseen(law: MixingLaw, unseen: pd.DataFrame) -> list[str]:
    """Return a line for each held-out run with a loss, and one for all."""
    unseen = unseen.dropna(subset=list(law.targets))
    if unseen.empty:
        return []
    predicted = law.predict(unseen).set_index(unseen.index)
    measured = sum(weight * unseen[name] for name, weight in law.targets.items())
    inside = measured.between(predicted["predictive_low"], predicted["predictive_high"])
    lines = [
        f"not fitted: {name}: predicted {_predicted(predicted.loc[i])}, measured {format_loss(measured[i])}"
        for i, name in unseen.get("run", unseen.index.to_series() + 1).items()
    ]
    rank = f", rank correlation {measured.corr(predicted['loss'], method='spearman'):.4f}"
    # of one or two runs it says nothing
    return [*lines, f"not fitted: {inside.sum()} of {len(inside)} inside{rank * (len(lines) > 2)}"]


def plot_mixtures(law: MixingLaw, best: BestMixture) -> Chart:
    """Return parallel coordinates: weights and loss of mixtures of the largest size, and of the best one."""
    N = law.runs.N
    lines = pd.DataFrame(law.runs.W, columns=law.domains).assign(loss=law.predict(law.runs)["loss"])
    lines = lines if N is None else lines[N.max() == N]
    lines.loc["best"] = [*best.domains["weight"], best.prediction["loss"]]
    gains = [f"{_percent(gain['gain'])} below {name}" for name, gain in best.gains.iterrows()]
    caption = f"Trained mixtures of the largest size, and the best one: {', '.join(gains)}."
    return describe_chart(draw_parallel(lines, "loss"), "Weights of mixtures", caption)


def _predicted(at: Mapping[Any, float]) -> str:
    ends = format_interval((at["predictive_low"], at["predictive_high"]), format_loss)
    return f"{format_loss(at['loss'])} ({ends})"


def _percent(share: float) -> str:
    return f"{format_digits(100 * share, 2)} %"
