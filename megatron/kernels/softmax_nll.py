"""-log softmax(logits)[target] and its gradient: by C++ on a CPU, by torch elsewhere.

With a vocabulary shard, the logits are the columns
of this rank's rows of the head; see `VocabularyShard`.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron import _csrc


class VocabularyShard(Protocol):
    """This rank's part of a vocabulary-parallel head, and reductions over the ranks of the shard group.

    first_row   index of the first row of the head on this rank
    """

    first_row: int

    def max_over_shards(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks of the group."""
        ...

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over the ranks of the group."""
        ...


def compute_target_nll(logits: Tensor, targets: Tensor, shard: VocabularyShard | None) -> Tensor:
    """Return -log softmax(logits [N, V])[targets int64 [N]], float32 [N]."""
    if shard is None and logits.device.type == "cpu":
        rows = logits.detach().float().contiguous().numpy()
        return _copy_to_tensor(_csrc.softmax_nll(rows, targets.contiguous().numpy(), torch.get_num_threads()))
    return -_gather_target(_log_softmax(logits, shard), targets, shard)[0]


def replace_with_gradient(
    logits: Tensor, targets: Tensor, scale: Tensor | None, shard: VocabularyShard | None, rows: int
) -> Tensor:
    """Overwrite contiguous logits [N, V] with scale * (softmax - onehot); return the sum of scale * nats.

    rows   rows to process at a time
    """
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    write = _write_gradient_cpu if shard is None and logits.device.type == "cpu" else _write_gradient
    for begin in range(0, len(logits), rows):
        part = slice(begin, begin + rows)
        weights = None if scale is None else scale[part]
        nll = write(logits[part], targets[part], weights, shard)
        total += (nll if weights is None else nll * weights).sum(dtype=torch.float64)
    return total


def _write_gradient_cpu(
    logits: Tensor, targets: Tensor, scale: Tensor | None, _: VocabularyShard | None
) -> Tensor:
    """Overwrite the logits with their gradient; return the unweighted nats of each row."""
    wide = logits.float()  # the same tensor if it is float32: the kernel then writes in place
    weights = None if scale is None else scale.float().contiguous().numpy()
    nll = _csrc.softmax_nll_gradient(
        wide.numpy(), targets.contiguous().numpy(), weights, torch.get_num_threads()
    )
    if wide is not logits:
        logits.copy_(wide)
    return _copy_to_tensor(nll)


def _write_gradient(
    logits: Tensor, targets: Tensor, scale: Tensor | None, shard: VocabularyShard | None
) -> Tensor:
    """Do the same with torch operations, including the collectives of a vocabulary shard."""
    log_p = _log_softmax(logits, shard)
    target_log_p, column, is_local = _gather_target(log_p, targets, shard)
    # d nll / d logits = softmax - onehot;
    # a target on another rank subtracts 0
    # from some local column. exp_ overwrites log_p;
    # target_log_p was copied from it by gather before
    grad = log_p.exp_().scatter_add_(1, column, -is_local)
    logits.copy_(grad if scale is None else grad.mul_(scale[:, None]))
    return -target_log_p


def _copy_to_tensor(numbers: np.ndarray) -> Tensor:
    """Copy to a tensor. Not torch.from_numpy: dispatch modes would report it as a host-to-device copy."""
    copy = torch.empty(numbers.shape)
    copy.numpy()[:] = numbers
    return copy


def _log_softmax(logits: Tensor, shard: VocabularyShard | None) -> Tensor:
    """Return log softmax over the whole vocabulary, in float32, for this rank's logits [N, V]."""
    if shard is None:
        return torch.log_softmax(logits.float(), dim=-1)
    logits = logits.float()
    # the global maximum, not the local one, keeps exp() in range and the
    # normalizer common to all ranks log p = x - m - log(sum of exp(x -
    # m)) takes two all-reduces of [N] and no gather of the logits [N, V]
    logits = logits - shard.max_over_shards(logits.amax(dim=-1))[:, None]
    return logits - shard.sum_over_shards(logits.exp().sum(dim=-1)).log_()[:, None]


def _gather_target(
    log_p: Tensor, targets: Tensor, shard: VocabularyShard | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log p of each target [N], its local column [N, 1], 1.0 if on this rank else 0.0 [N, 1])."""
    if shard is None:
        column = targets[:, None]
        # a view with stride 0: no memory for a mask of ones
        return log_p.gather(1, column)[:, 0], column, log_p.new_ones(()).expand(column.shape)
    # targets of other ranks are clamped to a valid
    # column and zeroed by the mask before the sum
    # V = 50,304 on 2 ranks, target 30,000: column 4,848
    # on rank 1; on rank 0 column 25,151 with mask 0
    column = targets[:, None] - shard.first_row
    is_local = (column >= 0) & (column < log_p.shape[1])
    column = column.clamp(0, log_p.shape[1] - 1)
    mask = is_local.to(log_p.dtype)
    return shard.sum_over_shards((log_p.gather(1, column) * mask)[:, 0]), column, mask
