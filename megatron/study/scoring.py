"""FLOPs of a run's held-out losses."""

import contextlib

from megatron.plan.datapaths import SYNTHETIC, read_corpora
from megatron.plan.exposure import count_epoch_samples
from megatron.study.ladder import PlannedRun

FORWARD_SHARE = 1 / 3  # of a training step's FLOPs
SYNTHETIC_SAMPLES = 64  # number of held-out samples of random tokens


def scoring_flops(run: PlannedRun) -> float:
    """Return the FLOPs of a run's held-out losses: the final one and those during training."""
    config, plan = run.config, run.plan
    if config.dataset.path_eval is None:
        return 0.0
    n_samples = SYNTHETIC_SAMPLES
    if config.dataset.path_eval != SYNTHETIC:
        n_samples = 0
        with contextlib.suppress(OSError, ValueError):  # missing text is reported by the run
            corpora = read_corpora(config.dataset.path_eval)
            n_samples = sum(count_epoch_samples(corpus.prefix, plan.seq_len) for corpus in corpora)
    n_samples = min(n_samples, config.evaluation.max_samples or n_samples)
    # one forward pass per mask sample for masked diffusion
    n_masks = 1 if plan.objective == "autoregressive" else config.evaluation.num_mc
    # the final loss is at n_steps; a set, since a checkpoint and a validation can coincide
    at = {plan.n_steps, *(config.checkpoint.chkpt_at or ())}
    for every in (config.evaluation.every_iterations, config.checkpoint.chkpt_saving_iterations):
        # range stops before n_steps, which is in the set already
        at |= set(range(every, plan.n_steps, every)) if every else set()
    # a branch scores only after its branch point
    # Example: a branch at 400 of 500 steps that scores every 100 steps scores at 500 only, not again at 100
    # ... 400.
    n_times = sum(step > plan.n_steps - run.trained_steps for step in at)
    return FORWARD_SHARE * plan.flops_per_token * n_samples * plan.seq_len * n_masks * n_times
