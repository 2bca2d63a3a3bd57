"""Scaling laws: forms, fits, intervals, frontiers, predictions. Needs numpy and scipy only.

The names below are the public interface; they are imported at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.laws.approaches import compare_approaches
    from megatron.laws.compute_law import ComputeLaw, fit_compute_law
    from megatron.laws.crossover import critical_compute
    from megatron.laws.diagnostics import diagnose
    from megatron.laws.downstream_curve import DownstreamCurve, fit_downstream, predict_score
    from megatron.laws.fit import fit_law
    from megatron.laws.fitting.priors import Prior
    from megatron.laws.frontier import Frontier, frontier_bands, optimal_frontier, search_frontier
    from megatron.laws.holdout import compare_forms, score_holdout
    from megatron.laws.isoflop import fit_isoflop
    from megatron.laws.law import Law
    from megatron.laws.law_text import summarise_law
    from megatron.laws.power_law import PowerLaw, fit_power
    from megatron.laws.prediction import OptimumPrediction, Prediction, predict_optimum, predict_run
    from megatron.laws.stack import StackedLaw, stack_laws

MODULE = {
    "compare_approaches": "approaches",
    "ComputeLaw": "compute_law",
    "fit_compute_law": "compute_law",
    "critical_compute": "crossover",
    "diagnose": "diagnostics",
    "DownstreamCurve": "downstream_curve",
    "fit_downstream": "downstream_curve",
    "predict_score": "downstream_curve",
    "fit_law": "fit",
    "Prior": "fitting.priors",
    "Frontier": "frontier",
    "frontier_bands": "frontier",
    "optimal_frontier": "frontier",
    "search_frontier": "frontier",
    "compare_forms": "holdout",
    "score_holdout": "holdout",
    "fit_isoflop": "isoflop",
    "Law": "law",
    "summarise_law": "law_text",
    "PowerLaw": "power_law",
    "fit_power": "power_law",
    "OptimumPrediction": "prediction",
    "Prediction": "prediction",
    "predict_optimum": "prediction",
    "predict_run": "prediction",
    "StackedLaw": "stack",
    "stack_laws": "stack",
}
__all__ = list(MODULE)


def __getattr__(name: str) -> Any:
    """Import the module of a public name."""
    if name not in MODULE:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULE})
