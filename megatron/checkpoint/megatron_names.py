"""Names of tensors in Megatron's two families, legacy and core, and what each is in this model."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.config.schema import ModelConfig

# in a block: legacy, core with its own layers, core with Transformer Engine's -> one plain name
BLOCK = {
    "input_layernorm": "norm1",
    "self_attention.linear_qkv.layer_norm_": "norm1",
    "self_attention.query_key_value": "self_attention.qkv",
    "attention.query_key_value": "self_attention.qkv",
    "self_attention.linear_qkv": "self_attention.qkv",
    "self_attention.dense": "self_attention.out",
    "attention.dense": "self_attention.out",
    "self_attention.linear_proj": "self_attention.out",
    "post_attention_layernorm": "norm2",
    "pre_mlp_layernorm": "norm2",
    "mlp.linear_fc1.layer_norm_": "norm2",
    "mlp.dense_h_to_4h": "mlp.first",
    "mlp.linear_fc1": "mlp.first",
    "mlp.dense_4h_to_h": "mlp.second",
    "mlp.linear_fc2": "mlp.second",
    "self_attention.q_layernorm": "q_norm",
    "self_attention.k_layernorm": "k_norm",
}
OUTSIDE = re.compile(
    r"(?:.*\.)?(word_embeddings|position_embeddings|output_layer|final_(?:layer)?norm)"
    r"(?:_for_head)?\.(weight|bias)"
)
UNKNOWN = "unknown:"  # before the name of a tensor that no model here has
IN_BLOCK = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+?)\.?(weight|bias)")
OURS = {
    "norm1": "attention_norm",
    "norm2": "mlp_norm",
    "self_attention.out": "attention.out",
    "mlp.second": "mlp.down",
    "q_norm": "attention.query_norm",
    "k_norm": "attention.key_norm",
}
OURS_OUTSIDE = {
    "word_embeddings.weight": "embedding.weight",
    "position_embeddings.weight": "position_embedding.weight",
    "output_layer.weight": "unembedding.weight",
    "final_norm.weight": "norm.weight",
    "final_norm.bias": "norm.bias",
}


def plain_names(held: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors of one pipeline stage under plain names, without extra states. ValueError where two differ.

    A table of rotary frequencies keeps its name, and one that is not known has UNKNOWN before it.
    """
    named: dict[str, Tensor] = {}
    for name, tensor in _flat(held, ""):
        if name.endswith("_extra_state"):
            continue
        if found := IN_BLOCK.fullmatch(name):
            part = BLOCK.get(found[2], found[2])
            plain = f"layers.{found[1]}.{part}.{found[3]}"
        elif found := OUTSIDE.fullmatch(name):
            plain = f"{found[1].replace('layernorm', 'norm')}.{found[2]}"
        elif name.endswith("rotary_pos_emb.inv_freq"):
            plain = "rotary_pos_emb.inv_freq"
        else:
            plain = UNKNOWN + name
        if tensor.ndim not in (1, 2):
            raise ValueError(f"{name}: got {tensor.ndim} dimensions, expected 1 or 2")
        if plain in named and not torch.equal(named[plain], tensor):
            raise ValueError(f"{name}: differs from {plain} under another name, expected equal")
        named[plain] = tensor
    return named


def ours_outside(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor that is in no block, under our name."""
    return {OURS_OUTSIDE.get(name, name): tensor}


def ours_of_block(name: str, tensor: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    """One of Megatron's tensors as one or more of ours. An unknown name stays, and the model refuses it."""
    part, _, kind = name.rpartition(".")
    if part == "self_attention.qkv":
        shared = config.n_heads // config.kv_heads
        n_rows = config.kv_heads * (shared + 2) * config.d_head
        if len(tensor) != n_rows:
            raise ValueError(
                f"{name}: got {len(tensor)} rows, expected {n_rows} of {config.n_heads} heads, "
                f"{config.kv_heads} of keys, of {config.d_head} channels"
            )
        groups = tensor.unflatten(0, (config.kv_heads, shared + 2, config.d_head))  # [G, H / G + 2, K, ...]
        query, key, value = groups[:, :shared], groups[:, shared], groups[:, shared + 1]
        return {
            f"attention.query.{kind}": query.flatten(0, 2),
            f"attention.key.{kind}": key.flatten(0, 1),
            f"attention.value.{kind}": value.flatten(0, 1),
        }
    if part == "mlp.first":
        if config.feed_forward == "gelu":
            return {f"mlp.up.{kind}": tensor}
        gate, up = tensor.chunk(2)
        return {f"mlp.gate.{kind}": gate, f"mlp.up.{kind}": up}
    return {f"{OURS.get(part, part)}.{kind}": tensor}


def _flat(held: dict[str, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Nested dictionaries of tensors as dotted names."""
    if not isinstance(held, dict):
        raise ValueError(f"{prefix or 'model'}: got {type(held).__name__}, expected tensors by name")
    for key, value in held.items():
        name = f"{prefix}{key}"
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, dict):
            yield from _flat(value, name + ".")
