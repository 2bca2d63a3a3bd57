"""A study of isoFLOP runs around a known frontier, its blind run, and values computed from its constants."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.stats import t as student

from megatron.laws.compute_law import ComputeLaw, fit_compute_law
from megatron.report.study_data import NO_CURVE, Study
from megatron.study.run_row import RunRow

AR = "autoregressive"
FLOPS = 6.6  # per parameter and token
NUMBER = r"(-?[\d.,]+(?:e-?\d+)?[kMBT]?)"
UNIT = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
BUDGETS = np.geomspace(1e11, 3.2e12, 5)
REJECTED = {"statistic": 31.0, "p_value": 1e-4, "dof": [10, 4], "noise": 0.004, "misfit": 0.021,
            "passes": False}  # fmt: skip

ANSWER = (
    rf"At {NUMBER} FLOPs train {NUMBER}(?: \({NUMBER}(?: to {NUMBER})?\))? parameters on {NUMBER} tokens; "
    rf"expect a loss of {NUMBER}(?: \({NUMBER}(?: to {NUMBER})?\))? nats per token\."
)


@dataclass(frozen=True)
class BlindFields:
    """Fields of a blind check that a page reads."""

    C: float
    N: float
    D: float
    predicted: float
    interval: tuple[float, float]
    measured: float | None = None
    in_time: bool = True
    level: float = 0.95
    size: str = "340k"
    predicted_at: str = "2026-11-22 11:40:03 UTC"
    sha256: str = "0a1b2c3d4e5f" + "0" * 52


def parse_number(text: str) -> float:
    text = text.replace(",", "").rstrip(".")
    return float(text[:-1]) * UNIT[text[-1]] if text[-1] in UNIT else float(text)


def is_near(text: str, value: float, relative: float = 0.051) -> bool:
    """Return whether a written number equals `value` to two significant digits or two decimals."""
    return abs(parse_number(text) - value) <= max(relative * abs(value), 0.00501)


def make_rows(
    rng: np.random.Generator,
    C: np.ndarray = BUDGETS,
    shift: float = 1.0,
    noise: float = 0.003,
    n_seeds: int = 1,
) -> list[RunRow]:
    """Return isoFLOP runs around `shift` times the best N of each budget."""
    rows: list[RunRow] = []
    for budget in C:
        for times in (0.3, 0.55, 1.0, 1.8, 3.3):
            N = int(40_000 * (budget / 2e11) ** 0.5 * times * shift)
            bend = math.log(0.5 * math.exp(-0.2 * math.log(times * shift)) + 0.5 * (times * shift) ** 0.2)
            for seed in range(n_seeds if times == 1.0 else 1):
                L = 3.9 * (budget / 2e11) ** -0.085 * math.exp(bend + noise * rng.normal())
                D = int(budget / (FLOPS * N))
                rows.append(
                    RunRow(
                        run=f"run{len(rows)}", identity=f"id{len(rows)}", status="done",
                        objective=AR, size="s", seed=seed, n_params=N, train_tokens=D,
                        n_non_embedding=N // 2, unique_tokens=D, epochs=1.0, loss=L,
                        train_flops=float(budget), flops_6nd=6.0 * N * D, seq_len=256,
                        loss_se=0.004, n_tokens_scored=200_000, wall_s=budget / 2e10,
                    )
                )  # fmt: skip
    return rows


def fit_rows(rows: list[RunRow]) -> ComputeLaw:
    names = ("n_params", "train_tokens", "loss", "train_flops")
    N, D, L, C = (np.array([row.number(name) for row in rows], dtype=float) for name in names)
    return fit_compute_law(N, D, L, C, [row.run for row in rows])


def make_study(
    rows: list[RunRow], law: ComputeLaw | None, blind: BlindFields | None = None, **more: object
) -> Study:
    curves = {row.run: NO_CURVE for row in rows}
    return Study(Path("s"), rows, curves, None, {}, compute_law=law, blind=blind, **more)


def make_blind(law: ComputeLaw, **changes: object) -> BlindFields:
    at = law.optimum(4 * law.C[1])
    prediction = law.predict_run(at.N, at.C)
    return replace(BlindFields(at.C, at.N, at.D, prediction.loss, prediction.predictive), **changes)


def strip_markup(markup: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", markup.replace("&nbsp;", " "))).strip()


def size_at(law: ComputeLaw, C: float) -> tuple[float, float, float]:
    """Return the best N at C and the ends of its 95 % interval, from the constants and their covariance."""
    x, p, S = math.log(C / law.centre), law.params, np.array(law.covariance)
    variance = S[3, 3] + 2 * x * S[3, 4] + x * x * S[4, 4]
    half = student.ppf(0.975, law.dof) * math.sqrt(variance) if variance >= 0 else math.nan
    centre = p["log_size"] + p["size_exponent"] * x
    return math.exp(centre), math.exp(centre - half), math.exp(centre + half)


def log_frontier(line: np.ndarray, x: float) -> float:
    """Return log(E + K C^-g) from log L, slope and curvature at x = 0; a parabola for negative curvature."""
    level, slope, curvature = line
    if curvature <= 0:
        return level - slope * x + curvature * x * x / 2
    share = slope**2 / (slope**2 + curvature)  # reducible share of the loss
    return level + math.log(1 - share + share * math.exp(-slope / share * x))


def loss_at(law: ComputeLaw, C: float) -> tuple[float, float, float]:
    """Return L* at C and the ends of the predictive interval of one new run."""
    x, p, S = math.log(C / law.centre), law.params, np.array(law.covariance)[:3, :3]
    line = np.array([p["log_loss"], p["slope"], p["curvature"]])
    g = np.array([(log_frontier(line + h, x) - log_frontier(line - h, x)) / 2e-6 for h in 1e-6 * np.eye(3)])
    variance, centre = g @ S @ g, log_frontier(line, x)
    if (
        law.beyond and x > law.beyond["edge"] + 1e-6
    ):  # beyond the edge: the form continues with its slope error and a drift
        ahead, dx = law.beyond, x - law.beyond["edge"]
        (a, b), (_, c) = ahead["covariance"]
        variance = a + 2 * b * dx + c * dx**2 + ahead["drift"] ** 2 * dx**3 / 3
        edge, form = ahead["edge"], np.array([line[0], line[1], max(line[2], 0.0)])
        turn = ahead["slope"] - (log_frontier(form, edge + 1e-5) - log_frontier(form, edge - 1e-5)) / 2e-5
        centre = ahead["level"] + log_frontier(form, x) - log_frontier(form, edge) + turn * dx
    half = student.ppf(0.975, law.dof) * math.sqrt(variance + law.spread**2)
    return math.exp(centre), math.exp(centre - half), math.exp(centre + half)
