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
from megatron.study.format import format_count
from megatron.study.references import ReferenceScore
from megatron.study.run_row import FinishedRow

SYMBOLS = ("circle", "square", "triangle-up", "cross", "x", "star")  # of tasks, which have no order


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
        symbol = SYMBOLS[i % len(SYMBOLS)]
        data += _draw_task(study, task, symbol)
        chips.append(Chip(f"task:{task.task}", task.task, INK, "point"))
    x = [v for trace in data for v in trace["x"]]
    y = [v for trace in data for v in trace["y"]]
    layout = {
        "xaxis": log_axis("training compute, 6 N D (FLOPs)", x, format_flops_tick),
        "yaxis": linear_axis("accuracy", min(y), max(y)),
    }
    words = [describe_noise(task) for task in tasks]
    caption = (
        "Filled: the study's finished runs. Open: published models. Bars: two standard errors over the "
        "task's questions; training with another seed adds to them. Dotted: chance, where it is known."
    )
    notes = reference_text.list_notes(study.references)
    title = "; ".join(words)
    caption = " ".join([caption, *notes])
    return Figure("score-compute", title, caption, f"{title}.", make_chart(data, layout, 440), chips)


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


def describe_noise(task: TaskScores) -> str:
    """Return a clause on whether the runs' scores differ by more than their noise: Cochran's Q at 5 %."""
    from scipy.stats import chi2  # slow import

    scores, errors = (np.array([run[i] for run in task.runs], dtype=float) for i in (1, 2))
    usable = np.isfinite(errors) & (errors > 0)
    reach = 100 * float(np.ptp(scores))
    if usable.sum() < 2:
        return f"{task.task}: runs within {reach:.1f} points, of unknown noise"
    y, weights = scores[usable], errors[usable] ** -2.0
    q = float((weights * (y - np.average(y, weights=weights)) ** 2).sum())
    noise = 100 * float(np.median(errors[usable]))
    verb = "differ by more" if chi2.sf(q, len(y) - 1) < 0.05 else "do not differ by more"
    return (
        f"{task.task}: {len(task.runs)} runs within {reach:.1f} points {verb} than their noise "
        f"(standard error {noise:.1f} points)"
    )
