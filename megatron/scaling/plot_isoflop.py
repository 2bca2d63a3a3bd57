"""Figures of equal compute and of equal loss: isoFLOP curves, and contours of L(N, D)."""

import math
from typing import Any

import numpy as np

from megatron.scaling import verdict, wording
from megatron.scaling.approaches import estimate_bias
from megatron.scaling.frontier import optimal
from megatron.scaling.frontier_words import frontier_points
from megatron.scaling.isoflop import IsoFlop, Parabola, fit_isoflop
from megatron.scaling.plot import (
    LOSS_UNIT,
    Chip,
    Figure,
    linear_axis,
    log_axis,
    run_chips,
    run_mark,
    scatter,
)
from megatron.scaling.plot_law import largest_compute, law_points, line_of
from megatron.scaling.study import Study

STEPS = 40  # of a contour grid, to either side
Z95 = 1.96


def isoflop_of(study: Study) -> IsoFlop | None:
    """Parabolas through the finished runs of the first objective that has any; None without a budget."""
    for objective in study.objectives():
        rows = [row for row in study.done(objective) if row["train_flops"] and row["train_tokens"]]
        if not rows:
            continue
        N, D, L, C = (
            np.array([row[name] for row in rows], dtype=float)
            for name in ("n_params", "train_tokens", "loss", "train_flops")
        )
        errors = [row["loss_se"] for row in rows]
        try:
            return fit_isoflop(N, D, L, C, np.array(errors) if all(errors) else None)
        except ValueError:
            continue
    return None


def isoflop_figure(study: Study) -> Figure | None:
    """Loss against N at each compute, with parabolas and their minima; None where no budget has enough.

    None as well where the study's frontier has its own slices (plot_frontier.slices_figure).
    """
    found = isoflop_of(study)
    if found is None or frontier_points(study):
        return None
    data: list[dict[str, Any]] = []
    chips = []
    for i, one in enumerate(found.parabolas):
        name = f"{wording.exponent(one.C)} FLOPs"
        data += parabola_traces(one, f"isoflop:{i}", f"@budget{i}", name)
        chips.append(Chip(f"isoflop:{i}", name, f"@budget{i}"))
    sizes = np.concatenate([one.N for one in found.parabolas])
    losses = np.concatenate([one.L for one in found.parabolas])
    layout = {
        "xaxis": log_axis("parameters, N", sizes.tolist()),
        "yaxis": linear_axis(f"held-out loss ({LOSS_UNIT})", losses.min(), losses.max()),
    }
    last = found.parabolas[-1]
    where = "beyond the sizes tried, at" if last.at_edge else "at"
    title = (
        f"At {wording.exponent(last.C)} FLOPs the parabola's minimum is {where} "
        f"{wording.count(last.N_best)} parameters"
    )
    if found.size is not None:
        low, high = found.size.interval
        inside = wording.interval([low, high], "{:.2f}".format)
        power = f"power {found.size.exponent:.2f}" + (f" ({inside})" if inside else "")
        way = "grows" if low > 0 else "falls" if high < 0 else ""
        title = f"By isoFLOP curves N* {way} as C to the {power}"
        if not way:  # also where there is no interval
            title = f"IsoFLOP curves leave open whether N* grows with C: {power}"
    caption = (
        "Points: finished runs of about equal FLOPs. Lines: parabolas in log N. Crosses: their minima, with "
        "95 % confidence intervals of the fit. A parabola is symmetric and a loss is not: compare with the "
        "law's optimum. " + " ".join(found.warnings + bias_words(study, found))
    ).strip()
    alt = f"{title}. " + "; ".join(
        f"at {wording.exponent(one.C)} FLOPs the minimum is at N = {wording.count(one.N_best)}"
        for one in found.parabolas
    )
    return Figure("isoflop", title, caption, f"{alt}.", data, layout, chips)


def bias_words(study: Study, found: IsoFlop) -> list[str]:
    """The known bias of parabolas, if the study has a law to estimate it by."""
    if study.law is None or study.law.form != "chinchilla":
        return []
    bias = estimate_bias(found, study.law)
    return [] if bias is None else [bias.words]


def parabola_traces(one: Parabola, key: str, colour: str, name: str) -> list[dict[str, Any]]:
    """One budget: its runs, its parabola, and the minimum with its error."""
    fitted = one.N[one.used]
    x = np.log(np.geomspace(fitted.min() / 1.1, fitted.max() * 1.1, 50))
    line = np.polynomial.polynomial.polyval(x, one.coefficients)
    wide = min(Z95 * one.log_se, 20.0)
    ends = (one.N_best * math.exp(-wide), one.N_best * math.exp(wide))
    told = f"{name}<br>N* = {wording.with_interval(one.N_best, ends, wording.count)}"
    return [
        scatter(
            np.exp(x).tolist(), line.round(5).tolist(), "lines", meta=[key], hoverinfo="skip",
            line={"color": colour, "width": 2},
        ),
        scatter(
            one.N.tolist(), one.L.tolist(), "markers", meta=[key], marker={"color": colour, "size": 8},
            hovertemplate=f"{name}<br>N = %{{x:.3s}}, loss %{{y:.4f}}<extra></extra>",
        ),
        scatter(
            [one.N_best], [one.L_best], "markers", meta=[key],
            marker={"color": colour, "size": 11, "symbol": "x"},
            error_x={
                "type": "data", "symmetric": False, "array": [ends[1] - one.N_best],
                "arrayminus": [one.N_best - ends[0]], "color": colour, "thickness": 1.5,
            },
            hovertemplate=f"{told}<extra>minimum</extra>",
        ),
    ]  # fmt: skip


def contour_figure(study: Study) -> Figure | None:
    """Lines of equal loss over N and D, the runs, and the compute-optimal path; None without a law."""
    points = law_points(study)
    if not points:
        return None
    N, D = (
        np.geomspace(min(row[x] for row in points) / 2, max(row[x] for row in points) * 2, STEPS)
        for x in "ND"
    )
    z = study.law.loss(N[None, :], D[:, None])
    first, last = (6.0 * min(row["N"] * row["D"] for row in points), largest_compute(study))
    best = optimal(study.law, np.geomspace(first, last, 30))
    data: list[dict[str, Any]] = [
        {
            "type": "contour",
            "x": N.tolist(),
            "y": D.tolist(),
            "z": z.round(4).tolist(),
            "contours": {"coloring": "none", "showlabels": True},
            "line": {"color": "@muted", "width": 1.2},
            "ncontours": 14,
            "showscale": False,
            "hovertemplate": "N %{x:.3s}, D %{y:.3s}<br>the law %{z:.3f}<extra></extra>",
            "meta": ["contours"],
        },
        scatter(
            best.N.tolist(), best.D.tolist(), "lines", meta=["optimum"],
            line=line_of(study.law, "@accent", 2.4),
            customdata=[wording.exponent(c) for c in best.C],
            hovertemplate="optimum at %{customdata} FLOPs<extra></extra>",
        ),
    ]  # fmt: skip
    for row in points:
        mark = run_mark(study, row, row["N"])
        data.append(mark | {"y": [row["D"]], "error_y": {"visible": False}})
    layout = {
        "xaxis": log_axis("parameters, N", N.tolist()),
        "yaxis": log_axis("training tokens, D", D.tolist()),
    }
    low, high = float(z.min()), float(z.max())
    title = (
        f"Over these sizes and tokens {verdict.law_words(study.law)} goes from {high:.2f} down to {low:.2f} "
        "nats per token"
    )
    caption = (
        "Thin lines: equal loss by the law, every token new. Heavy line: the N and D of lowest loss at each "
        "compute. Points: the runs it was fitted on."
    )
    alt = f"{title}."
    if verdict.is_sound(study.law):
        first, last = (
            f"N = {wording.count(best.N[i])}, D = {wording.count(best.D[i])}" for i in (0, len(best.N) - 1)
        )
        alt += f" The compute-optimal path runs from {first} to {last}."
    chips = [Chip("optimum", "optimum", "@accent"), *run_chips(study, points)]
    return Figure("contours", title, caption, alt, data, layout, chips, 460)
