"""Keys of a config.json that are read together: rotary positions, sliding windows, biases, activation.

Each function removes its keys from `remaining` and returns keys of ModelConfig. They raise ValueError,
"key: got X, expected Y", for a computation that this model does not have.
"""

from typing import Any

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


def pop_rotary(kind: str, remaining: dict[str, Any], d_head: int | None) -> dict[str, Any]:
    """Read the rotary keys; a key of ModelConfig that is not set in the file is absent.

    transformers 5 writes `rope_parameters`, older versions `rope_scaling`, `rope_theta` and, for GPT-NeoX,
    `rotary_pct` and `rotary_emb_base`. As in transformers, `rope_scaling` overrides `rope_parameters`, and
    what is inside them overrides the outer keys.

    d_head   width of a head, which GPT-NeoX rotates in part; None: unknown
    """
    scaling, parameters = remaining.pop("rope_scaling", None), remaining.pop("rope_parameters", None)
    # always removed: a base that stays in `remaining` would later override the one inside `rope_parameters`
    theta, partial = remaining.pop("rope_theta", None), remaining.pop("partial_rotary_factor", None)
    if kind == "gpt_neox":
        theta = remaining.pop("rotary_emb_base", theta)
        partial = remaining.pop("rotary_pct", 0.25 if partial is None else partial)
    # rope_scaling: null in old files means none, so it must not hide rope_parameters
    key, rope = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters)
    shape: dict[str, Any] = {}
    if rope:
        shape = _read_rope(key, rope, remaining.get("max_position_embeddings"))
        theta, partial = rope.get("rope_theta", theta), rope.get("partial_rotary_factor", partial)
    if theta is not None:
        shape["rope_theta"] = _read_number("rope_theta", theta)
    if kind == "gpt_neox" and d_head is not None and type(partial) in (int, float) and 0 < partial < 1:
        # truncated as in transformers; a pair of channels is rotated, so the number must be even
        if int(d_head * partial) < 2 or int(d_head * partial) % 2:
            raise ValueError(
                f"rotary_pct: got {partial} of {d_head} channels, expected an even number of them"
            )
        shape["rotary_dims"] = int(d_head * partial)
    elif partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor: got {partial!r}, expected 1.0")
    return shape


def _read_rope(key: str, rope: Any, max_positions: Any) -> dict[str, Any]:
    """Read the dictionary of rotary parameters except its base and its share of the head."""
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
    if kind not in ROPE_TYPES:
        raise ValueError(f"{key}: got {rope!r:.80}, expected rope_type {', '.join(ROPE_TYPES)}")
    read = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    shape: dict[str, Any] = {}
    if kind != "default":
        if "factor" not in rope:
            raise ValueError(f"{key}.factor: missing, expected with rope_type {kind}")
        shape = {"rope_scaling": kind, "rope_factor": _read_number(f"{key}.factor", rope["factor"])}
        read |= {"factor"}
    if kind == "llama3":
        # transformers' default of the last one: the positions of the model
        values = {"original_max_position_embeddings": max_positions} | rope
        for theirs, ours in LLAMA3_NAMES.items():
            if values.get(theirs) is None:
                raise ValueError(f"{key}.{theirs}: missing, expected with rope_type llama3")
            shape[ours] = _read_number(f"{key}.{theirs}", values[theirs])
        if shape["rope_low_factor"] >= shape["rope_high_factor"]:
            raise ValueError(
                f"{key}.low_freq_factor: got {rope['low_freq_factor']}, expected < high_freq_factor"
            )
        shape["rope_original_positions"] = int(shape["rope_original_positions"])
        read |= set(LLAMA3_NAMES)
    if unknown := set(rope) - read:
        names = ", ".join(sorted(map(str, unknown)))
        raise ValueError(f"{key}: got {names}, expected {', '.join(sorted(read))} alone")
    return shape


def _read_number(key: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{key}: got {value!r}, expected a number above 0")
    return value


def pop_window(
    kind: str, remaining: dict[str, Any], n_layers: int | None, default: int | None
) -> dict[str, Any]:
    """Read the sliding window of Mistral, Qwen2 and Qwen3, which must be that of all layers or of none.

    n_layers   number of layers; None: unknown
    default    width of the window if the file has none
    """
    layers = remaining.pop("layer_types", None) or []
    if not isinstance(layers, list):
        raise ValueError(f"layer_types: got {layers!r:.80}, expected a list")
    kinds = set(map(str, layers))
    if kind not in (*WINDOW_SWITCH, "mistral"):
        if kinds - {"full_attention"}:
            raise ValueError(f"layer_types: got {layers!r:.80}, expected full_attention in every layer")
        if remaining.get("sliding_window") is None:
            remaining.pop("sliding_window", None)
        return {}
    window, is_used = remaining.pop("sliding_window", default), True
    if kind in WINDOW_SWITCH:
        is_used = remaining.pop("use_sliding_window", False)
        first = remaining.pop("max_window_layers", 28)  # layers before it attend to everything
        if not kinds and is_used and n_layers is not None and type(first) is int:
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


def pop_biases(remaining: dict[str, Any]) -> dict[str, Any]:
    """Read Llama's two bias keys."""
    attention, mlp = bool(remaining.pop("attention_bias", False)), bool(remaining.pop("mlp_bias", False))
    if attention != mlp:
        raise ValueError(
            f"attention_bias: got attention_bias {attention} and mlp_bias {mlp}, expected both or neither"
        )
    return {"biases": attention}


def pop_activation(kind: str, remaining: dict[str, Any]) -> dict[str, Any]:
    """Read the activation function of GPT-2 and GPT-NeoX; the default is that of transformers."""
    key, default = ("activation_function", "gelu_new") if kind == "gpt2" else ("hidden_act", "gelu")
    name = remaining.pop(key, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"{key}: got {name!r}, expected {default!r} or another GELU")
    return {"feed_forward": ACTIVATIONS[name]}
