"""Tests of tools/bench/gpu.py on a CPU: cells, records, resuming, and checks that can fail."""

import importlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def bench_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(root / "tools" / "bench"))


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_every_kind_of_cell_takes_a_step_on_a_cpu_or_needs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("gpu_bench.cells")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    losses, skipped = {}, set()
    for cell in bench.list_cells(["tiny"]):
        try:
            losses[cell.name] = float(bench.build_step(cell, CPU, 32, 2)(0))
        except bench.SkippedCellError:
            skipped.add(cell.setting)
    assert skipped == {"attention flash", "attention cudnn", "attention efficient"}
    # random tokens of 200 cost about log 200 = 5.3 nats
    assert all(4.5 < loss < 7 for name, loss in losses.items() if "/AR/" in name)


@pytest.mark.slow
def test_the_next_command_measures_the_missing_cells(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu = load("gpu")
    words = ["--device", "cpu", "--sizes", "tiny", "--steps", "2", "--out", str(tmp_path), "--only"]
    assert gpu.main([*words, "transformers/", "--minutes", "0"]) == 1
    assert "not run" in capfd.readouterr().out
    assert gpu.main([*words, "transformers/", "attention flash"]) == 0
    lines = (tmp_path / "cells.jsonl").read_text().splitlines()
    records = {record["name"]: record for record in map(json.loads, lines)}
    ours = records["transformers/tiny/AR/default"]
    # 2 rows of 32 tokens, 2 microbatches
    assert ours["tokens_per_s"] == pytest.approx(128 / sorted(ours["step_s"])[2])
    assert records["ours/tiny/AR/attention flash"]["skipped"] == "needs CUDA"
    assert "transformers/tiny/AR/default" in (tmp_path / "table.md").read_text()
    assert gpu.main([*words, "transformers/", "attention flash"]) == 0
    assert (tmp_path / "cells.jsonl").read_text().splitlines() == lines


@pytest.mark.parametrize(
    ("objective", "wrong"),
    [("autoregressive", {"hidden_dropout": 0.0}), ("masked_diffusion", {"attention_dropout": 0.0}),
     ("autoregressive", {"eod_id": 8}), ("masked_diffusion", {"norm_eps": 0.1})],
)  # fmt: skip
def test_gradients_match_float64_and_those_of_another_model_fail(
    objective: str, wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has dropout and a mask of documents."""
    parity = load("gpu_bench.parity")
    monkeypatch.setattr(parity, "SEQ_LEN", 64)
    build, check = parity.build_engine, parity.check_gradients
    if "eod_id" not in wrong:
        assert check(objective, "float32", CPU, {}, parity.SPECIAL)["status"] == "passed"
    changed = replace(parity.SPECIAL, **wrong)
    monkeypatch.setattr(parity, "build_engine", lambda o, world, _, **more: build(o, world, changed, **more))
    assert check(objective, "float32", CPU, {}, parity.SPECIAL)["status"] == "failed"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_all_checks_pass_on_a_gpu(tmp_path: Path) -> None:
    assert load("gpu").main(["--parity", "--out", str(tmp_path)]) == 0
