"""Reader of the config.json of a checkpoint. Omitted keys have transformers' defaults, not this project's.

No key may change the logits unnoticed. Keys of transformers' own classes are read, or listed as keys without
effect. transformers ignores every other key. This module reports such a key, and raises ValueError if its
name stands for a change of the computation (`logit_scale`, `num_experts`, ...) and its value enables it.
"""

from typing import Any

from megatron.config.hf import (
    FAMILY_OPTIONS,
    SHAPE_KEYS,
    SUPPORTED_VALUES,
    UNSUPPORTED_DROPOUT,
    has_no_effect,
    pop_linked_keys,
)
from megatron.config.hf_diffusion import LLADA, MDLM, read_diffusion_config

DIFFUSION_TYPE = "megatron_masked_diffusion"  # of this project's exported diffusion models
DREAM = "Dream"  # Qwen2's shape, whose output at a position predicts the next one (arXiv 2508.15487)
DIFFUSION_TYPES = (DIFFUSION_TYPE, DREAM, LLADA, MDLM)
_LLAMA_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": None, "head_dim": None, "vocab_size": 32000, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_dropout": 0.0, "max_position_embeddings": 2048,
    "rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_DEFAULTS,
    "qwen3": {
        "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "attention_dropout": 0.0, "max_position_embeddings": 32768,
        "rope_theta": 10000.0, "attention_bias": False,
    },
    "qwen2": {
        "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "attention_dropout": 0.0, "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
    },
    "mistral": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": None, "vocab_size": 32000, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "attention_dropout": 0.0, "max_position_embeddings": 131072,
        "rope_theta": 10000.0,
    },
    "olmo2": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": None, "vocab_size": 50304, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "attention_dropout": 0.0, "max_position_embeddings": 2048,
        "rope_theta": 10000.0, "attention_bias": False,
    },
    "gpt_neox": {
        "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44, "num_attention_heads": 64,
        "vocab_size": 50432, "layer_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_dropout": 0.0,
        "max_position_embeddings": 2048, "rope_theta": 10000.0, "attention_bias": True,
        "use_parallel_residual": True,
    },
    "gpt2": {
        "n_embd": 768, "n_inner": None, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "attn_pdrop": 0.1,
    },
    # of exported/modeling_masked_diffusion.py, whose widths and counts have no meaningful default
    DIFFUSION_TYPE: {
        **{key: ... for key in ("hidden_size", "intermediate_size", "num_hidden_layers")},
        **{key: ... for key in ("num_attention_heads", "vocab_size")},
        "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "attention_dropout": 0.0, "max_position_embeddings": 2048, "rope_theta": 10000.0,
        "attention_bias": False, "mlp_bias": False,
    },
}  # fmt: skip
DEFAULTS[DREAM] = DEFAULTS["qwen2"] | {"mask_token_id": ...}
DEFAULT_WINDOW = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096}
# may be null, and are then computed from other keys
NULLABLE = ("num_key_value_heads", "head_dim", "n_inner")
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
    "mistral": ("MistralForCausalLM", "MistralModel"),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Model"),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXModel"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Model", "GPT2DoubleHeadsModel"),
    DIFFUSION_TYPE: ("MaskedDiffusionLm",),
    DREAM: ("DreamModel",),
    LLADA: ("LLaDAModelLM",),
    MDLM: ("MDLM",),
}
KNOWN_TYPES = (*SHAPE_KEYS, *DIFFUSION_TYPES[1:])
# keys of other model classes that change the computation, and the values at which they do not
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "position_embedding_type": ("rope", "rotary", "absolute"),
    "norm_type": ("rms_norm", "rmsnorm"),
    "pruned_heads": ({},),
    "clip_qkv": (),
    "parallel_residual": (False,),
    "use_parallel_residual": (False,),
}
# parts of key names, such as "attn_logit_softcapping" or "num_local_experts"
INFLUENTIAL_WORDS = (
    "alibi", "attn_logit", "bidirectional", "expert", "moe", "mup_", "multiplier", "qk_layernorm", "qk_norm",
    "quantization", "query_pre_attn", "residual_scal", "rope", "rotary", "scale_", "_scale", "scaling",
    "sliding", "softcap", "window_size",
)  # fmt: skip


def read_hf_config(hf_config: dict[str, Any]) -> tuple[dict[str, Any], int, list[str]]:
    """Return (keys of ModelConfig, positions of the model, ignored keys as "key value").

    Raises ValueError, "key: got X, expected Y", for an unsupported model and for values of wrong types.
    """
    kind = find_model_type(hf_config)
    if kind in (LLADA, MDLM):
        return read_diffusion_config(hf_config | {"model_type": kind})
    shape_kind = kind
    remaining = {key: value for key, value in hf_config.items() if key not in ("model_type", "architectures")}
    if kind == DIFFUSION_TYPE:
        remaining.pop("auto_map", None)
        shape_kind = "qwen3" if remaining.pop("qk_norm", False) else "llama"
        if remaining.pop("qkv_bias", False):
            shape_kind = "qwen2"
            remaining.pop("attention_bias", None)
    if kind == DREAM:
        remaining.pop("auto_map", None)
        shape_kind = "qwen2"
    names, fixed = SHAPE_KEYS[shape_kind], SUPPORTED_VALUES[shape_kind]
    values = _fill_defaults(kind, remaining)
    shape: dict[str, Any] = FAMILY_OPTIONS[shape_kind] | {
        names[key]: value for key, value in values.items() if key in names and value is not None
    }
    _check_heads(shape, values, kind)
    # their defaults are needed beside the keys of the file: both are read with others
    remaining |= {
        key: values[key] for key in ("num_hidden_layers", "max_position_embeddings") if key in values
    }
    window = DEFAULT_WINDOW.get(shape_kind)
    shape |= pop_linked_keys(shape_kind, remaining, shape["d_head"], window)
    if shape_kind != "gpt2":
        shape.setdefault("rope_theta", DEFAULTS[kind]["rope_theta"])
    if kind == DREAM:
        shape |= {"predicts_next": True, "mask_id": values["mask_token_id"]}
        if shape["mask_id"] >= shape["n_tokens"]:
            raise ValueError(f"mask_token_id: got {shape['mask_id']}, expected below {shape['n_tokens']}")
    ignored = []
    for key, value in remaining.items():
        if key in fixed:
            # 0 == False and 1 == True in Python: the second test accepts true and false only where they are
            # meant
            if value not in fixed[key] or isinstance(value, bool) != isinstance(fixed[key][0], bool):
                raise ValueError(f"{key}: got {value!r}, expected {fixed[key][0]!r}")
        elif key not in names and key != "max_position_embeddings" and _is_ignored(key, value, shape_kind):
            ignored.append(f"{key} {value!r:.40}")
    n_positions = values["n_positions" if kind == "gpt2" else "max_position_embeddings"]
    return shape, n_positions, ignored


def find_model_type(hf_config: dict[str, Any]) -> str:
    """Return the model_type, or if missing that of `architectures`. Raises ValueError for another model."""
    architectures = hf_config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"architectures: got {architectures!r}, expected a list of class names")
    kind = hf_config.get("model_type")
    if kind is None:
        kinds = [name for name, classes in ARCHITECTURES.items() if set(architectures) & set(classes)]
        if len(kinds) != 1:
            raise ValueError(
                f"model_type: missing, expected one of {', '.join(KNOWN_TYPES)}. Add it to the file."
            )
        kind = kinds[0]
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(f"model_type: got {kind!r}, expected one of {', '.join(KNOWN_TYPES)}")
    if architectures and not set(map(str, architectures)) <= set(ARCHITECTURES[kind]):
        raise ValueError(f"architectures: got {architectures!r}, expected {ARCHITECTURES[kind][0]}")
    return kind


def _fill_defaults(kind: str, remaining: dict[str, Any]) -> dict[str, Any]:
    """Return the values of all keys in DEFAULTS. Raises ValueError for a missing or invalid value."""
    values = {}
    for key, default in DEFAULTS[kind].items():
        # `...` as a default marks a key that must be present
        value = remaining.get(key, default)
        if value is ...:
            raise ValueError(f"{key}: missing, expected a number. Export the model again.")
        # `...` and None stand for counts; the other defaults have the type of their key
        expected = int if default is ... or default is None else type(default)
        allowed = (int, float) if expected is float else (expected,)
        if key == "rope_theta" or (value is None and key in NULLABLE):
            pass  # read by pop_rope_theta; computed from other keys
        elif type(value) not in allowed or value != value:  # value != value: NaN
            raise ValueError(f"{key}: got {value!r}, expected {expected.__name__}")
        elif (expected is int and value < 1) or (expected is float and value < 0):
            raise ValueError(f"{key}: got {value!r}, expected a number above 0")
        values[key] = value
    return values


def _check_heads(shape: dict[str, Any], values: dict[str, Any], kind: str) -> None:
    """Compute omitted head widths as transformers does. Raises ValueError if they do not divide."""
    heads_key, width_key = ("n_head", "n_embd") if kind == "gpt2" else ("num_attention_heads", "hidden_size")
    n_heads, width = values[heads_key], values[width_key]
    if "d_head" not in shape:
        if width % n_heads:
            raise ValueError(f"{heads_key}: got {n_heads}, expected a divisor of {width_key} {width}")
        shape["d_head"] = width // n_heads
    if n_heads % shape.get("n_kv_heads", n_heads):
        raise ValueError(f"num_key_value_heads: got {shape['n_kv_heads']}, expected a divisor of {n_heads}")
    if kind != "gpt2" and shape["d_head"] % 2:
        raise ValueError(f"head_dim: got {shape['d_head']}, expected an even number")
    if kind == "gpt2":
        # n_inner: null means 4 x n_embd
        shape.setdefault("d_ff", 4 * width)


def _is_ignored(key: str, value: Any, kind: str) -> bool:
    """Return whether to report a key as ignored: True unless it is a key of transformers without effect.

    Raises ValueError for a key whose value changes the computation.
    """
    if key == "rope_theta" or key in DEFAULTS[kind] or has_no_effect(key):
        return key.startswith("_") and key not in ("_name_or_path", "_attn_implementation_autoset")
    if key in UNSUPPORTED_DROPOUT or "dropout" in key or key.endswith("_pdrop"):
        return bool(value)
    if key in NEUTRAL:
        # equal types: True must not pass as 1
        is_neutral = value is None or any(
            value == neutral and type(value) is type(neutral) for neutral in NEUTRAL[key]
        )
    # unknown keys whose name suggests an influence on the logits: off, empty, 0 and 1 are neutral
    elif any(word in key for word in INFLUENTIAL_WORDS):
        is_neutral = value is None or value is False or (type(value) in (int, float) and value in (0, 1))
        is_neutral = is_neutral or value in ({}, [], "")
    else:
        is_neutral = True
    if not is_neutral:
        raise ValueError(
            f"{key}: got {value!r:.80}, expected none: it changes the computation, and this model does not "
            f"have it. Delete the key from the file if the {kind} model does not use it."
        )
    return key != "is_encoder_decoder"  # which transformers writes into every file
