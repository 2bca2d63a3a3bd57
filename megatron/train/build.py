"""Everything a run is made of, built from its configuration. The only place that sees the whole config."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.weights import load_weights, start_from
from megatron.config.datapaths import SYNTHETIC, read_corpora
from megatron.config.exposure import Exposure
from megatron.config.plan import RunPlan
from megatron.config.schema import RunConfig
from megatron.config.shares import Shares
from megatron.data.ahead import AHEAD
from megatron.data.batches import Batches, SampleSource
from megatron.data.blend import Blend
from megatron.data.indexed import IndexedTokens
from megatron.data.megatron_order import MegatronSamples
from megatron.data.samples import Samples
from megatron.data.synthetic import SyntheticSamples
from megatron.engine.base import Engine
from megatron.engine.deepspeed_config import translate, with_users_own
from megatron.engine.torch_native import TorchEngine
from megatron.mixture.source import MixtureSamples
from megatron.model.gpt import Gpt
from megatron.model.initial import initialise
from megatron.objective.autoregressive import Autoregressive
from megatron.objective.base import Objective
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.optim.adamw import adamw
from megatron.optim.schedule import Schedule, lr_schedule
from megatron.parallel.world import World
from megatron.run_dir import CHECKPOINTS


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of a training run."""

    config: RunConfig
    plan: RunPlan
    world: World
    folder: Path
    checkpoints: Path
    objective: Objective
    engine: Engine
    train_samples: SampleSource
    held_out: SampleSource | None

    def batches(self, first_sample: int) -> Batches:
        """This rank's batches from a sample number on."""
        size = self.config.dataset.batch_size
        return Batches(self.train_samples, size, self.world.dp_rank, self.world.dp_size, first_sample)


def build(config: RunConfig, plan: RunPlan, world: World) -> Run:
    """Build a run. ValueError where batch, ranks and data do not fit one another."""
    folder = Path(config.logging.run_dir)
    objective = build_objective(config)
    deepspeed_settings(config, world)  # what is wrong with them is told before a large model is made
    model = Gpt(config.model)
    initialise(model, config.misc.seed)
    if config.checkpoint.init_from is not None:
        start_from(model, load_weights(Path(config.checkpoint.init_from)))
    engine = build_engine(model, objective, config, world)
    n_samples = plan.n_steps * config.dataset.batch_size
    held_out = None
    if config.dataset.path_eval is not None:
        held_out = held_out_samples(config.dataset.path_eval, config)
    own = config.checkpoint.directory
    torch.manual_seed(config.misc.seed)
    return Run(
        config=config,
        plan=plan,
        world=world,
        folder=folder,
        checkpoints=folder / CHECKPOINTS if own is None else Path(own),
        objective=objective,
        engine=engine,
        train_samples=train_samples(config, n_samples),
        held_out=held_out,
    )


def build_schedule(config: RunConfig, plan: RunPlan) -> Schedule:
    """The learning rate of every step."""
    return lr_schedule(
        config.lr_scheduler, config.optim.lr, plan.n_steps, plan.warmup_steps, plan.decay_steps
    )


def build_engine(model: Gpt, objective: Objective, config: RunConfig, world: World) -> Engine:
    """The engine of a configuration around a built model. ValueError for what it cannot honour."""
    if config.dist.engine == "torch":
        return TorchEngine(model, causal=objective.causal, dist=config.dist, optim=config.optim, world=world)
    from megatron.engine.deepspeed_zero import DeepSpeedEngine  # imports that other runs do without

    told = deepspeed_settings(config, world)
    assert told is not None, "its engine is asked for"
    model.to(world.device)
    optimizer = adamw(dict(model.named_parameters()), config.optim, config.model)
    return DeepSpeedEngine(model, optimizer, causal=objective.causal, config=told, world=world)


def deepspeed_settings(config: RunConfig, world: World) -> dict[str, Any] | None:
    """What `deepspeed.initialize` takes, with a user's JSON; None for the other engine. Errors as there."""
    if config.dist.engine != "deepspeed":
        return None
    rows = microbatch_rows(config, world)
    n_microbatches = config.dataset.batch_size // world.n_ranks // rows
    ours = translate(config.dist, config.optim, world.n_ranks, rows, n_microbatches)
    theirs = config.dist.deepspeed_config
    return ours if theirs is None else with_users_own(ours, theirs, config.optim)


def build_objective(config: RunConfig) -> Objective:
    """The objective of a configuration."""
    told, seed = config.objective, config.misc.seed
    drops = config.model.attention_dropout > 0
    if told.name == "autoregressive":
        return Autoregressive(
            seed=seed,
            orders=told.orders,
            order_kind=told.order_kind,
            order_noise=told.order_noise,
            randmask_ratio=told.randmask_ratio,
            rate_min=told.rate_min,
            drops_attention=drops,
        )
    size = config.dataset.batch_size
    return MaskedDiffusion(
        config.model.n_tokens,
        told.rate_min,
        seed,
        t_draw=told.t_draw,
        t_group=size,
        low_noise_start=1.0 if told.low_noise_start is None else told.low_noise_start,
        low_noise_samples=(told.low_noise_iterations or 0) * size,
        ar_ratio=told.ar_ratio,
        drops_attention=drops,
    )


def train_samples(config: RunConfig, n_samples: int) -> SampleSource:
    """The samples of a prefix, a data-path file or a mixture; the run takes the first `n_samples`."""
    seq_len, seed = config.dataset.seq_len, config.misc.seed
    if config.dataset.mixture is not None:
        return _mixture(config.dataset.mixture, config)
    path = config.dataset.path_train
    assert path is not None, "plan_run refuses a run without data"
    exposure = Exposure(config)
    if path == SYNTHETIC:
        n_unique = None if config.dataset.unique_tokens is None else exposure.held[0]
        return SyntheticSamples(config.model.n_tokens, seq_len, seed, n_unique=n_unique)
    corpora, shares = exposure.corpora, exposure.shares
    each: list[Samples] = []
    for corpus, held, n in zip(corpora, exposure.held, shares.counts(n_samples), strict=True):
        tokens = _open(corpus.prefix, "dataset.path_train", config)
        if config.dataset.order == "megatron":
            each.append(MegatronSamples(tokens, seq_len, seed, int(n)))
        else:
            each.append(Samples(tokens, seq_len, seed, n_windows=held))
    return each[0] if len(each) == 1 else Blend(each, shares)


def _mixture(path: str, config: RunConfig) -> MixtureSamples:
    data = config.dataset
    samples = MixtureSamples(path, data.seq_len, data.batch_size, config.misc.seed)
    samples.n_ids = config.model.n_tokens
    if samples.rule is not None and AHEAD * data.num_workers >= samples.delay_steps:
        raise ValueError(
            f"dataset.num_workers: {data.num_workers} are up to {AHEAD * data.num_workers} steps ahead, the "
            f"weights of {path} {samples.delay_steps} steps late; lower it, or raise adaptive.delay_steps"
        )
    return samples


def held_out_samples(path: str, config: RunConfig) -> SampleSource:
    """The samples of a prefix or of a data-path file in file order, none of them twice."""
    if path == SYNTHETIC:
        return SyntheticSamples(
            config.model.n_tokens, config.dataset.seq_len, config.misc.seed, held_out=True
        )
    corpora = read_corpora(path)
    each = [
        Samples(_open(corpus.prefix, "dataset.path_eval", config), config.dataset.seq_len, 0, shuffle=False)
        for corpus in corpora
    ]
    if len(each) == 1:
        return each[0]
    return Blend(each, Shares([corpus.weight for corpus in corpora]), once=True)


def _open(prefix: str, key: str, config: RunConfig) -> IndexedTokens:
    tokens = IndexedTokens(prefix)
    told = ((tokens.sidecar or {}).get("tokenizer") or {}).get("n_tokens")
    if told is not None and told > config.model.n_tokens:
        raise ValueError(
            f"{key}: {prefix} has ids up to {told - 1}, the model knows {config.model.n_tokens}; "
            "preprocess with the model's tokenizer or change model.n_tokens"
        )
    listed = (tokens.sidecar or {}).get("tokens", tokens.n_tokens)
    if listed != tokens.n_tokens:
        raise ValueError(
            f"{prefix}.json: got {listed:,} tokens, expected {tokens.n_tokens:,} as in its .idx. "
            "Preprocess the corpus again."
        )
    tokens.n_ids = config.model.n_tokens  # a sidecar may be wrong or missing: every sample is looked at
    return tokens


def microbatch_rows(config: RunConfig, world: World) -> int:
    """Samples of one forward on one rank. ValueError where the numbers do not divide."""
    size, ranks, stages = config.dataset.batch_size, world.dp_size, world.layout.pipeline
    if size % ranks:
        raise ValueError(f"dataset.batch_size: {size} samples cannot be shared by {ranks} ranks")
    share, told = size // ranks, config.dataset.microbatch_size
    step = stages if config.dist.pipeline_schedule == "interleaved" else 1
    if told is None:
        numbers = (n for n in range(stages, share + 1, step) if share % n == 0)
        micro = share // next(numbers, 1)
    else:
        micro = min(told, share)
    if share % micro:
        raise ValueError(f"dataset.microbatch_size: {micro} does not divide the {share} samples of a rank")
    n_microbatches = share // micro
    if n_microbatches < stages or n_microbatches % step:
        wanted = f"a multiple of {stages}" if step > 1 else f"{stages} or more"
        way_out = "choose another dataset.batch_size" if told is None else "make it smaller, or leave it out"
        raise ValueError(
            f"dataset.microbatch_size: {share} samples of a rank in microbatches of {micro} are "
            f"{n_microbatches}, a pipeline of {stages} ranks wants {wanted}; {way_out}"
        )
    return micro
