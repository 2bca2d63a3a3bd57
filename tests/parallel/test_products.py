"""Float32 products are fast where MKL is not, and stay those of float32."""

import pytest
import torch

from megatron.config.schema import DistConfig
from megatron.parallel import products
from megatron.parallel.products import fastest_products, products_are_float32
from megatron.parallel.world import open_world


def _largest_error(product: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """Of elements, against the sum of their terms' sizes, which is what float32 rounds by."""
    a, b = a.double(), b.double()
    return float(((product.double() - a @ b).abs() / (a.abs() @ b.abs())).max())


@pytest.mark.parametrize(("n", "d", "f"), [(17, 64, 33), (512, 256, 640), (128, 256, 4096)])
def test_forward_and_both_gradients_of_a_layer_round_as_float32_does(n: int, d: int, f: int) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(n, d, generator=draw).requires_grad_()
    weight = torch.randn(f, d, generator=draw).requires_grad_()
    grad = torch.randn(n, f, generator=draw)
    with fastest_products():
        out = torch.nn.functional.linear(x, weight)
        out.backward(grad)
    with torch.no_grad():
        # a bfloat16 product is off by up to 2^-8 of its terms, a float32 sum of n by far less than n 2^-24
        assert x.grad is not None and weight.grad is not None
        assert _largest_error(out, x, weight.t()) < 1e-6
        assert _largest_error(x.grad, grad, weight) < 1e-6
        assert _largest_error(weight.grad, grad.t(), x) < 1e-6


def test_products_of_rounded_numbers_are_seen() -> None:
    assert products_are_float32()
    with torch.autocast("cpu", torch.bfloat16):
        assert not products_are_float32()


def test_a_library_that_rounds_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_mkl_holds_back", lambda: True)
    with fastest_products():
        assert torch.get_float32_matmul_precision() == "medium"
    monkeypatch.setattr(products, "products_are_float32", lambda: False)
    with fastest_products():
        assert torch.get_float32_matmul_precision() == "highest"


def test_a_run_leaves_the_choice_as_it_found_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_mkl_holds_back", lambda: True)
    with pytest.raises(ValueError, match="stop"), open_world(DistConfig(cpu_only=True)):
        assert torch.get_float32_matmul_precision() == "medium"
        raise ValueError("stop")
    assert torch.get_float32_matmul_precision() == "highest"
