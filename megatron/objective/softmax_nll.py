"""-log softmax(logits)[target] and its gradient, in one pass over the logits where they are on a CPU.

With a shard, logits are the columns of some rows of the head; see `VocabularyShard`.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron import _csrc


class VocabularyShard(Protocol):
    """Says that a head holds only some rows of the vocabulary, the others lying with its fellows.

    first_row   number of the first row held here
    """

    first_row: int

    def largest(self, of_rows: Tensor) -> Tensor:
        """The elementwise maximum over all fellows."""
        ...

    def total(self, of_rows: Tensor) -> Tensor:
        """The elementwise sum over all fellows."""
        ...


def nll_of_targets(logits: Tensor, targets: Tensor, shard: VocabularyShard | None) -> Tensor:
    """-log softmax(logits [N, V])[targets int64 [N]], float32 [N]."""
    if shard is None and logits.device.type == "cpu":
        rows = logits.detach().float().contiguous().numpy()
        return _tensor(_csrc.softmax_nll(rows, targets.contiguous().numpy(), torch.get_num_threads()))
    return -_of_target(_log_softmax(logits, shard), targets, shard)[0]


def to_gradient(
    logits: Tensor, targets: Tensor, scale: Tensor | None, shard: VocabularyShard | None, rows: int
) -> Tensor:
    """Put scale * (softmax - onehot) in the place of contiguous logits [N, V]; the sum of scale * nats.

    rows   worked on at a time
    """
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    put = _put_on_cpu if shard is None and logits.device.type == "cpu" else _put
    for begin in range(0, len(logits), rows):
        part = slice(begin, begin + rows)
        weights = None if scale is None else scale[part]
        nll = put(logits[part], targets[part], weights, shard)
        total += (nll if weights is None else nll * weights).sum(dtype=torch.float64)
    return total


def _put_on_cpu(logits: Tensor, targets: Tensor, scale: Tensor | None, _: VocabularyShard | None) -> Tensor:
    """The nats of each row, unweighted; the gradient in the place of the logits."""
    wide = logits.float()  # itself, where it is float32
    weights = None if scale is None else scale.float().contiguous().numpy()
    nll = _csrc.softmax_nll_gradient(
        wide.numpy(), targets.contiguous().numpy(), weights, torch.get_num_threads()
    )
    if wide is not logits:
        logits.copy_(wide)
    return _tensor(nll)


def _put(logits: Tensor, targets: Tensor, scale: Tensor | None, shard: VocabularyShard | None) -> Tensor:
    """The same with torch's operations, which also talk to the fellows of a shard."""
    log_p = _log_softmax(logits, shard)
    of_target, column, held = _of_target(log_p, targets, shard)
    grad = log_p.exp_().scatter_add_(1, column, -held)
    logits.copy_(grad if scale is None else grad.mul_(scale[:, None]))
    return -of_target


def _tensor(numbers: np.ndarray) -> Tensor:
    """A copy; not from_numpy, which the dispatcher sees as a copy to a device, for which a GPU would wait."""
    copy = torch.empty(numbers.shape)
    copy.numpy()[:] = numbers
    return copy


def _log_softmax(logits: Tensor, shard: VocabularyShard | None) -> Tensor:
    """Over the whole vocabulary, in float32, of the logits [N, V] that are here."""
    if shard is None:
        return torch.log_softmax(logits.float(), dim=-1)
    logits = logits.float()
    logits = logits - shard.largest(logits.amax(dim=-1))[:, None]
    return logits - shard.total(logits.exp().sum(dim=-1)).log_()[:, None]


def _of_target(
    log_p: Tensor, targets: Tensor, shard: VocabularyShard | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(log p of each target [N], its column here [N, 1], 1.0 where it is held here, else 0.0, [N, 1])."""
    if shard is None:
        column = targets[:, None]
        return log_p.gather(1, column)[:, 0], column, log_p.new_ones(()).expand(column.shape)
    column = targets[:, None] - shard.first_row
    held = (column >= 0) & (column < log_p.shape[1])
    column = column.clamp(0, log_p.shape[1] - 1)
    held_here = held.to(log_p.dtype)
    return shard.total((log_p.gather(1, column) * held_here)[:, 0]), column, held_here
