"""Sizes of parallel axes compared with arithmetic, and one sentence for each error."""

from dataclasses import replace

import pytest

from megatron.config.parallelism import build_layout, check_parallelism
from megatron.config.schema import DatasetConfig, DistConfig, ModelConfig, RunConfig

RUN = RunConfig(
    model=ModelConfig(d_model=48, d_ff=96, d_head=8, n_heads=6, n_layers=4, n_tokens=60, vocab_rows=64),
    dataset=DatasetConfig(seq_len=24),
)


def test_neighbours_differ_in_the_tensor_axis_first() -> None:
    layout = build_layout(DistConfig(pipeline_parallel=2, context_parallel=2, tensor_parallel=2), 16)
    assert layout.sizes == (2, 2, 2, 2)
    for rank in range(16):
        at = layout.locate_rank(rank)
        # the four bits of the rank, slowest first
        assert [at.pipeline, at.data, at.context, at.tensor] == [int(bit) for bit in f"{rank:04b}"]


@pytest.mark.parametrize(
    ("settings", "n_ranks", "on_node", "shard"),
    [
        ({}, 8, 4, 1),  # zero0: every rank has everything
        ({"sharding_stage": "zero3"}, 8, 4, 8),
        ({"sharding_stage": "zero3", "tensor_parallel": 2}, 8, 4, 4),
        ({"sharding_stage": "zero3", "context_parallel": 2}, 8, 4, 8),  # context ranks have the same weights
        ({"sharding_stage": "zero3_hybrid"}, 8, 4, 4),  # a node
        ({"sharding_stage": "zero3_hybrid", "tensor_parallel": 2}, 8, 4, 2),
        ({"sharding_stage": "zero2_hybrid", "shard_size": 2}, 8, 4, 2),
    ],
)
def test_the_shard_size_follows_the_sharding_stage(settings, n_ranks, on_node, shard) -> None:
    assert build_layout(DistConfig(**settings), n_ranks, on_node).shard == shard


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="6 ranks cannot be cut by .* = 4; start a multiple of 4 ranks"):
        build_layout(DistConfig(pipeline_parallel=2, tensor_parallel=2), 6)
    with pytest.raises(ValueError, match="dist.shard_size: got 3 ranks .* expected a divisor of 8"):
        build_layout(DistConfig(sharding_stage="zero3_hybrid", shard_size=3), 8)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tensor_parallel": 4}, "model.n_heads: 6 heads cannot be shared by dist.tensor_parallel 4"),
        ({"context_parallel": 4}, "model.n_heads: 6 heads cannot be shared .* context_parallel 4"),
        ({"tensor_parallel": 2, "context_parallel": 3}, None),
        ({"context_parallel": 4, "context_method": "ring", "dtype": "bfloat16"}, None),
        (
            {"context_parallel": 2, "context_method": "ring", "dtype": "float32"},
            "got ring with dist.dtype=float32",
        ),
        ({"context_parallel": 5, "context_method": "ring"}, "dataset.seq_len: 24 positions cannot be shared"),
        ({"tensor_parallel": 3}, "dist.tensor_parallel: 3 does not divide model.vocab_rows 64"),
        ({"pipeline_parallel": 2, "sharding_stage": "zero3"}, "zero3 would gather .* Use zero0 or zero1"),
        ({"pipeline_parallel": 2, "sharding_stage": "zero1"}, None),
        ({"pipeline_parallel": 5}, "5 stages for model.n_layers 4 blocks"),
        ({"pipeline_parallel": 4, "pipeline_schedule": "interleaved"}, "8 stages for model.n_layers 4"),
        (
            {"pipeline_schedule": "interleaved"},
            "interleaved has no effect without dist.pipeline_parallel",
        ),
        (
            {"pipeline_parallel": 2, "pipeline_chunks": 3},
            "pipeline_chunks: 3 .*pipeline_schedule=interleaved",
        ),
        (
            {"context_method": "ring", "dtype": "bfloat16"},
            "ring has no effect without dist.context_par",
        ),
        (
            {"shard_size": 2},
            "dist.shard_size: got dist.sharding_stage=zero0, expected zero2_hybrid or zero3_hybrid",
        ),
        ({"cpu_offload": True}, "dist.cpu_offload: got dist.sharding_stage=zero0"),
        (
            {"cpu_offload": True, "sharding_stage": "zero1", "pipeline_parallel": 2},
            "Remove one of the two",
        ),
        ({"float8": True, "dtype": "float16"}, "dist.float8: got dist.dtype=float16, expected bfloat16"),
    ],
)
def test_a_contradiction_is_one_sentence_that_names_the_keys(settings, sentence) -> None:
    run = replace(RUN, dist=DistConfig(**settings))
    if sentence is None:
        check_parallelism(run)
        return
    with pytest.raises(ValueError, match=sentence) as raised:
        check_parallelism(run)
    assert "\n" not in str(raised.value)
