"""Learning rates by arithmetic."""

import pytest

from megatron.config.schema import LrSchedulerConfig
from megatron.optim.schedule import lr_schedule


def test_warm_up_is_linear_and_never_starts_at_the_peak_or_at_zero() -> None:
    rate = lr_schedule(LrSchedulerConfig(), peak=1.0, n_steps=100, warmup_steps=4)
    assert [rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_cosine_goes_from_the_peak_through_the_middle_to_the_least_rate_at_the_last_step() -> None:
    rate = lr_schedule(LrSchedulerConfig(lr_min_ratio=0.2), peak=2.0, n_steps=104, warmup_steps=3)
    assert rate(3) == pytest.approx(2.0)
    assert rate(53) == pytest.approx(1.2)  # half way: the mean of 2.0 and 0.4
    assert rate(103) == pytest.approx(0.4)
    assert all(rate(step) >= rate(step + 1) for step in range(3, 103))


def test_constant_stays() -> None:
    rate = lr_schedule(LrSchedulerConfig(kind="constant"), peak=1e-3, n_steps=10, warmup_steps=0)
    assert {rate(step) for step in range(10)} == {1e-3}
