"""Readers of Hugging Face's config.json: the shape of a model to train, or of a checkpoint.

A model to train (`model.hf_config`, `shape_from_hf`) has this project's defaults for omitted keys, and
unknown keys are errors. A checkpoint (`read_hf_config`) has transformers' defaults, and no key may change the
logits unnoticed. transformers ignores keys that its classes do not have. This module reports such a key, and
raises ValueError if its name stands for a change of the computation (`logit_scale`, `num_experts`, ...) and
its value enables it. Code of the hub is not executed: LLaDA, MDLM and Dream are shapes of this project's
model.
"""

import re
from collections.abc import Callable
from typing import Any

from megatron.config.presets import suggest_nearest

DIFFUSION_TYPE = "megatron_masked_diffusion"  # of this project's exported diffusion models
DREAM = "Dream"  # Qwen2's shape, whose output at a position predicts the next one (arXiv 2508.15487)
LLADA = "llada"  # Llama's block without a causal mask (arXiv 2502.09992)
# LayerNorm, GELU and rotary positions (arXiv 2406.07524); [MASK] is the last row. Without time conditioning
# its adaptive norms have constant gains, shifts and gates.
MDLM = "mdlm"
CODE_OF_HUB = (LLADA, MDLM)  # read by other code than the classes of transformers
DIFFUSION_TYPES = (DIFFUSION_TYPE, DREAM, LLADA, MDLM)

Table = dict[str, tuple[str, Any]]
# their key -> (key of ModelConfig or "", transformers' default). A type instead of a default: the key must be
# present. A null default stands for a count that is computed from other keys.
_LLAMA: Table = {
    "hidden_size": ("d_model", 4096), "intermediate_size": ("d_ff", 11008), "head_dim": ("d_head", None),
    "num_attention_heads": ("n_heads", 32), "num_key_value_heads": ("n_kv_heads", None),
    "num_hidden_layers": ("n_layers", 32), "vocab_size": ("n_tokens", 32000),
    "rope_theta": ("rope_theta", 10000.0), "rms_norm_eps": ("norm_eps", 1e-6),
    "tie_word_embeddings": ("tied_embedding", False), "attention_dropout": ("attention_dropout", 0.0),
    "max_position_embeddings": ("", 2048),
}  # fmt: skip
_QWEN2: Table = _LLAMA | {
    "intermediate_size": ("d_ff", 22016), "num_key_value_heads": ("n_kv_heads", 32),
    "vocab_size": ("n_tokens", 151936), "max_position_embeddings": ("", 32768),
}  # fmt: skip
FAMILIES: dict[str, Table] = {
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {"head_dim": ("d_head", 128)},
    "mistral": _LLAMA | {
        "intermediate_size": ("d_ff", 14336), "num_key_value_heads": ("n_kv_heads", 8),
        "max_position_embeddings": ("", 131072),
    },
    "olmo2": _LLAMA | {"vocab_size": ("n_tokens", 50304), "rms_norm_eps": ("norm_eps", 1e-5)},
    "gpt_neox": {
        "hidden_size": ("d_model", 6144), "intermediate_size": ("d_ff", 24576),
        "num_attention_heads": ("n_heads", 64), "num_hidden_layers": ("n_layers", 44),
        "vocab_size": ("n_tokens", 50432), "layer_norm_eps": ("norm_eps", 1e-5),
        "tie_word_embeddings": ("tied_embedding", False), "attention_dropout": ("attention_dropout", 0.0),
        "use_parallel_residual": ("parallel_residual", True), "max_position_embeddings": ("", 2048),
        "rope_theta": ("", 10000.0),
    },
    "gpt2": {
        "n_embd": ("d_model", 768), "n_inner": ("d_ff", None), "n_head": ("n_heads", 12),
        "n_layer": ("n_layers", 12), "n_positions": ("n_positions", 1024), "vocab_size": ("n_tokens", 50257),
        "layer_norm_epsilon": ("norm_eps", 1e-5), "tie_word_embeddings": ("tied_embedding", True),
        "attn_pdrop": ("attention_dropout", 0.1),
    },
    # of exported/modeling_masked_diffusion.py, whose widths and counts have no meaningful default
    DIFFUSION_TYPE: _LLAMA | {
        "hidden_size": ("d_model", int), "intermediate_size": ("d_ff", int), "vocab_size": ("n_tokens", int),
        "num_attention_heads": ("n_heads", int), "num_hidden_layers": ("n_layers", int),
        "rms_norm_eps": ("norm_eps", 1e-5), "tie_word_embeddings": ("tied_embedding", True),
    },
    DREAM: _QWEN2 | {"mask_token_id": ("mask_id", int)},
    LLADA: {
        "d_model": ("d_model", int), "mlp_hidden_size": ("d_ff", None), "n_heads": ("n_heads", int),
        "n_kv_heads": ("n_kv_heads", None), "n_layers": ("n_layers", int), "vocab_size": ("n_tokens", int),
        "embedding_size": ("vocab_rows", None), "mask_token_id": ("mask_id", int),
        "rms_norm_eps": ("norm_eps", 1e-5), "rope_theta": ("rope_theta", 10000.0), "rope": ("", bool),
        "weight_tying": ("tied_embedding", bool), "include_qkv_bias": ("qkv_biases", False),
        "include_bias": ("", bool), "max_sequence_length": ("", None),
        **dict.fromkeys(("block_type", "activation_type", "layer_norm_type"), ("", str)),
    },
    MDLM: {
        "hidden_dim": ("d_model", int), "n_heads": ("n_heads", int), "n_blocks": ("n_layers", int),
        "vocab_size": ("vocab_rows", int), "model_length": ("", None),
    },
}  # fmt: skip
NAMES = {kind: {key: ours for key, (ours, _) in table.items() if ours} for kind, table in FAMILIES.items()}
DEFAULTS = {kind: {key: value for key, (_, value) in table.items()} for kind, table in FAMILIES.items()}
# the families that can be trained
SHAPE_KEYS = {kind: names for kind, names in NAMES.items() if kind not in DIFFUSION_TYPES}
FAMILY_OPTIONS: dict[str, dict[str, Any]] = {
    "qwen2": {"qkv_biases": True},
    "qwen3": {"qk_norm": True},
    "olmo2": {"qk_norm": True, "qk_norm_all_heads": True, "norm_placement": "output"},
    "gpt_neox": {"norm": "layernorm", "biases": True},
    "gpt2": {"norm": "layernorm", "positions": "learned", "biases": True},
    MDLM: {"norm": "layernorm", "feed_forward": "gelu", "biases": True, "tied_embedding": False,
           "head_bias": True},
}  # fmt: skip
# families whose feed-forward layer has two matrices and an activation function of several names
GELU_FAMILIES = ("gpt_neox", "gpt2")
_SILU = {"hidden_act": ("silu", "swish")}
# dropout that this model does not have: an error for training, without effect for finished weights
UNSUPPORTED_DROPOUT = ("resid_pdrop", "embd_pdrop", "hidden_dropout")
# other keys, and the values that this model supports; the first one is the default
SUPPORTED_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": _SILU | {"sliding_window": (None,)},
    "qwen2": _SILU,
    "qwen3": _SILU | {"attention_bias": (False,)},
    "mistral": _SILU,
    "olmo2": _SILU | {"attention_bias": (False,)},
    "gpt_neox": {"attention_bias": (True,)},
    "gpt2": {
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    LLADA: {
        "block_type": ("llama",), "activation_type": ("silu",), "layer_norm_type": ("rms",),
        "rope": (True,), "alibi": (False,), "attention_layer_norm": (False,), "input_emb_norm": (False,),
        "include_bias": (False,), "bias_for_layer_norm": (False, None), "layer_norm_with_affine": (True,),
        "scale_logits": (False,), "multi_query_attention": (None, False), "clip_qkv": (None,),
    },
    MDLM: {"time_conditioning": (False,)},
}  # fmt: skip
NULLABLE = ("num_key_value_heads", "head_dim", "rope_theta")  # as if they were omitted
POSITIONS = {"gpt2": "n_positions", LLADA: "max_sequence_length", MDLM: "model_length"}
DEFAULT_WINDOW = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096}
_CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "olmo2": "Olmo2",
            "gpt_neox": "GPTNeoX"}  # fmt: skip
ARCHITECTURES = {kind: (f"{name}ForCausalLM", f"{name}Model") for kind, name in _CLASSES.items()} | {
    "gpt2": ("GPT2LMHeadModel", "GPT2Model", "GPT2DoubleHeadsModel"),
    DIFFUSION_TYPE: ("MaskedDiffusionLm",), DREAM: ("DreamModel",), LLADA: ("LLaDAModelLM",), MDLM: ("MDLM",),
}  # fmt: skip
KNOWN_TYPES = (*SHAPE_KEYS, *DIFFUSION_TYPES[1:])
# keys of transformers' PretrainedConfig and of these classes that do not change the logits
KEYS_WITHOUT_EFFECT = frozenset((
    "model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "initializer_range",
    "max_position_embeddings", "pretraining_tp", "max_window_layers", "n_ctx", "reorder_and_upcast_attn",
    "task_specific_params", "gradient_checkpointing", "use_bfloat16", "torchscript", "tokenizer_class",
    "prefix", "use_cache", "chunk_size_feed_forward", "tf_legacy_loss", "is_decoder", "classifier_dropout",
    "finetuning_task", "problem_type", "id2label", "label2id", "num_labels", "n_special",
    "predict_special_tokens", "remove_invalid_values",
))  # fmt: skip
# names of metadata, token ids, outputs, summaries, and of generation: beams, lengths, sampling, penalties
WITHOUT_EFFECT = re.compile(
    r"_.*|.*_token_id|(output|summary|return_dict|num_beam)(_|s$).*|return_dict|num_return_sequences|.*_penalty"
    r"|m(ax|in)_length|max_new_tokens|do_sample|early_stopping|temperature|top_[kp]|typical_p"
    r"|(encoder_)?no_repeat_ngram_size|bad_words_ids|(begin_)?suppress_tokens"
)
# the same for the classes of published diffusion models
DIFFUSION_WITHOUT_EFFECT = frozenset((
    "auto_map", "attention_dropout", "embedding_dropout", "residual_dropout", "dropout", "init_cutoff_factor",
    "init_device", "init_fn", "init_std", "precision", "flash_attention", "rope_full_precision",
    "alibi_bias_max", "attention_layer_norm_with_affine", "block_group_size", "mlp_ratio", "cond_dim",
))  # fmt: skip
# keys of other model classes that change the computation, and the values at which they do not
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,), "is_encoder_decoder": (False,), "norm_type": ("rms_norm", "rmsnorm"),
    "position_embedding_type": ("rope", "rotary", "absolute"), "pruned_heads": ({},), "clip_qkv": (),
    "parallel_residual": (False,), "use_parallel_residual": (False,),
}  # fmt: skip
# parts of key names, such as "attn_logit_softcapping" or "num_local_experts"
INFLUENTIAL_WORDS = (
    "alibi", "attn_logit", "bidirectional", "expert", "moe", "mup_", "multiplier", "qk_layernorm", "qk_norm",
    "quantization", "query_pre_attn", "residual_scal", "rope", "rotary", "scale_", "_scale", "scaling",
    "sliding", "softcap", "window_size",
)  # fmt: skip
# activation functions of two-matrix feed-forward layers; all names of a line are the same function
ACTIVATIONS = {
    "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "gelu_python_tanh": "gelu",
    "gelu": "gelu_exact", "gelu_python": "gelu_exact",
}  # fmt: skip
WINDOW_SWITCH = ("qwen2", "qwen3")  # their window has a switch and begins at a layer
ROPE_TYPES = ("default", "linear", "llama3")
LLAMA3_NAMES = {
    "low_freq_factor": "rope_low_factor",
    "high_freq_factor": "rope_high_factor",
    "original_max_position_embeddings": "rope_original_positions",
}
Raw = dict[str, Any]


def shape_from_hf(hf_config: Raw) -> Raw:
    """Return a config.json as keys of ModelConfig. Raises ValueError for an unsupported model.

    Omitted keys have this project's defaults, not those of transformers: for example, an embedding is tied
    unless `tie_word_embeddings` is false.
    """
    if not isinstance(hf_config, dict):
        raise ValueError(f"model.hf_config: got {hf_config!r}, expected keys such as hidden_size")
    kind = hf_config.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in SHAPE_KEYS:
        raise ValueError(f"model.hf_config.model_type: got {kind!r}, expected one of {', '.join(SHAPE_KEYS)}")

    def refuse_unknown(key: str, value: Any) -> None:
        if kind in GELU_FAMILIES and key in UNSUPPORTED_DROPOUT:
            if value != 0:
                raise ValueError(f"{key}: got {value!r}, expected 0.0")
        elif not _has_no_effect(key):
            known_keys = [*SHAPE_KEYS[kind], *SUPPORTED_VALUES[kind], "model_type", "rope_parameters"]
            raise ValueError(f"unknown key '{key}'; {suggest_nearest(key, known_keys)}")

    try:
        return _read_shape(kind, hf_config, SHAPE_KEYS[kind], refuse_unknown)
    except ValueError as error:
        separator = ": " if str(error).startswith("unknown key") else "."
        raise ValueError(f"model.hf_config{separator}{error}") from error


def read_hf_config(hf_config: Raw) -> tuple[Raw, int, list[str]]:
    """Return (keys of ModelConfig, positions of the model, ignored keys as "key value").

    Raises ValueError, "key: got X, expected Y", for an unsupported model and for values of wrong types.
    """
    kind = find_model_type(hf_config)
    content = {key: value for key, value in hf_config.items() if key not in ("model_type", "architectures")}
    shape_kind = {DREAM: "qwen2"}.get(kind, kind)
    if kind in (DREAM, DIFFUSION_TYPE):
        content.pop("auto_map", None)
    if kind == DIFFUSION_TYPE:
        shape_kind = "qwen3" if content.pop("qk_norm", False) else "llama"
        if content.pop("qkv_bias", False):
            shape_kind = "qwen2"
            content.pop("attention_bias", None)
    content |= _read_defaults(kind, content)
    if shape_kind in DEFAULT_WINDOW:
        content.setdefault("sliding_window", DEFAULT_WINDOW[shape_kind])
    ignored: list[str] = []

    def judge_other(key: str, value: Any) -> None:
        if _is_ignored(key, value, kind):
            ignored.append(f"{key} {value!r:.40}")

    shape = _read_shape(shape_kind, content, NAMES[kind], judge_other)
    if kind in CODE_OF_HUB:
        _complete_diffusion_shape(shape)
    if kind == DREAM:
        shape["predicts_next"] = True
    if shape.get("mask_id", 0) >= shape["n_tokens"]:
        raise ValueError(f"mask_token_id: got {shape['mask_id']}, expected below {shape['n_tokens']}")
    _complete_heads(shape, NAMES[kind])
    return shape, content[POSITIONS.get(kind, "max_position_embeddings")] or 1024, ignored


def _read_shape(
    kind: str, content: Raw, names: dict[str, str], judge_other: Callable[[str, Any], None]
) -> Raw:
    """Return a config.json as keys of ModelConfig. `judge_other(key, value)` is called for other keys."""
    remaining = dict(content)
    # This removes the keys that depend on one another; each key that is left is then judged alone.
    shape = dict(FAMILY_OPTIONS.get(kind, {})) | _pop_linked_keys(kind, remaining)
    supported = SUPPORTED_VALUES[kind]
    for key, value in ((str(key), value) for key, value in remaining.items()):
        if key in names:
            if value is not None:
                shape[names[key]] = value
        elif key in supported:
            if not _is_one_of(value, supported[key]):
                raise ValueError(f"{key}: got {value!r:.80}, expected {supported[key][0]!r}")
        else:
            judge_other(key, value)
    return shape


def _is_one_of(value: Any, supported: tuple[Any, ...]) -> bool:
    """Return whether a value is in `supported`. 1 == True in Python, so the types are compared as well."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in supported)


def find_model_type(hf_config: Raw) -> str:
    """Return the model_type, or if missing that of `architectures`. Raises ValueError for another model."""
    architectures = hf_config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"architectures: got {architectures!r}, expected a list of class names")
    kind = hf_config.get("model_type")
    if kind is None:
        named = set(map(str, architectures))
        kind = next((name for name, classes in ARCHITECTURES.items() if named & set(classes)), None)
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(f"model_type: got {kind!r}, expected one of {', '.join(KNOWN_TYPES)}")
    if not set(map(str, architectures)) <= set(ARCHITECTURES[kind]):
        raise ValueError(f"architectures: got {architectures!r}, expected {ARCHITECTURES[kind][0]}")
    return kind


def _read_defaults(kind: str, content: Raw) -> Raw:
    """Return the values of all keys in DEFAULTS. Raises ValueError for a missing or invalid value."""
    values = {}
    for key, default in DEFAULTS[kind].items():
        value = values[key] = content.get(key, default)
        if value is None and (default is None or key in NULLABLE):
            values[key] = DEFAULTS[kind]["rope_theta"] if key == "rope_theta" else None
        elif isinstance(value, type):
            raise ValueError(f"{key}: missing, expected a value. Export the model again.")
        elif key != "rope_theta":  # which is read with the other rotary keys
            expected = default if isinstance(default, type) else int if default is None else type(default)
            if type(value) not in ((int, float) if expected is float else (expected,)) or value != value:
                raise ValueError(f"{key}: got {value!r:.80}, expected {expected.__name__}")
            if (expected is int and value < 1) or (expected is float and value < 0):
                raise ValueError(f"{key}: got {value!r}, expected a number above 0")
    return values


def _complete_heads(shape: Raw, names: dict[str, str]) -> None:
    """Compute omitted widths as transformers does. Raises ValueError if they do not divide."""
    width, n_heads, theirs = shape["d_model"], shape["n_heads"], {ours: key for key, ours in names.items()}
    if "d_head" not in shape:
        if width % n_heads:
            raise ValueError(
                f"{theirs['n_heads']}: got {n_heads}, expected a divisor of {theirs['d_model']} {width}"
            )
        shape["d_head"] = width // n_heads
    if n_heads % shape.get("n_kv_heads", n_heads):
        raise ValueError(
            f"{theirs['n_kv_heads']}: got {shape['n_kv_heads']}, expected a divisor of {n_heads}"
        )
    if shape.get("positions") != "learned" and shape["d_head"] % 2:
        key = theirs.get("d_head", theirs["n_heads"])
        raise ValueError(f"{key}: got heads of width {shape['d_head']}, expected an even number")
    shape.setdefault("d_ff", 4 * width)  # of GPT-2, LLaDA and MDLM; the others have it in DEFAULTS


def _complete_diffusion_shape(shape: Raw) -> None:
    """Set the omitted keys of a LLaDA or an MDLM. Raises ValueError for rows that contradict the ids."""
    if "n_tokens" not in shape:  # MDLM: its vocab_size counts [MASK]
        shape["n_tokens"] = shape["vocab_rows"] - 1
    else:
        shape["rope_theta"] = float(_read_number("rope_theta", shape["rope_theta"]))
        _read_number("rms_norm_eps", shape["norm_eps"])
        shape.setdefault("n_kv_heads", shape["n_heads"])
        shape.setdefault("vocab_rows", shape["n_tokens"])
    if not 0 < shape["n_tokens"] <= shape["vocab_rows"]:
        raise ValueError(f"vocab_size: got {shape['n_tokens']} ids, expected 1 to {shape['vocab_rows']}")


def _has_no_effect(key: str) -> bool:
    """Return whether a key is metadata, a token id, or of generation, training or classification."""
    return key in KEYS_WITHOUT_EFFECT or WITHOUT_EFFECT.fullmatch(key) is not None


def _is_ignored(key: str, value: Any, kind: str) -> bool:
    """Return whether to report a key as ignored: True unless it is a key of transformers without effect.

    Raises ValueError for a key whose value changes the computation.
    """
    if key == "rope_theta" or key in DEFAULTS[kind] or _has_no_effect(key):
        return key.startswith("_") and key not in ("_name_or_path", "_attn_implementation_autoset")
    if kind in CODE_OF_HUB and key in DIFFUSION_WITHOUT_EFFECT:
        return False
    if "dropout" in key or key.endswith("_pdrop"):
        return bool(value)
    # unknown keys whose name suggests an influence on the logits: off, empty, 0 and 1 are neutral
    is_influential = any(word in key for word in INFLUENTIAL_WORDS)
    neutral = NEUTRAL.get(key, (False, 0, 1, {}, [], "") if is_influential else None)
    if value is not None and neutral is not None and not _is_one_of(value, neutral):
        raise ValueError(
            f"{key}: got {value!r:.80}, expected none: it changes the computation, and this model does not "
            f"have it. Delete the key from the file if the {kind} model does not use it."
        )
    return key != "is_encoder_decoder"  # which transformers writes into every file


def _pop_linked_keys(kind: str, remaining: Raw) -> Raw:
    """Remove the keys that are read together from `remaining`; return them as keys of ModelConfig.

    Raises ValueError, "key: got X, expected Y", for a computation that this model does not have.
    """
    if kind in CODE_OF_HUB:
        return {}
    shape = {} if kind == "gpt2" else _pop_rotary(kind, remaining)
    if kind == "llama":
        shape["biases"] = remaining.pop("attention_bias", None) or False
        if (remaining.pop("mlp_bias", None) or False) is not shape["biases"]:
            raise ValueError(
                "attention_bias, mlp_bias: got different values, expected both true or both false"
            )
    if kind in GELU_FAMILIES:
        key, default = ("activation_function", "gelu_new") if kind == "gpt2" else ("hidden_act", "gelu")
        name = remaining.pop(key, default)
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise ValueError(f"{key}: got {name!r}, expected {default!r} or another GELU")
        shape["feed_forward"] = ACTIVATIONS[name]
    return shape | _pop_window(kind, remaining)


def _pop_rotary(kind: str, remaining: Raw) -> Raw:
    """Read the rotary keys; a key of ModelConfig that is not set in the file is absent.

    transformers 5 writes `rope_parameters`, older versions `rope_scaling`, `rope_theta` and, for GPT-NeoX,
    `rotary_pct` and `rotary_emb_base`. As in transformers, `rope_scaling` overrides `rope_parameters`, and
    what is inside them overrides the outer keys.
    """
    scaling, parameters = remaining.pop("rope_scaling", None), remaining.pop("rope_parameters", None)
    # always removed: a base that stays in `remaining` would later override the one inside `rope_parameters`
    theta, partial = remaining.pop("rope_theta", None), remaining.pop("partial_rotary_factor", None)
    if kind == "gpt_neox":
        base = remaining.pop("rotary_emb_base", None)
        theta = theta if base is None else base
        partial = remaining.pop("rotary_pct", 0.25 if partial is None else partial)
    # rope_scaling: null in old files means none, so it must not hide rope_parameters
    key, rope = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters)
    shape: Raw = {}
    if rope:
        shape = _read_rope(key, rope, remaining.get("max_position_embeddings"))
        theta, partial = rope.get("rope_theta", theta), rope.get("partial_rotary_factor", partial)
    if theta is not None:
        shape["rope_theta"] = _read_number("rope_theta", theta)
    width, n_heads = remaining.get("hidden_size"), remaining.get("num_attention_heads")
    if kind == "gpt_neox" and isinstance(width, int) and isinstance(n_heads, int) and n_heads > 0:
        # truncated as in transformers; a pair of channels is rotated, so the number must be even
        rotated = width // n_heads * _read_number("rotary_pct", partial)
        if not 2 <= rotated <= width // n_heads or int(rotated) % 2:
            raise ValueError(f"rotary_pct: got {partial}, expected an even number of rotated channels")
        shape |= {"rotary_dims": int(rotated)} if partial < 1 else {}
    elif partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor: got {partial!r}, expected 1.0")
    return shape


def _read_rope(key: str, rope: Any, max_positions: Any) -> Raw:
    """Read the dictionary of rotary parameters except its base and its share of the head."""
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
    if kind not in ROPE_TYPES:
        raise ValueError(f"{key}: got {rope!r:.80}, expected rope_type {', '.join(ROPE_TYPES)}")
    names = {} if kind == "default" else {"factor": "rope_factor"}
    names |= LLAMA3_NAMES if kind == "llama3" else {}
    unknown = set(rope) - {*names, "rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if unknown:
        raise ValueError(f"{key}: got {', '.join(sorted(map(str, unknown)))}, unknown with rope_type {kind}")
    # transformers' default of llama3's last one: the positions of the model
    values = {"original_max_position_embeddings": max_positions} | rope
    shape = {ours: _read_number(f"{key}.{theirs}", values.get(theirs)) for theirs, ours in names.items()}
    if kind == "llama3":
        if shape["rope_low_factor"] >= shape["rope_high_factor"]:
            raise ValueError(
                f"{key}.low_freq_factor: got {rope['low_freq_factor']}, expected < high_freq_factor"
            )
        shape["rope_original_positions"] = int(shape["rope_original_positions"])
    return {**shape, "rope_scaling": kind} if names else {}


def _read_number(key: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{key}: got {value!r}, expected a number above 0")
    return value


def _pop_window(kind: str, remaining: Raw) -> Raw:
    """Read the sliding window of Mistral, Qwen2 and Qwen3, which must be that of all layers or of none."""
    layers = remaining.pop("layer_types", None) or []
    if not isinstance(layers, list):
        raise ValueError(f"layer_types: got {layers!r:.80}, expected a list")
    kinds = set(map(str, layers))
    if kind not in DEFAULT_WINDOW:
        if kinds - {"full_attention"}:
            raise ValueError(f"layer_types: got {layers!r:.80}, expected full_attention in every layer")
        if remaining.get("sliding_window") is None:
            remaining.pop("sliding_window", None)
        return {}
    window, is_used = remaining.pop("sliding_window", None), True
    if kind in WINDOW_SWITCH:
        is_used = remaining.pop("use_sliding_window", False)
        first = remaining.pop("max_window_layers", 28)  # layers before it attend to everything
        n_layers = remaining.get("num_hidden_layers")
        if not kinds and is_used and type(n_layers) is type(first) is int:
            kinds = {"full_attention"} if first >= n_layers else {"sliding_attention"}
            kinds |= {"full_attention"} if first > 0 else set()
        is_used = bool(is_used) and kinds != {"full_attention"}
    if window is None or not is_used:
        if "sliding_attention" in kinds and window is not None:
            raise ValueError(f"layer_types: got {layers!r:.80}, expected none without use_sliding_window")
        return {}
    if type(window) is not int or window < 1:
        raise ValueError(f"sliding_window: got {window!r}, expected a whole number above 0")
    if kinds - {"sliding_attention"}:
        raise ValueError(
            f"sliding_window: got {window} in some of the layers, expected it in all layers or in none"
        )
    return {"attention_window": window}
