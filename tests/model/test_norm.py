"""Norms compute in float32 for every dtype of weights and inputs."""

import warnings

import pytest
import torch
from torch import nn

from megatron.model.transformer import LayerNorm, RmsNorm


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_weights_that_fsdp_gathers_in_bfloat16_give_the_float32_norm(kind: torch.dtype, bias: bool) -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(kind)
    norm: nn.Module
    for norm in (RmsNorm(8, 1e-5), LayerNorm(8, 1e-5, bias)):
        for parameter in norm.parameters():
            nn.init.normal_(parameter, 1.0, generator=torch.Generator().manual_seed(1))
        norm.to(torch.bfloat16)
        wide = x.float()
        if isinstance(norm, LayerNorm):
            wide = wide - wide.mean(-1, keepdim=True)
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.float()
        if isinstance(norm, LayerNorm) and norm.bias is not None:
            expected = expected + norm.bias.float()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns if it cannot use its fused kernel
            result = norm(x)
        assert result.dtype == kind
        torch.testing.assert_close(
            result, expected.to(kind), rtol=1e-5 if kind == torch.float32 else 0.01, atol=1e-5
        )
