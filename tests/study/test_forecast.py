"""Sealed forecasts: what is stored, what is refused, how the order is proven, and how they are scored."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from megatron.laws.fit import fit_law
from megatron.laws.law import Law
from megatron.laws.prediction import predict_run
from megatron.study.forecast import (
    CROSSING,
    FORECASTS,
    LEVELS,
    SEALS,
    describe_calibration,
    describe_outcome,
    make_forecast,
    read_forecasts,
    seal_forecasts,
    write_forecast_table,
)
from megatron.study.frontier import fit_frontier, read_study_runs
from megatron.study.ladder import (
    PlannedRun,
    StudyPlan,
    check_sealed_runs,
    expand_listed,
    expand_study,
    plan_candidates,
    read_study_plan,
)
from megatron.study.sealing import seal_best, seal_runs
from megatron.study.table import read_runs
from tests.laws.surface_runs import E
from tests.study.forecast_study import (
    BUDGET,
    score,
    true_loss,
    write_finished_study,
    write_result,
    write_results,
    write_study_file,
)
from tests.tool_modules import Cli

pytestmark = pytest.mark.usefixtures("plan_once")
HELD_OUT = "  - {size: [w64, w96], flops: 2.0e+12, held_out: true}\n"


@pytest.fixture(scope="module")
def law_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a law of runs of the known law, whose intervals come from its bootstrap."""
    N, D = (a.ravel() for a in np.meshgrid(np.geomspace(1e4, 1e6, 5), np.geomspace(1e6, 6.4e7, 4)))
    L = true_loss(N, D) * np.exp(0.003 * np.random.default_rng(0).standard_normal(20))
    path = tmp_path_factory.mktemp("law") / "law.json"
    law = fit_law(N, D, L, n_bootstrap=60)
    dataclasses.replace(law, filter={"objective": "autoregressive"}, table={"sha256": "ab" * 32}).save(path)
    return path


@pytest.fixture
def study(tmp_path: Path) -> StudyPlan:
    """Return a study with two held-out runs; no run has been started."""
    path = write_study_file(tmp_path)
    text = path.read_text()
    path.write_text(text[: text.index("  - {size: best")] + HELD_OUT)
    plan = read_study_plan(path)
    plan.save()
    (plan.directory / "runs").mkdir()
    return plan


@pytest.fixture
def finished(tmp_path: Path) -> StudyPlan:
    """Return a study whose listed runs are finished, with a run whose size the law chooses."""
    return write_finished_study(tmp_path)


def held_out_runs(study: StudyPlan) -> list[PlannedRun]:
    return [run for run in expand_study(study) if run.held_out]


def make_crossing(name: str = "crossing-131k", **changes: object):
    values = {
        "name": name, "quantity": CROSSING, "objective": "", "identity": "",
        "N": None, "D": None, "U": 131072.0,
        "predicted": 4e13, "intervals": ((3e13, 5e13), (2.5e13, 6e13), (2e13, 8e13)), "method": "power law",
        "law": "crossings.json", "law_sha256": "cd" * 32, "data_sha256": "", "study": "name: x",
        "runs": {"ab": 0},
    }  # fmt: skip
    return make_forecast(**values | changes)


def test_forecasts_of_held_out_runs_are_those_of_the_law_and_scored_after_them(study, law_path) -> None:
    sealed = seal_runs(study, law_path)
    assert [f.name for f in sealed] == [run.folder.name for run in held_out_runs(study)]
    law = Law.load(law_path)
    for forecast, run in zip(sealed, held_out_runs(study), strict=True):
        assert (run.plan.n_params, run.plan.train_tokens) == (forecast.N, forecast.D)
        assert forecast.study == study.text() and forecast.runs == {run.plan.identity: 1}
        for level in LEVELS:
            expected = predict_run(law, forecast.N, forecast.D, None, level)
            assert forecast.predicted == pytest.approx(expected.loss)
            assert forecast.intervals[LEVELS.index(level)] == pytest.approx(expected.predictive)
    assert read_forecasts(study.directory) == sorted(sealed, key=lambda f: f.name)
    # and they are scored after their runs
    waiting = score(study.directory)
    assert waiting[["measured", "inside_0.95"]].isna().all(axis=None) and list(waiting["order"]) == ["", ""]
    write_results(held_out_runs(study), seed=1)
    outcomes = score(study.directory)
    runs = sorted(held_out_runs(study), key=lambda r: r.folder.name)
    for (_, outcome), run in zip(outcomes.iterrows(), runs, strict=True):
        loss = json.loads((run.folder / "result.json").read_text())["loss"]
        assert (outcome["measured"], outcome["measured_se"], outcome["order"]) == (loss, 0.01, "before")
        for level in LEVELS:
            is_inside = outcome[f"low_{level:g}"] <= loss <= outcome[f"high_{level:g}"]
            assert outcome[f"inside_{level:g}"] == is_inside
    lines = write_forecast_table(outcomes, study.directory).read_text().splitlines()
    assert len(lines) == 3 and lines[0].startswith("name,quantity,predicted,low_0.5,high_0.5")


def test_the_order_is_proven_by_the_hash_in_the_folder_of_the_run_and_not_by_its_files_times(
    study, law_path
) -> None:
    early, late = held_out_runs(study)
    seal_runs(study, law_path, late.config.name)
    seal_runs(study, law_path, early.config.name)
    write_results([early, late])
    path = early.folder / SEALS
    hashes = json.loads(path.read_text())["sha256"]
    sealed = next(f.sha256 for f in read_forecasts(study.directory) if f.name == early.folder.name)
    # a run that was started when its forecast did not exist yet
    path.write_text(json.dumps({"sha256": [sha for sha in hashes if sha != sealed]}))
    outcomes = score(study.directory)
    rows = {row["name"]: row for _, row in outcomes.iterrows()}
    assert [rows[run.folder.name]["order"] for run in (early, late)] == ["after", "before"]
    assert describe_calibration(outcomes).startswith("Of 1 scored forecast, inside")
    assert "NOT BLIND" in describe_outcome(rows[early.folder.name])
    path.unlink()
    assert set(score(study.directory)["order"]) == {"unknown", "before"}


def test_the_counts_are_those_of_the_intervals() -> None:
    # in all three intervals, in two, in the widest only, in none, and not scored
    counts = {"inside_0.5": [1, 0, 0, 0, None], "inside_0.8": [1, 1, 0, 0, None]}
    outcomes = pd.DataFrame(counts | {"inside_0.95": [1, 1, 1, 0, None]}, dtype="Int64")
    assert describe_calibration(outcomes) == (
        "Of 4 scored forecasts, inside the 50 % interval 1 (2 expected), "
        "the 80 % interval 2 (3.2 expected), "
        "the 95 % interval 3 (3.8 expected)."
    )
    assert describe_calibration(outcomes.tail(1)) == "No forecast has been scored."


def test_a_forecast_is_never_replaced_and_none_of_a_batch_is_stored_if_one_is_refused(study) -> None:
    seal_forecasts(study.directory, [make_crossing()])
    path = study.directory / FORECASTS / "crossing-131k.json"
    before = path.read_bytes()
    seal_forecasts(study.directory, [make_crossing(study="name: y")])  # the same numbers: nothing is written
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match="never replaced"):
        seal_forecasts(study.directory, [make_crossing("new"), make_crossing(predicted=4.1e13)])
    assert [p.name for p in (study.directory / FORECASTS).glob("*.json")] == ["crossing-131k.json"]


def test_a_run_that_was_started_is_not_predicted(study, law_path) -> None:
    run, other = held_out_runs(study)
    write_results([run])
    with pytest.raises(ValueError, match="has been started"):
        seal_runs(study, law_path, run.config.name)
    assert [f.name for f in seal_runs(study, law_path)] == [other.folder.name]
    with pytest.raises(ValueError, match="no held-out run"):
        seal_runs(study, law_path)


def test_a_file_that_was_edited_or_is_no_forecast_is_refused_by_every_reader(study) -> None:
    seal_forecasts(study.directory, [make_crossing()])
    path = study.directory / FORECASTS / "crossing-131k.json"
    content = json.loads(path.read_text())
    changes = [
        {"predicted": content["predicted"] * 1.01}, {"intervals": content["intervals"][:2]},
        {"predicted": float("nan")}, {"name": "../escape"}, {"time": "2026-01-01T00:00:00"},
        {"study": content["study"] + " "}, {"runs": {}},
    ]  # fmt: skip
    edited = [content | change for change in changes]
    for removed in (("study", "runs"), ("sha256",)):
        edited.append({key: value for key, value in content.items() if key not in removed})
    others = ["", "[]", "{", "5", '{"sha256": "a"}', "[" * 100_000, "\x00", json.dumps([content])]
    for text in [*map(json.dumps, edited), *others]:
        path.write_text(text)
        with pytest.raises(ValueError, match=r"crossing-131k\.json: got .*Restore the file"):
            read_forecasts(study.directory)
    with pytest.raises(ValueError, match=r"crossing-131k\.json: got .*Restore the file"):
        expand_study(study)


def test_the_sweep_refuses_a_study_that_lost_a_sealed_run(cli: Cli, study, law_path) -> None:
    path = study.directory.parent / "study.in.yaml"
    assert cli("predict", law_path, "--seal", path).output.count("95 % [") == 2
    check_sealed_runs(study, expand_study(study))
    changed = read_study_plan(path, ["seed=1"])
    with pytest.raises(ValueError, match="a forecast of runs that the study no longer contains"):
        check_sealed_runs(changed, expand_study(changed))
    write_results(held_out_runs(study), seed=1)
    printed = cli("collect", study.directory).output
    assert "2 sealed forecasts. Of 2 scored forecasts, inside the 50 % interval" in printed


def test_the_law_chooses_the_size_nearest_to_its_optimum_and_its_forecast_agrees(finished) -> None:
    folder, before = finished.directory, read_study_runs(finished.directory)
    forecast = seal_best(folder)
    (run,) = held_out_runs(finished)
    assert (run.plan.identity, run.folder.name) == (forecast.identity, forecast.name)
    assert run.plan.train_flops == pytest.approx(BUDGET, rel=0.01)
    N = fit_frontier(before).optimum(BUDGET).N
    sizes = [candidate.plan.n_params for candidate in plan_candidates(finished)]
    assert min(sizes, key=lambda n: abs(np.log(n / N))) == forecast.N
    assert run.plan.size == "w96" and run.branch is None
    # the run is held out, and its loss agrees with the known law
    table = read_runs(folder).set_index("identity")
    assert tuple(table.loc[forecast.identity, ["status", "held_out"]]) == ("missing", 1)
    write_results([run], seed=3)
    ((_, outcome),) = score(folder).iterrows()
    assert outcome["measured"] == pytest.approx(true_loss(forecast.N, forecast.D), rel=0.01)
    assert abs(outcome["measured"] / forecast.predicted - 1) < 0.015 and outcome["order"] == "before"
    assert read_study_runs(folder).table == before.table
    # the same runs give the same forecast, also after its run, and other data do not replace it
    path = folder / FORECASTS / f"{forecast.name}.json"
    content = path.read_bytes()
    assert seal_best(folder) == forecast
    write_results(expand_listed(finished), seed=7)
    with pytest.raises(ValueError, match="never replaced. Use another study directory"):
        seal_best(folder)
    assert path.read_bytes() == content
    write_result(run, 2 * E)
    off = 100 * (2 * E / forecast.predicted - 1)
    assert f"OUTSIDE, off by {off:+.1f} %" in describe_outcome(score(folder).iloc[0])


def test_a_chosen_run_that_was_started_is_not_predicted(finished) -> None:
    run = next(run for run in plan_candidates(finished) if run.plan.size == "w96")
    for name in ("plan.json", "metrics.jsonl", "result.json", "checkpoints/step.1"):
        path = run.folder / name
        path.parent.mkdir(parents=True)
        path.write_text("{}")
        with pytest.raises(ValueError, match=f"has been started \\({name.partition('/')[0]}\\)"):
            seal_best(finished.directory)
        assert not read_forecasts(finished.directory)
        shutil.rmtree(run.folder)


def test_a_choice_that_the_study_does_not_support_is_refused_with_the_fix(finished, monkeypatch) -> None:
    def check_refusal(sentence: str) -> None:
        with pytest.raises(ValueError, match=sentence):
            seal_best(finished.directory)

    listed = expand_listed(finished)
    (listed[0].folder / "result.json").unlink()
    check_refusal("got 1 unfinished runs .*expected all 20 done")
    # the smallest model is the best at all budgets
    write_results(listed, loss=lambda N, D: 3 + 1e4 / D)
    check_refusal("got no identified N")
    write_results(listed)
    monkeypatch.setattr("megatron.study.sealing.MAX_SIZE_RATIO", 1.0001)
    check_refusal(r"sizes: got w16 .* N\* = .* Add a size of about")
    dataclasses.replace(finished, cells=finished.cells[:-1]).save()
    check_refusal("got no cell of size best.*Add")
    with pytest.raises(FileNotFoundError, match=r"study\.yaml"):
        seal_best(finished.directory.parent)


def test_a_candidate_that_cannot_be_trained_is_refused_before_any_run(tmp_path: Path) -> None:
    path = write_study_file(tmp_path)
    with pytest.raises(ValueError, match="w24: .*n_heads"):
        expand_study(read_study_plan(path, ["sizes.w24.n_heads=5"]))


def test_a_study_may_widen_its_forecasts_by_a_larger_drift(cli: Cli, tmp_path: Path) -> None:
    ratios, tables = [], []
    for name, words in (("narrow", ()), ("wide", ("slope_drift=0.06",))):
        (tmp_path / name).mkdir()
        study = write_finished_study(tmp_path / name, *words)
        low, high = seal_best(study.directory).intervals[-1]
        ratios.append(high / low)
        tables.append(cli("frontier", study.directory).output.splitlines())
    assert ratios[1] > 1.02 * ratios[0]
    # inside the budgets the law is the same
    assert tables[0][2] == tables[1][2] and tables[0] != tables[1]
    with pytest.raises(ValueError, match="slope_drift: got 0"):
        write_finished_study(tmp_path, "slope_drift=0")


def test_the_seed_of_a_study_is_added_to_every_seed(tmp_path: Path) -> None:
    path = write_study_file(tmp_path)
    study = write_finished_study(tmp_path, "seed=10")
    seeds = [sorted(run.plan.seed for run in expand_listed(plan)) for plan in (read_study_plan(path), study)]
    assert seeds[1] == [10 + seed for seed in seeds[0]] and set(seeds[0]) == {0, 1, 2}
    seal_best(study.directory)
    assert held_out_runs(study)[0].plan.seed == 10
    assert read_study_plan(study.directory / "study.yaml") == study


def test_the_command_predicts_once_checks_and_prints_at_most_100_columns(cli: Cli, finished) -> None:
    folder = finished.directory
    assert "got no forecast of a run" in cli("frontier", folder, "--check", status=1).error
    printed = cli("frontier", folder, "--predict").output
    assert "2.40e+12" in printed and "forecast: autoregressive-w96" in printed
    assert all(len(line) <= 100 for line in printed.splitlines()[1:9])
    cli("frontier", folder, "--check", status=1)
    write_results(held_out_runs(finished), seed=3)
    checked = cli("frontier", folder, "--check").output
    assert checked == f"check: {describe_outcome(score(folder).iloc[0])}\n"
    law = json.loads((folder / "compute_law.json").read_text())
    assert law["table"]["sha256"] == read_forecasts(folder)[0].data_sha256
    assert law["n_runs"] == 20 and law["identified"]
