"""Runs and studies with values of wrong types: one sentence, no traceback, no long wait."""

import time
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from megatron.config.read import write_config
from megatron.config.schema import RunConfig
from megatron.plan.resolve import load_config
from megatron.plan.run_plan import plan_run
from megatron.study.ladder import expand_study, read_study_plan
from tests.wrong_values import READ_S, generate_wrong_texts, read_refusal

N = 150
RUN: dict[str, Any] = {
    "dist": {"dtype": "float32"},
    "dataset": {"path_train": "synthetic", "seq_len": 32, "batch_size": 4},
    "model": {"d_model": 32, "n_heads": 2, "n_layers": 2, "n_tokens": 200},
    "objective": {"name": "autoregressive"},
    "optim": {"lr": 1e-3},
    "lr_scheduler": {"total_iterations": 3},
    "logging": {"run_dir": "x"},
}
GRID = {
    "objectives": ["autoregressive"], "sizes": ["small"], "seeds": [0], "train_tokens": [1280], "lr": [1e-3],
    "batch_tokens": [128], "label": "a", "held_out": False, "flops_convention": "exact",
    "run": {"optim": {"weight_decay": 0.2}},
}  # fmt: skip
KEYS: dict[tuple[str, ...], list[str]] = {(): [f.name for f in fields(RunConfig)]}
for section, hint in get_type_hints(RunConfig).items():
    if is_dataclass(hint):
        KEYS[(section,)] = [f.name for f in fields(hint)]
KEYS[("model",)].append("hf_config")


@pytest.mark.parametrize("seed", range(2))
def test_a_run_is_read_or_refused_in_one_sentence(tmp_path: Path, seed: int) -> None:
    def read_run() -> None:
        config = load_config(tmp_path / "run.yaml")
        plan_run(config)
        write_config(config, tmp_path / "written.yaml")
        assert load_config(tmp_path / "written.yaml") == config

    refused = []
    for text in generate_wrong_texts({"name": "r", **RUN}, KEYS, N, seed):
        (tmp_path / "run.yaml").write_text(text)
        begin = time.monotonic()
        refused.append(read_refusal(read_run))
        assert time.monotonic() - begin < READ_S, text[:2000]
    assert N / 2 < sum(message is not None for message in refused) < N  # some were read and some refused


@pytest.mark.parametrize("seed", range(2))
def test_a_study_is_read_or_refused_in_one_sentence(tmp_path: Path, seed: int) -> None:
    base = {
        "name": "s", "directory": str(tmp_path / "study"), "share_trunks": True, "run": RUN,
        "sizes": {"small": {"d_model": 32, "n_heads": 2, "n_layers": 2}}, "grids": [GRID],
        "seed": 1, "blind": {"sizes": ["small"], "compute": 4.0, "seed": 2, "objective": "autoregressive"},
    }  # fmt: skip
    known_keys = {("run", *place): keys for place, keys in KEYS.items()}
    known_keys |= {("grids", "run", *place): keys for place, keys in KEYS.items()}
    known_keys |= {
        ("blind",): [
            "sizes",
            "compute",
            "lr",
            "batch_tokens",
            "run",
            "flops_convention",
            "seed",
            "objective",
        ],
        (): list(base),
        ("grids",): [*GRID, "unique_tokens", "epochs", "train_flops", "tokens_per_param"],
    }

    def read_study() -> None:
        study = read_study_plan(tmp_path / "study.yaml")
        expand_study(study)

    refused = []
    for text in generate_wrong_texts(base, known_keys, N, seed):
        (tmp_path / "study.yaml").write_text(text)
        begin = time.monotonic()
        refused.append(read_refusal(read_study))
        assert time.monotonic() - begin < READ_S, text[:2000]
    assert N / 2 < sum(message is not None for message in refused) < N
