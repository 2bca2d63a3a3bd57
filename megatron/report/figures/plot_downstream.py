"""Figure of downstream scores over training compute, with each score's noise and published models."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.laws.downstream_curve import chance_of_task
from megatron.report import reference_text
from megatron.report.figures.plot import (
    Chip,
    Figure,
    Trace,
    format_flops_tick,
    format_run_hover,
    linear_axis,
    log_axis,
    make_chart,
    scatter_trace,
)
from megatron.report.palette import ACCENT, INK, MUTED
from megatron.report.study_data import Study
from megatron.study.format import format_count, join_list
from megatron.study.references import ReferenceScore
from megatron.study.run_row import FinishedRow

# of tasks, which have no order: (plotly's name, the sign in the legend)
SYMBOLS = (("circle", "●"), ("square", "■"), ("triangle-up", "▲"), ("cross", "✚"), ("x", "✖"), ("star", "★"))


@dataclass(frozen=True)
class TaskScores:
    """Scores of one task: of the study's finished runs, and of published models with a compute."""

    task: str
    runs: list[tuple[FinishedRow, float, float]]  # run, score, standard error (NaN: unknown)
    references: list[tuple[ReferenceScore, float]]  # score, FLOPs


def collect_task_scores(study: Study) -> list[TaskScores]:
    """Return the accuracies of each task, in the order of names; tasks without scored runs are omitted."""
    by_run = {row.run: row for row in study.finished_rows()}
    tasks: dict[str, list[tuple[FinishedRow, float, float]]] = {}
    for entry in study.scores:
        if entry["kind"] == "accuracy" and entry["run"] in by_run:
            tasks.setdefault(entry["task"], []).append(
                (by_run[entry["run"]], entry["score"], entry.get("se", math.nan))
            )
    placed = [
        (reference, flops)
        for reference in study.references
        if (flops := reference_text.count_flops(reference)) is not None
    ]
    return [
        TaskScores(task, runs, [pair for pair in placed if pair[0].task == task])
        for task, runs in sorted(tasks.items())
    ]


def score_compute_figure(study: Study) -> Figure | None:
    """Return scores over 6 N D of runs and published models; None without scores."""
    tasks = collect_task_scores(study)
    if not tasks:
        return None
    data: list[Trace] = []
    chips = []
    for i, task in enumerate(tasks):
        symbol, sign = SYMBOLS[i % len(SYMBOLS)]
        data += _draw_task(study, task, symbol)
        chips.append(Chip(f"task:{task.task}", f"{sign} {task.task}", INK, "point"))
    x = [v for trace in data for v in trace["x"]]
    ends = [_find_ends(trace) for trace in data]
    layout = {
        "xaxis": log_axis("training compute, 6 N D (FLOPs)", x, format_flops_tick),
        "yaxis": linear_axis("accuracy", min(low for low, _ in ends), max(high for _, high in ends)),
    }
    words = "; ".join(describe_noise(task) for task in tasks)
    caption = (
        "Filled: the study's finished runs. Open: published models. Bars: two standard errors over the "
        "task's questions; training with another seed adds to them. Dotted: chance, where it is known."
    )
    notes = reference_text.list_notes(study.references)
    title = describe_separation(tasks)
    caption = " ".join([caption, *notes])
    return Figure("score-compute", title, caption, f"{title}: {words}.", make_chart(data, layout, 440), chips)


def _find_ends(trace: Trace) -> tuple[float, float]:
    """Return the lowest and highest y of a trace, with its bars."""
    y = np.array(trace["y"], dtype=float)
    bars = trace["error_y"]["array"]
    reach = np.zeros(len(y)) if bars is None else np.array(bars, dtype=float)
    return float((y - reach).min()), float((y + reach).max())


def _draw_task(study: Study, task: TaskScores, symbol: str) -> list[Trace]:
    """Return the traces of one task: runs, published models and chance."""
    meta = [f"task:{task.task}"]
    rows, scores, errors = zip(*task.runs, strict=True)
    flops = [reference_text.count_run_flops(row) for row in rows]
    hovers = [
        f"{format_run_hover(study, row)}<br>{task.task} {_format_score(score, se)}"
        for row, score, se in task.runs
    ]
    traces = [_draw_points(flops, scores, errors, hovers, meta, symbol, ACCENT)]
    if task.references:
        references = [reference for reference, _ in task.references]
        se = [math.nan if reference.se is None else reference.se for reference in references]
        hovers = [
            f"<b>{reference.model}</b>, {format_count(reference.n_params or 0)}<br>{task.task} "
            f"{_format_score(reference.score, error)}{'<br>' if reference.note else ''}{reference.note}"
            for reference, error in zip(references, se, strict=True)
        ]
        at = [flops for _, flops in task.references]
        values = [reference.score for reference in references]
        traces.append(_draw_points(at, values, se, hovers, meta, f"{symbol}-open", INK))
        flops = [*flops, *at]
    if (chance := chance_of_task(task.task)) is not None:
        traces.append(
            scatter_trace(
                [min(flops), max(flops)], [chance, chance], "lines", meta=meta, hoverinfo="skip",
                line={"color": MUTED, "width": 1.2, "dash": "dot"},
            )
        )  # fmt: skip
    return traces


def _draw_points(
    x: Sequence[float],
    y: Sequence[float],
    errors: Sequence[float],
    hovers: Sequence[str],
    meta: list[str],
    symbol: str,
    colour: str,
) -> Trace:
    """Return points with bars of two standard errors; a NaN has no bar."""
    bars: dict[str, Any] = {"color": colour, "thickness": 1, "width": 3}
    bars["array"] = [0.0 if math.isnan(error) else 2 * error for error in errors]
    return scatter_trace(
        list(x), list(y), "markers", meta=meta, error_y=bars, customdata=list(hovers),
        marker={"color": colour, "size": 9, "symbol": symbol, "line": {"width": 1.5}},
        hovertemplate="%{customdata}, %{x:.2s} FLOPs<extra></extra>",
    )  # fmt: skip


def _format_score(score: float, se: float) -> str:
    return f"{score:.3f}" if math.isnan(se) else f"{score:.3f} ± {se:.3f}"


def do_runs_differ(task: TaskScores) -> bool | None:
    """Return whether the runs' scores differ by more than their noise: Cochran's Q at 5 %; None: unknown."""
    from scipy.stats import chi2  # slow import

    scores, errors = (np.array([run[i] for run in task.runs], dtype=float) for i in (1, 2))
    usable = np.isfinite(errors) & (errors > 0)
    if usable.sum() < 2:
        return None
    y, weights = scores[usable], errors[usable] ** -2.0
    q = float((weights * (y - np.average(y, weights=weights)) ** 2).sum())
    return bool(chi2.sf(q, len(y) - 1) < 0.05)


def describe_separation(tasks: Sequence[TaskScores]) -> str:
    """Return the figure's title: the tasks on which the runs differ by more than their noise."""
    verdicts = [do_runs_differ(task) for task in tasks]
    differ = [task.task for task, verdict in zip(tasks, verdicts, strict=True) if verdict]
    n_unknown = verdicts.count(None)
    if n_unknown == len(tasks):
        return "Scores over compute; their noise is not known"
    if not differ:
        clause = " whose noise is known" if n_unknown else ""
        return f"On none of the tasks{clause} do the runs differ by more than the noise of their scores"
    rest = "" if len(differ) == len(tasks) else ", on the others they do not"
    rest += " or the noise is not known" if rest and n_unknown else ""
    return f"On {join_list(differ)} the runs differ by more than the noise of their scores{rest}"


def describe_noise(task: TaskScores) -> str:
    """Return a clause on the range of the runs' scores and their noise."""
    scores, errors = (np.array([run[i] for run in task.runs], dtype=float) for i in (1, 2))
    reach, differ = 100 * float(np.ptp(scores)), do_runs_differ(task)
    if differ is None:
        return f"{task.task}: runs within {reach:.1f} points, of unknown noise"
    noise = 100 * float(np.median(errors[np.isfinite(errors) & (errors > 0)]))
    verb = "differ by more" if differ else "do not differ by more"
    return (
        f"{task.task}: {len(task.runs)} runs within {reach:.1f} points {verb} than their noise "
        f"(standard error {noise:.1f} points)"
    )
