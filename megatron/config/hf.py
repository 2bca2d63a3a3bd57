"""Model shapes with the keys of Hugging Face's config.json of Llama, Qwen3 and GPT-2.

This module reads the shape of a model to train (`model.hf_config`). hf_checkpoint.py reads the config.json of
a checkpoint.
"""

from typing import Any

from megatron.config.presets import suggest_nearest

LLAMA = {
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "head_dim": "d_head",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "num_hidden_layers": "n_layers",
    "vocab_size": "n_tokens",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embedding",
    "attention_dropout": "attention_dropout",
}
GPT2 = {
    "n_embd": "d_model",
    "n_inner": "d_ff",
    "n_head": "n_heads",
    "n_layer": "n_layers",
    "n_positions": "n_positions",
    "vocab_size": "n_tokens",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tied_embedding",
    "attn_pdrop": "attention_dropout",
}
SHAPE_KEYS = {"llama": LLAMA, "qwen3": LLAMA, "gpt2": GPT2}
FAMILY_OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": True},
    "gpt2": {"norm": "layernorm", "feed_forward": "gelu", "positions": "learned", "biases": True},
}
# other keys, and the values that this model supports; the first one is the default
SUPPORTED_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {"hidden_act": ("silu", "swish"), "sliding_window": (None,)},
    "qwen3": {"hidden_act": ("silu", "swish"), "use_sliding_window": (False,), "attention_bias": (False,)},
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
}  # fmt: skip
# dropout that this model does not have: an error for training, without effect for finished weights
UNSUPPORTED_DROPOUT = ("resid_pdrop", "embd_pdrop")
# keys of transformers' PretrainedConfig and of these classes that do not change the logits
KEYS_WITHOUT_EFFECT = frozenset((
    "model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "initializer_range",
    "max_position_embeddings", "pretraining_tp", "max_window_layers", "n_ctx", "reorder_and_upcast_attn",
    "task_specific_params", "gradient_checkpointing", "use_bfloat16", "torchscript", "tokenizer_class",
    "prefix", "use_cache", "output_hidden_states", "output_attentions", "output_scores", "output_past",
    "return_dict", "return_dict_in_generate", "chunk_size_feed_forward", "tf_legacy_loss", "is_decoder",
    "finetuning_task", "problem_type", "id2label", "label2id", "num_labels",
    "n_special", "predict_special_tokens", "max_length", "min_length", "max_new_tokens", "do_sample",
    "early_stopping", "num_beams", "num_beam_groups", "num_return_sequences", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
))  # fmt: skip


def shape_from_hf(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json as keys of ModelConfig. Raises ValueError for an unsupported model.

    Omitted keys have this project's defaults, not those of transformers: for example, an embedding is tied
    unless `tie_word_embeddings` is false.
    """
    if not isinstance(hf_config, dict):
        raise ValueError(f"model.hf_config: got {hf_config!r}, expected keys such as hidden_size")
    kind = hf_config.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in SHAPE_KEYS:
        raise ValueError(f"model.hf_config.model_type: got {kind!r}, expected one of {', '.join(SHAPE_KEYS)}")
    names, fixed = SHAPE_KEYS[kind], SUPPORTED_VALUES[kind]
    shape: dict[str, Any] = dict(FAMILY_OPTIONS[kind])
    remaining = dict(hf_config)
    try:
        # These functions remove the keys that depend on one another; each key that is left is then judged
        # alone.
        if kind != "gpt2" and (theta := pop_rope_theta(remaining)) is not None:
            shape["rope_theta"] = theta
        if kind == "llama":
            shape |= pop_biases(remaining)
        pop_layer_types(kind, remaining)
    except ValueError as error:
        raise ValueError(f"model.hf_config.{error}") from error
    for key, value in ((str(key), value) for key, value in remaining.items()):
        if key in names:
            if value is not None:
                shape[names[key]] = value
        elif key in fixed:
            if value not in fixed[key]:
                raise ValueError(f"model.hf_config.{key}: got {value!r}, expected {fixed[key][0]!r}")
        elif kind == "gpt2" and key in UNSUPPORTED_DROPOUT:
            if value != 0:
                raise ValueError(f"model.hf_config.{key}: got {value!r}, expected 0.0")
        elif not has_no_effect(key):
            known_keys = [*names, *fixed, "model_type", "rope_parameters"]
            raise ValueError(f"model.hf_config: unknown key '{key}'; {suggest_nearest(key, known_keys)}")
    return shape


def has_no_effect(key: str) -> bool:
    """Return whether a key is metadata, a token id, or of generation, training or classification."""
    # "_name_or_path", "summary_type", "bos_token_id" and others of the same form
    return key in KEYS_WITHOUT_EFFECT or key.startswith(("_", "summary_")) or key.endswith("_token_id")


def pop_rope_theta(remaining: dict[str, Any]) -> float | None:
    """Remove the rotary keys from `remaining` and return their base, or None if there is none.

    transformers 5 writes `rope_parameters`, older versions `rope_scaling` and `rope_theta`. As in
    transformers, `rope_scaling` overrides `rope_parameters`, and a base inside them overrides the outer one.
    Raises ValueError, "key: reason", for scaled rotary positions or those of a part of the head.
    """
    scaling, parameters = remaining.pop("rope_scaling", None), remaining.pop("rope_parameters", None)
    # always removed: a base that stays in `remaining` would later override the one inside `rope_parameters`
    theta = remaining.pop("rope_theta", None)
    # rope_scaling: null in old files means none, so it must not hide rope_parameters
    key, rope = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters)
    partial = remaining.pop("partial_rotary_factor", None)
    if rope:
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
            raise ValueError(f"{key}: got {rope!r}, expected rope_type 'default'")
        unknown = set(rope) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        if unknown:
            raise ValueError(f"{key}: got {', '.join(sorted(map(str, unknown)))}, expected rope_theta alone")
        theta = rope.get("rope_theta", theta)
        partial = rope.get("partial_rotary_factor", partial)
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor: got {partial!r}, expected 1.0")
    if theta is not None and (type(theta) not in (int, float) or not theta > 0):
        raise ValueError(f"rope_theta: got {theta!r}, expected a number above 0")
    return theta


def pop_layer_types(kind: str, remaining: dict[str, Any]) -> None:
    """Remove `layer_types` and a disabled sliding window. Raises ValueError, "key: reason"."""
    layers = remaining.pop("layer_types", None) or []
    if not isinstance(layers, list) or any(layer != "full_attention" for layer in layers):
        raise ValueError(f"layer_types: got {layers!r:.80}, expected full_attention in every layer")
    # Qwen3 has a separate switch, off by default; Llama has only the width
    used = remaining.get("use_sliding_window", False if kind == "qwen3" else None)
    if used is False or remaining.get("sliding_window") is None:
        remaining.pop("sliding_window", None)
        remaining.pop("use_sliding_window", None)  # without a width it has no effect


def pop_biases(remaining: dict[str, Any]) -> dict[str, Any]:
    """Remove Llama's two bias keys from `remaining` and return `biases`. Raises ValueError, "key: reason"."""
    attention, mlp = bool(remaining.pop("attention_bias", False)), bool(remaining.pop("mlp_bias", False))
    if attention != mlp:
        raise ValueError(
            f"attention_bias: got attention_bias {attention} and mlp_bias {mlp}, expected both or neither"
        )
    return {"biases": attention}
