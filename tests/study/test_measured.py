"""The measured crossover of a study from its files: forecasts for the next text, scores, tool and page."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.plan.run_dir import METRICS, PLAN, RESULT
from megatron.report.report import render_page
from megatron.report.study_data import read_study
from megatron.study.forecast import calibrate
from megatron.study.ladder import StudyPlan, expand_study, read_study_plan
from megatron.study.measured import measure_study, score_forecasts, seal_next
from megatron.study.table import read_rows, read_runs, write_table

EXPONENT = 1.5
STUDY = """
name: crossing
directory: {folder}/study
run:
  dataset: {{path_train: {folder}/text, path_test: {folder}/text, seq_len: 64, batch_size: 4}}
  lr_scheduler: {{kind: wsd, warmup_iterations: 1}}
sizes:
  w16: {{d_model: 16, n_heads: 2, n_layers: 2}}
grids:
  - {{objectives: [autoregressive], sizes: [w16], unique_tokens: {texts}, epochs: [2, 4, 8], seeds: 2}}
  - {{objectives: [masked_diffusion], sizes: [w16], unique_tokens: {texts}, epochs: {epochs}, seeds: 2}}
  - {{held_out: true, seeds: [7, 8, 9], objectives: [autoregressive], sizes: [w16],
      unique_tokens: {texts}, epochs: [2, 4, 8]}}
  - {{held_out: true, seeds: [7, 8, 9], objectives: [masked_diffusion], sizes: [w16],
      unique_tokens: {texts}, epochs: {epochs}}}
"""


def read_plan(folder: Path, texts: list[int]) -> StudyPlan:
    sidecar = {"tokens": 2_000_000_000, "tokenizer": {"n_tokens": 64}, "sha256": {"bin": "aa", "idx": "bb"}}
    (folder / "text.json").write_text(json.dumps(sidecar))
    path = folder / "study.in.yaml"
    path.write_text(STUDY.format(folder=folder, texts=texts, epochs=[8, 16, 32, 64, 128, 256]))
    plan = read_study_plan(path)
    plan.save()
    return plan


def crossing_of(U: float) -> float:
    return 4e10 * (U / 16384) ** EXPONENT


def write_all(study: StudyPlan, unique: set[int] | None = None) -> None:
    """Write results in which diffusion reaches the least autoregressive loss at `crossing_of`."""
    rng = np.random.default_rng(0)
    for run in expand_study(study):
        plan = run.plan
        if unique is not None and plan.unique_tokens not in unique:
            continue
        if plan.objective == "autoregressive":
            loss = 5.0 - 0.1 * np.log(plan.unique_tokens / 16384) + 0.01 * abs(plan.epochs - 4)
        else:
            loss = 5.0 - 0.1 * np.log(plan.unique_tokens / 16384)
            loss -= 0.2 * np.log(plan.train_flops / crossing_of(plan.unique_tokens))
        run.folder.mkdir(parents=True)
        (run.folder / PLAN).write_text(json.dumps(plan.as_dict()))
        (run.folder / METRICS).write_text(json.dumps({"kind": "train", "step": plan.n_steps}) + "\n")
        validation, test = loss + 0.002 * rng.standard_normal(2)
        result = {
            "identity": plan.identity,
            "loss": validation,
            "test_loss": test,
            "loss_se": 0.01,
            "wall_s": 1.0,
        }
        (run.folder / RESULT).write_text(json.dumps(result))


TEXTS = [16384, 32768, 65536]


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
    assert law is not None and law.power.exponent == pytest.approx(EXPONENT, abs=0.2)


def test_forecasts_for_the_next_text_are_sealed_before_it_and_scored_when_all_its_runs_ended(folder) -> None:
    sealed = seal_next(folder, read_runs(folder), 131072)
    assert {f.quantity for f in sealed} == {"best_loss", "crossing"} and len(sealed) == 3
    study = read_plan(folder.parent, [*TEXTS, 131072])
    assert all(o.measured is None for o in score_forecasts(folder, read_runs(folder)))
    write_all(study, {131072})
    outcomes = score_forecasts(folder, read_runs(folder))
    by_name = {o.forecast.name: o for o in outcomes}
    crossing = by_name["crossing-131kunique"]
    assert crossing.measured == pytest.approx(crossing_of(131072), rel=0.15)
    assert crossing.inside(0.95) and all(o.in_order for o in outcomes)
    least = by_name["best_loss-autoregressive-131kunique"]
    assert least.measured == pytest.approx(5.0 - 0.1 * np.log(8), abs=0.01)
    assert calibrate(outcomes).n_scored == 3
    with pytest.raises(ValueError, match="has been started"):
        seal_next(folder, read_runs(folder), 131072)


def test_a_text_without_a_crossing_counts_as_beyond_the_intervals(folder) -> None:
    seal_next(folder, read_runs(folder), 131072)
    study = read_plan(folder.parent, [*TEXTS, 131072])
    write_all(study, {131072})
    for run in expand_study(study):
        if run.plan.unique_tokens == 131072 and run.plan.objective == "masked_diffusion":
            result = json.loads((run.folder / RESULT).read_text())
            (run.folder / RESULT).write_text(json.dumps(result | {"loss": 6.0, "test_loss": 6.0}))
    outcomes = {o.forecast.name: o for o in score_forecasts(folder, read_runs(folder))}
    crossing = outcomes["crossing-131kunique"]
    largest = max(row.train_flops for row in read_runs(folder) if row.objective == "masked_diffusion")
    # the runs reach beyond the narrower intervals; if not beyond all, nothing is decided
    decided = largest > crossing.forecast.interval(0.95)[1]
    assert crossing.measured == (float("inf") if decided else None)


def test_the_tool_and_the_page_state_the_crossings(folder, root) -> None:
    tool = [sys.executable, str(root / "tools" / "find_crossover.py"), str(folder)]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("C_crit") == 4 and "3 crossings" in done.stdout
    stored = json.loads((folder / "crossover.json").read_text())
    assert [at["U"] for at in stored["crossovers"]] == TEXTS
    weaker = subprocess.run([*tool, "--without", "*-4ep-*"], capture_output=True, text=True, timeout=120)
    assert weaker.returncode == 0 and "without 15 runs" in weaker.stdout, weaker.stderr
    with_all, without = (
        [float(n) for n in re.findall(r"C_crit ([0-9.e+]+) FLOPs", o.stdout)] for o in (done, weaker)
    )
    assert len(without) == 3 and all(a < b for a, b in zip(without, with_all, strict=True))
    assert json.loads((folder / "crossover.json").read_text()) == stored, "an answer of some runs was stored"
    table = write_table(read_runs(folder), folder.parent / "table.csv")
    from_table = subprocess.run([*tool[:2], str(table)], capture_output=True, text=True, timeout=120)
    assert from_table.stdout.splitlines() == done.stdout.splitlines()[:-1], from_table.stderr
    absent = subprocess.run(
        [*tool, "--without", "*masked-input*"], capture_output=True, text=True, timeout=120
    )
    assert absent.returncode == 1 and "match no autoregressive run" in absent.stderr
    sealed = subprocess.run([*tool, "--seal", "131072"], capture_output=True, text=True, timeout=120)
    assert sealed.returncode == 0 and sealed.stdout.count("sha256") == 3, sealed.stderr
    page = render_page(read_study(folder))
    assert "Masked diffusion is measured to pass autoregression at" in page
    assert "Sealed forecasts" in page and "No forecast has been scored." in page


def test_a_study_without_test_losses_is_refused(tmp_path) -> None:
    study = read_plan(tmp_path, [16384])
    write_all(study)
    for run in expand_study(study):
        result = json.loads((run.folder / RESULT).read_text())
        del result["test_loss"]
        (run.folder / RESULT).write_text(json.dumps(result))
    with pytest.raises(ValueError, match="test loss"):
        measure_study(read_runs(study.directory))


def test_the_guide_states_the_measured_crossover_of_its_table(root: Path) -> None:
    folder = root / "examples_scaling" / "training"
    guide = (folder / "STUDY.md").read_text()
    rows = read_rows(folder / "crossover_cpu" / "table.csv")
    plain = [
        row
        for row in rows
        if row.objective == "masked_diffusion" or not ("masked" in row.run or "drop" in row.run)
    ]
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
