"""Parallel axes of a run: their sizes, rank coordinates, and checks of combinations of settings."""

from dataclasses import dataclass
from typing import Any

from megatron.config.schema import DistConfig, RunConfig

HYBRID = ("zero2_hybrid", "zero3_hybrid")


@dataclass(frozen=True, kw_only=True)
class RankCoordinate:
    """Coordinate of one rank on each parallel axis."""

    pipeline: int
    data: int
    context: int
    tensor: int


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of the parallel axes.

    rank = ((pipeline * n_data + data) * n_context + context) * n_tensor + tensor

    Neighbouring ranks differ in `tensor` first: this axis communicates most, so it stays within a node.

    shard   number of neighbouring ranks of data x context that together hold one copy of the model
    """

    pipeline: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    shard: int = 1

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes of the axes pipeline, data, context, tensor, slowest first."""
        return self.pipeline, self.data, self.context, self.tensor

    def locate_rank(self, rank: int) -> RankCoordinate:
        """Return the coordinate of a rank."""
        # Example: pipeline 2, data 2, context 1, tensor 2. Rank 5 = ((1 * 2 + 0) * 1 + 0) * 2 + 1 is pipeline
        # 1, data 0, context 0, tensor 1.
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return RankCoordinate(pipeline=pipeline, data=data, context=context, tensor=tensor)


def build_layout(config: DistConfig, n_ranks: int, ranks_of_node: int | None = None) -> ParallelLayout:
    """Return the layout of `n_ranks` ranks. Raises ValueError if the axes do not divide them.

    ranks_of_node   ranks per node, the default shard size of the hybrid stages
    """
    ranks_per_model = config.pipeline_parallel * config.context_parallel * config.tensor_parallel
    if n_ranks % ranks_per_model:
        raise ValueError(
            f"dist: {n_ranks} ranks cannot be cut by pipeline_parallel {config.pipeline_parallel} x "
            f"context_parallel {config.context_parallel} x tensor_parallel {config.tensor_parallel} = "
            f"{ranks_per_model}; start a multiple of {ranks_per_model} ranks or change the sizes"
        )
    # ranks with the same pipeline and tensor coordinate have the same weights: data x context
    n_holders = n_ranks // (config.pipeline_parallel * config.tensor_parallel)
    shard = 1 if config.sharding_stage == "zero0" else n_holders
    if config.sharding_stage in HYBRID:
        # tensor ranks are neighbours, so a node has ranks_of_node / tensor of these ranks
        # 16 ranks on 2 nodes with tensor 2: 8 ranks have the same weights, 4 of them on each node, so the
        # shard size is 4
        on_node = max(1, min(n_holders, (ranks_of_node or n_ranks) // config.tensor_parallel))
        shard = config.shard_size or on_node
        if n_holders % shard:
            raise ValueError(
                f"dist.shard_size: got {shard} ranks per copy of the model, expected a divisor of {n_holders}"
            )
    return ParallelLayout(
        pipeline=config.pipeline_parallel,
        data=n_ranks // ranks_per_model,
        context=config.context_parallel,
        tensor=config.tensor_parallel,
        shard=shard,
    )


def check_parallelism(config: RunConfig) -> None:
    """Check for settings that contradict each other for any number of ranks. Raises ValueError with both."""
    dist, model, data = config.dist, config.model, config.dataset
    # ulysses splits the heads of a tensor rank again over the context ranks; ring keeps them
    heads = dist.tensor_parallel * (dist.context_parallel if dist.context_method == "ulysses" else 1)
    # interleaved: each rank has pipeline_chunks stages, and every stage needs a block
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
    # sequence parallelism: outside attention and MLP, the positions of a context rank are split over tensor
    # ranks
    if data.seq_len % split:
        raise ValueError(
            f"dataset.seq_len: {data.seq_len} positions cannot be shared by dist.tensor_parallel "
            f"{dist.tensor_parallel} x context_parallel {dist.context_parallel}; choose a multiple of {split}"
        )
    if dist.pipeline_parallel > 1 and dist.sharding_stage not in ("zero0", "zero1"):
        raise ValueError(
            f"dist.sharding_stage: {dist.sharding_stage} would gather the weights for every microbatch of "
            f"pipeline_parallel {dist.pipeline_parallel}. Use zero0 or zero1."
        )
    if model.n_layers < stages:
        raise ValueError(
            f"dist.pipeline_parallel: {stages} stages for model.n_layers {model.n_layers} blocks; use fewer"
        )
    if dist.shard_size is not None and dist.sharding_stage not in HYBRID:
        raise ValueError(
            f"dist.shard_size: got dist.sharding_stage={dist.sharding_stage}, expected "
            f"{' or '.join(HYBRID)}. Remove the key."
        )
    if dist.context_method == "ring" and dist.dtype == "float32" and not dist.cpu_only:
        raise ValueError(
            "dist.context_method: got ring with dist.dtype=float32, expected bfloat16 or float16 on a GPU. "
            "Use ulysses."
        )
    _check_precision(dist)


def _check_axes(dist: DistConfig) -> None:
    """Raise ValueError for an option of an axis of size 1."""
    default = DistConfig()
    for key, is_used in (
        ("pipeline_schedule", dist.pipeline_parallel > 1),
        ("pipeline_chunks", dist.pipeline_parallel > 1 and dist.pipeline_schedule == "interleaved"),
        ("context_method", dist.context_parallel > 1),
    ):
        if getattr(dist, key) != getattr(default, key) and not is_used:
            axis = key.partition("_")[0]
            requirement = f"dist.{axis}_parallel of 2 or more"
            requirement += " and dist.pipeline_schedule=interleaved" if key == "pipeline_chunks" else ""
            raise ValueError(
                f"dist.{key}: {getattr(dist, key)} has no effect without {requirement}. Remove the key."
            )


def _check_shape(config: RunConfig) -> None:
    """Check that a model split by an axis has the Llama family's shape and reads samples left to right."""
    axes = ("tensor_parallel", "pipeline_parallel", "context_parallel")
    cut = next((axis for axis in axes if getattr(config.dist, axis) > 1), None)
    if cut is None:
        return
    supported: dict[str, dict[str, Any]] = {
        "model": {
            "norm": "rmsnorm", "feed_forward": "swiglu", "positions": "rotary", "biases": False,
            "tied_embedding": True, "qk_norm": False, "document_mask": False, "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "parametrization": "standard", "norm_placement": "input", "attention_window": None,
            "predicts_next": False, "head_bias": False,
        },
        "objective": {"orders": 1, "randmask_ratio": 0.0},
    }  # fmt: skip
    for section, values in supported.items():
        for key, value in values.items():
            configured = getattr(getattr(config, section), key)
            if configured != value:
                raise ValueError(
                    f"dist.{cut}: got {section}.{key}={configured!r}, expected {value!r}. "
                    "Use dist.sharding_stage, which supports every shape."
                )


def _check_precision(dist: DistConfig) -> None:
    if dist.cpu_offload and dist.sharding_stage == "zero0":
        raise ValueError("dist.cpu_offload: got dist.sharding_stage=zero0, expected zero1, zero2 or zero3")
    if dist.cpu_offload and dist.pipeline_parallel > 1:
        raise ValueError(
            "dist.cpu_offload: a pipeline keeps its weights on the device. Remove one of the two settings."
        )
    if dist.float8 and dist.dtype != "bfloat16":
        raise ValueError(f"dist.float8: got dist.dtype={dist.dtype}, expected bfloat16")
