"""Price of a study: memory compared with what autograd saves, named hardware, the table."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.study.probe import Timing, flops_per_step, time_steps

from megatron.model.initialization import init_weights
from megatron.model.precision import choose_precision
from megatron.model.transformer import Gpt
from megatron.objective.task import compute_task_loss
from megatron.plan.count import n_params
from megatron.plan.memory import activation_bytes, block_bytes, estimate_memory
from megatron.plan.resolve import resolve_config
from megatron.plan.run_plan import plan_run
from megatron.study.format import format_duration
from megatron.study.ladder import Branch, PlannedRun, expand_study, read_study_plan
from megatron.study.launchers.launch import Job
from megatron.study.price import (
    STARTUP_S,
    Speed,
    estimate_speed,
    query_gpus,
    speed_from_timings,
)
from megatron.study.price_table import format_price_table
from megatron.study.scoring import scoring_flops
from megatron.train.build import build_objective

S, ROWS = 128, 3  # 384 tokens: no weight has 384 rows, so shapes identify activations


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'NVIDIA GB10, [N/A]'", [("NVIDIA GB10", 0.0)]),
        ("echo 'NVIDIA H100, NVL, 95830'", [("NVIDIA H100, NVL", 95830 * 2.0**20)]),
        ("echo 'Failed to initialize NVML'; exit 9", []),
    ],
)
def test_gpus_are_parsed_from_any_output_of_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: list[tuple[str, float]]
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
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
        ("bfloat16", None, False),
        ("bfloat16", "float32", False),
        ("bfloat16", None, True),
        ("bfloat16", "float32", True),
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
    assert activation_bytes(again) < activation_bytes(plain) / 3


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
    return expand_study(read_study_plan(tmp_path / "study.yaml"))


def test_named_hardware_has_its_peak_times_the_mfu(runs) -> None:
    assert estimate_speed(runs, hardware="H100", mfu=0.5).flops_per_s == 0.5 * 989e12
    assert estimate_speed(runs, hardware="H100 PCIe", gpus_per_run=4, mfu=0.25).flops_per_s == 756e12
    with pytest.raises(ValueError, match="--hardware H10: unknown peak; did you mean 'H100"):
        estimate_speed(runs, hardware="H10")


def test_the_table_begins_with_the_total_and_trunks_are_paid_once(runs) -> None:
    short, trunk = runs
    lines = format_price_table(runs, estimate_speed(runs, tflops=1e-6), jobs=1, details=True).splitlines()
    flops = trunk.plan.train_flops + short.plan.train_flops / 2
    total = sum(STARTUP_S + run.trained_flops / 1e6 for run in runs)
    assert lines[0].startswith(
        f"about {format_duration(total, estimate=True)} with 1 at a time: 2 of 2 runs to do, 3.2k tokens,"
    )
    assert lines[0].endswith(f"{flops:.2e} FLOPs")
    assert lines[2].startswith(f"{short.plan.train_flops / 2:.2e} FLOPs more without shared trunks")
    assert lines[4].split()[:7] == ["run", "N", "tokens", "epochs", "steps", "FLOPs", "GiB"]
    cells = lines[5].split()
    # 16 wide, 1 layer, 384 rows: 384*16 + 4*256 + 3*16*64 + 3*16
    assert cells[1:5] == ["10,288", "1.28k", "2.00", "20"]
    assert lines[5].endswith("to run HB") and lines[6].endswith("to run H")
    assert "H: held out of the fit; B: branches" in lines[7]
    names = lines[9].split()
    assert names == ["run", "unique", "batch", "lr", "6ND", "Kaplan", "PaLM", "Megatron", "Chinchilla"]
    cells = lines[10].split()
    assert cells[1:3] == ["640", "4"] and cells[names.index("6ND")] == f"{6 * 10288 * 1280:.2e}"
    # Narayanan et al., eq. 3, with S = 16, D = 16 and 384 rows: a column beside the other conventions
    megatron = 72 * 16**2 * (1 + 16 / (6 * 16) + 384 / (12 * 16)) * 1280
    assert cells[names.index("Megatron")] == f"{megatron:.2e}"


def test_no_line_of_the_table_is_wider_than_100_columns_however_large_the_runs(runs) -> None:
    big = []
    for run in runs:
        config = replace(run.config, name=f"masked_diffusion-{'x' * 60}-1.28Ttok-seed12345")
        plan = replace(
            run.plan, n_params=1_234_567_890_123, n_steps=12_345_678, train_tokens=10**14, epochs=123456.789,
            train_flops=1.2e29,
        )  # fmt: skip
        big.append(replace(run, config=config, plan=plan))
    for speed in (Speed(1e15, 1e3, "a basis " * 30), Speed(math.nan, 0.0, "nothing")):
        text = format_price_table(big, speed, jobs=64, gpus_per_run=8, details=True)
        assert max(map(len, text.splitlines())) <= 100
        assert "MD-xxxx" in text and "seed12345" in text


def test_the_cost_model_reproduces_its_timings() -> None:
    small = Timing("s", 1e6, 0.010, 4.0, 60)
    large = Timing("l", 1e8, 0.109, 6.0, 8)
    speed = speed_from_timings([small, large])
    # 0.099 s for 0.99e8 FLOPs: 1e9 FLOP/s, plus 0.009 s per step
    assert speed.flops_per_s == pytest.approx(1e9) and speed.step_s == pytest.approx(0.009)
    assert speed.startup_s == 5.0
    alone = speed_from_timings([large])
    assert (alone.step_s, alone.flops_per_s) == (0.0, 1e8 / 0.109)
    # a less efficient large model, or a noisy timing that was faster: never below zero
    for step_s in (5.0, 0.005):
        odd = speed_from_timings([small, replace(large, step_s=step_s)])
        assert odd.flops_per_s > 0 and odd.step_s >= 0
        assert odd.step_s + 1e8 / odd.flops_per_s == pytest.approx(step_s)


def test_finished_runs_of_two_sizes_price_the_others_by_fixed_cost_and_rate(runs) -> None:
    config = runs[0].config
    wide = resolve_config(
        {
            "model": {"d_model": 64, "n_heads": 2, "n_layers": 2, "n_tokens": 300},
            "dataset": {"path_train": config.dataset.path_train, "seq_len": 16, "batch_size": 4},
            "lr_scheduler": {"total_iterations": 30},
        }
    )
    large = PlannedRun(wide, plan_run(wide), runs[0].folder.with_name("wide"))
    both = [runs[1], large]
    for run in both:
        run.folder.mkdir(parents=True, exist_ok=True)
        wall_s = 0.02 * run.trained_steps + run.trained_flops / 1e9
        result = {"identity": run.plan.identity, "wall_s": wall_s}
        (run.folder / "result.json").write_text(json.dumps(result))
    speed = estimate_speed(both, probe=lambda: pytest.fail("no timing is needed"))
    assert (speed.flops_per_s, speed.step_s) == pytest.approx((1e9, 0.02))
    # a branch continues the clock of its trunk: its seconds are those of all its steps
    branch = replace(large, branch=Branch(runs[1].folder, 20))
    assert branch.trained_steps == 10
    speed = estimate_speed([runs[1], branch], probe=lambda: pytest.fail("no timing is needed"))
    assert (speed.flops_per_s, speed.step_s) == pytest.approx((1e9, 0.02))


def test_held_out_losses_are_in_the_price(runs) -> None:
    run = runs[1]
    assert scoring_flops(run) == 0
    dataset = replace(run.config.dataset, path_eval=run.config.dataset.path_train)
    checkpoint = replace(run.config.checkpoint, chkpt_at=[10, 20])
    scored = replace(run, config=replace(run.config, dataset=dataset, checkpoint=checkpoint))
    # 640 targets, at steps 10, 20 and 40
    assert scoring_flops(scored) == pytest.approx(run.plan.flops_per_token / 3 * 640 * 3)
    masks = replace(scored, plan=replace(run.plan, objective="masked_diffusion"))
    assert scoring_flops(masks) == 8 * scoring_flops(scored)


def test_runs_elsewhere_are_not_priced_by_this_machine() -> None:
    unknown = estimate_speed([], remote=True)
    assert math.isnan(unknown.flops_per_s) and "--hardware" in unknown.basis
    assert estimate_speed([], tflops=2.0, remote=True).flops_per_s == 2e12


class FakeLauncher:
    """Processes with 3 s of start-up, steps of 2 ms, and 1e9 FLOPs a second, on a fake clock."""

    def __init__(self, clock: "FakeClock", fails: bool = False) -> None:
        self.clock, self.fails, self.most, self.stopped = clock, fails, 0, 0
        self.ends: dict[Path, float] = {}

    def start(self, runs):
        (run,) = runs
        run.folder.mkdir(parents=True)
        step_s = 0.002 + flops_per_step(run) / 1e9
        if not self.fails:
            lines = [
                {"kind": "train", "step": i, "elapsed_s": 1.5 + i * step_s}
                for i in range(1, run.plan.n_steps + 1)
            ]  # the first step compiles for 1.5 s
            lines.append({"kind": "validation", "step": run.plan.n_steps, "loss": 1.0})
            (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.ends[run.folder] = self.clock.now + 3.0 + run.plan.n_steps * step_s
        self.most = max(self.most, sum(end > self.clock.now for end in self.ends.values()))
        return [Job(run, None)]

    def collect_ended(self, jobs):
        return [(job, int(self.fails)) for job in jobs if self.ends[job.run.folder] <= self.clock.now]

    def stop(self, jobs):
        self.stopped += len(jobs)


class FakeClock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def time(self) -> float:
        return 1e9 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr("megatron.study.probe.time", clock)
    return clock


def test_steps_of_the_smallest_and_largest_are_timed_side_by_side_and_once(runs, clock, tmp_path) -> None:
    wide = replace(runs[1], plan=replace(runs[1].plan, flops_per_token=10 * runs[1].plan.flops_per_token))
    launcher = FakeLauncher(clock)
    both = [runs[0], runs[1], wide]
    small, *rest = time_steps(both, launcher, 2, 1e12, tmp_path / "out")
    # probes are planned again from their config, so both have the small model: one timing of two processes
    assert not rest and launcher.most == 2
    assert small.step_s == pytest.approx(0.002 + small.flops_per_step / 1e9)
    assert small.startup_s == pytest.approx(3.0, abs=0.1)
    began = len(launcher.ends)
    assert time_steps(both, launcher, 2, 1e12, tmp_path / "out") == [small] and len(launcher.ends) == began
    assert time_steps(both, launcher, 1, 1e12, tmp_path / "out") and len(launcher.ends) > began
    again = len(launcher.ends)
    clock.now += 4000
    time_steps(both, launcher, 1, 1e12, tmp_path / "out")
    assert len(launcher.ends) > again
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["price.json"]


def test_runs_that_cannot_be_timed_have_no_price_and_no_cache(runs, clock, tmp_path) -> None:
    assert time_steps(runs, FakeLauncher(clock), 2, 1e6, tmp_path / "out") == []
    assert time_steps(runs, FakeLauncher(clock, fails=True), 2, 1e12, tmp_path / "out") == []
    assert not (tmp_path / "out").exists()
    speed = estimate_speed(runs, probe=lambda: [])
    assert math.isnan(speed.flops_per_s) and "--hardware" in speed.basis
    slow = FakeLauncher(clock)
    monotone = time_steps(runs, slow, 2, 1e12, tmp_path / "out", timeout_s=1.0)
    assert slow.stopped and monotone[0].startup_s == 0.0  # steps were logged, but the process did not end
