"""Runs and studies with values of wrong types: one sentence, no traceback, no long wait."""

import time
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from megatron.config.read import write_config
from megatron.config.schema import RunConfig
from megatron.config.yaml_file import merge_sections
from megatron.plan.resolve import load_config, resolve_config
from megatron.plan.run_plan import plan_run
from megatron.study.ladder import expand_study, read_study_plan
from tests.wrong_values import READ_S, generate_wrong_texts, read_refusal

N_VALUES = 3  # for each key
RUN: dict[str, Any] = {
    "dist": {"dtype": "float32"},
    "dataset": {"path_train": "synthetic", "seq_len": 32, "batch_size": 4},
    "model": {"d_model": 32, "n_heads": 2, "n_layers": 2, "n_tokens": 200},
    "objective": {"name": "autoregressive"},
    "optim": {"lr": 1e-3},
    "lr_scheduler": {"total_iterations": 3},
    "logging": {"run_dir": "x"},
}
CELL = {
    "objective": ["autoregressive"], "size": ["small"], "seeds": [0], "tokens": [1280], "lr": [1e-3],
    "label": "a", "held_out": False,
    "run": {"optim": {"weight_decay": 0.2}},
}  # fmt: skip
KEYS: dict[tuple[str, ...], list[str]] = {(): [f.name for f in fields(RunConfig)]}
for section, hint in get_type_hints(RunConfig).items():
    if is_dataclass(hint):
        KEYS[(section,)] = [f.name for f in fields(hint)]
KEYS[("model",)].append("hf_config")


STUDY: dict[str, Any] = {
    "name": "s", "directory": "study", "share_trunks": True, "run": RUN, "cells": [CELL], "seed": 1,
    "sizes": {"small": {"d_model": 32, "n_heads": 2, "n_layers": 2}}, "flops_convention": "exact",
}  # fmt: skip
STUDY_KEYS = {
    ("run",): KEYS[()],
    ("cells", "run"): KEYS[()],
    ("cells",): [*CELL, "unique_tokens", "epochs", "flops"],
    (): list(STUDY),
}


def read_run(path: Path) -> None:
    config = load_config(path)
    plan_run(config)
    write_config(config, path.with_name("written.yaml"))
    assert load_config(path.with_name("written.yaml")) == config


def read_study(path: Path) -> None:
    expand_study(read_study_plan(path))


@pytest.mark.parametrize(
    ("read", "base", "keys"),
    [(read_run, {"name": "r", **RUN}, KEYS), (read_study, STUDY, STUDY_KEYS)],
    ids=["run", "study"],
)
def test_a_file_is_read_or_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any, base: Any, keys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    path, refused = tmp_path / "file.yaml", []
    for text in generate_wrong_texts(base, keys, N_VALUES, seed=0):
        path.write_text(text)
        begin = time.monotonic()
        refused.append(read_refusal(lambda: read(path)))
        assert time.monotonic() - begin < READ_S, text[:2000]
    n_refused = sum(message is not None for message in refused)
    assert len(refused) / 2 < n_refused < len(refused)  # some were read and some refused


def test_every_key_of_a_run_refuses_a_section_and_names_itself() -> None:
    for section, name in ((place[0], name) for place, names in KEYS.items() if place for name in names):
        if name != "hf_config":
            raw = merge_sections({"name": "r", **RUN}, {section: {name: {"a": {"b": 1}}}})
            with pytest.raises(ValueError, match=rf"{section}\.{name}: got "):
                resolve_config(raw)
