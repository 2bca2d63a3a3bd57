"""The blind check: what is stored, in which order, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.study.blind import check_blind, predict_blind
from megatron.study.blind_record import BLIND, load_blind
from megatron.study.study_frontier import read_study_runs

from megatron.report.study_data import read_study
from megatron.study.ladder import PlannedRun, StudyPlan, expand_grids, expand_study, read_study_plan
from megatron.study.table import read_runs
from tests.study.blind_study import (
    E,
    true_loss,
    write_finished_study,
    write_result,
    write_results,
    write_study_file,
)


@pytest.fixture
def study(tmp_path: Path) -> StudyPlan:
    return write_finished_study(tmp_path)


def blind_run(study: StudyPlan) -> PlannedRun:
    (run,) = [run for run in expand_study(study) if run.held_out]
    return run


def test_the_run_is_4_times_the_largest_budget_at_the_candidate_nearest_to_the_best_size(study) -> None:
    blind = predict_blind(study.directory)
    run = blind_run(study)
    assert blind.budget == 4 * 6e11
    assert run.plan.train_flops == blind.C == pytest.approx(2.4e12, rel=0.01)
    assert (run.plan.identity, run.folder.name) == (blind.identity, blind.run)
    assert (run.plan.n_params, run.plan.train_tokens) == (blind.N, blind.D)
    sizes = {r.plan.size: r.plan.n_params for r in expand_grids(study)}
    nearest = min(study.blind.sizes[:3], key=lambda size: abs(1 - sizes[size] / blind.N_optimum))
    assert blind.size == nearest == "w96"
    low, high = blind.N_optimum_interval
    assert low < blind.N_optimum < high


def test_prediction_and_result_of_a_known_law_agree(study) -> None:
    blind = predict_blind(study.directory)
    assert check_blind(study.directory).measured is None
    assert "not trained yet" in check_blind(study.directory).summary
    write_results([blind_run(study)], seed=3)
    outcome = check_blind(study.directory)
    loss = json.loads((study.directory / "runs" / blind.run / "result.json").read_text())["loss"]
    assert outcome.measured == loss == pytest.approx(true_loss(blind.N, blind.D), rel=0.01)
    assert outcome.error_percent == pytest.approx(100 * (loss / blind.predicted - 1))
    assert abs(outcome.error_percent) < 1.5 and outcome.in_order
    assert outcome.inside == (blind.interval[0] <= loss <= blind.interval[1])
    page = read_study(study.directory)
    assert page.blind == outcome and page.blind.prediction == blind


def test_a_result_beyond_the_interval_is_reported_as_outside(study) -> None:
    blind = predict_blind(study.directory)
    write_result(blind_run(study), 2 * E)
    outcome = check_blind(study.directory)
    assert outcome.inside is False
    assert f"OUTSIDE, off by {100 * (2 * E / blind.predicted - 1):+.1f} %" in outcome.summary


def test_the_run_is_held_out_and_no_fit_takes_it(study) -> None:
    before = read_study_runs(study.directory)
    blind = predict_blind(study.directory)
    assert [run.plan.identity for run in expand_study(study) if run.held_out] == [blind.identity]
    rows = {row.identity: row for row in read_runs(study.directory)}
    assert (rows[blind.identity].status, rows[blind.identity].held_out) == ("missing", 1)
    write_results([blind_run(study)])
    after = read_study_runs(study.directory)
    assert (
        after.names == before.names and after.table["sha256"] == before.table["sha256"] == blind.rows_sha256
    )
    (study.directory / "study.yaml").write_text("grids: [")  # a study that cannot be expanded
    rows = {row.identity: row for row in read_runs(study.directory)}
    assert (rows[blind.identity].status, rows[blind.identity].held_out) == ("done", 1)


def test_a_prediction_of_the_same_rows_stays_to_the_byte(study) -> None:
    blind = predict_blind(study.directory)
    content = (study.directory / BLIND).read_bytes()
    write_results([blind_run(study)])
    assert predict_blind(study.directory) == predict_blind(study.directory, again=True) == blind
    assert (study.directory / BLIND).read_bytes() == content


def test_other_rows_replace_a_prediction_only_with_again_and_only_before_the_run(study) -> None:
    first = predict_blind(study.directory)
    write_results(expand_grids(study), seed=7)
    with pytest.raises(ValueError, match="has not been started. Use --again"):
        predict_blind(study.directory)
    second = predict_blind(study.directory, again=True)
    assert second.rows_sha256 != first.rows_sha256 and load_blind(study.directory) == second
    write_result(blind_run(study), 3.0)
    write_results(expand_grids(study), seed=8)
    with pytest.raises(ValueError, match="has been started .*Use another directory"):
        predict_blind(study.directory, again=True)
    assert load_blind(study.directory) == second


@pytest.mark.parametrize("name", ["plan.json", "metrics.jsonl", "result.json", "checkpoints/step.1"])
def test_a_run_that_was_started_is_not_predicted(study, name: str) -> None:
    blind = predict_blind(study.directory)
    (study.directory / BLIND).unlink()
    path = study.directory / "runs" / blind.run / name
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(ValueError, match=f"has been started \\({name.partition('/')[0]}\\)"):
        predict_blind(study.directory)
    assert not (study.directory / BLIND).exists()


def test_files_older_than_the_prediction_are_reported(study) -> None:
    blind = predict_blind(study.directory)
    run = blind_run(study)
    write_result(run, blind.predicted)
    assert check_blind(study.directory).in_order
    early = blind.created_at.timestamp() - 5
    os.utime(run.folder / "metrics.jsonl", (early, early))
    outcome = check_blind(study.directory)
    assert outcome.in_order is False and "NOT BLIND" in outcome.summary


def test_unfinished_runs_of_the_grids_refuse_a_prediction(study) -> None:
    run = expand_grids(study)[0]
    (run.folder / "result.json").unlink()
    with pytest.raises(ValueError, match="got 1 unfinished runs of the grids .*expected all 20 done"):
        predict_blind(study.directory)


def test_a_frontier_without_a_best_size_refuses_a_prediction(tmp_path: Path) -> None:
    study = write_finished_study(tmp_path)
    write_results(
        expand_grids(study), loss=lambda N, D: 3 + 1e4 / D
    )  # the smallest model is the best at all budgets
    with pytest.raises(ValueError, match="got no identified N"):
        predict_blind(study.directory)


def test_a_best_size_far_from_all_candidates_is_refused_with_the_size_to_add(tmp_path: Path) -> None:
    study = write_finished_study(tmp_path, "blind.sizes=[w24, w32]")
    with pytest.raises(
        ValueError, match=r"blind.sizes: got w24 \(17.0k\), w32 .* N\* = .* Add a size of about"
    ):
        predict_blind(study.directory)


def test_a_study_without_the_key_says_what_to_add(tmp_path: Path) -> None:
    study = write_finished_study(tmp_path, "blind=null")
    assert check_blind(study.directory) is None
    with pytest.raises(ValueError, match="no key 'blind'.*Add"):
        predict_blind(study.directory)


@pytest.mark.parametrize("key", ["predicted", "interval", "time", "identity", "N", "commit", "sha256"])
def test_a_file_that_was_edited_is_refused_by_every_reader(study, key: str) -> None:
    predict_blind(study.directory)
    path = study.directory / BLIND
    content = json.loads(path.read_text())
    edited = {
        "predicted": 3.0, "interval": [1.0, 9.0], "time": "2020-01-01T00:00:00+00:00", "identity": "ab",
        "N": 5, "commit": None, "sha256": "0" * 64,
    }  # fmt: skip
    path.write_text(json.dumps(content | {key: edited[key]}))
    for read in (load_blind, check_blind, predict_blind, read_runs, read_study):
        with pytest.raises(ValueError, match=r"blind.json: got fields with the sha256 .*was modified"):
            read(study.directory)
    with pytest.raises(ValueError, match="was modified"):
        expand_study(study)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "5", '{"sha256": "a"}', "[" * 100_000, '{"N": 1e400}', "\x00"]
)
def test_a_file_that_is_no_prediction_is_refused(study, text: str) -> None:
    (study.directory / BLIND).write_text(text)
    with pytest.raises(ValueError, match=r"blind.json: got an invalid prediction .*Restore the file"):
        load_blind(study.directory)


def test_a_prediction_of_another_study_is_refused(study, tmp_path: Path) -> None:
    predict_blind(study.directory)
    for word in ("seed=1", "run.optim.lr=0.5", "blind.lr=[0.5]", "blind.sizes=[w48]", "blind=null"):
        changed = read_study_plan(tmp_path / "study.in.yaml", [word] if word != "run.optim.lr=0.5" else [
            word, "blind.lr=null",
        ])  # fmt: skip
        with pytest.raises(ValueError, match="blind.json: got a prediction of .*directory="):
            expand_study(changed)


def test_the_seed_of_a_study_is_added_to_every_seed(tmp_path: Path) -> None:
    path = write_study_file(tmp_path)
    seeds = [
        sorted(r.plan.seed for r in expand_study(read_study_plan(path, words))) for words in ([], ["seed=10"])
    ]
    assert seeds[1] == [10 + seed for seed in seeds[0]] and set(seeds[0]) == {0, 1, 2}
    identities = [
        {r.plan.identity for r in expand_study(read_study_plan(path, w))} for w in ([], ["seed=10"])
    ]
    assert not identities[0] & identities[1]
    study = write_finished_study(tmp_path, "seed=10", "blind.seed=2")
    assert predict_blind(study.directory).seed == blind_run(study).plan.seed == 12
    saved = read_study_plan(study.directory / "study.yaml")
    assert saved == study


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("seed=a", "seed: got 'a', expected an integer"),
        ("seed=1.5", "seed: got 1.5"),
        ("seed=true", "seed: got True"),
        ("blind=5", "blind"),
        ("blind.sizes=null", "blind.sizes: got None, expected a list"),
        ("blind.sizes=[]", "blind.sizes: got [], expected a list"),
        ("blind.compute=1.9", "blind.compute: got 1.9, expected 2 to 8 times"),
        ("blind.compute=9", "blind.compute: got 9"),
        ("blind.compute=x", "blind.compute: got 'x'"),
        ("blind.compute=true", "blind.compute: got True"),
        ("blind.objective=ar", "blind.objective: got 'ar', expected autoregressive or masked_diffusion"),
        ("blind.objective=[a]", "blind.objective: got"),
        ("blind.flops_convention=palm", "blind.flops_convention: got 'palm', expected exact or 6nd"),
        ("blind.lr=[0.1, 0.2]", "blind.lr: got 2 rules, expected one"),
        ("blind.lr=0.1", "blind.lr: got 0.1, expected a list"),
        ("blind.run=3", "blind.run: got 3"),
        ("blind.seed=x", "blind.seed: got 'x', expected int"),
        ("blind.siz=[a]", "siz"),
    ],
)
def test_a_wrong_value_is_refused_when_the_study_is_read(tmp_path: Path, word: str, sentence: str) -> None:
    path = write_study_file(tmp_path)
    with pytest.raises(ValueError) as raised:
        read_study_plan(path, [word])
    assert sentence in str(raised.value) and "\n" not in str(raised.value)


def test_a_candidate_that_cannot_be_trained_is_refused_before_any_run(tmp_path: Path) -> None:
    path = write_study_file(tmp_path)
    with pytest.raises(ValueError, match="got an unknown size 'w47'"):
        expand_study(read_study_plan(path, ["blind.sizes=[w48, w47]"]))
    with pytest.raises(
        ValueError, match="blind.objective: got masked_diffusion, expected an objective that a grid"
    ):
        expand_study(read_study_plan(path, ["blind.objective=masked_diffusion"]))


def test_the_command_predicts_once_checks_and_prints_at_most_100_columns(root, study) -> None:
    def fit(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(root / "tools" / "fit_frontier.py"), str(study.directory), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    unpredicted = fit("--check")
    assert unpredicted.returncode == 1 and "--predict before training the blind run" in unpredicted.stderr
    predicted = fit("--predict")
    assert predicted.returncode == 0, predicted.stderr
    table = predicted.stdout.splitlines()[1:9]
    assert "blind check" in predicted.stdout and "2.40e+12" in predicted.stdout
    assert all(len(line) <= 100 for line in table)
    assert fit("--check").returncode == 1
    write_results([blind_run(study)], seed=3)
    checked = fit("--check")
    assert checked.returncode == 0 and checked.stdout == check_blind(study.directory).summary + "\n"
    law = json.loads((study.directory / "compute_law.json").read_text())
    assert law["table"]["sha256"] == load_blind(study.directory).rows_sha256
    assert law["n_runs"] == 20 and law["identified"]
