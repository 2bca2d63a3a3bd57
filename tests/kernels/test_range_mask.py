"""Masks of documents and windows as ranges and as dense masks; dropout in blocks of queries."""

import pytest
import torch

from megatron.config.schema import ModelConfig
from megatron.kernels import dropout
from megatron.kernels.attention import scaled_dot_product_attention
from megatron.kernels.range_mask import build_range_mask
from megatron.model import masks
from megatron.model.masks import build_attention_mask

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
CPU = torch.device("cpu")
CASES = [(True, True, None), (False, True, None), (True, False, 2), (True, True, 2)]


@pytest.mark.parametrize(("causal", "has_documents", "window"), CASES)
def test_ranges_are_the_dense_mask_and_its_rows(causal, has_documents, window, monkeypatch) -> None:
    shape = ModelConfig(
        d_model=32, d_ff=32, d_head=16, n_heads=2, n_layers=1, n_tokens=9, vocab_rows=16,
        attention_window=window,
    )  # fmt: skip
    documents = DOCUMENTS if has_documents else None
    dense = build_attention_mask(DOCUMENTS, causal, documents, None, None, shape)
    monkeypatch.setattr(masks, "can_use_ranges", lambda *_: True)
    ranges = build_attention_mask(DOCUMENTS, causal, documents, None, None, shape)
    assert torch.equal(ranges.to_dense(), dense)
    queries = torch.tensor([[5, 0], [2, 2]])
    assert torch.equal(ranges.select_rows(queries)[1, 0, 1], dense[1, 0, 2])
    q = torch.randn(2, 2, 6, 16, generator=torch.Generator().manual_seed(0))
    k = q[:, :1] * 2  # one key and value head for both query heads
    with torch.no_grad():
        result = scaled_dot_product_attention(q, k, k, causal, ranges, scale=0.25)
        expected = scaled_dot_product_attention(q, k, k, causal, dense, scale=0.25)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("causal", [True, False])
def test_dropout_in_blocks_of_queries_equals_that_of_all(causal, monkeypatch) -> None:
    results = []
    mask = build_range_mask(DOCUMENTS.shape, CPU, causal, DOCUMENTS, None)
    for limit in (1 << 24, 2 * 3 * 6 * 4, 1):  # all queries, blocks of 4 and 2, and one at a time
        monkeypatch.setattr(dropout, "ATTENTION_PER_BLOCK", limit)
        rng = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, 3, 6, 8, generator=rng).requires_grad_() for _ in range(3))
        out = dropout.attend_with_dropout(q, k, v, 0.3, causal, mask, torch.tensor([5, 6]), 0.4)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for others in results[1:]:
        for result, expected in zip(others, results[0], strict=True):
            torch.testing.assert_close(result, expected)
