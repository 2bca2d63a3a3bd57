"""The figure of mixtures: the weights of the domains while a run trains, as plotly's JSON."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron.scaling import wording
from megatron.scaling.plot import Chip, Figure, linear_axis, scatter
from megatron.scaling.study import Study
from megatron.scaling.table import sound_metrics

MOST_DOMAINS = 8  # the ones whose weights move furthest: more lines cannot be told apart
MAX_POINTS = 250
DASHES = ("solid", "dash", "dot", "dashdot")

WeightsOverTime = Mapping[str, tuple[np.ndarray, np.ndarray]]  # of a domain: tokens, weights


def weights_over_time(study: Study) -> dict[str, WeightsOverTime]:
    """Of every run of a mixture, what its training records say; of a step that was done twice the later."""
    found: dict[str, WeightsOverTime] = {}
    for row in study.rows:
        points: dict[float, dict[str, float]] = {}
        for record in sound_metrics(study.folder / row["path"]) if row["path"] else ():
            told, tokens = record.get("weights"), record.get("tokens")
            if record["kind"] == "train" and isinstance(told, dict) and isinstance(tokens, int | float):
                points[float(tokens)] = told
        if points:
            at = np.array(sorted(points))
            names = list(points[at[-1]])
            found[row["run"]] = {
                name: (at, np.array([float(points[tokens].get(name, 0.0)) for tokens in at.tolist()]))
                for name in names
            }
    return found


def domains_shown(runs: Mapping[str, WeightsOverTime]) -> list[str]:
    """At most MOST_DOMAINS, those that move furthest in any run, then the heaviest; in order of names."""
    moved: dict[str, tuple[float, float]] = {}
    for weights in runs.values():
        for name, (_, share) in weights.items():
            here = float(np.ptp(share)), float(share.max())
            moved[name] = max(moved.get(name, here), here)
    heavy = sorted(moved, key=lambda name: moved[name], reverse=True)
    return sorted(name for name in heavy[:MOST_DOMAINS] if moved[name][1] > 0)


def mixture_figure(study: Study) -> Figure | None:
    """Weights against tokens: a colour a domain, a dash a run; None where no run has a mixture."""
    runs = weights_over_time(study)
    shown = domains_shown(runs)
    if not shown:
        return None
    data: list[dict[str, Any]] = []
    for number, (run, weights) in enumerate(runs.items()):
        dash = DASHES[number % len(DASHES)]
        for place, name in enumerate(shown):
            if name not in weights:
                continue
            tokens, share = weights[name]
            keep = np.unique(
                np.linspace(0, len(tokens) - 1, min(len(tokens), MAX_POINTS)).round().astype(int)
            )
            data.append(
                scatter(
                    tokens[keep].tolist(),
                    share[keep].round(5).tolist(),
                    "lines",
                    line={"color": f"@domain{place}", "width": 2, "dash": dash, "shape": "hv"},
                    meta=[f"domain:{name}", f"run:{run}"],
                    hovertemplate=f"<b>{name}</b>, {run}<br>%{{y:.1%}} at %{{x:.3s}} tokens<extra></extra>",
                )
            )
    highest = max(max(trace["y"]) for trace in data)
    layout = {
        "xaxis": linear_axis("training tokens", 0, max(trace["x"][-1] for trace in data)),
        "yaxis": linear_axis("share of the tokens", 0, highest) | {"tickformat": ".0%"},
    }
    chips = [Chip(f"domain:{name}", name, f"@domain{place}") for place, name in enumerate(shown)]
    if len(runs) > 1:
        chips += [
            Chip(f"run:{run}", run, "@muted", "dash" if DASHES[n % len(DASHES)] != "solid" else "solid")
            for n, run in enumerate(runs)
        ]
    title = mixture_words(runs)
    left_out = len({name for weights in runs.values() for name in weights}) - len(shown)
    caption = (
        "The weights that the batches were made with: a colour for each domain, a dash for each run. A fixed "
        "mixture is a level line. "
        + (f"{wording.plural(left_out, 'domain')} that moved less are not shown." if left_out else "")
    )
    return Figure("mixture", title, caption.strip(), f"{title}.", data, layout, chips)


def mixture_words(runs: Mapping[str, WeightsOverTime]) -> str:
    """Which weight moved furthest, in which run."""
    moves = [
        (abs(share[-1] - share[0]), float(np.ptp(share)), run, name, share)
        for run, weights in runs.items()
        for name, (_, share) in weights.items()
    ]
    size, _, run, name, share = max(moves, key=lambda move: move[:2])
    if size >= 0.005:
        way = "rises" if share[-1] > share[0] else "falls"
        return f"In {run} the weight of {name} {way} from {share[0]:.0%} to {share[-1]:.0%}"
    _, moved, run, name, share = max(moves, key=lambda move: move[1])
    if moved < 0.005:
        return f"The weights of {wording.plural(len(runs), 'mixture')} stay as they began"
    return f"In {run} the weight of {name} moves between {share.min():.1%} and {share.max():.1%}"
