"""Prices before spending: memory beside what autograd keeps, named hardware, the table."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.config.count import n_params
from megatron.config.read import build_config
from megatron.model.gpt import Gpt
from megatron.model.initial import initialise
from megatron.objective.base import loss
from megatron.scaling.ladder import expand, read_study_plan
from megatron.scaling.memory import activations_of, block_bytes, bytes_of
from megatron.scaling.price import gpus, speed_of
from megatron.scaling.price_table import price_table
from megatron.train.build import build_objective

S, ROWS = 128, 3  # 384 tokens, as many as no weight has rows


@pytest.mark.parametrize(
    ("says", "found"),
    [
        ("echo 'NVIDIA GB10, [N/A]'", [("NVIDIA GB10", 0.0)]),
        ("echo 'NVIDIA H100, NVL, 95830'", [("NVIDIA H100, NVL", 95830 * 2.0**20)]),
        ("echo 'Failed to initialize NVML'; exit 9", []),
    ],
)
def test_gpus_are_those_of_nvidia_smi_whatever_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, found: list[tuple[str, float]]
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{says}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpus() == found


def config_of(n_layers: int, dtype: str, **more):
    raw = {
        "model": {"d_model": 64, "n_heads": 2, "n_layers": n_layers, "n_tokens": 500},
        "dataset": {"seq_len": S, "batch_size": ROWS},
        "dist": {"dtype": dtype, **more},
        "lr_scheduler": {"total_iterations": 1},
    }
    return build_config(raw)


def saved_bytes(config) -> int:
    """Bytes of all tensors that autograd keeps for the backward, weights and copies of them left out."""
    model = Gpt(config.model)
    initialise(model, 0)
    shapes = {tuple(p.shape) for p in model.parameters()} | {tuple(p.shape)[::-1] for p in model.parameters()}
    held: dict[int, int] = {}
    kept = []  # alive, so that no storage is given out twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) not in shapes:
            kept.append(tensor)
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    objective = build_objective(config)
    tokens = np.random.default_rng(0).integers(0, 500, (ROWS, S + 1))
    task = objective.corrupt(tokens, np.arange(ROWS))
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=config.dist.dtype == "bfloat16"),
    ):
        loss(model.hidden(task.inputs, objective.causal), model.head_weight, task)
    return sum(held.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_keeps_for_its_backward_what_is_estimated(dtype: str) -> None:
    few, many = (config_of(n, dtype) for n in (2, 5))
    measured = (saved_bytes(many) - saved_bytes(few)) / 3 / (ROWS * S)
    assert block_bytes(few.model, few.dist) == pytest.approx(measured, rel=0.08)


def test_weights_gradients_and_moments_take_16_bytes_a_parameter_less_what_is_shared() -> None:
    plain = config_of(2, "float32")
    n, rest = n_params(plain.model), activations_of(plain) + 0.6e9
    assert bytes_of(plain) - rest == pytest.approx(16 * n)
    held = []
    for stage in ("zero0", "zero1", "zero2", "zero3"):
        shared = config_of(2, "float32", sharding_stage=stage)
        held.append(bytes_of(shared, 4) - activations_of(shared, 4) - 0.6e9)
    assert held == pytest.approx([16 * n, 10 * n, 7 * n, 4 * n])


def test_smaller_microbatches_and_recomputed_blocks_need_less() -> None:
    plain = config_of(8, "float32")
    small = replace(plain, dataset=replace(plain.dataset, microbatch_size=1))
    again = config_of(8, "float32", activation_checkpointing="full")
    assert activations_of(small) == activations_of(plain) / 3
    assert activations_of(again) < activations_of(plain) / 3


STUDY = """
name: tiny
directory: {folder}/study
run:
  dataset: {{path_train: {folder}/text, seq_len: 16, batch_size: 4}}
  lr_scheduler: {{kind: wsd, warmup_iterations: 2, decay_fraction: 0.5}}
sizes:
  small: {{d_model: 16, n_heads: 2, n_layers: 1}}
grids: [{{sizes: [small], train_tokens: [1280, 2560], held_out: true}}]
"""


@pytest.fixture
def runs(tmp_path: Path):
    (tmp_path / "text.json").write_text(json.dumps({"tokens": 641, "tokenizer": {"n_tokens": 300}}))
    (tmp_path / "study.yaml").write_text(STUDY.format(folder=tmp_path))
    return expand(read_study_plan(tmp_path / "study.yaml"))


def test_named_hardware_is_its_peak_times_what_runs_reach(runs) -> None:
    assert speed_of(runs, hardware="H100", mfu=0.5).flops_per_s == 0.5 * 989e12
    assert speed_of(runs, hardware="H100 PCIe", gpus_per_run=4, mfu=0.25).flops_per_s == 756e12
    with pytest.raises(ValueError, match="--hardware H10: peak not known; did you mean 'H100"):
        speed_of(runs, hardware="H10")


def test_the_table_tells_what_each_run_is_and_trunks_are_paid_once(runs) -> None:
    short, trunk = runs
    told = price_table(runs, speed_of(runs, tflops=1e-6), jobs=1).splitlines()
    assert told[0].split()[:9] == ["run", "size", "N", "tokens", "unique", "epochs", "steps", "batch", "lr"]
    cells = told[1].split()
    # 16 wide, 1 layer, 384 rows: 384*16 + 4*256 + 3*16*64 + 3*16
    assert cells[2:8] == ["10,288", "1,280", "640", "2.00", "20", "4"]
    assert f"{6 * 10288 * 1280:.2e}" in cells
    # Narayanan et al., eq. 3, with S = 16, D = 16 and 384 rows: a column beside the other conventions
    megatron = 72 * 16**2 * (1 + 16 / (6 * 16) + 384 / (12 * 16)) * 1280
    assert cells[told[0].split().index("Megatron")] == f"{megatron:.2e}"
    assert told[1].endswith("held out, from step 10 of a trunk, to run")
    flops = trunk.plan.train_flops + short.plan.train_flops / 2
    assert told[3].startswith(f"2 of 2 runs to do: 3.2k tokens, {flops:.2e} FLOPs")
    assert told[4].startswith(f"{short.plan.train_flops / 2:.2e} FLOPs more without shared trunks")


def test_runs_elsewhere_are_not_priced_by_this_machine() -> None:
    unknown = speed_of([], elsewhere=True)
    assert math.isnan(unknown.flops_per_s) and "--hardware" in unknown.basis
    assert speed_of([], tflops=2.0, elsewhere=True).flops_per_s == 2e12
