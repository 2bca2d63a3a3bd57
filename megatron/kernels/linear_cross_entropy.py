"""Fused linear cross-entropy: the logits of the whole batch are never in memory.

`torch.nn.functional.linear_cross_entropy` (2.13, with `options`) has no vocabulary shards,
and returns losses of the dtype of the hidden states: in bfloat16 the weight of a row
is rounded by up to 0.4 % in the gradient. Here losses and weights are float32.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron.kernels.softmax_nll import (
    VocabularyShard,
    compute_target_nll,
    replace_with_gradient,
)
from megatron.plan.memory import LOGITS_PER_CHUNK

# Logits processed by softmax and its gradient at a time. On a CPU 1 MiB of float32,
# which stays in the L2 cache of a core. On a GPU LOGITS_PER_CHUNK, 256 MiB.
CHUNK_ELEMENTS_CPU = 1 << 18
# Minimum rows of a matrix product; with fewer
# rows it is inefficient. In half precision
# the gradient of the head is accumulated in float32
# in a separate pass over [V, D] per chunk:
# 512 rows took 0.5 to 0.8 of the time of 128 rows.
MIN_ROWS = 128
MIN_ROWS_HALF = 512


def _rows_per_softmax(hidden: Tensor, n_rows: int) -> int:
    """Return the rows of logits to process at a time for a head with `n_rows` rows."""
    elements = CHUNK_ELEMENTS_CPU if hidden.device.type == "cpu" else LOGITS_PER_CHUNK
    # a head of 50,304 rows: 5 rows of logits at a time on a CPU, 1334 on a GPU
    return max(1, elements // n_rows)


def _rows_per_product(hidden: Tensor, n_rows: int, has_gradient: bool = False) -> int:
    """Return the rows of hidden to multiply at a time."""
    least = MIN_ROWS_HALF if has_gradient and hidden.dtype != torch.float32 else MIN_ROWS
    return max(least, _rows_per_softmax(hidden, n_rows))


def _accumulate_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return total + left^T right in float32, in place; left [n, V], right [n, D], total [V, D], None: 0."""
    if left.dtype == torch.float32:
        return left.t() @ right if total is None else total.addmm_(left.t(), right)
    if left.device.type == "cuda":
        # The sum inside a product is float32 and is not rounded to half
        # precision before it is added: one pass over [V, D] instead of three.
        if total is None:
            return torch.ops.aten.mm.dtype(left.t(), right, torch.float32)
        return torch.ops.aten.addmm.dtype_out(total, left.t(), right, torch.float32, out=total)
    product = left.t() @ right
    return product.float() if total is None else total.add_(product)


def _compute_nll(hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabularyShard | None) -> Tensor:
    chunk = _rows_per_product(hidden, weight.shape[0])
    parts = [
        compute_target_nll(F.linear(rows, weight), target, shard)
        for rows, target in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat(parts)


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward and gradients in one pass over chunks of rows; backward only scales the saved gradients.

    The gradient of the logits is G = scale (softmax - onehot). Each chunk of G is used immediately for the
    gradients of hidden, G W, and weight, G^T hidden. No [N, V] tensor outlives its chunk, as in the kernel of
    Liger (arXiv 2410.10989).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: Tensor | None,
        shard: VocabularyShard | None,
    ) -> Tensor:
        n, n_rows = hidden.shape[0], weight.shape[0]
        if not any(ctx.needs_input_grad[:2]):
            nll = _compute_nll(hidden, weight, targets, shard)
            return (nll if scale is None else nll * scale).sum(dtype=torch.float64)
        # `chunk` rows per matrix product, `rows` per softmax: a product needs
        # many rows to be efficient, the softmax few rows to stay in the cache
        chunk = _rows_per_product(hidden, n_rows, has_gradient=True)
        # with a vocabulary shard each part costs
        # collectives, so a chunk is processed in one part
        rows = _rows_per_softmax(hidden, n_rows) if shard is None else chunk
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        # 10^6 tokens of 10 nats sum to 10^7, where
        # consecutive float32 numbers differ by 1
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        buffer = hidden.new_empty(min(n, chunk), n_rows)  # reused by all chunks: logits, then their gradient
        for begin in range(0, n, chunk):
            part = slice(begin, min(begin + chunk, n))
            logits = torch.mm(hidden[part], weight.t(), out=buffer[: part.stop - begin])
            total += replace_with_gradient(
                logits, targets[part], None if scale is None else scale[part], shard, rows
            )
            # `logits` now contains their gradient
            # [n, V] @ [V, D] -> [n, D]; below [V, n] @ [n, D] -> [V, D]
            torch.mm(logits, weight, out=grad_hidden[part])
            # in half precision the sum over chunks would
            # lose digits, so it is kept in float32
            grad_weight = _accumulate_product(grad_weight, logits, hidden[part])
        if grad_weight is None:  # no row
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph
            raise RuntimeError("linear_cross_entropy: its gradient has no gradient (computed in the forward)")
        grad_hidden, grad_weight = ctx.saved_tensors
        # the result is a scalar: the saved gradients are for upstream = 1
        upstream = grads[0].float()
        return (
            grad_hidden * upstream.to(grad_hidden.dtype),
            (grad_weight * upstream).to(ctx.weight_dtype),
            None,
            None,
            None,
        )


_sum_cross_entropy: Callable[[Tensor, Tensor, Tensor, Tensor | None, VocabularyShard | None], Tensor] = (
    _LinearCrossEntropy.apply
)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Return the sum over rows of scale * -log softmax(hidden weight^T)[target], in nats: float64 scalar.

    hidden  [N, D]  input of the head, in the precision of the products
    weight  [V, D]  weight of the head
    targets [N]     int64
    scale   [N]     float32, weight of each row; None: 1

    With a shard, V counts the rows of this rank. All ranks of the shard
    call with the same hidden and get the same sum. The gradient of hidden
    is the part through this rank's rows and must be summed over the ranks.

    Peak memory beyond the inputs: the gradients and one chunk of logits.
    """
    # autocast has no rule for a custom Function, and
    # `torch.mm(..., out=)` requires operands of one dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        return _sum_cross_entropy(hidden, weight, targets, scale, shard)


@torch.no_grad()
def linear_nll(
    hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabularyShard | None = None
) -> Tensor:
    """Return -log softmax(hidden weight^T)[target] of each row in nats, float32 [N], computed in chunks."""
    return _compute_nll(hidden, weight, targets, shard)


@torch.no_grad()
def linear_log_p(hidden: Tensor, weight: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return log softmax(hidden weight^T) at chosen places, computed in chunks; rows may repeat.

    hidden [N, D], weight [V, D]   as for `linear_cross_entropy`
    rows, targets [T] int64        place t is column targets[t] of row rows[t]

    Returns log p float32 [T], and bool [T]: whether the target is the argmax of its row.
    """
    # sorted by row, the places of each chunk of rows are one contiguous slice
    # chunk = 2 and rows 3 0 3: sorted rows 0 3 3, edges 0
    # 2 4, bounds 0 1 3. Chunk 0 has place 0, chunk 1 has
    # places 1 and 2.
    order = rows.argsort(stable=True)
    rows, targets = rows[order], targets[order]
    chunk = _rows_per_product(hidden, weight.shape[0])
    parts = hidden.split(chunk)
    # bounds[i]..bounds[i + 1]: sorted places whose row is in chunk i
    edges = torch.arange(len(parts) + 1, device=rows.device) * chunk
    bounds = torch.searchsorted(rows, edges).tolist()
    log_p = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    best = torch.empty(len(rows), dtype=torch.bool, device=rows.device)
    for i, part in enumerate(parts):
        selected = slice(bounds[i], bounds[i + 1])
        if selected.start == selected.stop:
            continue
        logits = F.linear(part, weight)
        row, target = rows[selected] - i * chunk, targets[selected]
        row_log_p = torch.log_softmax(logits.float(), dim=-1)
        log_p[selected] = row_log_p[row, target]
        best[selected] = row_log_p.argmax(-1)[row] == target
    inverse = order.argsort()  # undoes the sort: results are returned in the order of the arguments
    return log_p[inverse], best[inverse]
