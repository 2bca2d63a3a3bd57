"""The class of transformers for a model, and the content of its config.json."""

from dataclasses import asdict
from typing import Any

import torch

from megatron.checkpoint.model_weights import Weights
from megatron.config.hf import SHAPE_KEYS, find_model_type, read_hf_config
from megatron.config.schema import ModelConfig

# options that change only the training
TRAINING_KEYS = {
    "size", "document_mask", "eod_id", "attention_dropout", "init_std", "base_d_model", "base_n_layers",
    "base_d_head", "vocab_multiple",
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
DIFFUSION_SHAPES = ("llama", "qwen2", "qwen3")  # see exported/modeling_masked_diffusion.py
ACTIVATION_NAMES = {"gelu": "gelu_new", "gelu_exact": "gelu"}


def parse_hf_config(content: dict[str, Any]) -> tuple[ModelConfig, int, list[str]]:
    """Return (shape, positions, ignored keys) of a config.json without the project's `objective`.

    Raises ValueError for an unsupported model.
    """
    content = dict(content)
    n_tokens = content.pop("n_tokens", None)
    content["model_type"] = find_model_type(content)
    # vocab_size counts all rows, with [MASK] and
    # padding; only n_tokens records how many are ids
    shape, n_positions, ignored = read_hf_config(content)
    rows = shape["n_tokens"]
    n_tokens = rows if n_tokens is None else n_tokens
    if type(n_tokens) is not int or not 0 < n_tokens <= rows:
        raise ValueError(f"n_tokens: got {n_tokens!r}, expected 1 to vocab_size {rows}")
    return ModelConfig(**{"vocab_rows": rows, **shape, "n_tokens": n_tokens}), n_positions, ignored


def choose_model_type(weights: Weights) -> str:
    """Return the model_type whose config.json, read back, describes this model.

    An option that a class lacks, or that is not exported, differs after reading
    and is never dropped. Raises ValueError that lists the differing options of
    the nearest class.
    """
    expected = resolve_shape(weights.config)
    nearest: list[tuple[int, str]] = []
    for kind in CLASSES:
        content = build_hf_config(weights, kind, torch.float32)
        del content["objective"]
        try:
            actual = resolve_shape(parse_hf_config(content)[0])
        except ValueError as error:
            nearest.append((len(expected), f"{kind}: {error}"))
            continue
        differ = [key for key, value in expected.items() if actual.get(key) != value]
        if not differ:
            return kind
        nearest.append((len(differ), f"{kind} has another {', '.join(differ)}"))
    raise ValueError(f"{weights.source}: transformers has no class for this model ({min(nearest)[1]})")


def resolve_shape(config: ModelConfig) -> dict[str, Any]:
    """Return the options that determine the logits, with their defaults resolved."""
    shape = {key: value for key, value in asdict(config).items() if key not in TRAINING_KEYS}
    shape |= {"n_kv_heads": config.kv_heads, "rotary_dims": config.rotary_channels}
    unused: tuple[str, ...] = ("rope_", "rotary_") if config.positions == "learned" else ()
    if config.rope_scaling == "none":
        unused += ("rope_factor", "rope_low", "rope_high", "rope_original")
    if config.positions == "rotary":
        unused += ("n_positions",)
    return {key: value for key, value in shape.items() if not key.startswith(unused)}


def build_hf_config(weights: Weights, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of config.json."""
    config = weights.config
    hf_config: dict[str, Any] = {"model_type": kind, "architectures": [CLASSES[kind]]}
    hf_config |= {theirs: getattr(config, ours) for theirs, ours in SHAPE_KEYS[kind].items()}
    # all rows of the embedding are exported, so vocab_size must be their number
    hf_config |= {"vocab_size": config.vocab_rows, "dtype": str(dtype).removeprefix("torch.")}
    if kind == "gpt2":
        hf_config |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
        hf_config["activation_function"] = ACTIVATION_NAMES.get(config.feed_forward)
    else:
        hf_config |= {"max_position_embeddings": weights.seq_len or 2048, "attention_bias": config.biases}
        # read by transformers 5; version 4 reads rope_theta and rope_scaling
        hf_config["rope_parameters"] = rope = _build_rope_parameters(config, kind)
        if rope["rope_type"] != "default":
            hf_config["rope_scaling"] = rope
    if kind == "gpt_neox":
        hf_config["hidden_act"] = ACTIVATION_NAMES.get(config.feed_forward)
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
