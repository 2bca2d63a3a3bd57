"""Prices on a GPU: MFU by size, correction by finished runs, money and energy."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.report.page_content import describe_cost
from megatron.study.roofline_price import RooflineSpeed, choose_settings, predict_run_seconds

from megatron.plan.hardware import DEVICES
from megatron.plan.resolve import resolve_config
from megatron.plan.roofline import predict_step
from megatron.plan.run_plan import plan_run
from megatron.report.study_data import Study
from megatron.study.ladder import PlannedRun
from megatron.study.price import Speed, estimate_speed
from megatron.study.price_table import format_price_table
from megatron.study.tariff import Tariff, fill_watts, sum_device_seconds

H100 = DEVICES["H100"]


def make_run(folder: Path, size: str, objective: str = "autoregressive", steps: int = 100) -> PlannedRun:
    config = resolve_config(
        {
            "name": f"{objective}-{size}",
            "model": {"size": size, "n_tokens": 50257},
            "objective": {"name": objective},
            "dataset": {"path_train": "synthetic", "microbatch_size": 8},
            "lr_scheduler": {"total_iterations": steps},
            "logging": {"run_dir": str(folder / f"{objective}-{size}")},
        }
    )
    return PlannedRun(config, plan_run(config), folder / f"{objective}-{size}")


def finish(run: PlannedRun, wall_s: float, hardware: str, n_ranks: int = 1) -> None:
    run.folder.mkdir(parents=True)
    result = {
        "identity": run.plan.identity, "wall_s": wall_s, "hardware": hardware, "n_ranks": n_ranks,
    }  # fmt: skip
    (run.folder / "result.json").write_text(json.dumps(result))


@pytest.fixture
def runs(tmp_path: Path) -> list[PlannedRun]:
    return [make_run(tmp_path, size) for size in ("7M", "106M", "425M")]


def test_each_size_is_priced_at_its_predicted_mfu(runs: list[PlannedRun]) -> None:
    speed = estimate_speed(runs, hardware="H100")
    assert isinstance(speed, RooflineSpeed) and "unmeasured, probably high" in speed.basis
    for run in runs:
        step = predict_step(
            run.config.model, 2048, True, H100, choose_settings(run.config, run.plan.n_params),
            microbatch_tokens=16384, tokens_per_step=524288,
        )  # fmt: skip
        expected = 100 * 524288 / step.tokens_per_s
        assert speed.seconds(run) == pytest.approx(speed.startup_s + expected)
    # the smallest model reaches less than half of the largest's share of the peak
    rates = [run.plan.train_flops / (speed.seconds(run) - speed.startup_s) for run in runs]
    assert rates[0] < rates[2] / 2
    # four GPUs divide the steps, not the start-up
    four = estimate_speed(runs, hardware="H100", gpus_per_run=4)
    assert four.seconds(runs[2]) - speed.startup_s == pytest.approx(
        (speed.seconds(runs[2]) - speed.startup_s) / 4
    )
    # a share of the peak that the user names replaces the prediction
    given = estimate_speed(runs, hardware="H100", mfu=0.5)
    assert isinstance(given, Speed) and given.flops_per_s == 0.5 * 989e12


def test_finished_runs_of_some_sizes_correct_the_others(runs: list[PlannedRun]) -> None:
    small, middle, large = runs
    predicted = [predict_run_seconds(run, H100, 100) for run in runs]
    finish(small, 3.0 * predicted[0], "NVIDIA H100 80GB HBM3")
    speed = estimate_speed(runs)  # the GPU is that of the finished runs
    assert isinstance(speed, RooflineSpeed) and "1 finished runs" in speed.basis and speed.device is H100
    assert [speed.seconds(run) - speed.startup_s for run in runs] == pytest.approx(
        [3.0 * seconds for seconds in predicted]
    )
    # two GPUs took half of 1.2 times the predicted time: the ratio is 1.2
    finish(large, 1.2 * predicted[2] / 2, "NVIDIA H100 80GB HBM3", n_ranks=2)
    speed = estimate_speed(runs, hardware="H100")
    assert speed.seconds(large) - speed.startup_s == pytest.approx(1.2 * predicted[2])
    assert speed.seconds(small) - speed.startup_s == pytest.approx(3.0 * predicted[0])
    between = (speed.seconds(middle) - speed.startup_s) / predicted[1]
    assert 1.2 < between < 3.0
    # runs on another GPU say nothing about this one
    other = estimate_speed(runs, hardware="A100")
    assert isinstance(other, RooflineSpeed) and other.ratios == {}


def test_an_objective_without_finished_runs_takes_the_ratio_of_the_other(tmp_path: Path) -> None:
    ours, diffusion = make_run(tmp_path, "44M"), make_run(tmp_path, "44M", "masked_diffusion")
    finish(ours, 2.0 * predict_run_seconds(ours, H100, 100), "NVIDIA H100 80GB HBM3")
    speed = estimate_speed([ours, diffusion])
    assert isinstance(speed, RooflineSpeed)
    expected = 2.0 * predict_run_seconds(diffusion, H100, 100)
    assert speed.seconds(diffusion) - speed.startup_s == pytest.approx(expected)


def test_finished_runs_on_a_cpu_are_fitted_as_before(runs: list[PlannedRun]) -> None:
    for run in runs[:2]:
        finish(run, 0.02 * 100 + run.plan.train_flops / 1e9, "CPU, 1 threads")
    speed = estimate_speed(runs, probe=lambda: pytest.fail("no timing is needed"))
    assert isinstance(speed, Speed) and speed.flops_per_s == pytest.approx(1e9, rel=1e-3)


def test_the_table_contains_money_and_energy(runs: list[PlannedRun]) -> None:
    speed = Speed(1e15, 0.0, "a test", 0.0)
    hours = sum(run.plan.train_flops for run in runs) / 1e15 / 3600
    tariff = fill_watts(Tariff(2.5, "EUR"), "H100")
    text = format_price_table(runs, speed, 1, 2, tariff=tariff)
    line = next(line for line in text.splitlines() if "GPU-hours" in line)
    assert f"{2 * hours:.3g} GPU-hours" in line and f"{5 * hours:.3g} EUR at 2.5 EUR an hour" in line
    assert f"up to {2 * hours * 0.7:.3g} kWh at 700 W" in line
    assert "GPU-hours" not in format_price_table(runs, speed, 1, 2)
    assert "GPU-hours" not in format_price_table(runs, speed, 1, 2, tariff=Tariff(currency="EUR"))


def test_the_power_of_the_user_precedes_the_data_sheet() -> None:
    assert fill_watts(Tariff(watts=350.0), "H100").watts == 350.0
    assert fill_watts(Tariff(), "NVIDIA H200").watts == 700.0
    assert fill_watts(Tariff(), "CPU, 2 threads").watts is None and fill_watts(Tariff(), None).watts is None


def test_the_cost_of_finished_runs_is_in_the_report() -> None:
    h200 = {"wall_s": 1800.0, "n_ranks": 4, "hardware": "NVIDIA H200"}
    study = Study(Path(), [], {}, None, {}, results=[h200, h200 | {"n_ranks": 2}])
    assert sum_device_seconds(study.results) == (10800.0, "NVIDIA H200")
    assert describe_cost(study, Tariff(2.0, "EUR")) == (
        "3.00 GPU-hours, 6.00 EUR at 2 EUR an hour, up to 2.10 kWh at 700 W"
    )
    cpu = replace(study, results=[{"wall_s": 3600.0, "n_ranks": 1, "hardware": "CPU, 1 threads"}])
    assert describe_cost(cpu, Tariff()) == ""
    assert describe_cost(cpu, Tariff(watts=50.0)) == "1.00 device-hours, up to 0.0500 kWh at 50 W"
    # several kinds of hardware: no power is assumed, and a damaged result counts nothing
    mixed = replace(study, results=[h200, cpu.results[0], {"wall_s": None}])
    assert describe_cost(mixed, Tariff()) == "" and sum_device_seconds(mixed.results) == (10800.0, None)


def test_settings_of_a_run_are_those_of_its_configuration(tmp_path: Path) -> None:
    run = make_run(tmp_path, "425M")
    dist = SimpleNamespace(
        engine="torch", compile=None, dtype="bfloat16", residual_dtype=None, cuda_graphs=None,
        activation_checkpointing="full",
    )  # fmt: skip
    config = SimpleNamespace(dist=dist)
    settings = choose_settings(config, run.plan.n_params)  # type: ignore[arg-type]
    assert settings.compiled and settings.stream == "bfloat16" and settings.recompute
    assert not settings.graph and choose_settings(config, 7_000_000).graph  # type: ignore[arg-type]
    dist.residual_dtype, dist.compile, dist.engine = "float32", False, "deepspeed"
    settings = choose_settings(config, 7_000_000)  # type: ignore[arg-type]
    assert not settings.compiled and settings.stream == "float32" and not settings.graph
