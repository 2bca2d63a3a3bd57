"""Readers of the config.json of published masked-diffusion models: LLaDA and MDLM.

Both have code of their own on the hub, which is not executed: their shapes are fields of this model.

LLaDA   Llama's block without a causal mask (arXiv 2502.09992); [MASK] is one of the ids of its tokenizer
MDLM    LayerNorm, GELU and rotary positions (arXiv 2406.07524, DiT of arXiv 2310.16834); [MASK] is the last
        row. Without time conditioning its adaptive norms have constant gains, shifts and gates.
Dream has the keys of Qwen2 and is read by hf_checkpoint.py.
"""

from typing import Any

from megatron.config.hf import has_no_effect

LLADA, MDLM = "llada", "mdlm"
# keys of the two configurations that change the computation, and the values that this model supports
SUPPORTED: dict[str, dict[str, tuple[Any, ...]]] = {
    LLADA: {
        "block_type": ("llama",), "activation_type": ("silu",), "layer_norm_type": ("rms",),
        "rope": (True,), "alibi": (False,), "attention_layer_norm": (False,), "input_emb_norm": (False,),
        "include_bias": (False,), "bias_for_layer_norm": (False, None), "layer_norm_with_affine": (True,),
        "scale_logits": (False,), "multi_query_attention": (None, False), "clip_qkv": (None,),
    },
    MDLM: {"time_conditioning": (False,)},
}  # fmt: skip
# omitted keys of LLaDA whose default in its code is not the supported value must be present
REQUIRED = {
    LLADA: ("d_model", "n_heads", "n_layers", "vocab_size", "mask_token_id", "block_type", "activation_type",
            "layer_norm_type", "rope", "include_bias", "weight_tying"),
    MDLM: ("vocab_size", "hidden_dim", "n_blocks", "n_heads"),
}  # fmt: skip
WITHOUT_EFFECT = (
    "auto_map", "attention_dropout", "embedding_dropout", "residual_dropout", "dropout", "init_cutoff_factor",
    "init_device", "init_fn", "init_std", "precision", "flash_attention", "rope_full_precision",
    "alibi_bias_max", "attention_layer_norm_with_affine", "block_group_size", "mlp_ratio", "cond_dim",
    "return_dict",
)  # fmt: skip
READ = {
    LLADA: (*REQUIRED[LLADA], "n_kv_heads", "mlp_hidden_size", "embedding_size", "rms_norm_eps", "rope_theta",
            "max_sequence_length", "include_qkv_bias"),
    MDLM: (*REQUIRED[MDLM], "model_length"),
}  # fmt: skip


def read_diffusion_config(hf_config: dict[str, Any]) -> tuple[dict[str, Any], int, list[str]]:
    """Return (keys of ModelConfig, positions of the model, ignored keys) of a LLaDA or an MDLM.

    Raises ValueError, "key: got X, expected Y", for a missing key and for another computation.
    """
    kind = hf_config["model_type"]
    for key in REQUIRED[kind]:
        if key not in hf_config:
            raise ValueError(f"{key}: missing, expected in a config.json of {kind}")
    for key, values in SUPPORTED[kind].items():
        value = hf_config.get(key, values[0])
        if not any(value is supported or value == supported != 0 for supported in values):
            raise ValueError(
                f"{key}: got {value!r:.80}, expected {values[0]!r}; this model has no other form"
            )
    readable = {*READ[kind], *SUPPORTED[kind], *WITHOUT_EFFECT, "model_type", "architectures"}
    ignored = [f"{key} {value!r:.40}" for key, value in hf_config.items() if _is_unknown(key, readable)]
    shape, n_positions = (_read_llada if kind == LLADA else _read_mdlm)(hf_config)
    if shape["d_model"] % shape["n_heads"] or shape["d_model"] // shape["n_heads"] % 2:
        raise ValueError(f"n_heads: got {shape['n_heads']}, expected heads of an even width")
    shape["d_head"] = shape["d_model"] // shape["n_heads"]
    return shape, n_positions, ignored


def _is_unknown(key: str, readable: set[str]) -> bool:
    return key not in readable and not has_no_effect(key)


def _read_count(hf_config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = hf_config.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ValueError(f"{key}: got {value!r}, expected a whole number above 0")
    return value


def _read_llada(hf_config: dict[str, Any]) -> tuple[dict[str, Any], int]:
    d_model, n_heads = _read_count(hf_config, "d_model"), _read_count(hf_config, "n_heads")
    n_tokens, mask_id = _read_count(hf_config, "vocab_size"), _read_count(hf_config, "mask_token_id")
    rows = _read_count(hf_config, "embedding_size", n_tokens)
    if mask_id >= n_tokens or rows < n_tokens:
        raise ValueError(
            f"mask_token_id: got {mask_id}, expected an id below vocab_size {n_tokens}, at most {rows}"
        )
    n_kv_heads = _read_count(hf_config, "n_kv_heads", n_heads)
    if n_heads % n_kv_heads:
        raise ValueError(f"n_kv_heads: got {n_kv_heads}, expected a divisor of {n_heads}")
    numbers = {}
    for key, default in (("rms_norm_eps", 1e-5), ("rope_theta", 10000.0)):
        numbers[key] = hf_config.get(key, default)
        if type(numbers[key]) not in (int, float) or not numbers[key] > 0:
            raise ValueError(f"{key}: got {numbers[key]!r}, expected a number above 0")
    for key in ("weight_tying", "include_qkv_bias"):
        if type(hf_config.get(key, False)) is not bool:
            raise ValueError(f"{key}: got {hf_config[key]!r}, expected true or false")
    shape = {
        "d_model": d_model,
        "d_ff": _read_count(hf_config, "mlp_hidden_size", 4 * d_model),
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "n_layers": _read_count(hf_config, "n_layers"),
        "n_tokens": n_tokens,
        "vocab_rows": rows,
        "mask_id": mask_id,
        "norm_eps": numbers["rms_norm_eps"],
        "rope_theta": float(numbers["rope_theta"]),
        "tied_embedding": hf_config["weight_tying"],
        "qkv_biases": hf_config.get("include_qkv_bias", False),
    }
    return shape, _read_count(hf_config, "max_sequence_length", 1024)


def _read_mdlm(hf_config: dict[str, Any]) -> tuple[dict[str, Any], int]:
    d_model, rows = _read_count(hf_config, "hidden_dim"), _read_count(hf_config, "vocab_size")
    if rows < 2:
        raise ValueError(f"vocab_size: got {rows}, expected the ids of the tokenizer and [MASK]")
    shape = {
        "d_model": d_model,
        "d_ff": 4 * d_model,
        "n_heads": _read_count(hf_config, "n_heads"),
        "n_layers": _read_count(hf_config, "n_blocks"),
        "n_tokens": rows - 1,
        "vocab_rows": rows,
        "norm": "layernorm",
        "feed_forward": "gelu",
        "biases": True,
        "tied_embedding": False,
        "head_bias": True,
    }
    return shape, _read_count(hf_config, "model_length", 1024)
