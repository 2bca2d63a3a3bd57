"""Settings of a run, section by section. `read.py` builds them once, and they are immutable.

None means not set. Derived numbers (steps, FLOPs, parameters) are in `plan.py`.
"""

from dataclasses import dataclass, field
from typing import Any

SYNTHETIC = "synthetic"  # replaces the prefix of a dataset: random tokens without files


def option(
    default: Any, help_text: str, *choices: Any, above: float | None = None, later: bool = False
) -> Any:
    """Declare a setting: a dataclass field with its help text, `choices` and lower bound.

    above   numbers must be greater than this
    later   added after runs had identities: omitted from the run hash at its default, so that the
            identities of older runs stay valid
    """
    # all facts about a key are in its metadata: read.py checks them, and the reference page prints them
    metadata = {"help": help_text, "choices": choices, "above": above, "later": later}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class DistConfig:
    """Devices, parallelism and precision."""

    engine: str = option("torch", "implementation of forward, backward and update", "torch", "deepspeed")
    cpu_only: bool = option(False, "use the CPU even if there is a GPU")
    backend: str | None = option(
        None, "backend of torch.distributed; default: nccl on GPUs; CPUs always use gloo", "nccl", "gloo"
    )
    dtype: str = option(
        "bfloat16",
        "dtype of matrix products; updates, reductions over ranks and checkpoints are float32",
        "float32",
        "bfloat16",
        "float16",
    )
    sharding_stage: str = option(
        "zero0",
        "state sharded over data-parallel ranks: zero0 none, zero1 optimizer states, zero2 also gradients, "
        "zero3 also weights; hybrid: sharded within groups of shard_size ranks, replicated between groups",
        "zero0",
        "zero1",
        "zero2",
        "zero3",
        "zero2_hybrid",
        "zero3_hybrid",
    )
    shard_size: int | None = option(
        None, "hybrid: ranks that together hold one copy of the model; default: the ranks of a node", above=0
    )
    tensor_parallel: int = option(1, "ranks over which the matrices of a block are split", above=0)
    pipeline_parallel: int = option(1, "ranks over which the blocks are split", above=0)
    pipeline_schedule: str = option("1f1b", "schedule of the microbatches", "1f1b", "interleaved")
    pipeline_chunks: int = option(2, "interleaved: model stages on each rank", above=1)
    context_parallel: int = option(1, "ranks over which the positions of a sample are split", above=0)
    context_method: str = option(
        "ulysses",
        "ulysses: exchange positions for heads (all-to-all); ring: pass keys and values around the ranks",
        "ulysses",
        "ring",
    )
    cpu_offload: bool = option(False, "offload weights and optimizer states to CPU memory")
    activation_checkpointing: str = option(
        "none",
        "recomputed in backward: nothing, whole blocks, or all except matrix products and attention",
        "none",
        "full",
        "selective",
    )
    compile: bool = option(False, "apply torch.compile to each block")
    float8: bool = option(False, "matrix products in float8 through torchao, on GPUs that support it")
    offload_optimizer: bool = option(False, "deepspeed: offload AdamW's state and update to the CPU")
    offload_parameters: bool = option(False, "deepspeed, zero3: offload weights to CPU memory")
    deepspeed_config: str | None = option(
        None, "DeepSpeed JSON file merged into the settings; it must not contradict them"
    )
    timeout_s: int = option(
        1800, "timeout of collectives; a run that exceeds it ends with an error that names the rank",
        above=0,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Training and held-out tokens, and the batch size."""

    path_train: str | None = option(
        None, "prefix of a .bin/.idx dataset, a data-path file (.txt), or synthetic: random tokens, no files"
    )
    path_eval: str | None = option(None, "the same, for held-out documents")
    mixture: str | None = option(None, "YAML file of a mixture of domains, replaces path_train")
    order: str = option(
        "epoch",
        "sample order: exact epochs without index arrays, or Megatron's order bit for bit",
        "epoch",
        "megatron",
    )
    num_workers: int = option(
        1, "threads that prefetch batches; 0: none, training waits for each batch", above=-1
    )
    unique_tokens: int | None = option(
        None, "use only the first whole samples with this many tokens, and repeat them; default: all",
        above=0,
    )  # fmt: skip
    mixed_eod: bool = option(
        False, "allow a blend of corpora that end documents with different tokens or with none", later=True
    )
    seq_len: int = option(2048, "positions per sample", above=0)
    batch_size: int = option(256, "samples per step, over all ranks", above=0)
    microbatch_size: int | None = option(
        None,
        "maximum samples per forward on one rank; default: all its samples, in a pipeline the most that give "
        "each of its ranks a microbatch",
        above=0,
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Resolved shape of a transformer, for autoregressive models and masked diffusion."""

    size: str = option("custom", "name of a size in utils/model_sizes.yaml, or a label")
    d_model: int = option(0, "width of the residual stream", above=0)
    d_ff: int = option(0, "width of the feed-forward layer", above=0)
    d_head: int = option(0, "width of an attention head", above=0)
    n_heads: int = option(0, "number of attention heads", above=0)
    n_layers: int = option(0, "number of blocks", above=0)
    n_tokens: int = option(0, "ids of the tokenizer; [MASK] is the next row", above=0)
    vocab_rows: int = option(0, "embedding rows: tokens, then [MASK], then padding", above=0)
    rope_theta: float = option(10000.0, "base of the rotary frequencies", above=0)
    norm_eps: float = option(1e-5, "epsilon added to the mean square (variance) in a norm", above=0)
    n_kv_heads: int | None = option(
        None,
        "key and value heads, each shared by a group of heads; default: n_heads",
        above=0,
        later=True,
    )
    norm: str = option("rmsnorm", "norm of the residual stream", "rmsnorm", "layernorm", later=True)
    feed_forward: str = option(
        "swiglu",
        "swiglu: three matrices; gelu: two matrices, GPT-2's tanh approximation",
        "swiglu",
        "gelu",
        later=True,
    )
    positions: str = option(
        "rotary",
        "position encoding; learned: a table added to the embedding",
        "rotary",
        "learned",
        later=True,
    )
    n_positions: int | None = option(
        None, "rows of the table of learned positions; default: dataset.seq_len", above=0, later=True
    )
    biases: bool = option(False, "biases in every matrix of a block and in LayerNorm", later=True)
    tied_embedding: bool = option(
        True, "the output head is the embedding; false: a separate matrix", later=True
    )
    qk_norm: bool = option(False, "RMSNorm on each head's query and key", later=True)
    document_mask: bool = option(
        False, "attend only within a document, with positions counted from its start", later=True
    )
    eod_id: int | None = option(
        None, "end-of-document id, for document_mask; default: that of the corpus", later=True
    )
    attention_dropout: float = option(
        0.0, "probability of dropping an attention weight in training; 0 in evaluation", later=True
    )
    init_std: float = option(
        0.02,
        "std of the initial matrices; much narrower models than GPT-2 learn faster with 0.6 / sqrt(d_model)",
        above=0,
        later=True,
    )
    parametrization: str = option(
        "standard",
        "scaling of initialisation, learning rates and multipliers with the shape",
        "standard",
        "mup",
        "completep",
        later=True,
    )
    base_d_model: int | None = option(
        None,
        "mup, completep: width at which the model equals the standard one",
        above=0,
        later=True,
    )
    base_n_layers: int | None = option(
        None,
        "completep: depth at which the model equals the standard one",
        above=0,
        later=True,
    )
    base_d_head: int | None = option(
        None, "mup, completep: head width at which the model equals the standard one; default: d_head",
        above=0, later=True,
    )  # fmt: skip

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.n_kv_heads or self.n_heads


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Training objective."""

    name: str = option(
        "autoregressive",
        "autoregressive (ar): next token; masked_diffusion (mdm): masked tokens from both sides",
        "autoregressive",
        "masked_diffusion",
    )
    rate_min: float = option(
        1e-3, "masked diffusion: masking rate = (1 - rate_min) t + rate_min, t ~ U(0, 1)"
    )
    t_draw: str = option(
        "independent", "masked diffusion: joint distribution of the t of a batch; each t is uniform",
        "independent", "antithetic", "stratified", later=True,
    )  # fmt: skip
    low_noise_start: float | None = option(
        None,
        "masked diffusion: t ~ U(0, low_noise_start) for the first low_noise_iterations",
        above=0,
        later=True,
    )
    low_noise_iterations: int | None = option(
        None, "masked diffusion: number of steps with low_noise_start", above=0, later=True
    )
    ar_ratio: float = option(
        0.0,
        "masked diffusion: share of training samples whose last tokens are masked, not random ones",
        later=True,
    )
    orders: int = option(
        1,
        "autoregressive: number of orders in which training samples are read, including left to right",
        above=0,
        later=True,
    )
    order_kind: str = option(
        "random",
        "autoregressive: kind of the orders other than left to right",
        "random",
        "noise_sorted",
        later=True,
    )
    order_noise: float = option(
        0.1,
        "noise_sorted: sort positions plus normal noise of this std, in units of seq_len",
        above=0,
        later=True,
    )
    randmask_ratio: float = option(
        0.0,
        "autoregressive: share of training positions that attend to a random subset of the past",
        later=True,
    )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    lr: float = option(3e-4, "peak learning rate", above=0)
    weight_decay: float = option(0.1, "weight decay of matrices; gains of norms have none")
    beta1: float = option(0.9, "decay rate of the mean gradient")
    beta2: float = option(0.95, "decay rate of the mean squared gradient")
    eps: float = option(1e-8, "epsilon added to the root of the mean square", above=0)
    grad_clip: float = option(1.0, "maximum gradient norm; 0: no clipping")
    kernel: str = option(
        "torch", "fused AdamW of torch or of NVIDIA's apex, which must be built from source", "torch", "apex"
    )


@dataclass(frozen=True, kw_only=True)
class LrSchedulerConfig:
    """Length of the run and learning-rate schedule. Set each length in one unit only."""

    kind: str = option("cosine", "schedule after the warm-up", "cosine", "linear", "wsd", "constant")
    total_iterations: int | None = option(None, "length of the run", above=0)
    total_tokens: int | None = option(None, "length of the run, rounded to whole steps", above=0)
    total_epochs: float | None = option(None, "length of the run, rounded down to whole steps", above=0)
    warmup_iterations: int | None = option(None, "length of the linear warm-up")
    warmup_tokens: int | None = option(None, "length of the linear warm-up, rounded up to whole steps")
    warmup_fraction: float | None = option(None, "length of the linear warm-up, as a fraction of the run")
    decay_iterations: int | None = option(None, "wsd: length of the decay at the end", above=0)
    decay_tokens: int | None = option(None, "wsd: length of the decay, rounded up to whole steps", above=0)
    decay_fraction: float | None = option(
        None, "wsd: length of the decay, as a fraction of the run; default: the last fifth", above=0
    )
    decay_shape: str = option(
        "sqrt", "wsd: shape of the decay; sqrt: 1 - sqrt(fraction of the decay)", "linear", "sqrt", "cosine"
    )
    lr_min_ratio: float = option(0.1, "final learning rate divided by the peak")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints: contents, times, retention, and resuming."""

    state_dict_type: str = option(
        "full",
        "full: one file per part, written by rank 0; sharded: torch's DCP, written by all ranks",
        "full",
        "sharded",
    )
    asynchronous: bool = option(False, "sharded: write in the background while training continues")
    chkpt_saving_iterations: int | None = option(
        None, "steps between checkpoints; default: only the last step", above=0
    )
    directory: str | None = option(None, "folder of checkpoints; default: <run_dir>/checkpoints")
    prefix: str = option("step", "prefix of checkpoint names, <prefix>.<timestamp>")
    resume: str = option(
        "auto",
        "auto: from the latest complete checkpoint in the directory; never; or the path of a checkpoint",
    )
    init_from: str | None = option(
        None, "start from only the weights of this checkpoint, as written by tools/convert_checkpoint.py"
    )
    branch_from: str | None = option(
        None, "start from another run's checkpoint, with its step, data position and optimizer state"
    )
    preempt_every_minutes: float | None = option(
        None, "save a checkpoint to resume from after this many minutes without one", above=0
    )
    chkpt_at: list[int] | None = option(
        None, "also save checkpoints after these steps, and never delete them"
    )
    keep_every: int | None = option(
        None, "never delete checkpoints whose step is a multiple of this", above=0
    )
    keep_last: int | None = option(
        2, "number of newest checkpoints to keep; older ones are deleted; null: keep all", above=0
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out loss, computed at every checkpoint and at the end."""

    every_iterations: int | None = option(None, "steps between additional evaluations", above=0)
    batch_size: int = option(32, "samples per forward on one rank", above=0)
    max_samples: int | None = option(None, "maximum number of held-out samples; default: all", above=0)
    num_mc: int = option(8, "masked diffusion: number of masks per held-out sample", above=0)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logs and profiles."""

    run_dir: str = option("experiments/run", "folder of all files of the run")
    every_iterations: int = option(10, "steps between log lines", above=0)
    tensorboard: bool = option(True, "write scalars to <run_dir>/tensorboard")
    wandb: str | None = option(
        None, "also log to this Weights & Biases project; WANDB_MODE=offline is supported"
    )
    profile_steps: list[int] | None = option(None, "[first, last]: profile these steps to <run_dir>/profile")


@dataclass(frozen=True, kw_only=True)
class MiscConfig:
    """Seed, threads, stopping and error handling."""

    seed: int = option(0, "seed of initial weights, sample order and noise")
    n_threads: int | None = option(None, "CPU threads per rank; default: chosen by torch", above=0)
    stop_file: str | None = option(None, "save and stop when this file exists")
    max_hours: float | None = option(None, "save and stop after this time", above=0)
    on_nonfinite: str = option(
        "stop", "on a NaN or Inf loss or gradient: stop the run, or skip the step", "stop", "skip"
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a training run."""

    name: str = option("run", "name of the run, for display")
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
