"""law.json with fields of wrong types is refused before anything is computed from it."""

import json
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.laws.law import Law
from megatron.laws.law_fields import FIELDS

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
        ("text_error", {"loss_se": 0.1}),
        ("text_error", {"loss_se": 0.1, "relative": -0.1}),
        ("interval", {"level": 0.95, "n_units": 0}),
        ("n_runs", [15]),
        ("ranges", {"N": [1.0]}),
        ("interval", {"level": 2}),
        ("interval", {"level": 0.95, "n_bootstrap": [3]}),
        ("warnings", "few runs"),
        ("form", ["chinchilla"]),
        ("residual", "bits"),
        ("filter", []),
    ],
)
def test_a_value_of_a_wrong_type_is_named(tmp_path: Path, key: str, value: Any) -> None:
    stored = synthetic["make_law"](np.random.default_rng(0), n_bootstrap=3)
    (tmp_path / "law.json").write_text(json.dumps(stored))
    assert Law.load(tmp_path / "law.json").n_replicates() == 3
    (tmp_path / "law.json").write_text(json.dumps(stored | {key: value}))
    with pytest.raises(ValueError, match=rf"law\.json: not a law \({key}: got .*, expected "):
        Law.load(tmp_path / "law.json")


def test_every_field_of_a_law_has_a_check() -> None:
    assert set(FIELDS) == {field.name for field in fields(Law)}
