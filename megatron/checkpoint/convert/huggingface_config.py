"""The class of transformers for a model, and the content of its config.json."""

from dataclasses import fields
from typing import Any

import torch

from megatron.checkpoint.model_weights import Weights
from megatron.config.hf import SHAPE_KEYS
from megatron.config.schema import ModelConfig

# options of a model that a folder describes, or that change only its training; the others are refused
EXPORTED_KEYS = {
    "size", "d_model", "d_ff", "d_head", "n_heads", "n_layers", "n_tokens", "vocab_rows", "rope_theta",
    "norm_eps", "n_kv_heads", "norm", "feed_forward", "positions", "n_positions", "biases", "tied_embedding",
    "qk_norm", "document_mask", "eod_id", "attention_dropout", "init_std", "parametrization", "base_d_model",
    "base_n_layers", "base_d_head", "qkv_biases", "qk_norm_all_heads", "norm_placement", "parallel_residual",
    "attention_window", "rotary_dims", "rope_scaling", "rope_factor", "rope_low_factor", "rope_high_factor",
    "rope_original_positions",
}  # fmt: skip
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
DIFFUSION_SHAPES = ("llama", "qwen2", "qwen3")  # of exported/modeling_masked_diffusion.py
ACTIVATION_NAMES = {"gelu": "gelu_new", "gelu_exact": "gelu"}


def choose_model_type(config: ModelConfig) -> tuple[str | None, str]:
    """Return (model_type, ""), or (None, reason) if no class of transformers matches the model."""
    # a new option of the model is refused here until it is exported, so that it is never dropped
    unknown = [
        key.name
        for key in fields(config)
        if key.name not in EXPORTED_KEYS and getattr(config, key.name) != key.default
    ]
    if unknown:
        return None, f"it sets {', '.join(unknown)}"
    if config.parametrization != "standard":
        return None, f"it has the multipliers of {config.parametrization}"
    shape = (config.norm, config.feed_forward, config.positions)
    if shape == ("rmsnorm", "swiglu", "rotary"):
        return _choose_llama_type(config)
    if config.norm == "layernorm" and config.feed_forward in ACTIVATION_NAMES:
        if not config.biases or config.qk_norm or config.kv_heads != config.n_heads:
            return None, "GPT-2 and GPT-NeoX have biases, n_kv_heads = n_heads, no norms on queries and keys"
        if config.n_heads * config.d_head != config.d_model:
            return None, "GPT-2 and GPT-NeoX have n_heads x d_head = d_model"
        if config.norm_placement == "output" or config.attention_window is not None:
            return None, "GPT-2 and GPT-NeoX have norms of inputs and no attention window"
        if config.positions == "rotary":
            return "gpt_neox", ""
        return ("gpt2", "") if not config.parallel_residual else (None, "GPT-2 has no parallel residual")
    return None, f"{', '.join(shape)} are a combination of neither Llama nor GPT-2"


def _choose_llama_type(config: ModelConfig) -> tuple[str | None, str]:
    """Return (model_type, "") or (None, reason) for a model with RMSNorm, SwiGLU and rotary positions."""
    # of these options, each class has at most one; Llama has none or `biases`
    options = {
        "olmo2": config.norm_placement == "output",
        "qwen3": config.qk_norm and not config.qk_norm_all_heads,
        "qwen2": config.qkv_biases,
        "llama": config.biases,
    }
    kinds = [kind for kind, is_set in options.items() if is_set]
    if len(kinds) > 1:
        return None, f"it combines the options of {' and '.join(kinds)}"
    kind = kinds[0] if kinds else "llama"
    if config.parallel_residual or config.rotary_dims not in (None, config.d_head):
        return None, "parallel residuals and partly rotated heads are those of GPT-NeoX, which has LayerNorm"
    if config.qk_norm_all_heads != (kind == "olmo2"):
        return None, "OLMo 2 has both qk_norm_all_heads and norm_placement output, this model one of them"
    if config.attention_window is None or kind in ("qwen2", "qwen3"):
        return kind, ""
    return ("mistral", "") if not kinds else (None, f"{kind} has no attention window")


def build_hf_config(weights: Weights, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of config.json."""
    config = weights.config
    hf_config: dict[str, Any] = {"model_type": kind, "architectures": [CLASSES[kind]]}
    hf_config |= {theirs: getattr(config, ours) for theirs, ours in SHAPE_KEYS[kind].items()}
    # all rows of the embedding are exported, so vocab_size must be their number
    hf_config |= {"vocab_size": config.vocab_rows, "dtype": str(dtype).removeprefix("torch.")}
    if kind == "gpt2":
        hf_config |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
        hf_config["activation_function"] = ACTIVATION_NAMES[config.feed_forward]
    else:
        hf_config |= {"max_position_embeddings": weights.seq_len or 2048, "attention_bias": config.biases}
        # read by transformers 5; version 4 reads rope_theta and rope_scaling
        hf_config["rope_parameters"] = rope = _build_rope_parameters(config, kind)
        if rope["rope_type"] != "default":
            hf_config["rope_scaling"] = rope
    if kind == "gpt_neox":
        hf_config["hidden_act"] = ACTIVATION_NAMES[config.feed_forward]
        hf_config |= {"rotary_emb_base": config.rope_theta, "rotary_pct": rope["partial_rotary_factor"]}
        hf_config |= {"hidden_dropout": 0.0}
    elif kind != "gpt2":
        hf_config |= {"num_key_value_heads": config.kv_heads, "hidden_act": "silu"}
    if kind in ("mistral", "qwen2", "qwen3"):
        hf_config["sliding_window"] = config.attention_window
    if kind in ("qwen2", "qwen3"):
        is_used = config.attention_window is not None
        hf_config |= {"use_sliding_window": is_used, "max_window_layers": 0 if is_used else config.n_layers}
    if kind == "llama":
        hf_config["mlp_bias"] = config.biases
    # Llama's defaults 1 and 2 may be ordinary tokens of this tokenizer
    hf_config |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return hf_config | {"n_tokens": config.n_tokens, "objective": weights.objective}


def _build_rope_parameters(config: ModelConfig, kind: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling != "none":
        rope |= {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    if config.rope_scaling == "llama3":
        rope |= {
            "low_freq_factor": config.rope_low_factor,
            "high_freq_factor": config.rope_high_factor,
            "original_max_position_embeddings": config.rope_original_positions,
        }
    if kind == "gpt_neox":
        rope["partial_rotary_factor"] = config.rotary_channels / config.d_head
    return rope
