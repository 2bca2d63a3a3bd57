"""Estimated memory: of every named size on an 80 GB device, and of loss and dropout against torch."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.config.presets import load_model_sizes
from megatron.config.schema import RunConfig
from megatron.kernels.dropout import attend_with_dropout
from megatron.plan.memory import (
    ATTENTION_PER_BLOCK,
    LOGITS_PER_CHUNK,
    MEMORY_SHARE,
    activation_bytes,
    choose_rows,
    dropout_bytes,
    estimate_memory,
)
from megatron.plan.resolve import resolve_config

DEVICE = 80e9
POWERS = [256 >> i for i in range(9)]  # divisors of the default batch of 256 samples


def make_config(size: str, objective: str = "autoregressive", **dist: Any):
    raw = {"model": {"size": size, "n_tokens": 50257}, "objective": {"name": objective}, "dist": dist}
    return resolve_config(raw | {"lr_scheduler": {"total_iterations": 1}})


@pytest.mark.parametrize("objective", ["autoregressive", "masked_diffusion"])
def test_no_default_of_a_named_size_exceeds_80_gb_by_the_estimate(objective: str) -> None:
    unfitting = []
    for size in load_model_sizes():
        config = make_config(size, objective)
        assert (config.dataset.batch_size, config.dataset.seq_len) == (256, 2048)
        rows, warning = choose_rows(config, 1, POWERS, DEVICE)
        if warning is not None:
            unfitting.append(size)
            assert rows == 1
            assert "Shard it over more ranks (dist.sharding_stage=zero3)" in warning
        else:
            assert estimate_memory(config, 1, rows) <= MEMORY_SHARE * DEVICE < DEVICE
            # no larger one fits
            assert rows == 256 or estimate_memory(config, 1, 2 * rows) > MEMORY_SHARE * DEVICE
    # 18 bytes of states a parameter: 3.5 billion parameters fill 63 GB of the 68 GB allowed
    assert [size for size in load_model_sizes() if int(size[:-1]) > 3500] == unfitting


def test_sharding_and_recomputation_make_the_largest_size_fit() -> None:
    largest = list(load_model_sizes())[-1]
    config = make_config(largest, sharding_stage="zero3", activation_checkpointing="full")
    assert choose_rows(config, 1, POWERS, DEVICE)[1] is not None
    rows, warning = choose_rows(config, 64, [4, 2, 1], DEVICE)
    assert (warning, rows >= 1) == (None, True)


def test_compilation_and_parallel_ranks_lower_the_estimate() -> None:
    assert choose_rows(make_config("7M"), 1, POWERS, DEVICE) == (256, None)
    config = make_config("1143M")
    assert estimate_memory(config, 1, 8, True) < estimate_memory(config, 1, 8, False)
    cut = replace(config, dist=replace(config.dist, tensor_parallel=2, context_parallel=2))
    assert estimate_memory(cut, 4, 8) < 0.55 * estimate_memory(config, 1, 8)


def make_dropout_config(seq_len: int = 64, objective: dict[str, Any] | None = None, **dist: Any) -> RunConfig:
    model = {"d_model": 32, "n_heads": 4, "n_layers": 3, "n_tokens": 50, "attention_dropout": 0.1}
    raw = {"model": model, "dataset": {"seq_len": seq_len, "batch_size": 2}, "objective": objective or {}}
    return resolve_config(
        {**raw, "dist": {"dtype": "float32", **dist}, "lr_scheduler": {"total_iterations": 1}}
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_dropout_saves_the_estimated_bytes(dtype: str) -> None:
    config = make_dropout_config(dtype=dtype)
    n, sizes, tensors = config.dataset.seq_len, {}, []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == (n, n) and tensor.numel() == 4 * n * n:  # of a head, not the causal mask
            tensors.append(tensor)  # a reference, so that no storage address is reused
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    q, k, v = (torch.randn(1, 4, n, 8).to(getattr(torch, dtype)).requires_grad_() for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attend_with_dropout(q, k, v, 0.3, True, None, torch.tensor([1]), 0.1)
    assert dropout_bytes(config, 1) == 3 * sum(sizes.values())  # three blocks


def test_dropout_of_long_samples_has_one_block_of_queries_in_memory() -> None:
    # 2 samples of 4 heads of 16,384^2 weights, in float32 with 9 bytes each
    assert dropout_bytes(make_dropout_config(seq_len=16384), 2) == 9 * ATTENTION_PER_BLOCK


def test_the_loss_counts_one_chunk_of_logits() -> None:
    sizes = []
    for seq_len in (1024, 2048, 1 << 19):
        config = make_dropout_config(seq_len=seq_len, dtype="bfloat16")
        config = replace(config, model=replace(config.model, attention_dropout=0.0))
        n_rows = config.model.vocab_rows
        head = 4 * n_rows * 32  # its gradient in float32
        # in the dtype of the products, and three copies in float32
        chunk = min(2 * seq_len * n_rows, LOGITS_PER_CHUNK) * (2 + 12)
        sizes.append(activation_bytes(config) - head - chunk)
    # the rest is proportional to the tokens
    assert sizes[1] == pytest.approx(2 * sizes[0]) and sizes[2] == pytest.approx(512 * sizes[0])
