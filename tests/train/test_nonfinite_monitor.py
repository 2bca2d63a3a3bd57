"""Detection of steps with NaN or Inf."""

import math

import pytest
import torch

from megatron.engine.interface import StepReport
from megatron.parallel.world import World
from megatron.train.nonfinite_monitor import MAX_OVERFLOWS, NonFiniteMonitor, NonFiniteStep

CPU = World(0, 1, 0, torch.device("cpu"))


def add_steps(
    monitor: NonFiniteMonitor, first: int, norms: list[float], loss: float = 1.0
) -> list[NonFiniteStep]:
    for i, norm in enumerate(norms):
        report = StepReport(torch.tensor(loss, dtype=torch.float64), 8, torch.tensor(norm))
        monitor.add_step(report, first + i, 4 * i, 4 * i + 3)
    return monitor.pop_bad_steps()


@pytest.mark.parametrize("no_number", [math.nan, math.inf])
def test_a_nan_gradient_is_reported_at_once(no_number: float) -> None:
    monitor = NonFiniteMonitor(CPU, gradients_may_overflow=False)
    assert add_steps(monitor, 1, [1.0, no_number, 1.0]) == [NonFiniteStep(2, [])]
    assert str(NonFiniteStep(2, [])) == "step 2: the gradient is NaN or Inf, but every loss is finite"


def test_overflows_of_float16_are_reported_only_after_many_in_a_row() -> None:
    monitor = NonFiniteMonitor(CPU, gradients_may_overflow=True)
    assert add_steps(monitor, 1, [math.inf] * MAX_OVERFLOWS) == []
    assert add_steps(monitor, 1 + MAX_OVERFLOWS, [1.0] + [math.inf] * (MAX_OVERFLOWS - 1)) == []
    # the count continues across calls
    assert add_steps(monitor, 100, [math.inf, math.inf]) == [NonFiniteStep(101, [])]


def test_a_nan_loss_is_reported_with_its_samples_also_in_float16() -> None:
    monitor = NonFiniteMonitor(CPU, gradients_may_overflow=True)
    assert add_steps(monitor, 7, [math.nan], loss=math.nan) == [NonFiniteStep(7, [(0, 0, 3)])]
