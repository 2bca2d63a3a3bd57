"""law.json and compute_law.json: values of wrong types are refused before anything is computed from them."""

import copy
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.laws.compute_law import ComputeLaw, fit_compute_law
from megatron.laws.fitting.frontier_form import CONSTANTS
from megatron.laws.fitting.noise import Trend
from megatron.laws.law import Law
from tests.laws.surface_runs import simulate_surface
from tests.report.synthetic_study import make_law

LAW = make_law(np.random.default_rng(0), n_bootstrap=3)
NOISE = {"sigma": 0.1, "dof": 10.0, "trend": asdict(Trend(1.0, 0.0, 1.0, 0.0, 2.0, 3.0, 4.0, 0.5))}
EXTRAPOLATION = {"growth": 0.1, "dof": 4.0, "compute": 1e20}
# keys of a law, and values of which each is refused
WRONG_IN_LAW: dict[str, list[Any]] = {
    "params.E": ["1.9", {}, 10**400],
    "params": [{"E": 1.0}],
    "replicates": [{"E": [1.0]}, dict.fromkeys(LAW["params"], 1.0)],
    "replicates.A": [[1.0, 2.0]],
    "noise": [{"dof": "x"}, {"sigma": 0.1}],
    "noise.trend.sigma": [-1.0],
    "noise.trend.slope": ["x"],
    "noise.trend.dof_centre": [0.0],
    "spread": [-1.0],
    "interval.n_units": [0],
    "interval.level": [2],
    "n_runs": [[15]],
    "ranges": [{"N": [1.0]}],
    "warnings": ["few runs"],
    "form": [["chinchilla"], "excess_params"],
    "residual": ["bits"],
    "extrapolation": [{"growth": 0.1}],
    "extrapolation.dof": [0.0],
    "extrapolation.compute": ["1e20"],
    "filter": [[]],
}
WRONG_IN_COMPUTE_LAW: dict[str, list[Any]] = {
    "params": [{"log_loss": 1.0}, *(dict.fromkeys(CONSTANTS, value) for value in (10**400, "1", -1.0))],
    "covariance": [[[0.0] * 7] * 6, [[None] * 7] * 7, 5],
    "centre": [0.0],
    "spread": [math.nan],
    "dof": [True, 10**12],
    "C": [[1e10], [0.0, 1e10]],
    "tokens": [{"a": 1}],
    "runs": [[[1]]],
    "lack_of_fit": [[], {"p_value": "x"}],
    "not_identified": [{"alpha": 5}],
    "table": [{"sha256": []}],
    "beyond": [{"edge": 1.0}, []],
    "beyond.weight": [[], [0.5], ["x"]],
    "beyond.covariance": [[[1e-4, 0.0]]],
}


def check_refusals(
    path: Path, load: Callable[[Path], object], wrong: dict[str, list[Any]], sentence: str
) -> None:
    """Check that each wrong value is refused in a file that is valid without it."""
    stored = json.loads(path.read_text())
    load(path)
    for key, value in ((key, value) for key, values in wrong.items() for value in values):
        section = changed = copy.deepcopy(stored)
        *sections, name = key.split(".")
        for part in sections:
            section = section[part]
        section[name] = value
        path.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=sentence.format(key=key.partition(".")[0])):
            load(path)


def test_a_law_with_a_value_of_a_wrong_type_is_refused_with_its_key(tmp_path: Path) -> None:
    path = tmp_path / "law.json"
    path.write_text(json.dumps(LAW | {"noise": NOISE, "extrapolation": EXTRAPOLATION}))
    check_refusals(path, Law.load, WRONG_IN_LAW, r"law\.json: not a law \({key}.* expected ")


def test_a_compute_law_with_a_value_of_a_wrong_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "compute_law.json"
    fit_compute_law(*simulate_surface(0.002, 0)).save(path)
    sentence = r"compute_law\.json: not a compute law .* Fit it again with scaling frontier"
    check_refusals(path, ComputeLaw.load, WRONG_IN_COMPUTE_LAW, sentence)


@pytest.mark.parametrize("kind", [Law, ComputeLaw])
def test_a_file_that_is_not_a_law_is_refused(tmp_path: Path, kind: type[Law] | type[ComputeLaw]) -> None:
    path = tmp_path / "law.json"
    with pytest.raises(FileNotFoundError, match="got no such file, expected a .* writes one"):
        kind.load(path)
    for text in ("", "[]", "{}", "null", "{", "[" * 100_000, "5"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"law\.json: not a "):
            kind.load(path)
