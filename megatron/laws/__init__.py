"""Scaling laws: forms, fits, intervals, frontiers, predictions. Needs numpy, scipy and pandas only.

The names below are the public interface; they are imported at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.laws.compute_law import ComputeLaw, fit_compute_law
    from megatron.laws.crossover import critical_compute
    from megatron.laws.diagnostics import diagnose
    from megatron.laws.downstream_curve import DownstreamCurve, fit_downstream, predict_score
    from megatron.laws.fit import fit_law
    from megatron.laws.frontier import Frontier, frontier_bands, optimal_frontier, search_frontier
    from megatron.laws.holdout import compare_forms, extrapolate_law, score_holdout
    from megatron.laws.isoflop import fit_isoflop
    from megatron.laws.law import Law
    from megatron.laws.law_text import summarise_law
    from megatron.laws.power_law import PowerLaw, fit_power
    from megatron.laws.prediction import OptimumPrediction, Prediction, predict_optimum, predict_run

_NAMES_OF = {
    "compute_law": "ComputeLaw fit_compute_law",
    "crossover": "critical_compute",
    "diagnostics": "diagnose",
    "downstream_curve": "DownstreamCurve fit_downstream predict_score",
    "fit": "fit_law",
    "frontier": "Frontier frontier_bands optimal_frontier search_frontier",
    "holdout": "compare_forms extrapolate_law score_holdout",
    "isoflop": "fit_isoflop",
    "law": "Law",
    "law_text": "summarise_law",
    "power_law": "PowerLaw fit_power",
    "prediction": "OptimumPrediction Prediction predict_optimum predict_run",
}
MODULE = {name: module for module, names in _NAMES_OF.items() for name in names.split()}
__all__ = list(MODULE)


def __getattr__(name: str) -> Any:
    """Import the module of a public name."""
    if name in ("stack_laws", "StackedLaw"):
        raise AttributeError(f"{name}: stacks of forms were removed. Use extrapolate_law.")
    if name not in MODULE:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULE})
