"""Errors of a law on held-out runs, and comparison of forms by them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from megatron.laws.fit import fit_law
from megatron.laws.law import Law

LEVEL = 0.95


@dataclass(frozen=True)
class HoldoutScore:
    """Predictions of n held-out runs: loss, interval for a single run, and measured loss, each [n]."""

    predicted: np.ndarray
    low: np.ndarray
    high: np.ndarray
    measured: np.ndarray

    @property
    def error(self) -> np.ndarray:
        """Errors log(predicted / measured), [n]."""
        return np.log(self.predicted / self.measured)

    def as_dict(self) -> dict[str, Any]:
        """Return the content for law.json: runs, error summaries, number of runs in their interval."""
        inside = (self.low <= self.measured) & (self.measured <= self.high)
        return {
            "n_runs": len(self.measured),
            "rms_percent": float(100 * np.sqrt((self.error**2).mean())),
            "worst_percent": float(100 * np.abs(self.error).max()),
            "n_inside": int(inside.sum()),
            "level": LEVEL,
            "predicted": self.predicted.tolist(),
            "low": self.low.tolist(),
            "high": self.high.tolist(),
            "measured": self.measured.tolist(),
        }


class Predictor(Protocol):
    """A law, or a stack of laws."""

    def predict(
        self, N: ArrayLike, D: ArrayLike, U: ArrayLike = ..., level: float = ...
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (loss, low, high) as Law.predict."""


def score_holdout(
    law: Predictor, N: np.ndarray, D: np.ndarray, L: np.ndarray, U: np.ndarray | None = None
) -> HoldoutScore:
    """Predict runs [n] with predictive intervals (Law.predict), and compare with the measured losses.

    Without replicates the intervals include only the scatter of single runs.
    """
    value, low, high = law.predict(N, D, np.inf if U is None else U, LEVEL)
    if isinstance(law, Law) and not law.replicates:
        # an interval of width 0 around the law, widened by the noise of a run
        low, high = law.add_noise(value, value, value, N, D, LEVEL)
    return HoldoutScore(value, low, high, L)


def format_held_out(scores: dict[str, Any]) -> list[str]:
    """Return lines that list predictions of held-out runs, with a summary first; [] without such runs."""
    if not scores:
        return []
    columns = (scores[key] for key in ("N", "D", "predicted", "low", "high", "measured"))
    return [
        f"  {scores['n_runs']} runs held out: off by {scores['rms_percent']:.2f} % (RMS), "
        f"{scores['worst_percent']:.2f} % at worst; {scores['n_inside']} inside their 95 % "
        "predictive interval",
        *(
            f"    N {N:.4g}, D {D:.4g}: predicted {value:.4f} [{low:.4f}, {high:.4f}], measured {L:.4f}"
            for N, D, value, low, high, L in zip(*columns, strict=True)
        ),
    ]


def select_largest(N: np.ndarray, D: np.ndarray, n_selected: int) -> np.ndarray:
    """Return a mask [n] bool of the `n_selected` runs of most compute, N D.

    Raises ValueError for none or all of the runs.
    """
    if not 0 < n_selected < len(N):
        raise ValueError(f"held-out runs: got {n_selected} of {len(N)}, expected one or more and not all")
    is_selected = np.zeros(len(N), dtype=bool)
    is_selected[np.argsort(N * D, kind="stable")[-n_selected:]] = True
    return is_selected


@dataclass(frozen=True)
class FormComparison:
    """Comparison of one form: objective on the fitted runs, RMS log errors on the held-out ones.

    `refused` is the reason for which the form could not be fitted.
    """

    form: str
    n_constants: int
    objective: float
    largest_rms: float
    folds_rms: float
    refused: str = ""


def compare_forms(
    N: np.ndarray,
    D: np.ndarray,
    L: np.ndarray,
    U: np.ndarray | None,
    forms: Sequence[str],
    held_out: np.ndarray,
    n_folds: int = 5,
    seed: int = 0,
    huber_delta: float = 1e-3,
) -> list[FormComparison]:
    """Fit each form without the runs `held_out` [n] bool and score it on them; best first.

    `folds_rms` is the error of cross-validation over all runs in `n_folds` random parts. A form that is good
    there and bad on the largest runs interpolates well and extrapolates badly. Forms that cannot be fitted
    are last.
    """
    # 10 runs, 3 folds: parts of 4, 3 and 3 runs
    part = np.random.default_rng(seed).permutation(len(N)) % n_folds
    comparisons = []
    for form in forms:

        def score_split(is_fitted: np.ndarray, form: str = form) -> tuple[float, np.ndarray, int]:
            """Fit the runs of mask `is_fitted`; return (objective, log errors of the others, n_constants)."""
            fitted_unique = None if U is None else U[is_fitted]
            law = fit_law(
                N[is_fitted],
                D[is_fitted],
                L[is_fitted],
                U=fitted_unique,
                form=form,
                n_bootstrap=0,
                huber_delta=huber_delta,
            )
            scored_unique = None if U is None else U[~is_fitted]
            scored = score_holdout(law, N[~is_fitted], D[~is_fitted], L[~is_fitted], scored_unique)
            return law.objective, scored.error, len(law.params)

        try:
            objective, largest_errors, n_constants = score_split(~held_out)
            fold_errors = np.concatenate([score_split(part != i)[1] for i in range(n_folds)])
        except ValueError as error:
            comparisons.append(FormComparison(form, 0, np.inf, np.inf, np.inf, str(error)))
            continue
        comparisons.append(
            FormComparison(
                form,
                n_constants,
                objective,
                _root_mean_square(largest_errors),
                _root_mean_square(fold_errors),
            )
        )
    return sorted(comparisons, key=lambda comparison: comparison.largest_rms)


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt((values**2).mean()))
