"""Attention with gradients on a CPU, beside torch's kernel and in float64; and the positions of its heads."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megatron import _csrc
from megatron.model import cpu_attention as module
from megatron.model.attention import Mixing
from megatron.model.cpu_attention import cpu_attention, is_worth_it
from megatron.model.rotary import rotary_table, rotate
from megatron.parallel.recompute import KEPT

SHAPES = [(2, 3, 1, 8), (3, 2, 128, 16), (2, 2, 129, 32), (1, 4, 333, 64), (5, 2, 512, 32)]


def theirs(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def value_and_gradients(mix, shape: tuple[int, ...], dtype: torch.dtype, causal: bool) -> list[Tensor]:
    """Of heads that are views of [B, S, H, K], as the model makes them."""
    batch, heads, length, width = shape
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(batch, length, heads, width, generator=generator) for _ in range(4)]
    *leaves, grad = (each.to(dtype) for each in drawn)
    leaves = [each.requires_grad_() for each in leaves]
    mixed = mix(*(each.transpose(1, 2) for each in leaves), causal, 0.3)
    mixed.transpose(1, 2).backward(grad)
    return [mixed.detach(), *(each.grad for each in leaves)]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_is_as_near_to_float64_as_rounding_allows(shape: tuple[int, ...], causal: bool) -> None:
    exact = value_and_gradients(theirs, shape, torch.float64, causal)
    for ours, wanted in zip(
        value_and_gradients(cpu_attention, shape, torch.float32, causal), exact, strict=True
    ):
        assert (ours.double() - wanted).norm() <= 1e-6 * wanted.norm() + 1e-6


@pytest.mark.parametrize("causal", [True, False])
def test_bfloat16_is_as_near_as_torchs_kernel(causal: bool) -> None:
    shape = (2, 4, 500, 64)
    exact = value_and_gradients(theirs, shape, torch.float64, causal)
    ours = value_and_gradients(cpu_attention, shape, torch.bfloat16, causal)
    kernel = value_and_gradients(theirs, shape, torch.bfloat16, causal)
    for mine, other, wanted in zip(ours, kernel, exact, strict=True):
        assert error(mine, wanted) < 1.15 * error(other, wanted) < 0.02


def test_under_autocast_nothing_inside_is_cast() -> None:
    shape = (2, 2, 200, 32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = value_and_gradients(cpu_attention, shape, torch.float32, True)
    for mine, other in zip(
        inside, value_and_gradients(cpu_attention, shape, torch.float32, True), strict=True
    ):
        assert torch.equal(mine, other)


def test_samples_by_the_part_are_those_by_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, which is multiplied by the library for matrices."""
    shape = (5, 2, 150, 16)
    whole = value_and_gradients(cpu_attention, shape, torch.bfloat16, True)
    monkeypatch.setattr(module, "SCORES", 2 * 2 * 128 * 150)  # two samples: the last part is one
    for mine, other in zip(
        value_and_gradients(cpu_attention, shape, torch.bfloat16, True), whole, strict=True
    ):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("causal", [True, False])
def test_any_number_of_threads_gives_the_same_bits(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 samples of 4 heads of 200 positions: enough work for three threads."""
    shape = (8, 4, 200, 24)
    alone = value_and_gradients(cpu_attention, shape, torch.float32, causal)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    shared = value_and_gradients(cpu_attention, shape, torch.float32, causal)
    assert all(torch.equal(mine, other) for mine, other in zip(shared, alone, strict=True))


def test_a_nan_in_a_query_reaches_its_own_row_and_no_other() -> None:
    q, k, v = (torch.randn(1, 1, 20, 8) for _ in range(3))
    q[0, 0, 5, 3] = torch.nan
    assert cpu_attention(q, k, v, True, 0.3).isnan().any(-1).flatten().nonzero().tolist() == [[5]]


def test_the_kernel_refuses_arrays_of_other_shapes() -> None:
    q, short = np.zeros((1, 2, 6, 8), np.float32), np.zeros((1, 2, 5, 8), np.float32)
    with pytest.raises(ValueError, match="different shapes"):
        _csrc.short_attention(q, q, short, True, 1.0, np.empty_like(q), 1)
    with pytest.raises(ValueError, match="rows of K contiguous"):
        _csrc.short_attention(q, q, q.transpose(0, 1, 3, 2), True, 1.0, np.empty_like(q), 1)
    with pytest.raises(TypeError):
        _csrc.short_attention(q, q, q.astype(np.float64), True, 1.0, np.empty_like(q), 1)


def test_the_operator_is_well_formed() -> None:
    q, k, v = (torch.randn(2, 2, 20, 8, requires_grad=True) for _ in range(3))
    checks = ("test_schema", "test_autograd_registration")
    torch.library.opcheck(torch.ops.megatron.cpu_attention.default, (q, k, v, True, 0.3), test_utils=checks)


def test_a_gradient_of_the_gradient_is_refused() -> None:
    q = torch.randn(1, 2, 9, 8, requires_grad=True)
    (slope,) = torch.autograd.grad(cpu_attention(q, q, q, True, 0.3).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="has no gradient"):
        slope.square().sum().backward()


def test_training_takes_it_and_reading_and_long_windows_do_not() -> None:
    q, long = torch.randn(1, 1, 512, 8), torch.randn(1, 1, 513, 8)
    assert is_worth_it(q, q)
    assert not is_worth_it(long, long)
    assert not is_worth_it(q, long)
    assert not is_worth_it(q.double(), q.double())
    with torch.no_grad():
        assert not is_worth_it(q, q)
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_worth_it(q, q)
        assert is_worth_it(q.bfloat16(), q.bfloat16())
    mixed = Mixing(0.3)(q.requires_grad_(), q, q, True)
    assert "cpu_attention" in type(mixed.grad_fn).__name__


def test_selective_recomputation_keeps_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("_mix", "_unmix"):
        work = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, work=work: calls.append(1) or work(*given))

    def count(**options) -> int:
        calls.clear()
        q = torch.randn(1, 1, 100, 8, requires_grad=True)
        kept = checkpoint(lambda x: Mixing(0.3)(x * 2, x * 3, x, True), q, use_reentrant=False, **options)
        kept.sum().backward()
        return len(calls)

    assert count() == 3  # forward, forward again, backward
    assert count(context_fn=lambda: create_selective_checkpoint_contexts(KEPT)) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_heads_are_turned_as_the_formula_says(dtype: torch.dtype) -> None:
    cos, sin = rotary_table(7, 8, 1e4, torch.device("cpu"))
    x = torch.randn(2, 3, 7, 8).to(dtype).requires_grad_()
    grad = torch.randn(2, 3, 7, 8).to(dtype)

    def formula(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    near = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {}  # else torch's own
    found, wanted = rotate(x, cos, sin), formula(x).to(dtype)
    torch.testing.assert_close(found, wanted, **near)
    (ours,) = torch.autograd.grad(found, x, grad)
    (theirs,) = torch.autograd.grad(formula(x.double()), x, grad.double())
    torch.testing.assert_close(ours, theirs.to(dtype), **near)
