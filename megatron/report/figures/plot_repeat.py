"""Figures of repeated text (epochs, crossover of the objectives) and of downstream scores."""

from typing import TypeAlias

import numpy as np

from megatron.laws.crossover import crossover
from megatron.laws.downstream_curve import chance_of_task, fit_downstream
from megatron.laws.forms import FORM
from megatron.report import headlines, verdict
from megatron.report.figures.plot import (
    DASH,
    LOSS_UNIT,
    SYMBOL,
    Chip,
    Figure,
    Trace,
    band_trace,
    format_flops_tick,
    format_run_hover,
    format_score_hover,
    linear_axis,
    list_groups,
    log_axis,
    make_chart,
    make_error_bars,
    make_run_chips,
    scatter_trace,
    size_colour,
)
from megatron.report.palette import ACCENT, INK
from megatron.report.study_data import AUTOREGRESSIVE, MASKED_DIFFUSION, RepeatedRow, Study
from megatron.study.format import OBJECTIVE_NAMES, format_count, format_digits, format_exponent
from megatron.study.run_row import FinishedRow

N_UNIQUE = 5  # amounts of unique text, around those of the study
N_REPLICATES = 20

Series: TypeAlias = dict[tuple[str, float, float], list[RepeatedRow]]  # by objective, N and unique tokens


def epochs_figure(study: Study) -> Figure | None:
    """Return loss over epochs at fixed N and unique text, per objective; None if no text is repeated."""
    # only lines with several epochs are drawn
    series: Series = {}
    for row in study.finished_rows():
        if row.epochs and row.unique_tokens:
            # along one line only the number of epochs changes, and with it D = U x epochs
            key = (row.objective, row.n_params, row.unique_tokens)
            series.setdefault(key, []).append(RepeatedRow(**vars(row)))
    series = {
        key: sorted(rows, key=lambda row: row.epochs)
        for key, rows in series.items()
        if len({row.epochs for row in rows}) > 1
    }
    shown = [row for rows in series.values() for row in rows]
    if not shown or max(row.epochs for row in shown) <= 1:
        return None
    data: list[Trace] = []
    for (objective, _, unique), rows in sorted(series.items()):
        colour = size_colour(study, rows[0])
        data.append(
            scatter_trace(
                [row.epochs for row in rows],
                [row.loss for row in rows],
                "lines+markers",
                meta=list_groups(rows[0]),
                line={"color": colour, "width": 2, "dash": DASH.get(objective, "dot")},
                marker={"color": colour, "size": 9, "symbol": SYMBOL.get(objective, "square")},
                error_y=make_error_bars(rows, colour),
                customdata=[
                    f"{format_score_hover(study, row)}<br>{format_digits(row.epochs, 2)} epochs of "
                    f"{format_count(unique)} tokens"
                    for row in rows
                ],
                hovertemplate="%{customdata}<extra></extra>",
            )
        )
    epochs, losses = [row.epochs for row in shown], [row.loss for row in shown]
    layout = {
        "xaxis": log_axis("epochs over the same unique tokens", epochs),
        "yaxis": linear_axis(f"held-out loss ({LOSS_UNIT})", min(losses), max(losses)),
    }
    words = [_describe_turn(study, objective, series) for objective in study.objectives()]
    title = "; ".join(filter(None, words)) or f"Up to {format_digits(max(epochs), 2)} epochs"
    title = title[:1].upper() + title[1:]
    caption = (
        "One line per size and amount of unique text, autoregressive solid and masked diffusion dashed. "
        "Where a line turns up, more repetition increases the loss. Bars: two standard errors."
    )
    return Figure(
        "epochs", title, caption, f"{title}.", make_chart(data, layout), make_run_chips(study, shown)
    )


def _describe_turn(study: Study, objective: str, series: Series) -> str:
    """Return a clause on the epochs at which one objective's lines are lowest; empty without lines."""
    claim = headlines.describe_turns(study, [rows for key, rows in series.items() if key[0] == objective])
    return f"{OBJECTIVE_NAMES.get(objective, objective)}: {claim}" if claim else ""


def crossover_figure(study: Study) -> Figure | None:
    """Return C_crit over unique tokens; None unless both objectives have laws of repeated data."""
    first, second = (study.laws.get(objective) for objective in (AUTOREGRESSIVE, MASKED_DIFFUSION))
    if first is None or second is None or not all(FORM[law.form].needs_unique for law in (first, second)):
        return None
    unique_tokens = [row.unique_tokens for row in study.finished_rows() if row.unique_tokens]
    if not unique_tokens:
        return None
    unique = np.geomspace(min(unique_tokens) / 2, max(unique_tokens) * 10, N_UNIQUE)
    crossing = crossover(first, second, unique.tolist(), n_replicates=N_REPLICATES)
    # NaN where the laws do not meet within the searched compute
    at = np.isfinite(crossing.C)
    if not at.any():
        return None
    data: list[Trace] = []
    shown = crossing.C[at].tolist()
    # a replicate without a crossing counts as infinite, so an end can be infinite: then no band is drawn
    if crossing.ends is not None and np.isfinite([end[at] for end in crossing.ends]).all():
        low, high = (end[at] for end in crossing.ends)
        data.append(band_trace(unique[at], (low, high), "crossover"))
        shown += [*low, *high]
    data.append(
        scatter_trace(
            unique[at].tolist(), crossing.C[at].tolist(), "lines+markers", meta=["crossover"],
            line={"color": ACCENT, "width": 2.4}, marker={"color": ACCENT, "size": 8},
            hovertemplate="%{x:.3s} unique tokens: from %{y:.2s} FLOPs<extra>crossover</extra>",
        )
    )  # fmt: skip
    layout = {
        "xaxis": log_axis("unique tokens, U", unique[at].tolist()),
        "yaxis": log_axis("compute where the laws meet (FLOPs)", shown, format_flops_tick),
    }
    title = f"By the laws masked diffusion has the lower loss above {crossing.words}"
    doubt = next((verdict.name_law(law) for law in (first, second) if not verdict.is_sound(law)), None)
    if doubt is not None:
        title = f"Where the laws meet does not follow from {doubt} ({first.n_runs} and {second.n_runs} runs)"
    elif crossing.power is None:
        title = (
            f"The laws meet at {format_exponent(float(crossing.C[at][0]))} FLOPs with "
            f"{format_count(unique[at][0])} unique tokens"
        )
    caption = (
        "At each amount of unique text: the compute at which the best masked-diffusion bound is as low as "
        "the best autoregressive loss, each at its best size, by their laws. Band: 95 % confidence, from "
        "pairs of refits. The diffusion loss is an upper bound, so the true crossing is at no more compute."
    )
    alt = f"{title} " + "; ".join(
        f"{format_count(u)} tokens: {format_exponent(c)} FLOPs"
        for u, c in zip(unique[at], crossing.C[at], strict=True)
    )
    chips = [Chip("crossover", "crossover", ACCENT)]
    return Figure("crossover", title, caption, f"{alt}.", make_chart(data, layout), chips)


def downstream_figure(study: Study) -> Figure | None:
    """Return each task's scores over the run's loss, with the fitted curve; None without scores."""
    by_run = {row.run: row for row in study.finished_rows()}
    tasks: dict[tuple[str, str], list[tuple[FinishedRow, float]]] = {}
    for entry in study.scores:
        if entry["run"] in by_run:
            key = (entry["task"], entry["kind"])
            tasks.setdefault(key, []).append((by_run[entry["run"]], entry["score"]))
    # a task needs two runs for a trend
    tasks = {key: pairs for key, pairs in tasks.items() if len(pairs) > 1}
    if not tasks:
        return None
    data: list[Trace] = []
    chips, words = [], []
    for i, ((task, kind), pairs) in enumerate(sorted(tasks.items())):
        L, y = (np.array(v, dtype=float) for v in zip(*((r.loss, s) for r, s in pairs), strict=True))
        dash = ("solid", "dash", "dot")[i % 3]
        data.append(
            scatter_trace(
                L.tolist(), y.tolist(), "markers", meta=[f"task:{task}"],
                marker={"color": ACCENT, "size": 8},
                customdata=[f"{format_run_hover(study, row)}<br>{task} {value:.3f}" for row, value in pairs],
                hovertemplate="%{customdata}, loss %{x:.3f}<extra></extra>",
            )
        )  # fmt: skip
        try:
            # n_bootstrap = 0: the figure shows the curve alone
            chance = chance_of_task(task) if kind == "accuracy" else None
            curve = fit_downstream(L, y, kind, n_bootstrap=0, chance=chance)
        except ValueError:  # too few runs, or scores outside 0 to 1
            why = "too few runs for a curve" if y.max() <= 1 else "no curve for scores above 1"
            words.append(f"{headlines.describe_rank_correlation(task, L, y, kind == 'accuracy')}, {why}")
        else:
            x = np.linspace(L.min(), L.max(), 60)
            data.append(
                scatter_trace(
                    x.tolist(), curve.score(x).tolist(), "lines", meta=[f"task:{task}"], hoverinfo="skip",
                    line={"color": INK, "width": 1.8, "dash": dash},
                )
            )  # fmt: skip
            off = 100 * np.abs(curve.score(L) - y).max()
            words.append(
                f"{headlines.describe_rank_correlation(task, L, y, kind == 'accuracy')}, "
                f"off its curve by {off:.1f} points at most"
            )
        chips.append(Chip(f"task:{task}", task, INK, dash))
    shown_x, shown_y = ([v for trace in data for v in trace[axis]] for axis in "xy")
    layout = {
        "xaxis": linear_axis(f"held-out loss ({LOSS_UNIT})", min(shown_x), max(shown_x)),
        "yaxis": linear_axis("score (share; loss in nats maps to it)", min(shown_y), max(shown_y)),
    }
    title = "; ".join(words)
    caption = "Points: finished runs. Lines: error = ε − k exp(−γ L), or for accuracies a sigmoid in L."
    return Figure("downstream", title, caption, f"{title}.", make_chart(data, layout), chips)
