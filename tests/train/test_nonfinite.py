"""NaN and Inf: detected in steps and held-out losses, reported, never saved nor written as a number."""

import json
import math
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.engine.interface import StepReport
from megatron.evaluation.validate import HeldOutLoss
from megatron.io import replace_nonfinite, write_json
from megatron.plan.run_dir import METRICS, RESULT
from megatron.train import loop
from megatron.train.nonfinite_monitor import MAX_OVERFLOWS, NonFiniteMonitor, NonFiniteStep
from megatron.train.state import TrainState
from tests.train.conftest import ALONE, read_error, save_every


def read_strict(path: Path) -> list[Any]:
    """Return every line of a file as strict JSON, without NaN."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{path}: {word}")

    lines = path.read_text().splitlines() if path.name == METRICS else [path.read_text()]
    return [json.loads(line, parse_constant=refuse) for line in lines]


def spoil_scorings(monkeypatch: pytest.MonkeyPatch, *bad: int) -> None:
    """Make the held-out loss of some evaluations NaN, counted from 1."""
    validate, calls = loop.validate, count(1)

    def validate_with_nan(*positional: Any, **named: Any) -> HeldOutLoss:
        held_out = validate(*positional, **named)
        return replace(held_out, loss=math.nan, loss_se=math.inf) if next(calls) in bad else held_out

    monkeypatch.setattr(loop, "validate", validate_with_nan)


def test_a_nan_held_out_loss_ends_a_run_before_it_saves(pretrain, tmp_path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        spoil_scorings(patched, 2)
        done = pretrain(tmp_path, save_every(6), status=1)
    assert read_error(done) == (
        "error: step 12: got a held-out loss of nan, expected a finite number. "
        "Lower optim.lr, or look for a damaged corpus; nothing was saved at this step."
    )
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1 and not (tmp_path / RESULT).exists()
    kinds = [(line["kind"], line["step"]) for line in read_strict(tmp_path / METRICS)]
    assert ("validation", 6) in kinds and ("validation", 12) not in kinds
    pretrain(tmp_path, save_every(6))  # the same command again, from step 6
    assert read_strict(tmp_path / RESULT)[0]["loss"] > 0


def test_a_run_that_skips_is_not_done_without_a_loss(pretrain, tmp_path, monkeypatch) -> None:
    spoil_scorings(monkeypatch, 1, 3)
    done = pretrain(tmp_path, "evaluation.every_iterations=4", "misc.on_nonfinite=skip", status=1)
    assert "step 12: got a held-out loss of nan" in read_error(done)
    assert "step 4: got a held-out loss of nan, expected a finite number" in done.error + done.output
    lines = [line for line in read_strict(tmp_path / METRICS) if line["kind"] == "validation"]
    assert [(line["step"], line["loss"] is None) for line in lines] == [(4, True), (8, False)]
    assert not (tmp_path / RESULT).exists()


def test_a_diverged_run_ends_before_its_weights_are_saved(pretrain, tmp_path) -> None:
    changes = ["optim.lr=1e30", "optim.grad_clip=0", "logging.every_iterations=100"]
    failed = pretrain(tmp_path, *changes, save_every(2), status=1)
    assert "Lower optim.lr" in read_error(failed)
    assert not list(tmp_path.glob("checkpoints/*"))


def test_a_nan_loss_is_never_the_best() -> None:
    state = TrainState().after_validation(math.nan)
    assert state.best_loss is None
    assert state.after_validation(2.0).after_validation(math.nan).best_loss == 2.0


def test_json_of_a_run_has_no_nan(tmp_path: Path) -> None:
    content = {"a": 1.0, "b": {"c": [0.5, math.nan]}, "d": -math.inf}
    with pytest.raises(ValueError, match=r"x.json: got NaN or Inf in b.c.1, d, expected finite numbers"):
        write_json(tmp_path / "x.json", content)
    assert not list(tmp_path.iterdir())
    write_json(tmp_path / "x.json", replace_nonfinite(content))
    assert read_strict(tmp_path / "x.json")[0] == {"a": 1.0, "b": {"c": [0.5, None]}, "d": None}


def add_steps(
    monitor: NonFiniteMonitor, first: int, norms: list[float], loss: float = 1.0
) -> list[NonFiniteStep]:
    for i, norm in enumerate(norms):
        report = StepReport(torch.tensor(loss, dtype=torch.float64), 8, torch.tensor(norm))
        monitor.add_step(report, first + i, 4 * i, 4 * i + 3)
    return monitor.pop_bad_steps()


@pytest.mark.parametrize("no_number", [math.nan, math.inf])
def test_a_nan_gradient_is_reported_at_once(no_number: float) -> None:
    monitor = NonFiniteMonitor(ALONE, gradients_may_overflow=False)
    assert add_steps(monitor, 1, [1.0, no_number, 1.0]) == [NonFiniteStep(2, [])]
    assert str(NonFiniteStep(2, [])) == "step 2: the gradient is NaN or Inf, but every loss is finite"


def test_only_many_overflows_of_float16_are_reported() -> None:
    monitor = NonFiniteMonitor(ALONE, gradients_may_overflow=True)
    assert add_steps(monitor, 1, [math.inf] * MAX_OVERFLOWS) == []
    assert add_steps(monitor, 1 + MAX_OVERFLOWS, [1.0] + [math.inf] * (MAX_OVERFLOWS - 1)) == []
    # the count continues across calls
    assert add_steps(monitor, 100, [math.inf, math.inf]) == [NonFiniteStep(101, [])]
    # a NaN loss is reported with its samples
    assert add_steps(monitor, 7, [math.nan], loss=math.nan) == [NonFiniteStep(7, [(0, 0, 3)])]
