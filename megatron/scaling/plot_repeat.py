"""Figures of repeated text and of what follows from the loss: epochs, the crossover, downstream scores."""

from typing import Any

import numpy as np

from megatron.scaling import headlines, verdict, wording
from megatron.scaling.crossover import crossover
from megatron.scaling.downstream import fit_downstream, known_chance
from megatron.scaling.forms import FORM
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
    scatter,
    score,
    size_colour,
)
from megatron.scaling.study import AUTOREGRESSIVE, MASKED_DIFFUSION, Study
from megatron.scaling.table import Row

N_UNIQUE = 5  # amounts of unique text between and around the study's own
N_REPLICATES = 20


def epochs_figure(study: Study) -> Figure | None:
    """Loss against epochs at fixed N and unique text, each objective; None where nothing is repeated."""
    series: dict[tuple, list[Row]] = {}
    for row in study.done():
        if row["epochs"] and row["unique_tokens"]:
            series.setdefault((row["objective"], row["n_params"], row["unique_tokens"]), []).append(row)
    series = {
        key: sorted(rows, key=lambda row: row["epochs"])
        for key, rows in series.items()
        if len({row["epochs"] for row in rows}) > 1
    }
    shown = [row for rows in series.values() for row in rows]
    if not shown or max(row["epochs"] for row in shown) <= 1:
        return None
    data: list[dict[str, Any]] = []
    for (objective, _, unique), rows in sorted(series.items()):
        colour = size_colour(study, rows[0])
        data.append(
            scatter(
                [row["epochs"] for row in rows],
                [row["loss"] for row in rows],
                "lines+markers",
                meta=groups(rows[0]),
                line={"color": colour, "width": 2, "dash": DASH.get(objective, "dot")},
                marker={"color": colour, "size": 9, "symbol": SYMBOL.get(objective, "square")},
                error_y={
                    "array": [2 * (row["loss_se"] or 0) for row in rows],
                    "color": colour,
                    "thickness": 1,
                },
                customdata=[
                    f"{score(study, row)}<br>{wording.digits(row['epochs'], 2)} epochs of "
                    f"{wording.count(unique)} tokens"
                    for row in rows
                ],
                hovertemplate="%{customdata}<extra></extra>",
            )
        )
    epochs, losses = [row["epochs"] for row in shown], [row["loss"] for row in shown]
    layout = {
        "xaxis": log_axis("epochs over the same unique tokens", epochs),
        "yaxis": linear_axis(f"held-out loss ({LOSS_UNIT})", min(losses), max(losses)),
    }
    words = [_turn(study, objective, series) for objective in study.objectives()]
    title = "; ".join(filter(None, words)) or f"Up to {wording.digits(max(epochs), 2)} epochs"
    title = title[:1].upper() + title[1:]
    caption = (
        "One line for each size and amount of unique text, autoregressive solid and masked diffusion dashed. "
        "A line that turns up has been trained on its text too often. Bars: two standard errors."
    )
    return Figure("epochs", title, caption, f"{title}.", data, layout, run_chips(study, shown))


def _turn(study: Study, objective: str, series: dict[tuple, list[Row]]) -> str:
    """At how many epochs the lines of one objective are lowest, in words."""
    claim = headlines.turn_claim(study, [rows for key, rows in series.items() if key[0] == objective])
    return f"{wording.OBJECTIVES.get(objective, objective)}: {claim}" if claim else ""


def crossover_figure(study: Study) -> Figure | None:
    """C_crit over unique tokens; None without laws of both objectives in forms that count repetition."""
    first, second = (study.laws.get(objective) for objective in (AUTOREGRESSIVE, MASKED_DIFFUSION))
    if first is None or second is None or not all(FORM[law.form].wants_unique for law in (first, second)):
        return None
    known = [row["unique_tokens"] for row in study.done() if row["unique_tokens"]]
    if not known:
        return None
    unique = np.geomspace(min(known) / 2, max(known) * 10, N_UNIQUE)
    found = crossover(first, second, unique, n_replicates=N_REPLICATES)
    at = np.isfinite(found.C)
    if not at.any():
        return None
    data: list[dict[str, Any]] = []
    shown = found.C[at].tolist()
    if found.ends is not None and np.isfinite([end[at] for end in found.ends]).all():
        low, high = (end[at] for end in found.ends)
        data.append(
            scatter(
                [*unique[at], *unique[at][::-1]], [*low, *high[::-1]], "lines", fill="toself",
                fillcolor="@accent/0.18", line={"width": 0, "color": "@accent"}, hoverinfo="skip",
                meta=["crossover"],
            )
        )  # fmt: skip
        shown += [*low, *high]
    data.append(
        scatter(
            unique[at].tolist(), found.C[at].tolist(), "lines+markers", meta=["crossover"],
            line={"color": "@accent", "width": 2.4}, marker={"color": "@accent", "size": 8},
            hovertemplate="%{x:.3s} unique tokens: from %{y:.2s} FLOPs on<extra>crossover</extra>",
        )
    )  # fmt: skip
    layout = {
        "xaxis": log_axis("unique tokens, U", unique[at].tolist()),
        "yaxis": log_axis("compute where the laws meet (FLOPs)", shown, flops_tick),
    }
    title = f"By the laws masked diffusion has the lower loss above {found.words}"
    doubt = next((verdict.law_words(law) for law in (first, second) if not verdict.is_sound(law)), None)
    if doubt is not None:
        title = f"Where the laws meet does not follow from {doubt} ({first.n_runs} and {second.n_runs} runs)"
    elif found.power is None:
        title = (
            f"The laws meet at {wording.exponent(float(found.C[at][0]))} FLOPs with "
            f"{wording.count(unique[at][0])} unique tokens"
        )
    caption = (
        "At each amount of unique text: the compute at which the best masked-diffusion bound is as low as "
        "the best autoregressive loss, each at its own best size, by their laws. Band: 95 % confidence, of "
        "pairs of refits. The diffusion figure is an upper bound, so the true crossing comes no later."
    )
    alt = f"{title} " + "; ".join(
        f"{wording.count(u)} tokens: {wording.exponent(c)} FLOPs"
        for u, c in zip(unique[at], found.C[at], strict=True)
    )
    return Figure(
        "crossover", title, caption, f"{alt}.", data, layout, [Chip("crossover", "crossover", "@accent")]
    )


def downstream_figure(study: Study) -> Figure | None:
    """Each score of scores.csv against the run's loss, with the fitted curve; None without such scores."""
    by_run = {row["run"]: row for row in study.done()}
    tasks: dict[tuple[str, str], list[tuple[Row, float]]] = {}
    for told in study.scores:
        if told["run"] in by_run:
            key = (told["task"], told["kind"])
            tasks.setdefault(key, []).append((by_run[told["run"]], told["score"]))
    tasks = {key: pairs for key, pairs in tasks.items() if len(pairs) > 1}
    if not tasks:
        return None
    data: list[dict[str, Any]] = []
    chips, words = [], []
    for i, ((task, kind), pairs) in enumerate(sorted(tasks.items())):
        L, y = (np.array(v, dtype=float) for v in zip(*((r["loss"], s) for r, s in pairs), strict=True))
        dash = ("solid", "dash", "dot")[i % 3]
        data.append(
            scatter(
                L.tolist(), y.tolist(), "markers", meta=[f"task:{task}"],
                marker={"color": "@accent", "size": 8},
                customdata=[f"{describe(study, row)}<br>{task} {value:.3f}" for row, value in pairs],
                hovertemplate="%{customdata}, loss %{x:.3f}<extra></extra>",
            )
        )  # fmt: skip
        try:
            chance = known_chance(task) if kind == "accuracy" else None
            curve = fit_downstream(L, y, kind, n_bootstrap=0, chance=chance)
        except ValueError:  # too few runs, or scores that are no shares
            why = "too few for a curve" if y.max() <= 1 else "no shares, no curve"
            words.append(f"{headlines.follow_claim(task, L, y, kind == 'accuracy')}, {why}")
        else:
            x = np.linspace(L.min(), L.max(), 60)
            data.append(
                scatter(
                    x.tolist(), curve.score(x).tolist(), "lines", meta=[f"task:{task}"], hoverinfo="skip",
                    line={"color": "@ink", "width": 1.8, "dash": dash},
                )
            )  # fmt: skip
            off = 100 * np.abs(curve.score(L) - y).max()
            words.append(
                f"{headlines.follow_claim(task, L, y, kind == 'accuracy')}, off its curve by {off:.1f} "
                "points at most"
            )
        chips.append(Chip(f"task:{task}", task, "@ink", dash))
    x, y = ([v for trace in data for v in trace[axis]] for axis in "xy")
    layout = {
        "xaxis": linear_axis(f"held-out loss ({LOSS_UNIT})", min(x), max(x)),
        "yaxis": linear_axis("score (share; loss in nats maps to it)", min(y), max(y)),
    }
    title = "; ".join(words)
    caption = "Points: finished runs. Lines: error = ε − k exp(−γ L), or for accuracies a sigmoid in L."
    return Figure("downstream", title, caption, f"{title}.", data, layout, chips)
