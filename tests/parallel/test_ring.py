"""One hop of ring attention equals plain attention, forward and backward."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from megatron.parallel.ring import _attend_block, _block_backward

GPU = pytest.param(
    "cuda",
    torch.bfloat16,
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")],
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), GPU])
def test_a_block_and_its_backward_match_torch(device: str, dtype: torch.dtype, causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, 32, 16, generator=generator).to(device, dtype) for _ in range(4))
    out, lse, rest = _attend_block(q, k, v, causal)
    result = _block_backward(grad, q, k, v, out, lse, causal, rest)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(out, expected.detach(), **near)
    for ours, theirs in zip(result, torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(ours, theirs, **near)
    scores = (q.float() @ k.float().transpose(2, 3)) / 4  # heads of 16
    if causal:
        scores = scores.masked_fill(torch.ones(32, 32, device=device).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), **near)
