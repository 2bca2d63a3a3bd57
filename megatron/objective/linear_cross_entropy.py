"""Cross-entropy of a linear head without the logits of the whole batch in memory."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron.objective.softmax_nll import VocabularyShard, nll_of_targets, to_gradient

# Logits between softmax and its gradient at a time, on a CPU: 1 MiB of float32, which stays in a core's
# second cache. On a GPU 256 MiB, and products of as many rows.
CHUNK_ELEMENTS_CPU = 1 << 18
CHUNK_ELEMENTS_GPU = 1 << 26
# Rows of a product on a CPU; with fewer it starves. In half precision the head's gradient is added up in
# float32 beside the product, a pass over [V, D] for every chunk: 512 rows took 0.5 to 0.8 of the time of 128.
MIN_ROWS = 128
MIN_ROWS_HALF = 512


def _rows_of_softmax(hidden: Tensor, n_rows: int) -> int:
    """Rows of logits that are worked on at a time, the head having `n_rows`."""
    elements = CHUNK_ELEMENTS_CPU if hidden.device.type == "cpu" else CHUNK_ELEMENTS_GPU
    return max(1, elements // n_rows)


def _rows_of_product(hidden: Tensor, n_rows: int) -> int:
    """Rows of hidden that are multiplied at a time."""
    return max(MIN_ROWS, _rows_of_softmax(hidden, n_rows))


def _rows_of_gradient(hidden: Tensor, n_rows: int) -> int:
    """The same where gradients are made."""
    least = MIN_ROWS if hidden.dtype == torch.float32 or hidden.device.type != "cpu" else MIN_ROWS_HALF
    return max(least, _rows_of_softmax(hidden, n_rows))


def _nll(hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabularyShard | None) -> Tensor:
    chunk = _rows_of_product(hidden, weight.shape[0])
    parts = [
        nll_of_targets(F.linear(rows, weight), target, shard)
        for rows, target in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat(parts)


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward and gradient in one pass over chunks of rows; backward only scales what forward kept.

    The gradient of the logits is softmax - onehot, and each chunk of it is used at once for the gradients of
    hidden and weight, so that no [N, V] tensor outlives its chunk: the idea of Liger's kernel (arXiv
    2410.10989).
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
            nll = _nll(hidden, weight, targets, shard)
            return (nll if scale is None else nll * scale).sum(dtype=torch.float64)
        chunk = _rows_of_gradient(hidden, n_rows)
        # fellows talk about each part: as few as can be
        rows = _rows_of_softmax(hidden, n_rows) if shard is None else chunk
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        held = hidden.new_empty(min(n, chunk), n_rows)
        for begin in range(0, n, chunk):
            part = slice(begin, min(begin + chunk, n))
            logits = torch.mm(hidden[part], weight.t(), out=held[: part.stop - begin])
            total += to_gradient(logits, targets[part], None if scale is None else scale[part], shard, rows)
            torch.mm(logits, weight, out=grad_hidden[part])
            if logits.dtype == torch.float32:
                grad_weight.addmm_(logits.t(), hidden[part])
            else:
                grad_weight += logits.t() @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph
            raise RuntimeError("linear_cross_entropy: keeps its gradients as numbers; they have none")
        grad_hidden, grad_weight = ctx.saved_tensors
        by = grads[0].float()
        return (
            grad_hidden * by.to(grad_hidden.dtype),
            (grad_weight * by).to(ctx.weight_dtype),
            None,
            None,
            None,
        )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Sum over rows of scale * -log softmax(hidden weight^T)[target], in nats.

    hidden  [N, D]  what the head reads, in the precision of the products
    weight  [V, D]  the head
    targets [N]     int64
    scale   [N]     float32, a weight for each row; none: 1

    With a shard, V is the rows held here: every fellow calls with the same hidden and gets the same sum; the
    gradient of hidden is that through the rows here, to be added up over the fellows.

    Returns a float64 scalar. Peak memory beyond the inputs: the gradients and one chunk of logits.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, targets, scale, shard)


@torch.no_grad()
def linear_nll(
    hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabularyShard | None = None
) -> Tensor:
    """-log softmax(hidden weight^T)[target] of each row, float32 [N], in nats, chunk by chunk as above."""
    return _nll(hidden, weight, targets, shard)


@torch.no_grad()
def linear_log_p(hidden: Tensor, weight: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """log softmax(hidden weight^T) at chosen places, chunk by chunk as above; a row may be asked about often.

    hidden [N, D], weight [V, D]   as for `linear_cross_entropy`
    rows, targets [T] int64        place t is column targets[t] of row rows[t]

    Returns log p float32 [T], and bool [T]: whether the target is its row's likeliest.
    """
    order = rows.argsort(stable=True)
    rows, targets = rows[order], targets[order]
    chunk = _rows_of_product(hidden, weight.shape[0])
    parts = hidden.split(chunk)
    edges = torch.arange(len(parts) + 1, device=rows.device) * chunk
    bounds = torch.searchsorted(rows, edges).tolist()
    log_p = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    best = torch.empty(len(rows), dtype=torch.bool, device=rows.device)
    for i, part in enumerate(parts):
        asked = slice(bounds[i], bounds[i + 1])
        if asked.start == asked.stop:
            continue
        of_row = torch.log_softmax(F.linear(part, weight).float(), dim=-1)
        row, target = rows[asked] - i * chunk, targets[asked]
        log_p[asked] = of_row[row, target]
        best[asked] = of_row.argmax(-1)[row] == target
    back = order.argsort()
    return log_p[back], best[back]
