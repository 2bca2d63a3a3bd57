"""Builds all components of a run from its configuration."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.model_weights import copy_weights, load_weights
from megatron.config.schema import RunConfig
from megatron.data import open_dataset
from megatron.data.batches import Batches, SampleSource
from megatron.data.blend import Blend
from megatron.data.indexed import IndexedTokens
from megatron.data.megatron_order import MegatronSamples
from megatron.data.prefetch import PREFETCH_FACTOR
from megatron.data.samples import Samples
from megatron.data.synthetic import SyntheticSamples
from megatron.engine.deepspeed.deepspeed_config import build_deepspeed_config, merge_user_config
from megatron.engine.interface import Engine
from megatron.engine.torch.compilation import is_compilation_requested, set_cache_folder
from megatron.engine.torch.torch_native import TorchEngine
from megatron.mixture.source import MixtureSamples
from megatron.model.initialization import init_weights
from megatron.model.precision import choose_precision
from megatron.model.transformer import Gpt
from megatron.objective.autoregressive import Autoregressive
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.objective.task import Objective
from megatron.optim.adamw import build_adamw
from megatron.optim.schedule import LearningRateSchedule, build_lr_schedule
from megatron.parallel.activation_checkpointing import apply_activation_checkpointing
from megatron.parallel.world import World
from megatron.plan.batch_ramp import BatchSizes
from megatron.plan.datapaths import SYNTHETIC, read_corpora
from megatron.plan.exposure import Exposure
from megatron.plan.run_dir import CHECKPOINTS
from megatron.plan.run_plan import RunPlan
from megatron.plan.weighted_round_robin import WeightedRoundRobin
from megatron.train.microbatch import choose_microbatch_rows


@dataclass(frozen=True, kw_only=True)
class Run:
    """The components of a training run."""

    config: RunConfig
    plan: RunPlan  # with the samples per forward
    world: World
    folder: Path
    checkpoints: Path
    objective: Objective
    engine: Engine
    train_samples: SampleSource
    batch_sizes: BatchSizes
    held_out: SampleSource | None
    test: SampleSource | None

    @property
    def microbatch_rows(self) -> int:
        """Samples per forward on a rank."""
        assert self.plan.microbatch_size is not None, "set by build_run"
        return self.plan.microbatch_size

    def open_batches(self, sample: int) -> Batches:
        """Return this rank's batches of the size of the step that begins at a sample."""
        size = self.batch_sizes.size_at(sample)
        return Batches(self.train_samples, size, self.world.dp_rank, self.world.dp_size)


def build_run(config: RunConfig, plan: RunPlan, world: World) -> Run:
    """Build a run. Raises ValueError if batch, ranks and data are incompatible."""
    folder = Path(config.logging.run_dir)
    objective = build_objective(config)
    rows = choose_microbatch_rows(config, world)
    build_deepspeed_settings(config, world, rows)  # reports errors before a large model is built
    # Not on a CPU: there g++ writes libraries in place, and a run killed
    # meanwhile would leave a truncated one to all runs of its study.
    if world.device.type == "cuda" and is_compilation_requested(config.dist, world.device):
        set_cache_folder(folder)
    model = Gpt(config.model)
    init_weights(model, config.misc.seed)
    if config.checkpoint.init_from is not None:
        copy_weights(model, load_weights(Path(config.checkpoint.init_from)))
    engine = build_engine(model, objective, config, world, rows)
    sizes = BatchSizes(config.dataset)
    directory = config.checkpoint.directory
    # after initialization, which has its own generator:
    # the state of the default one is saved in checkpoints
    torch.manual_seed(config.misc.seed)
    return Run(
        config=config,
        plan=replace(plan, microbatch_size=rows),
        world=world,
        folder=folder,
        checkpoints=folder / CHECKPOINTS if directory is None else Path(directory),
        objective=objective,
        engine=engine,
        train_samples=open_train_samples(config, sizes.samples_after(plan.n_steps)),
        batch_sizes=sizes,
        held_out=open_held_out_samples(config.dataset.path_eval, config),
        test=open_held_out_samples(config.dataset.path_test, config, "dataset.path_test"),
    )


def build_schedule(config: RunConfig, plan: RunPlan) -> LearningRateSchedule:
    """Build the learning rate schedule, over full batches; see `count_full_batches`."""
    n_steps = math.ceil(count_full_batches(config, plan.train_tokens // plan.seq_len))
    return build_lr_schedule(
        config.lr_scheduler, config.optim.lr, n_steps, plan.warmup_steps, plan.decay_steps
    )


def count_full_batches(config: RunConfig, n_samples: int) -> float:
    """Return samples in full batches: the number of steps, or less if the batch size grew.

    Megatron's learning rate too depends on the samples, not on the steps.
    """
    return n_samples / config.dataset.batch_size


def build_engine(
    model: Gpt, objective: Objective, config: RunConfig, world: World, rows: int | None = None
) -> Engine:
    """Build the engine of a configuration around a model, for `rows` samples per forward.

    Raises ValueError for unsupported settings.
    """
    if config.dist.engine == "torch":
        return TorchEngine(model, causal=objective.causal, dist=config.dist, optim=config.optim, world=world)
    from megatron.engine.deepspeed.deepspeed_zero import DeepSpeedEngine  # imported on demand: slow

    settings = build_deepspeed_settings(config, world, rows)
    assert settings is not None, "dist.engine is deepspeed"
    model.set_precision(choose_precision(config.dist))
    model.to(world.device)
    apply_activation_checkpointing(model.blocks, config.dist.activation_checkpointing)
    optimizer = build_adamw(dict(model.named_parameters()), config.optim, config.model)
    return DeepSpeedEngine(model, optimizer, causal=objective.causal, config=settings, world=world)


def build_deepspeed_settings(
    config: RunConfig, world: World, rows: int | None = None
) -> dict[str, Any] | None:
    """Build the config of `deepspeed.initialize`, merged with a user's JSON; None for the torch engine.

    Raises the errors of `merge_user_config`,
    and ValueError for a recomputation that is not exact.
    """
    if config.dist.engine != "deepspeed":
        return None
    # with LayerNorm the losses were off by 5e-5 after
    # four steps in float32, and by 1e-8 with "full"
    if config.dist.activation_checkpointing == "selective" and config.dist.sharding_stage.startswith("zero3"):
        raise ValueError(
            "dist.activation_checkpointing: got selective with DeepSpeed's zero3, where a block that is "
            "recomputed in part gives other gradients. Set full, sharding_stage=zero2 or engine=torch."
        )
    rows = choose_microbatch_rows(config, world) if rows is None else rows
    n_microbatches = config.dataset.batch_size // world.n_ranks // rows
    ours = build_deepspeed_config(config.dist, config.optim, world.n_ranks, rows, n_microbatches)
    theirs = config.dist.deepspeed_config
    return ours if theirs is None else merge_user_config(ours, theirs, config.optim)


def build_objective(config: RunConfig) -> Objective:
    """Build the objective of a configuration."""
    objective, seed = config.objective, config.misc.seed
    drops = max(config.model.attention_dropout, config.model.hidden_dropout) > 0
    if objective.name == "autoregressive":
        return Autoregressive(
            seed=seed,
            orders=objective.orders,
            order_kind=objective.order_kind,
            order_noise=objective.order_noise,
            randmask_ratio=objective.randmask_ratio,
            rate_min=objective.rate_min,
            masked_input_ratio=objective.masked_input_ratio,
            masked_input_rate=objective.masked_input_rate,
            mask_id=config.model.mask_row,
            boundary_id=config.model.eod_id if config.model.document_mask else None,
            drops_attention=drops,
        )
    size = config.dataset.batch_size
    return MaskedDiffusion(
        config.model.mask_row,
        objective.rate_min,
        seed,
        t_draw=objective.t_draw,
        t_group=size,
        low_noise_start=1.0 if objective.low_noise_start is None else objective.low_noise_start,
        low_noise_samples=BatchSizes(config.dataset).samples_after(objective.low_noise_iterations or 0),
        ar_ratio=objective.ar_ratio,
        drops_attention=drops,
    )


def open_train_samples(config: RunConfig, n_samples: int) -> SampleSource:
    """Open the samples of a prefix, a data-path file or a mixture; the run uses the first `n_samples`."""
    seq_len, seed = config.dataset.seq_len, config.misc.seed
    if config.dataset.mixture is not None:
        return _open_mixture(config.dataset.mixture, config)
    path = config.dataset.path_train
    assert path is not None, "plan_run refuses a run without data"
    exposure = Exposure(config)
    if path == SYNTHETIC:
        n_unique = None if config.dataset.unique_tokens is None else exposure.epoch_samples[0]
        return SyntheticSamples(config.model.n_tokens, seq_len, seed, n_unique=n_unique)
    corpora, shares = exposure.corpora, exposure.round_robin
    assert shares is not None, "it is None for a mixture only"
    sources: list[Samples] = []
    for corpus, n_windows, n in zip(
        corpora, exposure.epoch_samples, shares.prefix_counts(n_samples), strict=True
    ):
        tokens = _open_tokens(corpus.prefix, "dataset.path_train", config)
        if config.dataset.order == "megatron":
            sources.append(MegatronSamples(tokens, seq_len, seed, int(n)))
        else:
            sources.append(Samples(tokens, seq_len, seed, n_windows=n_windows))
    return sources[0] if len(sources) == 1 else Blend(sources, shares)


def _open_mixture(path: str, config: RunConfig) -> SampleSource:
    data = config.dataset
    samples = MixtureSamples(path, data.seq_len, data.batch_size, config.misc.seed)
    samples.n_ids = config.model.n_tokens
    # the weights of a step are computed from losses
    # delay_steps earlier: it must not be prepared before that
    n_ahead = PREFETCH_FACTOR * data.num_workers
    if samples.rule is not None and n_ahead >= samples.delay_steps:
        raise ValueError(
            f"dataset.num_workers: got {data.num_workers}, which prepare up to {n_ahead} steps ahead, "
            f"expected fewer steps than delay_steps={samples.delay_steps} of {path}. Lower it, or raise "
            "adaptive.delay_steps."
        )
    return samples


def open_held_out_samples(
    path: str | None, config: RunConfig, key: str = "dataset.path_eval"
) -> SampleSource | None:
    """Open the samples of a prefix or a data-path file in file order, in a single pass; None without a path.

    key   configuration key of the path, for messages
    """
    if path is None:
        return None
    if path == SYNTHETIC:
        return SyntheticSamples(
            config.model.n_tokens, config.dataset.seq_len, config.misc.seed, held_out=True
        )
    corpora = read_corpora(path)
    sources = [
        Samples(_open_tokens(corpus.prefix, key, config), config.dataset.seq_len, 0, shuffle=False)
        for corpus in corpora
    ]
    if len(sources) == 1:
        return sources[0]
    return Blend(sources, WeightedRoundRobin([corpus.weight for corpus in corpora]), single_pass=True)


def _open_tokens(prefix: str, key: str, config: RunConfig) -> IndexedTokens:
    tokens = open_dataset(prefix)
    n_listed = ((tokens.sidecar or {}).get("tokenizer") or {}).get("n_tokens")
    if n_listed is not None and n_listed > config.model.n_tokens:
        raise ValueError(
            f"{key}: {prefix}: got ids up to {n_listed - 1}, expected below model.n_tokens="
            f"{config.model.n_tokens}. Preprocess with the model's tokenizer, or change model.n_tokens."
        )
    listed = (tokens.sidecar or {}).get("tokens")
    if listed is not None and listed != tokens.n_tokens:
        raise ValueError(
            f"{tokens.files.sidecar}: got {listed:,} tokens, expected {tokens.n_tokens:,} as in its .idx. "
            "Preprocess the corpus again."
        )
    tokens.n_ids = config.model.n_tokens  # checked for every sample: a sidecar may be wrong or missing
    return tokens
