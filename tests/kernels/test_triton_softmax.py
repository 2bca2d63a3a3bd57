"""The Triton kernels of the loss against float64, by the interpreter where there is no GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.kernels import linear_cross_entropy as module
from megatron.kernels import softmax_nll
from megatron.kernels.linear_cross_entropy import linear_cross_entropy, linear_log_p, linear_nll
from megatron.plan.memory import count_head_rows
from tests.kernels.triton_interpreter import DEVICE, count_bytes, needs_triton

pytestmark = needs_triton
DTYPES = (torch.float32, torch.bfloat16)
# float32 sums; a unit in the last place of bfloat16, since the interpreter truncates (a GPU rounds)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}


def draw_logits(n: int, n_columns: int, dtype: torch.dtype, size: float = 4.0) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(n_columns)
    logits = (torch.randn(n, n_columns, generator=rng) * size).to(dtype)
    targets = torch.randint(0, n_columns, (n,), generator=rng)
    scale = torch.rand(n, generator=rng) * 5
    scale[1] = 0  # ignored
    return logits.to(DEVICE), targets.to(DEVICE), scale.to(DEVICE)


def reference(logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(nats [N], gradient [N, V]) in float64."""
    exact = logits.double().requires_grad_()
    nats = F.cross_entropy(exact, targets, reduction="none")
    (nats * scale).sum().backward()
    return nats.detach(), exact.grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_columns", [1, 7, 1000, 4096, 5003])
def test_nats_and_gradients_match_float64(n_columns: int, dtype: torch.dtype) -> None:
    """Fewer columns than a block, one block exactly, and a partial second block."""
    from megatron.kernels import triton_softmax

    logits, targets, scale = draw_logits(5, n_columns, dtype)
    nats, grad = reference(logits, targets, scale)
    peak, total, target_logit = triton_softmax.softmax_sums(logits, targets)
    torch.testing.assert_close((peak + total.log() - target_logit).double(), nats, rtol=3e-6, atol=3e-6)
    weighted = triton_softmax.overwrite_with_gradient(logits, targets, scale)
    torch.testing.assert_close(weighted.double(), nats * scale, rtol=3e-6, atol=2e-5)
    torch.testing.assert_close(logits.double(), grad, rtol=TOLERANCE[dtype], atol=2e-6)
    assert not logits[1].any() and weighted[1] == 0


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_logits_of_any_size_do_not_overflow(size: float) -> None:
    from megatron.kernels import triton_softmax

    logits, targets, scale = draw_logits(4, 263, torch.float32, size)
    nats, grad = reference(logits, targets, scale)
    weighted = triton_softmax.overwrite_with_gradient(logits, targets, scale)
    torch.testing.assert_close(weighted.double(), nats * scale, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.double(), grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_non_finite_logit_affects_its_row_only_and_an_ignored_row_not_at_all(bad: float) -> None:
    from megatron.kernels import triton_softmax

    logits = torch.zeros(4, 19, device=DEVICE)
    logits[1:3, 18] = bad
    zeros, scale = torch.zeros(4, dtype=torch.int64, device=DEVICE), torch.ones(4, device=DEVICE)
    scale[2] = 0
    nats = triton_softmax.overwrite_with_gradient(logits, zeros, scale)
    assert nats.isnan().tolist() == [False, True, False, False]
    assert logits.isnan().any(1).tolist() == [False, True, False, False]


def test_a_block_of_minus_inf_has_no_weight() -> None:
    from megatron.kernels import triton_softmax

    logits = torch.full((1, 4100), -torch.inf, device=DEVICE)
    logits[0, 4096:] = 0  # the first block of 4096 columns has no finite logit
    target = torch.tensor([4097], device=DEVICE)
    nats = triton_softmax.overwrite_with_gradient(logits, target, None)
    torch.testing.assert_close(nats.cpu(), torch.tensor([4.0]).log())
    expected = torch.tensor([0.25, 0.25 - 1, 0.25, 0.25])
    torch.testing.assert_close(logits[0, 4096:].cpu(), expected)
    assert not logits[0, :4096].any()


@pytest.mark.skipif(DEVICE == "cuda", reason="counts accesses of the interpreter")
def test_a_logit_costs_two_bytes_of_traffic_for_the_loss_and_six_with_its_gradient() -> None:
    from megatron.kernels import triton_softmax

    n, n_columns = 3, 8192
    logits, targets, scale = draw_logits(n, n_columns, torch.bfloat16)
    beside = n * 64  # target, scale, target logit and results of a row
    with count_bytes() as seen:
        triton_softmax.softmax_sums(logits, targets)
    assert 2 * n * n_columns <= seen.n_bytes <= 2 * n * n_columns + beside
    with count_bytes() as seen:
        triton_softmax.overwrite_with_gradient(logits, targets, scale)
    assert 6 * n * n_columns <= seen.n_bytes <= 6 * n * n_columns + beside


class FirstHalf:
    """A vocabulary shard whose other rank is played by `other`: its columns begin at `n_columns`."""

    first_row = 0

    def __init__(self, other: torch.Tensor, targets: torch.Tensor, n_columns: int) -> None:
        peak = other.float().amax(1)
        total = (other.float() - peak[:, None]).exp().sum(1)
        is_other = targets >= n_columns
        target_logit = other.float().gather(1, (targets - n_columns).clamp(min=0)[:, None])[:, 0] * is_other
        self.peak, self.parts = peak, [total, target_logit]

    def max_over_shards(self, values: torch.Tensor) -> torch.Tensor:
        """Return the maximum with the other rank's; called before the sums."""
        highest = values.maximum(self.peak)
        self.sums = [self.parts[0] * (self.peak - highest).exp(), self.parts[1]]
        return highest

    def sum_over_shards(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum with the other rank's: first the totals, then the logits of the targets."""
        return values + self.sums.pop(0)


@pytest.fixture
def triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the path of a GPU on this machine's device, in chunks of 128 rows."""
    for target in (module, softmax_nll):
        monkeypatch.setattr(target, "can_use_triton", lambda _: True)
    monkeypatch.setattr(module, "count_head_rows", lambda _: 128)
    yield


@pytest.mark.usefixtures("triton_everywhere")
@pytest.mark.parametrize("scaled", [True, False])
def test_a_vocabulary_shard_has_its_columns_of_the_whole_gradient(scaled: bool) -> None:
    logits, targets, scale = draw_logits(6, 50, torch.float32)
    scale = scale if scaled else torch.ones_like(scale)
    nats, grad = reference(logits, targets, scale)
    local, other = logits[:, :30].contiguous(), logits[:, 30:]
    shard = FirstHalf(other, targets, 30)
    nll = softmax_nll.compute_target_nll(local, targets, shard)
    torch.testing.assert_close(nll.double(), nats, rtol=1e-6, atol=1e-6)
    total = softmax_nll.replace_with_gradient(local, targets, scale if scaled else None, shard, rows=6)
    torch.testing.assert_close(total, (nats * scale).sum(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(local.double(), grad[:, :30], rtol=1e-5, atol=1e-6)


def draw_head(n: int, n_columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(n, 24, generator=rng), torch.randn(n_columns, 24, generator=rng)
    targets = torch.randint(0, n_columns, (n,), generator=rng)
    scale = torch.rand(n, generator=rng) * (torch.rand(n, generator=rng) > 0.2)  # a fifth is ignored
    leaves = (x.to(DEVICE, dtype).requires_grad_() for x in (hidden, weight))
    return *leaves, targets.to(DEVICE), scale.to(DEVICE)


@pytest.mark.usefixtures("triton_everywhere")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [True, False])
def test_loss_and_gradients_of_the_head_match_float64(weighted: bool, dtype: torch.dtype) -> None:
    """150 rows in two chunks, the last of 22; 131 columns."""
    hidden, weight, targets, scale = draw_head(150, 131, dtype)
    loss = linear_cross_entropy(hidden, weight, targets, scale if weighted else None)
    (loss / 150).backward()
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    nats = F.cross_entropy(wide[0] @ wide[1].t(), targets, reduction="none")
    exact = (nats * scale if weighted else nats).sum()
    (exact / 150).backward()
    relative = 3e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(loss, exact.detach(), rtol=relative, atol=0)
    for result, expected in zip((hidden.grad, weight.grad), wide, strict=True):
        error = (result.double() - expected.grad).norm() / expected.grad.norm()
        assert error < (3e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.usefixtures("triton_everywhere")
def test_scores_match_float64_in_chunks() -> None:
    hidden, weight, targets, _ = draw_head(150, 131, torch.float32)
    exact = (hidden.double() @ weight.double().t()).log_softmax(-1).detach()
    nll = linear_nll(hidden, weight, targets)
    torch.testing.assert_close(nll.double(), -exact.gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    rows = torch.tensor([149, 0, 140, 149, 129], device=DEVICE)
    places = torch.stack([exact.argmax(1)[rows][0], *targets[rows][1:]])
    log_p, best = linear_log_p(hidden, weight, rows, places)
    torch.testing.assert_close(log_p.double(), exact[rows, places], rtol=1e-5, atol=1e-5)
    assert best.tolist() == (exact.argmax(1)[rows] == places).tolist() and best[0]


@pytest.mark.usefixtures("triton_everywhere")
def test_no_row_has_no_loss_and_no_gradient() -> None:
    hidden, weight, targets, scale = draw_head(4, 20, torch.bfloat16)
    loss = linear_cross_entropy(hidden[:0], weight, targets[:0], scale[:0])
    loss.backward()
    assert loss.item() == 0 and not weight.grad.any()
    assert linear_nll(hidden[:0], weight, targets[:0]).shape == (0,)


@pytest.mark.slow
@pytest.mark.usefixtures("triton_everywhere")
def test_the_loss_is_one_graph_under_the_compiler() -> None:
    hidden, weight, targets, scale = draw_head(140, 131, torch.float32)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    plain = linear_cross_entropy(hidden, weight, targets, scale)
    expected = torch.autograd.grad(plain, (hidden, weight))
    loss = compiled(hidden, weight, targets, scale)
    torch.testing.assert_close(loss, plain)
    for result, reference_grad in zip(torch.autograd.grad(loss, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(result, reference_grad)


@pytest.mark.parametrize("n_columns", [4096, 50304, 131072, 262144])
@pytest.mark.parametrize("n", [1, 300, 16384, 20000, 65536])
def test_chunks_have_8_to_16_thousand_rows_and_end_on_tiles(n: int, n_columns: int) -> None:
    rows = module._balance_rows(n, n_columns)
    limit = count_head_rows(n_columns)
    assert 8192 <= limit <= 16384 and rows % 128 == 0 and rows <= limit
    n_chunks = -(-n // rows)
    assert n_chunks == -(-n // limit)  # no more chunks than the memory requires
    if n > limit:
        assert rows >= limit / 2 and rows * n_chunks - n < 128 * n_chunks


class Touched(TorchDispatchMode):
    """Records the operations that read or write a matrix of logits."""

    def __init__(self, n_columns: int) -> None:
        super().__init__()
        self.n_columns, self.names = n_columns, []

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = op(*args, **(kwargs or {}))
        tensors = [x for x in (*args, result) if isinstance(x, torch.Tensor) and x.ndim == 2]
        views = ("t.default", "slice.Tensor", "detach.default", "new_empty.default", "alias.default")
        if any(len(x) >= 128 and x.shape[1] == self.n_columns for x in tensors):
            name = str(op).removeprefix("aten.").removeprefix("megatron.")
            self.names += [] if name in views else [name]
        return result


@pytest.mark.usefixtures("triton_everywhere")
def test_only_the_products_and_one_kernel_touch_the_logits() -> None:
    """Together with the kernel's six bytes a logit: the traffic of the loss beside its products."""
    hidden, weight, targets, scale = draw_head(256, 131, torch.bfloat16)
    with Touched(131) as seen:
        linear_cross_entropy(hidden, weight, targets, scale).backward()
    # two chunks: logits, their gradient, the product with the head; the product with hidden reads a transpose
    assert seen.names == ["mm.out", "softmax_nll_gradient_.default", "mm.out"] * 2
