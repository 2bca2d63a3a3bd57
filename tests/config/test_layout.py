"""Axes of ranks by arithmetic, and what is refused, in one sentence."""

from dataclasses import replace

import pytest

from megatron.config.layout import check_layout, layout_of
from megatron.config.schema import DatasetConfig, DistConfig, ModelConfig, RunConfig

RUN = RunConfig(
    model=ModelConfig(d_model=48, d_ff=96, d_head=8, n_heads=6, n_layers=4, n_tokens=60, vocab_rows=64),
    dataset=DatasetConfig(seq_len=24),
)


def test_neighbours_differ_in_the_tensor_axis_first() -> None:
    layout = layout_of(DistConfig(pipeline_parallel=2, context_parallel=2, tensor_parallel=2), 16)
    assert layout.sizes == (2, 2, 2, 2)
    for rank in range(16):
        at = layout.coordinate(rank)
        # the four bits of the rank, slowest first
        assert [at.pipeline, at.data, at.context, at.tensor] == [int(bit) for bit in f"{rank:04b}"]


@pytest.mark.parametrize(
    ("settings", "n_ranks", "on_node", "shard"),
    [
        ({}, 8, 4, 1),  # zero0: everybody has all
        ({"sharding_stage": "zero3"}, 8, 4, 8),
        ({"sharding_stage": "zero3", "tensor_parallel": 2}, 8, 4, 4),
        ({"sharding_stage": "zero3", "context_parallel": 2}, 8, 4, 8),  # its ranks hold the same weights
        ({"sharding_stage": "zero3_hybrid"}, 8, 4, 4),  # a node
        ({"sharding_stage": "zero3_hybrid", "tensor_parallel": 2}, 8, 4, 2),
        ({"sharding_stage": "zero2_hybrid", "shard_size": 2}, 8, 4, 2),
    ],
)
def test_shards_lie_where_the_stage_says(settings, n_ranks, on_node, shard) -> None:
    assert layout_of(DistConfig(**settings), n_ranks, on_node).shard == shard


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="6 ranks cannot be cut by .* = 4; start a multiple of 4 ranks"):
        layout_of(DistConfig(pipeline_parallel=2, tensor_parallel=2), 6)
    with pytest.raises(ValueError, match="dist.shard_size: 3 ranks .* do not divide the 8"):
        layout_of(DistConfig(sharding_stage="zero3_hybrid", shard_size=3), 8)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tensor_parallel": 4}, "model.n_heads: 6 heads cannot be shared by dist.tensor_parallel 4"),
        ({"context_parallel": 4}, "model.n_heads: 6 heads cannot be shared .* context_parallel 4"),
        ({"tensor_parallel": 2, "context_parallel": 3}, None),
        ({"context_parallel": 4, "context_method": "ring", "dtype": "bfloat16"}, None),
        ({"context_parallel": 2, "context_method": "ring", "dtype": "float32"}, "ring wants dist.dtype"),
        ({"context_parallel": 5, "context_method": "ring"}, "dataset.seq_len: 24 positions cannot be shared"),
        ({"tensor_parallel": 3}, "dist.tensor_parallel: 3 does not divide model.vocab_rows 64"),
        ({"pipeline_parallel": 2, "sharding_stage": "zero3"}, "zero3 would gather .* use zero0 or zero1"),
        ({"pipeline_parallel": 2, "sharding_stage": "zero1"}, None),
        ({"pipeline_parallel": 5}, "5 stages for model.n_layers 4 blocks"),
        ({"pipeline_parallel": 4, "pipeline_schedule": "interleaved"}, "8 stages for model.n_layers 4"),
        (
            {"pipeline_schedule": "interleaved"},
            "interleaved has no effect here, it wants dist.pipeline_parallel",
        ),
        (
            {"pipeline_parallel": 2, "pipeline_chunks": 3},
            "pipeline_chunks: 3 .*pipeline_schedule=interleaved",
        ),
        (
            {"context_method": "ring", "dtype": "bfloat16"},
            "ring has no effect here, it wants dist.context_par",
        ),
        ({"shard_size": 2}, "dist.shard_size: is for zero2_hybrid and zero3_hybrid"),
        ({"cpu_offload": True}, "dist.cpu_offload: zero0 keeps every weight"),
        (
            {"cpu_offload": True, "sharding_stage": "zero1", "pipeline_parallel": 2},
            "leave out one of the two",
        ),
        ({"float8": True, "dtype": "float16"}, "dist.float8: wants dist.dtype=bfloat16"),
    ],
)
def test_a_contradiction_is_one_sentence_that_names_the_keys(settings, sentence) -> None:
    run = replace(RUN, dist=DistConfig(**settings))
    if sentence is None:
        check_layout(run)
        return
    with pytest.raises(ValueError, match=sentence) as raised:
        check_layout(run)
    assert "\n" not in str(raised.value)
