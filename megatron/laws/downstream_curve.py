"""Curves from loss to a downstream score of a task, and the chain N, D -> loss -> score.

error               eps - k exp(-gamma L)                Gadre et al., arXiv 2403.08540, eq. 5
accuracy            floor + (top - floor) / (1 + exp(s (L - L0)))  a sigmoid, 0 <= floor <= top;
                    the floor is chance where that is known, the top 1 or a given ceiling: small
                    models do not determine it
choice_probability  the same sigmoid: a share too
bits_per_byte       intercept + slope L: bits per byte of the right answer, itself a loss, and one loss of a
                    model is nearly a line in another (Brandfonbrener et al., arXiv 2411.12925)

At a fixed gamma, or (s, L0), the first three are linear in the other constants, so
least squares are minimised over a grid of these and then by a local search.
A measured score scatters around its curve by the residuals of the fit, and an
accuracy at least by the binomial error of the number of questions of the task.

L may be any loss. With the bits per byte of a task's right answers as the L of its
accuracy, and a law fitted to them over N and D, the chain is that of Llama 3 (arXiv
2407.21783) and of Bhagia et al. (arXiv 2412.04403).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron.laws.columns import takes_data_frame
from megatron.laws.fitting.noise import GROUPED, estimate_noise, find_groups
from megatron.laws.law import Law, expanded_level

SIGMOID = ("floor", "top", "s", "L0")
CONSTANTS = {
    "error": ("eps", "k", "gamma"), "accuracy": SIGMOID, "choice_probability": SIGMOID,
    "bits_per_byte": ("intercept", "slope"),
}  # fmt: skip
ANSWER_KINDS = ("bits_per_byte", "choice_probability")  # scores of the right answer, which end a task's name
CHANCE = {  # accuracy of random guessing, by the number of choices; 0: the answer is generated
    "arc_challenge": 0.25, "arc_easy": 0.25, "boolq": 0.5, "commonsense_qa": 0.2, "copa": 0.5,
    "hellaswag": 0.25, "lambada": 0.0, "lambada_openai": 0.0, "lambada_standard": 0.0, "mmlu": 0.25,
    "openbookqa": 0.25, "piqa": 0.5, "race": 0.25, "sciq": 0.25, "winogrande": 0.5,
}  # fmt: skip
N_DRAWS = 20  # draws of noise per pair of replicates


@dataclass(frozen=True)
class DownstreamCurve:
    """A fitted curve from loss to a score. `replicates` are the constants of each bootstrap replicate.

    spread       unbiased standard deviation of measured scores around the curve
    dof          degrees of freedom of `spread`
    chance       fixed floor; None: the floor is fitted
    n_questions  number of questions of the task, for the binomial error; None: unknown
    n_groups     groups of rows that share noise, which the
                 bootstrap draws; None: rows are independent
    """

    kind: str
    params: dict[str, float]
    n_runs: int
    replicates: dict[str, np.ndarray] = field(default_factory=dict)
    spread: float = 0.0
    dof: int = 1
    chance: float | None = None
    n_questions: int | None = None
    n_groups: int | None = None
    warnings: list[str] = field(default_factory=list)

    def score(self, L: ArrayLike) -> np.ndarray:
        """Return the score at a loss of L nats per token; broadcasts."""
        return evaluate_score(self.kind, self.params, L)

    def score_sd(self, value: ArrayLike) -> np.ndarray:
        """Return the standard deviation of a measured score whose expectation is `value`; broadcasts."""
        share = np.clip(np.asarray(value, dtype=float), 0.0, 1.0)
        # the larger of the two: the spread of the fit
        # contains the binomial error of its own scores
        binomial = share * (1 - share) / self.n_questions if self.n_questions else np.zeros_like(share)
        return np.sqrt(np.maximum(self.spread**2, binomial))


def chance_of_task(task: str, kind: str = "accuracy") -> float | None:
    """Return the chance level of a task by its name before any "-" (hellaswag-first200).

    Returns None if it is unknown, or if a curve of `kind` has no floor.
    """
    return CHANCE.get(task.partition("-")[0]) if CONSTANTS.get(kind) is SIGMOID else None


def kind_of_score(name: str) -> str:
    """Return the kind of a score by its name: one of ANSWER_KINDS at its end, else accuracy."""
    end = name.rpartition("-")[2]
    return end if end in ANSWER_KINDS else "accuracy"


def evaluate_score(kind: str, params: Mapping[str, Any], L: ArrayLike) -> np.ndarray:
    """Evaluate the formula of `kind`; broadcasts."""
    L = np.asarray(L, dtype=float)
    if kind == "error":
        return params["eps"] - params["k"] * np.exp(-params["gamma"] * L)
    if kind == "bits_per_byte":
        return params["intercept"] + params["slope"] * L
    return params["floor"] + (params["top"] - params["floor"]) / (
        1 + np.exp(params["s"] * (L - params["L0"]))
    )


@takes_data_frame
def fit_downstream(
    L: ArrayLike,
    scores: ArrayLike,
    kind: str = "error",
    n_bootstrap: int = 200,
    seed: int = 0,
    chance: float | None = None,
    n_questions: int | None = None,
    ceiling: float = 1.0,
    groups: ArrayLike | None = None,
    N: ArrayLike | None = None,
) -> DownstreamCurve:
    """Fit `scores` [n] of one task on losses L [n] by least squares; kind: of CONSTANTS.

    An accuracy or choice probability is a share, 0 to 1: `chance` fixes its floor, and
    `ceiling` is its top, the share at a loss of -Inf. `n_questions` gives each score the
    binomial error of answers that are right or wrong. `groups` [n] are labels of rows
    that share a model, as in fit_law. Without them, rows that share N [n] parameters are
    grouped, with a warning, if their residuals correlate.

    Raises ValueError for an unknown kind, values that are not finite or no shares,
    bits per byte below 0, a chance outside 0 to 1 or a ceiling outside chance to 1,
    either for a kind that is no share, questions for a score that does not count
    right answers, or too few different losses.
    """
    L, scores = _validate_scores(L, scores, kind, chance, ceiling, n_questions)
    names = CONSTANTS[kind]
    n_free = len(names) - (names is SIGMOID) - (chance is not None)
    if len(np.unique(L)) <= n_free:
        raise ValueError(
            f"downstream: got {len(np.unique(L))} different losses for {n_free} constants, expected more"
        )
    best = _fit_constants(L, scores, kind, chance, ceiling)
    params = dict(zip(names, map(float, best), strict=True))
    residual = scores - evaluate_score(kind, params, L)
    dof = len(L) - n_free
    spread = float(np.sqrt((residual**2).sum() / dof))
    fixed = {"top"} | ({"floor"} if chance is not None else set())
    slopes = _differentiate_score(kind, params, L)[:, [name not in fixed for name in names]]
    labels, is_grouped = find_groups(residual, slopes, groups, None if N is None else np.asarray(N))
    noise = estimate_noise(residual, slopes, labels)
    rng = np.random.default_rng(seed)
    if noise.n_groups:  # few groups: noise is drawn, not groups
        dof, spread = int(noise.dof), noise.sigma
        root = noise.sigma * np.linalg.cholesky(noise.correlate(labels))
        normals = rng.standard_normal((n_bootstrap, len(L)))
        resamples = [(L, scores - residual + root @ z) for z in normals]
    else:
        indices = rng.integers(0, len(L), (n_bootstrap, len(L)))
        resamples = [(L[rows], scores[rows]) for rows in indices if len(np.unique(L[rows])) > n_free]
    fits = [_fit_constants(*resample, kind, chance, ceiling) for resample in resamples]
    replicates = dict(zip(names, np.array(fits).T, strict=True)) if fits else {}
    return DownstreamCurve(
        kind, params, len(L), replicates, spread, dof, chance, n_questions, noise.n_groups,
        [GROUPED] if is_grouped else [],
    )  # fmt: skip


def _differentiate_score(kind: str, params: Mapping[str, float], L: np.ndarray) -> np.ndarray:
    """Return the slopes [n, p] of the score by its constants, by forward differences."""
    steps = {name: 1e-6 * max(abs(value), 1e-3) for name, value in params.items()}
    value = evaluate_score(kind, params, L)
    moved = [evaluate_score(kind, {**params, name: params[name] + h}, L) for name, h in steps.items()]
    return np.column_stack([(v - value) / h for v, h in zip(moved, steps.values(), strict=True)])


def _validate_scores(
    L: ArrayLike,
    scores: ArrayLike,
    kind: str,
    chance: float | None,
    ceiling: float,
    n_questions: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return losses and scores [n] as numbers. Raises ValueError as fit_downstream."""
    L, scores = (np.asarray(v, dtype=float).ravel() for v in (L, scores))
    is_share, floor = CONSTANTS.get(kind) is SIGMOID, chance or 0.0
    outside = [float(score) for score in scores if not 0 <= score <= 1] if is_share else []
    is_bits, counts_answers = kind == "bits_per_byte", kind in ("error", "accuracy")
    n_equal = len(L) == len(scores) and np.isfinite(L).all() and np.isfinite(scores).all()
    for is_valid, name, got, expected in (
        (kind in CONSTANTS, "kind", f"'{kind}'", f"one of {', '.join(CONSTANTS)}"),
        (n_equal, "downstream", f"{len(L)} losses and {len(scores)} scores", "equally many finite numbers"),
        (not outside, kind, outside[:1], "shares from 0 to 1"),
        (not is_bits or (scores >= 0).all(), kind, scores.min(initial=0.0), "0 or more bits"),
        (chance is None or (is_share and 0 <= floor < 1), "chance", chance, "0 to 1 for an accuracy"),
        (floor < ceiling <= 1, "ceiling", ceiling, "chance to 1 for an accuracy"),
        (is_share or ceiling == 1, "ceiling", f"{ceiling} for kind {kind}", "it for an accuracy only"),
        (n_questions is None or counts_answers, "n_questions", kind, "an accuracy or an error"),
        (n_questions is None or n_questions >= 1, "n_questions", n_questions, "1 or more"),
    ):
        if not is_valid:
            raise ValueError(f"{name}: got {got}, expected {expected}")
    return L, scores


def _fit_constants(
    L: np.ndarray, y: np.ndarray, kind: str, chance: float | None, ceiling: float
) -> np.ndarray:
    """Return the least-squares constants in the order of CONSTANTS.

    A line is solved directly, the other curves by variable projection: `bent` are the
    nonlinear constants, (gamma,) or (s, L0), and `linear` solves for the others at
    each. The exponential has its origin at the lowest loss, so that it is of order 1.
    """
    if kind == "bits_per_byte":
        return np.polyfit(L, y, 1)[::-1]
    from scipy.optimize import least_squares  # slow import

    grid: list[tuple[float, ...]] = [(gamma,) for gamma in np.geomspace(0.02, 10, 60)]
    if CONSTANTS[kind] is SIGMOID:
        middles = np.linspace(L.min(), L.max(), 15)
        # steepness s relative to the range of losses
        grid = [(s, middle) for s in np.geomspace(0.2, 30, 15) / max(np.ptp(L), 1e-9) for middle in middles]

    def shape(bent: np.ndarray) -> np.ndarray:
        if kind == "error":
            return -np.exp(-bent[0] * (L - L.min()))
        # exp(709) is the largest in float64
        return 1 / (1 + np.exp(np.clip(bent[0] * (L - bent[1]), -500, 500)))

    def linear(bent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        form = shape(bent)
        if CONSTANTS[kind] is SIGMOID:
            floor = _fit_floor(form, y, ceiling) if chance is None else chance
            gain = ceiling - floor
            return np.array([floor, gain]), floor + gain * form - y
        basis = np.column_stack([np.ones_like(L), form])
        coefficients, *_ = np.linalg.lstsq(basis, y, rcond=None)
        return coefficients, basis @ coefficients - y

    # the residuals of the projected problem depend on
    # `bent` only: best grid point, then a local search
    start = min(grid, key=lambda bent: float((linear(np.array(bent))[1] ** 2).sum()))
    low = [1e-4] if kind == "error" else [1e-6, -np.inf]  # for gamma, or for s and L0
    precise = dict.fromkeys(("xtol", "ftol", "gtol"), 1e-15)
    bent = least_squares(lambda x: linear(x)[1], np.array(start), bounds=(low, np.inf), **precise).x
    (level, size), _ = linear(bent)
    if kind == "error":
        # shape has its origin at the lowest loss: k
        # exp(-gamma L) = size exp(-gamma (L - L_min))
        return np.array([level, size * np.exp(bent[0] * L.min()), bent[0]])
    return np.array([level, level + size, *bent])


def _fit_floor(form: np.ndarray, y: np.ndarray, ceiling: float) -> float:
    """Fit floor + (ceiling - floor) * form [n] to y by least squares with 0 <= floor <= ceiling."""
    # ceiling - score is gain (1 - form)
    below = 1 - form
    gain = float(below @ (ceiling - y)) / max(float(below @ below), np.finfo(float).tiny)
    return ceiling - min(max(gain, 0.0), ceiling)


def predict_score(
    law: Law,
    downstream: DownstreamCurve,
    N: ArrayLike,
    D: ArrayLike,
    U: ArrayLike = np.inf,
    level: float = 0.95,
    kind: str = "predictive",
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Predict (score, low, high) through the loss; the ends are NaN without replicates.

    kind  "predictive": interval for the measured score of one new run, from the replicates
          of both fits and the scatter of a run's loss and of a score.
          "confidence": interval for the value of the two curves, from the replicates alone.
    Intervals of a share are clipped to 0 and 1. Raises ValueError for another kind.
    """
    if kind not in ("predictive", "confidence"):
        raise ValueError(f"kind: got '{kind}', expected predictive or confidence")
    value = downstream.score(law.loss(N, D, U))
    if not law.replicates or not downstream.replicates:
        return value, np.full_like(value, np.nan), np.full_like(value, np.nan)
    n = min(len(next(iter(law.replicates.values()))), len(next(iter(downstream.replicates.values()))))
    N, D, U = np.broadcast_arrays(*(np.asarray(v, dtype=float) for v in (N, D, U)))
    extra = tuple(range(1, N.ndim + 1))
    # [n, ...]; the two bootstraps are independent, so
    # any pairing of their replicates is a joint draw
    losses = law.losses(N, D, U)[:n]
    params = {name: values[:n] for name, values in downstream.replicates.items()}
    if kind == "predictive":
        rng = np.random.default_rng(0)
        # N_DRAWS draws of noise for each pair of replicates;
        # a fixed seed makes predictions reproducible
        losses = np.repeat(losses, N_DRAWS, axis=0)
        params = {name: np.repeat(values, N_DRAWS) for name, values in params.items()}
        # [...]: the noise may change with compute
        spread, dof = law.noise_at(N, D)
        losses = losses * np.exp(spread * _draw_t(rng, dof, losses.shape))
    params = {name: np.expand_dims(values, extra) for name, values in params.items()}
    scores = evaluate_score(downstream.kind, params, losses)
    if kind == "predictive":
        scores = scores + downstream.score_sd(scores) * _draw_t(rng, downstream.dof, scores.shape)
    if CONSTANTS[downstream.kind] is SIGMOID:
        scores = np.clip(scores, 0.0, 1.0)
    n_units = downstream.n_groups or downstream.n_runs
    wide = expanded_level(level, min(n_units, law.n_units or n_units))
    low, high = np.quantile(scores, [(1 - wide) / 2, (1 + wide) / 2], axis=0)
    return value, low, high


def _draw_t(rng: np.random.Generator, dof: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    """Draw from Student's t, or from the normal for infinite `dof`.

    dof   degrees of freedom, broadcast against `shape`
    """
    dof = np.asarray(dof, dtype=float)
    return rng.standard_t(dof, shape) if np.isfinite(dof).all() else rng.standard_normal(shape)
