"""Map the tensor names of Megatron-LM's two families, legacy and core, to this model's names."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.convert.names import MEGATRON, import_names
from megatron.config.schema import ModelConfig

# names in a block -> the names of Megatron core with
# Transformer Engine, which has a table in names.py
CORE_BLOCK_NAMES = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm_",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "mlp.linear_fc1.layer_norm_",
    "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm_",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
# plain names outside the blocks -> the names of Megatron core
CORE_OUTER_NAMES = {
    "word_embeddings": "embedding.word_embeddings",
    "position_embeddings": "embedding.position_embeddings",
    "final_norm": "decoder.final_layernorm",
}
# (?:.*\.)? skips the enclosing modules, as in
# "language_model.encoder.final_layernorm.weight". With pipeline parallelism the
# last stage has a copy of a tied embedding, "word_embeddings_for_head.weight".
OUTER_PATTERN = re.compile(
    r"(?:.*\.)?(word_embeddings|position_embeddings|output_layer|final_(?:layer)?norm)"
    r"(?:_for_head)?\.(weight|bias)"
)
UNKNOWN = "unknown:"  # prefix for tensors that this model does not have
# The dot before the kind is optional: Transformer Engine stores a
# norm inside the next matrix, as "linear_qkv.layer_norm_weight".
# It splits into "linear_qkv.layer_norm_" and "weight".
BLOCK_PATTERN = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+?)\.?(weight|bias)")


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
            part = CORE_BLOCK_NAMES.get(match[2], match[2])
            plain = f"layers.{match[1]}.{part}{'' if part.endswith('_') else '.'}{match[3]}"
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


def convert_names(merged: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return merged tensors under this model's names. Raises ValueError for unknown ones."""
    core = {}
    for name, tensor in merged.items():
        module, _, kind = name.rpartition(".")
        outer = f"{CORE_OUTER_NAMES.get(module, module)}.{kind}"
        core[f"decoder.{name}" if name.startswith("layers.") else outer] = tensor
    return import_names(MEGATRON, core, config)


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
