"""Attention with gradients on a CPU, faster than torch's own kernel for windows of up to 512 tokens.

In float32 a kernel of ours (csrc/short_attention.cpp) works on one head of one sample at a time: at 128
positions and heads of 8 to 32 it took 0.15 to 0.6 of the time of torch's kernel, at 512 and 64 a half.

In bfloat16 blocks of queries are multiplied by the keys that they may see, as whole products of the library
for matrices, a few samples at a time so that the scores stay in the caches; torch's kernel (2.13) multiplies
small tiles itself and reads 512 keys whatever is hidden. As in torch's kernel scores and their gradients are
float32 whatever the inputs are, and what they are multiplied by is as the inputs are.

The backward computes the weights again (Dao et al., arXiv 2205.14135): nothing of S x S is kept.
Both directions are operators of torch's dispatcher, so that what goes through it (selective recomputation)
sees one operation.
"""

from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from megatron import _csrc

QUERIES = 128  # in a block: few enough to skip much, enough to fill a product
LONGEST = 512  # positions; beyond, torch's kernel is as fast or faster
SCORES = 1 << 19  # float32 held at a time: the second caches of two cores


def is_worth_it(q: Tensor, k: Tensor) -> bool:
    """Whether `cpu_attention` is the faster for queries and keys [B, H, S, K]."""
    if torch.compiler.is_compiling() or q.device.type != "cpu" or not torch.is_grad_enabled():
        return False
    if torch.is_autocast_enabled("cpu") and q.dtype != torch.get_autocast_dtype("cpu"):
        return False  # torch's kernel is given them as autocast wants them
    return q.shape == k.shape and q.shape[2] <= LONGEST and q.dtype in (torch.float32, torch.bfloat16)


# torch.library.custom_op would import torch's compiler at the first call: a second of a process
_OPERATORS = torch.library.Library("megatron", "DEF")
_OPERATORS.define("cpu_attention(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> Tensor")
_OPERATORS.define(
    "cpu_attention_backward(Tensor q, Tensor k, Tensor v, Tensor grad, bool causal, float scale) "
    "-> (Tensor, Tensor, Tensor)"
)


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """softmax(scale q k^T) v; q, k, v and the result [B, H, S, K]; causal: position p sees 0..p."""
    return torch.ops.megatron.cpu_attention(q, k, v, causal, scale)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return _mix(q, k, v, causal, scale)


def _mix(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    mixed = _like_heads(q)
    if q.dtype == torch.float32:
        given = (_array(of) for of in (q, k, v))
        _csrc.short_attention(*given, causal, scale, mixed.numpy(), torch.get_num_threads())
        return mixed
    scores = _held(q)
    for part in _parts(q):
        queries, keys = _rows(q[part]).float() * scale, _rows(k[part]).float()
        values, out = _rows(v[part]), mixed[part]
        for rows, n_seen in _blocks(q, causal):
            weights = _weights(queries[:, rows], keys[:, :n_seen], causal, scores).to(q.dtype)
            out[:, :, rows] = torch.bmm(weights, values[:, :n_seen]).view_as(out[:, :, rows])
    return mixed


def _backward(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, given that of the result; all [B, H, S, K]."""
    with torch.autocast("cpu", enabled=False):
        return _unmix(q, k, v, grad, causal, scale)


def _unmix(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = _like_heads(q), _like_heads(q), _like_heads(q)
    if q.dtype == torch.float32:
        given = (_array(of) for of in (q, k, v, grad))
        gradients = (of.numpy() for of in (grad_q, grad_k, grad_v))
        _csrc.short_attention_backward(*given, causal, scale, *gradients, torch.get_num_threads())
        return grad_q, grad_k, grad_v
    scores, grad_scores = _held(q), _held(q)
    for part in _parts(q):
        queries, keys, values, grads = (_rows(of[part]).float() for of in (q, k, v, grad))
        queries = queries * scale
        sums = torch.zeros_like(keys), torch.zeros_like(values)
        factors = [of.to(q.dtype) for of in (queries, keys, grads)]
        out = grad_q[part]
        for rows, n_seen in _blocks(q, causal):
            weights = _weights(queries[:, rows], keys[:, :n_seen], causal, scores)
            slopes = grad_scores[: weights.numel()].view_as(weights)
            torch.bmm(grads[:, rows], values[:, :n_seen].transpose(1, 2), out=slopes)
            _through_softmax(slopes, weights)
            slopes, weights = slopes.to(q.dtype), weights.to(q.dtype)
            out[:, :, rows] = torch.bmm(slopes, factors[1][:, :n_seen]).view_as(out[:, :, rows])
            _add_product(sums[0][:, :n_seen], slopes.transpose(1, 2), factors[0][:, rows])
            _add_product(sums[1][:, :n_seen], weights.transpose(1, 2), factors[2][:, rows])
        grad_k[part], grad_v[part] = (of.view_as(out) for of in sums)
    return grad_q.mul_(scale), grad_k, grad_v


def _keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    gradients = torch.ops.megatron.cpu_attention_backward(*ctx.saved_tensors, grad, ctx.causal, ctx.scale)
    return *gradients, None, None


def _refuse(ctx: Any, *_: Tensor) -> NoReturn:
    raise RuntimeError("cpu_attention: its gradient has no gradient; torch's attention has one")


_OPERATORS.impl("cpu_attention", _forward, "CPU")
_OPERATORS.impl("cpu_attention_backward", _backward, "CPU")
torch.library.register_autograd(
    "megatron::cpu_attention", _differentiate, setup_context=_keep, lib=_OPERATORS
)
torch.library.register_autograd("megatron::cpu_attention_backward", _refuse, lib=_OPERATORS)


def _array(heads: Tensor) -> np.ndarray:
    """Heads as the kernel reads them: rows of K in one piece."""
    return (heads if heads.stride(-1) == 1 else heads.contiguous()).detach().numpy()


def _like_heads(q: Tensor) -> Tensor:
    """An empty [B, H, S, K] that lies in memory as [B, S, H, K], which is how its neighbours want it."""
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)


def _samples(q: Tensor) -> int:
    """How many samples are worked on at a time."""
    return max(1, min(len(q), SCORES // (q.shape[1] * min(QUERIES, q.shape[2]) * q.shape[2])))


def _held(q: Tensor) -> Tensor:
    """Memory for the scores of one block, flat: asking for it each time costs as much as filling it."""
    return q.new_empty(_samples(q) * q.shape[1] * min(QUERIES, q.shape[2]) * q.shape[2], dtype=torch.float32)


def _parts(q: Tensor) -> Iterator[slice]:
    """Samples, some at a time."""
    n = _samples(q)
    return (slice(begin, begin + n) for begin in range(0, len(q), n))


def _blocks(q: Tensor, causal: bool) -> Iterator[tuple[slice, int]]:
    """The queries of each block, and how many keys, from the first on, they see."""
    n = q.shape[2]
    for begin in range(0, n, QUERIES):
        end = min(begin + QUERIES, n)
        yield slice(begin, end), end if causal else n


def _rows(heads: Tensor) -> Tensor:
    """[B, H, S, K] -> [B * H, S, K]."""
    return heads.reshape(-1, *heads.shape[2:])


def _weights(queries: Tensor, keys: Tensor, causal: bool, held: Tensor) -> Tensor:
    """Attention weights of a block of queries, in `held`; causal: the last key is the last query's own."""
    n, n_seen = queries.shape[1], keys.shape[1]
    scores = held[: len(queries) * n * n_seen].view(len(queries), n, n_seen)
    torch.bmm(queries, keys.transpose(1, 2), out=scores)
    if causal:
        scores[:, :, n_seen - n :] += scores.new_full((n, n), -torch.inf).triu_(1)
    return torch.softmax(scores, -1, out=scores)


def _through_softmax(slopes: Tensor, weights: Tensor) -> None:
    """From the gradient of the weights to that of the scores, in place."""
    slopes -= torch.linalg.vecdot(slopes, weights)[..., None]
    slopes *= weights


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, total float32, the others maybe not."""
    if left.dtype == torch.float32:
        total.baddbmm_(left, right)
    else:
        total += torch.bmm(left, right)
