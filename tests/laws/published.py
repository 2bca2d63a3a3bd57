"""Readers of published runs, for the tests that reproduce published fits."""

import csv
import json
from pathlib import Path

import numpy as np

from megatron.laws.fitting.huber import CentredRuns
from megatron.laws.fitting.varpro import bootstrap_chinchilla, fit_all_runs


def refit_weighted(N: np.ndarray, D: np.ndarray, L: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Return the constants of form chinchilla, each [R], fitted to runs [n] with each of `weights` [R, n]."""
    runs = CentredRuns.from_columns(N, D, L)
    best = fit_all_runs(runs, np.ones((1, len(N))), 1e-3)
    return runs.to_constants(bootstrap_chinchilla(runs, best.phi[0], weights.astype(float), 1e-3).phi)


def read_columns(path: Path, *names: str) -> list[np.ndarray]:
    """Return columns of a CSV file as numbers; NaN for empty cells."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return [np.array([float(row[name] or "nan") for row in rows]) for name in names]


def read_expected(laws: Path, name: str) -> dict:
    """Return the published and recorded results of one set of runs."""
    return json.loads((laws / "expected.json").read_text())[name]


def read_datablations(laws: Path) -> dict[str, np.ndarray]:
    """Return the 182 runs of Muennighoff et al. as arguments of fit_law."""
    path = laws / "datablations" / "datablations_182.csv"
    runs = read_columns(path, "params", "tokens", "val_loss", "unique_tokens")
    return dict(zip(("N", "D", "L", "U"), runs, strict=True))


def read_gadre(laws: Path) -> list[dict[str, str]]:
    """Return the 104 runs of Gadre et al., one row each."""
    with (laws / "gadre_openlm" / "gadre_openlm_104.csv").open() as file:
        return list(csv.DictReader(file))


def read_gadre_fit_points(laws: Path, dataset: str) -> list[dict[str, str]]:
    """Return the five small runs fitted by Gadre et al.: D/N = 20 for four sizes, 320 for the smallest."""
    return [
        row
        for row in read_gadre(laws)
        if row["dataset_name"] == dataset
        and (
            float(row["tok_mult"]) == 20
            and row["model_name"].split("_")[0] in ("d=96", "d=512", "d=576", "d=1024")
            or float(row["tok_mult"]) == 320
            and row["model_name"].startswith("d=96_")
        )
    ]


def to_arrays(rows: list[dict[str, str]], *names: str) -> list[np.ndarray]:
    """Return cells of rows as numbers, one array per name."""
    return [np.array([float(row[name]) for row in rows]) for name in names]
