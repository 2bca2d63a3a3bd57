"""CPU attention against torch's kernel and float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megatron import _csrc
from megatron.kernels import cpu_attention as module
from megatron.kernels.attention import scaled_dot_product_attention
from megatron.kernels.cpu_attention import cpu_attention, is_cpu_attention_faster
from megatron.parallel.activation_checkpointing import SAVED_OPERATORS

SHAPES = [(2, 3, 1, 8), (3, 2, 128, 16), (2, 2, 129, 32), (1, 4, 333, 64), (5, 2, 512, 32)]


def attend_with_torch(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def compute_value_and_gradients(
    attention, shape: tuple[int, ...], dtype: torch.dtype, causal: bool
) -> list[Tensor]:
    """Return output and gradients for heads that are views of [B, S, H, K], as in the model."""
    batch, heads, length, width = shape
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(batch, length, heads, width, generator=generator) for _ in range(4)]
    *leaves, grad = (tensor.to(dtype) for tensor in draws)
    leaves = [tensor.requires_grad_() for tensor in leaves]
    mixed = attention(*(tensor.transpose(1, 2) for tensor in leaves), causal, 0.3)
    mixed.transpose(1, 2).backward(grad)
    return [mixed.detach(), *(tensor.grad for tensor in leaves)]


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_matches_float64_to_rounding(shape: tuple[int, ...], causal: bool) -> None:
    exact = compute_value_and_gradients(attend_with_torch, shape, torch.float64, causal)
    ours = compute_value_and_gradients(cpu_attention, shape, torch.float32, causal)
    for result, expected in zip(ours, exact, strict=True):
        assert (result.double() - expected).norm() <= 1e-6 * expected.norm() + 1e-6


@pytest.mark.parametrize("causal", [True, False])
def test_bfloat16_is_as_accurate_as_torchs_kernel(causal: bool) -> None:
    shape = (2, 4, 500, 64)
    exact = compute_value_and_gradients(attend_with_torch, shape, torch.float64, causal)
    ours = compute_value_and_gradients(cpu_attention, shape, torch.bfloat16, causal)
    kernel = compute_value_and_gradients(attend_with_torch, shape, torch.bfloat16, causal)
    for result, other, expected in zip(ours, kernel, exact, strict=True):
        assert relative_error(result, expected) < 1.15 * relative_error(other, expected) < 0.02


def test_a_batch_in_parts_equals_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, which uses BLAS products over parts of the batch."""
    case = (cpu_attention, (5, 2, 150, 16), torch.bfloat16, True)
    whole = compute_value_and_gradients(*case)
    monkeypatch.setattr(module, "MAX_SCORES", 2 * 2 * 128 * 150)  # parts of two samples, then one
    torch.testing.assert_close(compute_value_and_gradients(*case), whole)


@pytest.mark.parametrize("causal", [True, False])
def test_threads_and_autocast_do_not_change_the_bits(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 samples of 4 heads of 200 positions: enough work for three threads."""
    case = (cpu_attention, (8, 4, 200, 24), torch.float32, causal)
    alone = compute_value_and_gradients(*case)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with torch.autocast("cpu", torch.bfloat16):
        shared = compute_value_and_gradients(*case)
    assert all(torch.equal(result, other) for result, other in zip(shared, alone, strict=True))


def test_a_nan_in_a_query_affects_its_row_only() -> None:
    q, k, v = (torch.randn(1, 1, 20, 8) for _ in range(3))
    q[0, 0, 5, 3] = torch.nan
    assert cpu_attention(q, k, v, True, 0.3).isnan().any(-1).flatten().nonzero().tolist() == [[5]]


def test_the_kernel_refuses_arrays_of_other_shapes() -> None:
    q = np.zeros((1, 2, 6, 8), np.float32)
    for wrong, error, sentence in (
        (q[:, :, :5].copy(), ValueError, "different shapes"),
        (q.transpose(0, 1, 3, 2), ValueError, "rows of K contiguous"),
        (q.astype(np.float64), TypeError, "incompatible function arguments"),
    ):
        with pytest.raises(error, match=sentence):
            _csrc.short_attention(q, q, wrong, True, 1.0, np.empty_like(q), 1)


def test_the_operator_is_well_formed() -> None:
    q, k, v = (torch.randn(2, 2, 20, 8, requires_grad=True) for _ in range(3))
    checks = ("test_schema", "test_autograd_registration")
    torch.library.opcheck(torch.ops.megatron.cpu_attention.default, (q, k, v, True, 0.3), test_utils=checks)


def test_double_backward_is_refused() -> None:
    q = torch.randn(1, 2, 9, 8, requires_grad=True)
    (slope,) = torch.autograd.grad(cpu_attention(q, q, q, True, 0.3).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="has no gradient"):
        slope.square().sum().backward()


def test_training_on_short_windows_uses_it_and_nothing_else_does() -> None:
    q, long = torch.randn(1, 1, 512, 8), torch.randn(1, 1, 513, 8)
    assert is_cpu_attention_faster(q, q)
    assert not is_cpu_attention_faster(long, long)
    assert not is_cpu_attention_faster(q, long)
    assert not is_cpu_attention_faster(q.double(), q.double())
    with torch.no_grad():
        assert not is_cpu_attention_faster(q, q)
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_cpu_attention_faster(q, q)
        assert is_cpu_attention_faster(q.bfloat16(), q.bfloat16())
    mixed = scaled_dot_product_attention(q.requires_grad_(), q, q, True, scale=0.3)
    assert "cpu_attention" in type(mixed.grad_fn).__name__


def test_selective_recomputation_saves_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("_compute_attention", "_compute_gradients"):
        work = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, work=work: calls.append(1) or work(*given))

    def count_calls(**options) -> int:
        calls.clear()
        q = torch.randn(1, 1, 100, 8, requires_grad=True)
        attend = lambda x: scaled_dot_product_attention(x * 2, x * 3, x, True, scale=0.3)  # noqa: E731
        checkpoint(attend, q, use_reentrant=False, **options).sum().backward()
        return len(calls)

    assert count_calls() == 3  # forward, recomputed forward, backward
    assert count_calls(context_fn=lambda: create_selective_checkpoint_contexts(SAVED_OPERATORS)) == 2
