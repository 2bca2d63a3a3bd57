"""How long a run is, and how long its warm-up and decay: given in steps, tokens, epochs or fractions."""

import math
from fractions import Fraction

from megatron.config.schema import DatasetConfig, LrSchedulerConfig

DECAY_FRACTION = 0.2  # of the run, where nothing is said: Haegele et al., arXiv 2405.18392, figure 5


def check_length(length: LrSchedulerConfig) -> None:
    """What the keys of `lr_scheduler` say about one another. ValueError names them."""
    one_of(length, "the length", "total_iterations", "total_tokens", "total_epochs")
    at_most_one(length, "the warm-up", "warmup_iterations", "warmup_tokens", "warmup_fraction")
    decays = ("decay_iterations", "decay_tokens", "decay_fraction")
    at_most_one(length, "the decay", *decays)
    told = [key for key in decays if getattr(length, key) is not None]
    told += ["decay_shape"] if length.decay_shape != LrSchedulerConfig.decay_shape else []
    if told and length.kind != "wsd":
        raise ValueError(f"lr_scheduler.{told[0]}: kind {length.kind} has no decay of its own; set kind: wsd")
    for key in ("warmup_fraction", "decay_fraction", "lr_min_ratio"):
        value = getattr(length, key)
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"lr_scheduler.{key}: found {value}, wanted between 0 and 1")
    for key in ("warmup_iterations", "warmup_tokens"):
        if (getattr(length, key) or 0) < 0:
            raise ValueError(f"lr_scheduler.{key}: found {getattr(length, key)}, wanted 0 or more")


def one_of(length: LrSchedulerConfig, what: str, *keys: str) -> None:
    """ValueError unless exactly one of the keys is given."""
    at_most_one(length, what, *keys)
    if all(getattr(length, key) is None for key in keys):
        raise ValueError(f"lr_scheduler: give {what} as {_either(keys)}")


def at_most_one(length: LrSchedulerConfig, what: str, *keys: str) -> None:
    """ValueError where two of the keys are given."""
    if sum(getattr(length, key) is not None for key in keys) > 1:
        raise ValueError(f"lr_scheduler: give {what} as {_either(keys)}, not as two of them")


def n_steps_of(length: LrSchedulerConfig, data: DatasetConfig, samples_held: int) -> int:
    """Steps of the run; `samples_held` is what one epoch holds.

    Tokens are rounded to whole steps. Epochs are exact: the run ends with the last step that lies wholly
    within them, so that no sample is seen more often than asked and fewer than one batch is left out.
    """
    tokens_per_step = data.batch_size * data.seq_len
    if length.total_iterations is not None:
        n_steps = length.total_iterations
    elif length.total_tokens is not None:
        n_steps = round(length.total_tokens / tokens_per_step)
    else:
        assert length.total_epochs is not None, "read.py lets exactly one of the three lengths through"
        n_steps = math.floor(_exact(length.total_epochs) * samples_held / data.batch_size)
    if n_steps < 1:
        told = "total_iterations" if length.total_iterations is not None else "total_tokens"
        told = "total_epochs" if length.total_epochs is not None else told
        raise ValueError(
            f"lr_scheduler.{told}: {getattr(length, told):,} is no whole step of {data.batch_size:,} samples "
            f"of {data.seq_len:,}, {tokens_per_step:,} tokens; ask for more, or lower dataset.batch_size"
        )
    return n_steps


def check_batch(data: DatasetConfig, samples_held: int) -> None:
    """ValueError where one step would read a sample twice: more samples in a batch than in an epoch."""
    if data.batch_size > samples_held:
        raise ValueError(
            f"dataset.batch_size: {data.batch_size:,} samples a step, while an epoch of the corpus has "
            f"{samples_held:,} of {data.seq_len:,} tokens; take a smaller batch, shorter samples or more text"
        )


def warmup_steps_of(length: LrSchedulerConfig, n_steps: int, tokens_per_step: int) -> int:
    """Steps of warm-up; tokens and fractions are rounded up to whole steps."""
    return _part(
        n_steps, tokens_per_step, length.warmup_iterations, length.warmup_tokens, length.warmup_fraction
    )


def decay_steps_of(length: LrSchedulerConfig, n_steps: int, tokens_per_step: int) -> int:
    """Steps of the decay at the end of a warm-up, stable, decay run; 0 for other shapes."""
    if length.kind != "wsd":
        return 0
    fraction = length.decay_fraction
    if length.decay_iterations is None and length.decay_tokens is None and fraction is None:
        fraction = DECAY_FRACTION
    return _part(n_steps, tokens_per_step, length.decay_iterations, length.decay_tokens, fraction)


def _part(
    n_steps: int, tokens_per_step: int, steps: int | None, tokens: int | None, fraction: float | None
) -> int:
    if tokens is not None:
        return -(-tokens // tokens_per_step)
    if fraction is not None:
        return math.ceil(_exact(fraction) * n_steps)
    return steps or 0


def _exact(number: float) -> Fraction:
    """0.1 as one tenth, not as the double beside it: 0.1 of 30 steps is 3 steps, not a little more."""
    return Fraction(str(number))


def _either(keys: tuple[str, ...]) -> str:
    return f"either {', '.join(keys[:-1])} or {keys[-1]}"
