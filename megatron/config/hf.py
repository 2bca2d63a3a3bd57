"""Model shapes in Hugging Face's words: the keys of config.json of Llama, Qwen3 and GPT-2.

Here they describe a model to train (`model.hf_config`); hf_checkpoint.py reads them beside weights.
"""

from typing import Any

from megatron.config.presets import nearest

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
NAMES = {"llama": LLAMA, "qwen3": LLAMA, "gpt2": GPT2}
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": True},
    "gpt2": {"norm": "layernorm", "feed_forward": "gelu", "positions": "learned", "biases": True},
}
# what else may stand there, and the values that this model can be; the first is meant where none is given
FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {"hidden_act": ("silu", "swish"), "sliding_window": (None,)},
    "qwen3": {"hidden_act": ("silu", "swish"), "use_sliding_window": (False,), "attention_bias": (False,)},
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
}  # fmt: skip
# dropout that this model does not have: refused for training, of no matter to finished weights
NO_DROPOUT = ("resid_pdrop", "embd_pdrop")
# keys of transformers' PretrainedConfig and of these classes that do not change the logits
NO_PART_OF_THE_SHAPE = frozenset((
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
    """A config.json as keys of ModelConfig. ValueError for what the model cannot be.

    Keys left out have this project's defaults, not transformers': an embedding is tied unless
    `tie_word_embeddings` says otherwise.
    """
    if not isinstance(hf_config, dict):
        raise ValueError(f"model.hf_config: wanted keys such as hidden_size, found {hf_config!r}")
    kind = hf_config.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in NAMES:
        raise ValueError(f"model.hf_config.model_type: found {kind!r}, known: {', '.join(NAMES)}")
    names, fixed = NAMES[kind], FIXED[kind]
    shape: dict[str, Any] = dict(OPTIONS[kind])
    left = dict(hf_config)
    try:
        if kind != "gpt2" and (theta := take_rope_theta(left)) is not None:
            shape["rope_theta"] = theta
        if kind == "llama":
            shape |= take_biases(left)
        check_layers(kind, left)
    except ValueError as error:
        raise ValueError(f"model.hf_config.{error}") from error
    for key, value in ((str(key), value) for key, value in left.items()):
        if key in names:
            if value is not None:
                shape[names[key]] = value
        elif key in fixed:
            if value not in fixed[key]:
                raise ValueError(f"model.hf_config.{key}: found {value!r}, this model has {fixed[key][0]!r}")
        elif kind == "gpt2" and key in NO_DROPOUT:
            if value != 0:
                raise ValueError(f"model.hf_config.{key}: found {value!r}, this model has 0.0")
        elif not is_without_influence(key):
            known = [*names, *fixed, "model_type", "rope_parameters"]
            raise ValueError(f"model.hf_config: unknown key '{key}'; {nearest(key, known)}")
    return shape


def is_without_influence(key: str) -> bool:
    """Whether a key is metadata, an id of a token, or a setting of generation, training or classification."""
    return key in NO_PART_OF_THE_SHAPE or key.startswith(("_", "summary_")) or key.endswith("_token_id")


def take_rope_theta(left: dict[str, Any]) -> float | None:
    """Remove the rotary keys from `left` and return their base, None where none is given.

    transformers 5 writes `rope_parameters`, older ones `rope_scaling` and `rope_theta`. As in transformers,
    `rope_scaling` replaces `rope_parameters`, and a base in there replaces the outer one.
    ValueError, "key: reason", for rotary positions that are scaled or cover a part of the head.
    """
    scaling, parameters = left.pop("rope_scaling", None), left.pop("rope_parameters", None)
    theta = left.pop("rope_theta", None)
    key, rope = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters)
    partial = left.pop("partial_rotary_factor", None)
    if rope:
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
            raise ValueError(f"{key}: found {rope!r}, this model has rope_type 'default'")
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


def check_layers(kind: str, left: dict[str, Any]) -> None:
    """Remove `layer_types`, and a window that is switched off. ValueError, "key: reason"."""
    layers = left.pop("layer_types", None) or []
    if not isinstance(layers, list) or any(layer != "full_attention" for layer in layers):
        raise ValueError("layer_types: this model has full_attention in every layer")
    used = left.get("use_sliding_window", False if kind == "qwen3" else None)
    if used is False or left.get("sliding_window") is None:
        left.pop("sliding_window", None)
        left.pop("use_sliding_window", None)  # without a width it switches nothing on


def take_biases(left: dict[str, Any]) -> dict[str, Any]:
    """Llama's two switches, taken out of `left`: here they are one. ValueError, "key: reason"."""
    attention, mlp = bool(left.pop("attention_bias", False)), bool(left.pop("mlp_bias", False))
    if attention != mlp:
        raise ValueError(
            f"attention_bias: attention_bias {attention} and mlp_bias {mlp}, this model has both or neither"
        )
    return {"biases": attention}
