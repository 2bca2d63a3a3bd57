"""A study of isoFLOP runs around a known frontier, and values computed from the constants of its law."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import t as student

from megatron.laws.compute_law import ComputeLaw, fit_compute_law
from megatron.report.study_data import FORECAST_COLUMNS, Study
from megatron.study.table import make_frame

FLOPS = 6.6  # per parameter and token
BUDGETS = np.geomspace(1e11, 3.2e12, 5)
TIMES = (0.3, 0.55, 1.0, 1.8, 3.3)  # sizes around the best one
REJECTED = {"statistic": 31.0, "p_value": 1e-4, "dof": [10, 4], "noise": 0.004, "misfit": 0.021,
            "passes": False}  # fmt: skip


def make_runs(seed: int = 0, budgets: np.ndarray = BUDGETS, shift: float = 1.0) -> pd.DataFrame:
    """Return isoFLOP runs around `shift` times the best size of each budget."""
    rng, rows = np.random.default_rng(seed), []
    for budget in budgets:
        for times in TIMES:
            N = int(40_000 * (budget / 2e11) ** 0.5 * times * shift)
            bend = math.log(0.5 * (times * shift) ** -0.2 + 0.5 * (times * shift) ** 0.2)
            loss = 3.9 * (budget / 2e11) ** -0.085 * math.exp(bend + 0.003 * rng.normal())
            D = int(budget / (FLOPS * N))
            row = {"run": f"run{len(rows)}", "identity": f"id{len(rows)}", "status": "done"}
            row |= {"objective": "autoregressive", "n_params": N, "train_tokens": D, "loss": loss}
            row |= {"unique_tokens": D, "epochs": 1.0, "train_flops": float(budget), "seed": 0}
            row |= {"flops_6nd": 6.0 * N * D, "seq_len": 256, "loss_se": 0.004, "wall_s": budget / 2e10}
            rows.append(row)
    return make_frame(rows)


def fit_runs(runs: pd.DataFrame) -> ComputeLaw:
    """Fit the frontier of the runs."""
    names = ("n_params", "train_tokens", "loss", "train_flops")
    return fit_compute_law(*(runs[name].to_numpy() for name in names), list(runs["run"]))


RUNS = make_runs()
LAW = fit_runs(RUNS)


def make_study(runs: pd.DataFrame, **more: Any) -> Study:
    """Return a study of these runs."""
    return Study(folder=Path("a_study"), runs=runs, **more)


def make_forecast(law: ComputeLaw, times: float = 4.0, **changes: Any) -> pd.DataFrame:
    """Return the forecast of a run at `times` the largest budget of a law."""
    at = law.optimum(times * law.C[1])
    low, high = at.predictive
    row = {"name": f"best-{times:g}x", "quantity": "run", "N": at.N, "D": at.D, "C": at.C}
    row |= {"predicted": at.loss, "low": low, "high": high, "observed": None, "is_late": False}
    row |= {"time": "2026-11-22 11:40:03 UTC", "sha256": "0a1b2c3d4e5f" + 52 * "0"}
    return pd.DataFrame([row | changes], columns=FORECAST_COLUMNS)


def size_at(law: ComputeLaw, C: float) -> tuple[float, float, float]:
    """Return the best N at C and the ends of its 95 % interval, from the constants and their covariance."""
    x, p, S = math.log(C / law.centre), law.params, np.array(law.covariance)
    variance = S[3, 3] + 2 * x * S[3, 4] + x * x * S[4, 4]
    half = student.ppf(0.975, law.dof) * math.sqrt(variance)
    centre = p["log_size"] + p["size_exponent"] * x
    return math.exp(centre), math.exp(centre - half), math.exp(centre + half)
