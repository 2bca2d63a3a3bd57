"""The ramp of the batch size, against Megatron's calculator written again from its source."""

import pytest

from megatron.config.schema import DatasetConfig
from megatron.plan.batch_ramp import BatchSizes
from megatron.plan.resolve import resolve_config
from megatron.plan.run_plan import plan_run
from tests.plan.test_identity import SMALL

# start, increment, samples of the ramp, full size: GPT-3's scripts first
RAMPS = [
    (16, 16, 5_859_375, 1536),
    (32, 32, 1_953_125, 512),
    (4, 2, 100, 8),
    (1, 1, 7, 5),
    (6, 3, 33, 12),
    (8, 4, 50, 8),
]


class MegatronCalculator:
    """RampupBatchsizeNumMicroBatchesCalculator of Megatron-LM (commit 00caa53), with iterations by sample."""

    def __init__(self, start: int, increment: int, ramp_samples: int, full: int) -> None:
        self.start, self.increment, self.ramp_samples, self.full = start, increment, ramp_samples, full
        n_increments = (full - start) // increment
        self.samples_per_increment = ramp_samples / n_increments if n_increments else float("inf")

    def current_batch_size(self, consumed_samples: int) -> int:
        if consumed_samples > self.ramp_samples:
            return self.full
        steps = int(consumed_samples / self.samples_per_increment)
        return self.start + steps * self.increment

    def count_iterations(self, train_samples: int) -> int:
        """Return the iterations of `update_train_iters` in training.py."""
        iterations = consumed = 0
        while consumed <= self.ramp_samples:
            size = self.current_batch_size(consumed)
            consumed, iterations = consumed + size, iterations + 1
        return iterations + (train_samples - consumed) // self.full


@pytest.mark.parametrize("ramp", RAMPS)
def test_sizes_and_lengths_are_those_of_megatron(ramp: tuple[int, int, int, int]) -> None:
    *grows, full = ramp
    data = DatasetConfig(seq_len=10, batch_size=full, rampup_batch_size=grows)
    ours, theirs = BatchSizes(data), MegatronCalculator(*ramp)
    position, step = 0, 0
    while position < grows[2] + 5 * full:
        size = ours.size_at(position)
        assert size == theirs.current_batch_size(position), position
        if step % 97 == 0 or full < 20:
            assert ours.samples_after(step) == position
            assert ours.count_steps(position) == step == ours.count_steps(position + size - 1)
        position, step = position + size, step + 1
    assert ours.list_sizes() == [*range(grows[0], full + 1, grows[1])]
    for n_samples in (position, position + 1, 3 * position + full - 1):
        assert ours.count_steps(n_samples) == theirs.count_iterations(n_samples)


def test_a_constant_size_is_the_quotient() -> None:
    sizes = BatchSizes(DatasetConfig(batch_size=8))
    assert [sizes.size_at(n) for n in (0, 8, 8000)] == [8, 8, 8]
    assert (sizes.samples_after(7), sizes.count_steps(55), sizes.count_steps(56)) == (56, 6, 7)
    assert sizes.list_sizes() == [8]


def test_a_plan_counts_the_samples_of_the_ramp() -> None:
    """Sizes 2, 4, 6 and 8, each for about 8 samples: 2 2 2 2, 4 4, 6 6 and then 8."""
    ramp = {"seq_len": 16, "batch_size": 8, "rampup_batch_size": [2, 2, 24], "path_train": "synthetic"}
    schedule = {"total_iterations": 13, "warmup_tokens": 3 * 8 * 16}
    plan = plan_run(resolve_config({**SMALL, "dataset": ramp, "lr_scheduler": schedule}))
    n_samples = 4 * 2 + 2 * 4 + 2 * 6 + 5 * 8
    assert (plan.n_steps, plan.train_tokens, plan.warmup_steps) == (13, 16 * n_samples, 3)
    assert plan.train_flops == plan.flops_per_token * plan.train_tokens
    assert sum(corpus.samples for corpus in plan.corpora) == n_samples
    assert plan.tokens_per_step == 16 * n_samples // 13
    tokens = {"total_tokens": 16 * (n_samples + 7)}  # seven more samples are not a step
    again = plan_run(resolve_config({**SMALL, "dataset": ramp, "lr_scheduler": tokens}))
    assert (again.n_steps, again.train_tokens) == (13, 16 * n_samples)


@pytest.mark.parametrize("ramp", [[16, 2, 10], [3, 2, 10], [2, 2]])
def test_a_ramp_that_misses_the_batch_size_is_refused(ramp: list[int]) -> None:
    with pytest.raises(ValueError, match="dataset.rampup_batch_size: got .* that reach dataset.batch_size 8"):
        BatchSizes(DatasetConfig(batch_size=8, rampup_batch_size=ramp))
