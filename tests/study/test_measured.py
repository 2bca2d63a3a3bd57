"""The measured crossover of a study from its files: forecasts for the next text, scores, tool and page."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from megatron.plan.run_dir import RESULT
from megatron.report.report import render_page
from megatron.report.study_data import read_study
from megatron.study.forecast import describe_calibration
from megatron.study.ladder import PlannedRun, StudyPlan, check_sealed_runs, expand_study, read_study_plan
from megatron.study.measured import measure_study
from megatron.study.sealing import seal_text
from megatron.study.table import read_runs, read_table, write_table
from tests.report.synthetic_study import edit_json
from tests.study.conftest import write_sidecar
from tests.study.forecast_study import score, write_result
from tests.tool_modules import Cli

pytestmark = pytest.mark.usefixtures("plan_once")
EXPONENT = 1.5
STUDY = """
name: crossing
directory: {folder}/study
run:
  dataset: {{path_train: {folder}/text, path_test: {folder}/text, seq_len: 64, batch_size: 4}}
  lr_scheduler: {{kind: wsd, warmup_iterations: 1}}
sizes:
  w16: {{d_model: 16, n_heads: 2, n_layers: 2}}
cells:
  - {{objective: autoregressive, size: w16, unique_tokens: {texts}, epochs: [2, 4, 8]}}
  - {{objective: masked_diffusion, size: w16, unique_tokens: {texts}, epochs: {epochs}}}
  - {{held_out: true, seeds: [7, 8, 9], objective: autoregressive, size: w16,
      unique_tokens: {texts}, epochs: [2, 4, 8]}}
  - {{held_out: true, seeds: [7, 8, 9], objective: masked_diffusion, size: w16,
      unique_tokens: {texts}, epochs: {epochs}}}
"""


EPOCHS = [16, 64, 256]
TEXTS = [16384, 32768, 65536]
NEXT = 131072


def read_plan(folder: Path, texts: list[int], epochs: list[int] = EPOCHS) -> StudyPlan:
    write_sidecar(folder / "text.json", 2_000_000_000, 64)
    path = folder / "study.in.yaml"
    path.write_text(STUDY.format(folder=folder, texts=texts, epochs=epochs))
    plan = read_study_plan(path)
    plan.save()
    return plan


def crossing_of(U: float) -> float:
    return 4e10 * (U / 16384) ** EXPONENT


def write_all(study: StudyPlan, unique: set[int] | None = None) -> list[PlannedRun]:
    """Write results whose curves cross at `crossing_of`, and return the runs."""
    rng = np.random.default_rng(0)
    runs = expand_study(study)
    for run in runs:
        plan = run.plan
        if unique is not None and plan.unique_tokens not in unique or run.folder.exists():
            continue
        loss = 5.0 - 0.1 * np.log(plan.unique_tokens / 16384)
        if plan.objective == "autoregressive":
            loss += 0.01 * abs(plan.epochs - 4)
        else:
            loss -= 0.2 * np.log(plan.train_flops / crossing_of(plan.unique_tokens))
        validation, test = loss + 0.002 * rng.standard_normal(2)
        write_result(run, validation, test_loss=test)
    return runs


def measure(folder: Path) -> pd.DataFrame:
    return score(folder).set_index("name")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_all(read_plan(tmp_path, TEXTS))
    return tmp_path / "study"


def test_crossings_and_their_exponent_are_those_of_the_runs(folder) -> None:
    measured, law = measure_study(read_runs(folder))
    assert [at.U for at in measured] == TEXTS
    for at in measured:
        assert crossing_of(at.U) == pytest.approx(at.C, rel=0.15)
        assert at.interval[0] < at.C < at.interval[1]
        assert at.first.n_seeds == 3 and at.first.is_fresh
    assert law is not None and law.exponent == pytest.approx(EXPONENT, abs=0.2)


def test_forecasts_for_the_next_text_are_sealed_before_it_and_scored_when_all_its_runs_ended(folder) -> None:
    with pytest.raises(ValueError, match="got no run on 131072 unique tokens"):
        seal_text(folder, NEXT)
    study = read_plan(folder.parent, [*TEXTS, NEXT])
    sealed = seal_text(folder, NEXT)
    assert {f.quantity for f in sealed} == {"best_loss", "crossing"} and len(sealed) == 3
    assert all(len(f.runs) == 6 * 4 and sum(f.runs.values()) == 6 * 3 for f in sealed)
    assert measure(folder)["measured"].isna().all()
    runs = write_all(study, {NEXT})
    outcomes = measure(folder)
    measured = outcomes["measured"]
    assert measured["crossing-131kunique"] == pytest.approx(crossing_of(NEXT), rel=0.15)
    assert outcomes.loc["crossing-131kunique", "inside_0.95"] and set(outcomes["order"]) == {"before"}
    least = measured["best_loss-autoregressive-131kunique"]
    assert least == pytest.approx(5.0 - 0.1 * np.log(8), abs=0.01)
    assert describe_calibration(outcomes).startswith("Of 3 scored forecasts")
    with pytest.raises(ValueError, match="has been started"):
        seal_text(folder, NEXT)
    # without a crossing the runs reach beyond the narrower intervals; if not beyond all, nothing is decided
    runs = [run for run in runs if run.plan.objective == "masked_diffusion"]
    for run in runs:
        if run.plan.unique_tokens == NEXT:
            edit_json(run.folder / RESULT, loss=6.0, test_loss=6.0)
    crossing = measure(folder).loc["crossing-131kunique"]
    decided = max(run.plan.train_flops for run in runs) > crossing["high_0.95"]
    assert crossing["measured"] == float("inf") if decided else np.isnan(crossing["measured"])


@pytest.mark.slow
def test_epochs_that_are_deleted_from_the_study_or_added_after_training_change_no_score(folder) -> None:
    study = read_plan(folder.parent, [*TEXTS, NEXT])
    seal_text(folder, NEXT)
    write_all(study, {NEXT})
    before = measure(folder)["measured"]
    shorter = read_plan(folder.parent, [*TEXTS, NEXT], EPOCHS[:2])
    assert measure(folder)["measured"].equals(before)
    with pytest.raises(ValueError, match="runs that the study no longer contains"):
        check_sealed_runs(shorter, expand_study(shorter))
    longer = read_plan(folder.parent, [*TEXTS, NEXT], [*EPOCHS, 512])
    write_all(longer, {NEXT})
    assert measure(folder)["measured"].equals(before)


@pytest.mark.slow
def test_the_tool_and_the_page_state_the_crossings(cli: Cli, folder: Path) -> None:
    def run(*words: object) -> list[str]:
        return cli("crossover", *words).output.splitlines()

    done = run(folder)
    assert sum("C_crit" in line for line in done) == 4 and "3 crossings" in done[3]
    stored = json.loads((folder / "crossover.json").read_text())
    assert [at["U"] for at in stored["crossovers"]] == TEXTS
    weaker = run(folder, "--without", "*-4ep-*")
    assert weaker[0].startswith("without 12 runs")
    with_all, without = (
        [float(n) for n in re.findall(r"C_crit ([0-9.e+]+) FLOPs", "\n".join(o))] for o in (done, weaker)
    )
    assert len(without) == 3 and all(a < b for a, b in zip(without, with_all, strict=True))
    assert json.loads((folder / "crossover.json").read_text()) == stored, "an answer of some runs was stored"
    assert run(write_table(read_runs(folder), folder.parent / "table.csv")) == done[:-1]
    refused = cli("crossover", folder, "--without", "*masked-input*", status=1)
    assert "match no autoregressive run" in refused.error
    read_plan(folder.parent, [*TEXTS, NEXT])
    assert sum("sha256" in line for line in run(folder, "--seal", NEXT)) == 3
    assert "<html" in render_page(read_study(folder))


def test_a_study_without_test_losses_is_refused(tmp_path) -> None:
    write_all(study := read_plan(tmp_path, [16384]))
    rows = read_runs(study.directory)
    with pytest.raises(ValueError, match="test loss"):
        measure_study(rows.assign(test_loss=np.nan))


def test_the_guide_states_the_measured_crossover_of_its_table(root: Path) -> None:
    folder = root / "examples_scaling" / "training"
    guide = (folder / "CROSSOVER.md").read_text()
    rows = read_table(folder / "crossover_cpu" / "table.csv")
    is_tuned = rows["run"].str.contains("masked-|masked8|drop") & (rows["objective"] == "autoregressive")
    plain = rows[~is_tuned]
    best, against_plain = measure_study(rows)[0], measure_study(plain)[0]
    for at, other in zip(best, against_plain, strict=True):
        cells = [f"{at.U:,.0f}"]
        for loss, error, C in (
            (at.first.loss, at.first.seed_se, at.first.C), (at.second.loss, at.second.seed_se, at.second.C),
        ):  # fmt: skip
            cells += [f"{loss:.3f} ± {error:.3f}", f"{C:.1e}".replace("e+", "e")]
        cells += [f"{at.gap:.3f} ± {at.gap_se:.3f}", f"{other.first.loss:.3f} ± {other.first.seed_se:.3f}"]
        crossing = "none" if other.C is None else f"{other.C:.1e}".replace("e+", "e")
        assert f"| {' | '.join(cells)} | {crossing} " in guide
