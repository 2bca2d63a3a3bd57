"""Attention on a GPU with dropout keyed by the sample and with documents, without S x S tensors (Triton).

The algorithm is FlashAttention 2 (Dao, arXiv 2307.08691): blocks of queries against blocks of keys with an
online softmax; the backward recomputes the weights. Which weights are dropped is a hash of (sample key, head,
query, key), the one of `kernels/dropout.py`, computed again in each pass instead of being stored. Blocks of
keys outside the documents of a block of queries are skipped.

With w = softmax(scale q k^T), keep factors z in {0, 1 / (1 - rate)} and o = (w z) v:
dv = (w z)^T do,  dw = z (do v^T),  ds = w (dw - delta) with delta = rowsum(w dw) = do . o.

Operators, CUDA graphs and the interpreter: as in `triton_softmax`.
"""

from typing import Any, NoReturn

import torch
import triton
from torch import Tensor

from megatron.kernels.triton_attention_kernels import (
    forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)

_OPERATORS = torch.library.Library("megatron", "FRAGMENT")
_OPTIONS = "Tensor key, Tensor? first, Tensor? last, bool causal, float scale, float rate"
_OPERATORS.define(f"triton_attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
_OPERATORS.define(
    "triton_attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor grad, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    causal: bool,
    scale: float,
    rate: float,
) -> Tensor:
    """Return attention with dropout after the softmax; q, k, v and the result [B, H, S, K], K <= 256.

    key         [B] int64      key of each sample, of which the low 32 bits are used; not read for rate 0
    first, last [B, S] int32   first and last position of the document of each position; None: one document
    """
    return torch.ops.megatron.triton_attention(q, k, v, key, first, last, causal, scale, rate)[0]


def _choose_blocks(q: Tensor, backward: bool) -> tuple[int, int]:
    """Return (queries, keys) of a block, so that operands and results fit in registers and shared memory."""
    bytes_of_row = _pad_channels(q) * q.element_size()
    if backward and q.element_size() == 4 and bytes_of_row >= 256:
        # Larger blocks of float32 exceed the registers of a Hopper: 1.3 KB of stack per thread at 64 channels
        # with 64 x 64, and 5.8 KB at 128 with 32 x 32. These have 88 bytes, and none; 5.8 KB at 256 channels.
        return (32, 64) if bytes_of_row == 256 else (16, 32)
    if bytes_of_row <= 256:  # bfloat16 heads of up to 128, float32 heads of up to 64
        return (64, 64) if backward else (128, 64)
    return (64, 32) if bytes_of_row <= 512 and not backward else (32, 32)


def _pad_channels(q: Tensor) -> int:
    """Return the width of a head in a kernel: powers of two from 16, the smallest of a matrix product."""
    return max(16, triton.next_power_of_2(q.shape[3]))


def _common_arguments(
    q: Tensor, first: Tensor | None, last: Tensor | None, causal: bool, scale: float, rate: float, blocks: Any
) -> dict[str, Any]:
    """Return the arguments that the three kernels share."""
    has_documents = first is not None and last is not None
    # for float32: three TF32 products have nearly its accuracy and run on the tensor cores of NVIDIA
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"
    precision = "ieee" if torch.version.hip else precision
    return {
        # without documents any pointer is passed: the kernel does not read it
        "firsts": first.contiguous() if first is not None else q,
        "lasts": last.contiguous() if last is not None else q,
        "n": q.shape[2],
        "n_heads": q.shape[1],
        "scale": scale,
        "keep_factor": 1.0 / (1.0 - rate),
        "causal": causal,
        "has_documents": has_documents,
        "threshold": round(rate * 2**32),
        "d_head": q.shape[3],
        "width": _pad_channels(q),
        "precision": precision,
        "block_q": blocks[0],
        "block_k": blocks[1],
        "num_warps": 8 if _pad_channels(q) >= 128 or blocks[0] * blocks[1] >= 8192 else 4,
        "num_stages": 2,
    }


def _run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    causal: bool,
    scale: float,
    rate: float,
) -> tuple[Tensor, Tensor]:
    q, k, v = (x.contiguous() for x in (q, k, v))
    n_samples, n_heads, n, _ = q.shape
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    blocks = _choose_blocks(q, backward=False)
    common = _common_arguments(q, first, last, causal, scale, rate, blocks)
    # pairs on the first axis: the others are limited to 65,535 programs
    forward_kernel[(n_samples * n_heads, triton.cdiv(n, blocks[0]))](
        q, k, v, out, lse, key.contiguous(), **common
    )
    return out, lse


def _run_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    key: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    causal: bool,
    scale: float,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, grad = (x.contiguous() for x in (q, k, v, out, grad))
    n_samples, n_heads, n, _ = q.shape
    grad_q, grad_k, grad_v, delta = (torch.empty_like(x) for x in (q, k, v, lse))
    blocks = _choose_blocks(q, backward=True)
    common = _common_arguments(q, first, last, causal, scale, rate, blocks)
    key = key.contiguous()
    pairs = n_samples * n_heads
    query_gradient_kernel[(pairs, triton.cdiv(n, blocks[0]))](
        q, k, v, out, grad, lse, delta, grad_q, key, **common
    )
    # after the kernel that stores delta
    key_gradient_kernel[(pairs, triton.cdiv(n, blocks[1]))](
        q, k, v, grad, lse, delta, grad_k, grad_v, key, **common
    )
    return grad_q, grad_k, grad_v


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    contiguous = q.new_empty(q.shape)
    return contiguous, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _fake_backward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, key, first, last, ctx.causal, ctx.scale, ctx.rate = inputs
    ctx.save_for_backward(q, k, v, *output, key, first, last)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, key, first, last = ctx.saved_tensors
    gradients = torch.ops.megatron.triton_attention_backward(
        q, k, v, out, lse, grad, key, first, last, ctx.causal, ctx.scale, ctx.rate
    )
    return *gradients, *(None,) * 6


def _refuse_double_backward(ctx: Any, *_: Tensor) -> NoReturn:
    raise RuntimeError("triton_attention: its gradient has no gradient. Use torch's attention instead.")


_OPERATORS.impl("triton_attention", _run_forward, "CompositeExplicitAutograd")
_OPERATORS.impl("triton_attention_backward", _run_backward, "CompositeExplicitAutograd")
torch.library.register_fake("megatron::triton_attention", _fake_forward, lib=_OPERATORS)
torch.library.register_fake("megatron::triton_attention_backward", _fake_backward, lib=_OPERATORS)
torch.library.register_autograd(
    "megatron::triton_attention", _autograd_backward, setup_context=_setup_context, lib=_OPERATORS
)
torch.library.register_autograd(
    "megatron::triton_attention_backward", _refuse_double_backward, lib=_OPERATORS
)
