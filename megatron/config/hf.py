"""Readers of Hugging Face's config.json: the shape of a model to train, or of a checkpoint.

A model to train (`model.hf_config`, `shape_from_hf`) has this project's
defaults for omitted keys, and unknown keys are errors. A checkpoint
(`read_hf_config`) has transformers' defaults, and no key may change the
logits unnoticed. transformers ignores keys that its classes do not
have. This module reports such a key, and raises ValueError if its name
stands for a change of the computation (`logit_scale`, `num_experts`,
...) and its value enables it. Code of the hub is not executed: LLaDA,
MDLM and Dream are shapes of this project's model.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config.presets import suggest_nearest

DIFFUSION_TYPE = "megatron_masked_diffusion"  # in this project's exported diffusion models
DREAM = "Dream"  # Qwen2's shape, whose output at a position predicts the next one (arXiv 2508.15487)
LLADA = "llada"  # Llama's block without a causal mask (arXiv 2502.09992)
# LayerNorm, GELU and rotary positions (arXiv 2406.07524); [MASK] is the
# last row. Without time conditioning its adaptive norms have constant
# gains, shifts and gates.
MDLM = "mdlm"
CODE_OF_HUB = (LLADA, MDLM)  # read by other code than the classes of transformers
DIFFUSION_TYPES = (DIFFUSION_TYPE, DREAM, LLADA, MDLM)

Raw = dict[str, Any]
# a link to utils/hf_families.tsv; a copy of it in a wheel
TABLE_FILE = Path(__file__).with_name("hf_families.tsv")
REQUIRED_TYPES = {"int": int, "bool": bool, "str": str}


@dataclass
class Family:
    """Keys of a model_type in config.json.

    names       key -> key of ModelConfig
    defaults    key -> transformers' default; a type
                if the key must be present; None: computed
    options     keys of ModelConfig that all models of the family have
    supported   other key -> values that this project supports, the default first
    """

    names: dict[str, str] = field(default_factory=dict)
    defaults: Raw = field(default_factory=dict)
    options: Raw = field(default_factory=dict)
    supported: dict[str, list[Any]] = field(default_factory=dict)


def _read_families() -> dict[str, Family]:
    """Return the families of the table; one with a base has the keys of the base too."""
    families: dict[str, Family] = {}
    for line in TABLE_FILE.read_text(encoding="utf-8").splitlines()[4:]:
        if line.startswith("# "):
            kind, *base = line[2:].split()
            family = families[kind] = Family()
            for name in base:
                family.names |= families[name].names
                family.defaults |= families[name].defaults
            continue
        key, ours, text = line.split("\t")
        value = REQUIRED_TYPES.get(text) or json.loads(text)
        if not key:
            family.options[ours] = value
        elif isinstance(value, list):
            family.supported[key] = value
        else:
            family.defaults[key] = value
            family.names |= {key: ours} if ours else {}
    return families


FAMILIES = _read_families()
# keys of transformers' PretrainedConfig and of these classes that do
# not change the logits
KEYS_WITHOUT_EFFECT = FAMILIES.pop("without_effect").defaults
# the same for the classes of published diffusion models
DIFFUSION_WITHOUT_EFFECT = FAMILIES.pop("diffusion_without_effect").defaults
# keys of other model classes that change the computation, and the
# values at which they do not
NEUTRAL = FAMILIES.pop("neutral").supported
# the families that can be trained
SHAPE_KEYS = {kind: family.names for kind, family in FAMILIES.items() if kind not in DIFFUSION_TYPES}
# families whose feed-forward layer has two matrices and an activation
# function of several names
GELU_FAMILIES = ("gpt_neox", "gpt2")
# dropout that this model does not have: an error for training, without
# effect for finished weights
UNSUPPORTED_DROPOUT = ("resid_pdrop", "embd_pdrop", "hidden_dropout")
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
# names of metadata, token ids, outputs, summaries, and of generation:
# beams, lengths, sampling, penalties
WITHOUT_EFFECT = re.compile(
    r"_.*|.*_token_id|(output|summary|return_dict|num_beam)(_|s$).*|return_dict|num_return_sequences|.*_penalty"
    r"|m(ax|in)_length|max_new_tokens|do_sample|early_stopping|temperature|top_[kp]|typical_p"
    r"|(encoder_)?no_repeat_ngram_size|bad_words_ids|(begin_)?suppress_tokens"
)
# parts of key names, such as
# "attn_logit_softcapping" or "num_local_experts"
INFLUENTIAL_WORDS = (
    "alibi", "attn_logit", "bidirectional", "expert", "moe", "mup_", "multiplier", "qk_layernorm", "qk_norm",
    "quantization", "query_pre_attn", "residual_scal", "rope", "rotary", "scale_", "_scale", "scaling",
    "sliding", "softcap", "window_size",
)  # fmt: skip
# activation functions of two-matrix feed-forward layers; all names of a
# line are the same function
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


def _refuse(key: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{key}: got {value!r:.80}, expected {expected}")


def shape_from_hf(hf_config: Raw) -> Raw:
    """Return a config.json as keys of ModelConfig. Raises ValueError for an unsupported model.

    Omitted keys have this project's defaults, not
    transformers' defaults: for example, an embedding is tied
    unless `tie_word_embeddings` is false.
    """
    if not isinstance(hf_config, dict):
        raise _refuse("model.hf_config", hf_config, "keys such as hidden_size")
    kind = hf_config.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in SHAPE_KEYS:
        raise _refuse("model.hf_config.model_type", kind, f"one of {', '.join(SHAPE_KEYS)}")

    def refuse_unknown(key: str, value: Any) -> None:
        if kind in GELU_FAMILIES and key in UNSUPPORTED_DROPOUT:
            if value != 0:
                raise _refuse(key, value, "0.0")
        elif not _has_no_effect(key):
            known_keys = [*SHAPE_KEYS[kind], *FAMILIES[kind].supported, "model_type", "rope_parameters"]
            raise ValueError(f"unknown key '{key}'; {suggest_nearest(key, known_keys)}")

    try:
        return _read_shape(kind, hf_config, FAMILIES[kind].names, refuse_unknown)
    except ValueError as error:
        separator = ": " if str(error).startswith("unknown key") else "."
        raise ValueError(f"model.hf_config{separator}{error}") from error


def read_hf_config(hf_config: Raw) -> tuple[Raw, int, list[str]]:
    """Return (keys of ModelConfig, positions of the model, ignored keys as "key value").

    Raises ValueError, "key: got X, expected Y", for an unsupported
    model and for values of wrong types.
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

    shape = _read_shape(shape_kind, content, FAMILIES[kind].names, judge_other)
    if kind in CODE_OF_HUB:
        _complete_diffusion_shape(shape)
    if kind == DREAM:
        shape["predicts_next"] = True
    if shape.get("mask_id", 0) >= shape["n_tokens"]:
        raise _refuse("mask_token_id", shape["mask_id"], f"below {shape['n_tokens']}")
    _complete_heads(shape, FAMILIES[kind].names)
    return shape, content[POSITIONS.get(kind, "max_position_embeddings")] or 1024, ignored


def _read_shape(
    kind: str, content: Raw, names: dict[str, str], judge_other: Callable[[str, Any], None]
) -> Raw:
    """Return a config.json as keys of ModelConfig. `judge_other(key, value)` is called for other keys."""
    remaining = dict(content)
    # This removes the keys that depend on one another; each key that is
    # left is then judged alone.
    shape = dict(FAMILIES[kind].options) | _pop_linked_keys(kind, remaining)
    supported = FAMILIES[kind].supported
    for key, value in ((str(key), value) for key, value in remaining.items()):
        if key in names:
            if value is not None:
                shape[names[key]] = value
        elif key in supported:
            if not _is_one_of(value, supported[key]):
                raise _refuse(key, value, repr(supported[key][0]))
        else:
            judge_other(key, value)
    return shape


def _is_one_of(value: Any, supported: Sequence[Any]) -> bool:
    """Return whether a value is in `supported`. 1 == True in Python, so the types are compared as well."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in supported)


def find_model_type(hf_config: Raw) -> str:
    """Return the model_type, else the type of `architectures`. Raises ValueError for another model."""
    classes = hf_config.get("architectures") or []
    if not isinstance(classes, list):
        raise _refuse("architectures", classes, "a list of class names")
    kind, named = hf_config.get("model_type"), set(map(str, classes))
    if kind is None:
        kind = next((kind for kind, names in ARCHITECTURES.items() if named & set(names)), None)
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise _refuse("model_type", kind, f"one of {', '.join(KNOWN_TYPES)}")
    if not named <= set(ARCHITECTURES[kind]):
        raise _refuse("architectures", classes, ARCHITECTURES[kind][0])
    return kind


def _read_defaults(kind: str, content: Raw) -> Raw:
    """Return the values of all keys that have a default. Raises ValueError for a missing or invalid value."""
    values = {}
    for key, default in FAMILIES[kind].defaults.items():
        value: Any = content.get(key, default)
        values[key] = value
        if value is None and (default is None or key in NULLABLE):
            values[key] = FAMILIES[kind].defaults["rope_theta"] if key == "rope_theta" else None
        elif isinstance(value, type):
            raise ValueError(f"{key}: missing, expected a value. Export the model again.")
        elif key != "rope_theta":  # which is read with the other rotary keys
            expected: type = int if default is None else type(default)
            expected = default if isinstance(default, type) else expected
            if type(value) not in ((int, float) if expected is float else (expected,)) or value != value:
                raise _refuse(key, value, expected.__name__)
            if (expected is int and value < 1) or (expected is float and value < 0):
                raise _refuse(key, value, "a number above 0")
    return values


def _complete_heads(shape: Raw, names: dict[str, str]) -> None:
    """Compute omitted widths as transformers does. Raises ValueError if they do not divide."""
    width, n_heads, theirs = shape["d_model"], shape["n_heads"], {ours: key for key, ours in names.items()}
    if "d_head" not in shape:
        if width % n_heads:
            raise _refuse(theirs["n_heads"], n_heads, f"a divisor of {theirs['d_model']} {width}")
        shape["d_head"] = width // n_heads
    if n_heads % shape.get("n_kv_heads", n_heads):
        raise _refuse(theirs["n_kv_heads"], shape["n_kv_heads"], f"a divisor of {n_heads}")
    if shape.get("positions") != "learned" and shape["d_head"] % 2:
        key = theirs.get("d_head", theirs["n_heads"])
        raise ValueError(f"{key}: got heads of width {shape['d_head']}, expected an even number")
    shape.setdefault("d_ff", 4 * width)  # for GPT-2, LLaDA and MDLM; the others have a default


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
    if key == "rope_theta" or key in FAMILIES[kind].defaults or _has_no_effect(key):
        return key.startswith("_") and key not in ("_name_or_path", "_attn_implementation_autoset")
    if kind in CODE_OF_HUB and key in DIFFUSION_WITHOUT_EFFECT:
        return False
    if "dropout" in key or key.endswith("_pdrop"):
        return bool(value)
    # unknown keys whose name suggests an influence on the logits: off,
    # empty, 0 and 1 are neutral
    is_influential = any(word in key for word in INFLUENTIAL_WORDS)
    off: list[Any] = [False, 0, 1, {}, [], ""]
    neutral = NEUTRAL.get(key, off if is_influential else None)
    if value is not None and neutral is not None and not _is_one_of(value, neutral):
        raise _refuse(
            key, value, "none: it changes the computation, and this model does not have it. "
            f"Delete the key from the file if the {kind} model does not use it.",
        )  # fmt: skip
    return key != "is_encoder_decoder"  # which transformers writes into every file


def _pop_linked_keys(kind: str, remaining: Raw) -> Raw:
    """Remove the keys that are read together from `remaining`; return them as keys of ModelConfig.

    Raises ValueError, "key: got X, expected Y", for a computation that
    this model does not have.
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
            raise _refuse(key, name, f"{default!r} or another GELU")
        shape["feed_forward"] = ACTIVATIONS[name]
    return shape | _pop_window(kind, remaining)


def _pop_rotary(kind: str, remaining: Raw) -> Raw:
    """Read the rotary keys; a key of ModelConfig that is not set in the file is absent.

    transformers 5 writes `rope_parameters`, older versions `rope_scaling`, `rope_theta` and,
    for GPT-NeoX, `rotary_pct` and `rotary_emb_base`. As in transformers, `rope_scaling`
    overrides `rope_parameters`, and what is inside them overrides the outer keys.
    """
    scaling, parameters = remaining.pop("rope_scaling", None), remaining.pop("rope_parameters", None)
    # always removed: a base that stays in `remaining` would later
    # override the one inside `rope_parameters`
    theta, partial = remaining.pop("rope_theta", None), remaining.pop("partial_rotary_factor", None)
    if kind == "gpt_neox":
        base = remaining.pop("rotary_emb_base", None)
        theta = theta if base is None else base
        partial = remaining.pop("rotary_pct", 0.25 if partial is None else partial)
    # rope_scaling: null in old files means none, so it must not hide
    # rope_parameters
    key, rope = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters)
    shape: Raw = {}
    if rope:
        shape = _read_rope(key, rope, remaining.get("max_position_embeddings"))
        theta, partial = rope.get("rope_theta", theta), rope.get("partial_rotary_factor", partial)
    if theta is not None:
        shape["rope_theta"] = _read_number("rope_theta", theta)
    width, n_heads = remaining.get("hidden_size"), remaining.get("num_attention_heads")
    if kind == "gpt_neox" and isinstance(width, int) and isinstance(n_heads, int) and n_heads > 0:
        # truncated as in transformers; a pair of channels is rotated,
        # so the number must be even
        rotated = width // n_heads * _read_number("rotary_pct", partial)
        if not 2 <= rotated <= width // n_heads or int(rotated) % 2:
            raise _refuse("rotary_pct", partial, "an even number of rotated channels")
        shape |= {"rotary_dims": int(rotated)} if partial < 1 else {}
    elif partial not in (None, 1, 1.0):
        raise _refuse("partial_rotary_factor", partial, "1.0")
    return shape


def _read_rope(key: str, rope: Any, max_positions: Any) -> Raw:
    """Read the dictionary of rotary parameters except its base and its share of the head."""
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
    if kind not in ROPE_TYPES:
        raise _refuse(key, rope, f"rope_type {', '.join(ROPE_TYPES)}")
    names = {} if kind == "default" else {"factor": "rope_factor"}
    names |= LLAMA3_NAMES if kind == "llama3" else {}
    unknown = set(rope) - {*names, "rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if unknown:
        raise ValueError(f"{key}: got {', '.join(sorted(map(str, unknown)))}, unknown with rope_type {kind}")
    # transformers' default of llama3's last
    # one: the positions of the model
    values = {"original_max_position_embeddings": max_positions} | rope
    shape = {ours: _read_number(f"{key}.{theirs}", values.get(theirs)) for theirs, ours in names.items()}
    if kind == "llama3":
        if shape["rope_low_factor"] >= shape["rope_high_factor"]:
            raise _refuse(f"{key}.low_freq_factor", rope["low_freq_factor"], "< high_freq_factor")
        shape["rope_original_positions"] = int(shape["rope_original_positions"])
    return {**shape, "rope_scaling": kind} if names else {}


def _read_number(key: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise _refuse(key, value, "a number above 0")
    return value


def _pop_window(kind: str, remaining: Raw) -> Raw:
    """Read the sliding window of Mistral, Qwen2 and Qwen3, which must apply to all layers or to none."""
    layers = remaining.pop("layer_types", None) or []
    if not isinstance(layers, list):
        raise _refuse("layer_types", layers, "a list")
    kinds = set(map(str, layers))
    if kind not in DEFAULT_WINDOW:
        if kinds - {"full_attention"}:
            raise _refuse("layer_types", layers, "full_attention in every layer")
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
    if window is None:
        return {}
    if not is_used:
        if "sliding_attention" in kinds:
            raise _refuse("layer_types", layers, "none without use_sliding_window")
        return {}
    if type(window) is not int or window < 1:
        raise _refuse("sliding_window", window, "a whole number above 0")
    if kinds - {"sliding_attention"}:
        raise ValueError(
            f"sliding_window: got {window} in some of the layers, expected it in all layers or in none"
        )
    return {"attention_window": window}
