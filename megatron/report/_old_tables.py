"""Tables of the old study API as data frames, until megatron.study returns them."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from megatron.study import differences, frontier_table, measured, proposal, table
from megatron.study.blind import check_blind
from megatron.study.measured import score_forecasts
from megatron.study.run_row import NUMBERS, RunRow
from megatron.study.study_frontier import FrontierRuns


def read_runs(folder: Path) -> pd.DataFrame:
    """Return the runs of a study."""
    return make_frame(table.read_runs(folder))


def make_frame(rows: list[RunRow]) -> pd.DataFrame:
    """Return rows as a data frame."""
    frame = pd.DataFrame([asdict(row) for row in rows], columns=list(RunRow.__dataclass_fields__))
    return frame.astype(dict.fromkeys(NUMBERS, float))


def make_rows(frame: pd.DataFrame) -> list[RunRow]:
    """Return a data frame as rows."""
    clean = frame.astype(object).where(frame.notna(), None)
    return [RunRow(**record) for record in clean.to_dict("records")]


def read_checks(folder: Path, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the forecasts of a study."""
    rows = make_rows(runs)
    checks = []
    blind = check_blind(folder, rows)
    flops = dict(zip(runs["identity"], runs["train_flops"], strict=True))
    if blind is not None:
        checks.append(
            {
                "name": f"blind {blind.prediction.size}", "quantity": "run", "objective": "autoregressive",
                "N": blind.N, "D": blind.D, "C": blind.C, "U": None,
                "predicted": blind.predicted, "low": blind.interval[0], "high": blind.interval[1],
                "observed": blind.measured, "is_late": blind.in_order is False,
                "time": blind.predicted_at, "sha256": blind.sha256,
            }
        )  # fmt: skip
    for outcome in score_forecasts(folder, rows):
        forecast = outcome.forecast
        low, high = forecast.interval(0.95)
        checks.append(
            {
                "name": forecast.name, "quantity": forecast.quantity, "objective": forecast.objective,
                "N": forecast.N, "D": forecast.D, "C": flops.get(forecast.identity), "U": forecast.U,
                "predicted": forecast.predicted, "low": low, "high": high,
                "observed": outcome.measured, "is_late": outcome.in_order is False,
                "time": f"{forecast.created_at:%Y-%m-%d %H:%M:%S} UTC", "sha256": forecast.sha256(),
            }
        )  # fmt: skip
    return pd.DataFrame(checks)


def collect_settings(runs: pd.DataFrame) -> Any:
    """Return the settings of a crossing."""
    return measured.collect_settings(make_rows(runs.drop(columns=["N", "C", "D"], errors="ignore")))


def measure_study(runs: pd.DataFrame) -> Any:
    """Return the crossings."""
    return measured.measure_study(make_rows(runs))


def suggest_next_steps(law: Any, runs: pd.DataFrame) -> list[str]:
    """Return what to add."""
    columns = (runs[name].to_numpy() for name in ("N", "D", "loss", "C"))
    steps = frontier_table.suggest_next_steps(law, FrontierRuns(*columns, list(runs["run"]), {}, [], None))
    return [f"{step[:1].upper()}{step[1:]}" for step in steps]


def propose_runs(law: Any, runs: pd.DataFrame) -> Any:
    """Return runs to add."""
    trained = [proposal.make_timed_run(row, row.n_params, row.train_tokens) for row in make_rows(runs)]
    return proposal.propose_runs(law, trained)


def estimate_noise_floors(runs: pd.DataFrame, laws: Any) -> Any:
    return differences.estimate_noise_floors(make_rows(runs), laws)


def compare_repeated(runs: pd.DataFrame, laws: Any) -> Any:
    return differences.compare_repeated(make_rows(runs), laws=laws)


def compare_best(runs: pd.DataFrame, laws: Any) -> Any:
    return differences.compare_best(make_rows(runs), laws=laws)


def read_table(path: Path) -> pd.DataFrame:
    return make_frame(table.read_rows(path))


def make_dict_frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return dicts as a data frame."""
    return make_frame([RunRow(**row) for row in rows])
