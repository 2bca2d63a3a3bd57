"""Softmax cross-entropy on a GPU in one launch (Triton): 2 bytes of traffic a bf16 logit, 6 with gradients.

A program computes one row. The loss reads the row once, with the online softmax (Milakov and Gimelshein,
arXiv 1805.02867). The gradient reads it again, from the L2 cache if it is still there, and overwrites it.
Compiled torch operations would be compiled again for every number of predicted rows, and the compiler decides
how often they read a row.

The operators are registered with torch's dispatcher, so that `torch.compile` and dispatch modes handle a
launch as one operation. Nothing is copied to the host: a CUDA graph can record them. On CPU tensors they run
in Triton's interpreter if TRITON_INTERPRET=1 is set before this module is imported.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # columns that a program processes at a time
N_WARPS = 8


@triton.jit
def _reduce_row(row: tl.tensor, n_columns: tl.constexpr, block: tl.constexpr) -> tl.tensor:
    """Return (max of a row, sum of exp(x - max)), float32; `row` points to its first logit."""
    # Each of the block's lanes has a peak and a total of its own, combined after the last column: the threads
    # of a program exchange values twice a row instead of twice a block.
    peaks = tl.full([block], -float("inf"), tl.float32)
    totals = tl.zeros([block], tl.float32)
    for start in range(0, n_columns, block):
        columns = start + tl.arange(0, block)
        x = tl.load(row + columns, mask=columns < n_columns, other=-float("inf")).to(tl.float32)
        # -Inf - -Inf would be NaN where no logit was finite so far
        shift = tl.where(peaks == -float("inf"), 0.0, peaks)
        # one exponential: of a logit relative to the peak, or of the peak relative to a higher logit
        decay = tl.exp(-tl.abs(x - shift))
        totals = tl.where(x > peaks, totals * decay + 1.0, totals + decay)
        peaks = tl.maximum(peaks, x)
    peak = tl.max(peaks, axis=0)
    return peak, tl.sum(totals * tl.exp(peaks - tl.where(peak == -float("inf"), 0.0, peak)), axis=0)


@triton.jit
def _overwrite_row(
    row: tl.tensor,
    target: tl.tensor,
    log_total: tl.tensor,
    scale: tl.tensor,
    n_columns: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """Replace the logits x of a row by scale * (exp(x - log_total) - onehot)."""
    for start in range(0, n_columns, block):
        columns = start + tl.arange(0, block)
        x = tl.load(row + columns, mask=columns < n_columns, other=-float("inf")).to(tl.float32)
        grad = tl.exp(x - log_total)
        grad = tl.where(columns == target, grad - 1.0, grad)
        # scale 0 marks an ignored row, whose gradient is 0 even if its logits are not finite
        grad = tl.where(scale == 0.0, 0.0, grad * scale)
        tl.store(row + columns, grad.to(row.dtype.element_ty), mask=columns < n_columns)


@triton.jit
def _reduce_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    target_logits: tl.tensor,
    stride: tl.int64,
    n_columns: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Store the max, the sum of exp(x - max) and the logit of the target of a row; 0 without a target."""
    index = tl.program_id(0).to(tl.int64)  # 16,384 rows of 262,144 logits exceed 2^31
    row = logits + index * stride
    target = tl.load(targets + index)
    inside = (target >= 0) & (target < n_columns)
    tl.store(target_logits + index, tl.load(row + target, mask=inside, other=0.0).to(tl.float32))
    peak, total = _reduce_row(row, n_columns, block)
    tl.store(peaks + index, peak)
    tl.store(totals + index, total)


@triton.jit
def _gradient_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    log_totals: tl.tensor,
    scales: tl.tensor,
    stride: tl.int64,
    has_scale: tl.constexpr,
    n_columns: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Overwrite a row by its gradient, given the log of the sum of exp(x) over the whole vocabulary."""
    index = tl.program_id(0).to(tl.int64)
    scale = tl.load(scales + index) if has_scale else 1.0
    target, log_total = tl.load(targets + index), tl.load(log_totals + index)
    _overwrite_row(logits + index * stride, target, log_total, scale, n_columns, block)


@triton.jit
def _nll_gradient_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    scales: tl.tensor,
    nats: tl.tensor,
    stride: tl.int64,
    has_scale: tl.constexpr,
    n_columns: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Store scale * nats of a row and overwrite the row by the gradient."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    scale = tl.load(scales + index) if has_scale else 1.0
    target = tl.load(targets + index)
    # before the row is overwritten
    inside = (target >= 0) & (target < n_columns)
    target_logit = tl.load(row + target, mask=inside, other=0.0).to(tl.float32)
    peak, total = _reduce_row(row, n_columns, block)
    log_total = peak + tl.log(total)
    tl.store(nats + index, tl.where(scale == 0.0, 0.0, (log_total - target_logit) * scale))
    tl.debug_barrier()  # every thread has read its part, and the target, before the first store
    _overwrite_row(row, target, log_total, scale, n_columns, block)


_OPERATORS = torch.library.Library("megatron", "FRAGMENT")
_OPERATORS.define("softmax_nll_gradient_(Tensor(a!) logits, Tensor targets, Tensor? scale) -> Tensor")
_OPERATORS.define(
    "softmax_gradient_(Tensor(a!) logits, Tensor targets, Tensor log_total, Tensor? scale) -> ()"
)
_OPERATORS.define("softmax_sums(Tensor logits, Tensor targets) -> (Tensor, Tensor, Tensor)")


def overwrite_with_gradient(logits: Tensor, targets: Tensor, scale: Tensor | None) -> Tensor:
    """Overwrite logits [N, V] by scale * (softmax - onehot) and return scale * nats, float32 [N].

    logits  [N, V]         rows contiguous
    targets [N] int64      column of each row, 0..V - 1
    scale   [N] float32    None: 1; 0 ignores a row: its loss and gradient are 0 whatever its logits are
    """
    return torch.ops.megatron.softmax_nll_gradient_(logits, targets, scale)


def overwrite_with_shard_gradient(
    logits: Tensor, targets: Tensor, log_total: Tensor, scale: Tensor | None
) -> None:
    """Overwrite logits [N, V] by scale * (exp(logits - log_total) - onehot).

    The columns may be part of a vocabulary: a target outside 0..V - 1 belongs to another part.
    """
    torch.ops.megatron.softmax_gradient_(logits, targets, log_total, scale)


def softmax_sums(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three float32 [N]: max of a row, sum of exp(x - max), and the logit of the target.

    The last is 0 for a target outside 0..V - 1.
    """
    return torch.ops.megatron.softmax_sums(logits, targets)


def _block_size(n_columns: int) -> int:
    return min(BLOCK, triton.next_power_of_2(n_columns))


def _run_nll_gradient(logits: Tensor, targets: Tensor, scale: Tensor | None) -> Tensor:
    n, n_columns = logits.shape
    nats = torch.empty(n, dtype=torch.float32, device=logits.device)
    if n:
        block = _block_size(n_columns)
        # without a scale any pointer is passed: the kernel does not read it
        scales = nats if scale is None else scale.float().contiguous()
        arguments = (logits, targets.contiguous(), scales, nats, logits.stride(0), scale is not None)
        _nll_gradient_kernel[(n,)](*arguments, n_columns, block, num_warps=N_WARPS)
    return nats


def _run_gradient(logits: Tensor, targets: Tensor, log_total: Tensor, scale: Tensor | None) -> None:
    n, n_columns = logits.shape
    if n:
        block = _block_size(n_columns)
        scales = log_total if scale is None else scale.float().contiguous()
        arguments = (logits, targets.contiguous(), log_total.contiguous(), scales, logits.stride(0))
        _gradient_kernel[(n,)](*arguments, scale is not None, n_columns, block, num_warps=N_WARPS)


def _run_sums(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n, n_columns = logits.shape
    peaks, totals, target_logits = torch.empty(3, n, dtype=torch.float32, device=logits.device).unbind()
    if n:
        block = _block_size(n_columns)
        arguments = (logits, targets.contiguous(), peaks, totals, target_logits, logits.stride(0))
        _reduce_kernel[(n,)](*arguments, n_columns, block, num_warps=N_WARPS)
    return peaks, totals, target_logits


def _fake_nll_gradient(logits: Tensor, targets: Tensor, scale: Tensor | None) -> Tensor:
    return torch.empty(len(logits), dtype=torch.float32, device=logits.device)


def _fake_sums(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    peaks, totals, target_logits = (_fake_nll_gradient(logits, targets, None) for _ in range(3))
    return peaks, totals, target_logits


for _name, _run in (
    ("softmax_nll_gradient_", _run_nll_gradient),
    ("softmax_gradient_", _run_gradient),
    ("softmax_sums", _run_sums),
):
    _OPERATORS.impl(_name, _run, "CompositeExplicitAutograd")
torch.library.register_fake("megatron::softmax_nll_gradient_", _fake_nll_gradient, lib=_OPERATORS)
torch.library.register_fake("megatron::softmax_gradient_", lambda *_: None, lib=_OPERATORS)
torch.library.register_fake("megatron::softmax_sums", _fake_sums, lib=_OPERATORS)
