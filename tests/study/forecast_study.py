"""A study of isoFLOP runs and a run that the law chooses, with results from a known law."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from megatron.plan.run_dir import METRICS, PLAN, RESULT
from megatron.study.forecast import read_forecasts, record_seals, score_forecasts
from megatron.study.ladder import PlannedRun, StudyPlan, expand_listed, read_study_plan
from megatron.study.table import read_runs
from tests.laws import surface_runs
from tests.study.conftest import write_sidecar

NOISE = 0.002  # in log loss
WIDTHS = (16, 24, 32, 48, 64, 96, 128, 192)
BUDGET = 2.4e12  # FLOPs of the run whose size the law chooses: 4 times the largest
STUDY = """
name: frontier
directory: {folder}/study
run:
  dataset: {{path_train: {folder}/text, seq_len: 64, batch_size: 4}}
  lr_scheduler: {{warmup_iterations: 1}}
sizes:
{sizes}
cells:
  - {{size: [w16, w24, w32, w48], flops: [2.0e+10, 6.0e+10]}}
  - {{size: [w24, w32, w48, w64, w96], flops: [2.0e+11, 6.0e+11]}}
  - {{size: w32, flops: 6.0e+10, seeds: [1, 2]}}
  - {{size: best, flops: 2.4e+12, lr: 1.0e-3, label: forecast}}
"""


def true_loss(N: np.ndarray | float, D: np.ndarray | float) -> np.ndarray | float:
    """Return the loss by Chinchilla's form, in nats per token."""
    return surface_runs.true_loss(N, 6 * N * D)


def write_study_file(folder: Path) -> Path:
    """Write STUDY.yaml and the sidecar of its text."""
    write_sidecar(folder / "text.json", 2_000_000_000, 64)
    sizes = "\n".join(f"  w{w}: {{d_model: {w}, n_heads: 2, n_layers: 2}}" for w in WIDTHS)
    path = folder / "study.in.yaml"
    path.write_text(STUDY.format(folder=folder, sizes=sizes))
    return path


def write_result(run: PlannedRun, loss: float, **more: float) -> None:
    """Write the files of a finished run, as its launcher and its training do."""
    run.folder.mkdir(parents=True, exist_ok=True)
    record_seals(run.folder, read_forecasts(run.folder.parents[1]))
    plan = run.plan
    (run.folder / PLAN).write_text(json.dumps(plan.as_dict()))
    line = {"kind": "train", "step": plan.n_steps, "tokens": plan.train_tokens, "loss": loss}
    (run.folder / METRICS).write_text(json.dumps(line) + "\n")
    result = {"identity": plan.identity, "loss": loss, "loss_se": 0.01, "step": plan.n_steps, "wall_s": 1.0}
    (run.folder / RESULT).write_text(json.dumps(result | more))


def write_results(
    runs: Sequence[PlannedRun], seed: int = 0, loss: Callable[[float, float], float] = true_loss
) -> None:
    """Write results of runs by `loss` (N, D), with noise."""
    rng = np.random.default_rng(seed)
    for run in runs:
        noise = np.exp(NOISE * rng.standard_normal())
        write_result(run, float(loss(run.plan.n_params, run.plan.train_tokens) * noise))


def write_finished_study(folder: Path, *overrides: str) -> StudyPlan:
    """Write a study whose listed runs are finished to <folder>/study."""
    study = read_study_plan(write_study_file(folder), overrides)
    study.save()
    write_results(expand_listed(study))
    return study


def score(folder: Path) -> pd.DataFrame:
    """Score the forecasts of a study."""
    return score_forecasts(read_forecasts(folder), read_runs(folder))
