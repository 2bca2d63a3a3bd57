"""How much memory a run needs on one device: an estimate to pack runs by, not a promise."""

from megatron.config.count import n_params
from megatron.config.schema import DistConfig, ModelConfig, RunConfig

PROCESS = 0.6e9  # interpreter, libraries, and on a GPU the context and workspaces of its kernels
LOGITS_HELD = 1 << 26  # elements of the head's output at a time on a GPU (objective/linear_cross_entropy.py)
LOGIT_BYTES = 12  # logits, their softmax and their gradient in float32


def bytes_of(config: RunConfig, n_ranks: int = 1) -> float:
    """Bytes on one device of a run over `n_ranks` data-parallel ones."""
    return _states(config, n_ranks) + activations_of(config, n_ranks) + PROCESS


def _states(config: RunConfig, n_ranks: int) -> float:
    """Float32 weights, gradients and AdamW's two moments, shared out as dist.sharding_stage says."""
    n, dist = n_params(config.model), config.dist
    split = dist.shard_size if "hybrid" in dist.sharding_stage and dist.shard_size else n_ranks
    stage = int(dist.sharding_stage[4])
    weights, gradients, moments = (4.0 * n, 4.0 * n, 8.0 * n)
    if stage >= 1:
        moments /= split
    if stage >= 2:
        gradients /= split
    if stage >= 3:
        weights /= split
    cast = 0.0 if dist.dtype == "float32" else 2.0 * n  # copies that the products read
    return weights + gradients + moments + cast


def activations_of(config: RunConfig, n_ranks: int = 1) -> float:
    """What the backward of one microbatch reads: saved tensors of the blocks, and the head's share."""
    share = max(1, config.dataset.batch_size // n_ranks)
    rows = min(config.dataset.microbatch_size or share, share)
    tokens = rows * config.dataset.seq_len
    model, dist = config.model, config.dist
    each = block_bytes(model, dist)
    kept = model.n_layers * each
    if dist.activation_checkpointing == "full":  # the input of each block, and one block at a time
        kept = model.n_layers * 4.0 * model.d_model + each
    logits = min(float(tokens) * model.vocab_rows, LOGITS_HELD) * LOGIT_BYTES
    return tokens * (kept + 8.0 * model.d_model) + logits


def block_bytes(model: ModelConfig, dist: DistConfig) -> float:
    """Bytes a token that one block keeps for its backward.

    In float32: two vectors as wide as the residual stream, six as wide as all heads, four as wide as the
    feed-forward. Under autocast those of heads and feed-forward take 2 bytes, and norms keep both kinds.
    """
    heads = model.n_heads * model.d_head
    if dist.dtype == "float32":
        return 8.0 * model.d_model + 24.0 * heads + 16.0 * model.d_ff
    return 14.0 * model.d_model + 12.0 * heads + 8.0 * model.d_ff
