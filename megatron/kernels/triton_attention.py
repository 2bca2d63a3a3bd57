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
import triton.language as tl
from torch import Tensor


@triton.jit
def _scramble(x: tl.tensor) -> tl.tensor:
    """Hash uint32 with the finalizer of MurmurHash3, as `dropout.scramble_bits`."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _hash_rows(
    keys: tl.tensor, pair: tl.tensor, queries: tl.tensor, n: tl.tensor, n_heads: tl.tensor
) -> tl.tensor:
    """Return the hash of (sample key, head and query) of queries; pair = sample * n_heads + head."""
    key = tl.load(keys + pair // n_heads).to(tl.uint32)  # the hash reads the low 32 bits
    return _scramble(key ^ _scramble(((pair % n_heads) * n + queries + 1).to(tl.uint32)))


@triton.jit
def _is_kept(row_hash: tl.tensor, keys: tl.tensor, threshold: tl.constexpr) -> tl.tensor:
    """Return which weights [queries, keys] to keep."""
    return _scramble(row_hash[:, None] + (keys + 1).to(tl.uint32)[None, :] * 0x9E3779B9) >= threshold


@triton.jit
def _load_rows(
    base: tl.tensor, rows: tl.tensor, n: tl.tensor, d_head: tl.constexpr, width: tl.constexpr
) -> tl.tensor:
    """Load rows of a contiguous [n, d_head], zeros outside, as [rows, width]."""
    channels = tl.arange(0, width)
    inside = (rows[:, None] < n) & (channels[None, :] < d_head)
    return tl.load(base + rows[:, None].to(tl.int64) * d_head + channels[None, :], mask=inside, other=0.0)


@triton.jit
def _store_rows(
    base: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    values: tl.tensor,
    d_head: tl.constexpr,
    width: tl.constexpr,
) -> None:
    channels = tl.arange(0, width)
    inside = (rows[:, None] < n) & (channels[None, :] < d_head)
    pointers = base + rows[:, None].to(tl.int64) * d_head + channels[None, :]
    tl.store(pointers, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _score(
    q: tl.tensor,
    k: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    n: tl.tensor,
    scale: tl.tensor,
    causal: tl.constexpr,
    has_documents: tl.constexpr,
    precision: tl.constexpr,
) -> tl.tensor:
    """Return scale q k^T [queries, keys], -Inf where a query does not see a key."""
    seen = (queries[:, None] < n) & (keys[None, :] < n)
    if causal:
        seen = seen & (queries[:, None] >= keys[None, :])
    if has_documents:
        seen = seen & (keys[None, :] >= first[:, None]) & (keys[None, :] <= last[:, None])
    scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale
    return tl.where(seen, scores, -float("inf"))


@triton.jit
def _forward_kernel(
    q_all: tl.tensor,
    k_all: tl.tensor,
    v_all: tl.tensor,
    out_all: tl.tensor,
    lse_all: tl.tensor,
    sample_keys: tl.tensor,
    firsts: tl.tensor,
    lasts: tl.tensor,
    n: tl.tensor,
    n_heads: tl.tensor,
    scale: tl.tensor,
    keep_factor: tl.tensor,
    causal: tl.constexpr,
    has_documents: tl.constexpr,
    threshold: tl.constexpr,
    d_head: tl.constexpr,
    width: tl.constexpr,
    precision: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    """Compute the output and the log-sum-exp of a block of queries of one head."""
    pair = tl.program_id(0)
    offset = pair.to(tl.int64) * n * d_head
    begin = tl.program_id(1) * block_q
    queries = begin + tl.arange(0, block_q)
    q = _load_rows(q_all + offset, queries, n, d_head, width)
    low = 0
    high = n
    first = queries
    last = queries
    if causal:
        high = tl.minimum(n, begin + block_q)
    if has_documents:
        documents = (pair // n_heads) * n
        first = tl.load(firsts + documents + queries, mask=queries < n, other=n)
        last = tl.load(lasts + documents + queries, mask=queries < n, other=-1)
        # documents are consecutive: the block sees keys from the start of its first to the end of its last
        low = tl.load(firsts + documents + begin) // block_k * block_k
        high = tl.minimum(high, tl.load(lasts + documents + tl.minimum(begin + block_q, n) - 1) + 1)
    if threshold > 0:
        row_hash = _hash_rows(sample_keys, pair, queries, n, n_heads)
    peak = tl.full([block_q], -float("inf"), tl.float32)
    total = tl.zeros([block_q], tl.float32)
    out = tl.zeros([block_q, width], tl.float32)
    for start in range(low, high, block_k):
        keys = start + tl.arange(0, block_k)
        k = _load_rows(k_all + offset, keys, n, d_head, width)
        v = _load_rows(v_all + offset, keys, n, d_head, width)
        scores = _score(q, k, queries, keys, first, last, n, scale, causal, has_documents, precision)
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # no visible key so far
        weights = tl.exp(scores - shift[:, None])
        decay = tl.exp(peak - shift)
        # the softmax is over all visible keys: its sum contains the dropped ones
        total = total * decay + tl.sum(weights, axis=1)
        if threshold > 0:
            weights = tl.where(_is_kept(row_hash, keys, threshold), weights, 0.0)
        out = out * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=precision)
        peak = new_peak
    total = tl.where(total == 0.0, 1.0, total)  # queries after the last position
    _store_rows(out_all + offset, queries, n, out * (keep_factor / total)[:, None], d_head, width)
    tl.store(lse_all + pair.to(tl.int64) * n + queries, peak + tl.log(total), mask=queries < n)


@triton.jit
def _query_gradient_kernel(
    q_all: tl.tensor,
    k_all: tl.tensor,
    v_all: tl.tensor,
    out_all: tl.tensor,
    grad_all: tl.tensor,
    lse_all: tl.tensor,
    delta_all: tl.tensor,
    grad_q_all: tl.tensor,
    sample_keys: tl.tensor,
    firsts: tl.tensor,
    lasts: tl.tensor,
    n: tl.tensor,
    n_heads: tl.tensor,
    scale: tl.tensor,
    keep_factor: tl.tensor,
    causal: tl.constexpr,
    has_documents: tl.constexpr,
    threshold: tl.constexpr,
    d_head: tl.constexpr,
    width: tl.constexpr,
    precision: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    """Compute delta = do . o and the gradient of a block of queries of one head."""
    pair = tl.program_id(0)
    offset = pair.to(tl.int64) * n * d_head
    begin = tl.program_id(1) * block_q
    queries = begin + tl.arange(0, block_q)
    rows = pair.to(tl.int64) * n + queries
    q = _load_rows(q_all + offset, queries, n, d_head, width)
    grad = _load_rows(grad_all + offset, queries, n, d_head, width)
    out = _load_rows(out_all + offset, queries, n, d_head, width)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), axis=1)
    tl.store(delta_all + rows, delta, mask=queries < n)
    lse = tl.load(lse_all + rows, mask=queries < n, other=float("inf"))
    low = 0
    high = n
    first = queries
    last = queries
    if causal:
        high = tl.minimum(n, begin + block_q)
    if has_documents:
        documents = (pair // n_heads) * n
        first = tl.load(firsts + documents + queries, mask=queries < n, other=n)
        last = tl.load(lasts + documents + queries, mask=queries < n, other=-1)
        low = tl.load(firsts + documents + begin) // block_k * block_k
        high = tl.minimum(high, tl.load(lasts + documents + tl.minimum(begin + block_q, n) - 1) + 1)
    if threshold > 0:
        row_hash = _hash_rows(sample_keys, pair, queries, n, n_heads)
    grad_q = tl.zeros([block_q, width], tl.float32)
    for start in range(low, high, block_k):
        keys = start + tl.arange(0, block_k)
        k = _load_rows(k_all + offset, keys, n, d_head, width)
        v = _load_rows(v_all + offset, keys, n, d_head, width)
        scores = _score(q, k, queries, keys, first, last, n, scale, causal, has_documents, precision)
        weights = tl.exp(scores - lse[:, None])
        grad_weights = tl.dot(grad, tl.trans(v), input_precision=precision)
        if threshold > 0:
            retained = _is_kept(row_hash, keys, threshold)
            grad_weights = tl.where(retained, grad_weights * keep_factor, 0.0)
        grad_scores = weights * (grad_weights - delta[:, None])
        grad_q += tl.dot(grad_scores.to(k.dtype), k, input_precision=precision)
    _store_rows(grad_q_all + offset, queries, n, grad_q * scale, d_head, width)


@triton.jit
def _key_gradient_kernel(
    q_all: tl.tensor,
    k_all: tl.tensor,
    v_all: tl.tensor,
    grad_all: tl.tensor,
    lse_all: tl.tensor,
    delta_all: tl.tensor,
    grad_k_all: tl.tensor,
    grad_v_all: tl.tensor,
    sample_keys: tl.tensor,
    firsts: tl.tensor,
    lasts: tl.tensor,
    n: tl.tensor,
    n_heads: tl.tensor,
    scale: tl.tensor,
    keep_factor: tl.tensor,
    causal: tl.constexpr,
    has_documents: tl.constexpr,
    threshold: tl.constexpr,
    d_head: tl.constexpr,
    width: tl.constexpr,
    precision: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    """Compute the gradients of a block of keys and values of one head."""
    pair = tl.program_id(0)
    offset = pair.to(tl.int64) * n * d_head
    begin = tl.program_id(1) * block_k
    keys = begin + tl.arange(0, block_k)
    k = _load_rows(k_all + offset, keys, n, d_head, width)
    v = _load_rows(v_all + offset, keys, n, d_head, width)
    documents = (pair // n_heads) * n
    low = 0
    high = n
    if causal:
        low = begin // block_q * block_q  # earlier queries see none of these keys
    if has_documents:
        # queries that see a key are in its document, as are the keys that a query sees
        low = tl.maximum(low, tl.load(firsts + documents + begin) // block_q * block_q)
        high = tl.load(lasts + documents + tl.minimum(begin + block_k, n) - 1) + 1
    grad_k = tl.zeros([block_k, width], tl.float32)
    grad_v = tl.zeros([block_k, width], tl.float32)
    for start in range(low, high, block_q):
        queries = start + tl.arange(0, block_q)
        rows = pair.to(tl.int64) * n + queries
        q = _load_rows(q_all + offset, queries, n, d_head, width)
        grad = _load_rows(grad_all + offset, queries, n, d_head, width)
        lse = tl.load(lse_all + rows, mask=queries < n, other=float("inf"))
        delta = tl.load(delta_all + rows, mask=queries < n, other=0.0)
        first = queries
        last = queries
        if has_documents:
            first = tl.load(firsts + documents + queries, mask=queries < n, other=n)
            last = tl.load(lasts + documents + queries, mask=queries < n, other=-1)
        scores = _score(q, k, queries, keys, first, last, n, scale, causal, has_documents, precision)
        weights = tl.exp(scores - lse[:, None])
        grad_weights = tl.dot(grad, tl.trans(v), input_precision=precision)
        dropped = weights
        if threshold > 0:
            retained = _is_kept(_hash_rows(sample_keys, pair, queries, n, n_heads), keys, threshold)
            grad_weights = tl.where(retained, grad_weights * keep_factor, 0.0)
            dropped = tl.where(retained, weights * keep_factor, 0.0)
        grad_v += tl.dot(tl.trans(dropped.to(grad.dtype)), grad, input_precision=precision)
        grad_scores = weights * (grad_weights - delta[:, None])
        grad_k += tl.dot(tl.trans(grad_scores.to(q.dtype)), q, input_precision=precision)
    _store_rows(grad_k_all + offset, keys, n, grad_k * scale, d_head, width)
    _store_rows(grad_v_all + offset, keys, n, grad_v, d_head, width)


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
    _forward_kernel[(n_samples * n_heads, triton.cdiv(n, blocks[0]))](
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
    _query_gradient_kernel[(pairs, triton.cdiv(n, blocks[0]))](
        q, k, v, out, grad, lse, delta, grad_q, key, **common
    )
    # after the kernel that stores delta
    _key_gradient_kernel[(pairs, triton.cdiv(n, blocks[1]))](
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
