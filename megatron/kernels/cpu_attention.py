"""Attention with gradients on a CPU, faster than torch's kernel for windows of up to 512 tokens.

In float32 the C++ kernel csrc/short_attention.h processes one head of one
sample at a time. At 128 positions and heads of 8 to 32 it took 0.15 to 0.6
of the time of torch's kernel; at 512 positions and heads of 64 it took half.

In bfloat16 each block of queries is multiplied by its visible keys with one BLAS
product, a few samples at a time, so that the scores stay in the cache.
torch's kernel (2.13) multiplies small tiles itself and processes 512 keys even
if most are masked. As in torch's kernel, scores and their gradients are float32
for every input dtype, and the other operand of each product has the input dtype.

The backward recomputes the weights (Dao et al., arXiv 2205.14135): no S x S
tensor is stored. Forward and backward are registered with torch's dispatcher.
Dispatch modes such as selective recomputation therefore handle each as a single operation.
"""

from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from megatron import _csrc

QUERY_BLOCK = 128  # per block: small enough to skip many masked keys, large enough for an efficient product
MAX_POSITIONS = 512  # above this torch's kernel is as fast or faster
MAX_SCORES = 1 << 19  # float32 scores in memory at a time: 2 MiB, the L2 caches of two cores


def is_cpu_attention_faster(q: Tensor, k: Tensor) -> bool:
    """Return whether `cpu_attention` is faster than torch's kernel for queries and keys [B, H, S, K]."""
    if torch.compiler.is_compiling() or q.device.type != "cpu" or not torch.is_grad_enabled():
        return False
    if torch.is_autocast_enabled("cpu") and q.dtype != torch.get_autocast_dtype("cpu"):
        return False  # autocast would cast the inputs of torch's kernel first
    return q.shape == k.shape and q.shape[2] <= MAX_POSITIONS and q.dtype in (torch.float32, torch.bfloat16)


# torch.library.custom_op would import torch's compiler
# at the first call, which takes about a second
_OPERATORS = torch.library.Library("megatron", "DEF")
_OPERATORS.define("cpu_attention(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> Tensor")
_OPERATORS.define(
    "cpu_attention_backward(Tensor q, Tensor k, Tensor v, Tensor grad, bool causal, float scale) "
    "-> (Tensor, Tensor, Tensor)"
)


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """Return softmax(scale q k^T) v; q, k, v and the result [B, H, S, K]; causal: p attends to 0..p."""
    return torch.ops.megatron.cpu_attention(q, k, v, causal, scale)


def _run_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    # autocast would cast the operands of torch.bmm: the
    # scores of bfloat16 inputs are float32 products
    with torch.autocast("cpu", enabled=False):
        return _compute_attention(q, k, v, causal, scale)


def _compute_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    output = _like_heads(q)
    if q.dtype == torch.float32:
        _csrc.short_attention(
            _as_array(q), _as_array(k), _as_array(v), causal, scale, output.numpy(), torch.get_num_threads()
        )
        return output
    scores = _allocate_scores(q)
    # tiles: some samples x one block of queries x
    # the visible keys, [b H, n, n_seen] scores each
    for part in _split_samples(q):
        # scaling q costs S K products per head, scaling the scores would cost S^2
        queries, keys = _flatten_heads(q[part]).float() * scale, _flatten_heads(k[part]).float()
        values, out = _flatten_heads(v[part]), output[part]
        for rows, n_seen in _split_queries(q, causal):
            # the softmax is float32; P is rounded to
            # the input dtype only as an operand of P V
            weights = _compute_weights(queries[:, rows], keys[:, :n_seen], causal, scores).to(q.dtype)
            # [b H, n, n_seen] @ [b H, n_seen, K]
            # -> [b H, n, K], seen as [b, H, n, K]
            out[:, :, rows] = torch.bmm(weights, values[:, :n_seen]).view_as(out[:, :, rows])
    return output


def _run_backward(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for the gradient of the result; all [B, H, S, K]."""
    with torch.autocast("cpu", enabled=False):
        return _compute_gradients(q, k, v, grad, causal, scale)


def _compute_gradients(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = _like_heads(q), _like_heads(q), _like_heads(q)
    if q.dtype == torch.float32:
        _csrc.short_attention_backward(
            _as_array(q),
            _as_array(k),
            _as_array(v),
            _as_array(grad),
            causal,
            scale,
            grad_q.numpy(),
            grad_k.numpy(),
            grad_v.numpy(),
            torch.get_num_threads(),
        )
        return grad_q, grad_k, grad_v
    # P and dP of one block of queries; P is recomputed
    # from q and k, so the forward saves its inputs only
    scores, grad_scores = _allocate_scores(q), _allocate_scores(q)
    for part in _split_samples(q):
        queries, keys, values, grads = (_flatten_heads(of[part]).float() for of in (q, k, v, grad))
        queries = queries * scale
        # dK and dV of one key are sums over all blocks
        # of queries that see it, accumulated in float32
        grad_kv = torch.zeros_like(keys), torch.zeros_like(values)
        # operands in the input dtype; the products themselves accumulate in float32
        factors = [of.to(q.dtype) for of in (queries, keys, grads)]
        out = grad_q[part]
        for rows, n_seen in _split_queries(q, causal):
            weights = _compute_weights(queries[:, rows], keys[:, :n_seen], causal, scores)
            grad_block = grad_scores[: weights.numel()].view_as(weights)
            # dP = dO V^T, then dS = P (dP - rowsum(dP P)) in place
            torch.bmm(grads[:, rows], values[:, :n_seen].transpose(1, 2), out=grad_block)
            _backprop_softmax(grad_block, weights)
            grad_block, weights = grad_block.to(q.dtype), weights.to(q.dtype)
            # dQ = dS K is complete with this block. dK +=
            # dS^T Q and dV += P^T dO over its visible keys.
            out[:, :, rows] = torch.bmm(grad_block, factors[1][:, :n_seen]).view_as(out[:, :, rows])
            _add_product(grad_kv[0][:, :n_seen], grad_block.transpose(1, 2), factors[0][:, rows])
            _add_product(grad_kv[1][:, :n_seen], weights.transpose(1, 2), factors[2][:, rows])
        grad_k[part], grad_v[part] = (of.view_as(out) for of in grad_kv)
    # dK used the scaled queries already; dQ is scaled once at the end
    return grad_q.mul_(scale), grad_k, grad_v


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool, float], output: Tensor) -> None:
    *tensors, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _autograd_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    gradients = torch.ops.megatron.cpu_attention_backward(*ctx.saved_tensors, grad, ctx.causal, ctx.scale)
    return *gradients, None, None


def _refuse_double_backward(ctx: Any, *_: Tensor) -> NoReturn:
    raise RuntimeError("cpu_attention: its gradient has no gradient. Use torch's attention instead.")


_OPERATORS.impl("cpu_attention", _run_forward, "CPU")
_OPERATORS.impl("cpu_attention_backward", _run_backward, "CPU")
torch.library.register_autograd(
    "megatron::cpu_attention", _autograd_backward, setup_context=_setup_context, lib=_OPERATORS
)
torch.library.register_autograd("megatron::cpu_attention_backward", _refuse_double_backward, lib=_OPERATORS)


def _as_array(heads: Tensor) -> np.ndarray:
    """Return heads as the C++ kernel reads them: each row of K contiguous, other strides arbitrary."""
    return (heads if heads.stride(-1) == 1 else heads.contiguous()).detach().numpy()


def _like_heads(q: Tensor) -> Tensor:
    """Return an empty [B, H, S, K] tensor stored as [B, S, H, K], the layout of the adjacent projections."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)


def _samples_per_pass(q: Tensor) -> int:
    """Return the number of samples processed at a time, so that their scores fit in MAX_SCORES."""
    # 12 heads and 512 positions:
    # 12 x 128 x 512 = 786,432 > MAX_SCORES,
    # so one sample at a time. 4 heads and 256 positions:
    # 4 x 128 x 256 = 131,072, so four samples.
    return max(1, min(len(q), MAX_SCORES // (q.shape[1] * min(QUERY_BLOCK, q.shape[2]) * q.shape[2])))


def _allocate_scores(q: Tensor) -> Tensor:
    """Return a flat buffer for the scores of one block.

    Allocating it per block costs as much as filling it.
    """
    return q.new_empty(
        _samples_per_pass(q) * q.shape[1] * min(QUERY_BLOCK, q.shape[2]) * q.shape[2], dtype=torch.float32
    )


def _split_samples(q: Tensor) -> Iterator[slice]:
    """Return slices of the batch, `_samples_per_pass` samples each."""
    n = _samples_per_pass(q)
    return (slice(begin, begin + n) for begin in range(0, len(q), n))


def _split_queries(q: Tensor, causal: bool) -> Iterator[tuple[slice, int]]:
    """Yield the queries of each block and the number of leading keys visible to them.

    In causal attention the last query of a block, position end - 1, attends to keys
    0..end - 1. Keys after that are masked for the whole block and are skipped.
    """
    n = q.shape[2]
    for begin in range(0, n, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, n)
        yield slice(begin, end), end if causal else n


def _flatten_heads(heads: Tensor) -> Tensor:
    """Reshape [B, H, S, K] -> [B * H, S, K]."""
    return heads.reshape(-1, *heads.shape[2:])


def _compute_weights(queries: Tensor, keys: Tensor, causal: bool, buffer: Tensor) -> Tensor:
    """Return the attention weights of a block of queries [B * H, n, n_seen], computed inside `buffer`.

    If causal, the last key is at the position of the last query.
    """
    n, n_seen = queries.shape[1], keys.shape[1]
    scores = buffer[: len(queries) * n * n_seen].view(len(queries), n, n_seen)
    torch.bmm(queries, keys.transpose(1, 2), out=scores)
    if causal:
        # only the last n x n tile crosses the diagonal; earlier keys are
        # visible to every query of the block triu_(1) sets the diagonal
        # and everything below to 0: for n = 2 it adds [[0, -Inf], [0, 0]]
        scores[:, :, n_seen - n :] += scores.new_full((n, n), -torch.inf).triu_(1)
    return torch.softmax(scores, -1, out=scores)


def _backprop_softmax(grads: Tensor, weights: Tensor) -> None:
    """Turn the gradient of the weights into the gradient of the scores, in place.

    With weights p = softmax(s) and gradient dp: ds = p (dp - sum(dp p)), the sum over keys.
    """
    grads -= torch.linalg.vecdot(grads, weights)[..., None]
    grads *= weights


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to the float32 `total`; left and right may have lower precision."""
    if left.dtype == torch.float32:
        total.baddbmm_(left, right)
    else:
        total += torch.bmm(left, right)
