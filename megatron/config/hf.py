"""Model shapes in Hugging Face's words: the config.json of Llama, Qwen3 and GPT-2."""

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
    "llama": {"hidden_act": ("silu",), "rope_scaling": (None,), "sliding_window": (None,)},
    "qwen3": {
        "hidden_act": ("silu",), "rope_scaling": (None,), "sliding_window": (None,),
        "use_sliding_window": (False,), "attention_bias": (False,),
    },
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "resid_pdrop": (0.0,), "embd_pdrop": (0.0,),
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
}  # fmt: skip
NO_PART_OF_THE_SHAPE = (
    "model_type", "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype",
    "transformers_version", "use_cache", "initializer_range", "max_position_embeddings", "pretraining_tp",
    "max_window_layers", "n_ctx", "reorder_and_upcast_attn", "task_specific_params", "_name_or_path",
)  # fmt: skip


def shape_from_hf(hf_config: dict[str, Any]) -> dict[str, Any]:
    """A config.json as keys of ModelConfig. ValueError for what the model cannot be.

    An embedding is tied unless `tie_word_embeddings` says otherwise.
    """
    if not isinstance(hf_config, dict):
        raise ValueError(f"model.hf_config: wanted keys such as hidden_size, found {hf_config!r}")
    kind = hf_config.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in NAMES:
        raise ValueError(f"model.hf_config.model_type: found {kind!r}, known: {', '.join(NAMES)}")
    names, fixed = NAMES[kind], FIXED[kind]
    shape: dict[str, Any] = dict(OPTIONS[kind])
    left = dict(hf_config)
    shape |= _rope(left.pop("rope_parameters", None))
    if kind == "llama":
        shape |= _biases(left)
    layer_types = left.pop("layer_types", None) or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise ValueError("model.hf_config.layer_types: this model has full_attention in every layer")
    for key, value in ((str(key), value) for key, value in left.items()):
        if key in names:
            if value is not None:
                shape[names[key]] = value
        elif key in fixed:
            if value not in fixed[key]:
                raise ValueError(f"model.hf_config.{key}: found {value!r}, this model has {fixed[key][0]!r}")
        elif key not in NO_PART_OF_THE_SHAPE and not key.startswith("summary_"):
            known = [*names, *fixed, "model_type", "rope_parameters"]
            raise ValueError(f"model.hf_config: unknown key '{key}'; {nearest(key, known)}")
    return shape


def _rope(told: Any) -> dict[str, Any]:
    """`rope_parameters`, as transformers 5 writes them."""
    if told is None:
        return {}
    if not isinstance(told, dict) or told.get("rope_type", "default") != "default":
        raise ValueError(
            f"model.hf_config.rope_parameters: found {told!r}, this model has rope_type 'default'"
        )
    return {"rope_theta": told["rope_theta"]} if "rope_theta" in told else {}


def _biases(left: dict[str, Any]) -> dict[str, Any]:
    """Llama's two switches, taken out of `left`: here they are one."""
    attention, mlp = bool(left.pop("attention_bias", False)), bool(left.pop("mlp_bias", False))
    if attention != mlp:
        raise ValueError(
            f"model.hf_config: attention_bias {attention} and mlp_bias {mlp}, this model has both or neither"
        )
    return {"biases": attention}
