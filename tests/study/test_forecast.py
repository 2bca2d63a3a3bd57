"""Sealed forecasts: what is stored, what is refused, and how they are scored."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from megatron.study.seal import seal_runs
from tests.study.blind_study import true_loss, write_results, write_study_file

from megatron.laws.fit import fit_law
from megatron.study.forecast import (
    CROSSING,
    FORECASTS,
    LEVELS,
    ForecastOutcome,
    calibrate,
    check_sealed_runs,
    load_forecasts,
    make_forecast,
    score_runs,
    seal_forecasts,
    write_forecast_table,
)
from megatron.study.ladder import PlannedRun, StudyPlan, expand_grids, read_study_plan
from megatron.study.table import read_runs

LAW_RUNS = [(n, d) for n in (1e4, 3e4, 1e5, 3e5, 1e6) for d in (1e6, 4e6, 1.6e7, 6.4e7)]
HELD_OUT = "  - {sizes: [w64, w96], train_flops: [2.0e+12], held_out: true}\n"


@pytest.fixture(scope="module")
def law_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a law of runs of the known law, whose intervals come from its bootstrap."""
    rng = np.random.default_rng(0)
    N, D = np.array(LAW_RUNS).T
    L = true_loss(N, D) * np.exp(0.003 * rng.standard_normal(len(N)))
    path = tmp_path_factory.mktemp("law") / "law.json"
    law = fit_law(N, D, L, n_bootstrap=60)
    dataclasses.replace(law, filter={"objective": "autoregressive"}, table={"sha256": "ab" * 32}).save(path)
    return path


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    """Return a study with two held-out runs; no run has been started."""
    path = write_study_file(tmp_path)
    text = path.read_text()
    path.write_text(text[: text.index("blind:")] + HELD_OUT)
    return path


@pytest.fixture
def study(study_file: Path) -> StudyPlan:
    plan = read_study_plan(study_file)
    plan.save()
    return plan


def held_out_runs(study: StudyPlan) -> list[PlannedRun]:
    return [run for run in expand_grids(study) if run.held_out]


def make_crossing(name: str = "crossing-131k", **changes: object):
    values = {
        "name": name, "quantity": CROSSING, "objective": "", "identity": "",
        "N": None, "D": None, "U": 131072.0,
        "predicted": 4e13, "intervals": ((3e13, 5e13), (2.5e13, 6e13), (2e13, 8e13)), "method": "power law",
        "law": "crossings.json", "law_sha256": "cd" * 32, "data_sha256": "",
    }  # fmt: skip
    return make_forecast(**values | changes)


def test_forecasts_of_held_out_runs_are_those_of_the_law_at_three_levels(study, law_path) -> None:
    from megatron.laws.law import Law

    sealed = seal_runs(study, law_path)
    assert [f.name for f in sealed] == [run.folder.name for run in held_out_runs(study)]
    law = Law.load(law_path)
    for forecast, run in zip(sealed, held_out_runs(study), strict=True):
        assert (run.plan.n_params, run.plan.train_tokens) == (forecast.N, forecast.D)
        assert forecast.identity == run.plan.identity
        assert forecast.data_sha256 == "ab" * 32
        for level in LEVELS:
            value, low, high = law.predict(forecast.N, forecast.D, level=level)
            assert forecast.predicted == pytest.approx(float(value))
            assert forecast.interval(level) == pytest.approx((float(low), float(high)))
    ends = [forecast.interval(level) for level in LEVELS]
    assert ends[0][0] > ends[1][0] > ends[2][0] and ends[0][1] < ends[1][1] < ends[2][1]
    assert load_forecasts(study.directory) == sorted(sealed, key=lambda f: f.name)


def test_a_sealed_forecast_is_scored_after_its_run(study, law_path) -> None:
    seal_runs(study, law_path)
    assert [o.measured for o in score_runs(study.directory, read_rows(study))] == [None, None]
    write_results(held_out_runs(study), seed=1)
    outcomes = score_runs(study.directory, read_rows(study))
    losses = {
        run.folder.name: json.loads((run.folder / "result.json").read_text())["loss"]
        for run in held_out_runs(study)
    }
    assert {o.forecast.name: o.measured for o in outcomes} == losses
    assert all(o.in_order for o in outcomes)
    for outcome in outcomes:
        for level in LEVELS:
            low, high = outcome.forecast.interval(level)
            assert outcome.inside(level) == (low <= losses[outcome.forecast.name] <= high)
    table = write_forecast_table(outcomes, study.directory).read_text().splitlines()
    assert len(table) == 3 and table[0].startswith("name,quantity,predicted,low_0.5,high_0.5")


def read_rows(study: StudyPlan):
    (study.directory / "runs").mkdir(exist_ok=True)
    return read_runs(study.directory)


def test_the_calibration_counts_only_runs_that_came_after_their_forecast(study, law_path) -> None:
    early, late = held_out_runs(study)
    seal_runs(study, law_path, late.config.name)
    seal_runs(study, law_path, early.config.name)
    write_results([early, late])
    for path in early.folder.iterdir():
        os.utime(path, (1, 1))  # the files of one run are older than its forecast
    outcomes = score_runs(study.directory, read_rows(study))
    assert calibrate(outcomes).n_scored == 1
    assert {o.forecast.name: o.in_order for o in outcomes} == {
        early.folder.name: False,
        late.folder.name: True,
    }


def test_the_counts_are_those_of_the_intervals() -> None:
    forecast = make_crossing()
    inside = [4e13, 2.6e13, 2.1e13, 1e13]  # in all three, in two, in the widest only, in none
    outcomes = [ForecastOutcome(forecast=forecast, measured=value) for value in (*inside, float("nan"), None)]
    calibration = calibrate(outcomes)
    assert (calibration.n_scored, calibration.n_inside) == (4, (1, 2, 3))
    assert calibration.sentence == (
        "Of 4 scored forecasts, inside the 50 % interval 1 (2.0 expected), "
        "the 80 % interval 2 (3.2 expected), "
        "the 95 % interval 3 (3.8 expected)."
    )
    assert calibrate([]).sentence == "No forecast has been scored."


def test_a_forecast_is_never_replaced_and_none_of_a_batch_is_stored_if_one_is_refused(study) -> None:
    seal_forecasts(study.directory, [make_crossing()])
    path = study.directory / FORECASTS / "crossing-131k.json"
    before = path.read_bytes()
    seal_forecasts(study.directory, [make_crossing()])  # the same numbers: nothing is written
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match="never replaced"):
        seal_forecasts(study.directory, [make_crossing("new"), make_crossing(predicted=4.1e13)])
    assert [p.name for p in (study.directory / FORECASTS).iterdir()] == ["crossing-131k.json"]


def test_a_run_that_was_started_is_not_predicted(study, law_path) -> None:
    run, other = held_out_runs(study)
    write_results([run])
    with pytest.raises(ValueError, match="has been started"):
        seal_runs(study, law_path, run.config.name)
    assert [f.name for f in seal_runs(study, law_path)] == [other.folder.name]
    with pytest.raises(ValueError, match="no held-out run"):
        seal_runs(study, law_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c | {"predicted": c["predicted"] * 1.01},
        lambda c: c | {"intervals": c["intervals"][:2]},
        lambda c: c | {"intervals": [[2.0, 1.0]] * 3},
        lambda c: c | {"predicted": float("nan")},
        lambda c: c | {"name": "../escape"},
        lambda c: c | {"time": "2026-01-01T00:00:00"},
        lambda c: c | {"quantity": "profit"},
        lambda c: {k: v for k, v in c.items() if k != "sha256"},
        lambda c: [c],
    ],
)
def test_an_edited_forecast_is_refused_by_every_reader(study, change) -> None:
    (path,) = seal_forecasts(study.directory, [make_crossing()])
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    for read in (load_forecasts, lambda d: check_sealed_runs(d, []), lambda d: score_runs(d, [])):
        with pytest.raises(ValueError, match=r"crossing-131k\.json: got"):
            read(study.directory)


def test_the_sweep_refuses_a_study_that_lost_a_sealed_run(study, study_file, law_path, root) -> None:
    tool = [sys.executable, str(root / "tools" / "predict.py"), str(law_path), "--seal", str(study_file)]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("95 % [") == 2, done.stderr
    sweep = [sys.executable, str(root / "tools" / "sweep.py"), str(study_file), "seed=1"]
    refused = subprocess.run(sweep, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1 and "sealed for a run that the study no longer contains" in refused.stderr
    write_results(held_out_runs(study), seed=1)
    collect = [sys.executable, str(root / "tools" / "collect.py"), str(study.directory)]
    collected = subprocess.run(collect, capture_output=True, text=True, timeout=120)
    assert collected.returncode == 0, collected.stderr
    assert "2 sealed forecasts. Of 2 scored forecasts, inside the 50 % interval" in collected.stdout
