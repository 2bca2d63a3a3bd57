"""Errors of a law on held-out runs: its extrapolation, and comparison of forms."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from megatron.laws.columns import takes_data_frame
from megatron.laws.fit import fit_law
from megatron.laws.fitting.extrapolation import Extrapolation, HeldOutPart, estimate_growth
from megatron.laws.law import Law

if TYPE_CHECKING:
    from pandas import DataFrame

LEVEL = 0.95
SHARES = (0.1, 0.2, 0.3, 0.4)  # shares of the runs, most compute first, held out in turn
MIN_HELD_OUT = 2
PART_REPLICATES = 100


@takes_data_frame
def extrapolate_law(
    N: ArrayLike,
    D: ArrayLike,
    L: ArrayLike,
    *,
    U: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    loss_se: ArrayLike | None = None,
    n_bootstrap: int = 1000,
    **options: Any,
) -> Law:
    """Fit a law as `fit_law`, and measure its error beyond the runs (fitting/extrapolation.py).

    Intervals of the law beyond the largest 6 N D include that error. SHARES
    of the runs are held out in turn; a share without which the form cannot be
    fitted is skipped. Without a bootstrap, or where every share is skipped,
    nothing is added. `options` are further ones of `fit_law`. Raises
    ValueError as `fit_law`.
    """
    given = {"N": N, "D": D, "L": L, "U": U, "groups": groups}
    columns = {name: np.asarray(values).ravel() for name, values in given.items() if values is not None}
    law = fit_law(**columns, loss_se=loss_se, n_bootstrap=n_bootstrap, **options)
    if not law.replicates:
        return law
    n_runs = len(columns["N"])
    # 12 runs: the shares give 1, 2, 4 and 5 runs, so sizes = [2, 4, 5]
    sizes = sorted({max(MIN_HELD_OUT, round(share * n_runs)) for share in SHARES})
    parts = [_predict_largest(columns, size, options) for size in sizes if size < n_runs]
    fitted = [part for part in parts if part is not None]
    if not fitted:
        return law
    compute = float(6 * (columns["N"] * columns["D"]).max())
    growth = Extrapolation(estimate_growth(fitted), float(len(fitted)), compute)
    return replace(law, extrapolation=asdict(growth))


def _predict_largest(
    columns: dict[str, np.ndarray], n_held_out: int, options: dict[str, Any]
) -> HeldOutPart | None:
    """Predict the runs of most compute by a fit to the others; None where it fails."""
    is_out = select_largest(columns["N"], columns["D"], n_held_out)
    inner = {name: values[~is_out] for name, values in columns.items()}
    try:
        law = fit_law(**inner, n_bootstrap=PART_REPLICATES, **options)
    except ValueError:
        return None
    N, D, L, U = (columns[name][is_out] if name in columns else np.inf for name in "NDLU")
    # 0 or more, since the held-out runs have the most compute
    distance = np.log(N * D / (inner["N"] * inner["D"]).max())
    # variance of the law, by its replicates, and of a single run
    variance = np.log(law.losses(N, D, U)).var(axis=0) + law.noise_at(N, D)[0] ** 2
    return HeldOutPart(distance, np.log(L / law.loss(N, D, U)), variance)


@dataclass(frozen=True)
class HoldoutScore:
    """Predictions of n held-out runs with intervals for one run, and measured losses, each [n]."""

    predicted: np.ndarray
    low: np.ndarray
    high: np.ndarray
    measured: np.ndarray

    @property
    def error(self) -> np.ndarray:
        """Errors log(predicted / measured), [n]."""
        return np.log(self.predicted / self.measured)

    def as_dict(self) -> dict[str, Any]:
        """Return the content for law.json."""
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


def score_holdout(
    law: Law, N: np.ndarray, D: np.ndarray, L: np.ndarray, U: np.ndarray | None = None
) -> HoldoutScore:
    """Predict runs [n] with predictive intervals (Law.predict), and compare with the measured losses.

    Without replicates the intervals include only the scatter of single runs.
    """
    value, low, high = law.predict(N, D, np.inf if U is None else U, LEVEL)
    if not law.replicates:
        # an interval of width 0 around the law, widened by the noise of a run
        low, high = law.add_noise(value, value, value, N, D, LEVEL)
    return HoldoutScore(value, low, high, L)


def format_held_out(scores: dict[str, Any]) -> list[str]:
    """Return a summary and a line for each held-out run; [] without such runs."""
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


def score_largest(N: np.ndarray, D: np.ndarray, L: np.ndarray, share: float, n_bootstrap: int) -> "DataFrame":
    """Score laws fitted without the share of runs [n] of most compute, with and without extrapolation.

    Returns a row "plain" and a row "extrapolated": the share inside the 95 % predictive interval, the
    mean absolute error and the median half-width of log L, and the number of runs held out.
    """
    from pandas import DataFrame  # slow import

    is_out = select_largest(N, D, max(1, round(share * len(N))))
    law = extrapolate_law(N[~is_out], D[~is_out], L[~is_out], n_bootstrap=n_bootstrap)
    rows = {}
    for method, used in (("plain", replace(law, extrapolation={})), ("extrapolated", law)):
        scored = score_holdout(used, N[is_out], D[is_out], L[is_out])
        rows[method] = {
            "inside": ((scored.low <= scored.measured) & (scored.measured <= scored.high)).mean(),
            "absolute": np.abs(scored.error).mean(),
            "half_width": np.median(np.log(scored.high / scored.low)) / 2,
            "held_out": is_out.sum(),
        }
    return DataFrame(rows).T


@dataclass(frozen=True)
class FormComparison:
    """RMS log error of one form on held-out runs.

    `refused` is the reason for which the form could not be fitted.
    """

    form: str
    n_constants: int
    rms: float
    refused: str = ""


def compare_forms(
    N: np.ndarray,
    D: np.ndarray,
    L: np.ndarray,
    U: np.ndarray | None,
    forms: Sequence[str],
    held_out: np.ndarray,
    huber_delta: float = 1e-3,
) -> list[FormComparison]:
    """Fit each form without the runs `held_out` [n] bool and score it on them; best first.

    Forms that cannot be fitted are last.
    """
    columns = {"N": N, "D": D, "L": L} | ({} if U is None else {"U": U})
    inner = {name: values[~held_out] for name, values in columns.items()}
    outer = {name: values[held_out] for name, values in columns.items()}
    measured = outer.pop("L")
    comparisons = []
    for form in forms:
        try:
            law = fit_law(**inner, form=form, n_bootstrap=0, huber_delta=huber_delta)
        except ValueError as error:
            comparisons.append(FormComparison(form, 0, np.inf, str(error)))
            continue
        errors = np.log(law.loss(**outer) / measured)
        comparisons.append(FormComparison(form, len(law.params), float(np.sqrt((errors**2).mean()))))
    return sorted(comparisons, key=lambda comparison: comparison.rms)
