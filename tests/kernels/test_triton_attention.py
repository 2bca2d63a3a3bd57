"""The Triton attention kernel with dropout and documents against the dense reference."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megatron.config.schema import ModelConfig
from megatron.kernels import attention, document_mask, dropout
from megatron.kernels.attention import scaled_dot_product_attention
from megatron.kernels.document_mask import build_document_mask
from megatron.kernels.dropout import attend_with_dropout
from megatron.model import masks
from megatron.model.initialization import init_weights
from megatron.model.masks import document_numbers
from megatron.model.transformer import Gpt
from megatron.parallel.activation_checkpointing import list_saved_operators
from tests.kernels.triton_interpreter import DEVICE, needs_triton

pytestmark = needs_triton


def draw_heads(n: int, d_head: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """(q, k, v, gradient of the result, sample keys, document numbers); two samples of two heads."""
    rng = torch.Generator().manual_seed(n)
    heads = (torch.randn(2, 2, n, d_head, generator=rng).to(DEVICE, dtype) for _ in range(4))
    key = torch.randint(0, 2**62, (2,), generator=rng).to(DEVICE)
    ends = (torch.rand(2, n, generator=rng) < 0.04).long()
    return *heads, key, (ends.cumsum(1) - ends).to(DEVICE)


def dense_mask(documents: Tensor, causal: bool) -> Tensor:
    same = documents[:, :, None] == documents[:, None, :]
    return (same.tril() if causal else same)[:, None]


@pytest.fixture
def triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of a GPU on this machine's device."""
    for module in (attention, document_mask, dropout, masks):
        monkeypatch.setattr(module, "can_use_triton_attention", lambda *_: True)


# positions: within a block, a partial second block of queries; channels: padded to 32, or 16 as they are
CASES = [(37, 24, True, 0.0), (150, 16, True, 0.3), (150, 24, False, 0.3), (133, 16, True, 0.7)]
CASES += [(70, 64, True, 0.3), (70, 128, True, 0.3)]  # blocks of 32 x 64 and 16 x 32 in the backward


@pytest.mark.parametrize(("n", "d_head", "causal", "rate"), CASES)
@pytest.mark.parametrize("has_documents", [False, True])
def test_values_gradients_and_dropped_weights_match_the_dense_reference_in_float64(
    n: int, d_head: int, causal: bool, rate: float, has_documents: bool
) -> None:
    """A single weight that one side drops and the other keeps exceeds the tolerance by far."""
    from megatron.kernels.triton_attention import triton_attention

    q, k, v, grad, key, documents = draw_heads(n, d_head)
    mask = build_document_mask(documents, causal) if has_documents else None
    bounds = (None, None) if mask is None else (mask.first, mask.last)
    fast = [x.clone().requires_grad_() for x in (q, k, v)]
    out = triton_attention(*fast, key, *bounds, causal, 0.3, rate)
    (out * grad).sum().backward()
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    dense = dense_mask(documents, causal) if has_documents else None
    expected = attend_with_dropout(*exact, 0.3, causal, dense, key, rate)
    (expected * grad.double()).sum().backward()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for result, reference in zip(fast, exact, strict=True):
        torch.testing.assert_close(result.grad.double(), reference.grad, rtol=1e-5, atol=2e-5)


def test_the_dropped_pairs_are_those_of_the_reference() -> None:
    """Equal scores and the identity as values: the output shows each weight, 0 where it is dropped."""
    from megatron.kernels.triton_attention import triton_attention

    n, key = 32, torch.tensor([2**40 + 17, 5], device=DEVICE)
    zeros = torch.zeros(2, 3, n, n, device=DEVICE)
    values = torch.eye(n, device=DEVICE).expand(2, 3, n, n)
    weights = triton_attention(zeros, zeros, values, key, None, None, False, 1.0, 0.4)
    retained = dropout.draw_keep_mask(key, 3, n, n, 0.4)
    assert torch.equal(weights > 0, retained)
    torch.testing.assert_close(weights, retained / (0.6 * n))


def test_half_precision_has_float32_sums() -> None:
    from megatron.kernels.triton_attention import triton_attention

    q, k, v, grad, key, _ = draw_heads(100, 16, torch.float16)
    fast = [x.clone().requires_grad_() for x in (q, k, v)]
    out = triton_attention(*fast, key, None, None, True, 0.3, 0.2)
    (out * grad).sum().backward()
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = attend_with_dropout(*exact, 0.3, True, None, key, 0.2)
    (expected * grad.double()).sum().backward()
    assert out.dtype == torch.float16 and (out - expected).norm() / expected.norm() < 1e-3
    for result, reference in zip(fast, exact, strict=True):
        assert (result.grad - reference.grad).norm() / reference.grad.norm() < 2e-3


def test_the_bounds_of_documents_give_the_dense_mask_and_its_rows() -> None:
    tokens = torch.tensor([[5, 9, 1, 9, 9, 2, 3], [1, 2, 3, 4, 5, 6, 9], [9, 1, 1, 1, 1, 1, 1]])
    documents = document_numbers(tokens, eod_id=9)
    for causal in (True, False):
        mask = build_document_mask(documents, causal)
        assert torch.equal(mask.to_dense(), dense_mask(documents, causal))
        queries = torch.tensor([[6, 0], [3, 3], [1, 5]])
        rows = mask.to_dense()[torch.arange(3)[:, None], 0, queries]
        assert torch.equal(mask.select_rows(queries)[:, 0], rows)
    assert mask.first[0].tolist() == [0, 0, 2, 2, 4, 5, 5] and mask.last[0].tolist() == [1, 1, 3, 3, 4, 6, 6]


@pytest.mark.usefixtures("triton_everywhere")
@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_a_model_with_documents_dropout_and_shared_heads_is_the_same_without_dense_masks(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"d_model": 32, "d_ff": 48, "d_head": 16, "n_heads": 2, "n_kv_heads": 1, "n_layers": 2}
    more = {"attention_dropout": rate, "document_mask": True, "eod_id": 3}
    model = Gpt(ModelConfig(n_tokens=20, vocab_rows=24, **shape, **more)).to(DEVICE)
    init_weights(model, 0)
    tokens = torch.randint(0, 20, (2, 70), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    key = torch.tensor([7, 8], device=DEVICE)
    results = []
    for uses_triton in (True, False):
        for module in (attention, dropout, masks):
            monkeypatch.setattr(module, "can_use_triton_attention", lambda *_, use=uses_triton: use)
        model.zero_grad()
        logits = model(tokens, True, dropout_key=key)
        logits.square().mean().backward()
        results.append((logits.detach(), model.blocks[0].attention.key.weight.grad.clone()))
    for fast, dense in zip(*results, strict=True):
        torch.testing.assert_close(fast, dense, rtol=1e-4, atol=1e-5)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest result."""

    n = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = op(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            self.n = max(self.n, x.numel() if isinstance(x, Tensor) else 0)
        return result


@pytest.mark.usefixtures("triton_everywhere")
def test_no_tensor_of_queries_times_keys_is_in_memory() -> None:
    q, k, v, _, key, documents = draw_heads(128, 16)
    q.requires_grad_()
    with Largest() as seen:
        mask = build_document_mask(documents, True)
        attend_with_dropout(q, k, v, 0.3, True, mask, key, 0.2).sum().backward()
        scaled_dot_product_attention(q, k, v, True, mask, scale=0.3).sum().backward()
    assert seen.n == q.numel()  # 2 x 2 x 128 x 16; the weights would be eight times as many


@pytest.mark.usefixtures("triton_everywhere")
def test_attention_with_documents_is_one_graph_under_the_compiler() -> None:
    q, k, v, _, key, documents = draw_heads(40, 16)
    q.requires_grad_()

    def run(q: Tensor, documents: Tensor) -> Tensor:
        mask = build_document_mask(documents, True)
        dropped = attend_with_dropout(q, k, v, 0.3, True, mask, key, 0.2)
        return dropped + scaled_dot_product_attention(q, k, v, True, mask, scale=0.3)

    expected = run(q, documents)
    result = torch.compile(run, fullgraph=True, backend="aot_eager")(q, documents)
    torch.testing.assert_close(result, expected)
    gradients = (torch.autograd.grad(x.sum(), q)[0] for x in (result, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.usefixtures("triton_everywhere")
def test_selective_checkpointing_does_not_recompute_the_kernel() -> None:
    q, k, v, _, key, _ = draw_heads(20, 16)
    q.requires_grad_()

    def run(q: Tensor) -> Tensor:
        return attend_with_dropout(q.sin(), k, v, 0.3, True, None, key, 0.2).cos()

    def count_calls(context_fn: Any) -> int:
        with CountCalls() as seen:
            checkpoint(run, q, use_reentrant=False, context_fn=context_fn).sum().backward()
        return seen.n

    saved = list_saved_operators()
    assert count_calls(lambda: create_selective_checkpoint_contexts(saved)) == 1
    assert count_calls(lambda: create_selective_checkpoint_contexts([])) == 2


class CountCalls(TorchDispatchMode):
    """Counts the forward passes of the kernel that ran."""

    n = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.n += op is torch.ops.megatron.triton_attention.default
        return op(*args, **(kwargs or {}))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.parametrize("d_head", [32, 64, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
def test_bfloat16_on_a_gpu_matches_float64(d_head: int, causal: bool) -> None:
    from megatron.kernels.triton_attention import triton_attention

    q, k, v, grad, key, documents = draw_heads(700, d_head, torch.bfloat16)
    mask = build_document_mask(documents, causal)
    fast = [x.clone().requires_grad_() for x in (q, k, v)]
    out = triton_attention(*fast, key, mask.first, mask.last, causal, d_head**-0.5, 0.2)
    (out * grad).sum().backward()
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = attend_with_dropout(*exact, d_head**-0.5, causal, mask.to_dense(), key, 0.2)
    (expected * grad.double()).sum().backward()
    assert (out - expected).norm() / expected.norm() < 1e-2
    for result, reference in zip(fast, exact, strict=True):
        assert (result.grad - reference.grad).norm() / reference.grad.norm() < 2e-2


@pytest.mark.usefixtures("triton_everywhere")
def test_blocks_with_documents_and_dropout_share_a_graph_over_steps() -> None:
    """Compiled block by block, as in training: no graph break, and no recompilation for other documents."""
    shape = {"d_model": 32, "d_ff": 48, "d_head": 16, "n_heads": 2, "n_layers": 2}
    more = {"attention_dropout": 0.2, "document_mask": True, "eod_id": 3}
    model = Gpt(ModelConfig(n_tokens=20, vocab_rows=24, **shape, **more)).to(DEVICE)
    init_weights(model, 0)
    rng = torch.Generator().manual_seed(0)
    torch._dynamo.reset()
    graphs = []

    def count_graphs(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    plain = [block.forward for block in model.blocks]
    losses: list[list[Tensor]] = [[], []]
    for i, forward in enumerate(
        (plain, [torch.compile(f, fullgraph=True, backend=count_graphs) for f in plain])
    ):
        for block, function in zip(model.blocks, forward, strict=True):
            block.forward = function
        for step in range(3):
            tokens = torch.randint(0, 20, (2, 20), generator=rng.manual_seed(step)).to(DEVICE)
            key = torch.tensor([step, step + 9], device=DEVICE)
            losses[i].append(model(tokens, True, dropout_key=key).square().mean())
    torch.testing.assert_close(losses[1], losses[0])
    assert len(graphs) <= 2  # both blocks have the code of one: one graph, or one for each closure
