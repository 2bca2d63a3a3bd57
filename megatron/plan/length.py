"""Lengths of a run, its warm-up and its decay in steps, from steps, tokens, epochs or fractions."""

import math
from fractions import Fraction

from megatron.config.schema import DatasetConfig, LrSchedulerConfig
from megatron.plan.batch_ramp import BatchSizes

DECAY_FRACTION = 0.2  # default, of the run: Haegele et al., arXiv 2405.18392, figure 5


def count_steps(length: LrSchedulerConfig, data: DatasetConfig, epoch_samples: int) -> int:
    """Return the steps of the run. `epoch_samples` is the number of samples in one epoch.

    Tokens are rounded to whole steps. Epochs are exact: the run ends with the
    last step that is entirely within them. No sample is then read more often
    than requested, and less than one batch is skipped.
    """
    tokens_per_step, sizes = data.batch_size * data.seq_len, BatchSizes(data)
    if length.total_iterations is not None:
        n_steps = length.total_iterations
    elif length.total_tokens is not None:
        n_steps = round(length.total_tokens / tokens_per_step)  # to the nearest step
        if data.rampup_batch_size is not None:
            n_steps = sizes.count_steps(length.total_tokens // data.seq_len)  # down, as in Megatron
    else:
        assert length.total_epochs is not None, "config/check.py requires exactly one of the lengths"
        # example: 2 epochs of 1,000 samples in batches of 256 are 7.8, so 7
        # steps; 208 samples are skipped str: 0.1 is one tenth instead of the
        # nearest double, so that 0.1 of 30 steps is exactly 3 steps
        n_steps = sizes.count_steps(math.floor(Fraction(str(length.total_epochs)) * epoch_samples))
    if n_steps < 1:
        keys = ("total_iterations", "total_tokens", "total_epochs")
        key = next(key for key in keys if getattr(length, key) is not None)
        raise ValueError(
            f"lr_scheduler.{key}: {getattr(length, key):,} is less than one step of {data.batch_size:,} "
            f"samples x {data.seq_len:,} tokens = {tokens_per_step:,}. Set more, or lower dataset.batch_size."
        )
    return n_steps


def check_batch(data: DatasetConfig, epoch_samples: int) -> None:
    """Raise ValueError if a batch has more samples than an epoch: one step would read a sample twice."""
    if data.batch_size > epoch_samples:
        raise ValueError(
            f"dataset.batch_size: got {data.batch_size:,} samples a step, expected "
            f"{epoch_samples:,} or less, an epoch of {data.seq_len:,}-token samples. "
            "Use smaller batches, shorter samples or more text."
        )


def count_warmup_steps(length: LrSchedulerConfig, n_steps: int, tokens_per_step: int) -> int:
    """Return the steps of warm-up. Tokens and fractions are rounded up to whole steps."""
    return _resolve_steps(
        n_steps, tokens_per_step, length.warmup_iterations, length.warmup_tokens, length.warmup_fraction
    )


def count_decay_steps(length: LrSchedulerConfig, n_steps: int, tokens_per_step: int) -> int:
    """Return the steps of decay; 0: a constant rate, or a cosine or linear decay over the rest of the run."""
    if length.kind == "constant":
        return 0
    fraction = length.decay_fraction
    is_unset = length.decay_iterations is None and length.decay_tokens is None and fraction is None
    if is_unset and length.kind == "wsd":
        fraction = DECAY_FRACTION
    return _resolve_steps(n_steps, tokens_per_step, length.decay_iterations, length.decay_tokens, fraction)


def _resolve_steps(
    n_steps: int, tokens_per_step: int, steps: int | None, tokens: int | None, fraction: float | None
) -> int:
    if tokens is not None:
        return -(-tokens // tokens_per_step)  # rounded up
    if fraction is not None:
        # in floating point 0.07 * 100
        # is 7.000000000000001, which would give 8 steps
        return math.ceil(Fraction(str(fraction)) * n_steps)
    return steps or 0
