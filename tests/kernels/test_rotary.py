"""Rotation by positions against its formula."""

import pytest
import torch
from torch import Tensor

from megatron.config.schema import ModelConfig
from megatron.kernels.rotary import apply_rotary, rotary_table


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotary_embedding_matches_the_formula(dtype: torch.dtype) -> None:
    cos, sin = rotary_table(7, ModelConfig(d_head=8), torch.device("cpu"))
    x = torch.randn(2, 3, 7, 8).to(dtype).requires_grad_()
    grad = torch.randn(2, 3, 7, 8).to(dtype)

    def rotate_by_formula(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    near = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {}  # else the defaults
    result, expected = apply_rotary(x, cos, sin), rotate_by_formula(x).to(dtype)
    torch.testing.assert_close(result, expected, **near)
    (ours,) = torch.autograd.grad(result, x, grad)
    (theirs,) = torch.autograd.grad(rotate_by_formula(x.double()), x, grad.double())
    torch.testing.assert_close(ours, theirs.to(dtype), **near)
