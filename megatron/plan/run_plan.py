"""Quantities derived from a run's settings, computed once before the run starts."""

from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from megatron.config.schema import RunConfig
from megatron.plan import count
from megatron.plan.batch_ramp import BatchSizes
from megatron.plan.datapaths import compare_eods, compare_tokenizers, read_held_out_corpora
from megatron.plan.exposure import CorpusUse, Exposure
from megatron.plan.identity import cell_identity, run_identity, trunk_identity
from megatron.plan.length import check_batch, count_decay_steps, count_steps, count_warmup_steps


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Quantities derived from a RunConfig. FLOPs are of the whole training; tokens count every epoch."""

    identity: str
    trunk_identity: str
    cell_identity: str  # equal for runs that differ only in their seed
    name: str
    size: str
    objective: str
    seed: int
    n_params: int
    n_non_embedding: int
    n_steps: int
    warmup_steps: int
    decay_steps: int
    tokens_per_step: int  # mean over the run, if the batch size grows
    train_tokens: int
    seq_len: int
    unique_tokens: int
    repeated_tokens: int
    epochs: float  # over all corpora together
    corpora: tuple[CorpusUse, ...]  # at the end of the run
    flops_per_token: float
    train_flops: float
    flops_6nd: float
    flops_convention: str
    warnings: tuple[str, ...] = ()  # about the data, and costs that are easily overlooked
    # samples per forward on a rank; None before the run has a device
    microbatch_size: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the content of plan.json."""
        return asdict(self)


def plan_run(config: RunConfig) -> RunPlan:
    """Compute the steps, tokens, parameters and FLOPs of a run.

    Raises ValueError if the corpus has no whole sample or less than one batch,
    or if a length is shorter than one step.
    """
    tokens_per_step = config.dataset.batch_size * config.dataset.seq_len
    exposure = Exposure(config)
    check_batch(config.dataset, sum(exposure.epoch_samples))
    n_steps = count_steps(config.lr_scheduler, config.dataset, sum(exposure.epoch_samples))
    n_samples = BatchSizes(config.dataset).samples_after(n_steps)
    # the schedule counts full batches, which are the steps without a ramp
    n_full = -(-n_samples // config.dataset.batch_size)
    warmup_steps = count_warmup_steps(config.lr_scheduler, n_full, tokens_per_step)
    decay_steps = count_decay_steps(config.lr_scheduler, n_full, tokens_per_step)
    # a cosine or linear decay may be longer than the run, which then ends
    # above its minimum
    if config.lr_scheduler.kind == "wsd" and warmup_steps + decay_steps > n_full:
        raise ValueError(
            f"lr_scheduler: {warmup_steps:,} warm-up and {decay_steps:,} decay steps are more than "
            f"the run's {n_full:,}. Shorten one of them."
        )
    # here rather than in read.py, because
    # the length of the run may depend on the corpus
    window = config.logging.profile_steps
    if window is not None and window[1] > n_steps:
        raise ValueError(f"logging.profile_steps: got {window}, expected steps of the run, 1 to {n_steps:,}")
    train_tokens = n_samples * config.dataset.seq_len
    # a sample has seq_len targets, so this is
    # the same number of tokens as train_tokens
    corpora = exposure.usage_after(n_samples)
    n = count.n_params(config.model)
    flops_per_token = count.flops_per_token(config.model, config.dataset.seq_len)
    return RunPlan(
        identity=run_identity(config),
        trunk_identity=trunk_identity(config),
        cell_identity=cell_identity(config),
        name=config.name,
        size=config.model.size,
        objective=config.objective.name,
        seed=config.misc.seed,
        n_params=n,
        n_non_embedding=count.n_non_embedding(config.model),
        n_steps=n_steps,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
        tokens_per_step=train_tokens // n_steps,
        train_tokens=train_tokens,
        seq_len=config.dataset.seq_len,
        unique_tokens=sum(corpus.unique_tokens for corpus in corpora),
        repeated_tokens=sum(corpus.repeated_tokens for corpus in corpora),
        epochs=train_tokens / exposure.epoch_tokens,
        corpora=corpora,
        flops_per_token=flops_per_token,
        train_flops=flops_per_token * train_tokens,
        # Kaplan's and Chinchilla's estimate C = 6 N D, beside the exact count,
        # to compare with published numbers
        flops_6nd=6.0 * n * train_tokens,
        flops_convention=count.CONVENTION,
        warnings=_collect_data_warnings(config, exposure),
    )


def _collect_data_warnings(config: RunConfig, exposure: Exposure) -> tuple[str, ...]:
    """Return warnings about differences between the corpora. Raises ValueError for unsupported ones."""
    data = config.dataset
    train = list(dict.fromkeys(corpus.prefix for corpus in exposure.corpora))
    warnings = compare_eods(train, data.mixed_eod)
    for key, path in (("dataset.path_eval", data.path_eval), ("dataset.path_test", data.path_test)):
        if path is None:
            continue
        held_out = [corpus.prefix for corpus in read_held_out_corpora(path)]
        # corpora of one data-path file were compared when it was read; with
        # each: the first may have no record of its tokenizer
        for first, other in product(train, held_out):
            compare_tokenizers(first, other, key)
        compare_eods(held_out, data.mixed_eod)
        # held-out text may end documents differently from the training text
        eod_warnings = compare_eods([train[0], *held_out], allow_mixed=True)
        warnings += tuple(f"{key}: {warning}" for warning in eod_warnings)
    return tuple(dict.fromkeys(warnings))
