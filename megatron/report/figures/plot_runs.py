"""Figures of the runs: loss curves, loss over compute, comparison of objectives."""

import math
from collections.abc import Sequence

import numpy as np

from megatron.report import headlines
from megatron.report.figures.plot import (
    DASH,
    LOSS_UNIT,
    SYMBOL,
    Chip,
    Figure,
    Trace,
    format_flops_tick,
    format_run_hover,
    format_score_hover,
    level_line,
    linear_axis,
    list_groups,
    log_axis,
    make_chart,
    make_error_bars,
    make_run_chips,
    make_run_mark,
    scatter_trace,
    size_colour,
)
from megatron.report.palette import INK
from megatron.report.study_data import AUTOREGRESSIVE, MASKED_DIFFUSION, RunPoint, Study
from megatron.study.format import format_count, format_exponent, format_loss, format_plural
from megatron.study.run_row import FinishedRow

SMOOTHED_SHARE = 0.02  # share of a curve's points, on either side
MAX_POINTS = 250  # of a curve; more are not visible and increase the page's size
AT_POINT = "%{y:.3f} at %{x:.3s} tokens<extra></extra>"  # hover template, filled in by plotly
MAX_HELD_OUT = 8  # held-out points per run, so that marks do not overlap


def smooth_loss(loss: np.ndarray) -> np.ndarray:
    """Return the running mean over 2 % of the points on either side. float64 [n].

    At the start, where the loss falls fast, the window shrinks on both sides, so that the mean does not lag.
    At the end, where the loss is flat, only the side without points is cut.
    """
    # Example: 1,000 points, half = 20. Point 5 is the mean of points 0..10, point 500 of 480..520, point 999
    # of 979..999.
    n, half = len(loss), math.ceil(SMOOTHED_SHARE * len(loss))
    # running mean by cumulative sums: total[high + 1] - total[low] is the sum over low..high
    total = np.concatenate([[0.0], np.cumsum(loss)])
    at = np.arange(n)
    low = at - np.minimum(half, at)
    high = np.minimum(at + np.minimum(half, at), n - 1)
    return (total[high + 1] - total[low]) / (high + 1 - low)


def thin_points(n: int, most: int) -> np.ndarray:
    """Return the indices of at most `most` of n points to draw, log-spaced, always with the last."""
    # Indices from 0 to n - 1, dense at the start where the loss falls fast. At the start several round to the
    # same index, so fewer than `most` remain.
    return np.unique(np.geomspace(1, n, most).round().astype(int) - 1) if n > most else np.arange(n)


def curves_figure(study: Study) -> Figure | None:
    """Return loss over tokens of every run: smoothed training loss as lines, held-out loss as points."""
    rows = [row for row in study.rows if len(study.curves[row.run].tokens) and row.n_params]
    if not rows:
        return None
    data, seen = [], []
    for row in rows:
        curve, colour = study.curves[row.run], size_colour(study, row)
        keep = thin_points(len(curve.tokens), MAX_POINTS)
        mean = smooth_loss(curve.loss)[keep]
        about = {"meta": list_groups(row)}
        data.append(
            scatter_trace(
                curve.tokens[keep].tolist(), mean.round(4).tolist(), "lines", opacity=0.85,
                line={"color": colour, "width": 1.6, "dash": DASH.get(row.objective or "", "dot")},
                hovertemplate=f"{format_run_hover(study, row)}<br>training {AT_POINT}", **about,
            )
        )  # fmt: skip
        few = thin_points(len(curve.held_out_tokens), MAX_HELD_OUT)
        data.append(
            scatter_trace(
                curve.held_out_tokens[few].tolist(),
                curve.held_out_loss[few].round(4).tolist(),
                "markers",
                cliponaxis=False,
                marker={
                    "color": colour,
                    "size": [5] * (len(few) - 1) + [9],
                    "opacity": 1,
                    "line": {"width": 0 if row.objective == AUTOREGRESSIVE else 1.5},
                    "symbol": SYMBOL.get(row.objective or "", "square-open"),
                },
                hovertemplate=f"{format_run_hover(study, row)}<br>held out {AT_POINT}",
                **about,
            )
        )
        seen += [*mean, *curve.held_out_loss]
    tokens = [x for trace in data for x in trace["x"]]
    layout = {
        "xaxis": log_axis("training tokens", tokens),
        "yaxis": linear_axis(f"loss ({LOSS_UNIT})", min(seen), max(seen)),
    }
    entropy = study.corpus.get("unigram_entropy_nats")
    if isinstance(entropy, int | float):
        layout |= level_line(entropy, f"unigram entropy, {entropy:.2f}")
    words = describe_curves(study, entropy)
    caption = (
        "Lines: training loss, smoothed by a running mean over 2 % of a run's points on either side. "
        "Points: loss on held-out documents; the last one of a run is large. Masked-diffusion losses are "
        "upper bounds, and noisier."
    )
    chart = make_chart(data, layout, 460)
    return Figure("curves", words[0], caption, " ".join(words), chart, make_run_chips(study, rows))


def describe_curves(study: Study, entropy: float | None) -> list[str]:
    """Return the title of the curves, then parts of a sentence on the unigram entropy."""
    claim = headlines.describe_sizes(study)
    if not claim:
        return [f"{format_plural(len(study.rows), 'run')} so far, and no two sizes to compare yet"]
    words = [claim, "."]
    done = study.finished_rows(AUTOREGRESSIVE)
    if entropy and done:
        level = [row for row in done if row.train_tokens == max(study.budgets(done))]
        # a loss counts as below the entropy only by more than Z standard errors
        below = sum(row.loss + headlines.Z * (row.loss_se or 0) < entropy for row in level)
        words.append(
            f" Of {format_plural(len(level), 'autoregressive run')} at the largest budget, {below} "
            f"{'ends' if below == 1 else 'end'} below the unigram entropy of the held-out text "
            f"({entropy:.2f})"
        )
        words.append(": they have learnt more than the frequency of each token." if below else ".")
    return words


def compute_figure(study: Study) -> Figure | None:
    """Return held-out loss over training FLOPs, with the lower envelope of each objective's finished runs."""
    rows = [
        RunPoint(**vars(row), N=row.n_params, D=row.train_tokens, C=row.train_flops)
        for row in study.finished_rows()
        if row.train_flops
    ]
    if not rows:
        return None
    data = [intermediate_trace(study, row) for row in rows]
    for row in rows:
        data.append(make_run_mark(study, row, row.C, f"<br>{format_exponent(row.C)} FLOPs"))
    claim = ""
    for objective in study.objectives():
        lower = lower_envelope([row for row in rows if row.objective == objective])
        data.append(
            scatter_trace(
                [row.C for row in lower],
                [row.loss for row in lower],
                "lines",
                meta=[f"objective:{objective}", "envelope"],
                hoverinfo="skip",
                line={"color": INK, "width": 2.2, "dash": DASH.get(objective, "dot")},
            )
        )
        group = [row for row in rows if row.objective == objective]
        claim = claim or headlines.describe_envelope(study, group, lower)
    flops, losses = [row.C for row in rows], [row.loss for row in rows]
    layout = {
        "xaxis": log_axis("training compute (FLOPs)", flops, format_flops_tick),
        "yaxis": linear_axis(f"held-out loss ({LOSS_UNIT})", min(losses), max(losses)),
    }
    caption = (
        "Large marks: finished runs, with two standard errors. Faint lines: the same runs during training, "
        "before the learning rate decayed, and therefore not on the envelope. Heavy line: the lowest loss "
        "reached with at most that compute."
    )
    title = claim or "Held-out loss against training compute"
    best = min(rows, key=lambda row: row.loss)
    alt = (
        f"{title}. The lowest loss, {format_loss(best.loss, best.loss_se)}, is that of "
        f"{best.run} at "
        f"{format_exponent(best.C)} FLOPs."
    )
    chips = [*make_run_chips(study, rows), Chip("envelope", "envelope")]
    return Figure("compute", title, caption, alt, make_chart(data, layout), chips)


def intermediate_trace(study: Study, row: RunPoint) -> Trace:
    """Return the trace of a run's held-out losses during training, over the compute spent so far."""
    curve = study.curves[row.run]
    # held-out curves are over tokens: FLOPs per token are constant within a run
    flops = curve.held_out_tokens * (row.C / row.D)
    return scatter_trace(
        flops.tolist(), curve.held_out_loss.round(4).tolist(), "lines", opacity=0.4, hoverinfo="skip",
        line={"color": size_colour(study, row), "width": 1, "dash": DASH.get(row.objective or "", "dot")},
        meta=list_groups(row),
    )  # fmt: skip


def lower_envelope(rows: Sequence[RunPoint]) -> list[RunPoint]:
    """Return the rows with a lower loss than every run of equal or less compute, in ascending compute."""
    lower: list[RunPoint] = []
    # at equal FLOPs the lowest loss comes first, and the others of that compute are then not lower
    for row in sorted(rows, key=lambda row: (row.C, row.loss)):
        if not lower or row.loss < lower[-1].loss:
            lower.append(row)
    return lower


def objectives_figure(study: Study) -> Figure | None:
    """Return the losses of the two objectives at equal N and equal tokens; None without such a pair."""
    by_key: dict[tuple[object, ...], dict[str, FinishedRow]] = {}
    for row in sorted(
        study.finished_rows(), key=lambda row: -row.loss
    ):  # of several runs with one key the lowest loss is stored last
        key = (row.n_params, row.train_tokens, row.unique_tokens, row.seed)
        by_key.setdefault(key, {})[row.objective] = row
    pairs = [pair for pair in by_key.values() if AUTOREGRESSIVE in pair and MASKED_DIFFUSION in pair]
    if not pairs:
        return None
    data = []
    for N in sorted({pair[AUTOREGRESSIVE].n_params for pair in pairs}):
        for objective in (AUTOREGRESSIVE, MASKED_DIFFUSION):
            rows = sorted(
                (pair[objective] for pair in pairs if pair[objective].n_params == N),
                key=lambda row: row.train_tokens,
            )
            colour = size_colour(study, rows[0])
            data.append(
                scatter_trace(
                    [row.train_tokens for row in rows],
                    [row.loss for row in rows],
                    "lines+markers",
                    meta=list_groups(rows[0]),
                    cliponaxis=False,
                    error_y=make_error_bars(rows, colour),
                    line={"color": colour, "width": 2, "dash": DASH[objective]},
                    marker={"color": colour, "size": 9, "symbol": SYMBOL[objective]},
                    customdata=[format_score_hover(study, row) for row in rows],
                    hovertemplate="%{customdata}<extra></extra>",
                )
            )
    rows = [row for pair in pairs for row in pair.values()]
    losses = [row.loss for row in rows]
    tokens = study.budgets(rows)
    layout = {
        "xaxis": log_axis("training tokens", tokens)
        | {"tickvals": tokens, "ticktext": list(map(format_count, tokens))},
        "yaxis": linear_axis(f"held-out loss ({LOSS_UNIT})", min(losses), max(losses)),
    }
    title = headlines.describe_gap(study, [(pair[AUTOREGRESSIVE], pair[MASKED_DIFFUSION]) for pair in pairs])
    caption = (
        "Same model code, same N, same text. The autoregressive loss is exact. The masked-diffusion loss is "
        "an upper bound on that model's loss, estimated with random masks, so the true gap is no larger. "
        "Bars: two standard errors."
    )
    alt = f"{title}, in {format_plural(len(pairs), 'pair')} of runs of equal N, tokens, text and seed."
    return Figure("objectives", title, caption, alt, make_chart(data, layout), make_run_chips(study, rows))
