"""Write Megatron-LM's checkpoint format with one tensor rank: release/mp_rank_00/model_optim_rng.pt.

The tensors have the names of Megatron core's GPTModel with Transformer Engine,
Megatron-LM's default; `args` contains what its --use-checkpoint-args reads.
There is no optimizer state: start with --finetune. Norms are stored with the
matrix that follows them.
"""

from argparse import Namespace
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.convert.huggingface_config import resolve_shape
from megatron.checkpoint.convert.megatron_args import build_config
from megatron.checkpoint.convert.names import MEGATRON, export_names
from megatron.checkpoint.model_weights import Weights, clone_if_view
from megatron.io import atomic_folder

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"  # a release has weights only
CHECKPOINT_VERSION = 3.0  # rows of linear_qkv: for each key head its queries, the key, the value


def write_megatron(weights: Weights, folder: Path) -> None:
    """Write a checkpoint folder atomically. Raises ValueError if Megatron core has no such model."""
    config = weights.config
    named, args = export_names(MEGATRON, weights.state, config), _build_args(weights)
    _check_supported(weights, named, args)
    state = {name: clone_if_view(tensor) for name, tensor in named.items()}
    counters = {"checkpoint_version": CHECKPOINT_VERSION, "iteration": 0}
    with atomic_folder(folder) as partial:
        rank = partial / RELEASE / "mp_rank_00"
        rank.mkdir(parents=True)
        torch.save({"model": state, "args": args, **counters}, rank / "model_optim_rng.pt")
        (partial / TRACKER).write_text(RELEASE + "\n")


def _check_supported(weights: Weights, named: dict[str, Tensor], args: Namespace) -> None:
    """Raise ValueError unless the exported model, read back, has the same options."""
    config = weights.config
    expected = resolve_shape(config)
    actual = resolve_shape(build_config(args, named, config.n_tokens))
    reason = ", ".join(key for key, value in expected.items() if actual.get(key) != value)
    if config.norm == "layernorm" and (not config.biases or config.qk_norm):
        reason = "LayerNorm has biases there, also on queries and keys"
    if config.feed_forward == "gelu" and not config.biases:
        reason = "its tanh GELU is fused with a bias"
    if reason:
        raise ValueError(f"{weights.source}: Megatron core has no such model ({reason})")


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
