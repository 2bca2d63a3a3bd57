"""SwiGLU against its formula, with and without gradients."""

import torch

from megatron.kernels.swiglu import swiglu


def test_both_modes_match_the_formula_and_gradients_keep_the_inputs() -> None:
    gate, up = torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = gate / (1 + (-gate).exp()) * up
    before = gate.clone()
    torch.testing.assert_close(swiglu(gate, up), expected)
    assert torch.equal(gate, before)
    with torch.no_grad():
        torch.testing.assert_close(swiglu(gate, up), expected)
