"""Map the tensor names of Megatron-LM's two families, legacy and core, to this model's names."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.config.schema import ModelConfig

# names in a block, of legacy, of core, and of core with Transformer Engine -> one plain name
MEGATRON_BLOCK_NAMES = {
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
# (?:.*\.)? skips the enclosing modules, as in "language_model.encoder.final_layernorm.weight". With pipeline
# parallelism the last stage has a copy of a tied embedding, "word_embeddings_for_head.weight".
OUTER_PATTERN = re.compile(
    r"(?:.*\.)?(word_embeddings|position_embeddings|output_layer|final_(?:layer)?norm)"
    r"(?:_for_head)?\.(weight|bias)"
)
UNKNOWN = "unknown:"  # prefix for tensors that this model does not have
# The dot before the kind is optional: Transformer Engine stores a norm inside the next matrix, as
# "linear_qkv.layer_norm_weight". It splits into "linear_qkv.layer_norm_" and "weight".
BLOCK_PATTERN = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+?)\.?(weight|bias)")
BLOCK_NAMES = {
    "norm1": "attention_norm",
    "norm2": "mlp_norm",
    "self_attention.out": "attention.out",
    "mlp.second": "mlp.down",
    "q_norm": "attention.query_norm",
    "k_norm": "attention.key_norm",
}
OUTER_NAMES = {
    "word_embeddings.weight": "embedding.weight",
    "position_embeddings.weight": "position_embedding.weight",
    "output_layer.weight": "unembedding.weight",
    "final_norm.weight": "norm.weight",
    "final_norm.bias": "norm.bias",
}


def normalize_names(stage: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of one pipeline stage under plain names, without extra states.

    A table of rotary frequencies keeps its name; an unknown tensor gets the prefix UNKNOWN. Raises ValueError
    if two different tensors map to one name.
    """
    named: dict[str, Tensor] = {}
    for name, tensor in _flatten_tables(stage, ""):
        if name.endswith("_extra_state"):
            continue
        if match := BLOCK_PATTERN.fullmatch(name):
            part = MEGATRON_BLOCK_NAMES.get(match[2], match[2])
            plain = f"layers.{match[1]}.{part}.{match[3]}"
        elif match := OUTER_PATTERN.fullmatch(name):
            plain = f"{match[1].replace('layernorm', 'norm')}.{match[2]}"
        # a buffer of the rotary embedding, checked by the caller
        elif name.endswith("rotary_pos_emb.inv_freq"):
            plain = "rotary_pos_emb.inv_freq"
        else:
            plain = UNKNOWN + name
        if tensor.ndim not in (1, 2):
            raise ValueError(f"{name}: got {tensor.ndim} dimensions, expected 1 or 2")
        if plain in named and not torch.equal(named[plain], tensor):
            raise ValueError(f"{name}: differs from {plain} under another name, expected equal tensors")
        named[plain] = tensor
    return named


def rename_outer_tensor(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return a tensor outside the blocks under this model's name."""
    return {OUTER_NAMES.get(name, name): tensor}


def convert_block_tensor(name: str, tensor: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    """Return a Megatron tensor of a block as one or more tensors of this model.

    An unknown name is kept, so that loading the model rejects it.
    """
    part, _, kind = name.rpartition(".")
    if part == "self_attention.qkv":
        shared = config.n_heads // config.kv_heads
        n_rows = config.kv_heads * (shared + 2) * config.d_head
        if len(tensor) != n_rows:
            raise ValueError(
                f"{name}: got {len(tensor)} rows, expected {n_rows}: {config.n_heads} query heads, "
                f"{config.kv_heads} key heads, d_head {config.d_head}"
            )
        # G groups, each with its H / G query heads, then its key head, then its value head
        # Example: 8 query heads and 2 key heads are 2 groups of 4 + 1 + 1 heads. A plain chunk(3) over the
        # rows would mix the three kinds.
        groups = tensor.unflatten(0, (config.kv_heads, shared + 2, config.d_head))  # [G, H / G + 2, K, ...]
        # [G, H / G, K, ...], [G, K, ...], [G, K, ...]; flattening restores the order of heads, 0 to H - 1
        query, key, value = groups[:, :shared], groups[:, shared], groups[:, shared + 1]
        return {
            f"attention.query.{kind}": query.flatten(0, 2),
            f"attention.key.{kind}": key.flatten(0, 1),
            f"attention.value.{kind}": value.flatten(0, 1),
        }
    if part == "mlp.first":
        if config.feed_forward != "swiglu":
            return {f"mlp.up.{kind}": tensor}
        # fused [gate; up] over rows
        # [2 F, D] -> 2 x [F, D]; _merge_ranks has put the gates of all tensor ranks first
        gate, up = tensor.chunk(2)
        return {f"mlp.gate.{kind}": gate, f"mlp.up.{kind}": up}
    return {f"{BLOCK_NAMES.get(part, part)}.{kind}": tensor}


def _flatten_tables(tables: dict[str, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dictionaries under dotted names."""
    if not isinstance(tables, dict):
        raise ValueError(
            f"{prefix or 'model'}: got {type(tables).__name__}, expected a dictionary of tensors"
        )
    for key, value in tables.items():
        name = f"{prefix}{key}"
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, dict):
            yield from _flatten_tables(value, name + ".")
