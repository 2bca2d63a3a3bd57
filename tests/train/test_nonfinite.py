"""Which steps are told as bad."""

import math

import pytest
import torch

from megatron.engine.base import StepReport
from megatron.parallel.world import World
from megatron.train.nonfinite import OVERFLOWS, Bad, Watch

CPU = World(0, 1, 0, torch.device("cpu"))


def steps(watch: Watch, first: int, norms: list[float], loss: float = 1.0) -> list[Bad]:
    for i, norm in enumerate(norms):
        report = StepReport(torch.tensor(loss, dtype=torch.float64), 8, torch.tensor(norm))
        watch.add(report, first + i, 4 * i, 4 * i + 3)
    return watch.found()


@pytest.mark.parametrize("no_number", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_is_a_fault_at_once(no_number: float) -> None:
    watch = Watch(CPU, gradients_may_overflow=False)
    assert steps(watch, 1, [1.0, no_number, 1.0]) == [Bad(2, [])]
    assert str(Bad(2, [])) == "step 2: the gradient is no number, though every loss is"


def test_overflows_of_float16_are_none_while_its_scale_is_sought_and_are_one_when_it_never_is() -> None:
    watch = Watch(CPU, gradients_may_overflow=True)
    assert steps(watch, 1, [math.inf] * OVERFLOWS) == []
    assert steps(watch, 1 + OVERFLOWS, [1.0] + [math.inf] * (OVERFLOWS - 1)) == []
    # the count goes on over what was told before
    assert steps(watch, 100, [math.inf, math.inf]) == [Bad(101, [])]


def test_a_loss_that_is_no_number_is_a_fault_in_float16_too_and_names_its_samples() -> None:
    watch = Watch(CPU, gradients_may_overflow=True)
    assert steps(watch, 7, [math.nan], loss=math.nan) == [Bad(7, [(0, 0, 3)])]
