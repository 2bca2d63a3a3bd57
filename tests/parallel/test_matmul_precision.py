"""Faster float32 products where MKL is slow keep the precision of float32."""

import pytest
import torch

from megatron.config.schema import DistConfig
from megatron.parallel import world
from megatron.parallel.world import is_matmul_float32, open_world, use_fastest_matmul


def _largest_error(product: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest error of an element, relative to the sum of the absolute values of its terms."""
    a, b = a.double(), b.double()
    return float(((product.double() - a @ b).abs() / (a.abs() @ b.abs())).max())


@pytest.mark.parametrize(("n", "d", "f"), [(17, 64, 33), (512, 256, 640), (128, 256, 4096)])
def test_a_layer_rounds_as_float32_does(n: int, d: int, f: int) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(n, d, generator=draw).requires_grad_()
    weight = torch.randn(f, d, generator=draw).requires_grad_()
    grad = torch.randn(n, f, generator=draw)
    with use_fastest_matmul():
        out = torch.nn.functional.linear(x, weight)
        out.backward(grad)
    with torch.no_grad():
        # a bfloat16 product is off by up to 2^-8 of its terms, a float32 sum of n by far less than n 2^-24
        assert x.grad is not None and weight.grad is not None
        assert _largest_error(out, x, weight.t()) < 1e-6
        assert _largest_error(x.grad, grad, weight) < 1e-6
        assert _largest_error(weight.grad, grad.t(), x) < 1e-6


def test_rounded_products_are_detected() -> None:
    assert is_matmul_float32()
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_matmul_float32()


def test_a_library_that_rounds_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "_is_mkl_slow", lambda: True)
    with use_fastest_matmul():
        assert torch.get_float32_matmul_precision() == "medium"
    monkeypatch.setattr(world, "is_matmul_float32", lambda: False)
    with use_fastest_matmul():
        assert torch.get_float32_matmul_precision() == "highest"


def test_a_run_restores_the_previous_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "_is_mkl_slow", lambda: True)
    with pytest.raises(ValueError, match="stop"), open_world(DistConfig(cpu_only=True)):
        assert torch.get_float32_matmul_precision() == "medium"
        raise ValueError("stop")
    assert torch.get_float32_matmul_precision() == "highest"
