"""The settings of a run, section by section. Read once by `read.py`, never written to again.

Not set is None. What follows from other numbers (steps, FLOPs, parameters) is not here but in `plan.py`.
"""

from dataclasses import dataclass, field
from typing import Any


def option(
    default: Any, help_text: str, *choices: Any, above: float | None = None, later: bool = False
) -> Any:
    """A dataclass field with its line of documentation and what it may be: `choices`, or numbers `above`.

    `later`: the option came when runs had names already, so at its default it leaves a run's name alone.
    """
    told = {"help": help_text, "choices": choices, "above": above, "later": later}
    return field(default=default, metadata=told)


@dataclass(frozen=True, kw_only=True)
class DistConfig:
    """Where and in which precision the run computes."""

    engine: str = option("torch", "who runs forward, backward and update", "torch", "deepspeed")
    cpu_only: bool = option(False, "stay on the CPU even where there is a GPU")
    backend: str | None = option(
        None, "of torch.distributed; by itself nccl on GPUs; on CPUs always gloo", "nccl", "gloo"
    )
    dtype: str = option(
        "bfloat16",
        "of the matrix products; updates, sums over ranks and what is saved are float32",
        "float32",
        "bfloat16",
        "float16",
    )
    sharding_stage: str = option(
        "zero0",
        "what data-parallel ranks share: zero0 nothing, zero1 optimizer states, zero2 and gradients, "
        "zero3 and weights; hybrid: within groups of shard_size ranks, copies between them",
        "zero0",
        "zero1",
        "zero2",
        "zero3",
        "zero2_hybrid",
        "zero3_hybrid",
    )
    shard_size: int | None = option(
        None, "hybrid: ranks that hold one copy of the model; by itself those of a node", above=0
    )
    tensor_parallel: int = option(1, "ranks that share the matrices of a block", above=0)
    pipeline_parallel: int = option(1, "ranks that share the blocks", above=0)
    pipeline_schedule: str = option("1f1b", "order of the microbatches", "1f1b", "interleaved")
    pipeline_chunks: int = option(2, "interleaved: pieces of the model on each rank", above=1)
    context_parallel: int = option(1, "ranks that share the positions of a sample", above=0)
    context_method: str = option(
        "ulysses", "ulysses: heads for positions in attention; ring: keys go round", "ulysses", "ring"
    )
    cpu_offload: bool = option(False, "keep weights and optimizer in the memory of the host")
    activation_checkpointing: str = option(
        "none",
        "computed again in the backward: nothing, whole blocks, or all but products and attention",
        "none",
        "full",
        "selective",
    )
    compile: bool = option(False, "torch.compile each block")
    float8: bool = option(False, "products in float8 through torchao, where the GPU has them")
    offload_optimizer: bool = option(False, "deepspeed: AdamW's state and update in the host's memory")
    offload_parameters: bool = option(False, "deepspeed, zero3: weights wait in the host's memory")
    deepspeed_config: str | None = option(
        None, "a DeepSpeed JSON laid over our settings; it must not contradict"
    )
    timeout_s: int = option(
        1800, "a collective of any group that takes longer than this ends the run, which names the rank",
        above=0,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """The tokens, and how many of them make one step."""

    path_train: str | None = option(
        None, "prefix of a .bin/.idx pair, a data-path file (.txt), or synthetic: random tokens, no files"
    )
    path_eval: str | None = option(None, "the same for held-out documents")
    mixture: str | None = option(None, "YAML file of a mixture of domains, instead of path_train")
    order: str = option(
        "epoch", "true epochs without arrays, or Megatron's order bit for bit", "epoch", "megatron"
    )
    num_workers: int = option(
        1, "threads that make batches ahead; 0: none, the training waits for each batch", above=-1
    )
    unique_tokens: int | None = option(
        None, "train on the first whole samples that hold so many tokens, however often; by itself on all",
        above=0,
    )  # fmt: skip
    mixed_eod: bool = option(
        False, "blend corpora that end their documents differently, or not at all", later=True
    )
    seq_len: int = option(2048, "positions a sample has", above=0)
    batch_size: int = option(256, "samples a step, over all ranks", above=0)
    microbatch_size: int | None = option(
        None,
        "samples a forward on one rank, at most; by itself all its share, in a pipeline the most that give "
        "each of its ranks a microbatch",
        above=0,
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of one transformer, resolved. The same shape serves AR and masked diffusion."""

    size: str = option("custom", "name of the size, as in utils/model_sizes.yaml")
    d_model: int = option(0, "width of the residual stream", above=0)
    d_ff: int = option(0, "width of the feed-forward", above=0)
    d_head: int = option(0, "width of one head", above=0)
    n_heads: int = option(0, "attention heads", above=0)
    n_layers: int = option(0, "blocks", above=0)
    n_tokens: int = option(0, "ids of the tokenizer; [MASK] is the row after them", above=0)
    vocab_rows: int = option(0, "embedding rows: tokens, then [MASK], then padding", above=0)
    rope_theta: float = option(10000.0, "base of the rotary frequencies", above=0)
    norm_eps: float = option(1e-5, "added to the mean square (variance) in a norm", above=0)
    n_kv_heads: int | None = option(
        None,
        "heads of keys and values, each shared by a group of heads; by itself n_heads",
        above=0,
        later=True,
    )
    norm: str = option("rmsnorm", "of the residual stream", "rmsnorm", "layernorm", later=True)
    feed_forward: str = option(
        "swiglu", "three matrices; gelu: two, with GPT-2's tanh form", "swiglu", "gelu", later=True
    )
    positions: str = option(
        "rotary", "learned: a table added to the embedding", "rotary", "learned", later=True
    )
    n_positions: int | None = option(
        None, "rows of the table of learned positions; by itself dataset.seq_len", above=0, later=True
    )
    biases: bool = option(False, "on every matrix of a block, and in LayerNorm", later=True)
    tied_embedding: bool = option(True, "the head is the embedding; false: a matrix of its own", later=True)
    qk_norm: bool = option(False, "RMSNorm on each head's query and key before they meet", later=True)
    document_mask: bool = option(
        False, "attend within a document only, and count positions from its start", later=True
    )
    eod_id: int | None = option(
        None, "the id that ends a document, for document_mask; by itself the corpus's", later=True
    )
    attention_dropout: float = option(
        0.0, "share of attention weights dropped in training, none in evaluation", later=True
    )
    init_std: float = option(
        0.02,
        "std of the initial matrices; models far narrower than GPT-2 learn faster from 0.6 / sqrt(d_model)",
        above=0,
        later=True,
    )
    parametrization: str = option(
        "standard",
        "how init, rates and multipliers follow the shape",
        "standard",
        "mup",
        "completep",
        later=True,
    )
    base_d_model: int | None = option(
        None,
        "mup, completep: width at which the model is the standard one",
        above=0,
        later=True,
    )
    base_n_layers: int | None = option(
        None,
        "completep: depth at which the model is the standard one",
        above=0,
        later=True,
    )
    base_d_head: int | None = option(
        None, "mup, completep: head width at which the model is the standard one; by itself d_head", above=0,
        later=True,
    )  # fmt: skip

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.n_kv_heads or self.n_heads


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What the model learns to predict."""

    name: str = option(
        "autoregressive",
        "ar: next token; mdm: hidden tokens from both sides",
        "autoregressive",
        "masked_diffusion",
    )
    rate_min: float = option(1e-3, "masked diffusion: rate = (1 - rate_min) t + rate_min, t ~ U(0, 1)")
    t_draw: str = option(
        "independent", "masked diffusion: how the t of a batch are drawn; each is uniform in all three",
        "independent", "antithetic", "stratified", later=True,
    )  # fmt: skip
    low_noise_start: float | None = option(
        None, "masked diffusion: t ~ U(0, this) over the first low_noise_iterations", above=0, later=True
    )
    low_noise_iterations: int | None = option(None, "steps that low_noise_start lasts", above=0, later=True)
    ar_ratio: float = option(
        0.0, "masked diffusion: share of training samples whose last tokens are hidden instead", later=True
    )
    orders: int = option(
        1,
        "autoregressive: orders that training samples are read in, left to right among them",
        above=0,
        later=True,
    )
    order_kind: str = option(
        "random", "autoregressive: of the other orders", "random", "noise_sorted", later=True
    )
    order_noise: float = option(
        0.1, "noise_sorted: positions plus normal noise of this std (in seq_len), sorted", above=0, later=True
    )
    randmask_ratio: float = option(
        0.0, "autoregressive: share of training positions whose view of the past is thinned out", later=True
    )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    lr: float = option(3e-4, "peak learning rate", above=0)
    weight_decay: float = option(0.1, "on matrices; gains of norms have none")
    beta1: float = option(0.9, "decay of the mean gradient")
    beta2: float = option(0.95, "decay of the mean square gradient")
    eps: float = option(1e-8, "added to the root of the mean square", above=0)
    grad_clip: float = option(1.0, "largest norm of the gradient; 0: no clipping")
    kernel: str = option("torch", "whose fused AdamW; apex is NVIDIA's, built from source", "torch", "apex")


@dataclass(frozen=True, kw_only=True)
class LrSchedulerConfig:
    """Length of the run and the shape of the learning rate over it: lengths in one unit each."""

    kind: str = option("cosine", "shape after the warm-up", "cosine", "linear", "wsd", "constant")
    total_iterations: int | None = option(None, "steps of the run", above=0)
    total_tokens: int | None = option(None, "tokens of the run, rounded to whole steps", above=0)
    total_epochs: float | None = option(None, "epochs of the run; whole steps within them", above=0)
    warmup_iterations: int | None = option(None, "steps of linear warm-up")
    warmup_tokens: int | None = option(None, "tokens of linear warm-up, rounded up to whole steps")
    warmup_fraction: float | None = option(None, "part of the run that is linear warm-up")
    decay_iterations: int | None = option(None, "wsd: steps of the decay at the end", above=0)
    decay_tokens: int | None = option(None, "wsd: tokens of the decay, rounded up to whole steps", above=0)
    decay_fraction: float | None = option(
        None, "wsd: part of the run that decays; by itself the last fifth", above=0
    )
    decay_shape: str = option(
        "sqrt", "wsd: how the rate falls; sqrt: 1 - sqrt(part done)", "linear", "sqrt", "cosine"
    )
    lr_min_ratio: float = option(0.1, "last learning rate over the peak")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept on disk, and where a run goes on from."""

    state_dict_type: str = option(
        "full",
        "full: one file a part, written by rank 0; sharded: torch's DCP, written by all ranks",
        "full",
        "sharded",
    )
    asynchronous: bool = option(False, "sharded: write in the background while training goes on")
    chkpt_saving_iterations: int | None = option(
        None, "steps between checkpoints; by itself only the last", above=0
    )
    directory: str | None = option(None, "by itself <run_dir>/checkpoints")
    prefix: str = option("step", "checkpoints are named <prefix>.<timestamp>")
    resume: str = option(
        "auto", "auto: the whole one of the last step in the directory; never; or the path of one"
    )
    init_from: str | None = option(
        None, "start from the weights alone of this checkpoint, as tools/convert_checkpoint.py writes them"
    )
    branch_from: str | None = option(
        None, "path of another run's checkpoint to start from, keeping its step, data position and optimizer"
    )
    preempt_every_minutes: float | None = option(
        None, "minutes without a checkpoint after which one is made to go on from", above=0
    )
    chkpt_at: list[int] | None = option(None, "checkpoints after these steps too, never deleted")
    keep_every: int | None = option(None, "those of a multiple of so many steps are never deleted", above=0)
    keep_last: int | None = option(
        2, "so many of the newest stay, older ones are deleted; null: all stay", above=0
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The held-out loss, taken at every checkpoint and at the end."""

    every_iterations: int | None = option(None, "steps between further evaluations", above=0)
    batch_size: int = option(32, "samples a forward on one rank", above=0)
    max_samples: int | None = option(None, "score only so many held-out samples; by itself all", above=0)
    num_mc: int = option(8, "masked diffusion: masks drawn for each held-out sample", above=0)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What a run tells."""

    run_dir: str = option("experiments/run", "folder of everything that the run leaves")
    every_iterations: int = option(10, "steps between two log lines", above=0)
    tensorboard: bool = option(True, "write scalars to <run_dir>/tensorboard")
    wandb: str | None = option(None, "project of Weights & Biases to tell too; WANDB_MODE=offline works")
    profile_steps: list[int] | None = option(None, "[first, last]: record these steps in <run_dir>/profile")


@dataclass(frozen=True, kw_only=True)
class MiscConfig:
    """The rest."""

    seed: int = option(0, "of initial weights, sample order and noise")
    n_threads: int | None = option(
        None, "CPU threads a rank computes with; by itself torch's choice", above=0
    )
    stop_file: str | None = option(None, "the run saves and stops when this file appears")
    max_hours: float | None = option(None, "the run saves and stops after so long", above=0)
    on_nonfinite: str = option(
        "stop", "a loss or gradient that is no number: end the run, or leave the step out", "stop", "skip"
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run, whole."""

    name: str = option("run", "for people")
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
