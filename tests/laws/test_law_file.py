"""law.json with fields of wrong types is refused before anything is computed from it."""

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.laws.law import Law

synthetic = runpy.run_path(str(Path(__file__).parents[1] / "report" / "synthetic_study.py"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("params", {"E": "1.9", "A": 120.0, "B": 900.0, "alpha": 0.33, "beta": 0.42}),
        ("params", {"E": {}, "A": 120.0, "B": 900.0, "alpha": 0.33, "beta": 0.42}),
        ("params", {"E": 10**400, "A": 120.0, "B": 900.0, "alpha": 0.33, "beta": 0.42}),
        ("replicates", {"E": [1.0]}),
        ("replicates", {"E": 1.0, "A": 1.0, "B": 1.0, "alpha": 1.0, "beta": 1.0}),
        ("replicates", {"E": [1.0], "A": [1.0, 2.0], "B": [1.0], "alpha": [1.0], "beta": [1.0]}),
        ("noise", {"dof": "x"}),
        ("noise", {"sigma": 0.1}),
        ("spread", -1.0),
        ("interval", {"level": 0.95, "n_units": 0}),
        ("n_runs", [15]),
        ("ranges", {"N": [1.0]}),
        ("interval", {"level": 2}),
        ("warnings", "few runs"),
        ("form", ["chinchilla"]),
        ("residual", "bits"),
        ("extrapolation", {"growth": 0.1, "dof": 0.0, "compute": 1e20}),
        ("extrapolation", {"growth": 0.1, "dof": 4.0, "compute": "1e20"}),
        ("extrapolation", {"growth": 0.1}),
        ("filter", []),
    ],
)
def test_a_value_of_a_wrong_type_is_named(tmp_path: Path, key: str, value: Any) -> None:
    stored = synthetic["make_law"](np.random.default_rng(0), n_bootstrap=3)
    (tmp_path / "law.json").write_text(json.dumps(stored))
    assert Law.load(tmp_path / "law.json").n_replicates() == 3
    (tmp_path / "law.json").write_text(json.dumps(stored | {key: value}))
    with pytest.raises(ValueError, match=rf"law\.json: not a law \({key}[.\w]*: got .*, expected "):
        Law.load(tmp_path / "law.json")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"form": "bounded"}, r"Pass its formula as a function, fit_law\(form=your_loss"),
        ({"form": "excess_params"}, r"Fit data_constrained with R_D fixed at 1e9"),
        ({"params": {"E": 1.0}}, "expected the constants of chinchilla"),
    ],
)
def test_a_law_that_is_no_longer_read_names_the_fix(tmp_path: Path, change: dict, sentence: str) -> None:
    stored = synthetic["make_law"](np.random.default_rng(0), n_bootstrap=3)
    (tmp_path / "law.json").write_text(json.dumps(stored | change))
    with pytest.raises(ValueError, match=sentence):
        Law.load(tmp_path / "law.json")


def test_fields_of_earlier_versions_are_ignored(tmp_path: Path) -> None:
    stored = synthetic["make_law"](np.random.default_rng(0), n_bootstrap=3)
    first, second = tmp_path / "law.json", tmp_path / "old.json"
    first.write_text(json.dumps(stored))
    second.write_text(json.dumps(stored | {"tied": {}, "priors": []}))
    assert Law.load(second) == Law.load(first)
