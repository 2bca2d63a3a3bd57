"""Parameters and FLOPs of a model shape, term by term. This is the only place that counts N.

D d_model, F d_ff, H heads, G key and value heads, K d_head, L blocks, V
embedding rows, S positions. A product of an [m, k] by a [k, n] matrix is 2 m k
n FLOPs, and backward costs twice forward. Biases, norms and position
embeddings are not matrix products and count as 0 FLOPs.
"""

from megatron.config.schema import ModelConfig

CONVENTION = "exact matmuls, forward + backward = 3 x forward, whole S x S attention, head at every position"
LOOKUP_PARTS = ("embedding", "positions", "head")  # parts that Kaplan et al. exclude from N


def parameter_terms(model: ModelConfig) -> dict[str, int]:
    """Return the number of parameters of each part.

    `positions`, `head` and `biases` are present only
    if the shape has them. The biases of norms are in `norms`.
    A tied embedding is also the head and is counted once, as `embedding`.
    """
    # Rule of thumb: with H K = D, G = H and F = 8 D / 3, a block has 4 D^2
    # weights in attention and 8 D^2 in the feed-forward layer, so L blocks
    # have about 12 L D^2.
    terms = {
        "embedding": model.vocab_rows * model.d_model,
        "attention": model.n_layers * _count_attention(model),
        "feed_forward": model.n_layers * _count_feed_forward_matrices(model) * model.d_model * model.d_ff,
        "norms": _count_norms(model),
    }
    if model.positions == "learned":
        assert model.n_positions is not None, "set by read.py"
        terms["positions"] = model.n_positions * model.d_model
    if not model.tied_embedding:
        terms["head"] = model.vocab_rows * (model.d_model + model.head_bias)
    if model.biases or model.qkv_biases:
        terms["biases"] = model.n_layers * _count_biases(model)
    return terms


def _count_attention(model: ModelConfig) -> int:
    """Count the weights of query and output (D H K each) and of key and value (D G K each) of one block."""
    return 2 * model.d_model * (model.n_heads + model.kv_heads) * model.d_head


def _count_feed_forward_matrices(model: ModelConfig) -> int:
    return 3 if model.feed_forward == "swiglu" else 2


def _count_norms(model: ModelConfig) -> int:
    """Count the gains and biases: two norms a block and one at the end, each D wide, and QK-norm gains."""
    # LayerNorm with biases has a gain and a bias vector, RMSNorm only a gain
    vectors = 2 if model.norm == "layernorm" and model.biases else 1
    qk_heads = model.n_heads + model.kv_heads if model.qk_norm_all_heads else 2
    qk_norms = qk_heads * model.d_head if model.qk_norm else 0
    return (2 * model.n_layers + 1) * model.d_model * vectors + model.n_layers * qk_norms


def _count_biases(model: ModelConfig) -> int:
    """Count the biases of one block's matrices, one per output feature."""
    projections = (model.n_heads + 2 * model.kv_heads) * model.d_head  # outputs of query, key and value
    if not model.biases:
        return projections
    # the attention output, the matrices into the hidden layer (1 or 2 of width
    # F), and the one back to D
    hidden = (_count_feed_forward_matrices(model) - 1) * model.d_ff
    return projections + model.d_model + hidden + model.d_model


def n_params(model: ModelConfig) -> int:
    """Return the number of all parameters, N."""
    return sum(parameter_terms(model).values())


def n_non_embedding(model: ModelConfig) -> int:
    """Return the number of parameters of blocks and norms, the N of Kaplan et al. (arXiv 2001.08361)."""
    return sum(count for name, count in parameter_terms(model).items() if name not in LOOKUP_PARTS)


def flop_terms(model: ModelConfig, seq_len: int) -> dict[str, float]:
    """Return the training FLOPs per token of each part: all matrix products, with whole S x S attention.

    A forward and backward pass costs 6 FLOPs per weight and token. The
    attention scores and the weighted sum are 2 S H K FLOPs each per token and
    block in the forward pass, times 3 with the backward pass.
    """
    terms = parameter_terms(model)
    return {
        "attention": 6.0 * terms["attention"],
        # Per head and sample: [S, K] x [K, S] and [S, S] x [S, K], each 2 S^2
        # K FLOPs, or 2 S K per token. Two products, H heads, L blocks, times
        # 3: 12 L H K S.
        "attention_scores": 12.0 * model.n_layers * model.n_heads * model.d_head * seq_len,
        "feed_forward": 6.0 * terms["feed_forward"],
        # V D weights, tied or not, and a bias that is computed as a column;
        # the lookup itself is free
        "head": 6.0 * (terms["embedding"] + model.vocab_rows * model.head_bias),
    }


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Return the training FLOPs per token by the convention of this module."""
    return sum(flop_terms(model, seq_len).values())


def flops_per_token_mfu(model: ModelConfig, seq_len: int) -> float:
    """Return torchtitan's FLOPs per token for MFU: 6 N + 12 L H K S.

    N excludes tables that are only looked up. A tied
    embedding is also the head matrix, so all of it counts.
    An untied embedding and learned positions do not.
    """
    terms = parameter_terms(model)
    only_looked_up = terms.get("positions", 0) + (0 if model.tied_embedding else terms["embedding"])
    multiplied = n_params(model) - only_looked_up
    return mfu_formula(multiplied, model.n_layers, model.n_heads * model.d_head, seq_len)


def mfu_formula(n_multiplied: int, n_layers: int, width: int, seq_len: int) -> float:
    """Return 6 N + 12 L (H K) S, where N excludes lookup tables and attention is the whole S x S matrix."""
    return 6.0 * n_multiplied + 12.0 * n_layers * width * seq_len


def flops_per_token_executed(model: ModelConfig, seq_len: int, causal: bool, predicted: float) -> float:
    """Return the FLOPs per token that the kernels execute.

    Causal attention skips later positions: position s attends to s + 1 of S
    positions, (S + 1) / 2 on average. `predicted` is the fraction of positions
    at which the head runs.
    """
    terms = flop_terms(model, seq_len)
    # the mask of a window is dense: kernels
    # compute all scores and hide those outside
    if causal and (model.attention_window or seq_len) >= seq_len:
        # position s = 0 ... S - 1 attends to s + 1 positions: the sum is S (S
        # + 1) / 2 of S^2
        terms["attention_scores"] *= (seq_len + 1) / (2 * seq_len)
    terms["head"] *= predicted
    return sum(terms.values())
