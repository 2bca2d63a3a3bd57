"""Price of a study: memory compared with what autograd saves, named hardware, the table."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.model.initialization import init_weights
from megatron.model.precision import choose_precision
from megatron.model.transformer import Gpt
from megatron.objective.task import compute_task_loss
from megatron.plan.count import n_params
from megatron.plan.hardware import DEVICES
from megatron.plan.memory import activation_bytes, block_bytes, estimate_memory
from megatron.plan.resolve import resolve_config
from megatron.plan.roofline import predict_step
from megatron.plan.run_plan import plan_run
from megatron.study.format import format_duration
from megatron.study.ladder import PlannedRun
from megatron.study.launchers.launch import Job, Launcher
from megatron.study.launchers.local import query_gpus
from megatron.study.price import (
    GPU_STARTUP_S,
    UNKNOWN_SPEED,
    Speed,
    Tariff,
    choose_settings,
    estimate_speed,
    flops_per_step,
    format_price,
    scoring_flops,
    sum_device_seconds,
    time_steps,
)
from megatron.train.build import build_objective
from tests.study.conftest import SHARED_TRUNK, write_result

S, ROWS = 128, 3  # 384 tokens: no weight has 384 rows, so shapes identify activations


def test_gpus_are_parsed_from_any_output_of_nvidia_smi(tmp_path: Path, monkeypatch) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for script, expected in (
        ("echo 'NVIDIA GB10, [N/A]'", [("NVIDIA GB10", 0.0)]),
        ("echo 'NVIDIA H100, NVL, 95830'", [("NVIDIA H100, NVL", 95830 * 2.0**20)]),
        ("echo 'Failed to initialize NVML'; exit 9", []),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        assert query_gpus() == expected


def make_config(n_layers: int, dtype: str, **more):
    raw = {
        "model": {"d_model": 64, "n_heads": 2, "n_layers": n_layers, "n_tokens": 500},
        "dataset": {"seq_len": S, "batch_size": ROWS},
        "dist": {"dtype": dtype, **more},
        "lr_scheduler": {"total_iterations": 1},
    }
    return resolve_config(raw)


def measure_saved_bytes(config, compiled: bool = False) -> int:
    """Return the bytes of all tensors that autograd saves for the backward pass, without weights."""
    model = Gpt(config.model)
    init_weights(model, 0)
    model.set_precision(choose_precision(config.dist))
    if compiled:
        for block in model.blocks:
            block.forward = torch.compile(block.forward, backend="aot_eager_decomp_partition")
    shapes = {tuple(p.shape) for p in model.parameters()} | {tuple(p.shape)[::-1] for p in model.parameters()}
    sizes: dict[int, int] = {}
    tensors = []  # references, so that no storage address is reused

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) not in shapes:
            tensors.append(tensor)
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    objective = build_objective(config)
    tokens = np.random.default_rng(0).integers(0, 500, (ROWS, S + 1))
    task = objective.corrupt(tokens, np.arange(ROWS))
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=config.dist.dtype == "bfloat16"),
    ):
        compute_task_loss(model.hidden_states(task.inputs, objective.causal), model.head_weight, task)
    return sum(sizes.values())


@pytest.mark.parametrize(
    ("dtype", "residual", "compiled"),
    [
        ("float32", None, False),
        ("bfloat16", "float32", False),
        ("bfloat16", "float32", True),
        pytest.param("bfloat16", None, True, marks=pytest.mark.slow),
    ],
)
def test_a_block_saves_the_estimated_bytes_for_its_backward_pass(dtype, residual, compiled) -> None:
    few, many = (make_config(n, dtype, residual_dtype=residual) for n in (2, 5))
    measured = measure_saved_bytes(many, compiled) - measure_saved_bytes(few, compiled)
    measured_per_token = measured / 3 / (ROWS * S)
    assert block_bytes(few.model, few.dist, compiled) == pytest.approx(measured_per_token, rel=0.08)


def test_weights_gradients_and_moments_take_16_bytes_a_parameter_before_sharding() -> None:
    plain = make_config(2, "float32")
    n, rest = n_params(plain.model), activation_bytes(plain) + 0.6e9
    assert estimate_memory(plain) - rest == pytest.approx(16 * n)
    sizes = []
    for stage in ("zero0", "zero1", "zero2", "zero3"):
        shared = make_config(2, "float32", sharding_stage=stage)
        sizes.append(estimate_memory(shared, 4) - activation_bytes(shared, 4) - 0.6e9)
    assert sizes == pytest.approx([16 * n, 10 * n, 7 * n, 4 * n])


def test_smaller_microbatches_and_recomputed_blocks_need_less() -> None:
    plain = make_config(8, "float32")
    small = replace(plain, dataset=replace(plain.dataset, microbatch_size=1))
    again = make_config(8, "float32", activation_checkpointing="full")
    head = 4 * plain.model.vocab_rows * plain.model.d_model  # its gradient in float32, for any microbatch
    assert activation_bytes(small) - head == pytest.approx((activation_bytes(plain) - head) / 3)
    assert activation_bytes(again) < activation_bytes(plain) / 2  # the chunk of logits is the same


@pytest.fixture
def runs(runs_of) -> list[PlannedRun]:
    """20 and 40 steps on 640 unique tokens; the first branches from the second at 10."""
    cell = "size: small, tokens: [1280, 2560], unique_tokens: 640, held_out: true"
    return runs_of(cell, SHARED_TRUNK)


def test_named_hardware_has_its_peak_times_the_mfu(runs) -> None:
    assert estimate_speed(runs, "H100", mfu=0.5).flops_per_s(runs[0]) == 0.5 * 989e12
    assert estimate_speed(runs, "H100 PCIe", mfu=0.25, gpus_per_run=4).flops_per_s(runs[0]) == 756e12
    with pytest.raises(ValueError, match="--hardware H10: unknown peak; did you mean 'H100"):
        estimate_speed(runs, "H10")


def make_run(folder: Path, n_steps: int, model: dict[str, Any], **data: int) -> PlannedRun:
    """Return a run on random tokens."""
    dataset = {"path_train": "synthetic", **data}
    raw = {"model": model, "dataset": dataset, "lr_scheduler": {"total_iterations": n_steps}}
    config = resolve_config(raw)
    return PlannedRun(config, plan_run(config), folder)


def test_each_size_is_priced_at_its_predicted_mfu(tmp_path: Path) -> None:
    shapes = [{"size": size, "n_tokens": 50257} for size in ("7M", "106M", "425M")]
    sized = [make_run(tmp_path / shape["size"], 100, shape, microbatch_size=8) for shape in shapes]
    speed = estimate_speed(sized, "H100")
    assert "unmeasured, probably high" in speed.basis
    for run in sized:
        step = predict_step(
            run.config.model, 2048, True, DEVICES["H100"], choose_settings(run.config),
            microbatch_tokens=16384, tokens_per_step=524288,
        )  # fmt: skip
        assert speed.seconds(run) == pytest.approx(GPU_STARTUP_S + 100 * 524288 / step.tokens_per_s)
    # the smallest model reaches less than half of the largest's share of the peak
    assert speed.flops_per_s(sized[0]) < speed.flops_per_s(sized[2]) / 2
    four = estimate_speed(sized, "H100", gpus_per_run=4)
    assert four.flops_per_s(sized[2]) == 4 * speed.flops_per_s(sized[2])


def test_settings_of_a_run_are_those_of_its_configuration() -> None:
    config = make_config(1, "bfloat16", activation_checkpointing="full")
    settings = choose_settings(config)
    assert settings.compiled and settings.stream == "bfloat16" and settings.recompute
    other = choose_settings(make_config(1, "bfloat16", residual_dtype="float32", compile=False))
    assert not other.compiled and other.stream == "float32" and not other.recompute
    deepspeed = replace(config, dist=replace(config.dist, engine="deepspeed"))
    assert not choose_settings(deepspeed).compiled


def test_the_table_begins_with_the_total_and_trunks_are_paid_once(runs) -> None:
    short, trunk = runs
    speed = Speed("a test", lambda run: 1e6, startup_s=6.0)
    lines = format_price(runs, speed, jobs=1).splitlines()
    flops = trunk.plan.train_flops + short.plan.train_flops / 2
    total = sum(6.0 + run.trained_flops / 1e6 for run in runs)
    assert lines[0].startswith(
        f"about {format_duration(total)} with 1 at a time: 2 of 2 runs to do, 3.2k tokens,"
    )
    assert lines[0].endswith(f"{flops:.2e} FLOPs") and "expected from a test" in lines[1]
    assert lines[3].split()[:8] == ["run", "N", "tokens", "epochs", "steps", "FLOPs", "GiB", "time"]
    # 16 wide, 1 layer, 384 rows: 384*16 + 4*256 + 3*16*64 + 3*16
    assert lines[4].split()[1:5] == ["10,288", "1.28k", "2.00", "20"]
    assert lines[4].endswith("to run HB") and lines[5].endswith("to run H")
    assert "H: held out of the fit; B: branches" in " ".join(lines[6:])


def test_the_table_contains_money_and_energy(runs) -> None:
    speed = Speed("a test", lambda run: 1e6, startup_s=0.0)
    hours = sum(run.trained_flops for run in runs) / 1e6 / 3600
    tariff = Tariff(2.5, hardware="H100")
    text = format_price(runs, speed, 1, 2, tariff=tariff)
    line = next(line for line in text.splitlines() if "GPU-hours" in line)
    assert f"{2 * hours:.3g} GPU-hours" in line and f"{5 * hours:.3g} at 2.5 an hour" in line
    assert f"up to {2 * hours * 0.7:.3g} kWh at 700 W" in line
    assert "GPU-hours" not in format_price(runs, speed, 1, 2, tariff=Tariff())


def test_the_power_of_the_user_precedes_the_data_sheet_and_mixed_hardware_has_none() -> None:
    assert "up to 0.350 kWh at 350 W" in Tariff(watts=350.0, hardware="H100").describe(3600)
    assert Tariff(hardware="NVIDIA H200").describe(7200) == "2.00 GPU-hours, up to 1.40 kWh at 700 W"
    assert Tariff(hardware="CPU, 2 threads").describe(3600) == Tariff().describe(3600) == ""
    h200: dict[str, Any] = {"wall_s": 1800.0, "n_ranks": 4, "hardware": "NVIDIA H200"}
    assert sum_device_seconds([h200, h200 | {"n_ranks": 2}]) == (10800.0, "NVIDIA H200")
    assert sum_device_seconds([h200, {"wall_s": 10.0, "hardware": "CPU"}, {"wall_s": None}]) == (7210.0, None)


def test_held_out_losses_are_in_the_price(runs) -> None:
    run = runs[1]
    assert scoring_flops(run) == 0
    dataset = replace(run.config.dataset, path_eval=run.config.dataset.path_train)
    checkpoint = replace(run.config.checkpoint, chkpt_at=[10, 20])
    scored = replace(run, config=replace(run.config, dataset=dataset, checkpoint=checkpoint))
    # 64,000 targets, at steps 10, 20 and 40
    assert scoring_flops(scored) == pytest.approx(run.plan.flops_per_token / 3 * 64_000 * 3)
    masks = replace(scored, plan=replace(run.plan, objective="masked_diffusion"))
    assert scoring_flops(masks) == 8 * scoring_flops(scored)


class FakeLauncher(Launcher):
    """Processes with 3 s of start-up, steps of 2 ms, and 1e9 FLOPs a second, on a fake clock."""

    def __init__(self, clock: "FakeClock", fails: bool = False) -> None:
        super().__init__()
        self.clock, self.fails, self.stopped = clock, fails, 0
        self.ends: dict[Path, float] = {}

    def start(self, runs):
        for run in runs:
            run.folder.mkdir(parents=True)
            step_s = 0.002 + flops_per_step(run) / 1e9
            # the first step compiles for 1.5 s
            steps = range(1, run.plan.n_steps + 1)
            lines = [{"kind": "train", "step": i, "elapsed_s": 1.5 + i * step_s} for i in steps]
            lines.append({"kind": "validation", "step": run.plan.n_steps, "loss": 1.0})
            if not self.fails:
                (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            self.ends[run.folder] = self.clock.now + 3.0 + run.plan.n_steps * step_s
            (run.folder / "config.yaml").touch()
            os.utime(run.folder / "config.yaml", (self.clock.now, self.clock.now))
        return [Job(run, None) for run in runs]

    def collect_ended(self, jobs):
        ended = [job for job in jobs if self.ends[job.run.folder] <= self.clock.now]
        for job in [] if self.fails else ended:
            write_result(job.run)
            os.utime(job.run.folder / "result.json", (self.ends[job.run.folder],) * 2)
        return [(job, int(self.fails)) for job in ended]

    def detach(self, jobs):
        self.stopped += len(jobs)

    stop = detach


class FakeClock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    for module in ("price", "launchers.launch"):
        monkeypatch.setattr(f"megatron.study.{module}.time", clock)
    return clock


def test_timed_steps_give_fixed_cost_rate_and_start_up(runs, clock) -> None:
    wide = {"d_model": 64, "n_heads": 2, "n_layers": 2, "n_tokens": 300}
    large = make_run(runs[0].folder.with_name("wide"), 30, wide, seq_len=16, batch_size=4)
    launcher = FakeLauncher(clock)
    speed = time_steps([runs[0], large, runs[1]], launcher, 2)
    assert len(launcher.ends) == 2 and not launcher.stopped
    assert speed.flops_per_s(large) == pytest.approx(1e9, rel=1e-3)
    assert (speed.step_s, speed.startup_s) == (pytest.approx(0.002, rel=1e-2), pytest.approx(3.0, abs=0.1))
    expected = 3.0 + 30 * 0.002 + large.plan.train_flops / 1e9
    assert speed.seconds(large) == pytest.approx(expected, rel=0.05)


def test_runs_that_cannot_be_timed_have_no_price(runs, clock) -> None:
    assert time_steps(runs, FakeLauncher(clock, fails=True), 2) is UNKNOWN_SPEED
    slow = FakeLauncher(clock)
    assert time_steps(runs, slow, 2, timeout_s=1.0) is UNKNOWN_SPEED and slow.stopped == len(slow.ends)
