"""Scaling laws: forms, fits, intervals, frontiers, predictions. Needs numpy, scipy and pandas only.

The names below are the public interface.
scipy and pandas are imported at first use.
"""

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

__all__ = [
    "ComputeLaw", "DownstreamCurve", "Frontier", "Law", "OptimumPrediction", "PowerLaw", "Prediction",
    "compare_forms", "critical_compute", "diagnose", "extrapolate_law", "fit_compute_law", "fit_downstream",
    "fit_isoflop", "fit_law", "fit_power", "frontier_bands", "optimal_frontier", "predict_optimum",
    "predict_run", "predict_score", "score_holdout", "search_frontier", "summarise_law",
]  # fmt: skip
