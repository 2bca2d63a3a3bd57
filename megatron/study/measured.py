"""The measured crossover of a study: settings of finished runs by unique text, and the comparison on each."""

import fnmatch
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from megatron.io import replace_nonfinite, write_json
from megatron.laws import measured_crossover
from megatron.laws.measured_crossover import LEVEL, MeasuredCrossover, Setting
from megatron.laws.power_law import PowerLaw
from megatron.laws.prediction_text import format_ends
from megatron.study.format import OBJECTIVE_NAMES, format_count

CROSSOVER = "crossover.json"
FIRST, SECOND = "autoregressive", "masked_diffusion"
# relative difference of unique tokens that counts as the same text: whole
# windows differ by less
SAME_U = 0.01


def collect_settings(table: pd.DataFrame) -> dict[float, dict[str, list[Setting]]]:
    """Return the settings of runs with a loss and a test loss, by unique tokens and objective.

    Runs of one column `cell` differ only in their seed.
    Those that are held out are fresh seeds, which report
    a setting and do not select it; a setting of fresh
    seeds only cannot be selected, and is skipped.
    """
    scored = table[(table["loss"] > 0) & (table["test_loss"] > 0) & (table["train_flops"] > 0)]
    cells = scored["cell"].fillna(scored["run"])
    settings: dict[float, dict[str, list[Setting]]] = defaultdict(lambda: defaultdict(list))
    for (U, objective, _), group in scored.groupby(["unique_tokens", "objective", cells]):
        is_fresh = group["held_out"].fillna(0) > 0
        selecting = group[~is_fresh].sort_values("run")
        if len(selecting):
            first, fresh = selecting.iloc[0], group.loc[is_fresh, "test_loss"].to_numpy()
            loss, test_loss = (selecting[name].to_numpy() for name in ("loss", "test_loss"))
            setting = Setting(first["run"], float(first["train_flops"]), loss, test_loss, fresh)
            settings[float(U)][str(objective)].append(setting)
    return settings


def measure_study(table: pd.DataFrame) -> tuple[list[MeasuredCrossover], PowerLaw | None]:
    """Return the comparison of both objectives on each text, by U, and the power law through its crossings.

    Texts with runs of one objective only are left out. Raises
    ValueError if there is no other text.
    """
    measured = [
        measured_crossover.measure_crossover(U, objectives[FIRST], objectives[SECOND])
        for U, objectives in sorted(collect_settings(table).items())
        if FIRST in objectives and SECOND in objectives
    ]
    if not measured:
        raise ValueError(
            "got no unique text with finished runs of both objectives and a test loss. Set dataset.path_test "
            "and unique_tokens in the study, and run tools/sweep.py."
        )
    return measured, measured_crossover.fit_crossover_law(measured)


def find_text_runs(table: pd.DataFrame, U: float) -> pd.DataFrame:
    """Return the runs of the study on U unique tokens, within the windows of a sample."""
    return table[((table["unique_tokens"] / U - 1).abs() < SAME_U) & (table["status"] != "stale")]


def write_crossover(study_dir: Path, measured: Sequence[MeasuredCrossover], law: PowerLaw | None) -> Path:
    """Write <study>/crossover.json atomically; null stands for a crossing that was not measured."""
    path = study_dir / CROSSOVER
    points = [{key: value for key, value in asdict(at).items() if key != "draws"} for at in measured]
    power: dict[str, Any] | None = None
    if law is not None:
        power = {name: getattr(law, name) for name in ("coefficient", "exponent", "dof")}
        crossed = [at.U for at in measured if at.C is not None]
        power |= {"exponent_interval": list(law.interval), "U": crossed}
    write_json(path, replace_nonfinite({"level": LEVEL, "crossovers": points, "C_crit": power}))
    return path


def format_measured(at: MeasuredCrossover) -> str:
    """State one comparison in one line."""
    sides = []
    for objective, best in ((FIRST, at.first), (SECOND, at.second)):
        error = "" if best.seed_se is None else f" +- {best.seed_se:.4f}"
        sides.append(f"{OBJECTIVE_NAMES[objective]} {best.loss:.4f}{error} at {best.C:.2e} FLOPs")
    text = f"U {format_count(at.U, 3)}: {', '.join(sides)}; "
    reused = [best.name for best in (at.first, at.second) if not best.is_fresh]
    if reused:
        text += f"{' and '.join(reused)} reported by the seeds that selected: biased, without interval; "
    if at.C is None:
        error = "" if at.gap_se is None else f" +- {at.gap_se:.4f}"
        return f"{text}no crossing measured, best losses differ by {at.gap:+.4f}{error}"
    text += f"C_crit {at.C:.3g} FLOPs"
    if at.interval is not None:
        low, high = ("not bounded" if end is None else f"{end:.3g}" for end in at.interval)
        text += f" ({low} to {high})"
    return text


def describe_study(path: Path, table: pd.DataFrame, without: Sequence[str] = ()) -> list[str]:
    """Return the measured crossovers of finished runs as lines; store those of a whole study.

    path     the study's folder, or a table.csv
    without  patterns of names of autoregressive runs to leave out

    Raises ValueError for a pattern that matches nothing.
    """
    matches = [any(fnmatch.fnmatchcase(run, p) for p in without) for run in table["run"]]
    compared = table[~(np.array(matches, bool) & (table["objective"] == FIRST))]
    if without and len(compared) == len(table):
        raise ValueError(
            f"--without: got {' '.join(without)}, which match no autoregressive run of {path}. "
            "Quote patterns with *, and see the column run of table.csv."
        )
    lines = [f"without {len(table) - len(compared)} runs that match {' '.join(without)}"] if without else []
    crossovers, law = measure_study(compared)
    lines += map(format_measured, crossovers)
    if law is not None:
        # two crossings whose own noise is not bounded leave no degree of freedom
        ends = f"95 % confidence of the exponent {format_ends(law.interval, '.3g')}"
        lines.append(f"C_crit = {law.coefficient:.3g} U^{law.exponent:.3g}, {ends}, {law.dof + 2} crossings")
    if not without and path.suffix != ".csv":
        lines.append(f"{write_crossover(path, crossovers, law)}: {len(crossovers)} texts")
    return lines
