"""Scaling laws: forms, fits, intervals, frontiers, predictions. Needs numpy, scipy and pandas only.

The names below are the public interface; they are imported at first use.
"""

from importlib import import_module
from typing import Any

_NAMES_OF = {
    "compute_law": "ComputeLaw fit_compute_law",
    "crossover": "critical_compute",
    "diagnostics": "diagnose",
    "downstream_curve": "DownstreamCurve fit_downstream predict_score",
    "fit": "fit_law",
    "frontier": "Frontier frontier_bands optimal_frontier search_frontier",
    "holdout": "compare_forms score_holdout",
    "isoflop": "fit_isoflop",
    "law": "Law",
    "law_text": "summarise_law",
    "power_law": "PowerLaw fit_power",
    "prediction": "OptimumPrediction Prediction predict_optimum predict_run",
    "stack": "StackedLaw stack_laws",
}
MODULE = {name: module for module, names in _NAMES_OF.items() for name in names.split()}
__all__ = list(MODULE)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import the module of a public name."""
    if name not in MODULE:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULE})
