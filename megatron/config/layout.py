"""How the ranks of a run share the work: sizes of the axes, and what does not go together."""

from dataclasses import dataclass

from megatron.config.schema import DistConfig, RunConfig

HYBRID = ("zero2_hybrid", "zero3_hybrid")


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """Where one rank stands on each axis."""

    pipeline: int
    data: int
    context: int
    tensor: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the axes. Neighbours differ in `tensor` first: it talks most, so it stays within a node.

    rank = ((pipeline * n_data + data) * n_context + context) * n_tensor + tensor

    shard   how many neighbours of data x context hold the parts of one copy of the model
    """

    pipeline: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    shard: int = 1

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Pipeline, data, context, tensor."""
        return self.pipeline, self.data, self.context, self.tensor

    def coordinate(self, rank: int) -> Coordinate:
        """Of one rank."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return Coordinate(pipeline=pipeline, data=data, context=context, tensor=tensor)


def layout_of(config: DistConfig, n_ranks: int, ranks_of_node: int | None = None) -> Layout:
    """The layout of so many ranks. ValueError where they do not divide.

    ranks_of_node: what a hybrid shards over unless dist.shard_size says otherwise.
    """
    of_model = config.pipeline_parallel * config.context_parallel * config.tensor_parallel
    if n_ranks % of_model:
        raise ValueError(
            f"dist: {n_ranks} ranks cannot be cut by pipeline_parallel {config.pipeline_parallel} x "
            f"context_parallel {config.context_parallel} x tensor_parallel {config.tensor_parallel} = "
            f"{of_model}; start a multiple of {of_model} ranks or change the sizes"
        )
    holders = n_ranks // (config.pipeline_parallel * config.tensor_parallel)
    shard = 1 if config.sharding_stage == "zero0" else holders
    if config.sharding_stage in HYBRID:
        on_node = max(1, min(holders, (ranks_of_node or n_ranks) // config.tensor_parallel))
        shard = config.shard_size or on_node
        if holders % shard:
            raise ValueError(
                f"dist.shard_size: {shard} ranks to a copy of the model do not divide the {holders} there "
                "are; set it to a divisor"
            )
    return Layout(
        pipeline=config.pipeline_parallel,
        data=n_ranks // of_model,
        context=config.context_parallel,
        tensor=config.tensor_parallel,
        shard=shard,
    )


def check_layout(config: RunConfig) -> None:
    """Settings that contradict one another whatever the number of ranks. ValueError names both."""
    dist, model, data = config.dist, config.model, config.dataset
    heads = dist.tensor_parallel * (dist.context_parallel if dist.context_method == "ulysses" else 1)
    stages = dist.pipeline_parallel * (dist.pipeline_chunks if dist.pipeline_schedule == "interleaved" else 1)
    split = dist.tensor_parallel * dist.context_parallel
    _check_axes(dist)
    _check_shape(config)
    if model.n_heads % heads:
        raise ValueError(
            f"model.n_heads: {model.n_heads} heads cannot be shared by dist.tensor_parallel "
            f"{dist.tensor_parallel} x context_parallel {dist.context_parallel}; choose divisors of the heads"
        )
    if model.kv_heads % heads:
        raise ValueError(
            f"model.n_kv_heads: {model.kv_heads} heads cannot be shared by dist.tensor_parallel "
            f"{dist.tensor_parallel} x context_parallel {dist.context_parallel}; choose divisors of the heads"
        )
    for name, size in (("d_ff", model.d_ff), ("vocab_rows", model.vocab_rows)):
        if size % dist.tensor_parallel:
            raise ValueError(
                f"dist.tensor_parallel: {dist.tensor_parallel} does not divide model.{name} {size}; "
                "choose a divisor"
            )
    if data.seq_len % split:
        raise ValueError(
            f"dataset.seq_len: {data.seq_len} positions cannot be shared by dist.tensor_parallel "
            f"{dist.tensor_parallel} x context_parallel {dist.context_parallel}; choose a multiple of {split}"
        )
    if dist.pipeline_parallel > 1 and dist.sharding_stage not in ("zero0", "zero1"):
        raise ValueError(
            f"dist.sharding_stage: {dist.sharding_stage} would gather the weights for every microbatch of "
            f"pipeline_parallel {dist.pipeline_parallel}; use zero0 or zero1"
        )
    if model.n_layers < stages:
        raise ValueError(
            f"dist.pipeline_parallel: {stages} stages for model.n_layers {model.n_layers} blocks; use fewer"
        )
    if dist.shard_size is not None and dist.sharding_stage not in HYBRID:
        raise ValueError(
            f"dist.shard_size: is for {' and '.join(HYBRID)}, dist.sharding_stage is {dist.sharding_stage}; "
            "leave it out"
        )
    if dist.context_method == "ring" and dist.dtype == "float32" and not dist.cpu_only:
        raise ValueError(
            "dist.context_method: ring wants dist.dtype=bfloat16 or float16 on a GPU, found float32; "
            "use ulysses"
        )
    _check_precision(dist)


def _check_axes(dist: DistConfig) -> None:
    """ValueError for how an axis is to work where there is no such axis."""
    default = DistConfig()
    for key, works in (
        ("pipeline_schedule", dist.pipeline_parallel > 1),
        ("pipeline_chunks", dist.pipeline_parallel > 1 and dist.pipeline_schedule == "interleaved"),
        ("context_method", dist.context_parallel > 1),
    ):
        if getattr(dist, key) != getattr(default, key) and not works:
            axis = key.partition("_")[0]
            wanted = f"dist.{axis}_parallel of 2 or more"
            wanted += " and dist.pipeline_schedule=interleaved" if key == "pipeline_chunks" else ""
            raise ValueError(
                f"dist.{key}: {getattr(dist, key)} has no effect here, it wants {wanted}; leave it out"
            )


def _check_shape(config: RunConfig) -> None:
    """The axes that cut a model take the Llama family's shape, and objectives that leave samples in order."""
    axes = ("tensor_parallel", "pipeline_parallel", "context_parallel")
    cut = next((axis for axis in axes if getattr(config.dist, axis) > 1), None)
    if cut is None:
        return
    plain = {
        "model": {
            "norm": "rmsnorm", "feed_forward": "swiglu", "positions": "rotary", "biases": False,
            "tied_embedding": True, "qk_norm": False, "document_mask": False, "attention_dropout": 0.0,
            "parametrization": "standard",
        },
        "objective": {"orders": 1, "randmask_ratio": 0.0},
    }  # fmt: skip
    for section, wanted in plain.items():
        for key, value in wanted.items():
            found = getattr(getattr(config, section), key)
            if found != value:
                raise ValueError(
                    f"dist.{cut}: {section}.{key} is {found!r}, and a model that is cut has {value!r}; use "
                    "dist.sharding_stage, which takes every shape"
                )


def _check_precision(dist: DistConfig) -> None:
    if dist.cpu_offload and dist.sharding_stage == "zero0":
        raise ValueError(
            "dist.cpu_offload: zero0 keeps every weight where it computes; use dist.sharding_stage=zero1, "
            "zero2 or zero3"
        )
    if dist.cpu_offload and dist.pipeline_parallel > 1:
        raise ValueError(
            "dist.cpu_offload: a pipeline keeps its weights on the device; leave out one of the two"
        )
    if dist.float8 and dist.dtype != "bfloat16":
        raise ValueError(f"dist.float8: wants dist.dtype=bfloat16 around its products, found {dist.dtype}")
