"""Kernels of `triton_attention`: forward, gradient of the queries, gradients of the keys and values."""

import triton
import triton.language as tl


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
def forward_kernel(
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
def query_gradient_kernel(
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
def key_gradient_kernel(
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
