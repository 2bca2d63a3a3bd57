"""Learning rate schedules against values computed by hand."""

import math

import pytest

from megatron.config.schema import LrSchedulerConfig
from megatron.optim.schedule import LearningRateSchedule, build_lr_schedule


def test_warm_up_is_linear_and_starts_above_zero() -> None:
    rate = build_lr_schedule(LrSchedulerConfig(), peak=1.0, n_steps=100, warmup_steps=4)
    assert [rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    rate = build_lr_schedule(LrSchedulerConfig(kind="constant"), peak=1e-3, n_steps=10, warmup_steps=0)
    assert {rate(step) for step in range(10)} == {1e-3}
    # linear falls by equal amounts to the least rate at the last step
    linear = LrSchedulerConfig(kind="linear", lr_min_ratio=0.0)
    rate = build_lr_schedule(linear, 8.0, n_steps=7, warmup_steps=2)
    assert [rate(step) for step in range(7)] == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0]


def test_cosine_ends_at_the_least_rate_at_the_last_step() -> None:
    rate = build_lr_schedule(LrSchedulerConfig(lr_min_ratio=0.2), peak=2.0, n_steps=104, warmup_steps=3)
    assert rate(3) == pytest.approx(2.0)
    assert rate(53) == pytest.approx(1.2)  # halfway: the mean of 2.0 and 0.4
    assert rate(103) == pytest.approx(0.4)
    assert all(rate(step) >= rate(step + 1) for step in range(3, 103))


@pytest.mark.parametrize(
    ("shape", "last_four"),
    [
        ("linear", [0.75, 0.5, 0.25, 0.0]),
        ("sqrt", [0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0]),
        ("cosine", [(1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0]),
    ],
)
def test_wsd_decays_in_the_configured_shape(shape: str, last_four: list[float]) -> None:
    config = LrSchedulerConfig(kind="wsd", decay_shape=shape, lr_min_ratio=0.2)
    rate = build_lr_schedule(config, 1.0, n_steps=10, warmup_steps=2, decay_steps=4)
    assert [rate(step) for step in range(6)] == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert [rate(step) for step in range(6, 10)] == pytest.approx([0.2 + 0.8 * part for part in last_four])


def test_wsd_runs_share_their_steps_before_the_decay() -> None:
    config = LrSchedulerConfig(kind="wsd")
    short = build_lr_schedule(config, 1.0, n_steps=50, warmup_steps=5, decay_steps=10)
    long = build_lr_schedule(config, 1.0, n_steps=200, warmup_steps=5, decay_steps=40)
    assert short.first_difference(long, 40) is None
    assert short.first_difference(long, 50) == 40
    assert LearningRateSchedule(**short.as_dict()) == short


def test_a_shorter_cosine_is_followed_by_the_minimum() -> None:
    # Megatron: lr = low + (peak - low) (1 + cos(pi (k - w) / (d - w))) / 2 from step w to d, then low
    config = LrSchedulerConfig(kind="cosine", total_iterations=20, lr_min_ratio=0.1, decay_iterations=8)
    rate = build_lr_schedule(config, 2.0, n_steps=20, warmup_steps=4, decay_steps=8)
    expected = [0.2 + 1.8 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(9)]
    assert [rate(step) for step in range(4, 13)] == pytest.approx(expected)
    assert [rate(step) for step in range(12, 20)] == pytest.approx([0.2] * 8)
    longer = build_lr_schedule(config, 2.0, n_steps=20, warmup_steps=4, decay_steps=32)
    assert longer(19) == pytest.approx(0.2 + 1.8 * (1 + math.cos(math.pi * 15 / 32)) / 2)
