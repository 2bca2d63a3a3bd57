"""Estimate of the memory that a run needs on one device, for packing runs onto devices."""

from megatron.config.schema import DistConfig, ModelConfig, RunConfig
from megatron.plan.count import n_params

PROCESS_BYTES = 0.6e9  # interpreter and libraries; on a GPU also the context and kernel workspaces
# Logits in memory at a time on a GPU, overwritten by their gradient: 2 GiB in half precision. More rows would
# not make the products faster, fewer than MIN_HEAD_ROWS leave multiprocessors idle.
MAX_LOGITS = 1 << 30
MIN_HEAD_ROWS, MAX_HEAD_ROWS = 8192, 16384
LARGE_DROPOUT_BYTES = 1e9  # of a sample, from which a run is warned
MAX_FUSED_D_HEAD = 256  # of the attention kernel with dropout on a GPU


def estimate_memory(config: RunConfig, n_ranks: int = 1) -> float:
    """Return the bytes on one device of a run over `n_ranks` data-parallel ranks."""
    return _state_bytes(config, n_ranks) + activation_bytes(config, n_ranks) + PROCESS_BYTES


def count_head_rows(vocab_rows: int) -> int:
    """Return the maximum rows of logits in memory at a time on a GPU, a multiple of 128."""
    # V = 50,304: 16,384 rows, 1.6 GB in bfloat16. V = 131,072: 8,192 rows, 2.1 GB.
    rows = MAX_LOGITS // vocab_rows // 128 * 128
    return max(MIN_HEAD_ROWS, min(rows, MAX_HEAD_ROWS))


def _head_bytes(model: ModelConfig, dist: DistConfig, tokens: int) -> float:
    """Return the bytes of the loss: a chunk of logits, and the gradient of the head's input."""
    logit_bytes = 4.0 if dist.dtype == "float32" else 2.0
    logits = min(tokens, count_head_rows(model.vocab_rows)) * model.vocab_rows * logit_bytes
    return logits + logit_bytes * tokens * model.d_model


def _state_bytes(config: RunConfig, n_ranks: int) -> float:
    """Return the bytes of float32 weights, gradients and AdamW moments, sharded by dist.sharding_stage."""
    n, dist = n_params(config.model), config.dist
    # hybrid sharding: states are split within a group and replicated across groups
    split = dist.shard_size if "hybrid" in dist.sharding_stage and dist.shard_size else n_ranks
    # "zero3" and "zero3_hybrid": the digit is character 4
    stage = int(dist.sharding_stage[4])
    # AdamW in float32: 4 bytes for the weight, 4 for the gradient, 8 for both moments
    # Example: N = 1e9 is 16 GB on one rank. With zero1 on 8 ranks: 4 + 4 + 8/8 = 9 GB, and 2 GB of bfloat16
    # copies.
    weights, gradients, moments = (4.0 * n, 4.0 * n, 8.0 * n)
    # ZeRO stages are cumulative: 1 shards moments, 2 also gradients, 3 also weights
    if stage >= 1:
        moments /= split
    if stage >= 2:
        gradients /= split
    if stage >= 3:
        weights /= split
    cast = 0.0 if dist.dtype == "float32" else 2.0 * n  # low-precision copies for the matrix products
    return weights + gradients + moments + cast


def activation_bytes(config: RunConfig, n_ranks: int = 1) -> float:
    """Return the bytes that the backward pass of one microbatch reads: saved tensors of blocks and head."""
    share = max(1, config.dataset.batch_size // n_ranks)
    # without microbatches all samples of the rank are in one pass
    rows = min(config.dataset.microbatch_size or share, share)
    tokens = rows * config.dataset.seq_len
    model, dist = config.model, config.dist
    per_block = block_bytes(model, dist)
    per_token = model.n_layers * per_block
    if (
        dist.activation_checkpointing == "full"
    ):  # inputs of all blocks, and the tensors of one recomputed block
        per_token = model.n_layers * 4.0 * model.d_model + per_block
    # outside the blocks: two float32 vectors of width d_model per token
    return tokens * (per_token + 8.0 * model.d_model) + _head_bytes(model, dist, tokens)


def block_bytes(model: ModelConfig, dist: DistConfig) -> float:
    """Return the bytes per token that one block saves for its backward pass.

    In float32: 2 vectors of width d_model, 6 of width n_heads * d_head, and 4 of width d_ff. Under autocast,
    those of heads and feed-forward take 2 bytes per element, and norms save both precisions.
    """
    # Example in float32: D = H K = 768 and F = 2,048 give 6,144 + 18,432 + 32,768 = 57,344 bytes per token
    # and block. 12 blocks at 8,192 tokens: 5.6 GB.
    heads = model.n_heads * model.d_head
    if dist.dtype == "float32":
        return 8.0 * model.d_model + 24.0 * heads + 16.0 * model.d_ff
    return 14.0 * model.d_model + 12.0 * heads + 8.0 * model.d_ff


def dense_dropout_bytes(config: RunConfig) -> float:
    """Return the bytes that a sample saves for the backward of attention dropout without a fused kernel."""
    # per weight: the softmax in float32, whether it is kept, and the operand of the product with the values
    weight_bytes = 4.0 + 1.0 + (4.0 if config.dist.dtype == "float32" else 2.0)
    n_weights = float(config.model.n_heads) * config.dataset.seq_len**2
    n_layers = 1 if config.dist.activation_checkpointing == "full" else config.model.n_layers
    return n_layers * n_weights * weight_bytes


def warn_dense_dropout(config: RunConfig) -> tuple[str, ...]:
    """Return a warning if attention dropout stores every weight and that is large."""
    if config.model.attention_dropout == 0:
        return ()
    # orders and random masks need an arbitrary mask, which the fused kernel does not read
    masked = config.objective.orders > 1 or config.objective.randmask_ratio > 0
    wide = config.model.d_head > MAX_FUSED_D_HEAD
    if not (config.dist.cpu_only or masked or wide):
        return ()
    n_bytes = dense_dropout_bytes(config)
    if n_bytes < LARGE_DROPOUT_BYTES:
        return ()
    reason = "on a CPU" if config.dist.cpu_only else "with masks of orders" if masked else "with wide heads"
    return (
        f"model.attention_dropout: {reason} every attention weight is stored, {n_bytes / 1e9:.1f} GB for "
        "each sample of a microbatch, and attention is several times slower. Lower dataset.microbatch_size, "
        "or set dist.activation_checkpointing=full.",
    )
