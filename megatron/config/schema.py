"""Settings of a run, section by section. `read.py` builds them once, and they are immutable.

None means not set. Derived numbers (steps, FLOPs, parameters) are in `megatron/plan/`.
"""

from dataclasses import dataclass, field

from megatron.config.option import ALWAYS, CONTENT, IF_CHANGED, option, read_switch
from megatron.config.training_schema import LrSchedulerConfig as LrSchedulerConfig
from megatron.config.training_schema import ModelConfig as ModelConfig
from megatron.config.training_schema import ObjectiveConfig as ObjectiveConfig
from megatron.config.training_schema import OptimConfig as OptimConfig

SYNTHETIC = "synthetic"  # replaces the prefix of a dataset: random tokens without files


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
        identity=ALWAYS,
    )
    residual_dtype: str | None = option(
        None,
        "dtype of the residual stream in every layout; default: that of dist.dtype",
        "float32",
        identity=ALWAYS,
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
        None,
        "hybrid: ranks that together hold one copy of the model; default: the ranks of a node",
        above=0,
        unit="ranks",
    )
    tensor_parallel: int = option(
        1, "ranks over which the matrices of a block are split", above=0, unit="ranks", engine="torch"
    )
    pipeline_parallel: int = option(
        1, "ranks over which the blocks are split", above=0, unit="ranks", engine="torch"
    )
    pipeline_schedule: str = option("1f1b", "schedule of the microbatches", "1f1b", "interleaved")
    pipeline_chunks: int = option(
        2, "interleaved: model stages on each rank", above=1, unit="stages per rank"
    )
    context_parallel: int = option(
        1, "ranks over which the positions of a sample are split", above=0, unit="ranks", engine="torch"
    )
    context_method: str = option(
        "ulysses",
        "ulysses: exchange positions for heads (all-to-all); ring: pass keys and values around the ranks",
        "ulysses",
        "ring",
    )
    cpu_offload: bool = option(False, "offload weights and optimizer states to CPU memory", engine="torch")
    activation_checkpointing: str = option(
        "none",
        "recomputed in backward: nothing, whole blocks, or all except matrix products and attention",
        "none",
        "full",
        "selective",
    )
    compile: bool | None = option(
        None, "apply torch.compile to each block; auto: on GPUs", engine="torch", read=read_switch
    )
    cuda_graphs: bool | None = option(
        None,
        "record steps as CUDA graphs; auto: on one GPU, up to 150 million parameters",
        engine="torch",
        read=read_switch,
    )
    attention_backend: str = option(
        "auto",
        "kernel of attention on a GPU; auto: the fastest for the shape, measured before the first step",
        "auto",
        "cudnn",
        "flash",
        "flash3",
        "flash4",
        "efficient",
        "math",
    )
    float8: bool = option(
        False,
        "matrix products in float8 through torchao, on GPUs that support it",
        engine="torch",
        identity=ALWAYS,
    )
    offload_optimizer: bool = option(
        False, "deepspeed: offload AdamW's state and update to the CPU", engine="deepspeed"
    )
    offload_parameters: bool = option(
        False, "deepspeed, zero3: offload weights to CPU memory", engine="deepspeed"
    )
    deepspeed_config: str | None = option(
        None,
        "DeepSpeed JSON file; it sets keys that are open, and must not contradict the others",
        engine="deepspeed",
    )
    timeout_s: int = option(
        1800,
        "timeout of collectives; a run that exceeds it ends with an error that names the rank",
        above=0,
        unit="seconds",
    )


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Training and held-out tokens, and the batch size."""

    path_train: str | None = option(
        None,
        "prefix of a .bin/.idx dataset, a data-path file (.txt), or synthetic: random tokens, no files",
        identity=CONTENT,
    )
    path_eval: str | None = option(None, "the same, for held-out documents", identity=CONTENT)
    path_test: str | None = option(
        None,
        "the same, for documents scored once, with the final weights: for runs that path_eval selects",
        identity=CONTENT,
    )
    mixture: str | None = option(
        None, "YAML file of a mixture of domains, replaces path_train", identity=CONTENT
    )
    order: str = option(
        "epoch",
        "sample order: exact epochs without index arrays, or Megatron's order bit for bit",
        "epoch",
        "megatron",
        identity=IF_CHANGED,
    )
    num_workers: int = option(
        1, "threads that prefetch batches; 0: none, training waits for each batch", above=-1, unit="threads"
    )
    unique_tokens: int | None = option(
        None,
        "use only the first whole samples with this many tokens, and repeat them; default: all",
        above=0,
        unit="tokens",
        identity=IF_CHANGED,
    )
    mixed_eod: bool = option(
        False, "allow a blend of corpora that end documents with different tokens or with none"
    )
    seq_len: int = option(2048, "positions per sample", above=0, unit="tokens", identity=ALWAYS)
    batch_size: int = option(
        256, "samples per step, over all ranks", above=0, unit="samples", identity=ALWAYS
    )
    microbatch_size: int | None = option(
        None,
        "maximum samples per forward on one rank; default: all its samples, on a GPU as many as fit, in a "
        "pipeline the most that give each of its ranks a microbatch",
        above=0,
        unit="samples",
    )


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
        None, "steps between checkpoints; default: only the last step", above=0, unit="steps"
    )
    directory: str | None = option(None, "folder of checkpoints; default: <run_dir>/checkpoints")
    prefix: str = option("step", "prefix of checkpoint names, <prefix>.<timestamp>")
    resume: str = option(
        "auto",
        "auto: from the latest complete checkpoint in the directory; never; or the path of a checkpoint",
    )
    init_from: str | None = option(
        None,
        "start from only the weights of this checkpoint, as written by tools/convert_checkpoint.py",
        identity=CONTENT,
    )
    branch_from: str | None = option(
        None, "start from another run's checkpoint, with its step, data position and optimizer state"
    )
    preempt_every_minutes: float | None = option(
        None, "save a checkpoint to resume from after this many minutes without one", above=0, unit="minutes"
    )
    chkpt_at: list[int] | None = option(
        None, "also save checkpoints after these steps, and never delete them", unit="steps"
    )
    keep_every: int | None = option(
        None, "never delete checkpoints whose step is a multiple of this", above=0, unit="steps"
    )
    keep_last: int | None = option(
        2,
        "number of newest checkpoints to keep; older ones are deleted; null: keep all",
        above=0,
        unit="checkpoints",
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out loss, computed at every checkpoint and at the end."""

    every_iterations: int | None = option(None, "steps between additional evaluations", above=0, unit="steps")
    batch_size: int = option(32, "samples per forward on one rank", above=0, unit="samples")
    max_samples: int | None = option(
        None, "maximum number of held-out samples; default: all", above=0, unit="samples", identity=ALWAYS
    )
    num_mc: int = option(
        8,
        "masked diffusion: number of masks per held-out sample",
        above=0,
        unit="masks per sample",
        identity=ALWAYS,
    )


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logs and profiles."""

    run_dir: str = option("experiments/run", "folder of all files of the run")
    every_iterations: int = option(10, "steps between log lines", above=0, unit="steps")
    tensorboard: bool = option(True, "write scalars to <run_dir>/tensorboard")
    wandb: str | None = option(
        None, "also log to this Weights & Biases project; WANDB_MODE=offline is supported"
    )
    profile_steps: list[int] | None = option(
        None, "[first, last]: profile these steps to <run_dir>/profile", unit="steps"
    )


@dataclass(frozen=True, kw_only=True)
class MiscConfig:
    """Seed, threads, stopping and error handling."""

    seed: int = option(
        0, "seed of initial weights, sample order and noise", at_least=0, unit="-", identity=ALWAYS
    )
    n_threads: int | None = option(
        None, "CPU threads per rank; default: chosen by torch", above=0, unit="threads"
    )
    stop_file: str | None = option(None, "save and stop when this file exists")
    max_hours: float | None = option(None, "save and stop after this time", above=0, unit="hours")
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
