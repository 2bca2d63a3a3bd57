"""Write Megatron-LM's checkpoint format with one tensor rank: release/mp_rank_00/model_optim_rng.pt.

The tensors have the names of Megatron core's GPTModel with Transformer Engine, Megatron-LM's default; `args`
contains what its --use-checkpoint-args reads. There is no optimizer state: start with --finetune. Norms are
stored with the matrix that follows them.
"""

from argparse import Namespace
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.model_weights import Weights, clone_if_view
from megatron.config.schema import ModelConfig
from megatron.io import atomic_folder

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"  # a release has weights only
CHECKPOINT_VERSION = 3.0  # rows of linear_qkv: for each key head its queries, the key, the value
OUTER_NAMES = {
    "embedding.": "embedding.word_embeddings.",
    "position_embedding.": "embedding.position_embeddings.",
    "norm.": "decoder.final_layernorm.",
    "unembedding.": "output_layer.",
}
BLOCK_NAMES = {
    "attention_norm.": "self_attention.linear_qkv.layer_norm_",
    "attention.query_norm.": "self_attention.q_layernorm.",
    "attention.key_norm.": "self_attention.k_layernorm.",
    "attention.out.": "self_attention.linear_proj.",
    "mlp_norm.": "mlp.linear_fc1.layer_norm_",
    "mlp.down.": "mlp.linear_fc2.",
}
# options of a model that Megatron core has too, or that change training only; the others must be default
EXPORTED_KEYS = {
    "size", "d_model", "d_ff", "d_head", "n_heads", "n_layers", "n_tokens", "vocab_rows", "rope_theta",
    "norm_eps", "n_kv_heads", "norm", "feed_forward", "positions", "n_positions", "biases", "tied_embedding",
    "qk_norm", "document_mask", "eod_id", "attention_dropout", "init_std", "base_d_model", "base_n_layers",
    "base_d_head", "qkv_biases", "attention_window", "rotary_dims", "rope_scaling", "rope_factor",
    "rope_low_factor", "rope_high_factor", "rope_original_positions",
}  # fmt: skip
ROPE_SCALING = (1.0, 4.0, 8192)  # Megatron core has llama3 scaling with these constants only


def write_megatron(weights: Weights, folder: Path) -> None:
    """Write a checkpoint folder atomically. Raises ValueError if Megatron core has no such model."""
    config = weights.config
    if reason := _explain_unsupported(config):
        raise ValueError(f"{weights.source}: Megatron core has no such model ({reason})")
    state = {name: clone_if_view(tensor) for name, tensor in export_megatron_names(weights).items()}
    checkpoint = {
        "model": state,
        "args": _build_args(weights),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": 0,
    }
    with atomic_folder(folder) as partial:
        rank = partial / RELEASE / "mp_rank_00"
        rank.mkdir(parents=True)
        torch.save(checkpoint, rank / "model_optim_rng.pt")
        (partial / TRACKER).write_text(RELEASE + "\n")


def _explain_unsupported(config: ModelConfig) -> str:
    """Return the reason why Megatron core cannot represent a model, or an empty string."""
    unknown = [
        key.name
        for key in fields(config)
        if key.name not in EXPORTED_KEYS and getattr(config, key.name) != key.default
    ]
    if unknown:
        return f"it sets {', '.join(unknown)}"
    if config.norm == "layernorm" and (not config.biases or config.qk_norm):
        return "LayerNorm has biases there, also on queries and keys"
    if config.feed_forward == "gelu" and not config.biases:
        return "its tanh GELU is fused with a bias"
    scaling = (config.rope_low_factor, config.rope_high_factor, config.rope_original_positions)
    if config.rope_scaling == "llama3" and scaling != ROPE_SCALING:
        return f"its llama3 scaling has the constants {ROPE_SCALING}, this model {scaling}"
    return ""


def export_megatron_names(weights: Weights) -> dict[str, Tensor]:
    """Rename the tensors to those of GPTModel, and join query, key and value, and gate and up."""
    config, state = weights.config, weights.state
    named: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for ours, theirs in OUTER_NAMES.items():
            if name.startswith(ours):
                named[name.replace(ours, theirs)] = tensor
    for i in range(config.n_layers):
        block, layer = f"blocks.{i}.", f"decoder.layers.{i}."
        inner = {name.removeprefix(block): x for name, x in state.items() if name.startswith(block)}
        for name, tensor in inner.items():
            for ours, theirs in BLOCK_NAMES.items():
                if name.startswith(ours):
                    named[layer + name.replace(ours, theirs)] = tensor
        for kind in ("weight", "bias"):
            if f"attention.query.{kind}" in inner:
                named[f"{layer}self_attention.linear_qkv.{kind}"] = _join_qkv(inner, kind, config)
            if f"mlp.up.{kind}" in inner:
                gates = [inner[f"mlp.gate.{kind}"]] if config.feed_forward == "swiglu" else []
                named[f"{layer}mlp.linear_fc1.{kind}"] = torch.cat([*gates, inner[f"mlp.up.{kind}"]])
    return named


def _join_qkv(inner: dict[str, Tensor], kind: str, config: ModelConfig) -> Tensor:
    # [H K, ...] -> [G, H / G, K, ...] and twice [G K, ...] -> [G, 1, K, ...]; joined [G, H / G + 2, K, ...]
    parts = (inner[f"attention.{part}.{kind}"] for part in ("query", "key", "value"))
    return torch.cat(
        [part.unflatten(0, (config.kv_heads, -1, config.d_head)) for part in parts], dim=1
    ).flatten(0, 2)


def _build_args(weights: Weights) -> Namespace:
    """Return the arguments of Megatron-LM that describe the model."""
    config = weights.config
    window = config.attention_window
    return Namespace(
        num_layers=config.n_layers, hidden_size=config.d_model, ffn_hidden_size=config.d_ff,
        num_attention_heads=config.n_heads, kv_channels=config.d_head,
        group_query_attention=config.kv_heads != config.n_heads, num_query_groups=config.kv_heads,
        seq_length=weights.seq_len or 2048,
        max_position_embeddings=config.n_positions or weights.seq_len or 2048,
        vocab_size=config.n_tokens, padded_vocab_size=config.vocab_rows, make_vocab_size_divisible_by=1,
        position_embedding_type="rope" if config.positions == "rotary" else "learned_absolute",
        rotary_base=int(config.rope_theta) if config.rope_theta.is_integer() else config.rope_theta,
        rotary_percent=config.rotary_channels / config.d_head, rotary_interleaved=False,
        use_rope_scaling=config.rope_scaling == "llama3",
        rope_scaling_factor=config.rope_factor if config.rope_scaling == "llama3" else 8.0,
        rotary_seq_len_interpolation_factor=config.rope_factor if config.rope_scaling == "linear" else None,
        normalization="RMSNorm" if config.norm == "rmsnorm" else "LayerNorm", norm_epsilon=config.norm_eps,
        layernorm_epsilon=config.norm_eps, swiglu=config.feed_forward == "swiglu",
        bias_gelu_fusion=config.feed_forward == "gelu", openai_gelu=False,
        add_bias_linear=config.biases, add_qkv_bias=config.qkv_biases, qk_layernorm=config.qk_norm,
        untie_embeddings_and_output_weights=not config.tied_embedding,
        window_size=None if window is None else (window - 1, 0), attention_dropout=0.0, hidden_dropout=0.0,
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, num_experts=None,
        params_dtype=torch.float32, training_objective=weights.objective,
    )  # fmt: skip
