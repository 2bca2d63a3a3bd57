"""How well a law predicts runs that it was not fitted on, and which form predicts them best."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from megatron.scaling.fit import fit_law
from megatron.scaling.law import Law

LEVEL = 0.95


@dataclass(frozen=True)
class Scored:
    """Of n runs: what the law says, the ends of an interval for a single run, and what was measured."""

    predicted: np.ndarray
    low: np.ndarray
    high: np.ndarray
    measured: np.ndarray

    @property
    def error(self) -> np.ndarray:
        """log(predicted / measured), [n]."""
        return np.log(self.predicted / self.measured)

    def as_dict(self) -> dict[str, Any]:
        """For law.json: each run, the root mean square error, and how many intervals hold their run."""
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
        """(loss, low, high), as Law.predict."""


def score(law: Predictor, N: np.ndarray, D: np.ndarray, L: np.ndarray, U: np.ndarray | None = None) -> Scored:
    """Predict runs [n] and compare, with predictive intervals: see Law.predict.

    Of a law without replicates the intervals have the scatter of single runs alone.
    """
    value, low, high = law.predict(N, D, np.inf if U is None else U, LEVEL)
    if isinstance(law, Law) and not law.replicates:
        low, high = law.add_noise(value, value, value, N, D, LEVEL)
    return Scored(value, low, high, L)


def write_held_out(scores: dict[str, Any]) -> list[str]:
    """How the runs held out were predicted, a line each; nothing without such runs."""
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


def largest(N: np.ndarray, D: np.ndarray, n_held: int) -> np.ndarray:
    """Which runs [n] bool are the `n_held` of most compute, N D.

    Raises ValueError for none or all of them.
    """
    if not 0 < n_held < len(N):
        raise ValueError(f"held-out runs: found {n_held} of {len(N)}, wanted one or more and not all")
    held = np.zeros(len(N), dtype=bool)
    held[np.argsort(N * D, kind="stable")[-n_held:]] = True
    return held


@dataclass(frozen=True)
class Compared:
    """One form: its objective on the runs it was fitted on, and its errors on those it was not (log, RMS)."""

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
) -> list[Compared]:
    """Each form fitted without the runs `held_out` [n] bool and scored on them; best first.

    `folds_rms` is cross-validation over all runs in `n_folds` random parts: a form that wins there and loses
    on the largest runs interpolates well and extrapolates badly. A form that cannot be fitted comes last.
    """
    part = np.random.default_rng(seed).permutation(len(N)) % n_folds
    found = []
    for form in forms:

        def errors(kept: np.ndarray, form: str = form) -> tuple[float, np.ndarray, int]:
            """(objective, log errors of the runs not kept, constants)"""
            mine = None if U is None else U[kept]
            law = fit_law(
                N[kept], D[kept], L[kept], U=mine, form=form, n_bootstrap=0, huber_delta=huber_delta
            )
            others = None if U is None else U[~kept]
            scored = score(law, N[~kept], D[~kept], L[~kept], others)
            return law.objective, scored.error, len(law.params)

        try:
            objective, ahead, n_constants = errors(~held_out)
            folds = np.concatenate([errors(part != i)[1] for i in range(n_folds)])
        except ValueError as error:
            found.append(Compared(form, 0, np.inf, np.inf, np.inf, str(error)))
            continue
        found.append(Compared(form, n_constants, objective, _rms(ahead), _rms(folds)))
    return sorted(found, key=lambda one: one.largest_rms)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt((values**2).mean()))
