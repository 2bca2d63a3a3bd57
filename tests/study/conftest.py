"""A study of tiny models, whose text is a sidecar without tokens."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.plan.run_dir import RESULT
from megatron.study import ladder
from megatron.study.ladder import PlannedRun, StudyPlan, expand_study, read_study_plan

STUDY = """
name: tiny
directory: {folder}/study
run:
  dataset: {{path_train: {folder}/text, seq_len: 16, batch_size: 4}}
sizes:
  small: {{d_model: 16, n_heads: 2, n_layers: 1}}
  wide: {{d_model: 32, n_heads: 2, n_layers: 1}}
cells: [{{size: small, tokens: 640}}]
"""
SHARED_TRUNK = "run.lr_scheduler={kind: wsd, warmup_iterations: 2, decay_fraction: 0.5}"


def write_sidecar(path: Path, tokens: int, n_tokens: int) -> None:
    """Write the sidecar of a text with a vocabulary of `n_tokens`."""
    sha256 = {"bin": path.stem, "idx": "bb"}
    content = {"tokens": tokens, "tokenizer": {"n_tokens": n_tokens}, "sha256": sha256}
    path.write_text(json.dumps(content))


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    """Return a study on 64,000 tokens."""
    write_sidecar(tmp_path / "text.json", 64_001, 300)
    path = tmp_path / "study.yaml"
    path.write_text(STUDY.format(folder=tmp_path))
    return path


@pytest.fixture
def plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan each run of a study once, however often the study is expanded: all readers of its folder do."""
    plan_cell, planned = ladder._plan_cell, {}

    def recall_plan(study: StudyPlan, entry: object, cell: object) -> PlannedRun:
        key = repr((replace(study, cells=[]), entry, cell))
        if key not in planned:
            planned[key] = plan_cell(study, entry, cell)
        return planned[key]

    monkeypatch.setattr(ladder, "_plan_cell", recall_plan)


@pytest.fixture
def runs_of(study_file: Path) -> Callable[..., list[PlannedRun]]:
    """Return a function: an entry of `cells` as YAML, and other overrides of the study -> its runs."""

    def plan_runs(cell: str, *words: str) -> list[PlannedRun]:
        return expand_study(read_study_plan(study_file, [f"cells=[{{{cell}}}]", *words]))

    return plan_runs


def write_result(run: PlannedRun) -> None:
    """Write the result of a finished run."""
    (run.folder / RESULT).write_text(json.dumps({"identity": run.plan.identity, "loss": 1.0, "wall_s": 1.0}))
