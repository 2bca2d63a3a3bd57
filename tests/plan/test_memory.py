"""Estimated memory: of every named size on an 80 GB device, and of loss and dropout against torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config.presets import load_model_sizes
from megatron.config.schema import RunConfig
from megatron.kernels.dropout import attend_with_dropout
from megatron.model.initialization import init_weights
from megatron.model.precision import choose_precision
from megatron.model.transformer import Gpt
from megatron.objective.task import compute_task_loss
from megatron.plan import memory
from megatron.plan.count import n_params
from megatron.plan.resolve import resolve_config
from megatron.train.build import build_objective
from megatron.train.microbatch import MEMORY_SHARE, choose_rows

DEVICE = 80e9
S, ROWS = 128, 3  # 384 tokens: no weight has 384 rows, so shapes identify activations
POWERS = [256 >> i for i in range(9)]  # divisors of the default batch of 256 samples


def build_config(
    model: dict[str, Any], data: dict[str, Any], objective: str = "autoregressive", **dist: Any
) -> RunConfig:
    raw = {"model": {"n_tokens": 50257} | model, "dataset": data, "objective": {"name": objective}}
    return resolve_config(raw | {"dist": dist, "lr_scheduler": {"total_iterations": 1}})


def make_config(size: str, objective: str = "autoregressive", **dist: Any) -> RunConfig:
    return build_config({"size": size}, {}, objective, **dist)


def make_dropout_config(seq_len: int = 64, dtype: str = "float32") -> RunConfig:
    model = {"d_model": 32, "n_heads": 4, "n_layers": 3, "n_tokens": 50, "attention_dropout": 0.1}
    return build_config(model, {"seq_len": seq_len, "batch_size": 2}, dtype=dtype)


def make_small_config(n_layers: int, dtype: str, **dist: Any) -> RunConfig:
    model = {"d_model": 64, "n_heads": 2, "n_layers": n_layers, "n_tokens": 500}
    return build_config(model, {"seq_len": S, "batch_size": ROWS}, dtype=dtype, **dist)


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
            assert memory.estimate_memory(config, 1, rows) <= MEMORY_SHARE * DEVICE < DEVICE
            # no larger one fits
            assert rows == 256 or memory.estimate_memory(config, 1, 2 * rows) > MEMORY_SHARE * DEVICE
    # 18 bytes of states a parameter: 3.5 billion parameters fill 63 GB of the 68 GB allowed
    assert [size for size in load_model_sizes() if int(size[:-1]) > 3500] == unfitting


def test_compilation_and_parallel_ranks_lower_the_estimate() -> None:
    assert choose_rows(make_config("7M"), 1, POWERS, DEVICE) == (256, None)
    config = make_config("1143M")
    assert memory.estimate_memory(config, 1, 8, True) < memory.estimate_memory(config, 1, 8, False)
    cut = replace(config, dist=replace(config.dist, tensor_parallel=2, context_parallel=2))
    assert memory.estimate_memory(cut, 4, 8) < 0.55 * memory.estimate_memory(config, 1, 8)
    largest = make_config("16183M", sharding_stage="zero3", activation_checkpointing="full")
    assert [choose_rows(largest, n, [4, 2, 1], DEVICE)[1] is None for n in (1, 64)] == [False, True]


@contextmanager
def record_saved(is_counted: Callable[[torch.Tensor], bool]) -> Iterator[dict[int, int]]:
    """Yield a dictionary {address: bytes} of the storages that are saved inside the context."""
    sizes: dict[int, int] = {}
    tensors = []  # references, so that no storage address is reused

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if is_counted(tensor):
            tensors.append(tensor)
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_dropout_saves_the_estimated_bytes(dtype: str) -> None:
    config = make_dropout_config(dtype=dtype)
    n = config.dataset.seq_len
    q, k, v = (torch.randn(1, 4, n, 8).to(getattr(torch, dtype)).requires_grad_() for _ in range(3))
    # weights of a head, not the causal mask
    with record_saved(lambda tensor: tensor.shape[-2:] == (n, n) and tensor.numel() == 4 * n * n) as sizes:
        attend_with_dropout(q, k, v, 0.3, True, None, torch.tensor([1]), 0.1)
    assert memory.dropout_bytes(config, 1) == 3 * sum(sizes.values())  # three blocks


def test_dropout_of_long_samples_has_one_block_of_queries_in_memory() -> None:
    # 2 samples of 4 heads of 16,384^2 weights, in float32 with 9 bytes each
    assert memory.dropout_bytes(make_dropout_config(seq_len=16384), 2) == 9 * memory.ATTENTION_PER_BLOCK


def test_the_loss_counts_one_chunk_of_logits() -> None:
    sizes = []
    for seq_len in (1024, 2048, 1 << 19):
        config = make_dropout_config(seq_len=seq_len, dtype="bfloat16")
        config = replace(config, model=replace(config.model, attention_dropout=0.0))
        n_rows = config.model.vocab_rows
        head = 4 * n_rows * 32  # its gradient in float32
        # in the dtype of the products, and three copies in float32
        chunk = min(2 * seq_len * n_rows, memory.LOGITS_PER_CHUNK) * (2 + 12)
        sizes.append(memory.activation_bytes(config) - head - chunk)
    # the rest is proportional to the tokens
    assert sizes[1] == pytest.approx(2 * sizes[0]) and sizes[2] == pytest.approx(512 * sizes[0])


def measure_saved_bytes(config: RunConfig, compiled: bool = False) -> int:
    """Return the bytes of all tensors that autograd saves for the backward pass, without weights."""
    model = Gpt(config.model)
    init_weights(model, 0)
    model.set_precision(choose_precision(config.dist))
    if compiled:
        for block in model.blocks:
            block.forward = torch.compile(block.forward, backend="aot_eager_decomp_partition")
    shapes = {tuple(p.shape) for p in model.parameters()} | {tuple(p.shape)[::-1] for p in model.parameters()}
    objective = build_objective(config)
    tokens = np.random.default_rng(0).integers(0, 500, (ROWS, S + 1))
    task = objective.corrupt(tokens, np.arange(ROWS))
    with (
        record_saved(lambda tensor: tuple(tensor.shape) not in shapes) as sizes,
        torch.autocast("cpu", torch.bfloat16, enabled=config.dist.dtype == "bfloat16"),
    ):
        compute_task_loss(model.hidden_states(task.inputs, objective.causal), model.head_weight, task)
    return sum(sizes.values())


@pytest.mark.parametrize(
    ("dtype", "residual", "compiled"),
    [
        ("float32", None, False),
        ("bfloat16", "float32", False),
        pytest.param("bfloat16", "float32", True, marks=pytest.mark.slow),
        pytest.param("bfloat16", None, True, marks=pytest.mark.slow),
    ],
)
def test_a_block_saves_the_estimated_bytes_for_its_backward_pass(dtype, residual, compiled) -> None:
    few, many = (make_small_config(n, dtype, residual_dtype=residual) for n in (2, 5))
    measured = measure_saved_bytes(many, compiled) - measure_saved_bytes(few, compiled)
    measured_per_token = measured / 3 / (ROWS * S)
    assert memory.block_bytes(few.model, few.dist, compiled) == pytest.approx(measured_per_token, rel=0.08)


def test_weights_gradients_and_moments_take_16_bytes_a_parameter_before_sharding() -> None:
    plain = make_small_config(2, "float32")
    n, rest = n_params(plain.model), memory.activation_bytes(plain) + 0.6e9
    assert memory.estimate_memory(plain) - rest == pytest.approx(16 * n)
    sizes = []
    for stage in ("zero0", "zero1", "zero2", "zero3"):
        shared = make_small_config(2, "float32", sharding_stage=stage)
        sizes.append(memory.estimate_memory(shared, 4) - memory.activation_bytes(shared, 4) - 0.6e9)
    assert sizes == pytest.approx([16 * n, 10 * n, 7 * n, 4 * n])


def test_muon_has_one_moment_of_the_matrices_of_blocks() -> None:
    plain = make_small_config(2, "float32")
    muon = replace(plain, optim=replace(plain.optim, kind="muon"))
    matrices = [p.numel() for n, p in Gpt(plain.model).named_parameters() if "blocks" in n and p.ndim == 2]
    saved = memory.estimate_memory(plain) - memory.estimate_memory(muon)
    assert saved == pytest.approx(4 * sum(matrices), rel=0.02)


def test_smaller_microbatches_and_recomputed_blocks_need_less() -> None:
    plain = make_small_config(8, "float32")
    small = replace(plain, dataset=replace(plain.dataset, microbatch_size=1))
    again = make_small_config(8, "float32", activation_checkpointing="full")
    head = 4 * plain.model.vocab_rows * plain.model.d_model  # its gradient in float32, for any microbatch
    assert memory.activation_bytes(small) - head == pytest.approx((memory.activation_bytes(plain) - head) / 3)
    # the chunk of logits is the same
    assert memory.activation_bytes(again) < memory.activation_bytes(plain) / 2
