"""Parallel axes of a run: their sizes and rank coordinates."""

from dataclasses import dataclass

from megatron.config.schema import DistConfig

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

    rank = ((pipeline * n_data + data) * n_context + context) * n_tensor
    + tensor

    Neighbouring ranks differ in `tensor` first: this axis communicates
    most, so it stays within a node.

    shard   number of neighbouring ranks of data x context
            that together hold one copy of the model
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
        # Example: pipeline 2, data 2, context 1, tensor 2.
        # Rank 5 = ((1 * 2 + 0) * 1 + 0) * 2 + 1
        # is pipeline 1, data 0, context 0, tensor 1.
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
    # ranks with the same pipeline and tensor coordinate have the same
    # weights: data x context
    n_holders = n_ranks // (config.pipeline_parallel * config.tensor_parallel)
    shard = 1 if config.sharding_stage == "zero0" else n_holders
    if config.sharding_stage in HYBRID:
        # tensor ranks are neighbours, so a node has
        # ranks_of_node / tensor of these ranks. 16 ranks on 2
        # nodes with tensor 2: 8 ranks have the same weights,
        # 4 of them on each node, so the shard size is 4
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
