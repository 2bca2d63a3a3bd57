"""Values and gradients of the chunked loss against torch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.kernels import linear_cross_entropy as module
from megatron.kernels.linear_cross_entropy import linear_cross_entropy, linear_log_p, linear_nll
from megatron.kernels.softmax_nll import compute_target_nll, replace_with_gradient


@pytest.fixture(autouse=True)
def chunks_of_three_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """50 rows of 40 logits: sixteen full chunks and a partial one."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS_CPU", 3 * 40)
    monkeypatch.setattr(module, "MIN_ROWS", 1)


def draw_inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 16, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(40, 16, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 40, (50,), generator=generator)
    scale = torch.rand(50, generator=generator) * 5
    return hidden, weight, targets, scale


@pytest.mark.parametrize("rows_of_product", [1, 7])
@pytest.mark.parametrize("weighted", [False, True])
def test_value_and_gradients_match_torch(
    weighted: bool, rows_of_product: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of three rows, and of seven rows with softmax over three, three and one of them."""
    monkeypatch.setattr(module, "MIN_ROWS", rows_of_product)
    hidden, weight, targets, scale = draw_inputs(torch.float32)
    ours = linear_cross_entropy(hidden, weight, targets, scale if weighted else None)
    (ours * 0.37).backward()
    grads = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    nll = F.cross_entropy(hidden @ weight.t(), targets, reduction="none")
    theirs = (nll * scale if weighted else nll).sum()
    (theirs * 0.37).backward()
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-6, atol=1e-6)
    rows = linear_nll(hidden.detach(), weight.detach(), targets)
    torch.testing.assert_close(rows, nll.detach(), rtol=1e-6, atol=1e-6)
    for result, reference in zip(grads, (hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-5)


def test_double_backward_is_refused_instead_of_being_wrong() -> None:
    hidden, weight, targets, _ = draw_inputs(torch.float32)
    # the square provides a graph, in which the gradient of the fused loss would be treated as a constant
    value = linear_cross_entropy(hidden, weight, targets) + hidden.square().sum()
    with pytest.raises(RuntimeError, match="its gradient has no gradient"):
        torch.autograd.grad(value, hidden, create_graph=True)


def test_under_autocast_products_are_bfloat16_and_gradients_come_back_in_float32() -> None:
    hidden, weight, targets, _ = draw_inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(hidden, weight, targets).backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    rough = hidden.grad.clone()
    hidden.grad = None
    linear_cross_entropy(hidden, weight, targets).backward()
    torch.testing.assert_close(rough, hidden.grad, rtol=0.05, atol=0.05)


def test_zero_rows_have_zero_loss_and_gradient() -> None:
    hidden, weight, _, _ = draw_inputs(torch.float32)
    none = linear_cross_entropy(hidden[:0], weight, torch.zeros(0, dtype=torch.int64))
    none.backward()
    assert none.item() == 0.0
    assert not weight.grad.any()


def test_log_p_at_places_in_any_order_matches_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that occur several times or not at all; three rows per chunk."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS_CPU", 3 * 11)
    rng = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(8, 5, generator=rng), torch.randn(11, 5, generator=rng)
    expected = (hidden @ head.t()).log_softmax(-1)
    best = expected.argmax(-1)
    rows = torch.tensor([7, 0, 3, 3, 7, 1, 0, 7])
    targets = torch.tensor([2, 10, int(best[3]), 4, int(best[7]), 0, 0, 2])
    log_p, likeliest = linear_log_p(hidden, head, rows, targets)
    torch.testing.assert_close(log_p, expected[rows, targets])
    assert likeliest.tolist() == (best[rows] == targets).tolist()
    assert likeliest.any() and not likeliest.all()
    none = torch.empty(0, dtype=torch.long)
    assert linear_log_p(hidden[:0], head, none, none)[0].shape == (0,)


@pytest.mark.parametrize("n_columns", [1, 7, 8, 263])
@pytest.mark.parametrize("size", [1.0, 1e4, 1e30])
def test_nats_and_gradients_are_accurate_for_logits_of_any_size(size: float, n_columns: int) -> None:
    """Against float64; logits of 1e30 underflow every weight but one."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(9, n_columns, generator=rng) * size
    targets = torch.randint(0, n_columns, (9,), generator=rng)
    scale = torch.rand(9, generator=rng)
    exact = logits.double().requires_grad_()
    nll = F.cross_entropy(exact, targets, reduction="none")
    (nll * scale).sum().backward()
    result = compute_target_nll(logits, targets, None)
    torch.testing.assert_close(result.double(), nll.detach(), rtol=3e-7, atol=3e-7)
    total = replace_with_gradient(logits, targets, scale, None, rows=4)
    torch.testing.assert_close(total, (result * scale).double().sum(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.double(), exact.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_non_finite_logit_affects_its_row_only(bad: float) -> None:
    logits = torch.zeros(3, 19)
    logits[1, 18] = bad
    assert compute_target_nll(logits, torch.zeros(3, dtype=torch.int64), None).isnan().tolist() == [0, 1, 0]
    replace_with_gradient(logits, torch.zeros(3, dtype=torch.int64), None, None, rows=3)
    assert logits.isnan().any(1).tolist() == [0, 1, 0]


def test_a_column_of_minus_inf_has_no_weight_and_a_target_outside_the_vocabulary_is_refused() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 4] = -torch.inf
    nll = compute_target_nll(logits, torch.tensor([0]), None)
    torch.testing.assert_close(nll, torch.tensor([9.0]).log())
    for target in (-1, 5):
        with pytest.raises(IndexError, match=r"outside 0\.\.4"):
            compute_target_nll(torch.zeros(1, 5), torch.tensor([target]), None)


class Sizes(TorchDispatchMode):
    """Records the largest number of rows of logits in any result."""

    def __init__(self, n_rows: int) -> None:
        super().__init__()
        self.n_rows, self.n_rows_of_logits = n_rows, 0

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = op(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.shape[1:] == (self.n_rows,) and len(tensor) != 16:
                self.n_rows_of_logits = max(self.n_rows_of_logits, len(tensor))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_the_whole_batch_are_never_in_memory(dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(module, "MIN_ROWS_HALF", 4)
    hidden, weight, targets, scale = draw_inputs(dtype)
    with Sizes(40) as seen:
        linear_cross_entropy(hidden, weight, targets, scale).backward()
    assert hidden.grad is not None and weight.grad is not None
    # 50 rows of 40 logits: three rows at a time in float32, four where the head's gradient costs a pass
    assert seen.n_rows_of_logits == (3 if dtype == torch.float32 else 4)
