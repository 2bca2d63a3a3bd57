"""Figures of the runs, as plotly's JSON: curves, loss against compute, one objective beside the other."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.scaling import headlines, wording
from megatron.scaling.plot import (
    DASH,
    LOSS_UNIT,
    SYMBOL,
    Chip,
    Figure,
    describe,
    flops_tick,
    groups,
    linear_axis,
    log_axis,
    run_chips,
    run_mark,
    score,
    size_colour,
)
from megatron.scaling.study import AUTOREGRESSIVE, MASKED_DIFFUSION, Study
from megatron.scaling.table import Row

SMOOTHED_SHARE = 0.02  # of a curve's points, to either side
MAX_POINTS = 250  # of a curve: more cannot be seen and makes the page heavy
AT_POINT = "%{y:.3f} at %{x:.3s} tokens<extra></extra>"  # of a hover: plotly puts in the point's values
MAX_HELD_OUT = 8  # points of a run's held-out curve: a mark needs air


def smoothed(loss: np.ndarray) -> np.ndarray:
    """Running mean over 2 % of the points to either side. float64 [n].

    At the start, where the loss falls fast, the window shrinks evenly, so that the mean does not lag; at the
    end, where it is flat, only the side that has no points is cut.
    """
    n, half = len(loss), math.ceil(SMOOTHED_SHARE * len(loss))
    total = np.concatenate([[0.0], np.cumsum(loss)])
    at = np.arange(n)
    low = at - np.minimum(half, at)
    high = np.minimum(at + np.minimum(half, at), n - 1)
    return (total[high + 1] - total[low]) / (high + 1 - low)


def thinned(n: int, most: int) -> np.ndarray:
    """Which of n points to draw: at most `most`, closer together early, where the loss moves; the last
    always.
    """
    return np.unique(np.geomspace(1, n, most).round().astype(int) - 1) if n > most else np.arange(n)


def curves_figure(study: Study) -> Figure | None:
    """Loss against tokens, every run: training smoothed, held-out as points."""
    rows = [row for row in study.rows if len(study.curves[row["run"]].tokens) and row["n_params"]]
    if not rows:
        return None
    data, seen = [], []
    for row in rows:
        curve, colour = study.curves[row["run"]], size_colour(study, row)
        keep = thinned(len(curve.tokens), MAX_POINTS)
        mean = smoothed(curve.loss)[keep]
        about = {"meta": groups(row), "legendgroup": row["run"]}
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": curve.tokens[keep].tolist(),
                "y": mean.round(4).tolist(),
                "line": {"color": colour, "width": 1.6, "dash": DASH.get(row["objective"], "dot")},
                "opacity": 0.85,
                "hovertemplate": f"{describe(study, row)}<br>training {AT_POINT}",
                **about,
            }
        )
        few = thinned(len(curve.held_out_tokens), MAX_HELD_OUT)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": curve.held_out_tokens[few].tolist(),
                "y": curve.held_out_loss[few].round(4).tolist(),
                "cliponaxis": False,
                "marker": {
                    "color": colour,
                    "size": [5] * (len(few) - 1) + [9],
                    "opacity": 1,
                    "line": {"width": 0 if row["objective"] == AUTOREGRESSIVE else 1.5},
                    "symbol": SYMBOL.get(row["objective"], "square-open"),
                },
                "hovertemplate": f"{describe(study, row)}<br>held out {AT_POINT}",
                **about,
            }
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
    words = curves_words(study, entropy)
    caption = (
        "Lines: training loss, smoothed lightly (a running mean over 2 % of a run's points to either side). "
        "Points: loss "
        "on held-out documents, the run's last one large. A masked-diffusion figure is an upper bound, and "
        "noisier."
    )
    return Figure("curves", words[0], caption, " ".join(words), data, layout, run_chips(study, rows), 460)


def level_line(y: float, text: str) -> dict[str, Any]:
    """A dotted level across the figure, and its name on it at the right, where the curves have gone below."""
    line = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": y,
        "y1": y,
        "layer": "below",
        "line": {"color": "@muted", "width": 1.2, "dash": "dot"},
    }
    name = {
        "xref": "paper",
        "x": 1,
        "xanchor": "right",
        "y": y,
        "yanchor": "bottom",
        "showarrow": False,
        "text": text,
        "font": {"color": "@muted", "size": 11},
        "bgcolor": "@paper/0.75",
        "borderpad": 1,
    }
    return {"shapes": [line], "annotations": [name]}


def curves_words(study: Study, entropy: float | None) -> list[str]:
    """The claim of the curves, then what else they show."""
    claim = headlines.size_claim(study)
    if not claim:
        return [f"{wording.plural(len(study.rows), 'run')} so far, and no two sizes to compare yet"]
    words = [claim, "."]
    done = study.done(AUTOREGRESSIVE)
    if entropy and done:
        level = [row for row in done if row["train_tokens"] == max(study.budgets(done))]
        below = sum(row["loss"] + headlines.Z * (row["loss_se"] or 0) < entropy for row in level)
        words.append(
            f" Of {wording.plural(len(level), 'autoregressive run')} at the largest budget, {below} "
            f"{'ends' if below == 1 else 'end'} below the unigram entropy of the held-out text "
            f"({entropy:.2f})"
        )
        words.append(": they have learnt more than how often each token occurs." if below else ".")
    return words


def compute_figure(study: Study) -> Figure | None:
    """Held-out loss against training FLOPs, and the lower envelope of the finished runs of each objective."""
    rows = [row for row in study.done() if row["train_flops"]]
    if not rows:
        return None
    data = [trail(study, row) for row in rows]
    for row in rows:
        flops = row["train_flops"]
        data.append(run_mark(study, row, flops, f"<br>{wording.exponent(flops)} FLOPs"))
    claim = ""
    for objective in study.objectives():
        lower = envelope([row for row in rows if row["objective"] == objective])
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": [row["train_flops"] for row in lower],
                "hoverinfo": "skip",
                "y": [row["loss"] for row in lower],
                "meta": [f"objective:{objective}", "envelope"],
                "line": {"color": "@ink", "width": 2.2, "dash": DASH.get(objective, "dot")},
            }
        )
        mine = [row for row in rows if row["objective"] == objective]
        claim = claim or headlines.envelope_claim(study, mine, lower)
    flops, losses = [row["train_flops"] for row in rows], [row["loss"] for row in rows]
    layout = {
        "xaxis": log_axis("training compute (FLOPs)", flops, flops_tick),
        "yaxis": linear_axis(f"held-out loss ({LOSS_UNIT})", min(losses), max(losses)),
    }
    caption = (
        "Large marks: finished runs, with two standard errors. Faint lines: the same runs on their way, "
        "before the learning "
        "rate came down, and so not on the envelope. Heavy line: the lowest loss reached with so much "
        "compute or less."
    )
    title = claim or "Held-out loss against training compute"
    best = min(rows, key=lambda row: row["loss"])
    alt = (
        f"{title}. The lowest loss of all, {wording.loss(best['loss'], best['loss_se'])}, is that of "
        f"{best['run']} at "
        f"{wording.exponent(best['train_flops'])} FLOPs."
    )
    return Figure(
        "compute", title, caption, alt, data, layout, [*run_chips(study, rows), Chip("envelope", "envelope")]
    )


def trail(study: Study, row: Row) -> dict[str, Any]:
    """A run's held-out losses on the way, against the compute spent by then."""
    curve = study.curves[row["run"]]
    flops = curve.held_out_tokens * (row["train_flops"] / row["train_tokens"])
    return {
        "type": "scatter",
        "mode": "lines",
        "x": flops.tolist(),
        "y": curve.held_out_loss.round(4).tolist(),
        "line": {"color": size_colour(study, row), "width": 1, "dash": DASH.get(row["objective"], "dot")},
        "opacity": 0.4,
        "hoverinfo": "skip",
        "meta": groups(row),
    }


def envelope(rows: Sequence[Row]) -> list[Row]:
    """The runs that no cheaper or equally cheap run beats, cheap to dear."""
    lower: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["train_flops"], row["loss"])):
        if not lower or row["loss"] < lower[-1]["loss"]:
            lower.append(row)
    return lower


def objectives_figure(study: Study) -> Figure | None:
    """The two objectives at equal N and equal tokens; None where no pair exists."""
    by_key: dict[tuple, dict[str, Row]] = {}
    for row in sorted(study.done(), key=lambda row: -row["loss"]):  # of several runs the best stays
        key = tuple(row[name] for name in ("n_params", "train_tokens", "unique_tokens", "seed"))
        by_key.setdefault(key, {})[row["objective"]] = row
    pairs = [pair for pair in by_key.values() if AUTOREGRESSIVE in pair and MASKED_DIFFUSION in pair]
    if not pairs:
        return None
    data = []
    for N in sorted({pair[AUTOREGRESSIVE]["n_params"] for pair in pairs}):
        for objective in (AUTOREGRESSIVE, MASKED_DIFFUSION):
            rows = sorted(
                (pair[objective] for pair in pairs if pair[objective]["n_params"] == N),
                key=lambda row: row["train_tokens"],
            )
            colour = size_colour(study, rows[0])
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "x": [row["train_tokens"] for row in rows],
                    "y": [row["loss"] for row in rows],
                    "meta": groups(rows[0]),
                    "cliponaxis": False,
                    "error_y": {
                        "array": [2 * (row["loss_se"] or 0) for row in rows],
                        "color": colour,
                        "thickness": 1,
                        "width": 3,
                    },
                    "line": {"color": colour, "width": 2, "dash": DASH[objective]},
                    "marker": {"color": colour, "size": 9, "symbol": SYMBOL[objective]},
                    "customdata": [score(study, row) for row in rows],
                    "hovertemplate": "%{customdata}<extra></extra>",
                }
            )
    rows = [row for pair in pairs for row in pair.values()]
    losses = [row["loss"] for row in rows]
    tokens = study.budgets(rows)
    layout = {
        "xaxis": log_axis("training tokens", tokens)
        | {"tickvals": tokens, "ticktext": list(map(wording.count, tokens))},
        "yaxis": linear_axis(f"held-out loss ({LOSS_UNIT})", min(losses), max(losses)),
    }
    title = headlines.gap_claim(study, [(pair[AUTOREGRESSIVE], pair[MASKED_DIFFUSION]) for pair in pairs])
    caption = (
        "Same model code, same N, same text. The autoregressive loss is exact; the masked-diffusion figure "
        "is an upper bound "
        "on what that model would score, estimated with random masks, so the true gap is no larger. Bars: "
        "two standard errors."
    )
    alt = f"{title}, in {wording.plural(len(pairs), 'pair')} of runs of equal N, tokens, text and seed."
    return Figure("objectives", title, caption, alt, data, layout, run_chips(study, rows))
