"""Estimate of the memory that a run needs on one device, to choose microbatches and to pack runs."""

from megatron.config.schema import DistConfig, ModelConfig, RunConfig
from megatron.plan.count import n_non_embedding, n_params

PROCESS_BYTES = 0.6e9  # interpreter and libraries; on a GPU also the context and kernel workspaces
LOGITS_PER_CHUNK = 1 << 26  # logits of the loss in a GPU's memory at a time
CHUNK_COPIES = 3  # in float32, by the operations of the softmax and its gradient
ATTENTION_PER_BLOCK = 1 << 24  # attention weights that dropout has in memory at a time


def estimate_memory(
    config: RunConfig, n_ranks: int = 1, rows: int | None = None, compiled: bool = False
) -> float:
    """Return the bytes on one device of a run over `n_ranks` ranks.

    rows       samples per forward; None: dataset.microbatch_size,
               by default all samples of the rank
    compiled   whether the blocks are compiled; False gives an upper bound
    """
    activations = activation_bytes(config, n_ranks, rows, compiled)
    return _state_bytes(config, n_ranks) + activations + PROCESS_BYTES


def _count_data_ranks(config: RunConfig, n_ranks: int) -> int:
    dist = config.dist
    return max(1, n_ranks // (dist.tensor_parallel * dist.pipeline_parallel * dist.context_parallel))


def _head_bytes(model: ModelConfig, dist: DistConfig, tokens: float) -> float:
    """Return the bytes of the loss: a chunk of logits, and the gradients of the head and of its input."""
    logit_bytes = 4.0 if dist.dtype == "float32" else 2.0
    logits = min(tokens * model.vocab_rows, LOGITS_PER_CHUNK) * (logit_bytes + 4.0 * CHUNK_COPIES)
    # the forward computes both gradients, and the backward reads them; the
    # head's is float32
    return logits + logit_bytes * tokens * model.d_model + 4.0 * model.vocab_rows * model.d_model


def _state_bytes(config: RunConfig, n_ranks: int) -> float:
    """Return the bytes of float32 weights, gradients and moments, sharded by dist.sharding_stage."""
    dist = config.dist
    # tensor and pipeline ranks hold parts of the matrices
    n_cuts = dist.tensor_parallel * dist.pipeline_parallel
    n = n_params(config.model) / n_cuts
    # hybrid sharding: states are split within
    # a group and replicated across groups
    split = (
        dist.shard_size if "hybrid" in dist.sharding_stage and dist.shard_size else max(1, n_ranks // n_cuts)
    )
    # "zero3" and "zero3_hybrid": the digit is character 4
    stage = int(dist.sharding_stage[4])
    # AdamW in float32: 4 bytes for the weight, 4 for the gradient,
    # 8 for both moments. Example: N = 1e9 is 16 GB on one rank.
    # With zero1 on 8 ranks: 4 + 4 + 8/8 = 9 GB, and 2 GB of bfloat16 copies.
    weights, gradients, moments = (4.0 * n, 4.0 * n, 8.0 * n)
    # Muon has one moment of the matrices of blocks. Gains and
    # biases, with two, are a thousandth of the blocks.
    if config.optim.kind == "muon":
        moments -= 4.0 * n_non_embedding(config.model) / n_cuts
    moments += 0.0 if config.optim.ema_decay is None else 4.0 * n  # the average is sharded as the moments
    # ZeRO stages are cumulative: 1 shards moments,
    # 2 also gradients, 3 also weights
    if stage >= 1:
        moments /= split
    if stage >= 2:
        gradients /= split
    if stage >= 3:
        weights /= split
    cast = 0.0 if dist.dtype == "float32" else 2.0 * n  # low-precision copies for the matrix products
    if stage >= 3 and cast:
        # gathered for two blocks at a time,
        # and the embedding for the whole forward
        embedding = 2.0 * config.model.vocab_rows * config.model.d_model / n_cuts
        cast = embedding + (cast - embedding) * min(1.0, 2 / config.model.n_layers)
    return weights + gradients + moments + cast


def activation_bytes(
    config: RunConfig, n_ranks: int = 1, rows: int | None = None, compiled: bool = False
) -> float:
    """Return the bytes that the backward pass of one microbatch reads: saved tensors of blocks and head."""
    model, dist = config.model, config.dist
    share = max(1, config.dataset.batch_size // _count_data_ranks(config, n_ranks))
    # without microbatches all samples of the rank are in one pass
    rows = min(rows or config.dataset.microbatch_size or share, share)
    # positions are split over context ranks;
    # outside of the products also over tensor ranks
    tokens = rows * config.dataset.seq_len / (dist.tensor_parallel * dist.context_parallel)
    per_block = block_bytes(model, dist, compiled)
    per_token = model.n_layers * per_block
    if dist.activation_checkpointing == "full":
        # inputs of all blocks, and the tensors of one recomputed block
        per_token = model.n_layers * stream_bytes(dist) * model.d_model + block_bytes(model, dist)
    # outside the blocks: two float32 vectors of width d_model per token
    blocks = tokens * (per_token + 8.0 * model.d_model)
    return blocks + dropout_bytes(config, rows) + _head_bytes(model, dist, tokens)


def stream_bytes(dist: DistConfig) -> float:
    """Return the bytes of an element of the residual stream."""
    return 4.0 if (dist.residual_dtype or dist.dtype) == "float32" else 2.0


def block_bytes(model: ModelConfig, dist: DistConfig, compiled: bool = False) -> float:
    """Return the bytes per token that one block saves for its backward pass.

    In float32: 4 vectors each of width d_model, n_heads * d_head and d_ff. In
    half precision the vectors take 2 bytes per element, but norms read their
    input in float32. The compiler recomputes what is cheap: it saves the
    residual stream instead of a copy, and one vector of width d_ff less.
    """
    # Example in float32: D = H K = 768 and F = 2,048 give
    # 12,288 + 12,288 + 32,768 = 57,344 bytes per token
    # and block. 12 blocks at 8,192 tokens: 5.6 GB.
    heads = model.n_heads * model.d_head
    if dist.dtype == "float32":
        return 16.0 * (model.d_model + heads + model.d_ff)
    if compiled:
        # twice the stream, and the results of two norms; q, k, v and the
        # attended values; gate, up, product
        return (2 * stream_bytes(dist) + 4.0) * model.d_model + 8.0 * heads + 6.0 * model.d_ff
    return 12.0 * model.d_model + 8.0 * heads + 8.0 * model.d_ff


def dropout_bytes(config: RunConfig, rows: int) -> float:
    """Return the bytes that attention dropout saves for the backward, or the bytes of a block of queries."""
    if config.model.attention_dropout == 0:
        return 0.0
    # per weight: the softmax in float32, whether it is kept, and the operand
    # of the product with the values
    weight_bytes = 4.0 + 1.0 + (4.0 if config.dist.dtype == "float32" else 2.0)
    n_weights = float(rows) * config.model.n_heads * config.dataset.seq_len**2
    if n_weights > ATTENTION_PER_BLOCK:  # the backward computes each block again
        return ATTENTION_PER_BLOCK * weight_bytes
    n_layers = 1 if config.dist.activation_checkpointing == "full" else config.model.n_layers
    return n_layers * n_weights * weight_bytes
