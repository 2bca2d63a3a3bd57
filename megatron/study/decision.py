"""Sequential comparison of two cells: a decision after any number of seeds, or the next seed to train.

The interval of the difference holds at every look (megatron/laws/anytime.py), so that it may be
printed after each run and the comparison may stop at the first decision.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron.laws.anytime import anytime_half_width
from megatron.study.differences import LEVEL, NoiseFloor, Side, explain_missing_interval

EQUAL = "equal"
MAX_LOG = 100.0  # half-width in log L from which an interval counts as unbounded


@dataclass(frozen=True)
class Decision:
    """State of a comparison A minus B after the seeds so far.

    relative, interval  L_a / L_b - 1, and its interval at all looks; up to infinity with too few seeds
    share               difference, relative to the loss, below which the two count as equal
    verdict             A is "better" or "worse" than B, "equal", or "undecided"
    next_run, next_seed  cell and seed to train next if undecided
    """

    a: str
    b: str
    n_a: int
    n_b: int
    relative: float
    interval: tuple[float, float]
    share: float
    paired: bool
    verdict: str
    next_run: str | None
    next_seed: int | None


def decide(
    a: Side, b: Side, floors: Mapping[str, NoiseFloor], share: float, paired: bool = False
) -> Decision:
    """Compare two cells so far, with the noise floor of their objective.

    share   stop as "equal" where the whole interval is within this share of the loss
    paired  use the differences of runs of equal seed, which share data order and initial
            weights, and their own scatter

    Raises ValueError for two objectives, cells that share a run, without a noise floor, or without pairs.
    """
    if a.objective != b.objective or set(a.runs["run"]) & set(b.runs["run"]):
        raise ValueError("--until: expected two different cells of one objective. Name others.")
    # which of both is used must not depend on the losses: the caller decides before looking
    if paired:
        mean, sigma, dof, n = _pair(a, b)
    else:
        if reason := explain_missing_interval(a, b, floors):
            raise ValueError(f"--until: {reason}")
        floor = floors[a.objective]
        mean, sigma, dof = a.log_loss - b.log_loss, floor.sigma, floor.dof
        # the variance of the difference of means is sigma^2 (1 / n_a + 1 / n_b)
        n = 1 / (1 / a.n_seeds + 1 / b.n_seeds)
    half = anytime_half_width(sigma, dof, n, LEVEL)
    ends = (math.expm1(mean - half), math.expm1(mean + half) if half < MAX_LOG else math.inf)
    verdict = "undecided"
    if ends[0] > 0 or ends[1] < 0:
        verdict = "better" if ends[1] < 0 else "worse"
    # the whole interval, not the estimate: few seeds must not end a comparison as equal
    elif -share < ends[0] and ends[1] < share:
        verdict = EQUAL
    name, seed = _choose_next(a, b) if verdict == "undecided" else (None, None)
    return Decision(
        a.name, b.name, a.n_seeds, b.n_seeds, math.expm1(mean), ends, share, paired, verdict, name, seed
    )


def _pair(a: Side, b: Side) -> tuple[float, float, float, float]:
    """Return mean and standard deviation of log L_a - log L_b over pairs, degrees of freedom and pairs."""
    losses = [side.runs.set_index("seed")["loss"].astype(float) for side in (a, b)]
    # seeds of one cell alone wait for their partner
    common = sorted(set(losses[0].index) & set(losses[1].index))
    if not common:
        raise ValueError(f"--paired: {a.name} and {b.name} share no seed, expected one or more.")
    steps = np.log(losses[0][common].to_numpy()) - np.log(losses[1][common].to_numpy())
    # one pair has no scatter: its interval is unbounded by 0 degrees of freedom
    sigma = float(steps.std(ddof=1)) if len(steps) > 1 else 0.0
    return float(steps.mean()), sigma, len(steps) - 1.0, float(len(steps))


def _choose_next(a: Side, b: Side) -> tuple[str, int]:
    """Return cell and seed to train next: a seed that the other cell has, else a new one."""
    seeds = {side.name: {int(seed) for seed in side.runs["seed"].dropna()} for side in (a, b)}
    fewer, more = sorted((a, b), key=lambda side: side.n_seeds)
    # a seed of both cells is a pair, also for a comparison that does not use pairs
    missing = sorted(seeds[more.name] - seeds[fewer.name])
    return fewer.name, missing[0] if missing else max(seeds[fewer.name] | seeds[more.name], default=-1) + 1
