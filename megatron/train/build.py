"""Builds all components of a run from its configuration."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.model_weights import copy_weights, load_weights
from megatron.config.schema import RunConfig
from megatron.data.batches import Batches, SampleSource
from megatron.data.blend import Blend
from megatron.data.indexed import IndexedTokens
from megatron.data.megatron_order import MegatronSamples
from megatron.data.prefetch import PREFETCH_FACTOR
from megatron.data.samples import Samples
from megatron.data.synthetic import SyntheticSamples
from megatron.engine.deepspeed.deepspeed_config import build_deepspeed_config, merge_user_config
from megatron.engine.interface import Engine
from megatron.engine.torch.torch_native import TorchEngine
from megatron.mixture.source import MixtureSamples
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from megatron.objective.autoregressive import Autoregressive
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.objective.task import Objective
from megatron.optim.adamw import build_adamw
from megatron.optim.schedule import LearningRateSchedule, build_lr_schedule
from megatron.parallel.world import World
from megatron.plan.datapaths import SYNTHETIC, read_corpora
from megatron.plan.exposure import Exposure
from megatron.plan.run_plan import RunPlan
from megatron.plan.weighted_round_robin import WeightedRoundRobin
from megatron.run_dir import CHECKPOINTS


@dataclass(frozen=True, kw_only=True)
class Run:
    """The components of a training run."""

    config: RunConfig
    plan: RunPlan
    world: World
    folder: Path
    checkpoints: Path
    objective: Objective
    engine: Engine
    train_samples: SampleSource
    held_out: SampleSource | None

    def open_batches(self, first_sample: int) -> Batches:
        """Return this rank's batches, beginning at a sample number."""
        size = self.config.dataset.batch_size
        return Batches(self.train_samples, size, self.world.dp_rank, self.world.dp_size, first_sample)


def build_run(config: RunConfig, plan: RunPlan, world: World) -> Run:
    """Build a run. Raises ValueError if batch, ranks and data are incompatible."""
    folder = Path(config.logging.run_dir)
    objective = build_objective(config)
    build_deepspeed_settings(config, world)  # reports errors before a large model is built
    model = Gpt(config.model)
    init_weights(model, config.misc.seed)
    if config.checkpoint.init_from is not None:
        copy_weights(model, load_weights(Path(config.checkpoint.init_from)))
    engine = build_engine(model, objective, config, world)
    n_samples = plan.n_steps * config.dataset.batch_size
    held_out = None
    if config.dataset.path_eval is not None:
        held_out = open_held_out_samples(config.dataset.path_eval, config)
    directory = config.checkpoint.directory
    # after initialization, which has its own generator: the state of the default one is saved in checkpoints
    torch.manual_seed(config.misc.seed)
    return Run(
        config=config,
        plan=plan,
        world=world,
        folder=folder,
        checkpoints=folder / CHECKPOINTS if directory is None else Path(directory),
        objective=objective,
        engine=engine,
        train_samples=open_train_samples(config, n_samples),
        held_out=held_out,
    )


def build_schedule(config: RunConfig, plan: RunPlan) -> LearningRateSchedule:
    """Build the learning rate schedule."""
    return build_lr_schedule(
        config.lr_scheduler, config.optim.lr, plan.n_steps, plan.warmup_steps, plan.decay_steps
    )


def build_engine(model: Gpt, objective: Objective, config: RunConfig, world: World) -> Engine:
    """Build the engine of a configuration around a model. Raises ValueError for unsupported settings."""
    if config.dist.engine == "torch":
        return TorchEngine(model, causal=objective.causal, dist=config.dist, optim=config.optim, world=world)
    from megatron.engine.deepspeed.deepspeed_zero import DeepSpeedEngine  # imported on demand: slow

    settings = build_deepspeed_settings(config, world)
    assert settings is not None, "dist.engine is deepspeed"
    model.to(world.device)
    optimizer = build_adamw(dict(model.named_parameters()), config.optim, config.model)
    return DeepSpeedEngine(model, optimizer, causal=objective.causal, config=settings, world=world)


def build_deepspeed_settings(config: RunConfig, world: World) -> dict[str, Any] | None:
    """Build the config of `deepspeed.initialize`, merged with a user's JSON; None for the torch engine.

    Raises the errors of `merge_user_config`.
    """
    if config.dist.engine != "deepspeed":
        return None
    rows = choose_microbatch_rows(config, world)
    n_microbatches = config.dataset.batch_size // world.n_ranks // rows
    ours = build_deepspeed_config(config.dist, config.optim, world.n_ranks, rows, n_microbatches)
    theirs = config.dist.deepspeed_config
    return ours if theirs is None else merge_user_config(ours, theirs, config.optim)


def build_objective(config: RunConfig) -> Objective:
    """Build the objective of a configuration."""
    objective, seed = config.objective, config.misc.seed
    drops = config.model.attention_dropout > 0
    if objective.name == "autoregressive":
        return Autoregressive(
            seed=seed,
            orders=objective.orders,
            order_kind=objective.order_kind,
            order_noise=objective.order_noise,
            randmask_ratio=objective.randmask_ratio,
            rate_min=objective.rate_min,
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
        low_noise_samples=(objective.low_noise_iterations or 0) * size,
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
    # the weights of a step are computed from losses delay_steps earlier: it must not be prepared before that
    n_ahead = PREFETCH_FACTOR * data.num_workers
    if samples.rule is not None and n_ahead >= samples.delay_steps:
        raise ValueError(
            f"dataset.num_workers: got {data.num_workers}, which prepare up to {n_ahead} steps ahead, "
            f"expected fewer steps than delay_steps={samples.delay_steps} of {path}. Lower it, or raise "
            "adaptive.delay_steps."
        )
    return samples


def open_held_out_samples(path: str, config: RunConfig) -> SampleSource:
    """Open the samples of a prefix or a data-path file in file order, in a single pass."""
    if path == SYNTHETIC:
        return SyntheticSamples(
            config.model.n_tokens, config.dataset.seq_len, config.misc.seed, held_out=True
        )
    corpora = read_corpora(path)
    sources = [
        Samples(
            _open_tokens(corpus.prefix, "dataset.path_eval", config), config.dataset.seq_len, 0, shuffle=False
        )
        for corpus in corpora
    ]
    if len(sources) == 1:
        return sources[0]
    return Blend(sources, WeightedRoundRobin([corpus.weight for corpus in corpora]), single_pass=True)


def _open_tokens(prefix: str, key: str, config: RunConfig) -> IndexedTokens:
    tokens = IndexedTokens(prefix)
    n_listed = ((tokens.sidecar or {}).get("tokenizer") or {}).get("n_tokens")
    if n_listed is not None and n_listed > config.model.n_tokens:
        raise ValueError(
            f"{key}: {prefix}: got ids up to {n_listed - 1}, expected below model.n_tokens="
            f"{config.model.n_tokens}. Preprocess with the model's tokenizer, or change model.n_tokens."
        )
    listed = (tokens.sidecar or {}).get("tokens", tokens.n_tokens)
    if listed != tokens.n_tokens:
        raise ValueError(
            f"{prefix}.json: got {listed:,} tokens, expected {tokens.n_tokens:,} as in its .idx. "
            "Preprocess the corpus again."
        )
    tokens.n_ids = config.model.n_tokens  # checked for every sample: a sidecar may be wrong or missing
    return tokens


def choose_microbatch_rows(config: RunConfig, world: World) -> int:
    """Return the number of samples per forward on a rank. Raises ValueError if the numbers do not divide."""
    size, ranks, stages = config.dataset.batch_size, world.dp_size, world.layout.pipeline
    if size % ranks:
        raise ValueError(f"dataset.batch_size: got {size}, expected a multiple of the {ranks} ranks")
    share, requested = size // ranks, config.dataset.microbatch_size
    step = stages if config.dist.pipeline_schedule == "interleaved" else 1
    # A pipeline needs at least one microbatch per stage; the interleaved schedule needs a multiple of the
    # stages. Without a request, take the fewest microbatches, that is the largest ones.
    if requested is None:
        # 12 samples per rank on 4 stages: 4 microbatches of 3; on 5 stages 6 of 2
        numbers = (n for n in range(stages, share + 1, step) if share % n == 0)
        micro = share // next(numbers, 1)
    else:
        micro = min(requested, share)
    if share % micro:
        raise ValueError(
            f"dataset.microbatch_size: got {micro}, expected a divisor of the {share} samples of a rank"
        )
    n_microbatches = share // micro
    if n_microbatches < stages or n_microbatches % step:
        expected = f"a multiple of {stages}" if step > 1 else f"{stages} or more"
        fix = "Choose another dataset.batch_size." if requested is None else "Lower it, or omit it."
        raise ValueError(
            f"dataset.microbatch_size: {share} samples of a rank in microbatches of {micro}: got "
            f"{n_microbatches} microbatches, expected {expected} for a pipeline of {stages} ranks. {fix}"
        )
    return micro
