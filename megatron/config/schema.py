"""Settings of a run, section by section. `read.py` builds them once, and they are immutable.

A docstring explains every key. The declaration below it states the type
with its choices, the default, and all other facts of the key (option.py).
None means not set. Derived numbers (steps, FLOPs, parameters) are in `megatron/plan/`.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

from megatron.config.option import ALWAYS, CONTENT, IF_CHANGED, option, positive, read_switch, share

SYNTHETIC = "synthetic"  # replaces the prefix of a dataset: random tokens without files
ObjectiveName = Literal["autoregressive", "masked_diffusion"]
OBJECTIVES: tuple[str, ...] = get_args(ObjectiveName)
AUTOREGRESSIVE, DIFFUSION = "objective.name=autoregressive", "objective.name=masked_diffusion"
Stage = Literal["zero0", "zero1", "zero2", "zero3", "zero2_hybrid", "zero3_hybrid"]
SHARDED = "dist.sharding_stage=zero1|zero2|zero3|zero2_hybrid|zero3_hybrid"
TORCH, DEEPSPEED, MUON = "dist.engine=torch", "dist.engine=deepspeed", "optim.kind=muon"
COMPLETEP, SCALED = "model.parametrization=completep", "model.parametrization=mup|completep"
ROTARY, LLAMA3 = "model.positions=rotary", "model.rope_scaling=llama3"
DECAYS, WSD = "lr_scheduler.kind=cosine|linear|wsd", "lr_scheduler.kind=wsd"
RAMP = f"{TORCH} dataset.mixture=null objective.t_draw=independent dist.pipeline_parallel=1"
INTERLEAVED, EPOCH_ORDER = "dist.pipeline_schedule=interleaved", "dataset.mixture=null dataset.order=epoch"
LEFT_TO_RIGHT = f"{AUTOREGRESSIVE} objective.orders=1"
MASKED_INPUT = f"{AUTOREGRESSIVE} objective.masked_input_ratio>0"
OrderKind = Literal["random", "noise_sorted"]
Joint = Literal["independent", "antithetic", "stratified"]
HYBRID = "dist.sharding_stage=zero2_hybrid|zero3_hybrid"
AXIS = "dist.engine=torch model.predicts_next=false"  # of a model that is split by a parallel axis
# what needs whole samples, or attention with a mask
CONTEXT = (
    f"{AXIS} model.document_mask=false model.attention_window=null model.attention_dropout=0.0 "
    "model.hidden_dropout=0.0 objective.orders=1 objective.randmask_ratio=0.0"
)


@dataclass(frozen=True, kw_only=True)
class DistConfig:
    """Devices, parallelism and precision.

    engine: implementation of forward, backward and update
    cpu_only: use the CPU even if there is a GPU
    backend: backend of torch.distributed; default: nccl on GPUs;
        CPUs always use gloo
    dtype: dtype of matrix products; updates, reductions over ranks
        and checkpoints are float32
    residual_dtype: dtype of the residual stream in every layout;
        default: the same as dist.dtype
    sharding_stage: state sharded over data-parallel ranks: zero0
        none, zero1 optimizer states, zero2 also gradients, zero3
        also weights; hybrid: sharded within groups of shard_size
        ranks, replicated between groups
    shard_size: hybrid: ranks that together hold one copy of the
        model; default: the ranks of a node
    tensor_parallel: ranks over which the matrices of a block are
        split
    pipeline_parallel: ranks over which the blocks are split
    pipeline_schedule: schedule of the microbatches
    pipeline_chunks: interleaved: model stages on each rank
    context_parallel: ranks over which the positions of a sample are
        split, and exchanged for heads in attention
    cpu_offload: offload weights and optimizer states to CPU memory
    activation_checkpointing: recomputed in backward: nothing, whole
        blocks, or all except matrix products and attention
    compile: apply torch.compile to each block; auto: on GPUs
    float8: matrix products in float8 through torchao, on GPUs that
        support it
    offload_optimizer: deepspeed: offload AdamW's state and update
        to the CPU
    offload_parameters: deepspeed, zero3: offload weights to CPU
        memory
    deepspeed_config: DeepSpeed JSON file; what it sets must agree
        with the keys here, or be "auto"
    timeout_s: timeout of collectives; a run that exceeds it ends
        with an error that names the rank
    """

    engine: Literal["torch", "deepspeed"] = option("torch")
    cpu_only: bool = option(False)
    backend: Literal["nccl", "gloo"] | None = option(None)
    dtype: Literal["float32", "bfloat16", "float16"] = option("bfloat16", identity=ALWAYS)
    residual_dtype: Literal["float32"] | None = option(None, identity=ALWAYS)
    sharding_stage: Stage = option("zero0")
    shard_size: int | None = positive(None, "ranks", needs=HYBRID)
    tensor_parallel: int = positive(1, "ranks", needs=AXIS)
    pipeline_parallel: int = positive(1, "ranks", needs=AXIS)
    pipeline_schedule: Literal["1f1b", "interleaved"] = option("1f1b", needs="dist.pipeline_parallel>1")
    pipeline_chunks: int = option(2, above=1, unit="stages per rank", needs=INTERLEAVED)
    context_parallel: int = positive(1, "ranks", needs=CONTEXT)
    cpu_offload: bool = option(False, needs=f"dist.engine=torch {SHARDED} dist.pipeline_parallel=1")
    activation_checkpointing: Literal["none", "full", "selective"] = option("none")
    compile: bool | None = option(None, read=read_switch, needs=TORCH)
    float8: bool = option(False, identity=ALWAYS, needs=f"{TORCH} dist.dtype=bfloat16")
    offload_optimizer: bool = option(False, needs=f"{DEEPSPEED} dist.sharding_stage=zero1|zero2|zero3")
    offload_parameters: bool = option(False, needs="dist.engine=deepspeed dist.sharding_stage=zero3")
    deepspeed_config: str | None = option(None, needs=DEEPSPEED)
    timeout_s: int = positive(1800, "seconds")


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Training and held-out tokens, and the batch size.

    path_train: prefix of a .bin/.idx dataset, a data-path file
        (.txt), or synthetic: random tokens, no files
    path_eval: the same, for held-out documents
    path_test: the same, for documents scored once, with the final
        weights: for runs that path_eval selects
    mixture: YAML file of a mixture of domains, replaces path_train
    order: sample order: exact epochs without index arrays, or
        Megatron's order bit for bit
    num_workers: threads that prefetch batches; 0: none, training
        waits for each batch
    unique_tokens: use only the first whole samples with this many
        tokens, and repeat them; default: all
    mixed_eod: allow a blend of corpora that end documents with
        different tokens or with none
    seq_len: positions per sample
    batch_size: samples per step, over all ranks
    rampup_batch_size: [start, increment, samples]: the batch size
        grows from start to batch_size in equal steps over the first
        samples, as in Megatron; the schedule then counts full batches
    microbatch_size: maximum samples per forward on one rank;
        default: all its samples, on a GPU as many as fit, in a
        pipeline the most that give each of its ranks a microbatch
    """

    path_train: str | None = option(None, identity=CONTENT)
    path_eval: str | None = option(None, identity=CONTENT)
    path_test: str | None = option(None, identity=CONTENT)
    mixture: str | None = option(None, identity=CONTENT, needs="dataset.path_train=null dataset.order=epoch")
    order: Literal["epoch", "megatron"] = option("epoch", identity=IF_CHANGED)
    num_workers: int = option(1, above=-1, unit="threads")
    unique_tokens: int | None = positive(None, "tokens", identity=IF_CHANGED, needs=EPOCH_ORDER)
    mixed_eod: bool = option(False)
    seq_len: int = positive(2048, "tokens", identity=ALWAYS)
    batch_size: int = positive(256, "samples", identity=ALWAYS)
    rampup_batch_size: list[int] | None = positive(None, "samples", identity=IF_CHANGED, needs=RAMP)
    microbatch_size: int | None = positive(None, "samples")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Resolved shape of a transformer, for autoregressive models and masked diffusion.

    size: name of a size in utils/model_sizes.yaml, or a label
    d_model: width of the residual stream
    d_ff: width of the feed-forward layer
    d_head: width of an attention head
    n_heads: number of attention heads
    n_layers: number of blocks
    n_tokens: ids of the tokenizer; [MASK] is the next row
    vocab_rows: embedding rows: tokens, then [MASK], then padding
    rope_theta: base of the rotary frequencies
    norm_eps: epsilon added to the mean square (variance) in a norm
    n_kv_heads: key and value heads, each shared by a group of
        heads; default: n_heads
    norm: norm of the residual stream
    feed_forward: swiglu: three matrices; gelu: two matrices,
        GPT-2's tanh approximation; gelu_exact: exact GELU
    positions: position encoding; learned: a table added to the
        embedding
    n_positions: rows of the table of learned positions; default:
        dataset.seq_len
    biases: biases in every matrix of a block and in LayerNorm
    tied_embedding: the output head is the embedding; false: a
        separate matrix
    qk_norm: RMSNorm on each head's query and key
    document_mask: attend only within a document, with positions
        counted from its start
    eod_id: end-of-document id, for document_mask; default: as in
        the corpus
    attention_dropout: probability of dropping an attention weight
        in training; 0 in evaluation
    hidden_dropout: probability of dropping a feature of the
        embedding and of each branch in training; 0 in evaluation
    init_std: std of the initial matrices; much narrower models than
        GPT-2 learn faster with 0.6 / sqrt(d_model)
    parametrization: scaling of initialisation, learning rates and
        multipliers with the shape
    base_d_model: mup, completep: width at which the model equals
        the standard one
    base_n_layers: completep: depth at which the model equals the
        standard one
    base_d_head: mup, completep: head width at which the model
        equals the standard one; default: d_head
    qkv_biases: biases in the matrices of query, key and value
        alone, as in Qwen2
    qk_norm_all_heads: qk_norm: one norm over all heads, as in OLMo
        2, not one per head
    norm_placement: norm of the input of attention and feed-forward
        layer, or of their output as in OLMo 2
    parallel_residual: attention and feed-forward layer read the
        same input, as in GPT-NeoX
    attention_window: autoregressive: last positions, itself
        included, that a position attends to; default: all
    rotary_dims: channels of a head that are rotated, the first
        ones; default: d_head
    rope_scaling: stretching of the rotary frequencies: linear, or
        as in Llama 3.1
    rope_factor: rope_scaling: factor of the length
    rope_low_factor: llama3: frequencies of fewer turns in
        rope_original_positions are divided by rope_factor
    rope_high_factor: llama3: frequencies of more turns in
        rope_original_positions are unchanged
    rope_original_positions: llama3: length before the stretching
    vocab_multiple: rows of the embedding: the next multiple of
        this, with a row for [MASK] only if the run masks tokens, as
        in Megatron; default: of 128, always with that row
    mask_id: masked diffusion: row of [MASK] if it is one of the ids
        of the tokenizer; default: n_tokens
    predicts_next: masked diffusion: the output of a position
        predicts the token after it, as in Dream
    head_bias: a bias of the separate head, as in the models of MDLM
    """

    size: str = option("custom")
    d_model: int = positive(0, "features", identity=ALWAYS)
    d_ff: int = positive(0, "features", identity=ALWAYS)
    d_head: int = positive(0, "features", identity=ALWAYS)
    n_heads: int = positive(0, "heads", identity=ALWAYS)
    n_layers: int = positive(0, "blocks", identity=ALWAYS)
    n_tokens: int = positive(0, "tokens", identity=ALWAYS)
    vocab_rows: int = positive(0, "rows", identity=ALWAYS)
    rope_theta: float = positive(10000.0, "-", identity=ALWAYS)
    norm_eps: float = positive(1e-05, "-", identity=ALWAYS)
    n_kv_heads: int | None = positive(None, "heads", identity=IF_CHANGED)
    norm: Literal["rmsnorm", "layernorm"] = option("rmsnorm", identity=IF_CHANGED)
    feed_forward: Literal["swiglu", "gelu", "gelu_exact"] = option("swiglu", identity=IF_CHANGED)
    positions: Literal["rotary", "learned"] = option("rotary", identity=IF_CHANGED)
    n_positions: int | None = positive(None, "positions", identity=IF_CHANGED)
    biases: bool = option(False, identity=IF_CHANGED)
    tied_embedding: bool = option(True, identity=IF_CHANGED)
    qk_norm: bool = option(False, identity=IF_CHANGED)
    document_mask: bool = option(False, identity=IF_CHANGED)
    eod_id: int | None = option(None, unit="id", identity=IF_CHANGED)
    attention_dropout: float = option(0.0, at_least=0, below=1, unit="share", identity=IF_CHANGED)
    hidden_dropout: float = option(0.0, at_least=0, below=1, unit="share", identity=IF_CHANGED)
    init_std: float = positive(0.02, "-", identity=IF_CHANGED)
    parametrization: Literal["standard", "mup", "completep"] = option("standard", identity=IF_CHANGED)
    base_d_model: int | None = positive(None, "features", identity=IF_CHANGED, needs=SCALED)
    base_n_layers: int | None = positive(None, "blocks", identity=IF_CHANGED, needs=COMPLETEP)
    base_d_head: int | None = positive(None, "features", identity=IF_CHANGED, needs=SCALED)
    qkv_biases: bool = option(False, identity=IF_CHANGED, needs="model.biases=false")
    qk_norm_all_heads: bool = option(False, identity=IF_CHANGED, needs="model.qk_norm=true")
    norm_placement: Literal["input", "output"] = option("input", identity=IF_CHANGED)
    parallel_residual: bool = option(False, identity=IF_CHANGED, needs="model.norm_placement=input")
    attention_window: int | None = positive(None, "positions", identity=IF_CHANGED, needs=LEFT_TO_RIGHT)
    rotary_dims: int | None = positive(None, "channels", identity=IF_CHANGED, needs=ROTARY)
    rope_scaling: Literal["none", "linear", "llama3"] = option("none", identity=IF_CHANGED, needs=ROTARY)
    rope_factor: float = positive(1.0, "-", identity=IF_CHANGED, needs="model.rope_scaling=linear|llama3")
    rope_low_factor: float = positive(1.0, "turns", identity=IF_CHANGED, needs=LLAMA3)
    rope_high_factor: float = positive(4.0, "turns", identity=IF_CHANGED, needs=LLAMA3)
    rope_original_positions: int | None = positive(None, "positions", identity=IF_CHANGED, needs=LLAMA3)
    vocab_multiple: int | None = positive(None, "rows")
    mask_id: int | None = option(None, at_least=0, unit="id", identity=IF_CHANGED, needs=DIFFUSION)
    predicts_next: bool = option(False, identity=IF_CHANGED, needs=DIFFUSION)
    head_bias: bool = option(False, identity=IF_CHANGED, needs="model.tied_embedding=false")

    @property
    def rotary_channels(self) -> int:
        """Number of channels of a head that are rotated."""
        return self.rotary_dims or self.d_head

    @property
    def mask_row(self) -> int:
        """Row of [MASK] in the embedding."""
        return self.n_tokens if self.mask_id is None else self.mask_id

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.n_kv_heads or self.n_heads


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Training objective.

    name: autoregressive (ar): next token; masked_diffusion (mdm):
        masked tokens from both sides
    rate_min: masked diffusion: masking rate = (1 - rate_min) t +
        rate_min, t ~ U(0, 1)
    t_draw: masked diffusion: joint distribution of the t of a
        batch; each t is uniform
    low_noise_start: masked diffusion: t ~ U(0, low_noise_start) for
        the first low_noise_iterations
    low_noise_iterations: masked diffusion: number of steps with
        low_noise_start
    ar_ratio: masked diffusion: share of training samples whose last
        tokens are masked, not random ones
    orders: autoregressive: number of orders in which training
        samples are read, including left to right
    order_kind: autoregressive: kind of the orders other than left
        to right
    order_noise: noise_sorted: sort positions plus normal noise of
        this std, in units of seq_len
    randmask_ratio: autoregressive: share of training positions that
        attend to a random subset of the past
    masked_input_ratio: autoregressive: share of training samples
        with masked inputs, a regularization for repeated text
    masked_input_rate: masked_input_ratio: largest rate of masked
        inputs of a sample; its rate is uniform up to this
    """

    name: ObjectiveName = option("autoregressive", identity=ALWAYS)
    rate_min: float = option(0.001, above=0, below=1, unit="share", identity=ALWAYS)
    t_draw: Joint = option("independent", identity=IF_CHANGED, needs=DIFFUSION)
    low_noise_start: float | None = positive(None, "share", at_most=1, identity=IF_CHANGED, needs=DIFFUSION)
    low_noise_iterations: int | None = positive(None, "steps", identity=IF_CHANGED, needs=DIFFUSION)
    ar_ratio: float = share(0.0, identity=IF_CHANGED, needs=DIFFUSION)
    orders: int = positive(1, "orders", identity=IF_CHANGED, needs=AUTOREGRESSIVE)
    order_kind: OrderKind = option("random", identity=IF_CHANGED, needs=AUTOREGRESSIVE)
    order_noise: float = positive(0.1, "sample lengths", identity=IF_CHANGED, needs=AUTOREGRESSIVE)
    randmask_ratio: float = share(0.0, identity=IF_CHANGED, needs=AUTOREGRESSIVE)
    masked_input_ratio: float = share(0.0, identity=IF_CHANGED, needs=AUTOREGRESSIVE)
    masked_input_rate: float = positive(0.5, "share", at_most=1, identity=IF_CHANGED, needs=MASKED_INPUT)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) or Muon (arXiv 2502.16982).

    kind: muon: Muon for the matrices of the blocks, AdamW for the
        embedding, the head, gains and biases; lr and weight_decay
        of AdamW apply to both
    momentum: muon: decay rate of the mean gradient
    ema_decay: decay per step of an exponential moving average of the
        weights, which is scored beside them; default: no average
    lr: peak learning rate
    weight_decay: weight decay of matrices; gains of norms have none
    beta1: decay rate of the mean gradient
    beta2: decay rate of the mean squared gradient
    eps: epsilon added to the root of the mean square
    grad_clip: maximum gradient norm; 0: no clipping
    kernel: fused AdamW of torch or of NVIDIA's apex, which must be
        built from source
    """

    kind: Literal["adamw", "muon"] = option("adamw", identity=IF_CHANGED, needs=f"{TORCH} optim.kernel=torch")
    momentum: float = option(0.95, at_least=0, below=1, unit="-", identity=IF_CHANGED, needs=MUON)
    ema_decay: float | None = option(None, above=0, below=1, unit="-", identity=IF_CHANGED, needs=TORCH)
    lr: float = positive(0.0003, "-", identity=ALWAYS)
    weight_decay: float = option(0.1, at_least=0, unit="-", identity=ALWAYS)
    beta1: float = option(0.9, at_least=0, below=1, unit="-", identity=ALWAYS)
    beta2: float = option(0.95, at_least=0, below=1, unit="-", identity=ALWAYS)
    eps: float = positive(1e-08, "-", identity=ALWAYS)
    grad_clip: float = option(1.0, at_least=0, unit="L2 norm", identity=ALWAYS)
    kernel: Literal["torch", "apex"] = option("torch", needs=TORCH)


@dataclass(frozen=True, kw_only=True)
class LrSchedulerConfig:
    """Length of the run and learning-rate schedule. Set each length in one unit only.

    kind: schedule after the warm-up
    total_iterations: length of the run
    total_tokens: length of the run, rounded to whole steps
    total_epochs: length of the run, rounded down to whole steps
    warmup_iterations: length of the linear warm-up
    warmup_tokens: length of the linear warm-up, rounded up to whole
        steps
    warmup_fraction: length of the linear warm-up, as a fraction of
        the run
    decay_iterations: length of the decay; wsd: at the end; cosine,
        linear: after the warm-up, then the minimum rate; default:
        the rest of the run
    decay_tokens: the same in tokens, rounded up to whole steps
    decay_fraction: the same as a fraction of the run; default of
        wsd: the last fifth
    decay_shape: wsd: shape of the decay; sqrt: 1 - sqrt(fraction of
        the decay)
    lr_min_ratio: final learning rate divided by the peak
    """

    kind: Literal["cosine", "linear", "wsd", "constant"] = option("cosine", identity=ALWAYS)
    total_iterations: int | None = positive(None, "steps", identity=ALWAYS)
    total_tokens: int | None = positive(None, "tokens", identity=ALWAYS)
    total_epochs: float | None = positive(None, "epochs", identity=ALWAYS)
    warmup_iterations: int | None = option(None, at_least=0, unit="steps", identity=ALWAYS)
    warmup_tokens: int | None = option(None, at_least=0, unit="tokens", identity=ALWAYS)
    warmup_fraction: float | None = share(None, identity=ALWAYS)
    decay_iterations: int | None = positive(None, "steps", identity=ALWAYS, needs=DECAYS)
    decay_tokens: int | None = positive(None, "tokens", identity=ALWAYS, needs=DECAYS)
    decay_fraction: float | None = positive(None, "share", at_most=1, identity=ALWAYS, needs=DECAYS)
    decay_shape: Literal["linear", "sqrt", "cosine"] = option("sqrt", identity=ALWAYS, needs=WSD)
    lr_min_ratio: float = share(0.1, identity=ALWAYS)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints: contents, times, retention, and resuming.

    state_dict_type: full: one file per part, written by rank 0;
        sharded: torch's DCP, written by all ranks
    asynchronous: sharded: write in the background while training
        continues
    chkpt_saving_iterations: steps between checkpoints; default:
        only the last step
    directory: folder of checkpoints; default: <run_dir>/checkpoints
    prefix: prefix of checkpoint names, <prefix>.<timestamp>
    resume: auto: from the latest complete checkpoint in the
        directory; never; or the path of a checkpoint
    init_from: start from only the weights of this checkpoint, as
        written by tools/convert_checkpoint.py
    branch_from: start from another run's checkpoint, with its step,
        data position and optimizer state
    preempt_every_minutes: save a checkpoint to resume from after
        this many minutes without one
    chkpt_at: also save checkpoints after these steps, and never
        delete them
    keep_every: never delete checkpoints whose step is a multiple of
        this
    keep_last: number of newest checkpoints to keep; older ones are
        deleted; null: keep all
    """

    state_dict_type: Literal["full", "sharded"] = option("full")
    asynchronous: bool = option(False, needs="checkpoint.state_dict_type=sharded")
    chkpt_saving_iterations: int | None = positive(None, "steps")
    directory: str | None = option(None)
    prefix: str = option("step")
    resume: str = option("auto")
    init_from: str | None = option(None, identity=CONTENT)
    branch_from: str | None = option(None)
    preempt_every_minutes: float | None = positive(None, "minutes")
    chkpt_at: list[int] | None = option(None, unit="steps")
    keep_every: int | None = positive(None, "steps")
    keep_last: int | None = positive(2, "checkpoints")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out loss, computed at every checkpoint and at the end.

    every_iterations: steps between additional evaluations
    batch_size: samples per forward on one rank
    max_samples: maximum number of held-out samples; default: all
    num_mc: masked diffusion: number of masks per held-out sample
    """

    every_iterations: int | None = positive(None, "steps")
    batch_size: int = positive(32, "samples")
    max_samples: int | None = positive(None, "samples", identity=ALWAYS)
    num_mc: int = positive(8, "masks per sample", identity=ALWAYS)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logs and profiles.

    run_dir: folder of all files of the run
    every_iterations: steps between log lines
    tensorboard: write scalars to <run_dir>/tensorboard
    wandb: also log to this Weights & Biases project;
        WANDB_MODE=offline is supported
    profile_steps: [first, last]: profile these steps to
        <run_dir>/profile
    """

    run_dir: str = option("experiments/run")
    every_iterations: int = positive(10, "steps")
    tensorboard: bool = option(True)
    wandb: str | None = option(None)
    profile_steps: list[int] | None = option(None, unit="steps")


@dataclass(frozen=True, kw_only=True)
class MiscConfig:
    """Seed, threads, stopping and error handling.

    seed: seed of initial weights, sample order and noise
    n_threads: CPU threads per rank; default: chosen by torch
    stop_file: save and stop when this file exists
    max_hours: save and stop after this time
    on_nonfinite: on a NaN or Inf loss or gradient: stop the run, or
        skip the step
    """

    seed: int = option(0, at_least=0, unit="-", identity=ALWAYS)
    n_threads: int | None = positive(None, "threads")
    stop_file: str | None = option(None)
    max_hours: float | None = positive(None, "hours")
    on_nonfinite: Literal["stop", "skip"] = option("stop")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a training run.

    name: name of the run, for display
    """

    name: str = option("run")
    dist: DistConfig = field(default_factory=DistConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    lr_scheduler: LrSchedulerConfig = field(default_factory=LrSchedulerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    misc: MiscConfig = field(default_factory=MiscConfig)
