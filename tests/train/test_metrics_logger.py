"""Logging of a run: log line, metrics.jsonl, TensorBoard, Weights & Biases, profiles and memory."""

import gzip
import json
import sys
from pathlib import Path

import pytest
import torch

from megatron.data.synthetic import SyntheticSamples
from megatron.engine.interface import StepReport
from megatron.evaluation.validate import validate
from megatron.objective.autoregressive import Autoregressive
from megatron.objective.task import Task
from megatron.plan.resolve import resolve_config
from megatron.plan.run_dir import read_metrics
from megatron.plan.run_plan import plan_run
from megatron.train.memory_usage import explain_oom
from megatron.train.metrics_logger import MetricsLogger, format_log_line
from megatron.train.state import TrainState
from tests.train.conftest import ALONE, read_error, read_lines
from tests.train.faults import limit_memory

SMALL = {
    "model": {"d_model": 64, "n_heads": 4, "n_layers": 2, "n_tokens": 100},
    "dataset": {"path_train": "synthetic", "seq_len": 16, "batch_size": 4},
    "lr_scheduler": {"total_iterations": 10},
    "logging": {"tensorboard": False},
}


def test_the_log_line_equals_that_of_torchtitan() -> None:
    line = format_log_line(100, 6.4277, 2.9062, (158.61, 0.8620), 17_581, 1018.20, 0.4525)
    assert line == (
        "step: 100  loss:  6.42770  grad_norm:  2.9062  memory: 158.61GiB(86.20%)  "
        "tps: 17,581  tflops: 1,018.20  mfu: 45.25%"
    )


def open_logger(run: Path, **logging: object) -> MetricsLogger:
    """Open the logger of a small run."""
    config = resolve_config({**SMALL, "logging": SMALL["logging"] | logging})
    return MetricsLogger(config, plan_run(config), ALONE, run)


def log_step(logger: MetricsLogger, step: int) -> None:
    """Log a step of 64 tokens with two nats each."""
    report = StepReport(torch.tensor(128.0, dtype=torch.float64), 64, torch.tensor(1.0))
    logger.accumulate(report, step, (0, 3))
    logger.log_train(TrainState(step=step, next_sample=4 * step, tokens_seen=64 * step), report, 0.1)


def test_both_utilisations_follow_from_the_tokens_and_the_peak(tmp_path) -> None:
    logger = open_logger(tmp_path)
    logger.peak_tflops = 1e-6  # a very small device
    log_step(logger, 1)
    logger.close()
    line = next(read_metrics(tmp_path))
    # 4 x 64 x 64 + 3 x 64 x 128 per block, 128 rows of embedding, 5 norms
    n, scores = 2 * (4 * 64 * 64 + 3 * 64 * 128) + 128 * 64 + 5 * 64, 12 * 2 * 64 * 16
    assert line["loss"] == 2.0
    assert line["mfu"] == pytest.approx(line["tps"] * (6 * n + scores) / 1e6)
    executed = 6 * (n - 5 * 64) + scores * 17 / 32
    assert line["mfu_executed"] == pytest.approx(line["tps"] * executed / 1e6)


def test_a_single_held_out_sample_has_no_standard_error(tmp_path) -> None:
    class Even:
        """Engine with a loss of two nats for each of 16 tokens."""

        def score(self, task: Task) -> tuple[torch.Tensor, int]:
            return torch.full((1,), 32.0, dtype=torch.float64), 16

    samples = SyntheticSamples(100, seq_len=16, seed=0, held_out=True)
    held_out = validate(Even(), Autoregressive(), samples, ALONE, batch_size=4, max_samples=1)
    assert (held_out.loss, held_out.loss_se, held_out.n_tokens) == (2.0, None, 16)
    logger = open_logger(tmp_path)
    logger.log_validation(TrainState(step=1, next_sample=4, tokens_seen=64), held_out, None)
    logger.close()
    assert next(read_metrics(tmp_path))["loss_se"] is None


def test_a_window_of_steps_is_profiled(pretrain, tmp_path) -> None:
    pretrain(tmp_path, "lr_scheduler.total_iterations=6", "logging.profile_steps=[3,4]")
    folder = tmp_path / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["steps_3-4.json.gz", "steps_3-4.txt"]
    with gzip.open(folder / "steps_3-4.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    updates = [event for event in events if "Optimizer.step#AdamW" in event.get("name", "")]
    assert len(updates) == 2
    assert "aten::mm" in (folder / "steps_3-4.txt").read_text()


def test_an_out_of_memory_error_contains_a_fix(pretrain, tmp_path) -> None:
    changes = ["dataset.path_train=synthetic", "dataset.path_eval=synthetic", "model.n_tokens=200"]
    # the first feed-forward allocates [4096 x 32, 65536] float32: 32 GiB
    changes += ["dataset.batch_size=4096", "model.d_ff=65536"]
    last = read_error(pretrain(tmp_path, *changes, change=limit_memory, status=1))
    assert last.startswith("error: step 1, rank 0: out of memory on cpu at a peak of ")
    assert "with 4096 samples of 32 tokens per forward. Set dataset.microbatch_size to 2048 or less" in last


def test_only_running_out_of_memory_is_explained() -> None:
    for error, key, rows, sentence in (
        (RuntimeError("shapes differ"), "dataset.microbatch_size", 8, "shapes differ"),
        (MemoryError(), "evaluation.batch_size", 8, "Set evaluation.batch_size to 4"),
        (torch.OutOfMemoryError("CUDA out of memory"), "", 1, "Lower dataset.seq_len"),
        (RuntimeError("backend raised: OutOfMemoryError: CUDA out of memory"), "a", 8, "Set a to 4"),
    ):
        expected = RuntimeError if sentence == "shapes differ" else ValueError
        with pytest.raises(expected, match=sentence), explain_oom(1, key, rows, 16, ALONE):
            raise error


def test_weights_and_biases_contains_the_values_of_metrics(tmp_path, monkeypatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for limit in ("X_SERVICE_WAIT", "INIT_TIMEOUT"):  # defaults are 30 and 90 s
        monkeypatch.setenv(f"WANDB_{limit}", "240")
    logger = open_logger(tmp_path, wandb="scaling")
    for step in (1, 2):
        log_step(logger, step)
    last = [*read_metrics(tmp_path)][-1]
    run = logger.scalars.wandb
    assert (run.project, run.summary["step"]) == ("scaling", 2)
    values = {name: run.summary[f"train/{name}"] for name in ("loss", "lr", "grad_norm", "tps")}
    assert values == {name: last[name] for name in values}
    logger.close()


@pytest.mark.parametrize(
    ("module", "change", "fix"),
    [
        ("wandb", "logging.wandb=scaling", "pip install wandb, or omit the key."),
        ("torch.utils.tensorboard", "logging.tensorboard=true", "or set logging.tensorboard=false."),
    ],
)
def test_a_missing_logging_library_is_named(pretrain, tmp_path, monkeypatch, module, change, fix) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    last = pretrain(tmp_path, change, status=1).error.strip()
    assert last.startswith(f"error: {change.partition('=')[0]}: import of {module} halted")
    assert last.endswith(fix) and "\n" not in last and list(read_metrics(tmp_path)) == []


def test_tensorboard_contains_the_values_of_metrics(pretrain, tmp_path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pretrain(tmp_path, "logging.tensorboard=true")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for kind, names in (("train", ("loss", "lr", "grad_norm", "tps")), ("validation", ("loss", "loss_se"))):
        lines = read_lines(tmp_path, kind)
        assert lines
        for name in names:
            points = [(event.step, event.value) for event in events.Scalars(f"{kind}/{name}")]
            assert [step for step, _ in points] == [line["step"] for line in lines]
            # events hold float32
            assert [value for _, value in points] == pytest.approx([line[name] for line in lines], rel=1e-6)
