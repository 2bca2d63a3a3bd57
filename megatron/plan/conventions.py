"""Training FLOPs per token of a model by the conventions of the literature.

In all of them backward is twice forward, and recomputation is not counted.
They differ in the operations counted:

exact      every matrix product as this code runs it,
           the whole S x S attention (plan/count.py)
6nd        6 N, with N as counted here; no FLOPs for attention scores
kaplan     6 (N - embeddings) + 6 L S H K: arXiv 2001.08361, table 1, times three
palm       6 N + 12 L S H K, N without tables that are only
           looked up: arXiv 2204.02311, appendix B
megatron   72 L D^2 (1 + S/(6 D) + V/(12 L D)): arXiv 2104.04473,
           eq. 3, without recomputation. It assumes H K = D
           and a feed-forward of two D x 4 D matrices, for every model
chinchilla appendix F of arXiv 2203.15556: the exact count, the embedding as a matrix product, and the softmax
"""

from megatron.config.schema import ModelConfig
from megatron.plan.count import flops_per_token, flops_per_token_mfu, n_non_embedding, n_params

SOFTMAX_FLOPS = 3  # for each score


def training_flops_per_token(model: ModelConfig, seq_len: int) -> dict[str, float]:
    """Return {convention: training FLOPs per token} at S = seq_len."""
    blocks, width = model.n_layers, model.d_model
    exact = flops_per_token(model, seq_len)
    # forward FLOPs per token of the lookup as a product of a one-hot vector
    # [V] by the table [V, D]
    embedding = 2.0 * model.vocab_rows * width
    # per token: L H rows of S scores, SOFTMAX_FLOPS for each score
    softmax = float(SOFTMAX_FLOPS * blocks * model.n_heads * seq_len)
    # V/(12 L D): 72 L D^2 times this is 6 V D, the head
    head_share = model.vocab_rows / (12 * blocks * width)
    return {
        "exact": exact,
        "6nd": 6.0 * n_params(model),
        # table 1 has 2 N + 2 L S H K in the forward pass; the backward pass
        # costs twice as much
        "kaplan": 6.0 * n_non_embedding(model) + 6.0 * blocks * seq_len * model.n_heads * model.d_head,
        "palm": flops_per_token_mfu(model, seq_len),
        # 72 L D^2 is 6 FLOPs for each of 12 D^2 weights in a block:
        # 4 D^2 in attention, 8 D^2 in the feed-forward.
        # The term S/(6 D) gives 12 L S D for the attention scores.
        # Eq. 3 itself has 96 = 8 x 12, with a second forward pass.
        "megatron": 72.0 * blocks * width**2 * (1 + seq_len / (6 * width) + head_share),
        # forward plus backward is 3 times forward
        # for the two additional terms as well
        "chinchilla": exact + 3 * (embedding + softmax),
    }
