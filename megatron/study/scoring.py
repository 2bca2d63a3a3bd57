"""FLOPs of a run's held-out losses."""

import contextlib

from megatron.plan.datapaths import SYNTHETIC, read_corpora
from megatron.plan.exposure import count_epoch_samples
from megatron.study.ladder import PlannedRun

FORWARD_SHARE = 1 / 3  # of a training step's FLOPs
SYNTHETIC_SAMPLES = 64  # number of held-out samples of random tokens


def scoring_flops(run: PlannedRun) -> float:
    """Return the FLOPs of a run's held-out losses: those during training, the final one, and the test."""
    config, plan = run.config, run.plan
    n_samples, n_test = (
        _count_scored_samples(path, run) for path in (config.dataset.path_eval, config.dataset.path_test)
    )
    # one forward pass per mask sample for masked diffusion
    n_masks = 1 if plan.objective == "autoregressive" else config.evaluation.num_mc
    # the final loss is at n_steps; a set, since a checkpoint and a validation
    # can coincide
    at = {plan.n_steps, *(config.checkpoint.chkpt_at or ())}
    for every in (config.evaluation.every_iterations, config.checkpoint.chkpt_saving_iterations):
        # range stops before n_steps, which is in the set already
        at |= set(range(every, plan.n_steps, every)) if every else set()
    # a branch scores only after its branch point
    # Example: a branch at 400 of 500 steps that scores every 100 steps scores
    # at 500 only, not again at 100 ... 400.
    n_times = sum(step > plan.n_steps - run.trained_steps for step in at)
    n_scored = n_samples * n_times + n_test
    return FORWARD_SHARE * plan.flops_per_token * n_scored * plan.seq_len * n_masks


def _count_scored_samples(path: str | None, run: PlannedRun) -> int:
    if path is None:
        return 0
    n_samples = SYNTHETIC_SAMPLES
    if path != SYNTHETIC:
        n_samples = 0
        with contextlib.suppress(OSError, ValueError):  # missing text is reported by the run
            n_samples = sum(
                count_epoch_samples(corpus.prefix, run.plan.seq_len) for corpus in read_corpora(path)
            )
    return min(n_samples, run.config.evaluation.max_samples or n_samples)
