"""Sizes of parallel axes compared with arithmetic."""

import pytest

from megatron.config.parallelism import build_layout
from megatron.config.schema import DistConfig


def test_neighbours_differ_in_the_tensor_axis_first() -> None:
    layout = build_layout(DistConfig(pipeline_parallel=2, context_parallel=2, tensor_parallel=2), 16)
    assert layout.sizes == (2, 2, 2, 2)
    for rank in range(16):
        at = layout.locate_rank(rank)
        # the four bits of the rank, slowest first
        assert [at.pipeline, at.data, at.context, at.tensor] == [int(bit) for bit in f"{rank:04b}"]


def test_the_shard_size_follows_the_sharding_stage() -> None:
    for settings, shard in (  # on 8 ranks, 4 of a node
        ({}, 1),  # zero0: every rank has everything
        ({"sharding_stage": "zero3"}, 8),
        ({"sharding_stage": "zero3", "tensor_parallel": 2}, 4),
        ({"sharding_stage": "zero3", "context_parallel": 2}, 8),  # context ranks have the same weights
        ({"sharding_stage": "zero3_hybrid"}, 4),  # a node
        ({"sharding_stage": "zero3_hybrid", "tensor_parallel": 2}, 2),
        ({"sharding_stage": "zero2_hybrid", "shard_size": 2}, 2),
    ):
        assert build_layout(DistConfig(**settings), 8, 4).shard == shard


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="6 ranks cannot be cut by .* = 4; start a multiple of 4 ranks"):
        build_layout(DistConfig(pipeline_parallel=2, tensor_parallel=2), 6)
    with pytest.raises(ValueError, match="dist.shard_size: got 3 ranks .* expected a divisor of 8"):
        build_layout(DistConfig(sharding_stage="zero3_hybrid", shard_size=3), 8)
