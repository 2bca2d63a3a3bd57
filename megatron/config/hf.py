"""Model shapes with the keys of Hugging Face's config.json, of Llama, Qwen, Mistral, OLMo 2, GPT-NeoX, GPT-2.

This module reads the shape of a model to train (`model.hf_config`). hf_checkpoint.py reads the config.json of
a checkpoint.
"""

from typing import Any

from megatron.config.hf_linked_keys import pop_activation, pop_biases, pop_rotary, pop_window
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
GPT_NEOX = {
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "vocab_size": "n_tokens",
    "layer_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embedding",
    "attention_dropout": "attention_dropout",
    "use_parallel_residual": "parallel_residual",
}
SHAPE_KEYS = {
    "llama": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA, "mistral": LLAMA, "olmo2": LLAMA, "gpt_neox": GPT_NEOX,
    "gpt2": GPT2,
}  # fmt: skip
FAMILY_OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_biases": True},
    "qwen3": {"qk_norm": True},
    "mistral": {},
    "olmo2": {"qk_norm": True, "qk_norm_all_heads": True, "norm_placement": "output"},
    "gpt_neox": {"norm": "layernorm", "biases": True},
    "gpt2": {"norm": "layernorm", "positions": "learned", "biases": True},
}
# families whose feed-forward layer has two matrices and an activation function of several names
GELU_FAMILIES = ("gpt_neox", "gpt2")
# other keys, and the values that this model supports; the first one is the default
SUPPORTED_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {"hidden_act": ("silu", "swish"), "sliding_window": (None,)},
    "qwen2": {"hidden_act": ("silu", "swish")},
    "qwen3": {"hidden_act": ("silu", "swish"), "attention_bias": (False,)},
    "mistral": {"hidden_act": ("silu", "swish")},
    "olmo2": {"hidden_act": ("silu", "swish"), "attention_bias": (False,)},
    "gpt_neox": {"attention_bias": (True,)},
    "gpt2": {
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
}  # fmt: skip
# dropout that this model does not have: an error for training, without effect for finished weights
UNSUPPORTED_DROPOUT = ("resid_pdrop", "embd_pdrop", "hidden_dropout")
# keys of transformers' PretrainedConfig and of these classes that do not change the logits
KEYS_WITHOUT_EFFECT = frozenset((
    "model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "initializer_range",
    "max_position_embeddings", "pretraining_tp", "max_window_layers", "n_ctx", "reorder_and_upcast_attn",
    "task_specific_params", "gradient_checkpointing", "use_bfloat16", "torchscript", "tokenizer_class",
    "prefix", "use_cache", "output_hidden_states", "output_attentions", "output_scores", "output_past",
    "return_dict", "return_dict_in_generate", "chunk_size_feed_forward", "tf_legacy_loss", "is_decoder",
    "classifier_dropout", "finetuning_task", "problem_type", "id2label", "label2id", "num_labels",
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
    remaining = dict(hf_config)
    try:
        # This removes the keys that depend on one another; each key that is left is then judged alone.
        shape = FAMILY_OPTIONS[kind] | pop_linked_keys(kind, remaining, _find_head_width(hf_config))
    except ValueError as error:
        raise ValueError(f"model.hf_config.{error}") from error
    for key, value in ((str(key), value) for key, value in remaining.items()):
        if key in names:
            if value is not None:
                shape[names[key]] = value
        elif key in fixed:
            if value not in fixed[key]:
                raise ValueError(f"model.hf_config.{key}: got {value!r}, expected {fixed[key][0]!r}")
        elif kind in GELU_FAMILIES and key in UNSUPPORTED_DROPOUT:
            if value != 0:
                raise ValueError(f"model.hf_config.{key}: got {value!r}, expected 0.0")
        elif not has_no_effect(key):
            known_keys = [*names, *fixed, "model_type", "rope_parameters"]
            raise ValueError(f"model.hf_config: unknown key '{key}'; {suggest_nearest(key, known_keys)}")
    return shape


def pop_linked_keys(
    kind: str, remaining: dict[str, Any], d_head: int | None, default_window: int | None = None
) -> dict[str, Any]:
    """Remove the keys that are read together from `remaining`; return them as keys of ModelConfig.

    Arguments and errors as in hf_linked_keys.py.
    """
    shape: dict[str, Any] = {}
    if kind != "gpt2":
        shape |= pop_rotary(kind, remaining, d_head)
    if kind == "llama":
        shape |= pop_biases(remaining)
    if kind in GELU_FAMILIES:
        shape |= pop_activation(kind, remaining)
    n_layers = remaining.get("num_hidden_layers")
    return shape | pop_window(kind, remaining, n_layers if type(n_layers) is int else None, default_window)


def _find_head_width(hf_config: dict[str, Any]) -> int | None:
    width, n_heads = hf_config.get("hidden_size"), hf_config.get("num_attention_heads")
    both = type(width) is int and type(n_heads) is int and n_heads > 0
    return width // n_heads if both else None  # type: ignore[operator]  # both are int


def has_no_effect(key: str) -> bool:
    """Return whether a key is metadata, a token id, or of generation, training or classification."""
    # "_name_or_path", "summary_type", "bos_token_id" and others of the same form
    return key in KEYS_WITHOUT_EFFECT or key.startswith(("_", "summary_")) or key.endswith("_token_id")
