"""Figure of mixtures: the weights of the domains during training."""

from collections.abc import Mapping

import numpy as np

from megatron.report.figures.plot import (
    Chip,
    Figure,
    Trace,
    linear_axis,
    make_chart,
    scatter_trace,
)
from megatron.report.palette import MUTED
from megatron.report.study_data import Study
from megatron.study.format import format_plural
from megatron.study.table import read_valid_metrics

MAX_DOMAINS = 8  # those whose weights change most; more lines cannot be distinguished
MAX_POINTS = 250
DASHES = ("solid", "dash", "dot", "dashdot")

WeightsOverTime = Mapping[str, tuple[np.ndarray, np.ndarray]]  # domain -> (tokens, weights)


def read_weights(study: Study) -> dict[str, WeightsOverTime]:
    """Return the weights of every mixture run from its metrics; of repeated steps the later record."""
    weights_by_run: dict[str, WeightsOverTime] = {}
    for row in study.rows:
        points: dict[float, dict[str, float]] = {}
        for record in read_valid_metrics(study.folder / row.path) if row.path else ():
            weights, tokens = record.get("weights"), record.get("tokens")
            if record["kind"] == "train" and isinstance(weights, dict) and isinstance(tokens, int | float):
                # keyed by tokens: of a step that was trained twice the later record remains
                points[float(tokens)] = weights
        if points:
            at = np.array(sorted(points))
            names = list(points[at[-1]])
            weights_by_run[row.run] = {
                name: (at, np.array([float(points[tokens].get(name, 0.0)) for tokens in at.tolist()]))
                for name in names
            }
    return weights_by_run


def select_domains(runs: Mapping[str, WeightsOverTime]) -> list[str]:
    """Return at most MAX_DOMAINS names, sorted: largest change in any run first, then largest weight."""
    moved: dict[str, tuple[float, float]] = {}
    for weights in runs.values():
        for name, (_, share) in weights.items():
            # ordered by the largest change in any run, then by the largest weight
            movement = float(np.ptp(share)), float(share.max())
            moved[name] = max(moved.get(name, movement), movement)
    heavy = sorted(moved, key=lambda name: moved[name], reverse=True)
    return sorted(name for name in heavy[:MAX_DOMAINS] if moved[name][1] > 0)


def mixture_figure(study: Study) -> Figure | None:
    """Return weights over tokens, one colour per domain, one dash per run; None without a mixture."""
    runs = read_weights(study)
    shown = select_domains(runs)
    if not shown:
        return None
    data: list[Trace] = []
    for number, (run, weights) in enumerate(runs.items()):
        dash = DASHES[number % len(DASHES)]
        for place, name in enumerate(shown):
            if name not in weights:
                continue
            tokens, share = weights[name]
            # MAX_POINTS indices from the first to the last, evenly spaced; unique removes those that round to
            # the same index
            keep = np.unique(
                np.linspace(0, len(tokens) - 1, min(len(tokens), MAX_POINTS)).round().astype(int)
            )
            data.append(
                scatter_trace(
                    tokens[keep].tolist(),
                    share[keep].round(5).tolist(),
                    "lines",
                    # "hv": weights are constant between two records
                    line={"color": f"var(--domain{place})", "width": 2, "dash": dash, "shape": "hv"},
                    meta=[f"domain:{name}", f"run:{run}"],
                    hovertemplate=f"<b>{name}</b>, {run}<br>%{{y:.1%}} at %{{x:.3s}} tokens<extra></extra>",
                )
            )
    highest = max(max(trace["y"]) for trace in data)
    layout = {
        "xaxis": linear_axis("training tokens", 0, max(trace["x"][-1] for trace in data)),
        "yaxis": linear_axis("share of the tokens", 0, highest) | {"tickformat": ".0%"},
    }
    chips = [Chip(f"domain:{name}", name, f"var(--domain{place})") for place, name in enumerate(shown)]
    if len(runs) > 1:
        chips += [
            Chip(f"run:{run}", run, MUTED, "dash" if DASHES[n % len(DASHES)] != "solid" else "solid")
            for n, run in enumerate(runs)
        ]
    title = describe_mixture(runs)
    left_out = len({name for weights in runs.values() for name in weights}) - len(shown)
    caption = (
        "Weights used for the batches: one colour per domain, one dash per run. A fixed mixture is a "
        "horizontal line. "
        + (f"{format_plural(left_out, 'domain')} with smaller changes are not shown." if left_out else "")
    )
    return Figure("mixture", title, caption.strip(), f"{title}.", make_chart(data, layout), chips)


def describe_mixture(runs: Mapping[str, WeightsOverTime]) -> str:
    """Return a sentence on the largest change of a weight, and its run."""
    moves = [
        (abs(share[-1] - share[0]), float(np.ptp(share)), run, name, share)
        for run, weights in runs.items()
        for name, (_, share) in weights.items()
    ]
    # the net change first: a weight that oscillates and returns has moved, but neither rises nor falls
    size, _, run, name, share = max(moves, key=lambda move: move[:2])
    # 0.5 points is the rounding of the percentages in the sentence
    if size >= 0.005:
        way = "rises" if share[-1] > share[0] else "falls"
        return f"In {run} the weight of {name} {way} from {share[0]:.0%} to {share[-1]:.0%}"
    _, moved, run, name, share = max(moves, key=lambda move: move[1])
    if moved < 0.005:
        return f"The weights of {format_plural(len(runs), 'mixture')} are constant"
    return f"In {run} the weight of {name} moves between {share.min():.1%} and {share.max():.1%}"
