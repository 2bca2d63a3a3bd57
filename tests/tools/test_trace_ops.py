"""Budgets of a training step on a GPU, from traces of its operations at real sizes.

The budgets are upper bounds: lower them after an improvement. tools/bench/trace_ops.py prints the counts.
"""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.config.schema import DistConfig
from megatron.kernels import softmax_nll
from megatron.plan.count import flop_terms
from megatron.plan.memory import block_bytes

ROWS, SEQ_LEN = 8, 2048
# the loss as one kernel, instead of separate passes over chunks of 2^26 logits
FUSED = hasattr(softmax_nll, "can_use_triton")
# (size, objective): launches, and elementwise kB per token outside of the blocks, of an eager step
STEP_BUDGET = (
    {("7M", "autoregressive"): (350, 340), ("7M", "masked_diffusion"): (353, 190)}
    if FUSED
    else {("7M", "autoregressive"): (565, 2250), ("7M", "masked_diffusion"): (480, 1350)}
)
# size: launches of a block, elementwise kB and saved kB per token and block
BLOCK_BUDGET = {"425M": (93, 545, 61), "44M": (93, 209, 24.5)}


@pytest.fixture(scope="module")
def bench(root: Path) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(root / "tools" / "bench" / "trace_ops.py")))


@pytest.mark.parametrize(("size", "objective"), STEP_BUDGET)
def test_a_step_of_a_small_model_stays_within_its_budget(
    bench: SimpleNamespace, size: str, objective: str
) -> None:
    model = bench.make_model(size)
    trace = bench.trace_step(model, objective, ROWS, SEQ_LEN)
    launches, kilobytes = STEP_BUDGET[size, objective]
    blocks = bench.per_block(size, objective, ROWS, SEQ_LEN, bench.N_TOKENS)["elementwise_bytes"]
    outside = trace.elementwise_bytes / trace.tokens - model.n_layers * blocks
    assert trace.launches <= launches and outside / 1e3 <= kilobytes
    # the host never waits
    assert trace.syncs == 0
    # 6 FLOPs per weight and token; the head at the predicted positions only
    terms = flop_terms(model, SEQ_LEN)
    predicted = 1.0 if objective == "autoregressive" else None
    products = terms["attention"] + terms["feed_forward"]
    if predicted is None:
        share = (trace.product_flops / trace.tokens - products) / terms["head"]
        assert 0.3 < share < 0.7
    else:
        assert trace.product_flops == pytest.approx((products + terms["head"]) * trace.tokens)


@pytest.mark.parametrize("size", BLOCK_BUDGET)
def test_a_block_stays_within_its_budget_and_the_estimate_of_memory(
    bench: SimpleNamespace, size: str
) -> None:
    block = bench.per_block(size, "autoregressive", ROWS, SEQ_LEN, 1000)
    launches, elementwise, saved = BLOCK_BUDGET[size]
    assert block["launches"] <= launches
    assert block["elementwise_bytes"] / 1e3 <= elementwise and block["saved_bytes"] / 1e3 <= saved
    estimate = block_bytes(bench.make_model(size), DistConfig())
    assert estimate == pytest.approx(block["saved_bytes"], rel=0.15)


def test_bytes_and_launches_of_known_operations(bench: SimpleNamespace) -> None:
    trace = bench.StepTrace(1)
    x, y = torch.ones(8, 4), torch.ones(4, 16)
    with bench.OperationCounter(trace):
        z = x @ y  # reads 128 + 256, writes 512
        z.add_(1.0)  # reads and writes 512
        z.t()  # a view
        torch.empty(1000)  # an allocation
        torch.zeros(10)  # writes 40
        torch.mm(x, y, out=z)  # `out` is not read
        x.expand(3, 8, 4).clone()  # reads 128, writes 384
        z.sum().item()  # waits
    assert trace.bytes_of["mm"] == 896 and trace.bytes_of["add_.Tensor"] == 1024
    assert (
        trace.bytes_of["mm.out"] == 896 and trace.bytes_of["zeros"] == 40 and trace.bytes_of["clone"] == 512
    )
    assert trace.product_flops == 2 * 2 * 8 * 4 * 16 and trace.syncs == 1
    assert not {"t", "empty.memory_format", "expand"} & set(trace.calls)
    assert trace.elementwise_bytes == trace.total_bytes - 2 * 896
