"""Price of a study: memory compared with what autograd saves, named hardware, the table."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.plan.hardware import load_devices
from megatron.plan.resolve import resolve_config
from megatron.plan.roofline import StepSettings, predict_step
from megatron.plan.run_dir import CONFIG, METRICS, RESULT
from megatron.plan.run_plan import plan_run
from megatron.report.tables import sum_device_seconds
from megatron.study import price
from megatron.study.format import format_duration
from megatron.study.ladder import PlannedRun
from megatron.study.launchers.launch import Launcher
from megatron.study.launchers.local import query_gpus
from tests.study.conftest import SHARED_TRUNK, write_result


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


@pytest.fixture
def runs(runs_of) -> list[PlannedRun]:
    """20 and 40 steps on 640 unique tokens; the first branches from the second at 10."""
    cell = "size: small, tokens: [1280, 2560], unique_tokens: 640, held_out: true"
    return runs_of(cell, SHARED_TRUNK)


def test_named_hardware_has_its_peak_times_the_mfu(runs) -> None:
    assert price.estimate_speed(runs, "H100", mfu=0.5).flops_per_s(runs[0]) == 0.5 * 989e12
    assert price.estimate_speed(runs, "H100 PCIe", mfu=0.25, gpus_per_run=4).flops_per_s(runs[0]) == 756e12
    with pytest.raises(ValueError, match="--hardware H10: unknown peak; did you mean 'H100"):
        price.estimate_speed(runs, "H10")


def make_run(folder: Path, n_steps: int, model: dict[str, Any], **data: int) -> PlannedRun:
    """Return a run on random tokens."""
    dataset = {"path_train": "synthetic", **data}
    raw = {"model": model, "dataset": dataset, "lr_scheduler": {"total_iterations": n_steps}}
    config = resolve_config(raw)
    return PlannedRun(config, plan_run(config), folder)


def test_each_size_is_priced_at_its_predicted_mfu(tmp_path: Path) -> None:
    shapes = [{"size": size, "n_tokens": 50257} for size in ("7M", "106M", "425M")]
    sized = [make_run(tmp_path / shape["size"], 100, shape, microbatch_size=8) for shape in shapes]
    speed = price.estimate_speed(sized, "H100")
    assert "unmeasured, probably high" in speed.basis
    for run in sized:
        step = predict_step(
            run.config.model, 2048, True, load_devices()["H100"], price.choose_settings(run.config),
            microbatch_tokens=16384, tokens_per_step=524288,
        )  # fmt: skip
        assert speed.seconds(run) == pytest.approx(price.GPU_STARTUP_S + 100 * 524288 / step.tokens_per_s)
    # the smallest model reaches less than half of the largest's share of the peak
    assert speed.flops_per_s(sized[0]) < speed.flops_per_s(sized[2]) / 2
    four = price.estimate_speed(sized, "H100", gpus_per_run=4)
    assert four.flops_per_s(sized[2]) == 4 * speed.flops_per_s(sized[2])


def test_settings_of_a_run_are_those_of_its_configuration() -> None:
    def choose(**dist: object) -> StepSettings:
        raw = {"model": {"size": "7M", "n_tokens": 500}, "lr_scheduler": {"total_iterations": 1}}
        config = resolve_config(raw | {"dist": {"dtype": "bfloat16"}})
        return price.choose_settings(replace(config, dist=replace(config.dist, **dist)))

    settings, other = choose(activation_checkpointing="full"), choose(residual_dtype="float32", compile=False)
    assert settings.compiled and settings.stream == "bfloat16" and settings.recompute
    assert not other.compiled and other.stream == "float32" and not other.recompute
    assert not choose(engine="deepspeed").compiled


def test_the_table_begins_with_the_total_and_trunks_are_paid_once(runs) -> None:
    short, trunk = runs
    speed = price.Speed("a test", lambda run: 1e6, startup_s=6.0)
    lines = price.format_price(runs, speed, jobs=1).splitlines()
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
    speed = price.Speed("a test", lambda run: 1e6, startup_s=0.0)
    hours = sum(run.trained_flops for run in runs) / 1e6 / 3600
    tariff = price.Tariff(2.5, hardware="H100")
    text = price.format_price(runs, speed, 1, 2, tariff=tariff)
    line = next(line for line in text.splitlines() if "GPU-hours" in line)
    assert f"{2 * hours:.3g} GPU-hours" in line and f"{5 * hours:.3g} at 2.5 an hour" in line
    assert f"up to {2 * hours * 0.7:.3g} kWh at 700 W" in line
    assert "GPU-hours" not in price.format_price(runs, speed, 1, 2, tariff=price.Tariff())


def test_the_power_of_the_user_precedes_the_data_sheet_and_mixed_hardware_has_none() -> None:
    assert "up to 0.350 kWh at 350 W" in price.Tariff(watts=350.0, hardware="H100").describe(3600)
    assert price.Tariff(hardware="NVIDIA H200").describe(7200) == "2.00 GPU-hours, up to 1.40 kWh at 700 W"
    assert price.Tariff(hardware="CPU, 2 threads").describe(3600) == price.Tariff().describe(3600) == ""
    h200: dict[str, Any] = {"wall_s": 1800.0, "n_ranks": 4, "hardware": "NVIDIA H200"}
    assert sum_device_seconds([h200, h200 | {"n_ranks": 2}]) == (10800.0, "NVIDIA H200")
    assert sum_device_seconds([h200, {"wall_s": 10.0, "hardware": "CPU"}, {"wall_s": None}]) == (
        7210.0,
        None,
    )


def test_held_out_losses_are_in_the_price(runs) -> None:
    run = runs[1]
    assert price.scoring_flops(run) == 0
    dataset = replace(run.config.dataset, path_eval=run.config.dataset.path_train)
    checkpoint = replace(run.config.checkpoint, chkpt_at=[10, 20])
    scored = replace(run, config=replace(run.config, dataset=dataset, checkpoint=checkpoint))
    # 64,000 targets, at steps 10, 20 and 40
    assert price.scoring_flops(scored) == pytest.approx(run.plan.flops_per_token / 3 * 64_000 * 3)
    masks = replace(scored, plan=replace(run.plan, objective="masked_diffusion"))
    assert price.scoring_flops(masks) == 8 * price.scoring_flops(scored)


def run_probes(
    probes: Sequence[PlannedRun], launcher: Launcher, on_poll: Callable[[Any], None], *more: object
) -> tuple[None, bool]:
    """Write what probes leave after 3 s of start-up, with steps of 2 ms and 1e9 FLOPs a second."""
    on_poll(None)
    assert len(probes) == 2
    for run in probes:
        run.folder.mkdir(parents=True)
        step_s = 0.002 + price.flops_per_step(run) / 1e9
        # the first step compiles for 1.5 s
        steps = range(1, run.plan.n_steps + 1)
        lines = [{"kind": "train", "step": i, "elapsed_s": 1.5 + i * step_s} for i in steps]
        lines.append({"kind": "validation", "step": run.plan.n_steps, "loss": 1.0})
        (run.folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
        write_result(run)
        (run.folder / CONFIG).touch()
        for name, time_s in ((CONFIG, 0.0), (RESULT, 3.0 + run.plan.n_steps * step_s)):
            os.utime(run.folder / name, (time_s, time_s))
    return None, True


class NoLauncher(Launcher):
    """Is never called, since `run_all` is replaced."""


def test_timed_steps_give_fixed_cost_rate_and_start_up(runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.study.price.run_all", run_probes)
    wide = {"d_model": 64, "n_heads": 2, "n_layers": 2, "n_tokens": 300}
    large = make_run(runs[0].folder.with_name("wide"), 30, wide, seq_len=16, batch_size=4)
    speed = price.time_steps([runs[0], large, runs[1]], NoLauncher(), 2)
    assert speed.flops_per_s(large) == pytest.approx(1e9, rel=1e-3)
    assert (speed.step_s, speed.startup_s) == (pytest.approx(0.002, rel=1e-2), pytest.approx(3.0, abs=0.1))
    expected = 3.0 + 30 * 0.002 + large.plan.train_flops / 1e9
    assert speed.seconds(large) == pytest.approx(expected, rel=0.05)
    assert price.time_steps(runs, NoLauncher(), 2, timeout_s=-1.0) is price.UNKNOWN_SPEED  # none ends in time


def test_runs_that_cannot_be_timed_have_no_price(runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.study.price.run_all", lambda *_: (None, True))  # no result
    assert price.time_steps(runs, NoLauncher(), 2) is price.UNKNOWN_SPEED
    monkeypatch.setattr("megatron.study.price.run_all", lambda *_: (None, False))  # a signal
    with pytest.raises(KeyboardInterrupt):
        price.time_steps(runs, NoLauncher(), 2)
